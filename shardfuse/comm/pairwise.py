"""Reduce-scatter and all-gather between pairs of ranks, for gloo on the CPU.

gloo's own reduce-scatter clones its input and all-reduces it, so it moves twice the bytes that it
has to, and its all-gather passes every part around a ring. Here each rank gets from every other
rank the one part that belongs here: (W - 1) / W of the bytes each way, all pairs at once. The sums
are left to the caller, who reads every gradient once more anyway.

Large parts do not pass a socket where all ranks are processes of one host: the owner sends the
address, the other rank reads its memory and says when it has done. Measured: launch/bench/results.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from shardfuse.comm import memory
from shardfuse.comm.base import Handle
from shardfuse.comm.process_group import ProcessGroupCommunicator

logger = logging.getLogger("shardfuse")

# Messages between two ranks that have one tag arrive in the order in which they were posted. Parts
# are posted when a collective is launched, in one order on all ranks; answers when it is waited
# for, in any order, so each collective has tags of its own. Users hardly ever take any of these.
_PART_TAG, _READY_TAG, _DONE_TAG = 0x5F000000, 0x5F100000, 0x5F200000
_NUM_TAGS = 1 << 20

DIRECT_MIN_NBYTES = 256 << 10
"""Smaller parts are cheaper to send than to tell about."""


class _Exchange:
    """Sends and receives in flight; keeps their tensors alive."""

    def __init__(self, works: list[Any], *tensors: torch.Tensor) -> None:
        self._works = works
        self._tensors = tensors

    def wait(self) -> None:
        works, self._works = self._works, []
        for work in works:
            work.wait()
        self._tensors = ()


class _DirectExchange:
    """Parts that are read from the other ranks' memory when they are waited for."""

    def __init__(self, finish: Callable[[], None]) -> None:
        self._finish: Callable[[], None] | None = finish

    def wait(self) -> None:
        finish, self._finish = self._finish, None
        if finish is not None:
            finish()


class PairwiseCommunicator(ProcessGroupCommunicator):
    """ProcessGroupCommunicator with exchange(), and an all-gather that goes from rank to rank.

    For tensors that a backend can send, on a device where waiting blocks the host: gloo on CPU.

    Args:
        process_group, device: as of ProcessGroupCommunicator.
        reads_memory: whether ranks of one host may read each other's memory. It is tried at the
            first large collective, by all ranks together.
    """

    def __init__(self, process_group: Any, device: torch.device, *, reads_memory: bool) -> None:
        super().__init__(process_group, device)
        distances = range(1, self.world_size)
        self._sources = [(self.rank - k) % self.world_size for k in distances]
        self._destinations = [(self.rank + k) % self.world_size for k in distances]
        self._reads_memory = reads_memory
        self._pids: list[int] | None = None  # of the ranks, once they were tried; [] is none
        self._num_direct = 0  # collectives so far, the same on all ranks
        self._open: list[_Exchange] = []  # what others may still be reading

    @property
    def can_exchange(self) -> bool:
        """Whether ``exchange()`` works: yes."""
        return True

    def exchange(self, received: torch.Tensor, input: torch.Tensor) -> Handle:
        """Send each rank its part of ``input``; receive theirs into ``received`` (W - 1, n).

        Others may still read ``input`` until the next collective here has been launched, or any has
        been waited for that they launched after they had waited for this one.
        """
        parts = input.chunk(self.world_size)
        out_of = [parts[rank] for rank in self._destinations]
        return self._move(list(received), out_of, keeps_input=True)

    def all_gather(self, output: torch.Tensor, input: torch.Tensor) -> Handle:
        """Write every rank's ``input`` (n,) into ``output`` (world_size * n,), in rank order."""
        parts = output.chunk(self.world_size)
        into = [parts[rank] for rank in self._sources]
        handle = self._move(into, [input] * len(into), keeps_input=False)
        if parts[self.rank].data_ptr() != input.data_ptr():
            parts[self.rank].copy_(input)
        return handle

    def _move(
        self, into: Sequence[torch.Tensor], out_of: Sequence[torch.Tensor], *, keeps_input: bool
    ) -> Handle:
        """Bring a part from every source ``into`` here; let every destination have its own."""
        if into[0].nbytes >= DIRECT_MIN_NBYTES and self._can_read():
            return self._move_directly(into, out_of, keeps_input)
        works = self._receive(into, _PART_TAG) + self._send(out_of, _PART_TAG)
        return _Exchange(works, *into, *out_of)

    def _move_directly(
        self, into: Sequence[torch.Tensor], out_of: Sequence[torch.Tensor], keeps_input: bool
    ) -> Handle:
        """As _move(), by reading the sources' memory, not before wait().

        With ``keeps_input`` wait() does not stay until others have read as well: ranks run a few
        milliseconds apart, and would all lose them at every bucket.
        """
        assert self._pids is not None
        pids = self._pids
        self._finish_open()
        number = self._num_direct % _NUM_TAGS
        self._num_direct += 1
        addresses = [torch.zeros(1, dtype=torch.int64) for _ in into]
        answers = [torch.zeros(1, dtype=torch.int64) for _ in out_of]
        told = [torch.tensor([part.data_ptr()]) for part in out_of]
        ready = self._receive(addresses, _READY_TAG + number)
        # Every destination is a source too.
        works = self._receive(answers, _DONE_TAG + number) + self._send(told, _READY_TAG + number)

        def finish() -> None:
            ranks = zip(ready, addresses, into, self._sources, strict=True)
            for work, address, part, rank in ranks:
                work.wait()
                memory.read(pids[rank], int(address), part)
            done = [torch.ones(1, dtype=torch.int64) for _ in into]
            last = works + self._send(done, _DONE_TAG + number)
            self._open.append(_Exchange(last, *told, *out_of, *answers, *done))
            if not keeps_input:
                self._finish_open()

        return _DirectExchange(finish)

    def _finish_open(self) -> None:
        """Wait until others have read what they were told of."""
        for exchange in self._open:
            exchange.wait()
        self._open.clear()

    def _can_read(self) -> bool:
        """Return whether every rank can read every other's memory. Collective at the first call."""
        if self._pids is None:
            self._pids = self._try_reading() if self._reads_memory else []
            how = "by reading memory" if self._pids else "through sockets"
            logger.info("parts of %d bytes and more move %s", DIRECT_MIN_NBYTES, how)
        return bool(self._pids)

    def _try_reading(self) -> list[int]:
        """Return the process id of every rank, or [] if one of them cannot read another's memory.

        Each reads a random number out of the others and compares it with what they say it is.
        """
        secret = torch.randint(1 << 62, (1,), generator=torch.Generator().manual_seed(_entropy()))
        mine = [memory.host_id(), os.getpid(), secret.data_ptr(), int(secret)]
        table = torch.empty(self.world_size * len(mine), dtype=torch.int64)
        super().all_gather(table, torch.tensor(mine)).wait()
        rows = table.view(self.world_size, -1).tolist()
        failed = torch.zeros(1, dtype=torch.int32)
        found = torch.empty(1, dtype=torch.int64)
        try:
            for host, pid, address, value in rows:
                if host == -1 or host != mine[0]:
                    raise OSError("ranks are on several hosts")
                memory.read(pid, address, found)
                if int(found) != value:
                    raise OSError("process ids are of another namespace")
        except OSError as error:
            logger.info("memory of other ranks is not read: %s", error)
            failed += 1
        # Also keeps `secret` alive until all have read it.
        self.all_reduce(failed, "max").wait()
        return [] if int(failed) else [pid for _, pid, _, _ in rows]

    def _receive(self, tensors: Sequence[torch.Tensor], tag: int) -> list[Any]:
        """Post a receive from every source."""
        return [
            dist.irecv(tensor, group=self._group, group_src=rank, tag=tag)
            for tensor, rank in zip(tensors, self._sources, strict=True)
        ]

    def _send(self, tensors: Sequence[torch.Tensor], tag: int) -> list[Any]:
        """Post a send to every destination."""
        return [
            dist.isend(tensor, group=self._group, group_dst=rank, tag=tag)
            for tensor, rank in zip(tensors, self._destinations, strict=True)
        ]


def _entropy() -> int:
    return int.from_bytes(os.urandom(8), "little") >> 1
