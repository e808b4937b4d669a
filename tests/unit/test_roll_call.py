"""Which ranks an error names where a transport fails: ranks as threads, without a transport."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from shardfuse import agreement
from shardfuse.comm import session
from shardfuse.comm.roll_call import name_ranks
from shardfuse.comm.session import GroupState

ERROR = RuntimeError("Connection reset by peer")


def in_step(world_size: int, store: Any = None) -> list[GroupState]:
    store = dist.HashStore() if store is None else store
    states = [GroupState(store, rank, world_size) for rank in range(world_size)]
    for state in states:
        state._enter("step()")
    return states


def texts_of(states: list[GroupState], suspects: dict[int, Sequence[int] | None]) -> list[str]:
    """Return the texts of the ranks named, whose transports fail, without their own prefixes."""
    found: dict[int, str] = {}

    def fail(rank: int) -> None:
        error = states[rank].attribute_error(ERROR, suspects=suspects[rank])
        found[rank] = str(error).removeprefix(f"[rank {rank}] step(): ")

    threads = [threading.Thread(target=fail, args=[rank], daemon=True) for rank in suspects]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return [found[rank] for rank in suspects]


def ended(name: str) -> str:
    return f"{name} ended or did not answer: Connection reset by peer. See its output."


def test_the_rank_that_ended() -> None:
    assert texts_of(in_step(4), {0: [3], 1: [3], 2: [3]}) == [ended("rank 3")] * 3


def test_a_rank_that_lives_is_not_named() -> None:
    """Rank 1 has closed its connections, and has not told why yet; rank 0 knows only of that."""
    assert texts_of(in_step(4), {0: [1], 1: [3]}) == [ended("rank 3")] * 2


def test_a_rank_that_has_raised_and_left_is_not_named() -> None:
    states = in_step(4)
    (text,) = texts_of(states, {1: [3]})
    assert texts_of(states, {0: [1, 3]}) == [text] == [ended("rank 3")]


def test_a_report_from_another_region_is_taken_without_all_patience(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A rank that was late by a region waited for 2.5 s, as if nobody had told it."""
    states = in_step(4)
    for _ in range(3):
        states[0]._enter("step()")  # it is ahead of rank 1
    (text,) = texts_of(states, {0: [3]})
    pauses: list[float] = []

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        time.sleep(seconds)

    clock = SimpleNamespace(monotonic=time.monotonic, sleep=sleep)
    monkeypatch.setattr(session, "time", clock)
    assert texts_of(states, {1: None}) == [text] == [ended("rank 3")]
    assert sum(pauses) < session.RESOLVE_S / 2


@pytest.mark.parametrize(("world_size", "absent"), [(3, 1), (16, 15), (72, 70)])
def test_a_backend_that_does_not_tell(world_size: int, absent: int) -> None:
    """All others answer before anybody is named, however many they are."""
    suspects = {rank: None for rank in range(world_size) if rank != absent}
    assert set(texts_of(in_step(world_size), dict(suspects))) == {ended(f"rank {absent}")}


def test_a_rank_that_waits_answers() -> None:
    """Its own transport has not failed: it polls, as it waits, and hears of the result so."""
    states, told = in_step(3), threading.Event()
    errors: list[str] = []

    def wait() -> None:
        while not told.wait(0.05):
            try:
                states[1].poll_peers()
            except session.PeerError as error:
                errors.append(str(error))
                return

    waiting = threading.Thread(target=wait, daemon=True)
    waiting.start()
    assert texts_of(states, {0: None}) == [ended("rank 2")]
    waiting.join(20)
    told.set()
    assert errors == [f"[rank 1] step(): {ended('rank 2')}"]


def test_all_live() -> None:
    """As where a link between two ranks is cut: no rank is called absent."""
    texts = texts_of(in_step(2), {0: [1], 1: [0]})
    assert any("the connection to rank" in text for text in texts)
    assert not any("ended" in text for text in texts)


class Gone:
    """A store whose process was the rank that ended."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError("Broken pipe")


def test_without_a_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """What this rank knows itself, and only if it is one rank."""
    monkeypatch.setattr(session, "RESOLVE_S", 0.0)
    states = in_step(4)
    for state in states:
        state.store = state._roll_call._store = Gone()
    one, several = texts_of(states, {2: [0], 3: [0, 1]})
    assert one == ended("rank 0")
    assert several == "the connection to another rank failed: Connection reset by peer"


def test_lists_are_short() -> None:
    assert name_ranks([3]) == "rank 3"
    assert name_ranks([3, 5, 7, 8]) == "ranks 3, 5, 7, 8"
    assert name_ranks(range(1000)) == "ranks 0, 1, 2, 3 and 996 more"
    assert agreement.name_spans([4]) == "rank 4"
    assert (
        agreement.name_spans([*range(500), 700, *range(800, 1000)]) == "ranks 0-499, 700, 800-999"
    )
