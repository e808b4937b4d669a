"""Letters between the ranks of one host, in memory that they share.

A message through gloo passes a thread on either side, which has to get a core that a rank is
computing on: about a millisecond each, four times a bucket. Here a rank writes three words, and the
one that they are for sees them.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import time
from collections.abc import Sequence

import torch

from shardfuse.comm.board import PATIENCE_S, Board
from shardfuse.comm.gloo import memory

READY, DONE = 0, 1
"""Kinds of letters: a part is at this address; it has been read."""

SLOTS = 256
"""Room for letters of a kind from one rank to another; one more replaces the first."""

_WORDS = 3  # of a letter: value, mark, number + 1
_HEAD = 1  # words before the letters: the nonce
_WORD_NBYTES = 8
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW if hasattr(fcntl, "F_ADD_SEALS") else 0
_SPINS = 1000
_SLEEP_S = 50e-6


def _num_words(world_size: int) -> int:
    return _HEAD + world_size**2 * 2 * SLOTS * _WORDS


def random_word() -> int:
    """Return a random number that fits a word."""
    return int.from_bytes(os.urandom(_WORD_NBYTES), "little") >> 1


def create(world_size: int) -> tuple[int, int]:
    """Return a descriptor of new shared memory with room for all letters, and the nonce in it.

    Raises:
        OSError: the system has none.
    """
    if not hasattr(os, "memfd_create"):
        raise OSError("the system has no memfd_create")
    descriptor = os.memfd_create("shardfuse", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    nonce = random_word()
    os.ftruncate(descriptor, _num_words(world_size) * _WORD_NBYTES)
    os.pwrite(descriptor, nonce.to_bytes(_WORD_NBYTES, "little"), 0)
    # Whoever reads a page that was cut off is killed by SIGBUS.
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS | fcntl.F_SEAL_SEAL)
    return descriptor, nonce


def _check(path: str, nonce: int, nbytes: int) -> None:
    """Raise OSError unless ``path`` is the memory with ``nonce``. Changes nothing there."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        head = os.pread(descriptor, _WORD_NBYTES, 0)
        size = os.fstat(descriptor).st_size
        if size != nbytes or head != nonce.to_bytes(_WORD_NBYTES, "little"):
            raise OSError(f"{path} is not what rank 0 shares")
        if fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
            raise OSError(f"{path} can be cut off")
    finally:
        os.close(descriptor)


class Mailbox:
    """The letters of all ranks.

    Args:
        rank: of this process.
        pids: of all ranks.
        shared: what create() gave to rank 0.
        timeout_s: how long ``take()`` waits.
        board: looked at while waiting.
        names: of each rank here, its rank on the board.

    Raises:
        OSError: the kernel refuses, or what is found is not what rank 0 shares.
    """

    def __init__(
        self,
        rank: int,
        pids: Sequence[int],
        shared: tuple[int, int],
        timeout_s: float,
        board: Board,
        names: Sequence[int],
    ) -> None:
        self._rank = rank
        self._names = names
        self._pids = pids
        self._lives = [memory.Life(pid) for pid in pids]
        self._timeout_s = timeout_s
        self._board = board
        descriptor, nonce = shared
        path = f"/proc/{pids[0]}/fd/{descriptor}"
        numel = _num_words(len(pids))
        _check(path, nonce, numel * _WORD_NBYTES)
        with open(path, "r+b") as file:
            self._map = mmap.mmap(file.fileno(), numel * _WORD_NBYTES)
        self._words = (ctypes.c_int64 * numel).from_buffer(self._map)
        if self._words[0] != nonce:
            raise OSError(f"{path} was replaced")

    def put(self, rank: int, kind: int, number: int, mark: int, value: int = 0) -> None:
        """Send letter ``number`` to ``rank``; it is about what ``mark`` says."""
        index = self._index(self._rank, rank, kind, number)
        # The number last: who sees it reads the others.
        self._words[index] = value
        self._words[index + 1] = mark
        self._words[index + 2] = number + 1

    def fetch(self, rank: int, number: int, mark: int, out: torch.Tensor) -> None:
        """Overwrite ``out`` by what letter ``number`` of ``rank`` says to be READY there.

        Raises:
            RuntimeError, PeerError: as take().
            OSError: the kernel refuses.
        """
        address = self.take(rank, READY, number, mark)
        if not self._lives[rank].lasts():  # its number may be another's by now
            self._board.look()
            raise self._ended(rank)
        try:
            memory.read(self._pids[rank], address, out)
        except OSError as error:
            self._board.look()  # it may have told why before it ended
            if isinstance(error, ProcessLookupError) or not self._is_running(rank):
                raise self._ended(rank) from error
            raise

    def take(self, rank: int, kind: int, number: int, mark: int) -> int:
        """Wait for letter ``number`` of ``rank``, which has to have ``mark``; return its value.

        Raises:
            RuntimeError: that process has ended, or the timeout is over.
            PeerError: a rank failed, or the letter is about something else.
        """
        words, index = self._words, self._index(rank, self._rank, kind, number)
        polls, start = 0, time.monotonic()
        # Not before it takes long: to open a file needs memory, and after a backward that freed
        # thousands of pieces malloc takes 5 ms for its first larger request.
        checked = start
        while words[index + 2] != number + 1:
            polls += 1
            if polls < _SPINS:
                os.sched_yield()
                continue
            time.sleep(_SLEEP_S)
            now = time.monotonic()
            if now - checked > PATIENCE_S:
                checked = now
                is_running = self._is_running(rank)
                # A rank may end after its last letter, or its alarm, so these come second.
                if words[index + 2] != number + 1:
                    self._board.look()
                    self._check(rank, is_running, now - start)
        if words[index + 1] != mark:
            self._board.resolve(self._names[rank])
        return words[index]

    def _is_running(self, rank: int) -> bool:
        return self._lives[rank].lasts() and memory.is_running(self._pids[rank])

    def _check(self, rank: int, is_running: bool, waited_s: float) -> None:
        """Raise if ``rank`` will not write any more."""
        if not is_running:
            raise self._ended(rank)
        if waited_s > self._timeout_s:
            raise RuntimeError(
                f"[rank {self._board.rank}] Rank {self._names[rank]} did not take part in a "
                f"collective within {self._timeout_s:g} s, the timeout of the process group."
            )

    def _ended(self, rank: int) -> RuntimeError:
        return RuntimeError(
            f"[rank {self._board.rank}] The process of rank {self._names[rank]} has ended in the "
            "middle of a collective. Its own output tells why."
        )

    def _index(self, sender: int, receiver: int, kind: int, number: int) -> int:
        """Return which word has the value of a letter; its mark and its number + 1 follow."""
        pair = receiver * len(self._pids) + sender
        return _HEAD + ((pair * 2 + kind) * SLOTS + number % SLOTS) * _WORDS
