"""How many requests ranks that wait make to the store, counted by it, on a clock of the test."""

from __future__ import annotations

import threading
import time
from collections import Counter
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from shardfuse.comm.polls import PollRateLimit
from shardfuse.comm.session import PATIENCE_S, GroupState, PeerError


class Clock:
    """Seconds that pass where the test says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 1000.0
        self.stop = monkeypatch.undo
        monkeypatch.setattr(time, "monotonic", lambda: self.now_s)

    def advance(self, seconds: float) -> None:
        """As time.sleep()."""
        self.now_s += seconds


class CountingStore:
    """The store as one rank sees it: counts its requests."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self.requests: list[tuple[str, Any]] = []

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._store, name)
        if name == "has_extended_api":
            return method

        def call(*args: Any) -> Any:
            self.requests.append((name, args[0]))
            return method(*args)

        return call


def waiting_ranks(world_size: int) -> list[GroupState]:
    """Return the ranks of a world, all of which wait in the same region."""
    store = dist.HashStore()
    states = [GroupState(CountingStore(store), rank, world_size) for rank in range(world_size)]
    for state in states:
        state._enter("step()")
        state.current.declare(["lr = 0.1"])
    return states


def count(states: list[GroupState]) -> int:
    return sum(len(state.store.requests) for state in states)


def poll(clock: Clock, states: list[GroupState], seconds: float, every_s: float) -> list[int]:
    """Let them poll for so long; return the requests of each period in between."""
    counts = []
    for _ in range(round(seconds / every_s)):
        before = count(states)
        for state in states:
            state.poll_peers()
        counts.append(count(states) - before)
        clock.now_s += every_s
    return counts


@pytest.mark.parametrize("world_size", [2, 3, 8, 32, 64])
def test_two_requests_a_second_after_the_first(
    world_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of each rank that waits, whatever the number of ranks."""
    clock, states = Clock(monkeypatch), waiting_ranks(world_size)
    poll(clock, states, 1.0, PATIENCE_S)
    for state in states:
        state.store.requests.clear()
    poll(clock, states, 20.0, PATIENCE_S)
    assert max(len(state.store.requests) for state in states) <= 2 * 20


@pytest.mark.parametrize("is_first_wait", [True, False])
def test_1024_ranks(is_first_wait: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """They make at most 20 requests a second in all, as the formula of all sizes says."""
    clock, states = Clock(monkeypatch), waiting_ranks(1024)
    if not is_first_wait:
        poll(clock, states, 2.0, 1.0)
        clock.now_s += 10_000
        for state in states:
            state.current.declare(["a later part"])
    counts = poll(clock, states, 320.0, 2.0)
    assert max(sum(counts[start : start + 5]) for start in range(0, 160, 5)) <= 20 * 10
    assert sum(counts) / 320 == pytest.approx(rate(1024), rel=0.1)


def rate(world_size: int) -> float:
    """Return the requests a second of so many ranks, none of which has gone on."""
    schedule = PollRateLimit(0, world_size)
    return world_size / schedule.failures.period_s + world_size / schedule.mismatches.period_s


def test_more_ranks_ask_no_more() -> None:
    assert all(rate(world_size) < 20 for world_size in (1024, 4096, 10_000))
    assert all(rate(world_size) <= 2 * world_size for world_size in range(2, 1024))


@pytest.mark.parametrize(
    ("world_size", "bound_s"), [(2, 2.0), (8, 2.0), (32, 2.0), (100, 2.0), (1024, 70.0)]
)
def test_an_error_reaches_all(
    world_size: int, bound_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long they have waited."""
    clock, states = Clock(monkeypatch), waiting_ranks(world_size)
    failing, *waiting = states
    every_s = PATIENCE_S if world_size <= 100 else 1.0
    poll(clock, waiting, 20.0, every_s)
    failing.report_failure("failed in step(): KeyError: 'batch 17'")
    failed_s, texts = clock.now_s, set[str]()
    while waiting:
        clock.now_s += every_s
        assert clock.now_s - failed_s <= bound_s
        for state in list(waiting):
            try:
                state.poll_peers()
            except PeerError as error:
                texts.add(str(error).partition("] ")[2])
                waiting.remove(state)
    assert texts == {"step(): rank 0 failed in step(): KeyError: 'batch 17'."}


def test_texts_are_read_where_digests_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that are at one place read no text; that of one that is elsewhere is read once."""
    clock, states = Clock(monkeypatch), waiting_ranks(3)
    states[2]._enter("step()")
    poll(clock, states, 10.0, PATIENCE_S)
    texts = [Counter(key for name, key in s.store.requests if name == "get") for s in states]
    assert texts[:2] == [{"doing/2": 1}] * 2
    assert texts[2] == {"doing/0": 1, "doing/1": 1}


def meet(state: GroupState) -> None:
    with state.region("step()"):
        pass


def meet_all(states: list[GroupState]) -> None:
    threads = [threading.Thread(target=meet, args=[state], daemon=True) for state in states]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert [state.generation for state in states] == [1] * len(states)


@pytest.mark.parametrize("world_size", [2, 8, 16])
def test_ranks_meet_after_an_error_by_four_requests(world_size: int) -> None:
    """Of each: it was as many as there are ranks."""
    states = waiting_ranks(world_size)
    for state in states:
        state.current.is_failed = state.current.is_over = True
    meet_all(states)
    assert max(len(state.store.requests) for state in states) <= 4


class WaitingStore(CountingStore):
    """Of which a wait takes all of its time, on a clock of the test, and finds nothing."""

    timeout = timedelta(seconds=3600)
    ends_s = 0.0

    def __init__(self, store: Any, clock: Clock) -> None:
        super().__init__(store)
        self._clock = clock
        self.times_s: list[float] = []

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        self.requests.append(("wait", keys[0]))
        num_new = len(self.requests) - len(self.times_s)
        self.times_s += [self._clock.now_s] * num_new
        self._clock.now_s += timeout.total_seconds()
        if self._clock.now_s >= self.ends_s:
            raise KeyboardInterrupt
        raise RuntimeError("timeout")


@pytest.mark.parametrize(
    ("world_size", "num_waiting", "limit"), [(2, 1, 2), (8, 4, 8), (32, 16, 32), (1024, 512, 20)]
)
def test_a_wait_for_a_late_neighbour(
    world_size: int, num_waiting: int, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where ranks compare in the store: each waits for the one before it, so half wait at most."""
    clock, store, seconds = Clock(monkeypatch), dist.HashStore(), 1000.0
    state = GroupState(WaitingStore(store, clock), 1, world_size)
    state._enter("step()")
    began_s = clock.now_s
    state.store.ends_s = began_s + seconds
    with pytest.raises(KeyboardInterrupt):
        state.verify_digest()
    num_requests = sum(requested_s > began_s + 1 for requested_s in state.store.times_s)
    assert num_requests * num_waiting <= min(2 * num_waiting, limit) * seconds


@pytest.mark.parametrize("world_size", [2, 8, 16])
def test_an_error_and_the_meeting_after_it(
    world_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of each rank: two requests that report, or four that find the report, and four to meet."""
    clock, states = Clock(monkeypatch), waiting_ranks(world_size)
    with pytest.raises(PeerError):
        states[0].raise_peer_error("")
    states[0].report_failure("failed in step(): KeyError: 'batch 17'")
    for state in states[1:]:
        with pytest.raises(PeerError, match="rank 0 failed"):
            state.poll_peers()
    clock.stop()
    assert max(len(state.store.requests) for state in states) <= 4
    meet_all(states)
    assert max(len(state.store.requests) for state in states) <= 8


def test_a_message_of_another_collective(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sender has time to tell in which one it is, and need not."""
    clock, states = Clock(monkeypatch), waiting_ranks(16)
    monkeypatch.setattr(time, "sleep", clock.advance)
    with pytest.raises(PeerError, match="rank 5 is in another collective than rank 2"):
        states[2].raise_mismatch(5)
    looks = [key for name, key in states[2].store.requests if name == "compare_set"]
    assert looks[0] == "at/5"
    assert len(states[2].store.requests) <= 20


@pytest.mark.parametrize("late", [0, 2])
def test_a_late_rank_is_named_once(
    late: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """By the rank before it, after five seconds."""
    clock, states = Clock(monkeypatch), waiting_ranks(4)
    waiting = [state for state in states if state.rank != late]
    poll(clock, waiting, 4.9, PATIENCE_S)
    assert not caplog.messages
    poll(clock, waiting, 20.0, PATIENCE_S)
    (message,) = caplog.messages
    assert message.startswith(f"[rank {(late - 1) % 4}] step(): has waited for ")
    assert message.endswith(f" s. Not seen in this call: rank {late}.")
    waiting[0]._enter("step()")  # nobody else is there
    poll(clock, waiting, 20.0, PATIENCE_S)
    assert len(caplog.messages) == 2


def test_reading_what_ranks_publish() -> None:
    """As rank 0 does that waits for all to have saved: one request where there is nothing new."""
    states = waiting_ranks(16)
    assert states[0].read("save") == [None] * 16
    states[3].publish("save", "written")
    texts = states[0].read("save")
    assert [rank for rank, text in enumerate(texts) if text == "written"] == [3]
    states[0].store.requests.clear()
    for _ in range(10):
        assert states[0].read("save") == texts
    assert len(states[0].store.requests) == 10
    states[3].publish("save", "written again")
    assert states[0].read("save")[3] == "written again"
    assert states[0].read("another") == [None] * 16
