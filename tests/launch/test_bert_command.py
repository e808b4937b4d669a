"""The real command: torchrun, two gloo ranks, signals and a rank that dies."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launch import jobs
from tests.launch.jobs import SMALL

pytestmark = pytest.mark.timeout(240)


def _is_training(run_dir: Path, num_steps: int) -> bool:
    return len(jobs.records(run_dir, "train")) >= num_steps


def test_a_killed_rank_ends_the_job_and_resume_continues_it(
    tmp_path: Path, inputs: list[str]
) -> None:
    """SIGKILL to rank 1: torchrun exits with an error; the resumed losses are those of a whole run.

    The resumed command then trains to the end and leaves the curve, the metrics and the summary.
    """
    options = [*SMALL, "--steps", "60", "--save-every", "5", "--run-dir", "run"]
    run_dir = tmp_path / "run"
    process = jobs.start_command(tmp_path, [*inputs, *options], 2)
    jobs.wait_until(
        lambda: process.poll() is not None or _is_training(run_dir, 8), "the first steps", 120
    )
    assert process.poll() is None, process.communicate()
    os.kill(jobs.rank_of(process.pid, rank=1), signal.SIGKILL)
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 1, stdout + stderr
    saved_step = int((run_dir / "checkpoints" / "latest").read_text().removeprefix("step-"))
    assert 5 <= saved_step < 60
    assert not (run_dir / "loss.png").exists()

    resumed = jobs.start_command(tmp_path, ["--resume", "--run-dir", "run"], 2)
    stdout, stderr = resumed.communicate(timeout=180)
    assert resumed.returncode == 0, stdout + stderr
    assert f"steps {saved_step} to 60" in stdout
    whole = tmp_path / "whole"
    whole.mkdir()
    jobs.run(whole, [*inputs, *options], 2, timeout=180)
    assert jobs.losses(run_dir) == jobs.losses(whole / "run")
    assert (run_dir / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert "held-out MLM loss: " in stdout
    assert "2 ranks" in stdout
    # Not a terminal: no bar, so no carriage returns, and each line was printed by one rank.
    assert "\r" not in stdout + stderr
    lines = [line for line in stdout.splitlines() if line]
    assert len(set(lines)) == len(lines)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_torchrun_saves_and_stops(
    tmp_path: Path, inputs: list[str], number: signal.Signals
) -> None:
    """torchrun passes the signal on; both ranks stop after the same step and say how to go on."""
    options = [*SMALL, "--steps", "100000", "--run-dir", "run"]
    process = jobs.start_command(tmp_path, [*inputs, *options], 2)
    jobs.wait_until(
        lambda: process.poll() is not None or _is_training(tmp_path / "run", 3), "steps", 120
    )
    process.send_signal(number)
    stdout, stderr = process.communicate(timeout=60)
    num_done = len(jobs.losses(tmp_path / "run"))
    assert f"stopped and saved after step {num_done} of 100000" in stdout, stdout + stderr
    assert (tmp_path / "run" / "checkpoints" / "latest").read_text() == f"step-{num_done}"
    assert "Error" not in "".join(line for line in stderr.splitlines() if "pretrain" in line)


@pytest.mark.parametrize(
    ("program", "module", "options", "extra"),
    [
        ("bert/pretrain.py", "tokenizers", ["--steps", "2"], "bert"),
        ("bert/export.py", "transformers", ["run", "out"], "bert"),
        (
            "deepspeed/train_bert.py",
            "deepspeed",
            ["--deepspeed-config", "launch/deepspeed/configs/stage1_lamb.json"],
            "bert,deepspeed",
        ),
    ],
)
def test_a_forgotten_extra(program: str, module: str, options: list[str], extra: str) -> None:
    """One line that says what to install, before anything is prepared."""
    code = (
        f"import runpy, sys; sys.modules['{module}'] = None; "
        f"sys.argv = {[program, *options]}; "
        f"runpy.run_path('launch/{program}', run_name='__main__')"
    )
    result = subprocess.run(
        [sys.executable, "-c", code],
        cwd=jobs.REPOSITORY,
        env=os.environ | {"PYTHONPATH": str(jobs.REPOSITORY / "launch" / "bert")},
        capture_output=True,
        text=True,
        timeout=100,
    )
    line = f"{Path(program).name}: error: {module} is not installed: pip install -e '.[{extra}]'"
    assert result.stderr.splitlines()[-1] == line, result.stderr
    assert "Traceback" not in result.stderr
    assert not result.stdout
    assert result.returncode == 2
