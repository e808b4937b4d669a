"""Every diff of the page on moving a script makes a script that trains as the one before."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launch import moved
from tests.launch.moved import ROOT, SCRIPTS, Move

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.cpu_only("its processes are told nothing of it"),
]

MOVES = moved.moves()
ENDS_LATE = Path(__file__).with_name("ends_late.py")
RUNS_ONLY_AFTER = {"apex_lamb.py", "timm_lamb.py", "torch_npu_lamb.py", "paddle_lamb.py"}
"""Scripts that import packages which the tests do not have; edited, they need torch alone."""


def run(script: Path, path: Path, *, ends_late: bool = False) -> list[str]:
    """Return the lines that two ranks print."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", *[str(ENDS_LATE)] * ends_late, str(script), str(path)]
    done = subprocess.run(
        command,
        env=os.environ
        | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
        | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"},
        capture_output=True,
        text=True,
        timeout=200,  # DeepSpeed compiles an extension in its first minute
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return [line for line in done.stdout.splitlines() if line.startswith("step ")]


def losses(lines: list[str]) -> list[list[float]]:
    """Return the numbers of each line: the step, and losses."""
    return [[float(number) for number in re.findall(r"[\d.]+", line)] for line in lines]


CASES = [
    pytest.param(index, id=move.script, marks=[pytest.mark.exhaustive] if index else [])
    for index, move in enumerate(MOVES)
]


@pytest.mark.parametrize("index", CASES)
def test_an_edited_script_trains_as_before(index: int, tmp_path: Path) -> None:
    """Both run to the end, and once more from what they saved in the middle."""
    move = MOVES[index]
    if move.script == "deepspeed_zero.py":
        pytest.importorskip("deepspeed")
    after = tmp_path / move.script
    after.write_text(moved.edited(move))
    new = [run(after, tmp_path / "new")]
    assert new[0]
    if (tmp_path / "new").exists():
        new.append(run(after, tmp_path / "new"))
        assert new[1] == new[0][len(new[0]) // 2 :]
    if move.script in RUNS_ONLY_AFTER:
        found = losses(new[0])
        assert found[-1][1] < found[0][1] / 2
        return
    # Not the edited script: shardfuse waits for gloo's threads at exit.
    old = [run(SCRIPTS / move.script, tmp_path / "old", ends_late=True) for _ in new]
    for mine, theirs in zip(new, old, strict=True):
        for numbers, wanted in zip(losses(mine), losses(theirs), strict=True):
            assert numbers == pytest.approx(wanted, rel=1e-5, abs=2e-6)


def test_every_script_is_of_a_section() -> None:
    assert {move.script for move in MOVES} == {
        path.name for path in SCRIPTS.glob("*.py") if path.name != "__init__.py"
    }


def test_a_diff_that_does_not_fit_is_an_error() -> None:
    """Lines that are not in the script, and lines that are there twice."""
    for line in ("-    no_such_line()", "-"):
        with pytest.raises(ValueError, match="places"):
            moved.edited(Move("fsdp2.py", [[line]]))
