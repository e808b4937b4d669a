"""PollRateLimit: when a rank that waits reads the process group's store.

[Note: store traffic] The store is one process, which serves all ranks. In the first second of a
wait, a rank of at most 32 reads it at every poll. Otherwise it takes turns: one request for
failures, and one for the regions of a neighbour. Of few ranks each has both turns once a second, so
an error of one reaches the others within two seconds. For many ranks the periods grow: 1,024 ranks
that wait make 19 requests a second in all, more ranks not one more, and an error reaches each
within 70 s. (Where connections end with it, as those of gloo do, waits end at once.) Every rank has
a phase of its own, so that they do not all ask at one time.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

_FEW_RANKS = 32
_FRESH_S = 1.0
_LEAST_PERIOD_S = 1.0
_MAX_RATE = 15.0
"""Requests for failures, a second, of all ranks together, where these are many."""

_MANY_RANKS = 1024
_LONGEST_WAIT_S = 2.0


class RateLimit:
    """Allows one rank one request in each period.

    Args:
        period_s: at least a second.
        phase: of this rank, in periods.
    """

    def __init__(self, period_s: float, phase: float) -> None:
        self.period_s = max(_LEAST_PERIOD_S, period_s)
        self._phase_s = phase * self.period_s
        self._due_s = 0.0

    def acquire(self) -> bool:
        """Return whether a request is due, which is made then."""
        now_s = time.monotonic()
        following_s = now_s + self.period_s - (now_s - self._phase_s) % self.period_s
        # Ranks that have not asked for long would all do so where they begin to wait.
        is_due = now_s - 2 * self.period_s < self._due_s <= now_s
        if self._due_s <= now_s:
            self._due_s = following_s
        return is_due


class PollRateLimit:
    """When a waiting rank reads the store; see [Note: store traffic].

    Args:
        rank, world_size: of the group.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        period_s = world_size / _MAX_RATE * min(1.0, world_size / _MANY_RANKS)
        self.failures = RateLimit(period_s, rank / world_size)
        self.mismatches = RateLimit(4 * period_s, rank / world_size)
        self._longest_wait_s = max(_LONGEST_WAIT_S, 1.25 * period_s)
        self._has_few_ranks = world_size <= _FEW_RANKS
        self._position: object = None
        self.since_s = 0.0
        """When this rank came to where it is, by its first poll there."""

    def is_fresh(self, position: object, *, is_waiting: bool) -> bool:
        """Return whether a wait at ``position`` is in its first second, and may read at any time.

        ``position`` changes whenever this rank goes on.
        """
        now_s = time.monotonic()
        if position != self._position:
            self._position, self.since_s = position, now_s
        return is_waiting and self._has_few_ranks and now_s - self.since_s < _FRESH_S

    def wait_s(self, wanted_s: float) -> float:
        """Return how long one request may wait for a key. A signal is not handled meanwhile."""
        # Many ranks do not poll in between.
        return min(wanted_s, self._longest_wait_s) if self._has_few_ranks else self._longest_wait_s


def backoff_delays(total_s: float, longest_s: float = 0.4) -> Iterator[float]:
    """Yield delays of this sum, at first each twice as long as the one before."""
    pause_s = 0.05
    while total_s > 0:
        yield min(pause_s, total_s)
        total_s -= pause_s
        pause_s = min(2 * pause_s, longest_s)
