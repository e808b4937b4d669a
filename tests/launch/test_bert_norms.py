"""What a run notes of its steps, and the report of it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from pretraining.kinds import KINDS, kind_of, layer_of
from pretraining.norm_curves import cost_of_watching, make_table
from pretraining.tensorboard import scalars_of

from tests.launch import jobs
from tests.launch.jobs import SMALL

pytestmark = pytest.mark.timeout(180)

REPORT = jobs.SCRIPT.with_name("report.py")


def report(run: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(REPORT), str(run)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_a_run_notes_norms_and_is_reported(tmp_path: Path, inputs: list[str]) -> None:
    """Every so many steps, also after a resume, with a ratio where LAMB takes one."""
    run = tmp_path / "run"
    arguments = [*inputs, *SMALL, "--norms-every", "2", "--run-dir", "run", "--save-every", "3"]
    jobs.run(tmp_path, [*arguments, "--steps", "9"], 2)
    records = jobs.records(run, "norms")
    assert [record["step"] for record in records] == [2, 4, 6, 8]
    rates = {record["step"]: record["lr"] for record in jobs.records(run, "train")}
    for record in records:
        assert record["lr"] == rates[record["step"]]
        assert record["clip"] == pytest.approx(min(1.0, 1 / record["grad_norm"]), rel=1e-4)
        for name, norms in record["tensors"].items():
            takes_none = kind_of(name) in ("bias", "LayerNorm")
            assert (norms["trust_ratio"] == 1) == takes_none, name
            if not takes_none:  # the definition of the trust ratio
                assert norms["update"] == pytest.approx(record["lr"] * norms["weight"], rel=1e-4)
    result = report(run)
    assert result.returncode == 0, result.stderr
    assert "4 watched steps" in result.stdout
    assert "attention output" in result.stdout
    assert (run / "norms.png").stat().st_size > 10_000


def test_norms_change_no_bit_of_a_run(tmp_path: Path, inputs: list[str]) -> None:
    losses = []
    for every in ("1", "0"):
        arguments = [*inputs, *SMALL, "--norms-every", every, "--run-dir", f"run{every}"]
        jobs.run(tmp_path, arguments, 2)
        run = tmp_path / f"run{every}"
        losses.append([record["loss"] for record in jobs.records(run, "train")])
        assert bool(jobs.records(run, "norms")) == (every == "1")
    assert losses[0] == losses[1]
    assert "no norms yet" in report(tmp_path / "run0").stderr
    assert report(tmp_path / "nothing").returncode == 2


def test_a_clip_that_is_always_active_is_said_once(tmp_path: Path, inputs: list[str]) -> None:
    arguments = [*inputs, *SMALL, "--norms-every", "1", "--max-grad-norm", "0.01"]
    output = jobs.run(tmp_path, [*arguments, "--steps", "14", "--run-dir", "run"], 2)
    assert output.count("The gradient was clipped") == 1
    (warning,) = jobs.records(tmp_path / "run", "warning")
    assert warning["step"] == 10
    assert warning["text"] in report(tmp_path / "run").stdout


def test_an_interrupted_run_has_the_same_norms(tmp_path: Path, inputs: list[str]) -> None:
    """On resume, what a lost try has noted is noted again, once."""
    arguments = [*inputs, *SMALL, "--norms-every", "2", "--save-every", "3", "--run-dir"]
    jobs.run(tmp_path, [*arguments, "whole"], 2)
    jobs.run(tmp_path, [*arguments, "run"], 2)
    whole, run = tmp_path / "whole", tmp_path / "run"
    newest = (run / "checkpoints" / "latest").read_text().strip()
    assert newest.endswith("8")
    for checkpoint in (run / "checkpoints").iterdir():
        if checkpoint.name == newest:
            checkpoint.rename(tmp_path / "gone")
    (run / "checkpoints" / "latest").unlink()
    jobs.run(tmp_path, ["--resume", "--run-dir", "run"], 2)
    assert jobs.records(run, "norms") == jobs.records(whole, "norms")


def test_kinds_are_told_by_names() -> None:
    names = {
        "bert.embeddings.word_embeddings.weight": ("embeddings", None),
        "bert.embeddings.LayerNorm.weight": ("LayerNorm", None),
        "bert.encoder.layer.11.attention.self.query.weight": ("attention query, key", 11),
        "bert.encoder.layer.0.attention.self.value.weight": ("attention value", 0),
        "bert.encoder.layer.0.attention.output.dense.weight": ("attention output", 0),
        "bert.encoder.layer.1.intermediate.dense.weight": ("feed-forward in", 1),
        "bert.encoder.layer.1.output.dense.weight": ("feed-forward out", 1),
        "bert.encoder.layer.1.output.dense.bias": ("bias", 1),
        "bert.pooler.dense.weight": ("heads", None),
        "cls.seq_relationship.weight": ("heads", None),
        "something.weight": ("other", None),
    }
    for name, (kind, layer) in names.items():
        assert (kind_of(name), layer_of(name)) == (kind, layer)
        assert kind in KINDS


NORMS = {
    "kind": "norms",
    "step": 4,
    "lr": 0.1,
    "grad_norm": 3.0,
    "clip": 0.25,
    "tensors": {
        "bert.encoder.layer.0.output.dense.weight": {
            "grad": 1.0, "weight": 2.0, "update": 0.2, "trust_ratio": 0.5, "vanished": 0.0,
        },
        "bert.encoder.layer.1.output.dense.weight": {
            "grad": 1.0, "weight": 4.0, "update": 0.8, "trust_ratio": 0.7, "vanished": 0.0,
        },
    },
}  # fmt: skip


def test_scalars_are_medians_over_a_kind() -> None:
    found = scalars_of(NORMS)
    assert found["trust_ratio/feed-forward out"] == pytest.approx(0.6)
    assert found["relative_update/feed-forward out"] == pytest.approx(0.15)
    assert (found["gradient/norm"], found["gradient/clip"]) == (3.0, 0.25)
    assert scalars_of({"kind": "train", "step": 1, "loss": 2.0, "lr": 0.1, "seconds": 1}) == {
        "train/loss": 2.0,
        "lr": 0.1,
    }
    assert scalars_of({"kind": "warning", "step": 1, "text": ""}) == {}


def test_the_table_has_a_line_for_each_kind() -> None:
    later = json.loads(json.dumps(NORMS)) | {"step": 8, "grad_norm": 1.5, "clip": 1.0}
    table = make_table([NORMS, later])
    assert "2 watched steps; the gradient was clipped in 1 of them; its norm 3 -> 1.5" in table
    assert "feed-forward out" in table
    assert "0.6 -> 0.6" in table


def test_the_cost_of_watching_is_told() -> None:
    train = [
        {"kind": "train", "step": step, "seconds": 0.1 + 0.02 * (step == 4)} for step in range(1, 9)
    ]
    assert cost_of_watching(train) == ""
    said = cost_of_watching([NORMS, *train])
    assert "took +20.0 ms beside the 100.0 ms" in said
    assert "+2.44% of the run's time, 1 of 8 steps" in said


def test_tensorboard_has_all_numbers(tmp_path: Path, inputs: list[str]) -> None:
    """Where it is installed; elsewhere the option is refused with the remedy."""
    arguments = [*inputs, *SMALL, "--norms-every", "2", "--tensorboard", "--run-dir", "run"]
    try:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    except ImportError:
        job = jobs.start(tmp_path, arguments, 2)
        assert job.wait() == [2, 2]
        assert "pip install tensorboard" in job.output()
        return
    jobs.run(tmp_path, arguments, 2)
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    losses = [record["loss"] for record in jobs.records(tmp_path / "run", "train")]
    assert [event.value for event in events.Scalars("train/loss")] == pytest.approx(losses)
    assert [event.step for event in events.Scalars("gradient/norm")] == [2, 4, 6, 8]
    assert events.Scalars("trust_ratio/embeddings")
