"""Messages in memory that ranks share: a rank that waits for one sleeps, and looks for its peer."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest

from shardfuse.comm import gloo
from shardfuse.comm.gloo import READY, MessageRing


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="the system shares no such memory")
@pytest.mark.parametrize(("late_s", "num_looks"), [(0.0, 0), (0.09, 0), (0.35, 3)])
def test_the_sender_is_looked_for_every_tenth_of_a_second(
    late_s: float, num_looks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not at once: looking opens a file, for which malloc may need 5 ms after a backward."""
    shared = gloo.create_shared(2)
    board: Any = SimpleNamespace(poll_peers=lambda **_: None)
    sender, receiver = (
        MessageRing(rank, [os.getpid()] * 2, shared, 1.0, board, [0, 1]) for rank in (0, 1)
    )
    os.close(shared[0])
    start = 1000.0
    clock, looks = [start], []
    pauses: list[float] = []

    def sleep(seconds: float) -> None:
        # A hundredth of the time waited: at 50 us always, 64 ranks left a late one no core.
        assert seconds <= max(50e-6, 0.01 * (clock[0] - start)) + 1e-9
        pauses.append(seconds)
        clock[0] += seconds
        if clock[0] - start >= late_s:
            sender.post(1, READY, 7, 5, 42)

    monkeypatch.setattr(gloo, "time", SimpleNamespace(sleep=sleep, monotonic=lambda: clock[0]))
    monkeypatch.setattr(gloo, "is_running", lambda pid: looks.append(pid) or True)
    assert receiver.wait(0, READY, 7, 5) == 42
    assert looks == [os.getpid()] * num_looks
    assert len(pauses) < 700  # of 7,000 in 0.35 s
    assert max(pauses) <= 2e-3
