"""Real processes over gloo: two ranks train a module as one does on the doubled batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from shardfuse import ShardedAdam, ShardedAdamW, ShardedBertAdam, ShardedLamb, ShardedSGD
from tests.support.harness import run_procs, run_threads
from tests.support.models import TiedModel

pytestmark = pytest.mark.timeout(120)

# name: (class, options). A large eps keeps elements whose gradient is rounding noise from being
# amplified to full-size steps of either sign.
OPTIMIZERS: dict[str, tuple[Callable[..., torch.optim.Optimizer], dict[str, Any]]] = {
    "sgd": (ShardedSGD, {"lr": 0.02, "momentum": 0.9, "nesterov": True}),
    "adam": (ShardedAdam, {"lr": 0.02, "eps": 1e-3}),
    "adamw": (ShardedAdamW, {"lr": 0.02, "eps": 1e-3, "weight_decay": 0.1}),
    "bert": (ShardedBertAdam, {"lr": 0.02, "e": 1e-3, "warmup": 0.1, "t_total": 20}),
    "lamb": (ShardedLamb, {"lr": 0.02, "eps": 1e-3, "use_global_grad_norm": True}),
}
LOSS_TOLERANCE = 1e-5
PARAM_TOLERANCE = 1e-4
NUM_STEPS = 6
BATCH = 12


class Outcome(NamedTuple):
    losses: list[float]
    params: dict[str, Tensor]


def train(name: str, rank: int, world_size: int, accumulate: int) -> Outcome:
    """Train on this rank's part of every batch, in `accumulate` backward passes per step."""
    cls, options = OPTIMIZERS[name]
    model = TiedModel()
    optimizer = cls(model.named_parameters(), **options, sharding={"bucket_cap_mb": 0.02})
    losses = []
    for step in range(NUM_STEPS):
        tokens = TiedModel.batch(step, BATCH)
        mine = tokens.chunk(world_size)[rank]
        total = 0.0
        for micro in mine.chunk(accumulate):
            loss = model(micro) / accumulate
            loss.backward()
            total += float(loss.detach())
        optimizer.step()
        model.zero_grad()
        losses.append(total)
    return Outcome(losses, {n: p.detach().clone() for n, p in model.named_parameters()})


def train_as_rank(name: str, accumulate: int) -> Outcome:
    losses, params = train(name, dist.get_rank(), dist.get_world_size(), accumulate)
    means = torch.tensor(losses)
    dist.all_reduce(means)
    return Outcome((means / dist.get_world_size()).tolist(), params)


def assert_same_training(outcome: Outcome, expected: Outcome) -> None:
    assert outcome.losses == pytest.approx(expected.losses, rel=LOSS_TOLERANCE)
    for key, value in expected.params.items():
        torch.testing.assert_close(
            outcome.params[key], value, rtol=PARAM_TOLERANCE, atol=PARAM_TOLERANCE, msg=key
        )


@pytest.mark.parametrize(
    ("world_size", "accumulate"), [(2, 1), (2, 3), (3, 2)], ids=["2x1", "2x3", "3x2"]
)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_ranks_train_as_one(name: str, world_size: int, accumulate: int) -> None:
    """Several ranks, also with accumulated gradients, have the losses of one with all the data."""
    expected = train(name, 0, 1, 1)
    assert expected.losses[-1] < 0.97 * expected.losses[0]
    run = run_procs if (world_size, accumulate) == (2, 3) else run_threads
    outcomes = run(world_size, train_as_rank, name, accumulate)
    for outcome in outcomes:
        assert_same_training(outcome, expected)
        for key, value in outcomes[0].params.items():
            assert torch.equal(outcome.params[key], value)


def train_low_precision(dtype: torch.dtype) -> list[Tensor]:
    params = [torch.nn.Parameter(torch.ones(s, dtype=dtype)) for s in [(5000,), (), (3, 4)]]
    optimizer = ShardedAdam(params, lr=0.25, sharding={"bucket_cap_mb": 0.01})
    for _ in range(3):
        for param in params:
            param.grad = torch.full_like(param, 2.0 * dist.get_rank())
        optimizer.step()
    return [param.detach().clone() for param in params]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_over_gloo(dtype: torch.dtype) -> None:
    """Half-precision gradients and parameters travel over gloo as they do between threads."""
    expected = run_threads(3, train_low_precision, dtype)[0]
    for values in run_procs(3, train_low_precision, dtype):
        for value, other in zip(values, expected, strict=True):
            assert value.dtype == dtype
            # Three Adam steps of a constant gradient: 1 - 3 * 0.25.
            torch.testing.assert_close(value.float(), torch.full_like(value.float(), 0.25))
            assert torch.equal(value, other)


def lose_a_rank() -> str:
    params = [torch.nn.Parameter(torch.ones(3000))]
    optimizer = ShardedSGD(params, 0.1)
    if dist.get_rank() == 1:
        raise KeyboardInterrupt
    params[0].grad = torch.ones(3000)
    optimizer.step()
    return "stepped"


def test_dead_rank_is_not_waited_for_forever() -> None:
    """When a rank dies before the step the others do not report success."""
    with pytest.raises(AssertionError, match="KeyboardInterrupt") as caught:
        run_procs(2, lose_a_rank, timeout=20.0)
    assert "stepped" not in str(caught.value)


def bound_of_a_bucket(collectives: str, cap_mb: Any) -> int:
    """Return the bytes that a bucket has at most."""
    options = {"collectives": collectives, "bucket_cap_mb": cap_mb}
    return ShardedSGD(
        [torch.nn.Parameter(torch.ones(3))], 0.1, sharding=options
    ).layout.bucket_nbytes


@pytest.mark.gloo_only("about pairs of ranks")
@pytest.mark.parametrize(
    ("collectives", "cap_mb", "expected"),
    [("pairwise", "auto", 8), ("native", "auto", 25), ("pairwise", 3, 3)],
)
def test_buckets_are_small_where_they_overlap(collectives: str, cap_mb: Any, expected: int) -> None:
    """Through sockets they leave under backward; a size that was given stays."""
    assert run_procs(2, bound_of_a_bucket, collectives, cap_mb) == [expected << 20] * 2
