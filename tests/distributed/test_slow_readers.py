"""A rank that is slow to read another's memory finds there what was sent, whatever comes next."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from shardfuse import ShardedSGD
from shardfuse.comm import communicator_for, communicator_over, gloo
from shardfuse.comm.gloo import MessageRing
from tests.distributed.test_mesh import mesh_of
from tests.support.harness import run_procs

pytestmark = [
    pytest.mark.timeout(150),
    pytest.mark.gloo_only("whose ranks read each other's memory"),
]

NUMEL = 3000


def read_slowly(seconds: float = 0.2) -> None:
    """Have rank 0 read late, when others have long gone on."""
    if dist.get_rank() > 0:
        return
    fetch = MessageRing.read_part

    def late(self: MessageRing, *args: Any) -> None:
        time.sleep(seconds)
        fetch(self, *args)

    MessageRing.read_part = late  # type: ignore[method-assign]


def overwritten_after_the_call(shape: tuple[int, int] | None) -> Tensor:
    """Return a sum over all ranks, each of which reuses all its memory when its call is over."""
    read_slowly()
    cpu = torch.device("cpu")
    comm: Any = (
        communicator_for(None, cpu)
        if shape is None
        else communicator_over(mesh_of(shape), None, cpu)
    )
    input = torch.full((comm.world_size * NUMEL,), float(dist.get_rank() + 1))
    with comm.session.region("one sum"):
        total = torch.stack(comm.reduce_scatter(input).wait()).sum(0)
    input.fill_(torch.nan)
    for buffer in comm._buffers._buffers.values() if shape else ():
        buffer.fill_(torch.nan)
    return total


@pytest.mark.parametrize("shape", [None, (2, 2), (4, 2), (2, 3)], ids=str)
def test_memory_is_free_when_a_call_ends(shape: tuple[int, int] | None) -> None:
    """Over two axes it once was not: what was sent last lay in a buffer of the optimizer."""
    world_size = 4 if shape is None else shape[0] * shape[1]
    expected = torch.full((NUMEL,), float(sum(range(1, world_size + 1))))
    for total in run_procs(world_size, overwritten_after_the_call, shape):
        assert torch.equal(total, expected)


def ended_after_a_step(shape: tuple[int, int] | None) -> list[float]:
    """Return what a step has made of a parameter; optimizer and process end right after it."""
    read_slowly()
    param = torch.nn.Parameter(torch.zeros(4 * NUMEL))
    sharding = {"kernel": "eager", "bucket_cap_mb": 0.02, "mesh": mesh_of(shape)}
    optimizer = ShardedSGD([param], lr=1.0, sharding=sharding)
    param.grad = torch.full((4 * NUMEL,), float(dist.get_rank() + 1))
    optimizer.step()
    del optimizer
    return [float(end) for end in param.detach().aminmax()]


@pytest.mark.parametrize("shape", [None, (2, 2)], ids=str)
def test_ranks_may_end_after_a_step(shape: tuple[int, int] | None) -> None:
    for values in run_procs(4, ended_after_a_step, shape):
        assert values == [-2.5, -2.5]


def on_two_hosts(is_slow: bool, sharding: dict[str, Any]) -> list[Tensor]:
    """Train where rows are hosts, whose ranks read memory, and columns go through sockets."""
    host, rank = gloo.host_id(), dist.get_rank()
    gloo.host_id = lambda: host + rank // 2  # type: ignore[assignment]
    if is_slow:
        read_slowly(0.05)
    params = [torch.nn.Parameter(torch.zeros(NUMEL)) for _ in range(8)]
    options = {"kernel": "eager", "bucket_cap_mb": 0.01, "mesh": mesh_of((2, 2)), **sharding}
    optimizer = ShardedSGD(params, lr=1.0, sharding=options)
    for _ in range(2):
        torch.stack([(i + 1) * (rank + 1) * p.sum() for i, p in enumerate(params)]).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [param.detach().clone() for param in params]


@pytest.mark.parametrize("sharding", [{"stage": 2}, {"overlap_grad_sync": True}], ids=str)
def test_memory_along_one_axis_and_sockets_along_the_other(sharding: dict[str, Any]) -> None:
    """What is sent under backward stays until all have read it."""
    expected = [torch.full((NUMEL,), -2.5 * 2 * (i + 1)) for i in range(8)]
    for is_slow in (False, True):
        for values in run_procs(4, on_two_hosts, is_slow, sharding):
            assert all(map(torch.equal, values, expected))
