"""Communicator: the collectives that shardfuse needs, as a protocol, and their one-rank form."""

from __future__ import annotations

import atexit
import enum
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Generic, Literal, NamedTuple, Protocol, TypeVar, cast, runtime_checkable

import torch

from shardfuse.comm.session import LocalSession, Session

T = TypeVar("T")
U = TypeVar("U")

ReduceOp = Literal["sum", "max"]

Labelled = Literal["reduce_scatter", "all_gather", "all_reduce"]
"""Collectives that may have a label."""


class Label(NamedTuple):
    """Tells a collective from every other one of its communicator.

    Args:
        text: of this collective alone. Ranks compare it.
        channel: from Session.reserve_channels(). Collectives of one channel are launched, and their
            receives posted, in one order on all ranks; those of several channels in any order.
    """

    text: str
    channel: int


PartialSums = tuple[torch.Tensor, ...]
"""Tensors of one shape that add up to a result: the update reads them all in one pass."""


class AsyncModel(enum.Enum):
    """How a launched collective progresses while its rank computes."""

    BLOCKING = "when waited for"
    """Not at all: it moves inside wait()."""
    ORDERED = "in order"
    """In the order of launches, which must be the same on all ranks (a stream, a thread)."""
    UNORDERED = "in any order"
    """As soon as every rank has launched the collective of its label."""


def overlapped(choice: bool | Literal["auto"], *, in_order: bool) -> list[AsyncModel]:
    """Return the models under which to overlap.

    Args:
        choice: of the configuration.
        in_order: whether "auto" includes ORDERED; see overlaps_in_order().
    """
    if choice == "auto" and not in_order:
        return [AsyncModel.UNORDERED]
    return [AsyncModel.UNORDERED, AsyncModel.ORDERED] if choice else []


_MESSAGE_NBYTES, _CPU_MESSAGE_NBYTES = 256 << 10, 512 << 10
"""Least size of a message between two ranks, where the model is large enough; on the CPU."""


def bucket_nbytes(
    cap_mb: float | Literal["auto"],
    model: AsyncModel,
    *,
    world_size: int,
    device_type: str,
    overlaps: bool,
    payload_nbytes: int,
) -> int:
    """Return the bound of a bucket in bytes.

    For "auto" it is the fastest measured on the CPU. (Not run on hardware.) On accelerators the
    transports reach their rate at 128 MiB and more, and each bucket costs the host 0.3 ms; with
    overlap the first bucket should be complete early: it need not be less than a 32nd of all
    buckets. A rank sends each peer a part of a bucket, so the bound grows with the ranks.

    Args:
        cap_mb: the bound in MiB, or "auto".
        model: how collectives progress.
        world_size: ranks that share a bucket.
        device_type: where the buckets are.
        overlaps: whether buckets are in flight during forward or backward.
        payload_nbytes: bytes of all parameters.
    """
    if cap_mb != "auto":
        return max(1, int(cap_mb * (1 << 20)))
    if device_type == "cpu":
        least = (8 if model is AsyncModel.UNORDERED else 25) << 20
    else:
        least = max((50 if overlaps else 256) << 20, payload_nbytes // 32)
    # Buckets of a flat are equal in size, so each is larger than half the bound, if there are two.
    message = _CPU_MESSAGE_NBYTES if device_type == "cpu" else _MESSAGE_NBYTES
    return max(least, 2 * message * world_size)


class Watcher(Protocol):
    """Waits for works of torch where a peer may fail; see watchdog.py."""

    def wait(self, works: deque[Any]) -> None:
        """Take out the works one after the other, and call ``wait()`` of each."""


def wait_in_order(works: deque[Any], before_each: Callable[[], None] | None = None) -> None:
    """Take out the works one after the other, and call ``wait()`` of each.

    Never polled: gloo fills the output of a reduce-scatter inside wait(). Each is taken out before
    it is waited for, because gloo's are waited for once, and a signal's handler may wait for the
    rest meanwhile.
    """
    while True:
        try:
            work = works.popleft()
        except IndexError:
            return
        if before_each is not None:
            before_each()
        work.wait()


class Completion(Generic[T]):
    """A collective in flight.

    Args:
        finish: returns the result, once the works are done; called once.
        works: of torch.distributed or like these, waited for once, in order.
        keeps_alive: tensors that the works read or write.
        watcher: waits for the works; None: they wait themselves.
        while_waiting: the context of wait().
        are_of_torch: whether ``works`` are, which may not be dropped in flight.
    """

    def __init__(
        self,
        finish: Callable[[], T],
        works: Sequence[Any] = (),
        keeps_alive: Sequence[torch.Tensor] = (),
        *,
        watcher: Watcher | None = None,
        while_waiting: Callable[[], AbstractContextManager[None]] = nullcontext,
        are_of_torch: bool = True,
    ) -> None:
        self._finish: Callable[[], T] | None = finish
        self._works = deque(works)
        self._keeps_alive = keeps_alive
        self._watcher = watcher
        self._while_waiting = while_waiting
        self._are_of_torch = are_of_torch
        self._source: Completion[Any] | None = None
        self._result: T | None = None

    def wait(self) -> T:
        """Order the current stream (on CPU: this thread) after the collective; idempotent."""
        if self._finish is not None:
            if self._source is not None:
                self._source.wait()
            self.arrive()
            finish, self._finish = self._finish, None
            if finish is not None:  # else a signal's handler has waited meanwhile
                self._result = finish()
                self._source = None
        return cast(T, self._result)

    def arrive(self) -> None:
        """Wait for the transfer alone, without the functions of then()."""
        if self._source is not None:
            self._source.arrive()
        if not self._works:
            return
        with self._while_waiting():
            if self._watcher is None:
                wait_in_order(self._works)
            else:
                self._watcher.wait(self._works)
        self._keeps_alive = ()

    def add(self, works: Sequence[Any], keeps_alive: Sequence[torch.Tensor]) -> None:
        """Wait for these works, too."""
        self._works.extend(works)
        self._keeps_alive = [*self._keeps_alive, *keeps_alive]

    def during(self, while_waiting: Callable[[], AbstractContextManager[None]]) -> None:
        """Enter this context while the works are waited for."""
        self._while_waiting = while_waiting

    def then(self, function: Callable[[T], U]) -> Completion[U]:
        """Return a completion whose result is ``function`` of this one's, called once."""
        following = Completion(lambda: function(self.wait()))
        following._source = self
        return following

    def __del__(self) -> None:
        if self._works and self._are_of_torch:
            _unfinished.append((self._works, self._keeps_alive))


_unfinished: list[Any] = []
"""Works dropped in flight: gloo breaks a connection on which more arrives for such a work."""


def _release_unfinished() -> None:
    """Free all works, and let gloo's threads free theirs.

    A thread that waits for the GIL, to free the tensors of the last collective, aborts the process
    when the interpreter ends (pytorch/pytorch#190489).
    """
    _unfinished.clear()
    time.sleep(0.01)  # releases the GIL


atexit.register(_release_unfinished)


def completed(result: T) -> Completion[T]:
    """Return a completion that has its result."""
    return Completion(lambda: result)


@runtime_checkable
class Communicator(Protocol):
    """Collectives over a group of ranks, on contiguous 1-D tensors of one dtype and device.

    Every rank of the group must make the same calls in the same order with the same sizes. A
    completion keeps the tensors alive; an output holds its value only after ``wait()``.
    """

    @property
    def rank(self) -> int:
        """This process's rank in the group."""

    @property
    def world_size(self) -> int:
        """Number of ranks in the group."""

    @property
    def session(self) -> Session:
        """The regions that the ranks of ``world`` enter together."""

    @property
    def world(self) -> Communicator:
        """All ranks whose gradients reduce_scatter() sums; these, unless there are two axes."""

    @property
    def staging_nbytes(self) -> int:
        """Bytes of the buffers that it keeps to receive into."""

    @property
    def async_model(self) -> AsyncModel:
        """How collectives progress while this rank computes; the same on all ranks."""

    def reduce_scatter(
        self,
        input: torch.Tensor,
        into: torch.Tensor | None = None,
        *,
        slot: int = 0,
        label: Label | None = None,
        is_summed: bool = True,
    ) -> Completion[PartialSums]:
        """Sum ``input`` (world_size * n,) over ranks; the result is part ``rank`` of that sum.

        It is one tensor (n,), which is ``into`` if that is given, or several that add up to it: a
        part of ``input`` is one of them. They lie in receive buffer ``slot`` of the communicator
        until the next collective there is launched, or its receive posted. Do not write ``input``
        before wait() returns; if the model is BLOCKING, not before the next collective is launched
        or the region ends: peers may still read it.

        ``label`` tells it from every other one that this communicator makes. It may then be
        launched between regions, and, if the model is UNORDERED, in any order.

        If ``is_summed`` is False, and there is no ``into``, no backend sums in transit: the result
        has the parts of all ranks, this one's first, then that of the rank before it, and so on.
        """

    def all_gather(
        self, output: torch.Tensor, input: torch.Tensor, *, label: Label | None = None
    ) -> Completion[None]:
        """Write every rank's ``input`` (n,) into ``output`` (world_size * n,), in rank order.

        ``input`` may be the slice of ``output`` that it will be written to. ``label`` tells it from
        the others of the present region.
        """

    def post_receive(
        self, kind: Labelled, tensor: torch.Tensor, *, label: Label, slot: int = 0
    ) -> None:
        """Post the receives of a collective of this label ahead. Local; never needed.

        ``tensor`` is the output of an all-gather, of which the peers' parts may be written from now
        on; of the input of the others it has the size, dtype and device, and its values are not
        read. See [Note: posted receives] in gloo.py.
        """

    def forget_posted(self, sender: str) -> None:
        """Free receives posted ahead under labels of a ``sender``, to which no rank will send.

        Local. ``sender`` is a part of the text of its labels, and of no other's. Their channels
        must not be used again.
        """

    def all_reduce(
        self, tensor: torch.Tensor, op: ReduceOp = "sum", *, label: Label | None = None
    ) -> Completion[None]:
        """Reduce ``tensor`` (n,) over ranks, in place.

        ``label`` tells it from every other one that this communicator makes.
        """

    def all_to_all(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_numels: Sequence[int],
        input_numels: Sequence[int],
    ) -> Completion[None]:
        """Send each rank its part of ``input`` (n,); write theirs into ``output`` (m,), by rank.

        Parts may differ in size: ``input_numels`` has those to each rank, and ``output_numels``
        those from each. Do not write ``input`` before wait() returns.
        """

    def broadcast(self, tensor: torch.Tensor, src: int = 0) -> Completion[None]:
        """Overwrite ``tensor`` (n,) by that of group rank ``src``, in place."""


class SingleRank:
    """A group of one rank: the same calls, no communication."""

    rank = 0
    world_size = 1
    staging_nbytes = 0
    session: Session = LocalSession()
    async_model = AsyncModel.BLOCKING

    @property
    def world(self) -> Communicator:
        return self

    def reduce_scatter(
        self,
        input: torch.Tensor,
        into: torch.Tensor | None = None,
        *,
        slot: int = 0,
        label: Label | None = None,
        is_summed: bool = True,
    ) -> Completion[PartialSums]:
        return completed((input if into is None else into.copy_(input),))

    def post_receive(
        self, kind: Labelled, tensor: torch.Tensor, *, label: Label, slot: int = 0
    ) -> None:
        """Do nothing: there is no peer."""

    def forget_posted(self, sender: str) -> None:
        """Do nothing: none is posted."""

    def all_gather(
        self, output: torch.Tensor, input: torch.Tensor, *, label: Label | None = None
    ) -> Completion[None]:
        if output.data_ptr() != input.data_ptr():
            output.copy_(input)
        return completed(None)

    def all_reduce(
        self, tensor: torch.Tensor, op: ReduceOp = "sum", *, label: Label | None = None
    ) -> Completion[None]:
        return completed(None)

    def all_to_all(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_numels: Sequence[int],
        input_numels: Sequence[int],
    ) -> Completion[None]:
        output.copy_(input)
        return completed(None)

    def broadcast(self, tensor: torch.Tensor, src: int = 0) -> Completion[None]:
        return completed(None)


class BufferPool:
    """Persistent 1-D scratch buffers; fresh ones would be page-faulted in every step."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, int, torch.dtype], torch.Tensor] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(buffer.nbytes for buffer in self._buffers.values())

    def get(self, name: str, index: int, numel: int, like: torch.Tensor) -> torch.Tensor:
        """Return (numel,) of the buffer of a name and index, of ``like``'s dtype and device."""
        key = (name, index, like.dtype)
        buffer = self._buffers.get(key)
        if buffer is None or buffer.numel() < numel:
            buffer = self._buffers[key] = like.new_empty(numel)
        return buffer[:numel]


def restore_if_changed(input: torch.Tensor, kept: torch.Tensor) -> bool:
    """Return whether ``input`` has other bits than ``kept``, and restore it.

    The host waits for the device.
    """
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[input.itemsize]  # NaN equals itself
    is_changed = not torch.equal(input.view(bits), kept.view(bits))
    if is_changed:
        input.copy_(kept)
    return is_changed


def add_up(parts: PartialSums, into: torch.Tensor) -> None:
    """Write the sum of ``parts`` (n,) ``into`` (n,), in the dtype of ``into``."""
    if len(parts) > 1:
        # Two in one pass; torch.add computes in the dtype of its first argument.
        torch.add(parts[0].to(into.dtype), parts[1], out=into)
        for part in parts[2:]:
            into.add_(part)
    elif parts[0].data_ptr() != into.data_ptr():
        into.copy_(parts[0])
