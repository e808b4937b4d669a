"""Buffers that collectives receive into, and what waits for them."""

from __future__ import annotations

import atexit
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from shardfuse.comm.base import Handle, Parts
from shardfuse.comm.watch import Watch


class Staging:
    """Persistent 1-D buffers; fresh ones would be page-faulted in every step."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, int, torch.dtype], torch.Tensor] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(buffer.nbytes for buffer in self._buffers.values())

    def take(self, role: str, slot: int, numel: int, like: torch.Tensor) -> torch.Tensor:
        """Return (numel,) of the buffer of a role and slot, of ``like``'s dtype and device."""
        key = (role, slot, like.dtype)
        buffer = self._buffers.get(key)
        if buffer is None or buffer.numel() < numel:
            buffer = self._buffers[key] = like.new_empty(numel)
        return buffer[:numel]


class WorkHandle:
    """Works of torch, waited for once, that keep their tensors alive until then."""

    def __init__(self, watch: Watch | None, works: Sequence[Any], *tensors: torch.Tensor) -> None:
        self._watch = watch
        self._works = works
        self._tensors: tuple[torch.Tensor, ...] = tensors

    def wait(self) -> None:
        # Never polled: gloo fills the output of a reduce-scatter inside wait().
        works, self._works = self._works, ()
        for work in works:
            if self._watch is None:
                work.wait()
            else:
                self._watch.wait(work)
        self._tensors = ()

    def joined(self, works: Sequence[Any], *tensors: torch.Tensor) -> WorkHandle:
        """Return this handle, of ``works`` as well."""
        self._works = [*self._works, *works]
        self._tensors += tensors
        return self

    def __del__(self) -> None:
        if self._works:
            _unfinished.append((self._works, self._tensors))


_unfinished: list[Any] = []
"""What was dropped under way. gloo breaks a connection over which more comes for such a message."""

atexit.register(_unfinished.clear)


class PartsInFlight:
    """A reduce-scatter whose parts are there once ``handle`` was waited for.

    Args:
        handle: of what moves the parts.
        parts: where they arrive.
        while_waiting: what is entered during the wait.
    """

    def __init__(
        self,
        handle: Handle,
        parts: Parts,
        while_waiting: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._handle = handle
        self._parts = parts
        self._while_waiting = while_waiting

    def wait(self) -> Parts:
        """Return the parts."""
        with self._while_waiting():
            self._handle.wait()
        return self._parts


def put_back(input: torch.Tensor, kept: torch.Tensor) -> bool:
    """Return whether ``input`` has other bits than ``kept``, which it gets back. Stops the host."""
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[input.itemsize]  # NaN equals itself
    is_changed = not torch.equal(input.view(bits), kept.view(bits))
    if is_changed:
        input.copy_(kept)
    return is_changed


def add_up(parts: Parts, into: torch.Tensor) -> None:
    """Write the sum of ``parts`` (n,) ``into`` (n,); in fp32 if that is."""
    if len(parts) > 1:
        # Two at once, where that is a sum in fp32.
        torch.add(parts[0].to(into.dtype), parts[1], out=into)
        for part in parts[2:]:
            into.add_(part)
    elif parts[0].data_ptr() != into.data_ptr():
        into.copy_(parts[0])
