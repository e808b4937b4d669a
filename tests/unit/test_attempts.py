"""A restarted job does not take what an earlier attempt has left in the store."""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from typing import Any

import pytest
from torch.distributed import HashStore, Store

from shardfuse.training.attempts import attempt_store

LIMIT = timedelta(seconds=20)


def meet(store: Store, world_size: int, first: int) -> list[Store]:
    """Return every rank's part; the rank ``first`` starts before the others."""
    parts: list[Any] = [None] * world_size

    def start(rank: int) -> None:
        if rank != first:
            time.sleep(0.1)
        parts[rank] = attempt_store(store, rank, world_size, LIMIT)

    ranks = [threading.Thread(target=start, args=(rank,)) for rank in range(world_size)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    return parts


@pytest.mark.parametrize("first", [0, 1, 2])
def test_every_attempt_has_a_part_of_its_own(first: int) -> None:
    """Whoever comes first, with as many ranks as before, or fewer, or more."""
    store = HashStore()
    for attempt, world_size in enumerate((3, 3, 4, 3)):
        parts = meet(store, world_size, first)
        for part in parts:
            assert not part.check(["verdict"]), attempt
        parts[0].set("verdict", str(attempt))
        assert {part.get("verdict") for part in parts} == {str(attempt).encode()}


def test_ranks_that_do_not_come() -> None:
    """An error after the limit, on either side."""
    for rank, text in ((0, "not all of 2 ranks have started"), (1, "rank 0 has not started")):
        with pytest.raises(TimeoutError, match=text):
            attempt_store(HashStore(), rank, 2, timedelta(seconds=0.2))
