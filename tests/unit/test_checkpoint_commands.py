"""``python -m shardfuse inspect`` and ``verify``: what they print, and their exit codes."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from shardfuse import ShardedAdam
from shardfuse.__main__ import main
from shardfuse.checkpoint import Checkpoints
from tests.support.checkpoints import Job
from tests.support.harness import run_threads

pytestmark = pytest.mark.filterwarnings("ignore:.*fewer than two dimensions.*:UserWarning")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Return a folder of two checkpoints."""

    def write() -> None:
        job = Job(ShardedAdam)
        for step in (1, 2):
            job.train(1)
            Checkpoints(tmp_path).save(job.objects, step, info={"note": "mine"})

    run_threads(2, write)
    return tmp_path


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


def test_inspect(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A table, or all of it as JSON."""
    assert main(["inspect", str(run / "step-2")]) == 0
    text = capsys.readouterr().out
    assert "saved by 2 ranks" in text
    assert "note: mine" in text
    assert "optimizer.state.body.0.weight.exp_avg" in text
    assert main(["inspect", "--json", str(run / "step-2")]) == 0
    contents: dict[str, Any] = json.loads(capsys.readouterr().out)
    held = {entry["key"]: entry for entry in contents["held"]}
    assert held["model.body.0.weight"]["shape"] == [50, 40]
    assert held["model.halved"]["dtype"] == "bfloat16"
    assert held["optimizer.param_groups.0.lr"]["dtype"] == ""
    assert sum(entry["nbytes"] for entry in held.values()) < contents["nbytes"]


def test_verify(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One checkpoint or all; 1 where any is damaged."""
    assert main(["verify", str(run)]) == 0
    assert capsys.readouterr().out.count(": whole") == 2
    flip(run / "step-1" / "__1_0.distcp")
    assert main(["verify", str(run / "step-2")]) == 0
    assert main(["verify", str(run)]) == 1
    text = capsys.readouterr().out
    assert "step-1: DAMAGED" in text
    assert "in __1_0.distcp of step-1 is damaged" in text
    assert main(["verify", "--json", str(run)]) == 1
    verdicts = json.loads(capsys.readouterr().out)
    assert [bool(verdict["faults"]) for verdict in verdicts] == [False, True]


@pytest.mark.parametrize("name", [".metadata", "manifest.json", "part-0.json"])
def test_verify_reads_every_file(run: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Also those that say what lies where."""
    flip(run / "step-2" / name)
    assert main(["verify", str(run / "step-2")]) == 1
    assert name in capsys.readouterr().out


def test_a_run_is_not_a_checkpoint(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its folder is not called damaged: what is in it is named."""
    for command in (["inspect"], ["export", "--model", str(run / "model.safetensors")]):
        assert main([*command, str(run)]) == 2
        error = capsys.readouterr().err
        assert f"{run} is a folder of checkpoints. Name one: step-1, step-2." in error
    assert main(["export", str(run / "step-1")]) == 2
    assert "give --model FILE, --optimizer FILE or both" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["inspect", "export"])
def test_a_run_folder_names_its_checkpoints(
    run: Path, command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run has its checkpoints one folder deeper; step-10 is newer than step-2."""
    whole = run / "run" / "checkpoints"
    whole.mkdir(parents=True)
    (run / "run" / "records.json").write_text("{}")
    (run / "step-1").rename(whole / "step-10")
    (run / "step-2").rename(whole / "step-2")
    options = ["--model", str(tmp_path / "m.pt")] if command == "export" else []
    assert main([command, str(run / "run"), *options]) == 2
    error = capsys.readouterr().err
    assert "DAMAGED" not in error
    assert f"checkpoints/step-2, checkpoints/step-10. The newest is {whole / 'step-10'}." in error
    assert main(["verify", str(run / "run")]) == 0
    assert capsys.readouterr().out.count(": whole") == 2


def test_a_run_without_checkpoints_is_not_damaged_in_silence(run: Path) -> None:
    """A checkpoint without its manifest stays damaged."""
    (run / "step-2" / "manifest.json").unlink()
    assert main(["inspect", str(run / "step-2")]) == 1


def test_export_writes_the_mode_of_the_umask(run: Path, tmp_path: Path) -> None:
    """safetensors makes files that only their owner reads."""
    pytest.importorskip("safetensors")
    before = os.umask(0o027)
    try:
        for name in ("m.safetensors", "m.pt"):
            assert main(["export", str(run / "step-2"), "--model", str(tmp_path / name)]) == 0
            assert (tmp_path / name).stat().st_mode & 0o777 == 0o640
    finally:
        os.umask(before)


def test_wrong_use(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A folder without a checkpoint; one command as a process of its own."""
    folder = str(tmp_path / "nothing")
    assert main(["inspect", folder]) == 2
    assert "There is no checkpoint" in capsys.readouterr().err
    result = subprocess.run(
        [sys.executable, "-m", "shardfuse", "verify", folder],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.returncode == 2, result.stderr
    assert "There is no checkpoint" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_file_that_cannot_be_written_is_one_line(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything is read where no file can be; what was there stays where the disk is full."""
    states = run / "states.pt"
    assert main(["export", str(run / "step-2"), "--optimizer", str(states)]) == 0
    for path in (run, run / "none" / "a.pt"):
        for arguments in (
            ["export", str(run / "step-2"), "--model", str(path)],
            ["import", "torch", str(states), "--to", str(path)],
        ):
            assert main(arguments) == 2
            (line,) = capsys.readouterr().err.splitlines()
            assert line.startswith(f"{path} ")

    def break_off(state: Any, path: Path) -> None:
        path.write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    before = states.read_bytes()
    monkeypatch.setattr(torch, "save", break_off)
    assert main(["export", str(run / "step-2"), "--optimizer", str(states)]) == 2
    assert "free some space" in capsys.readouterr().err
    assert states.read_bytes() == before
    assert not list(run.glob(".*"))
