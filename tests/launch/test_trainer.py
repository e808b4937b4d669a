"""Hugging Face's Trainer on two gloo ranks, under its own DistributedDataParallel."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import trainer_runs as runs
from tests.support.trainer_runs import Job

pytestmark = pytest.mark.timeout(240)

EVERY_TWO = {"save_strategy": "steps", "save_steps": 2}
JOBS = {
    job.name: job
    for job in (
        Job("instance", arguments=EVERY_TWO),
        Job("resumed", resume="instance/checkpoint-4"),
        Job("class", how="class", variant="apex"),
        Job("unclipped", max_grad_norm=0.0),
        Job("bf16", bf16=True),
        Job(
            "best",
            arguments={
                "save_strategy": "best",
                "metric_for_best_model": "loss",
                "eval_strategy": "steps",
                "eval_steps": 3,
            },
        ),
        Job("epoch", arguments={"save_strategy": "epoch"}),
    )
}
# fp32 rounding of six steps, gradients through BERT included.
TOLERANCE = 5e-6


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("trainer")


@pytest.fixture(scope="module")
def ranks(folder: Path) -> list[dict[str, Any]]:
    return runs.launch(list(JOBS.values()), folder)


@pytest.mark.parametrize("name", ["instance", "class", "unclipped", "best"])
def test_equals_fp64_math_on_all_samples(name: str, ranks: list[dict[str, Any]]) -> None:
    """Params, logged gradient norms and learning rates are those of one large batch."""
    result = ranks[0][name]
    assert result["used"] == pytest.approx(runs.rates())
    assert result["logged"] == pytest.approx(runs.rates())
    expected, norms = runs.reference(JOBS[name], runs.rates())
    assert result["norms"] == pytest.approx(norms, rel=1e-6)
    assert runs.error(result["params"], expected) < TOLERANCE


@pytest.mark.parametrize("name", JOBS)
def test_ranks_agree_and_states_are_sharded(name: str, ranks: list[dict[str, Any]]) -> None:
    """Bitwise; DDP has the model, and the states are divided among its ranks."""
    for result in (ranks[0][name], ranks[1][name]):
        assert result["wrapper"] == "DistributedDataParallel"
        assert result["optimizer"] == "ShardedLamb"
        assert result["sharded_over"] == runs.WORLD
        for param, other in zip(result["params"], ranks[0][name]["params"], strict=True):
            assert torch.equal(param, other)


def test_clipping_is_seen() -> None:
    """The gradient is longer than max_grad_norm, so that the runs above differ."""
    clipped, norms = runs.reference(JOBS["instance"], runs.rates())
    unclipped, _ = runs.reference(JOBS["unclipped"], runs.rates())
    assert max(norms) > 1.4
    assert runs.max_relative_error(unclipped, clipped, clipped) > 100 * TOLERANCE


def test_bf16_autocast(ranks: list[dict[str, Any]]) -> None:
    """bf16=True: what a plain loop under autocast gives, and not what fp32 gives."""
    result = ranks[0]["bf16"]
    expected, norms = runs.reference_bf16(JOBS["bf16"], runs.rates())
    assert result["norms"][:1] == pytest.approx(norms[:1], rel=1e-5)
    # Where a sum of two ranks is rounded otherwise, so may be a bf16 product of any later step (of
    # which one, depends on the CPU): these differ by a fraction of the 4e-3 of one such rounding.
    assert result["norms"][1:] == pytest.approx(norms[1:], rel=1e-3)
    # Over all elements: the largest difference of one element is that of one product that rounded
    # otherwise, 1.6e-3 or 2.9e-3 of its tensor by the CPU.
    distance = runs.distance(result["params"], expected)
    assert distance < 2e-3
    assert runs.distance(result["params"], ranks[0]["instance"]["params"]) > 5 * distance


def test_resumed_run_is_uninterrupted_one(ranks: list[dict[str, Any]]) -> None:
    """From a checkpoint that Trainer saved and loaded by itself: two steps, the same bits."""
    for rank in ranks:
        assert rank["resumed"]["used"] == pytest.approx(runs.rates()[4:])
        pairs = zip(rank["resumed"]["params"], rank["instance"]["params"], strict=True)
        assert all(torch.equal(resumed, straight) for resumed, straight in pairs)


@pytest.mark.parametrize(
    ("name", "steps"), [("instance", [2, 4, 6]), ("best", [3]), ("epoch", [6])]
)
def test_checkpoints_have_whole_states(
    name: str, steps: list[int], folder: Path, ranks: list[dict[str, Any]]
) -> None:
    """optimizer.pt is torch's ordinary state dict, whatever decides when to save."""
    saved = sorted((folder / name).glob("checkpoint-*"))
    assert [int(path.name.removeprefix("checkpoint-")) for path in saved] == steps
    params = list(runs.build_model().parameters())
    for path, step in zip(saved, steps, strict=True):
        state = torch.load(path / "optimizer.pt", weights_only=True)["state"]
        assert {entry["step"] for entry in state.values()} == {step}
        shapes = {index: params[index].shape for index in state}
        assert shapes == {index: entry["exp_avg"].shape for index, entry in state.items()}
        assert len(state) == sum(param.requires_grad for param in params)
