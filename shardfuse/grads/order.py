"""In which order buckets leave, alike on all ranks, and what tells them apart on their way."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Protocol, TypeVar

from torch.autograd.function import BackwardCFunction

from shardfuse.comm import Communicator
from shardfuse.comm.base import PeerError
from shardfuse.layout import Bucket, Flat, slots_in

_num_senders: weakref.WeakKeyDictionary[Communicator, int] = weakref.WeakKeyDictionary()
"""Of communicators: how many senders they have served, which may share one."""

_SLOTS = 1 << 20
"""More than the buckets of any one."""


class OfFlat(Protocol):
    """What is held of the gradients of one flat."""

    missing: set[int]  # params with no gradient on this rank

    @property
    def flat(self) -> Flat:
        """Geometry."""


T = TypeVar("T", bound=OfFlat)


def in_order_of_backward(flats: Iterable[T]) -> list[tuple[T, Bucket]]:
    """Return all buckets of ``flats`` in the order in which backward completes them."""
    order = [(own, bucket) for own in flats for bucket in own.flat.buckets]
    order.sort(key=lambda entry: (-_last_made(entry[0].flat, entry[1]), entry[1].index))
    return order


def _last_made(flat: Flat, bucket: Bucket) -> int:
    """Return the parameter of ``bucket`` whose gradient backward makes last: registered first."""
    return min((flat.slots[position].param for position in slots_in(flat, bucket)), default=0)


class Sender:
    """Tells the messages of one sender from those of others over the same communicator."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._number = _num_senders[comm] = _num_senders.get(comm, 0) + 1  # alike on all ranks

    def label(self, number: int, place: int, attempt: int = 0) -> str:
        """Return what tells the bucket at ``place`` of a round from every other message."""
        return f"sender {self._number}, round {number}, bucket {place}, attempt {attempt}"

    def slot(self, index: int) -> int:
        """Return where the communicator keeps what arrives in slot ``index`` of this sender."""
        return self._number * _SLOTS + index

    @contextmanager
    def told(self) -> Iterator[None]:
        """Have an error of this rank alone reach the others, who wait in the call that follows."""
        try:
            yield
        except PeerError:
            raise
        except Exception:
            with self._comm.call("backward()"):
                raise


def is_nested() -> bool:
    """Return whether the backward under way was begun by a node of another."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is BackwardCFunction.apply.__code__:
            return True
        frame = frame.f_back
    return False
