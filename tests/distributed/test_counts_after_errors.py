"""An error comes to one rank alone, late in a step; what ranks count is alike again afterwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardfuse import ShardedAdamW
from shardfuse.comm.base import PeerError
from shardfuse.training import StepMonitor
from tests.support.harness import run_procs

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.cpu_only("where waits do not block the host, ranks hear of it in a later call"),
]


class Loop:
    """Trains, and goes on after errors.

    Args:
        sharding: of the optimizer.
    """

    def __init__(self, sharding: dict[str, Any]) -> None:
        self.rank = dist.get_rank()
        self.weights = [torch.nn.Parameter(torch.ones(600)) for _ in range(3)]
        options = {"bucket_cap_mb": 0.004, "kernel": "eager", "consolidate_every": 0, **sharding}
        self.optimizer = ShardedAdamW(self.weights, lr=0.1, sharding=options)
        self.found: list[str] = []

    def step(self, before: Callable[[], None] = lambda: None) -> None:
        self.optimizer.zero_grad()
        torch.cat(self.weights).sum().backward()
        before()
        try:
            self.optimizer.step()
            self.found.append("ok")
        except (ArithmeticError, PeerError) as error:
            self.found.append(type(error).__name__)


def once(owner: Any, name: str) -> None:
    """Have a method of an object fail when it is called next, as by a signal."""

    def fail(*_: Any, **__: Any) -> None:
        delattr(owner, name)
        raise ArithmeticError("of this rank alone")

    setattr(owner, name, fail)


def send_late_ones_again() -> list[str]:
    """Have gradients that came after their buckets had left, at stage 2."""
    loop = Loop({"stage": 2})

    def add() -> None:
        with loop.optimizer.no_sync():
            loop.weights[0].sum().backward()

    for step in range(5):
        if step == 2 and loop.rank == 1:
            grads: Any = loop.optimizer._grads
            once(grads._rounds.flights, "send_again")
        loop.step(add)
    return loop.found


def test_buckets_that_leave_once_more() -> None:
    """Ranks took those of a count of their own for those of another collective, in every step."""
    found = run_procs(2, send_late_ones_again, timeout=30, backend="gloo")
    assert found[0] == ["ok", "ok", "PeerError", "ok", "ok"]
    assert found[1] == ["ok", "ok", "ArithmeticError", "ok", "ok"]
