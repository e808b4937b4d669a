"""Letters between the ranks of one host, in memory that they share.

A message through gloo passes a thread on either side, which has to get a core that a rank is
computing on: about a millisecond each, four times a bucket. Here a rank writes two words, and the
one that they are for sees them.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from collections.abc import Sequence

import torch

from shardfuse.comm import memory

READY, DONE = 0, 1
"""Kinds of letters: a part is at this address; it has been read."""

SLOTS = 256
"""Room for letters of a kind from one rank to another; one more replaces the first."""

_WORDS = 2  # of a letter: value, number + 1
_WORD_NBYTES = 8
_SPINS = 1000
_SLEEP_S = 50e-6
_CHECK_S = 0.1


def _numel(world_size: int) -> int:
    return world_size**2 * 2 * SLOTS * _WORDS


def create(world_size: int) -> int:
    """Return a descriptor of new shared memory with room for all letters.

    Raises:
        OSError: the system has none.
    """
    descriptor = os.memfd_create("shardfuse")
    os.ftruncate(descriptor, _numel(world_size) * _WORD_NBYTES)
    return descriptor


class Mailbox:
    """The letters of all ranks.

    Args:
        rank: of this process.
        pids: of all ranks.
        descriptor: what create() gave to rank 0.
        timeout_s: how long ``take()`` waits.

    Raises:
        OSError: the kernel refuses.
    """

    def __init__(self, rank: int, pids: Sequence[int], descriptor: int, timeout_s: float) -> None:
        self._rank = rank
        self._pids = pids
        self._timeout_s = timeout_s
        numel = _numel(len(pids))
        with open(f"/proc/{pids[0]}/fd/{descriptor}", "r+b") as file:
            shared = mmap.mmap(file.fileno(), numel * _WORD_NBYTES)
        self._words = (ctypes.c_int64 * numel).from_buffer(shared)

    def put(self, rank: int, kind: int, number: int, value: int = 0) -> None:
        """Send letter ``number`` to ``rank``."""
        index = self._index(self._rank, rank, kind, number)
        # The value first: who sees the number reads it.
        self._words[index] = value
        self._words[index + 1] = number + 1

    def fetch(self, rank: int, number: int, out: torch.Tensor) -> None:
        """Overwrite ``out`` by what letter ``number`` of ``rank`` says to be READY there.

        Raises:
            RuntimeError: as take().
            OSError: the kernel refuses.
        """
        address = self.take(rank, READY, number)
        try:
            memory.read(self._pids[rank], address, out)
        except ProcessLookupError as error:
            raise self._ended(rank) from error

    def take(self, rank: int, kind: int, number: int) -> int:
        """Wait for letter ``number`` of ``rank`` and return its value.

        Raises:
            RuntimeError: that process has ended, or the timeout is over.
        """
        words, index = self._words, self._index(rank, self._rank, kind, number)
        polls, start = 0, time.monotonic()
        # Not before it takes long: to open a file needs memory, and after a backward that freed
        # thousands of pieces malloc takes 5 ms for its first larger request.
        checked = start
        while words[index + 1] != number + 1:
            polls += 1
            if polls < _SPINS:
                os.sched_yield()
                continue
            time.sleep(_SLEEP_S)
            now = time.monotonic()
            if now - checked > _CHECK_S:
                checked = now
                is_running = memory.is_running(self._pids[rank])
                # A rank may end after its last letter, so this comes second.
                if words[index + 1] != number + 1:
                    self._check(rank, is_running, now - start)
        return words[index]

    def _check(self, rank: int, is_running: bool, waited_s: float) -> None:
        """Raise if ``rank`` will not write any more."""
        if not is_running:
            raise self._ended(rank)
        if waited_s > self._timeout_s:
            raise RuntimeError(
                f"[rank {self._rank}] Rank {rank} did not take part in a collective within "
                f"{self._timeout_s:g} s, the timeout of the process group."
            )

    def _ended(self, rank: int) -> RuntimeError:
        return RuntimeError(
            f"[rank {self._rank}] The process of rank {rank} has ended in the middle of a "
            "collective. Its own output tells why."
        )

    def _index(self, sender: int, receiver: int, kind: int, number: int) -> int:
        """Return which word has the value of a letter; the next has its number + 1."""
        pair = receiver * len(self._pids) + sender
        return ((pair * 2 + kind) * SLOTS + number % SLOTS) * _WORDS
