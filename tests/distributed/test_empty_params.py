"""Parameters without elements: in no bucket, but counted and awaited as any other."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from shardfuse import ShardedAdam, ShardedSGD
from shardfuse.grads.source import PendingGrads
from shardfuse.layout import FlatLayout, ParamSpec
from tests.support.harness import run_threads

pytestmark = pytest.mark.timeout(60)


def train(stage: int, max_norm: float | None) -> tuple[dict[int, int], list[float]]:
    """Return the steps that are saved, and the sums of parameters."""
    params = [nn.Parameter(torch.ones(size)) for size in (600, 0, 700)]
    named = [(f"p{index}", param) for index, param in enumerate(params)]
    optimizer = ShardedAdam(named, lr=0.1, sharding={"stage": stage, "bucket_cap_mb": 0.001})
    for _ in range(3):
        for _ in range(2):
            torch.stack([(param * 2).sum() for param in params]).sum().backward()
        if max_norm is not None:
            optimizer.clip_grad_norm(max_norm)
        optimizer.step()
        assert stage == 1 or params[1].grad is None
        optimizer.zero_grad()
    optimizer.consolidate_state_dict(to=None)
    state = optimizer.state_dict()["state"]
    sums = [float(param.detach().sum()) for param in params]
    return {number: int(entry["step"]) for number, entry in state.items()}, sums


@pytest.mark.parametrize("max_norm", [None, 1.0])
@pytest.mark.parametrize("stage", [1, 2])
def test_updates_are_counted(stage: int, max_norm: float | None) -> None:
    """At stage 2 the gradient of one left with no bucket, and stayed."""
    alone = train(1, max_norm)
    for steps, sums in run_threads(2, train, stage, max_norm):
        assert steps == alone[0] == {0: 3, 1: 3, 2: 3}
        assert sums == pytest.approx(alone[1])


def reaching(reached: list[list[list[int]]]) -> list[float]:
    """Return params after a step; by rank and backward, ``reached`` has those in the loss."""
    params = [nn.Parameter(torch.ones(size)) for size in (600, 0, 700)]
    optimizer = ShardedSGD(params, lr=1.0, sharding={"stage": 2, "bucket_cap_mb": 0.001})
    for loss in reached[optimizer.communicator.rank]:
        torch.stack([params[index].sum() for index in loss]).sum().backward()
    optimizer.grad_norm()
    optimizer.step()
    return [float(param.detach().sum()) for param in params]


@pytest.mark.parametrize("only_empty", [0, 1, 2])
def test_a_backward_that_reaches_them_alone_counts(only_empty: int) -> None:
    """At stage 2 it was none, and the other rank, in another backward, waited for its buckets."""
    everywhere = [[0, 1, 2]] * 3
    first = [[1] if index == only_empty else loss for index, loss in enumerate(everywhere)]
    for sums in run_threads(2, reaching, [first, everywhere]):
        assert sums == [600 * (1 - 2.5), 0.0, 700 * (1 - 2.5)]


def test_no_bucket_waits_for_one_or_leaves_without_another() -> None:
    def spec(name: str, numel: int) -> ParamSpec:
        return ParamSpec(name, (numel,), (1,), "float32", "cpu", 0)

    sizes = {"first": 600, "empty": 0, "last": 700}
    layout = FlatLayout(2, 1 << 20, "element").extended([spec(*pair) for pair in sizes.items()])
    (flat,) = layout.flats
    own: Any = SimpleNamespace(flat=flat, no_local_grad=set())
    pending = PendingGrads([(own, bucket) for bucket in flat.buckets])
    of = {slot.numel: position for position, slot in enumerate(flat.slots)}
    empty = next(slot.param for slot in flat.slots if not slot.numel)
    for missing in (set[int](), {empty}):
        pending.restart()
        pending.mark_ready(flat.index, of[700])
        pending.mark_ready(flat.index, of[0])
        assert not pending.all_ready
        assert not pending.is_ready(0)
        pending.mark_ready(flat.index, of[600])
        assert pending.all_ready
        assert pending.is_ready(0)
        own.no_local_grad = missing
        pending.learn_unused()
