"""Whole runs on small text: equal on any number of ranks, resumable, refused in one line."""

from __future__ import annotations

import json
import math
import shutil
import signal
from pathlib import Path

import pytest
import torch
from pretraining.metrics import MetricsFile, read_records

from tests.launch import jobs
from tests.launch.jobs import SMALL

OPTIMIZERS = ["lamb", "adamw", "adam", "bertadam", "muon", "sgd"]

ROUNDING = 2e-5
"""fp32 sums in another order, over a few steps; a wrong gradient scale is off by far more."""

pytestmark = pytest.mark.timeout(120)


def _losses(cwd: Path, arguments: list[str], world_size: int) -> list[float]:
    cwd.mkdir()
    jobs.run(cwd, [*arguments, "--run-dir", "run"], world_size)
    return jobs.losses(cwd / "run")


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_two_ranks_train_as_one_with_the_doubled_batch(
    tmp_path: Path, inputs: list[str], optimizer: str
) -> None:
    """Same global batch, same losses to rounding, in training and held out."""
    arguments = [*inputs, *SMALL, "--optimizer", optimizer]
    one = _losses(tmp_path / "one", arguments, 1)
    two = _losses(tmp_path / "two", arguments, 2)
    assert len(one) == 8
    assert two == pytest.approx(one, rel=ROUNDING, abs=0)
    # The comparison would mean little if nothing were learnt.
    assert max(one) - min(one) > 0.02
    held_out = [jobs.records(tmp_path / name / "run", "eval")[-1] for name in ("one", "two")]
    assert held_out[1]["mlm_loss"] == pytest.approx(held_out[0]["mlm_loss"], rel=ROUNDING, abs=0)
    assert held_out[1]["mlm_accuracy"] == held_out[0]["mlm_accuracy"]


@pytest.mark.parametrize("world_size", [0, 3, 4])
def test_other_worlds_and_micro_batches_give_the_same_losses(
    tmp_path: Path, inputs: list[str], world_size: int
) -> None:
    """No launcher at all, three and four ranks; accumulation over micro-batches of one sample."""
    arguments = [*inputs, *SMALL]
    one = _losses(tmp_path / "one", arguments, 1)
    other = _losses(tmp_path / "other", [*arguments, "--micro-batch-size", "1"], world_size)
    assert other == pytest.approx(one, rel=ROUNDING, abs=0)


@pytest.mark.parametrize(("dtype", "tolerance"), [("bf16", 2e-2), ("fp16", 3e-3)])
def test_low_precision_follows_full_precision(
    tmp_path: Path, inputs: list[str], dtype: str, tolerance: float
) -> None:
    """Autocast losses stay within a few units of the type's precision of the fp32 ones."""
    full = _losses(tmp_path / "fp32", [*inputs, *SMALL], 2)
    low = _losses(tmp_path / dtype, [*inputs, *SMALL, "--dtype", dtype], 2)
    assert low == pytest.approx(full, rel=tolerance, abs=0)
    assert low != full
    last = jobs.records(tmp_path / dtype / "run", "train")[-1]
    assert ("loss_scale" in last) == (dtype == "fp16")


def test_clipping_bounds_the_norm_that_is_reported_before_it(
    tmp_path: Path, inputs: list[str]
) -> None:
    """A tiny bound changes SGD's losses from the second step on, and no bound reports no norm."""
    arguments = [*inputs, *SMALL, "--optimizer", "sgd"]
    free = _losses(tmp_path / "free", [*arguments, "--max-grad-norm", "0"], 1)
    bound = _losses(tmp_path / "bound", [*arguments, "--max-grad-norm", "1e-9"], 2)
    assert bound[0] == pytest.approx(free[0], rel=ROUNDING)
    assert abs(bound[-1] - free[-1]) > 1e-3
    assert "grad_norm" not in jobs.records(tmp_path / "free" / "run", "train")[0]
    assert jobs.records(tmp_path / "bound" / "run", "train")[0]["grad_norm"] > 0.1


@pytest.mark.parametrize(
    "sharding",
    ["{}", '{"stage": 2, "grad_sync_bits": 8, "param_sync_bits": 4}'],
    ids=["default", "fewer-bits"],
)
def test_a_stopped_run_resumes_with_the_losses_of_an_uninterrupted_one(
    tmp_path: Path, inputs: list[str], sharding: str
) -> None:
    """SIGTERM to one rank stops both at the same step, and dropout goes on where it was."""
    options = [*SMALL, "--steps", "80", "--dropout", "0.1", "--run-dir", "run"]
    options += ["--sharding", sharding]
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    whole.mkdir(), stopped.mkdir()
    jobs.run(whole, [*inputs, *options], 2)
    job = jobs.start(stopped, [*inputs, *options], 2)
    jobs.wait_until(lambda: len(jobs.records(stopped / "run", "train")) > 3, "the first steps")
    job.signal_rank(1, signal.SIGTERM)
    assert job.wait() == [0, 0]
    num_done = len(jobs.losses(stopped / "run"))
    assert 3 < num_done < 80
    assert f"stopped and saved after step {num_done} of 80" in job.output()
    assert (stopped / "run" / "checkpoints" / "latest").read_text() == f"step-{num_done}"
    jobs.run(stopped, ["--resume", "--run-dir", "run"], 2)
    assert jobs.losses(stopped / "run") == jobs.losses(whole / "run")


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_run_resumes_on_another_number_of_ranks(
    tmp_path: Path, inputs: list[str], optimizer: str
) -> None:
    """Saved by two ranks, continued by three; what was written after the checkpoint is redone."""
    arguments = [*inputs, *SMALL, "--optimizer", optimizer, "--save-every", "5"]
    whole = _losses(tmp_path / "whole", arguments, 1)
    folder = tmp_path / "moved"
    assert _losses(folder, arguments, 2) == pytest.approx(whole, rel=ROUNDING, abs=0)
    checkpoints = folder / "run" / "checkpoints"
    assert sorted(p.name for p in checkpoints.iterdir()) == ["latest", "step-5", "step-8"]
    shutil.rmtree(checkpoints / "step-8")
    jobs.run(folder, ["--resume", "--run-dir", "run"], 3)
    assert jobs.losses(folder / "run") == pytest.approx(whole, rel=ROUNDING, abs=0)


def test_two_checkpoints_are_kept_and_leftovers_cleared(tmp_path: Path, inputs: list[str]) -> None:
    """Fourteen steps, one checkpoint every three, and one left unfinished by a killed try."""
    arguments = [*inputs, *SMALL, "--steps", "14", "--save-every", "3", "--run-dir", "run"]
    leftover = tmp_path / "run" / "checkpoints" / ".step-3.unfinished"
    jobs.run(tmp_path, [*arguments, "--steps", "14"], 2)
    leftover.mkdir()
    (leftover / "__0_0.distcp").write_text("half")
    checkpoints = leftover.parent
    shutil.rmtree(checkpoints / "step-14")
    jobs.run(tmp_path, ["--resume", "--run-dir", "run"], 2)
    assert sorted(path.name for path in checkpoints.iterdir()) == ["latest", "step-12", "step-14"]
    assert (checkpoints / "latest").read_text() == "step-14"


def test_resume_before_the_first_checkpoint_starts_over(tmp_path: Path, inputs: list[str]) -> None:
    """A run killed early has metrics and no checkpoint; its steps are not counted twice."""
    arguments = [*inputs, *SMALL, "--run-dir", "run"]
    jobs.run(tmp_path, arguments, 1)
    before = jobs.losses(tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    output = jobs.run(tmp_path, ["--resume", "--run-dir", "run"], 1)
    assert "has no checkpoint yet: starting from step 0" in output
    assert jobs.losses(tmp_path / "run") == before
    assert len(jobs.records(tmp_path / "run", "eval")) == 2


@pytest.mark.parametrize("world_size", [0, 2])
def test_text_that_cannot_be_used_is_refused_by_all_ranks(
    tmp_path: Path, data_dir: Path, world_size: int
) -> None:
    """Only rank 0 reads the text; the others hear of it, keep silent and exit with 2 as well."""
    text = tmp_path / "text.txt"
    text.write_text("only one document\nof two sentences\n")
    job = jobs.start(tmp_path, ["--corpus", str(text), "--data-dir", str(data_dir)], world_size)
    assert job.wait() == [2] * max(1, world_size)
    errors = [line for line in job.output().splitlines() if "error" in line]
    assert len(errors) == 1
    assert errors[0].startswith("pretrain.py: error: --corpus: found 1 different documents")
    assert not (tmp_path / "runs").exists()


def test_a_run_directory_of_another_text_is_refused(
    tmp_path: Path, inputs: list[str], text_file: Path
) -> None:
    """The options may be the same; what was trained on is compared by contents."""
    jobs.run(tmp_path, [*inputs, *SMALL, "--run-dir", "run"], 1)
    other = tmp_path / "other.txt"
    other.write_text(text_file.read_text() + "\nOne more.\nAnd one more.\n")
    job = jobs.start(tmp_path, ["--resume", "--run-dir", "run", "--corpus", str(other)], 2)
    assert job.wait() == [2, 2]
    assert job.output().count("error") == 1
    assert "run was made with another text" in job.output()


def test_a_rebuilt_vocabulary_is_refused(tmp_path: Path, text_file: Path) -> None:
    """Building it again from the same text may number the word pieces differently."""
    arguments = ["--corpus", str(text_file), "--data-dir", "data"]
    jobs.run(tmp_path, [*arguments, *SMALL, "--run-dir", "run"], 0)
    (path,) = (tmp_path / "data").glob("prepared-*/index.json")
    index = json.loads(path.read_text())
    index["summary"]["digest"] = index["summary"]["digest"][:-1] + "?"
    path.write_text(json.dumps(index))
    job = jobs.start(tmp_path, ["--resume", "--run-dir", "run"], 0)
    assert job.wait() == [2]
    assert "another text or vocabulary" in job.output()


def test_a_loss_that_is_not_finite_ends_the_run(tmp_path: Path, inputs: list[str]) -> None:
    """All ranks see the same loss, so all exit alike, and no checkpoint holds the wreck."""
    arguments = [*inputs, *SMALL, "--optimizer", "sgd", "--lr", "1e30", "--max-grad-norm", "0"]
    job = jobs.start(tmp_path, [*arguments, "--run-dir", "run"], 2)
    assert job.wait() == [2, 2]
    assert "lower --lr" in job.output()
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_the_held_out_baseline_is_the_loss_without_context(
    tmp_path: Path, inputs: list[str]
) -> None:
    """Printed next to the held-out loss, which a few steps bring down from ln(vocabulary)."""
    output = jobs.run(tmp_path, [*inputs, *SMALL, "--steps", "40", "--run-dir", "run"], 2)
    scores = jobs.records(tmp_path / "run", "eval")
    assert [score["step"] for score in scores] == [0, 40]
    vocab_size = int(output.split("vocabulary of ")[1].split()[0].rstrip(";"))
    assert scores[0]["mlm_loss"] == pytest.approx(math.log(vocab_size), abs=0.3)
    assert scores[1]["mlm_loss"] < scores[0]["mlm_loss"] - 0.3
    unigram = float(output.split("held-out masked tokens: ")[1].split(",")[0])
    assert 2.0 < unigram < math.log(vocab_size)
    verdict = "not beaten" if scores[1]["mlm_loss"] >= unigram else "beaten"
    assert f"{unigram:.4f}, {verdict}\n" in output


def test_a_cut_off_metrics_line_is_dropped(tmp_path: Path) -> None:
    """A killed run may leave half a line; opening the file mends it and drops later steps."""
    path = tmp_path / "metrics.jsonl"
    lines = [json.dumps({"kind": "train", "step": step, "loss": 0.1}) for step in (1, 2, 3)]
    path.write_text("\n".join(lines) + '\n{"kind": "tra')
    assert [record["step"] for record in read_records(path)] == [1, 2, 3]
    metrics = MetricsFile(path, first_step=2, num_phases=1)
    metrics.write({"kind": "train", "step": 3, "loss": 0.2})
    metrics.close()
    assert [(r["step"], r["loss"]) for r in read_records(path)] == [(1, 0.1), (2, 0.1), (3, 0.2)]


def test_dropout_is_another_on_every_rank_and_step() -> None:
    """The seeds differ pairwise, and torch accepts them."""
    from pretraining.training import _dropout_seed

    seeds = {_dropout_seed(s, r, t) for s in range(3) for r in range(4) for t in range(50)}
    assert len(seeds) == 600
    for seed in seeds:
        torch.Generator().manual_seed(seed)
