"""Reduce-scatter and all-gather between pairs of ranks, for gloo on the CPU.

gloo's own reduce-scatter clones its input and all-reduces it, so it moves twice the bytes that it
has to, and its all-gather passes every part around a ring. Here each rank gets from every other
rank the one part that belongs here: (W - 1) / W of the bytes each way, all pairs at once. The sums
are left to the caller, who reads every gradient once more anyway.

Parts pass no socket where all ranks are processes of one host: the owner tells the address, the
other rank reads its memory and says when it has done. Measured: launch/bench/results.

[Note: ready] Through a socket gloo sends a part only when the receiver's word has come that it is
ready, and that word waits behind all that the receiver has on its own way. Where both ranks send
for long, the link then stands still between parts. So receives are posted ahead, as soon as their
memory is free: those of a round of gradients in the step before it, those of parameters when a
step begins. Nothing arrives by them earlier: the sender sends when it has something to send.
"""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from shardfuse.comm.base import Handle, Labelled, PartsHandle, Progress, ReduceOp
from shardfuse.comm.calls import digest
from shardfuse.comm.gloo import mailbox, memory
from shardfuse.comm.gloo.mailbox import DONE, READY, SLOTS, Mailbox
from shardfuse.comm.process_group import ProcessGroupCommunicator
from shardfuse.comm.staging import PartsInFlight, WorkHandle

logger = logging.getLogger("shardfuse")

_TAGS = 0x40000000
"""Tags of messages through sockets are this and what the message is marked by."""

_SMALL_NBYTES = 1 << 20
"""An all-reduce or broadcast that sends no more than so many bytes goes from rank to rank, too."""


class _Once:
    """A handle that calls ``finish`` when it is first waited for."""

    def __init__(self, finish: Callable[[], None]) -> None:
        self._finish: Callable[[], None] | None = finish

    def wait(self) -> None:
        finish, self._finish = self._finish, None
        if finish is not None:
            finish()


def _finish_before(in_flight: deque[tuple[int, _Once]], number: int) -> None:
    """Wait for what was launched before the collective of that number."""
    while in_flight and in_flight[0][0] < number:
        in_flight.popleft()[1].wait()


class PairwiseCommunicator(ProcessGroupCommunicator):
    """ProcessGroupCommunicator whose parts go from rank to rank; sums are left to the caller.

    For tensors that a backend can send, on a device where waiting blocks the host: gloo on CPU.

    Args:
        process_group, device, within: as of ProcessGroupCommunicator.
        reads_memory: whether ranks of one host may read each other's memory. It is tried at the
            first collective, by all ranks together.
    """

    def __init__(
        self,
        process_group: Any,
        device: torch.device,
        *,
        reads_memory: bool,
        within: ProcessGroupCommunicator | None = None,
    ) -> None:
        super().__init__(process_group, device, within=within)
        distances = range(1, self.world_size)
        self._sources = [(self.rank - k) % self.world_size for k in distances]
        self._destinations = [(self.rank + k) % self.world_size for k in distances]
        self._is_tried = not reads_memory
        self._mailbox: Mailbox | None = None  # where ranks read each other's memory
        self._epoch = self._board.epoch
        self._num_direct = 1  # number of the next such collective, the same on all ranks
        self._in_flight: deque[tuple[int, _Once]] = deque()  # with their numbers
        # What others may still read: (number, mark, destinations, tensors).
        self._open: list[tuple[int, int, Sequence[int], Sequence[torch.Tensor]]] = []
        self._expected: dict[int, WorkHandle] = {}  # receives posted ahead, by their mark

    @contextmanager
    def call(self, name: str) -> Iterator[None]:
        with super().call(name):
            yield
            self._finish_open()  # what they read may be freed now, or this process end

    def _confirm(self) -> None:
        """Do nothing: every message tells."""

    @property
    def progress(self) -> Progress:
        """Sockets move while this rank computes; memory is read when it is waited for."""
        return "in any order" if self._open_mailbox() is None else "when waited for"

    def reduce_scatter(
        self,
        input: torch.Tensor,
        into: torch.Tensor | None = None,
        *,
        slot: int = 0,
        label: str | None = None,
        is_summed: bool = True,
    ) -> PartsHandle:
        """Send each rank its part of ``input``; wait() gives this rank's and theirs, each (n,).

        Others may still read ``input`` until the next collective here has been launched, the call
        has ended, or a collective has been waited for that they launched after they had waited for
        this one.
        """
        parts = input.chunk(self.world_size)
        theirs = self._room_for_parts(slot, input)
        out_of = [parts[rank] for rank in self._destinations]
        if label is None:
            mark = self._board.present.note("reduce_scatter", input.numel(), input.dtype)
        else:
            mark = self._mark("reduce_scatter", input, label)
        sending = self._board.begin_sending(label)
        with sending():
            handle = self._exchange(mark, theirs, out_of, keeps_input=True)
        return PartsInFlight(handle, (parts[self.rank], *theirs), sending)

    def expect(self, kind: Labelled, tensor: torch.Tensor, *, label: str, slot: int = 0) -> None:
        if self._open_mailbox() is not None:
            return
        mark = self._mark(kind, tensor, label)
        assert mark not in self._expected, "expected twice"
        if kind == "all_gather":
            parts = tensor.chunk(self.world_size)
            room = tuple(parts[rank] for rank in self._sources)
        else:
            room = self._room_for_parts(slot, tensor)
        self._expected[mark] = self._receive(mark, zip(self._sources, room, strict=True))

    def _mark(self, kind: Labelled, tensor: torch.Tensor, label: str) -> int:
        """Return what tells the messages of a collective with a label from all others."""
        call = f"call {self._board.present.digest}" if kind == "all_gather" else "any call"
        who = f"optimizer {self.number}, epoch {self.epoch}, {call}, {label}"
        return digest(f"{who}: {kind} of {tensor.numel()} {tensor.dtype}")

    def _room_for_parts(self, slot: int, input: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return what the other ranks' parts are received into."""
        others = self.world_size - 1
        numel = input.numel() // self.world_size * others
        return self._staged("receive", slot, numel, input).chunk(others)

    def all_gather(
        self, output: torch.Tensor, input: torch.Tensor, *, label: str | None = None
    ) -> Handle:
        parts = output.chunk(self.world_size)
        into = [parts[rank] for rank in self._sources]
        mark = self._board.present.note("all_gather", output.numel(), output.dtype)
        if label is not None:
            mark = self._mark("all_gather", output, label)
        handle = self._exchange(mark, into, [input] * len(into), keeps_input=False)
        if parts[self.rank].data_ptr() != input.data_ptr():
            parts[self.rank].copy_(input)
        return handle

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> Handle:
        """Reduce ``tensor`` (n,) over ranks, in place; the sums are equal on all ranks.

        Small ones, which all of shardfuse's usually are, go from rank to rank: that takes no
        thread of gloo's, and what does not belong together is told apart.
        """
        if tensor.nbytes * (self.world_size - 1) > _SMALL_NBYTES:
            return super().all_reduce(tensor, op)
        everyone = tensor.new_empty(self.world_size, tensor.numel())
        everyone[self.rank] = tensor
        mark = self._board.present.note(f"all_reduce by {op}", tensor.numel(), tensor.dtype)
        into = [everyone[rank] for rank in self._sources]
        own = [everyone[self.rank]] * len(into)
        # Until all have read it: it may be the last thing that an optimizer does.
        handle = self._exchange(mark, into, own, keeps_input=False)

        def add_up() -> None:
            handle.wait()
            total = everyone[0].clone()
            for part in everyone[1:]:  # in the order of ranks
                total = total.add_(part) if op == "sum" else torch.maximum(total, part)
            tensor.copy_(total)

        return _Once(add_up)

    def broadcast(self, tensor: torch.Tensor, src: int = 0) -> Handle:
        """Overwrite ``tensor`` (n,) by group rank ``src``'s; small ones as in all_reduce()."""
        if tensor.nbytes * (self.world_size - 1) > _SMALL_NBYTES:
            return super().broadcast(tensor, src)
        mark = self._board.present.note(f"broadcast from {src}", tensor.numel(), tensor.dtype)
        if self.rank != src:
            return self._move(mark, [(src, tensor)], [], keeps_input=True)
        out_of = [(rank, tensor) for rank in self._destinations]
        return self._move(mark, [], out_of, keeps_input=True)

    def _exchange(
        self,
        mark: int,
        into: Sequence[torch.Tensor],
        out_of: Sequence[torch.Tensor],
        *,
        keeps_input: bool,
    ) -> Handle:
        """Receive a part from every other rank ``into``, and send each its own; as _move()."""
        return self._move(
            mark,
            list(zip(self._sources, into, strict=True)),
            list(zip(self._destinations, out_of, strict=True)),
            keeps_input=keeps_input,
        )

    def _move(
        self,
        mark: int,
        into: Sequence[tuple[int, torch.Tensor]],
        out_of: Sequence[tuple[int, torch.Tensor]],
        *,
        keeps_input: bool,
    ) -> Handle:
        """Receive tensors from the ranks named with them, and send others to theirs.

        Messages are told apart by ``mark``; see Call.note(). The sources' memory is not read before
        wait(). With ``keeps_input`` that does not stay until others have read as well: ranks run a
        few milliseconds apart, and would all lose them at every bucket.
        """
        box = self._open_mailbox()
        if box is None:
            return self._send_and_receive(mark, into, out_of)
        self._start_anew()
        number = self._num_direct
        self._num_direct += 1
        # Letters have a limited room: what has been under way for long is finished here.
        _finish_before(self._in_flight, number - SLOTS // 2 + 1)
        self._finish_open()
        for rank, part in out_of:
            box.put(rank, READY, number, mark, part.data_ptr())

        def finish() -> None:
            # Others that have waited for those may be waiting now for this rank to read.
            _finish_before(self._in_flight, number)
            for rank, part in into:
                box.fetch(rank, number, mark, part)
                box.put(rank, DONE, number, mark)
            readers = [rank for rank, _ in out_of]
            self._open.append((number, mark, readers, [part for _, part in out_of]))
            if not keeps_input:
                self._finish_open()

        handle = _Once(finish)
        self._in_flight.append((number, handle))
        return handle

    def _start_anew(self) -> None:
        """Forget what was under way when a call failed, and number letters alike on all ranks."""
        if self._epoch != self.epoch:
            self._epoch = self.epoch
            self._num_direct = (self._epoch << 32) + 1
            self._in_flight.clear()
            self._open.clear()

    def _finish_open(self) -> None:
        """Wait until others have read what they were told of."""
        self._start_anew()
        for number, mark, readers, _ in self._open:
            for rank in readers:
                assert self._mailbox is not None
                self._mailbox.take(rank, DONE, number, mark)
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

        Each reads a random number out of the others, and finds another in the mailbox's memory
        before it writes there. Whatever surprises one of them, all use sockets.
        """
        secret = torch.tensor([mailbox.random_word()])
        shared, box, reason = None, None, ""
        try:
            host = memory.host_id()
            shared = mailbox.create(self.world_size) if self.rank == 0 else None
        except Exception as error:
            host, reason = -1, str(error)
        descriptor, nonce = (-1, 0) if shared is None else shared
        mine = [host, os.getpid(), int(secret), secret.data_ptr(), descriptor, nonce]
        rows = self._tell_all(mine)
        try:
            self._check_hosts(rows)
            found = torch.empty(1, dtype=torch.int64)
            for _, pid, value, address, _, _ in rows:
                memory.read(pid, address, found)
                if int(found) != value:
                    raise OSError("process ids are of another namespace")
            pids = [row[1] for row in rows]
            shared = (rows[0][4], rows[0][5])
            names = self._board_ranks
            box = Mailbox(self.rank, pids, shared, self._timeout_s(), self._board, names)
        except Exception as error:
            reason = reason or str(error)
        # Also keeps `secret` and the descriptor until all have used them.
        is_failed = max(row[0] for row in self._tell_all([int(box is None)]))
        if descriptor >= 0:
            os.close(descriptor)
        if is_failed:
            logger.info("memory of other ranks is not read: %s", reason or "another rank cannot")
        return None if is_failed else box

    def _check_hosts(self, rows: Sequence[Sequence[int]]) -> None:
        """Raise OSError unless every rank found its own host out, and all the same one."""
        unable = [rank for rank, row in enumerate(rows) if row[0] == -1]
        if unable:
            raise OSError(f"rank {unable[0]} cannot; its own log tells why")
        if any(row[0] != rows[0][0] for row in rows):
            raise OSError("ranks are on several hosts")
        if rows[0][4] < 0:
            raise OSError("rank 0 has no memory to share; its own log tells why")

    def _tell_all(self, values: list[int]) -> list[list[int]]:
        """Return every rank's ``values``, which have gone through sockets."""
        everyone = torch.empty(self.world_size, len(values), dtype=torch.int64)
        everyone[self.rank] = torch.tensor(values)
        mark = self._board.present.note("introduction", len(values), everyone.dtype)
        into = [(rank, everyone[rank]) for rank in self._sources]
        out_of = [(rank, everyone[self.rank]) for rank in self._destinations]
        self._send_and_receive(mark, into, out_of).wait()
        rows: list[list[int]] = everyone.tolist()
        return rows

    def _timeout_s(self) -> float:
        """Return the timeout of the process group's collectives."""
        options = getattr(self._live_group()._get_backend(torch.device("cpu")), "options", None)
        timeout = getattr(options, "_timeout", dist.distributed_c10d.default_pg_timeout)
        return float(timeout.total_seconds())

    def _send_and_receive(
        self,
        mark: int,
        into: Sequence[tuple[int, torch.Tensor]],
        out_of: Sequence[tuple[int, torch.Tensor]],
    ) -> Handle:
        """As _move(), through sockets. Only messages of one tag, and so of one size, meet."""
        arrival = self._expected.pop(mark, None) or self._receive(mark, into)
        works = [
            self._launch(dist.isend, part, group_dst=rank, tag=_tag(mark)) for rank, part in out_of
        ]
        return arrival.joined(works, *(part for _, part in out_of))

    def _receive(self, mark: int, into: Iterable[tuple[int, torch.Tensor]]) -> WorkHandle:
        """Post the receives of tensors from the ranks named with them."""
        into = list(into)
        works = [
            self._launch(dist.irecv, part, group_src=rank, tag=_tag(mark)) for rank, part in into
        ]
        return WorkHandle(self._watch, works, *(part for _, part in into))


def _tag(mark: int) -> int:
    """Return what gloo tells messages apart by."""
    return _TAGS | mark % _TAGS
