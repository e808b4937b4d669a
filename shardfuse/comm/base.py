"""The collectives that shardfuse needs, as a protocol, and their one-rank form."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Literal, Protocol, runtime_checkable

import torch

ReduceOp = Literal["sum", "max"]

Labelled = Literal["reduce_scatter", "all_gather"]
"""Collectives that may have a label."""

Parts = tuple[torch.Tensor, ...]
"""Tensors of one shape whose sum is meant: who reads them all anyway adds them up in passing."""


Progress = Literal["when waited for", "in order", "in any order"]
"""What becomes of a collective that was launched, while its rank computes.

It may move only when it is waited for. Or it moves at once: in the order of launches, which must
be the same on all ranks, or as soon as every rank has launched one of its label.
"""


def overlapped(choice: bool | Literal["auto"]) -> list[Progress]:
    """Return where ``choice`` means to overlap; if that is left to us, where it ran and paid."""
    everywhere: list[Progress] = ["in any order", "in order"]
    if choice == "auto":
        return everywhere[:1]
    return everywhere if choice else []


def bucket_nbytes(cap_mb: float | Literal["auto"], progress: Progress) -> int:
    """Return the bound of a bucket in bytes, given in MiB; if that is left to us, the fastest."""
    if cap_mb == "auto":
        cap_mb = 8 if progress == "in any order" else 25
    return max(1, int(cap_mb * (1 << 20)))


class PeerError(RuntimeError):
    """Another rank failed, or does something else than this one; raised on all of them."""


def unreadable(key: str, text: str) -> PeerError:
    """Return the error to raise where ``key`` of the group's store has what no rank writes."""
    return PeerError(
        f"The process group's store has {text[:80]!r} under {key!r}, which is nothing that a rank "
        "of this version of shardfuse writes. Is another program using the store (MASTER_ADDR and "
        "MASTER_PORT), or do ranks have different versions?"
    )


class Handle(Protocol):
    """A collective in flight."""

    def wait(self) -> object:
        """Order the current stream (on CPU: this thread) after the collective; idempotent."""


class PartsHandle(Protocol):
    """A reduce-scatter in flight."""

    def wait(self) -> Parts:
        """Return what has arrived for this rank, ordered as by Handle.wait(); idempotent."""


@runtime_checkable
class Communicator(Protocol):
    """Collectives over a group of ranks, on contiguous 1-D tensors of one dtype and device.

    Every rank of the group must make the same calls in the same order with the same sizes. The
    returned handle keeps the tensors alive; an output holds its value only after ``wait()``.
    """

    @property
    def rank(self) -> int:
        """This process's rank in the group."""

    @property
    def world_size(self) -> int:
        """Number of ranks in the group."""

    @property
    def everyone(self) -> Communicator:
        """All ranks that make these calls, and whose gradients reduce_scatter() adds up.

        It is this one, unless that goes over two axes; see comm/mesh.py.
        """

    def call(self, name: str) -> AbstractContextManager[None]:
        """Make a call ``name`` of all ranks: an error inside it is raised on every rank.

        Inside another call it is a part of that. See [Note: calls] in board.py.

        Raises:
            PeerError: on entry, where the ranks are out of step since an earlier error.
        """

    def declare(self, lines: Sequence[str], *, is_new: bool = False) -> None:
        """Say what all ranks must hold in common in this call, before it communicates.

        Where they do not, the collectives that follow raise PeerError on every rank, naming the
        first line that differs. ``is_new``: this decides which collectives follow, so that it is
        made sure of at once where messages carry no mark of it.
        """

    def tell(self, topic: str, text: str) -> None:
        """Leave a text for the other ranks, who can read it from when this returns.

        Local, and slow: through the group's store.
        """

    def told(self, topic: str) -> list[str | None]:
        """Return what each rank has told of ``topic`` so far; None where nothing. Local."""

    @property
    def is_store_gone(self) -> bool:
        """Whether tell() or told() found the group's store gone, which then stays so. Local.

        Whoever keeps it may end before the ranks do, as torchrun's agent.
        """

    @property
    def staging_nbytes(self) -> int:
        """Bytes of the buffers that it keeps to receive into."""

    @property
    def progress(self) -> Progress:
        """What becomes of a collective while this rank computes; the same on all ranks."""

    @property
    def epoch(self) -> int:
        """How often the ranks have begun anew after an error; what was under way then is lost.

        It counts from the error on, before the call that begins anew.
        """

    def reduce_scatter(
        self,
        input: torch.Tensor,
        into: torch.Tensor | None = None,
        *,
        slot: int = 0,
        label: str | None = None,
        is_summed: bool = True,
    ) -> PartsHandle:
        """Sum ``input`` (world_size * n,) over ranks; wait() gives part ``rank`` of that sum.

        It gives one tensor (n,), which is ``into`` if that is given, or several that add up to it:
        a part of ``input`` is one of them. They lie in buffer ``slot`` of the communicator until
        the next one there is launched, or expected. ``input`` is left as it is, and others may
        read it until the next collective has been launched, or the call has ended; unless
        ``progress`` is "when waited for", not after wait() has returned.

        ``label`` tells it from every other one that this communicator makes. It may then be
        launched between calls, and, if ``progress`` is "in any order", so on every rank.

        With ``is_summed`` False, and no ``into``, nothing is added up on the way: wait() gives the
        parts of all ranks, this one's first, then that of the rank before it, and so on.
        """

    def all_gather(
        self, output: torch.Tensor, input: torch.Tensor, *, label: str | None = None
    ) -> Handle:
        """Write every rank's ``input`` (n,) into ``output`` (world_size * n,), in rank order.

        ``input`` may be the slice of ``output`` that it will be written to. ``label`` tells it from
        the others of the present call.
        """

    def expect(self, kind: Labelled, tensor: torch.Tensor, *, label: str, slot: int = 0) -> None:
        """Be ready to receive what a collective of this label will bring. Local; never needed.

        ``tensor`` is the output of an all-gather, of which others' parts may be written from now
        on; of a reduce-scatter's input it has the size, dtype and device, and its values are not
        read. See [Note: ready] in gloo/pairwise.py.
        """

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> Handle:
        """Reduce ``tensor`` (n,) over ranks, in place."""

    def broadcast(self, tensor: torch.Tensor, src: int = 0) -> Handle:
        """Overwrite ``tensor`` (n,) by that of group rank ``src``, in place."""


class Done:
    """The handle of a collective that finished when it was called."""

    def __init__(self, parts: Parts = ()) -> None:
        self._parts = parts

    def wait(self) -> Parts:
        return self._parts


class SingleRank:
    """A group of one rank: the same calls, no communication."""

    rank = 0
    world_size = 1
    staging_nbytes = 0
    progress: Progress = "when waited for"
    epoch = 0
    is_store_gone = False

    @property
    def everyone(self) -> Communicator:
        return self

    def call(self, name: str) -> AbstractContextManager[None]:
        return nullcontext()

    def declare(self, lines: Sequence[str], *, is_new: bool = False) -> None:
        """Do nothing: there is no other rank."""

    def tell(self, topic: str, text: str) -> None:
        """Do nothing: there is no other rank."""

    def told(self, topic: str) -> list[str | None]:
        return [None]

    def reduce_scatter(
        self,
        input: torch.Tensor,
        into: torch.Tensor | None = None,
        *,
        slot: int = 0,
        label: str | None = None,
        is_summed: bool = True,
    ) -> PartsHandle:
        return Done((input if into is None else into.copy_(input),))

    def expect(self, kind: Labelled, tensor: torch.Tensor, *, label: str, slot: int = 0) -> None:
        """Do nothing: there is no other rank."""

    def all_gather(
        self, output: torch.Tensor, input: torch.Tensor, *, label: str | None = None
    ) -> Handle:
        if output.data_ptr() != input.data_ptr():
            output.copy_(input)
        return Done()

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> Handle:
        return Done()

    def broadcast(self, tensor: torch.Tensor, src: int = 0) -> Handle:
        return Done()
