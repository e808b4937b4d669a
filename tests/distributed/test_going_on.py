"""Training goes on after an error that a loop has caught, on all ranks."""

from __future__ import annotations

import functools
import itertools

import pytest
import torch
import torch.distributed as dist

from shardfuse import ShardedAdamW
from shardfuse.comm.base import PeerError
from tests.support import contract
from tests.support.harness import run_procs

OUT_OF_STEP = "Start again from the last checkpoint"


def fail_once(failing_step: int, collectives: str) -> list[float | str]:
    """One step fails on one rank before it has said what it does; return what becomes of each."""
    weight = torch.nn.Parameter(torch.ones(600))
    sharding = {"collectives": collectives, "consolidate_every": 0}
    optimizer = ShardedAdamW([("weight", weight)], lr=0.1, sharding=sharding)
    found: list[float | str] = []

    def closure(step: int) -> None:
        optimizer.zero_grad()
        (weight * (1 + dist.get_rank())).sum().backward()
        if step == failing_step and dist.get_rank() == 1:
            raise ArithmeticError("of this rank alone")

    for step in range(4):
        try:
            optimizer.step(functools.partial(closure, step))
            found.append(weight[0].item())
        except (ArithmeticError, PeerError) as error:
            found.append(OUT_OF_STEP if OUT_OF_STEP in str(error) else "failed")
    return found


@pytest.mark.timeout(120)
@pytest.mark.cpu_only("where waits do not block the host, ranks hear of it in a later call")
@pytest.mark.parametrize("backend", [None, "hccl"])
@pytest.mark.parametrize("collectives", ["auto", "native"])
@pytest.mark.parametrize("failing_step", [0, 1, 2])
def test_after_an_error_all_ranks_go_on_or_none(
    failing_step: int, collectives: str, backend: str | None
) -> None:
    """In the first two steps ranks compare more, and one that failed has not done so.

    A backend's own collective that has begun cannot be taken back: then all are told to stop.
    """
    ranks = run_procs(2, fail_once, failing_step, collectives, backend=backend, timeout=30)
    assert ranks[0] == ranks[1]
    before, failed, after = (
        ranks[0][:failing_step],
        ranks[0][failing_step],
        ranks[0][failing_step + 1 :],
    )
    assert failed == "failed"
    assert set(after) == {OUT_OF_STEP} or all(
        b < a for a, b in itertools.pairwise([1.0, *before, *after])
    )
    if collectives == "auto" and (backend or contract.chosen()) == "gloo":
        assert OUT_OF_STEP not in after
