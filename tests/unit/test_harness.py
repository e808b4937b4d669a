"""The harness itself: results in rank order, failures that surface, ranks that hang."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardfuse.comm.native import all_gather_single, reduce_scatter_single
from tests.support.harness import RanksFailedError, run_procs, run_threads

RUNNERS = [pytest.param(run_threads, id="threads"), pytest.param(run_procs, id="procs")]


def collectives() -> dict[str, list[float]]:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    total = torch.tensor([float(rank + 1)])
    dist.all_reduce(total)
    largest = torch.tensor([float(rank)])
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    first = torch.tensor([float(rank + 5)])
    dist.broadcast(first, src=0)
    scattered = torch.zeros(2)
    reduce_scatter_single(scattered, torch.arange(2.0 * world_size))
    gathered = torch.zeros(2 * world_size)
    all_gather_single(gathered, torch.full((2,), float(rank)))
    values = {"total": total, "largest": largest, "first": first}
    values |= {"scattered": scattered, "gathered": gathered}
    return {name: value.tolist() for name, value in values.items()}


def fail_on_rank_one() -> None:
    if dist.get_rank() == 1:
        raise KeyError("only rank one knows")
    dist.all_reduce(torch.ones(1))


def hang_on_rank_one() -> None:
    if dist.get_rank() != 1:
        dist.all_reduce(torch.ones(1))


def die() -> None:
    raise SystemExit(3)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("run", RUNNERS)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_collectives(run: Callable[..., list[Any]], world_size: int) -> None:
    """Every collective the package uses gives the same values on threads and on gloo."""
    results = run(world_size, collectives)
    assert len(results) == world_size
    for rank, result in enumerate(results):
        assert result["total"] == [world_size * (world_size + 1) / 2]
        assert result["largest"] == [world_size - 1]
        assert result["first"] == [5.0]
        assert result["scattered"] == [world_size * (2.0 * rank + i) for i in range(2)]
        assert result["gathered"] == [float(r) for r in range(world_size) for _ in range(2)]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("run", RUNNERS)
def test_failure_surfaces(run: Callable[..., list[Any]]) -> None:
    """An exception on one rank is reported with its traceback though the others wait for it."""
    with pytest.raises(RanksFailedError, match="only rank one knows") as caught:
        run(3, fail_on_rank_one, timeout=20.0)
    assert "fail_on_rank_one" in caught.value.failures[1]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("run", RUNNERS)
def test_hang_is_ended(run: Callable[..., list[Any]]) -> None:
    """Ranks that wait for a collective nobody joins are reported instead of waited for."""
    with pytest.raises(RanksFailedError, match="did not finish"):
        run(2, hang_on_rank_one, timeout=1.0)
    assert run(2, dist.get_rank) == [0, 1]


def test_a_rank_that_exits_is_a_failure() -> None:
    """A process that leaves by SystemExit counts as failed, not as a result of None."""
    with pytest.raises(RanksFailedError, match="SystemExit"):
        run_procs(2, die, timeout=20.0)
