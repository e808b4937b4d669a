"""launch/npu/slurm.sh at its time limit, with torchrun and two ranks; Slurm is played.

What stands in for srun does with signals what srun does (src/srun in Slurm's source): SIGTERM kills
the tasks at once, SIGUSR1 is forwarded to them.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launch.test_doctor import free_port
from tests.launch.test_npu_scripts import FOLDER, REPOSITORY, environment, tiny

pytestmark = pytest.mark.timeout(240)

SRUN = """#!{python}
import os, signal, subprocess, sys
words = [word for word in sys.argv[1:] if not word.startswith("--kill-on")]
task = subprocess.Popen(words, process_group=0)
signal.signal(signal.SIGTERM, lambda *_: os.killpg(task.pid, signal.SIGKILL))
signal.signal(signal.SIGUSR1, lambda *_: {forward})
code = task.wait()
sys.exit(code if code >= 0 else 128 - code)
"""
TO_THE_TASK = "task.send_signal(signal.SIGUSR1)"
TO_ALL = "os.killpg(task.pid, signal.SIGUSR1)"
"""As Slurm does where it follows processes without cgroups."""

SCONTROL = """#!/bin/sh
case "$1" in
show) echo localhost ;;
*) echo "$@" >>"$0.said" ;;
esac
"""


def batch(folder: Path, forward: str, *options: str) -> subprocess.Popen[str]:
    """Start the batch script, as Slurm does on the first node."""
    for name, text in (
        ("srun", SRUN.format(python=sys.executable, forward=forward)),
        ("scontrol", SCONTROL),
    ):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    own = environment(
        SLURM_SUBMIT_DIR=str(REPOSITORY),
        SLURM_NNODES="1",
        SLURM_JOB_ID="77",
        SLURM_JOB_NODELIST="localhost",
        NPROC="2",
        SLURM_TMPDIR=str(folder),
        MASTER_PORT=str(free_port()),
    )
    own["PATH"] = f"{folder}{os.pathsep}{own['PATH']}"
    return subprocess.Popen(
        ["bash", str(FOLDER / "slurm.sh"), *options],
        env=own,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


@contextlib.contextmanager
def ended(process: subprocess.Popen[str], folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Leave nothing of a job that a test gives up: the ranks have sessions of their own."""
    try:
        yield process
    finally:
        for path in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if f"SLURM_TMPDIR={folder}\0".encode() in (path / "environ").read_bytes():
                    os.kill(int(path.name), signal.SIGKILL)
        process.wait(10)


def signalled(process: subprocess.Popen[str], metrics: Path, number: int) -> str:
    """Send a signal to the script alone once the job has made steps; return all that it says."""
    before = metrics.stat().st_size if metrics.is_file() else 0
    deadline = time.monotonic() + 90
    while not metrics.is_file() or metrics.stat().st_size < before + 2000:
        assert time.monotonic() < deadline
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.1)
    process.send_signal(number)
    output, _ = process.communicate(timeout=60)
    return output


def test_submitted_from_another_folder(tmp_path: Path) -> None:
    """One line says what to do; a script that is started where it lies needs no such folder."""
    copy = tmp_path / "slurm_script"
    copy.write_text((FOLDER / "slurm.sh").read_text())
    for script, words in (
        (copy, "call sbatch from the repository's root"),
        (FOLDER / "slurm.sh", "name a recipe"),
    ):
        result = subprocess.run(
            ["bash", str(script)],
            env=environment(SLURM_SUBMIT_DIR=str(tmp_path)),
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        assert result.returncode == 2
        assert len(result.stderr.splitlines()) == 1
        assert words in result.stderr


@pytest.mark.parametrize("forward", [TO_THE_TASK, TO_ALL], ids=["to the task", "to all"])
def test_a_job_at_its_time_limit_is_saved_and_requeued(
    text_file: Path, tmp_path: Path, forward: str
) -> None:
    """SIGUSR1 saves, and has Slurm requeue it; it goes on there. SIGTERM saves, and ends it."""
    options = tiny(text_file, tmp_path, "--steps", "100000", "--log-every", "1")
    metrics, said = tmp_path / "run" / "metrics.jsonl", tmp_path / "scontrol.said"
    with ended(batch(tmp_path, forward, *options), tmp_path) as process:
        output = signalled(process, metrics, signal.SIGUSR1)
    saved = re.search(r"stopped and saved after step (\d+)", output)
    assert saved, output
    assert process.returncode == 0, output
    assert said.read_text() == "requeue 77\n"

    with ended(batch(tmp_path, forward, *options), tmp_path) as process:
        output = signalled(process, metrics, signal.SIGTERM)
    assert f"steps {saved[1]} to 100000" in output
    assert "stopped and saved after step" in output
    assert process.returncode != 0, output
    assert said.read_text() == "requeue 77\n"  # not once more
