"""RollCall: which ranks have ended, where a transport only says that a message failed.

[Note: absent ranks] A connection fails if the rank at its other end has ended. It also fails if
that rank lives: gloo closes all connections of a rank of which one wait has timed out. And the
error of a backend's own collective does not tell which connection failed. So a rank whose transport
fails calls the roll, through the process group's store. Every rank answers as soon as its own
transport fails, or when it polls the store the next time. Only a rank that has not answered is
absent. The first rank that knows writes the text that all ranks raise: it names absent ranks alone.

gloo tells a rank which of its connections have failed, so these ranks have a fraction of a second
to answer. Otherwise all ranks have the time in which each polls the store once, and only the rank
that called first reads all answers.

The rank that ends may have held the store (not under torchrun). Then a rank that finds the store
gone looks at once which of its connections have failed, before its peers raise and close theirs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shardfuse.comm.store import as_text, peek

CALL = "calls the roll"
"""In place of a failure: the text of the first failure while nobody knows its cause."""

_MAX_NAMES = 4


class RollCall:
    """The answers of the ranks of one process group; see [Note: absent ranks].

    Args:
        store: of the process group.
        rank: of this process in it.
    """

    def __init__(self, store: Any, rank: int) -> None:
        self._store = store
        self._rank = rank
        self._answered = -1  # the last generation in which this rank has answered

    def begin(self, key: str, generation: int) -> bool:
        """Call the roll, and answer; return whether no other rank had called or failed before.

        Args:
            key: of the first failure in this generation.
            generation: of the session.
        """
        self.answer(generation)
        mine = f"rank {self._rank} {CALL}"
        return as_text(self._store.compare_set(key, "", mine)) == mine

    def answer(self, generation: int) -> None:
        """Write, once, that this rank is there."""
        if self._answered != generation:
            self._store.set(f"here/{generation}/{self._rank}", "")
            self._answered = generation

    def find_absent(self, ranks: Sequence[int], generation: int) -> list[int]:
        """Return those of ``ranks`` that have not answered, by one request each."""
        keys = {rank: f"here/{generation}/{rank}" for rank in ranks if rank != self._rank}
        return [rank for rank, key in keys.items() if peek(self._store, key) is None]


def name_ranks(ranks: Sequence[int]) -> str:
    """Return "rank 3", or "ranks 3, 5, 7, 8 and 12 more"."""
    names = ", ".join(map(str, ranks[:_MAX_NAMES]))
    more = f" and {len(ranks) - _MAX_NAMES} more" if len(ranks) > _MAX_NAMES else ""
    return f"rank {names}" if len(ranks) == 1 else f"ranks {names}{more}"
