"""Ranks that are in different parts of one call, and those that read gradients between calls."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardfuse import ShardedAdamW
from shardfuse.comm.session import PeerError
from shardfuse.engine import torch_state as state_io
from shardfuse.optim import npu
from tests.support.harness import run_procs

pytestmark = pytest.mark.timeout(120)

LATE_S = 0.5  # a rank that waits so long has looked at what the others do
STEPS = 4


def late_twice(collectives: str) -> float:
    """Let rank 0 be late in a step, so that rank 1 tells what it does, and rank 1 late after it."""
    weight = torch.nn.Parameter(torch.ones(600))
    sharding = {"consolidate_every": 1, "collectives": collectives}
    optimizer = ShardedAdamW([("weight", weight)], lr=0.1, sharding=sharding)
    consolidate = state_io.consolidate

    def late(*args: Any) -> Any:
        time.sleep(LATE_S * dist.get_rank())
        return consolidate(*args)

    state_io.consolidate = late  # of this process, which ends with the test
    for _ in range(STEPS):
        optimizer.zero_grad()
        weight.sum().backward()
        time.sleep(LATE_S * (1 - dist.get_rank()))
        optimizer.step()
    return weight[0].item()


@pytest.mark.parametrize("collectives", ["auto", "native"])
def test_a_step_that_consolidates(collectives: str) -> None:
    """What a rank told of the step's first part is no disagreement with the second."""
    first, second = run_procs(2, late_twice, collectives)
    assert first == second


def read_alone(num_reads: int) -> tuple[float, list[float]]:
    """Read combined gradients on rank 0, before and after the first steps; return what is read."""
    weight = torch.nn.Parameter(torch.ones(600))
    optimizer = npu.NpuFusedAdamW([("weight", weight)], lr=0.1)
    read = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        (weight * (1 + dist.get_rank())).sum().backward()
        for _ in range(num_reads if dist.get_rank() == 0 else 0):
            combined = optimizer.get_combined_grads()[0]
            assert combined is not None
            read.append(combined[0].item())
        optimizer.step()
    return weight[0].item(), read


def test_gradients_are_read_by_one_rank_alone() -> None:
    """It waits for no other, and the steps are the same."""
    (value, read), (other, nothing) = run_procs(2, read_alone, 2)
    assert (read, nothing) == ([1.0] * 2 * STEPS, [])
    assert value == other == run_procs(2, read_alone, 0)[0][0]


def unfreeze_alone() -> str:
    """Unfreeze on rank 0, which reads gradients before its step; return what it hears."""
    frozen = torch.nn.Parameter(torch.ones(600), requires_grad=False)
    weight = torch.nn.Parameter(torch.ones(600))
    optimizer = npu.NpuFusedAdamW([("weight", weight), ("frozen", frozen)], lr=0.1)
    try:
        for step in range(STEPS):
            optimizer.zero_grad()
            frozen.requires_grad_(step == 2 and dist.get_rank() == 0)
            (weight + frozen).sum().backward()
            if dist.get_rank() == 0:
                optimizer.get_combined_grads()
            optimizer.step()
    except PeerError as error:
        return str(error)
    return "no error"


@pytest.mark.cpu_only("no rank's host waits there where ranks are told")
def test_one_rank_unfreezes_and_reads_alone() -> None:
    """Every rank is told, by both names; none waits."""
    for text in run_procs(2, unfreeze_alone, timeout=30):
        assert "unfreezing, before gradients are combined" in text
        assert "step()" in text
