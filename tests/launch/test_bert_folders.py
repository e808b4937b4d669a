"""Two jobs at once, and folders and text that cannot be used: one line, exit code 2."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from tests.launch import faults, jobs
from tests.launch.faults import Fault, on_rank
from tests.launch.jobs import RESUME, RUN, SMALL, snapshot

pytestmark = pytest.mark.timeout(120)

# Two jobs.


@pytest.mark.parametrize("arguments", [RESUME, RUN], ids=["resume", "new"])
def test_a_second_job_on_a_run_directory_is_refused_while_the_first_lives(
    tmp_path: Path, inputs: list[str], arguments: tuple[str, ...]
) -> None:
    """The message names the first; once that is killed nothing of it is in the way."""
    first = jobs.start(tmp_path, [*inputs, *RUN, "--steps", "100000"], 0)
    jobs.wait_until((tmp_path / "run" / "checkpoints" / "latest").exists, "a checkpoint")
    second = tmp_path / "second"
    second.mkdir()
    options = [*inputs] if arguments is RUN else []
    options += [*arguments, "--run-dir", str(tmp_path / "run")]
    line = jobs.refused(jobs.start(second, options, 2))
    assert f"is in use by process {first.ranks[0].pid} on {os.uname().nodename} since" in line
    first.signal(signal.SIGKILL)
    assert first.wait() == [-signal.SIGKILL]
    resumed = jobs.start(second, ["--resume", "--run-dir", str(tmp_path / "run")], 2)
    jobs.wait_until(lambda: "steps " in resumed.output(), "the resumed run")
    resumed.signal(signal.SIGTERM)
    assert resumed.wait() == [0, 0], resumed.output()


def test_two_jobs_prepare_one_text_at_once(tmp_path: Path, text_file: Path) -> None:
    """Both train, each in a numbered directory of its own, on what one of them prepared."""
    data = tmp_path / "data"
    options = ["--corpus", str(text_file), "--data-dir", str(data), *SMALL, "--steps", "1"]
    together = [jobs.start(tmp_path, options, 0) for _ in range(2)]
    assert [job.wait() for job in together] == [[0], [0]], [job.output() for job in together]
    (prepared,) = data.glob("prepared-*")
    digest = json.loads((prepared / "index.json").read_text())["summary"]["digest"]
    configs = [tmp_path / "runs" / f"bert-{n:03d}" / "config.json" for n in (1, 2)]
    assert [json.loads(c.read_text())["corpus_digest"] for c in configs] == [digest, digest]


# Folders that cannot be used.


def _no_fault(rank: int) -> None:
    """Nothing."""


@pytest.mark.parametrize(
    ("options", "fault", "message"),
    [
        (["--run-dir", "file"], _no_fault, "--run-dir file is a file; name a folder"),
        (["--run-dir", "file/run"], _no_fault, "--run-dir file/run: Not a directory"),
        (["--run-dir", "/proc/no/run"], _no_fault, "--run-dir /proc/no/run: No such file"),
        (["--data-dir", "file"], _no_fault, "--data-dir file: "),
        (["--data-dir", "data"], on_rank(0, partial(faults.small_files, 1000)), "free some space"),
        (["--seq-len", "9999"], _no_fault, "--seq-len must be at most 512, the positions that"),
    ],
    ids=["file", "below-file", "proc", "data", "data-full", "seq-len"],
)
def test_a_folder_that_cannot_be_written_is_one_line(
    tmp_path: Path, inputs: list[str], options: list[str], fault: Fault, message: str
) -> None:
    """On all ranks, and nothing is left behind."""
    (tmp_path / "file").write_text("text")
    run_dir = ["--run-dir", "run"] if "--run-dir" not in options else []
    job = jobs.start(tmp_path, [*inputs, *SMALL, *run_dir, *options], 2, fault)
    assert message in jobs.refused(job)
    left = {path.name for path in tmp_path.rglob("*")} - {"rank-0.log", "rank-1.log"}
    assert left <= {"file", "data", ".lock"}
    assert (tmp_path / "file").read_text() == "text"


def test_a_full_disk_while_text_is_prepared_is_one_line(
    tmp_path: Path, text_file: Path, small_disk: Callable[[str], Path]
) -> None:
    """What was built so far is removed, so the disk is as empty as before."""
    data = small_disk("16k")
    options = ["--corpus", str(text_file), "--data-dir", str(data), *RUN]
    line = jobs.refused(jobs.start(tmp_path, options, 2))
    assert f"--data-dir {data}: " in line
    assert [path.name for path in data.iterdir()] == [".lock"]


@pytest.mark.parametrize("damage", ["text", "tokens", "index"])
def test_text_that_is_gone_or_damaged_is_one_line(
    tmp_path: Path, text_file: Path, damage: str
) -> None:
    """Between a run and --resume; the run keeps its checkpoints."""
    data = tmp_path / "data"
    data.mkdir()
    text = data / "text.txt"
    shutil.copy(text_file, text)
    inputs = ["--corpus", str(text), "--data-dir", str(data)]
    jobs.run(tmp_path, [*inputs, *RUN, "--steps", "1"], 0)
    (prepared,) = data.glob("prepared-*")
    if damage == "text":
        text.unlink()
    elif damage == "tokens":
        os.truncate(prepared / "shard-00000.bin", 200)
    else:
        (prepared / "index.json").write_text("{}")
    before = snapshot(tmp_path / "run")
    line = jobs.refused(jobs.start(tmp_path, RESUME, 2))
    assert (
        "text.txt is not a file or folder; restore it" if damage == "text" else "cannot be read"
    ) in line
    assert snapshot(tmp_path / "run") == before


# The real command.


def test_torchrun_s_report_ends_with_the_one_line(copied: Path) -> None:
    """A used directory: the line comes first and, below torchrun's own traceback, last."""
    process = jobs.start_command(copied.parent, ["--run-dir", "run"], 2)
    _, stderr = process.communicate(timeout=60)
    line = "pretrain.py: error: --run-dir run is not empty; pass --resume"
    assert process.returncode == 1
    assert stderr.count("\n" + line) + stderr.startswith(line) == 1
    cause = stderr.partition("Root Cause")[2]
    assert "exitcode  : 2" in cause
    assert f"traceback : {line}" in cause
    assert "pretraining" not in stderr


def test_a_late_rank_of_torchrun_shares_the_default_run_directory(
    tmp_path: Path, inputs: list[str]
) -> None:
    """Rank 1 starts seconds after rank 0, which decides once all are there; the run is whole."""
    script = '[ "$RANK" = 0 ] || sleep 5; exec "$0" "$@"'
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    command += ["2", "--no-python", "bash", "-c", script, sys.executable, str(jobs.SCRIPT)]
    path = os.pathsep.join(filter(None, [str(jobs.REPOSITORY), os.environ.get("PYTHONPATH")]))
    result = subprocess.run(
        [*command, *inputs, *SMALL, "--steps", "2"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    (run,) = (tmp_path / "runs").glob("bert-*")
    names = {path.name for path in (run / "checkpoints" / "step-2").iterdir()}
    parts = {"__0_0.distcp", "__1_0.distcp", "part-0.json", "part-1.json"}
    assert names == parts | {".metadata", "manifest.json"}
    assert "steps 2 to 2" in jobs.run(tmp_path, ["--resume"], 2)
