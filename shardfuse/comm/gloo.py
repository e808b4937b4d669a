"""Reduce-scatter and all-gather between pairs of ranks, for gloo on the CPU.

gloo's own reduce-scatter clones its input and all-reduces it, so it moves twice the bytes that it
has to, and its all-gather passes every part around a ring. Here each rank receives from every peer
the one part that belongs to it: (W - 1) / W of the bytes in each direction, all pairs at once. The
sums are left to the caller, which reads every gradient once more anyway.

If all ranks are processes of one host, parts do not go through sockets: the owner publishes the
address in shared memory, the peer reads the owner's memory and acknowledges. Measured:
launch/bench/results.

[Note: posted receives] gloo sends a part through a socket only when the receiver has announced that
it is ready, and this announcement waits behind everything that the receiver is sending itself.
Where both ranks send for long, the link would stand still between parts. So receives are posted
ahead, as soon as their memory is free: those of an iteration's gradients in the step before it,
those of parameters when a step begins. Nothing arrives earlier by that: the sender sends when it
has data to send.
"""

from __future__ import annotations

import ctypes
import fcntl
import logging
import mmap
import os
import platform
import select
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist

from shardfuse.comm.native import ProcessGroupCommunicator
from shardfuse.comm.numbers import unlabelled_tag
from shardfuse.comm.regions import digest
from shardfuse.comm.session import PATIENCE_S, GroupState
from shardfuse.comm.transport import AsyncModel, Completion, Label, Labelled, PartialSums, ReduceOp

logger = logging.getLogger("shardfuse")

_TAGS = 0x40000000
"""Tags of messages through sockets are this and 30 bits."""

_LABELLED, _OF_LARGER_GROUP = 1 << 29, 1 << 28

_SMALL_NBYTES = 1 << 20
"""An all-reduce or broadcast that sends at most so many bytes is pairwise, too."""

Route = Sequence[tuple[int, torch.Tensor]]
"""(peer, tensor) pairs: which tensor comes from, or goes to, which peer."""


class Mark(NamedTuple):
    """Tells messages apart.

    Args:
        digest: two ranks have the same one only if region, entries, number of the collective or
            label, kind, size and dtype are the same.
        tag: by which gloo matches them; see [Note: message tags] in numbers.py.
    """

    digest: int
    tag: int


class Exchange(Protocol):
    """Moves tensors between this rank and its peers."""

    async_model: AsyncModel

    def move(
        self, mark: Mark, receives: Route, sends: Route, *, keeps_input: bool
    ) -> Completion[None]:
        """Receive tensors from the peers named with them, and send others to theirs.

        Messages are told apart by ``mark``. With ``keeps_input``, wait() does
        not stay until the peers have received: they run a few milliseconds apart, and every rank
        would lose those in every bucket.
        """

    def post_receive(self, mark: Mark, receives: Route, label: Label) -> None:
        """Post the receives of the move of that mark ahead, if that helps."""

    def flush(self) -> None:
        """Wait until peers have read everything that moves with ``keeps_input`` sent."""


class PairwiseCommunicator(ProcessGroupCommunicator):
    """ProcessGroupCommunicator whose parts go from rank to rank; sums are left to the caller.

    For tensors that a backend can send, on a device where waiting blocks the host: gloo on CPU.

    Args:
        process_group, device, parent: as of ProcessGroupCommunicator.
        reads_memory: whether ranks of one host may read each other's memory. All ranks try it
            together, in the first collective.
    """

    def __init__(
        self,
        process_group: Any,
        device: torch.device,
        *,
        reads_memory: bool = False,
        parent: ProcessGroupCommunicator | None = None,
    ) -> None:
        super().__init__(process_group, device, parent=parent)
        self._tags = _TAGS if parent is None else _TAGS | _OF_LARGER_GROUP
        distances = range(1, self.world_size)
        self._sources = [(self.rank - k) % self.world_size for k in distances]
        self._destinations = [(self.rank + k) % self.world_size for k in distances]
        sockets = SocketExchange(self._launch, self._watchdog)
        self._sockets = sockets
        self._gathered: dict[Mark, torch.Tensor] = {}  # by mark, of all-reduces posted ahead
        self._chosen: Exchange | None = None if reads_memory else sockets
        self.session.at_region_end(self._flush)
        self.session.on_restart(self._restart, is_transport=True)

    def _verify_declared(self) -> None:
        """Do nothing: every message carries the digest."""

    def _flush(self) -> None:
        # Peers may still read tensors that the caller frees or writes after this region.
        if self._chosen is not None:
            self._chosen.flush()

    def _restart(self) -> None:
        self.forget_posted("")
        if isinstance(self._chosen, SharedMemoryExchange):
            self._chosen.restart(self.session.generation)

    @property
    def _exchange(self) -> Exchange:
        """Shared memory, if every rank can read the memory of every peer. Collective at first.

        Communicators of the same ranks share it: they make their calls in one order, in regions.
        After an error, ranks may differ in the links that they have tried, so new communicators try
        anew.
        """
        if self._chosen is None:
            key, generation = (*self._state_ranks, self._timeout_s()), self.session.generation
            known = self._state.exchanges.get(key)
            if known is None or known[0] != generation:
                known = self._state.exchanges[key] = generation, self._try_memory()
                how = "through sockets" if known[1] is None else "by reading memory"
                logger.info("parts of %d ranks move %s", self.world_size, how)
            self._chosen = known[1] or self._sockets
        return self._chosen

    @property
    def async_model(self) -> AsyncModel:
        """Sockets transfer while this rank computes; memory is read inside wait()."""
        return self._exchange.async_model

    def reduce_scatter(
        self,
        input: torch.Tensor,
        into: torch.Tensor | None = None,
        *,
        slot: int = 0,
        label: Label | None = None,
        is_summed: bool = True,
    ) -> Completion[PartialSums]:
        """Send each rank its part of ``input``; the result has this rank's and theirs, each (n,).

        Peers read ``input`` directly. It is safe to overwrite after any later synchronisation with
        them: the next launch on this rank, the end of the region, or a collective that they
        launched after they had waited for this one.
        """
        parts = input.chunk(self.world_size)
        theirs = self._receive_buffers(slot, input)
        if label is None:
            mark = self._unlabelled("reduce_scatter", input.numel(), input.dtype)
        else:
            mark = self._labelled("reduce_scatter", input, label)
        receives = list(zip(self._sources, theirs, strict=True))
        sends = [(rank, parts[rank]) for rank in self._destinations]
        result = (parts[self.rank], *theirs)
        in_flight = self._state.begin_send(is_labelled=label is not None)
        with in_flight():
            moved = self._exchange.move(mark, receives, sends, keeps_input=True)
        moved.during(in_flight)
        return moved.then(lambda _: result)

    def post_receive(
        self, kind: Labelled, tensor: torch.Tensor, *, label: Label, slot: int = 0
    ) -> None:
        if self._exchange is not self._sockets or (
            kind == "all_reduce" and not self._is_small(tensor)
        ):
            return
        mark = self._labelled(kind, tensor, label)
        parts: Sequence[torch.Tensor]
        if kind == "all_reduce":
            gathered = self._gathered[mark] = tensor.new_empty(self.world_size, tensor.numel())
            parts = [gathered[rank] for rank in self._sources]
        elif kind == "all_gather":
            chunks = tensor.chunk(self.world_size)
            parts = [chunks[rank] for rank in self._sources]
        else:
            parts = self._receive_buffers(slot, tensor)
        receives = list(zip(self._sources, parts, strict=True))
        self._sockets.post_receive(mark, receives, label)

    def forget_posted(self, sender: str) -> None:
        for mark in self._sockets.forget_posted(sender):
            self._gathered.pop(mark, None)

    def _is_small(self, tensor: torch.Tensor) -> bool:
        return tensor.nbytes * (self.world_size - 1) <= _SMALL_NBYTES

    def _unlabelled(self, kind: str, numel: int, dtype: torch.dtype) -> Mark:
        """Count a collective in the region; return the mark of its messages."""
        number = self._state.current.note(kind, numel, dtype)
        return Mark(number, self._tags | unlabelled_tag(self._state.generation, number))

    def _labelled(self, kind: Labelled, tensor: torch.Tensor, label: Label) -> Mark:
        """Return the mark of the messages of a labelled collective."""
        region = f"region {self._state.current.digest}" if kind == "all_gather" else "any region"
        sender = f"optimizer {self.session.number}, generation {self.session.generation}"
        what = f"{label.text}: {kind} of {tensor.numel()} {tensor.dtype}"
        number, generation = digest(f"{sender}, {region}, {what}"), self.session.generation
        tag = self._state.channels.tag(label.channel, generation, number)
        return Mark(number, self._tags | _LABELLED | tag)

    def _receive_buffers(self, slot: int, input: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the tensors that receive the parts of the other ranks."""
        others = self.world_size - 1
        numel = input.numel() // self.world_size * others
        return self._buffers.get("receive", slot, numel, input).chunk(others)

    def all_gather(
        self, output: torch.Tensor, input: torch.Tensor, *, label: Label | None = None
    ) -> Completion[None]:
        parts = output.chunk(self.world_size)
        mark = self._unlabelled("all_gather", output.numel(), output.dtype)
        if label is not None:
            mark = self._labelled("all_gather", output, label)
        receives = [(rank, parts[rank]) for rank in self._sources]
        sends = [(rank, input) for rank in self._destinations]
        completion = self._exchange.move(mark, receives, sends, keeps_input=False)
        if parts[self.rank].data_ptr() != input.data_ptr():
            parts[self.rank].copy_(input)
        return completion

    def all_reduce(
        self, tensor: torch.Tensor, op: ReduceOp = "sum", *, label: Label | None = None
    ) -> Completion[None]:
        """Reduce ``tensor`` (n,) over ranks, in place; the sums are equal on all ranks.

        Small ones, which nearly all of shardfuse's are, go from rank to rank: that needs no thread
        of gloo's, and a message of another collective is detected.
        """
        if not self._is_small(tensor):
            return super().all_reduce(tensor, op)
        if label is None:
            mark = self._unlabelled(f"all_reduce by {op}", tensor.numel(), tensor.dtype)
        else:
            mark = self._labelled("all_reduce", tensor, label)
        gathered = self._gathered.pop(mark, None)
        if gathered is None:
            gathered = tensor.new_empty(self.world_size, tensor.numel())
        gathered[self.rank] = tensor
        receives = [(rank, gathered[rank]) for rank in self._sources]
        sends = [(rank, gathered[self.rank]) for rank in self._destinations]
        # Not keeps_input: it may be the last message that an optimizer sends.
        completion = self._exchange.move(mark, receives, sends, keeps_input=False)

        def reduce(_: None) -> None:
            total = gathered[0].clone()
            for part in gathered[1:]:  # in the order of ranks
                total = total.add_(part) if op == "sum" else torch.maximum(total, part)
            tensor.copy_(total)

        return completion.then(reduce)

    def all_to_all(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_numels: Sequence[int],
        input_numels: Sequence[int],
    ) -> Completion[None]:
        """Send each rank its part of ``input``, from rank to rank; empty parts are not sent."""
        mark = self._unlabelled("all_to_all", 0, input.dtype)
        theirs = torch.split(output, list(output_numels))
        ours = torch.split(input, list(input_numels))
        receives = [(rank, theirs[rank]) for rank in self._sources if theirs[rank].numel()]
        sends = [(rank, ours[rank]) for rank in self._destinations if ours[rank].numel()]
        completion = self._exchange.move(mark, receives, sends, keeps_input=False)
        theirs[self.rank].copy_(ours[self.rank])
        return completion

    def broadcast(self, tensor: torch.Tensor, src: int = 0) -> Completion[None]:
        """Overwrite ``tensor`` (n,) by group rank ``src``'s; small ones as in all_reduce()."""
        if not self._is_small(tensor):
            return super().broadcast(tensor, src)
        mark = self._unlabelled(f"broadcast from {src}", tensor.numel(), tensor.dtype)
        if self.rank != src:
            return self._exchange.move(mark, [(src, tensor)], [], keeps_input=True)
        sends = [(rank, tensor) for rank in self._destinations]
        return self._exchange.move(mark, [], sends, keeps_input=True)

    # The choice of the exchange

    def _try_memory(self) -> SharedMemoryExchange | None:
        """Return the exchange, or None if a rank cannot use the memory of another. Collective.

        Each rank reads a random number out of the memory of the others, and finds another one in
        the shared memory before it writes there. If anything fails on one rank, all use sockets.
        """
        secret = torch.tensor([_random_word()])
        shared, exchange, reason = None, None, ""
        try:
            host = host_id()
            shared = create_shared(self.world_size) if self.rank == 0 else None
        except Exception as error:
            host, reason = -1, str(error)
        descriptor, nonce = (-1, 0) if shared is None else shared
        mine = [host, os.getpid(), int(secret), secret.data_ptr(), descriptor, nonce]
        rows = self._introduce(mine)
        try:
            _check_hosts(rows)
            found = torch.empty(1, dtype=torch.int64)
            for _, pid, value, address, _, _ in rows:
                read_memory(pid, address, found)
                if int(found) != value:
                    raise OSError("process ids are of another namespace")
            pids = [row[1] for row in rows]
            ring = MessageRing(
                self.rank,
                pids,
                (rows[0][4], rows[0][5]),
                self._timeout_s(),
                self._state,
                self._state_ranks,
            )
            exchange = SharedMemoryExchange(ring, self.session.generation)
        except Exception as error:
            reason = reason or str(error)
        # After this, every rank has used `secret` and the descriptor.
        is_failed = max(row[0] for row in self._introduce([int(exchange is None)]))
        if descriptor >= 0:
            os.close(descriptor)
        if is_failed:
            logger.info("memory of other ranks is not read: %s", reason or "another rank cannot")
        return None if is_failed else exchange

    def _introduce(self, values: list[int]) -> list[list[int]]:
        """Return every rank's ``values``, sent through sockets."""
        gathered = torch.empty(self.world_size, len(values), dtype=torch.int64)
        gathered[self.rank] = torch.tensor(values)
        mark = self._unlabelled("introduction", len(values), gathered.dtype)
        receives = [(rank, gathered[rank]) for rank in self._sources]
        sends = [(rank, gathered[self.rank]) for rank in self._destinations]
        self._sockets.move(mark, receives, sends, keeps_input=True).wait()
        rows: list[list[int]] = gathered.tolist()
        return rows

    def _timeout_s(self) -> float:
        """Return the timeout of the process group's collectives."""
        options = getattr(self._live_group()._get_backend(torch.device("cpu")), "options", None)
        timeout = getattr(options, "_timeout", dist.distributed_c10d.default_pg_timeout)
        return float(timeout.total_seconds())


def _check_hosts(rows: Sequence[Sequence[int]]) -> None:
    """Raise OSError unless every rank found its own host out, and all the same one."""
    unable = [rank for rank, row in enumerate(rows) if row[0] == -1]
    if unable:
        raise OSError(f"rank {unable[0]} cannot; its own log tells why")
    if any(row[0] != rows[0][0] for row in rows):
        raise OSError("ranks are on several hosts")
    if rows[0][4] < 0:
        raise OSError("rank 0 has no memory to share; its own log tells why")


def _nothing() -> None:
    """Return the result of a move, whose tensors are written in place."""


# Through sockets


class SocketExchange:
    """Messages of torch.distributed, told apart by tags; see [Note: posted receives].

    Args:
        launch: of the communicator; launches a send or a receive. A bound method, held weakly.
        watchdog: waits for them.
    """

    async_model = AsyncModel.UNORDERED

    def __init__(self, launch: Callable[..., Any], watchdog: Any) -> None:
        self._launch = weakref.WeakMethod(launch)
        self._watchdog = watchdog
        # Receives posted ahead, with their labels, by mark.
        self._posted: dict[Mark, tuple[Label, Completion[None]]] = {}

    def move(
        self, mark: Mark, receives: Route, sends: Route, *, keeps_input: bool
    ) -> Completion[None]:
        posted = self._posted.pop(mark, None)
        completion = self._receive(mark, receives) if posted is None else posted[1]
        launch, works = self._launch(), list[Any]()
        assert launch is not None
        for rank, part in sends:
            works.append(launch(_send, part, rank, mark.tag))
        completion.add(works, [part for _, part in sends])
        return completion

    def post_receive(self, mark: Mark, receives: Route, label: Label) -> None:
        assert mark not in self._posted, "posted twice"
        self._posted[mark] = label, self._receive(mark, receives, is_ahead=True)

    def forget_posted(self, sender: str) -> list[Mark]:
        """Forget posted receives of labels with ``sender`` in them; return their marks."""
        marks = [mark for mark, (label, _) in self._posted.items() if sender in label.text]
        for mark in marks:
            del self._posted[mark]
        return marks

    def flush(self) -> None:
        """Do nothing: gloo has copied the data, or wait() has waited for the peer."""

    def _receive(self, mark: Mark, receives: Route, *, is_ahead: bool = False) -> Completion[None]:
        launch, works = self._launch(), list[Any]()
        assert launch is not None
        for rank, part in receives:
            try:
                works.append(launch(_receive, part, rank, mark.tag, is_ahead=is_ahead))
            except RuntimeError as error:
                if not is_ahead:
                    raise
                # The peer may have ended after its last step, and this be the last one here, too.
                works.append(_FailedWork(error))
        tensors = [part for _, part in receives]
        return Completion(_nothing, works, tensors, watcher=self._watchdog)


class _FailedWork:
    """A receive that could not be posted ahead: the error is raised where its message is due."""

    def __init__(self, error: RuntimeError) -> None:
        self._error = error

    def wait(self) -> None:
        raise self._error


# Of the group itself: dist.isend() and dist.irecv() take longer than a short message.


def _send(part: torch.Tensor, rank: int, tag: int, *, group: Any) -> Any:
    return group.send([part], rank, tag)


def _receive(part: torch.Tensor, rank: int, tag: int, *, group: Any) -> Any:
    return group.recv([part], rank, tag)


# Through memory


class SharedMemoryExchange:
    """Peers read each other's memory, and tell each other where and when in a MessageRing.

    Args:
        ring: the messages.
        generation: of the session, for restart().
    """

    async_model = AsyncModel.BLOCKING

    def __init__(self, ring: MessageRing, generation: int) -> None:
        self.ring = ring
        self._in_flight: deque[tuple[int, Completion[None]]] = deque()  # with their numbers
        # Memory that peers may still read: (number, mark, peers, tensors).
        self._unread: list[tuple[int, int, Sequence[int], Sequence[torch.Tensor]]] = []
        self._next = 0
        self.restart(generation)

    def restart(self, generation: int) -> None:
        """Forget everything in flight, and restart the numbers of messages, as all ranks do."""
        self._next = (generation << 32) + 1
        self._in_flight.clear()
        self._unread.clear()

    def move(
        self, mark: Mark, receives: Route, sends: Route, *, keeps_input: bool
    ) -> Completion[None]:
        number = self._next
        self._next += 1
        # The ring has limited room: the oldest moves in flight are finished here.
        self._finish_before(number - RING_SIZE // 2 + 1)
        self.flush()
        for rank, part in sends:
            self.ring.post(rank, READY, number, mark.digest, part.data_ptr())

        def finish() -> None:
            # A peer that has waited for an earlier move may wait now for this rank to read it.
            self._finish_before(number)
            for rank, part in receives:
                self.ring.read_part(rank, number, mark.digest, part)
                self.ring.post(rank, DONE, number, mark.digest)
            readers = [rank for rank, _ in sends]
            self._unread.append((number, mark.digest, readers, [part for _, part in sends]))
            if not keeps_input:
                self.flush()

        completion: Completion[None] = Completion(_nothing, [_Transfer(finish)], are_of_torch=False)
        self._in_flight.append((number, completion))
        return completion

    def post_receive(self, mark: Mark, receives: Route, label: Label) -> None:
        """Do nothing: the reader reads when it waits."""

    def flush(self) -> None:
        for number, mark, readers, _ in self._unread:
            for rank in readers:
                self.ring.wait(rank, DONE, number, mark)
        self._unread.clear()

    def _finish_before(self, number: int) -> None:
        """Wait for the moves before the one of that number."""
        while self._in_flight and self._in_flight[0][0] < number:
            self._in_flight.popleft()[1].arrive()


class _Transfer:
    """Calls a function when it is waited for, as a work of torch would be."""

    def __init__(self, finish: Callable[[], None]) -> None:
        self.wait = finish


# The ring of messages in shared memory

READY, DONE = 0, 1
"""Kinds of messages: a part is at this address; it has been read."""

RING_SIZE = 256
"""Messages of a kind from one rank to another that have room; one more replaces the first."""

_WORDS = 3  # of a message: value, mark, number + 1
_HEAD = 1  # words before the messages: the nonce
_WORD_NBYTES = 8
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW if hasattr(fcntl, "F_ADD_SEALS") else 0
_SPINS = 1000
_SLEEP_S, _LONGEST_SLEEP_S = 50e-6, 2e-3
_SLEEP_SHARE = 0.01
"""Of the time waited so far: a long wait sleeps longer, and leaves the cores to a late rank."""


def _num_words(world_size: int) -> int:
    return _HEAD + world_size**2 * 2 * RING_SIZE * _WORDS


def _random_word() -> int:
    """Return a random number that fits a word."""
    return int.from_bytes(os.urandom(_WORD_NBYTES), "little") >> 1


def create_shared(world_size: int) -> tuple[int, int]:
    """Return a descriptor of new shared memory with room for all messages, and the nonce in it.

    Raises:
        OSError: the system has none.
    """
    if not hasattr(os, "memfd_create"):
        raise OSError("the system has no memfd_create")
    descriptor = os.memfd_create("shardfuse", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    nonce = _random_word()
    os.ftruncate(descriptor, _num_words(world_size) * _WORD_NBYTES)
    os.pwrite(descriptor, nonce.to_bytes(_WORD_NBYTES, "little"), 0)
    # A process that reads a page which was cut off is killed by SIGBUS.
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS | fcntl.F_SEAL_SEAL)
    return descriptor, nonce


def _check_shared(path: str, nonce: int, nbytes: int) -> None:
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


class MessageRing:
    """Messages between the ranks of one host, in memory that they share.

    A message through gloo passes a thread on either side, which has to get a core that a rank is
    computing on: about a millisecond each, four times a bucket. Here a rank writes three words, and
    the peer polls them.

    Args:
        rank: of this process.
        pids: of all ranks.
        shared: the result of create_shared() on rank 0.
        timeout_s: how long wait() waits.
        state: of the process group; polled while waiting.
        names: for each rank here, its rank in ``state``.

    Raises:
        OSError: the kernel refuses, or the file is not the memory that rank 0 shares.
    """

    def __init__(
        self,
        rank: int,
        pids: Sequence[int],
        shared: tuple[int, int],
        timeout_s: float,
        state: GroupState,
        names: Sequence[int],
    ) -> None:
        self._rank = rank
        self._names = names
        self._pids = pids
        self._processes = [ProcessHandle(pid) for pid in pids]
        self._timeout_s = timeout_s
        self._state = state
        descriptor, nonce = shared
        path = f"/proc/{pids[0]}/fd/{descriptor}"
        numel = _num_words(len(pids))
        _check_shared(path, nonce, numel * _WORD_NBYTES)
        with open(path, "r+b") as file:
            self._map = mmap.mmap(file.fileno(), numel * _WORD_NBYTES)
        self._words = (ctypes.c_int64 * numel).from_buffer(self._map)
        if self._words[0] != nonce:
            raise OSError(f"{path} was replaced")

    def post(self, rank: int, kind: int, number: int, mark: int, value: int = 0) -> None:
        """Post message ``number`` to ``rank``, for the collective of ``mark``."""
        index = self._index(self._rank, rank, kind, number)
        # The number last: a peer that sees it reads the other two words.
        self._words[index] = value
        self._words[index + 1] = mark
        self._words[index + 2] = number + 1

    def read_part(self, rank: int, number: int, mark: int, out: torch.Tensor) -> None:
        """Overwrite ``out`` by the part of ``rank`` that its message ``number`` reports READY.

        Raises:
            PeerError: as wait().
            OSError: the kernel refuses.
        """
        address = self.wait(rank, READY, number, mark)
        if not self._processes[rank].is_alive():  # its pid may be another process's by now
            raise self._lost(rank)
        try:
            read_memory(self._pids[rank], address, out)
        except OSError as error:
            if isinstance(error, ProcessLookupError) or not self._is_running(rank):
                raise self._lost(rank) from error
            raise

    def wait(self, rank: int, kind: int, number: int, mark: int) -> int:
        """Wait for message ``number`` of ``rank``, which must have ``mark``; return its value.

        Raises:
            PeerError: a rank failed or has ended, the timeout is over, or the message is of another
                collective.
        """
        words, index = self._words, self._index(rank, self._rank, kind, number)
        polls, start = 0, time.monotonic()
        now = start
        # The processes are checked only after 0.1 s: opening a file needs memory, and after a
        # backward that freed thousands of pieces malloc takes 5 ms for its first larger request.
        checked = start
        while words[index + 2] != number + 1:
            polls += 1
            if polls < _SPINS:
                os.sched_yield()
                continue
            time.sleep(min(max(_SLEEP_S, _SLEEP_SHARE * (now - start)), _LONGEST_SLEEP_S))
            now = time.monotonic()
            if now - checked > PATIENCE_S:
                checked = now
                is_running = self._is_running(rank)
                # A rank may end after its last message, or its report, so these are read again.
                if words[index + 2] == number + 1:
                    break
                if not is_running:
                    raise self._lost(rank)
                self._state.poll_peers()
                if now - start > self._timeout_s:
                    raise self._lost(rank, has_ended=False)
        if words[index + 1] != mark:
            self._state.raise_mismatch(self._names[rank])
        return words[index]

    def _is_running(self, rank: int) -> bool:
        return self._processes[rank].is_alive() and is_running(self._pids[rank])

    def _lost(self, rank: int, *, has_ended: bool = True) -> Exception:
        """Return the error for a rank that will not write any more; or another rank's, if told."""
        verdict = "has ended in the middle of a collective. See its output."
        if not has_ended:
            verdict = (
                f"did not take part in a collective within {self._timeout_s:g} s, the timeout of "
                "the process group."
            )
        name = self._names[rank]
        return self._state.attribute_error(
            RuntimeError(f"rank {name} {verdict}"),
            suspects=[name],
            verdict=verdict,
            have_ended=has_ended or None,
        )

    def _index(self, sender: int, receiver: int, kind: int, number: int) -> int:
        """Return the index of the word with the value of a message; mark and number + 1 follow."""
        pair = receiver * len(self._pids) + sender
        return _HEAD + ((pair * 2 + kind) * RING_SIZE + number % RING_SIZE) * _WORDS


# The memory of other processes
#
# Linux allows a process to read it among processes of one user. process_vm_readv copies once, where
# a socket copies into the kernel and out of it again, and wakes a thread on either side. It is
# refused between users, between containers, and where the Yama security module restricts tracing
# (kernel.yama.ptrace_scope), so _try_memory() tries it first.

_MAX_NBYTES = 1 << 30
"""Of one read; the kernel stops at 2 GiB less a page."""


class _IoVec(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


def _find_readv() -> Any:
    try:
        function = ctypes.CDLL(None, use_errno=True).process_vm_readv
    except (AttributeError, OSError, TypeError):
        return None
    vector = ctypes.POINTER(_IoVec)
    size = ctypes.c_ulong
    function.argtypes = [ctypes.c_int, vector, size, vector, size, size]
    function.restype = ctypes.c_ssize_t
    return function


_process_vm_readv = _find_readv()


def host_id() -> int:
    """Return a number that processes share only if they see the same processes.

    Raises:
        OSError: the system cannot tell, or has no such call.
    """
    if _process_vm_readv is None:
        raise OSError("the system has no process_vm_readv")
    # Peers must see the writes of a process in the order in which it made them.
    if platform.machine().lower() not in ("x86_64", "amd64"):
        raise OSError(f"the order of writes is not kept on {platform.machine()}")
    # In a pid namespace that still has the /proc of another, the pids there are of other processes.
    if os.readlink("/proc/self") != str(os.getpid()):
        raise OSError("/proc is that of another process namespace")
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        boot = int(file.read().strip().replace("-", ""), 16)
    namespace = os.stat("/proc/self/ns/pid").st_ino
    return (boot ^ namespace) % (1 << 62)


def is_running(pid: int) -> bool:
    """Return whether process ``pid`` is there and has not ended; a zombie has."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            state = file.read().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in ("Z", "X")


class ProcessHandle:
    """A pidfd of a process, whose pid another process may have after it.

    Args:
        pid: of the process; verified by the reads of _try_memory().
    """

    def __init__(self, pid: int) -> None:
        self._poll = select.poll()
        self._descriptor = None
        try:
            self._descriptor = os.pidfd_open(pid)
        except (AttributeError, OSError):  # Linux before 5.3; is_running() remains
            return
        self._poll.register(self._descriptor, select.POLLIN)
        weakref.finalize(self, os.close, self._descriptor)

    def is_alive(self) -> bool:
        """Return whether it has not ended, as far as the system can tell. Takes a microsecond."""
        return self._descriptor is None or not self._poll.poll(0)


def read_memory(pid: int, address: int, out: torch.Tensor) -> None:
    """Overwrite ``out``, contiguous on the CPU, by the memory of process ``pid`` at ``address``.

    Raises:
        OSError: the process is gone, or the kernel refuses.
    """
    start, stop = 0, out.nbytes
    while start < stop:
        nbytes = min(_MAX_NBYTES, stop - start)
        here = _IoVec(out.data_ptr() + start, nbytes)
        there = _IoVec(address + start, nbytes)
        done = _process_vm_readv(pid, ctypes.byref(here), 1, ctypes.byref(there), 1, 0)
        if done <= 0:
            error = ctypes.get_errno()
            raise OSError(error, f"Cannot read memory of process {pid}: {os.strerror(error)}")
        start += done
