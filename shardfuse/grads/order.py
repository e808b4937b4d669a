"""In which order buckets leave, alike on all ranks, and what tells them apart on their way."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from shardfuse.comm import Communicator
from shardfuse.comm.base import Parts, PeerError
from shardfuse.comm.staging import Staging
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


def add_up(parts: Parts, into: Tensor) -> None:
    """Write the sum of ``parts`` (n,) ``into`` (n,); in fp32 if that is."""
    if len(parts) > 1:
        # Two at once, where that is a sum in fp32.
        torch.add(parts[0].to(into.dtype), parts[1], out=into)
        for part in parts[2:]:
            into.add_(part)
    elif parts[0].data_ptr() != into.data_ptr():
        into.copy_(parts[0])


def factor_before_sum(wire: torch.dtype, factor: float | None, num_summed: int) -> float | None:
    """Return what gradients are multiplied by before they are sent; None is 1.

    In fp16 they are divided before the sum, which would overflow at 65504.
    """
    if wire != torch.float16:
        return factor
    return (1.0 if factor is None else factor) / num_summed


def factor_after_sum(wire: torch.dtype, num_summed: int) -> float | None:
    """Return what turns the sum into the mean; None is 1."""
    return None if num_summed == 1 or wire == torch.float16 else 1.0 / num_summed


def as_sent(
    staging: Staging, send: Tensor, factor: float | None, slot: int, wire: torch.dtype
) -> Tensor:
    """Return ``send`` (numel,) times ``factor`` in the dtype ``wire``; itself, if that is it."""
    if factor is None and send.dtype == wire:
        return send
    like = torch.empty(0, dtype=wire, device=send.device)
    staged = staging.take("send", slot, send.numel(), like)
    if factor is None:
        return staged.copy_(send)
    if wire.itemsize > send.dtype.itemsize:
        return staged.copy_(send).mul_(factor)
    return torch.mul(send, factor, out=staged)
