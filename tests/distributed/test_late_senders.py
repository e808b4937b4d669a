"""A rank without a backward sends its round in the call that follows, and fails or dies there."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch.distributed as dist

from shardfuse import ShardedSGD
from tests.support.harness import RanksFailedError, run_procs
from tests.support.overlap import ON, Net, tokens

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.cpu_only("where waits do not block the host, ranks hear of it in a later call"),
]


def send_late(how: str, sharding: dict[str, Any]) -> None:
    """Rank 1 ends at the second bucket of what it sends in the third step; others have sent.

    In the first two, ranks that cannot mark their messages wait for each other in the store.
    """
    model, rank = Net(), dist.get_rank()
    options = {**ON, "bucket_cap_mb": 0.004, "kernel": "eager", **sharding}
    optimizer = ShardedSGD(model.named_parameters(), lr=0.5, sharding=options)
    grads: Any = optimizer._grads
    launch, places = grads._launch, list[int]()

    def counted(*args: Any, **kwargs: Any) -> Any:
        places.append(len(places))
        if len(places) == 2 and how == "dies":
            os._exit(7)
        if len(places) == 2:
            raise ArithmeticError("of this rank alone")
        return launch(*args, **kwargs)

    for step in range(3):
        if step < 2 or rank != 1:
            model(tokens(rank, step)).backward()
        else:
            grads._launch = counted
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("how", ["fails", "dies"])
@pytest.mark.parametrize(
    ("backend", "world_size", "sharding"),
    [
        (None, 3, {"collectives": "auto"}),
        (None, 3, {"collectives": "auto", "stage": 2}),
        (None, 3, {"collectives": "pairwise", "stage": 2}),
        (None, 3, {"collectives": "native"}),
        ("hccl", 2, {"collectives": "auto"}),
        ("hccl", 2, {"collectives": "auto", "stage": 2}),
    ],
)
def test_the_others_hear_of_a_rank_that_ends_as_it_sends_late(
    how: str, backend: str | None, world_size: int, sharding: dict[str, Any]
) -> None:
    """In seconds, and by name: they have sent all of theirs, and wait for its own."""
    with pytest.raises(RanksFailedError) as caught:
        run_procs(world_size, send_late, how, sharding, backend=backend, timeout=30)
    failures = caught.value.failures
    for rank in (0, 2)[: world_size - 1]:
        assert "did not finish" not in failures[rank], failures
        last = failures[rank].splitlines()[-1]
        assert "PeerError" in last, last
        assert "rank 1" in last, last
    assert ("died" if how == "dies" else "ArithmeticError") in failures[1]
