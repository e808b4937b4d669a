"""Reduce-scatter and all-gather between pairs of ranks, for gloo on the CPU.

gloo's own reduce-scatter clones its input and all-reduces it, so it moves twice the bytes that it
has to, and its all-gather passes every part around a ring. Here each rank gets from every other
rank the one part that belongs here: (W - 1) / W of the bytes each way, all pairs at once. The sums
are left to the caller, who reads every gradient once more anyway.

Parts pass no socket where all ranks are processes of one host: the owner tells the address, the
other rank reads its memory and says when it has done. Measured: launch/bench/results.
"""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from shardfuse.comm import mailbox, memory
from shardfuse.comm.base import Handle
from shardfuse.comm.mailbox import DONE, READY, SLOTS, Mailbox
from shardfuse.comm.process_group import ProcessGroupCommunicator

logger = logging.getLogger("shardfuse")

_TAG = 0x5F000000
"""Users hardly ever take it. Messages of one tag arrive in the order in which they were posted."""


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

    def __init__(self, number: int, finish: Callable[[], None]) -> None:
        self.number = number
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
            first collective, by all ranks together.
    """

    def __init__(self, process_group: Any, device: torch.device, *, reads_memory: bool) -> None:
        super().__init__(process_group, device)
        distances = range(1, self.world_size)
        self._sources = [(self.rank - k) % self.world_size for k in distances]
        self._destinations = [(self.rank + k) % self.world_size for k in distances]
        self._is_tried = not reads_memory
        self._mailbox: Mailbox | None = None  # where ranks read each other's memory
        self._num_direct = 1  # number of the next such collective, the same on all ranks
        self._in_flight: deque[_DirectExchange] = deque()
        self._open: list[tuple[int, Sequence[torch.Tensor]]] = []  # what others may still read

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
        box = self._open_mailbox()
        if box is None:
            return _Exchange(self._receive(into) + self._send(out_of), *into, *out_of)
        return self._move_directly(box, into, out_of, keeps_input)

    def _move_directly(
        self,
        box: Mailbox,
        into: Sequence[torch.Tensor],
        out_of: Sequence[torch.Tensor],
        keeps_input: bool,
    ) -> Handle:
        """As _move(), by reading the sources' memory, not before wait().

        With ``keeps_input`` wait() does not stay until others have read as well: ranks run a few
        milliseconds apart, and would all lose them at every bucket.
        """
        number = self._num_direct
        self._num_direct += 1
        # Letters have a limited room: what has been under way for long is finished here.
        while self._in_flight and self._in_flight[0].number <= number - SLOTS // 2:
            self._in_flight.popleft().wait()
        self._finish_open()
        for rank, part in zip(self._destinations, out_of, strict=True):
            box.put(rank, READY, number, part.data_ptr())

        def finish() -> None:
            for rank, part in zip(self._sources, into, strict=True):
                box.fetch(rank, number, part)
                box.put(rank, DONE, number)
            self._open.append((number, out_of))
            if not keeps_input:
                self._finish_open()

        handle = _DirectExchange(number, finish)
        self._in_flight.append(handle)
        return handle

    def _finish_open(self) -> None:
        """Wait until others have read what they were told of."""
        for number, _ in self._open:
            for rank in self._destinations:
                assert self._mailbox is not None
                self._mailbox.take(rank, DONE, number)
        self._open.clear()

    def _open_mailbox(self) -> Mailbox | None:
        """Return the mailbox if every rank can use every other's memory. Collective at first."""
        if not self._is_tried:
            self._is_tried = True
            self._mailbox = self._try_memory()
            how = "through sockets" if self._mailbox is None else "by reading memory"
            logger.info("parts of %d ranks move %s", self.world_size, how)
        return self._mailbox

    def _try_memory(self) -> Mailbox | None:
        """Return a mailbox, or None if a rank cannot use another's memory. Collective.

        Each reads a random number out of the others and compares it with what they say it is.
        """
        secret = torch.randint(1 << 62, (1,), generator=torch.Generator().manual_seed(_entropy()))
        failed = torch.zeros(1, dtype=torch.int32)
        descriptor = -1
        try:
            descriptor = mailbox.create(self.world_size) if self.rank == 0 else -1
        except (AttributeError, OSError) as error:
            logger.info("no memory is shared: %s", error)
        mine = [memory.host_id(), os.getpid(), int(secret), secret.data_ptr(), descriptor]
        table = torch.empty(self.world_size * len(mine), dtype=torch.int64)
        super().all_gather(table, torch.tensor(mine)).wait()
        rows = table.view(self.world_size, -1).tolist()
        found = torch.empty(1, dtype=torch.int64)
        box = None
        try:
            for host, pid, value, address, _ in rows:
                if host == -1 or host != mine[0]:
                    raise OSError("ranks are on several hosts, or the system has no such call")
                memory.read(pid, address, found)
                if int(found) != value:
                    raise OSError("process ids are of another namespace")
            pids = [row[1] for row in rows]
            box = Mailbox(self.rank, pids, rows[0][4], self._timeout_s())
        except OSError as error:
            logger.info("memory of other ranks is not read: %s", error)
            failed += 1
        # Also keeps `secret` and the descriptor until all have used them.
        self.all_reduce(failed, "max").wait()
        if descriptor >= 0:
            os.close(descriptor)
        return None if int(failed) else box

    def _timeout_s(self) -> float:
        """Return the timeout of the process group's collectives."""
        options = getattr(self._group._get_backend(torch.device("cpu")), "options", None)
        timeout = getattr(options, "_timeout", dist.distributed_c10d.default_pg_timeout)
        return float(timeout.total_seconds())

    def _receive(self, tensors: Sequence[torch.Tensor]) -> list[Any]:
        """Post a receive from every source."""
        return [
            dist.irecv(tensor, group=self._group, group_src=rank, tag=_TAG)
            for tensor, rank in zip(tensors, self._sources, strict=True)
        ]

    def _send(self, tensors: Sequence[torch.Tensor]) -> list[Any]:
        """Post a send to every destination."""
        return [
            dist.isend(tensor, group=self._group, group_dst=rank, tag=_TAG)
            for tensor, rank in zip(tensors, self._destinations, strict=True)
        ]


def _entropy() -> int:
    return int.from_bytes(os.urandom(8), "little") >> 1
