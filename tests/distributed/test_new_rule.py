"""A new optimizer is a rule and a class: Lion (arXiv 2302.06675), which touches no other file."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

from shardfuse import ShardedOptimizer
from shardfuse.rules.base import (
    ElementwiseRule,
    Group,
    Settings,
    check_at_least_zero,
    check_betas,
)
from tests.support.harness import run_procs, run_threads
from tests.support.models import MIXED, mean_grads, rank_grads
from tests.support.runs import Case, assert_bitwise, train_rank


class LionScalars(NamedTuple):
    """The values of Lion's math."""

    beta1: float
    take1: float
    beta2: float
    take2: float
    lr: float
    shrink: float


class LionRule(ElementwiseRule):
    """p *= 1 - lr * weight_decay; p -= lr * sign(beta1 * m + (1 - beta1) * g)."""

    def check_values(self, group: Group) -> None:
        check_at_least_zero(group, "lr", "Invalid learning rate: {}")
        check_betas(group)

    def state_names(self, group: Group) -> tuple[str, ...]:
        return ("exp_avg",)

    def settings(self, group: Group, policy: str, step: int) -> Settings:
        lr, (beta1, beta2) = float(group["lr"]), group["betas"]
        shrink = 1.0 - lr * group["weight_decay"]
        return Settings(None, LionScalars(beta1, 1.0 - beta1, beta2, 1.0 - beta2, lr, shrink))

    def update(self, flags: Any, h: LionScalars, p: Tensor, g: Tensor, *state: Tensor) -> None:
        (exp_avg,) = state
        p.mul_(h.shrink).sub_(torch.sign(exp_avg * h.beta1 + g * h.take1) * h.lr)
        exp_avg.mul_(h.beta2).add_(g * h.take2)


class Lion(ShardedOptimizer):
    """Lion, sharded."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        sharding: Any = None,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "weight_decay": weight_decay}
        super().__init__(params, defaults, LionRule, sharding)


LION = Case(Lion, {"lr": 0.125, "betas": (0.5, 0.75)}, overrides=({}, {"weight_decay": 0.25}))


def lion_by_hand(world_size: int, num_steps: int) -> list[Tensor]:
    """Return the parameters by the formula, tensor by tensor."""
    params = LION.param_set()
    moments = [torch.zeros_like(p) for p in params.params]
    for step in range(num_steps):
        grads = mean_grads("integers", world_size, step, MIXED)
        for entry, p, m, g in zip(MIXED, params.params, moments, grads, strict=True):
            if g is not None and p.requires_grad:
                with torch.no_grad():
                    p.mul_(1 - 0.125 * (0.25 if entry.group else 0.0))
                    p.sub_(torch.sign(m * 0.5 + g * 0.5) * 0.125)
                    m.mul_(0.75).add_(g * 0.25)
    return params.values()


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_new_rule_is_sharded(world_size: int) -> None:
    """A rule and a class, both short, give the formula's bits at any world size."""
    rule = inspect.getsource(LionScalars) + inspect.getsource(LionRule)
    assert len(rule.splitlines()) < 40
    assert len(inspect.getsource(Lion).splitlines()) < 20
    expected = lion_by_hand(world_size, 6)
    for values in run_threads(world_size, train_rank, LION, "integers", 6):
        assert_bitwise(values, expected)


def lion_under_ddp(under_ddp: bool) -> list[Tensor]:
    torch.manual_seed(0)
    model = nn.Linear(40, 30)
    wrapped = nn.parallel.DistributedDataParallel(model) if under_ddp else model
    sharding = {"grads_are_reduced": under_ddp, "kernel": "eager"}
    optimizer = Lion(model.parameters(), lr=0.125, sharding=sharding)
    for step in range(3):
        wrapped(torch.full((4, 40), float(dist.get_rank() + step))).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [param.detach().clone() for param in model.parameters()]


def test_a_new_rule_under_ddp() -> None:
    """The same bits where DistributedDataParallel has averaged the gradients."""
    for values, expected in zip(
        run_procs(2, lion_under_ddp, True), run_procs(2, lion_under_ddp, False), strict=True
    ):
        assert_bitwise(values, expected)


def lion_resumed(folder: str, sharded: bool) -> tuple[list[Tensor], list[Tensor]]:
    """Return the parameters of a whole run, and of one saved and loaded after three steps."""

    def steps(first: int, last: int, params: Any, optimizer: Any) -> None:
        for step in range(first, last):
            params.assign(rank_grads("floats", dist.get_world_size(), dist.get_rank(), step, MIXED))
            optimizer.step()

    params = LION.param_set()
    optimizer = LION.build(params, {"kernel": "eager"})
    steps(0, 3, params, optimizer)
    values = params.values()
    other = LION.param_set()
    with torch.no_grad():
        for param, value in zip(other.params, values, strict=True):
            param.copy_(value)
    resumed = LION.build(other, {"kernel": "eager", "bucket_cap_mb": 0.01})
    if sharded:
        dcp.save(optimizer.sharded_state_dict(), checkpoint_id=folder)
        state = resumed.sharded_state_dict()
        dcp.load(state, checkpoint_id=folder)
        resumed.load_sharded_state_dict(state)
    else:
        optimizer.consolidate_state_dict(to=None)
        resumed.load_state_dict(optimizer.state_dict())
    steps(3, 6, params, optimizer)
    steps(3, 6, other, resumed)
    return params.values(), other.values()


@pytest.mark.parametrize("sharded", [True, False])
def test_a_new_rule_in_checkpoints(tmp_path: Path, sharded: bool) -> None:
    """Whole and sharded states go on to the same bits in other buckets."""
    for whole, resumed in run_procs(2, lion_resumed, str(tmp_path), sharded):
        assert_bitwise(resumed, whole)
