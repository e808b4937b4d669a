"""The BERT job whose model FSDP2 shards: the losses and checkpoints of the usual job."""

from __future__ import annotations

import random
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.launch import jobs, kills
from tests.launch.jobs import SMALL

pytestmark = [pytest.mark.timeout(240)]

ROUNDING = 1e-5


def run(cwd: Path, arguments: list[str], world_size: int) -> tuple[list[float], dict[str, Any]]:
    """Return the losses of the steps, and the last record of the held-out evaluation."""
    cwd.mkdir()
    jobs.run(cwd, [*arguments, "--run-dir", "run"], world_size)
    return jobs.losses(cwd / "run"), jobs.records(cwd / "run", "eval")[-1]


OPTIONS: dict[str, list[str]] = {
    "lamb": [],
    "adamw, micro-batches": ["--optimizer", "adamw", "--micro-batch-size", "2"],
    "bf16": ["--dtype", "bf16"],
    "fp16": ["--dtype", "fp16"],
}


@pytest.mark.parametrize("name", OPTIONS)
def test_losses_are_those_of_the_usual_job(tmp_path: Path, inputs: list[str], name: str) -> None:
    """On two ranks with FSDP2 and without; 13 held-out samples are not equally many on each."""
    arguments = [*inputs, *SMALL, *OPTIONS[name], "--eval-samples", "13"]
    usual, usual_held_out = run(tmp_path / "usual", arguments, 2)
    losses, held_out = run(tmp_path / "fsdp", [*arguments, "--fsdp"], 2)
    # Autocast rounds sums that differ in the last digit of fp32 to another bf16 or fp16.
    tolerance = ROUNDING if "1" not in name else 3e-3
    assert losses == pytest.approx(usual, rel=tolerance, abs=0)
    assert max(usual) - min(usual) > 0.02
    for key in ("mlm_loss", "nsp_loss"):
        assert held_out[key] == pytest.approx(usual_held_out[key], rel=tolerance, abs=0)
    assert ", FSDP2" in (tmp_path / "fsdp" / "rank-0.log").read_text()


def test_uneven_evaluations(tmp_path: Path, inputs: list[str]) -> None:
    """65 samples and 64, in batches of 64; one sample on three ranks: no rank waits for ever."""
    for world_size, number in ((2, "129"), (3, "1")):
        arguments = [*inputs, *SMALL, "--steps", "2", "--eval-samples", number]
        _, usual = run(tmp_path / f"usual-{world_size}", arguments, world_size)
        _, held_out = run(tmp_path / f"fsdp-{world_size}", [*arguments, "--fsdp"], world_size)
        assert held_out["mlm_loss"] == pytest.approx(usual["mlm_loss"], rel=ROUNDING)
        assert held_out["mlm_accuracy"] == usual["mlm_accuracy"]


def test_stop_and_resume(tmp_path: Path, inputs: list[str]) -> None:
    """Bitwise on as many ranks; to rounding on others, and where the usual job goes on."""
    options = [*inputs, *SMALL, "--steps", "60", "--run-dir", "run"]
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    whole.mkdir(), stopped.mkdir()
    jobs.run(whole, [*options, "--fsdp", "--save-every", "20"], 2)
    expected = jobs.losses(whole / "run")
    job = jobs.start(stopped, [*options, "--fsdp"], 2)
    jobs.wait_until(lambda: len(jobs.records(stopped / "run", "train")) > 3, "the first steps")
    job.signal_rank(1, signal.SIGTERM)
    assert job.wait() == [0, 0]
    assert 3 < len(jobs.losses(stopped / "run")) < 60
    jobs.run(stopped, ["--resume", "--run-dir", "run"], 2)
    assert jobs.losses(stopped / "run") == expected
    for world_size in (1, 3):
        # The usual job, which FSDP2 goes on with; steps after the checkpoint are made again.
        usual = tmp_path / f"usual-{world_size}"
        usual.mkdir()
        half = ["--steps", "60", "--save-every", "20"]
        job = jobs.start(usual, [*options, *half], world_size)
        folder = usual / "run" / "checkpoints"
        jobs.wait_until(lambda: kills.newest(folder) >= 20, "a checkpoint")  # noqa: B023
        job.signal(signal.SIGKILL)
        job.wait()
        jobs.run(usual, ["--resume", "--fsdp", "--run-dir", "run"], 2)
        assert jobs.losses(usual / "run") == pytest.approx(expected, rel=1e-4)


def test_killed(tmp_path: Path, inputs: list[str]) -> None:
    """In the course of saves, clean-ups and loads; the same command goes on, bitwise."""
    options = [*inputs, *SMALL, "--steps", "12", "--save-every", "2", "--fsdp"]
    options += ["--run-dir", "run", "--resume", "auto"]
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    whole.mkdir(), killed.mkdir()
    jobs.run(whole, options, 2)
    rng, last = random.Random(37), 0
    for number in range(4):
        text, fault = kills.draw(rng, 2)
        beside = ["--async-save"] if number % 2 else []
        job = jobs.start(killed, [*options, *beside], 2, fault)
        codes = job.wait()
        assert None not in codes, (text, job.output())
        step = kills.newest(killed / "run" / "checkpoints")
        assert step >= last, text
        last = step
    jobs.run(killed, options, 2)
    assert jobs.losses(killed / "run") == jobs.losses(whole / "run")


def test_two_phases(tmp_path: Path, inputs: list[str]) -> None:
    """What is handed from one phase to the next, and a dry run's plan."""
    from tests.launch.test_bert_phases import write_recipe

    for carry in ("weights", "moments"):
        folder = tmp_path / carry
        folder.mkdir()
        recipe = write_recipe(folder, carry)
        arguments = [*inputs, "--recipe", recipe, "--vocab-size", "120", "--eval-samples", "12"]
        usual, _ = run(folder / "usual", arguments, 2)
        losses, _ = run(folder / "fsdp", [*arguments, "--fsdp"], 2)
        assert losses == pytest.approx(usual, rel=ROUNDING, abs=0)
    text = jobs.run(tmp_path, ["--fsdp", "--dry-run", "4"], 0)
    assert "layers of FSDP2" in text


def test_one_process_is_not_sharded(tmp_path: Path, inputs: list[str]) -> None:
    """The option stays in the command when one rank is left."""
    arguments = [*inputs, *SMALL, "--steps", "3"]
    usual, _ = run(tmp_path / "usual", arguments, 0)
    losses, _ = run(tmp_path / "fsdp", [*arguments, "--fsdp"], 0)
    assert losses == usual


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--sharding", '{"stage": 2}'], "Invalid stage: 2 .*FSDP2 shards"),
        (["--bucket-cap-mb", "4"], "--bucket-cap-mb must be left out with --fsdp"),
    ],
)
def test_options_of_no_use(tmp_path: Path, options: list[str], text: str) -> None:
    """One line, and exit code 2."""
    import re

    line = jobs.refused(jobs.start(tmp_path, [*SMALL, "--fsdp", *options], 2))
    assert re.search(text, line)
