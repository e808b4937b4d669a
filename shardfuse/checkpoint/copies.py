"""Copies of a rank's live state in host memory, made in whole arenas while training goes on.

[Note: live state] States and a rank's shards of the params do not change between two calls of
step(). So a save need not copy them when it begins. On the CPU the writing thread copies a range of
memory just before it writes the first fragment of it, and the next step() first copies the ranges
that are still pending. On an accelerator the thread launches all copies at once, on a stream of its
own; step() launches the rest and has its own stream wait for them, and the host does not wait.
Host memory there is pinned, where the device can pin it, and is kept for the next save of the same
optimizer, because pinning takes longer than copying. (Pinned memory has not been run on hardware.)
"""

from __future__ import annotations

import threading
from collections.abc import Hashable, Iterable, Iterator
from contextlib import contextmanager
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardfuse.layout import BLOCK
from shardfuse.runtime import current_stream

_RANGE_NBYTES = 64 << 20
"""Most bytes of a range, except for a larger fragment: pinned sizes are rounded up to 2**k."""

_MAX_GAP = BLOCK - 1
"""Elements of padding between fragments that are copied with them; a peer's shard is longer."""


class HostBuffers:
    """Host memory that one save after another copies into."""

    def __init__(self) -> None:
        self._free: dict[tuple[torch.dtype, int], list[Tensor]] = {}

    def take(self, live: Tensor) -> Tensor:
        """Return a buffer for the 1-D tensor ``live``: a kept one, or else a new one."""
        free = self._free.get((live.dtype, live.numel()))
        return free.pop() if free else _new_buffer(live)

    def keep(self, buffers: Iterable[Tensor]) -> None:
        """Keep these for the next save, and no others."""
        self._free = {}
        for buffer in buffers:
            self._free.setdefault((buffer.dtype, buffer.numel()), []).append(buffer)


def _new_buffer(live: Tensor) -> Tensor:
    if live.device.type != "cpu":
        try:
            return torch.empty(live.shape, dtype=live.dtype, pin_memory=True)
        except RuntimeError:  # the device cannot pin, or the system lets it pin no more
            pass
    return torch.empty(live.shape, dtype=live.dtype)


class _MemoryRange:
    """A contiguous range of live memory, with the fragments in it."""

    def __init__(self, live: Tensor, num_fragments: int) -> None:
        self.live: Tensor | None = live  # None: it was copied, on the CPU
        self.start = live.storage_offset()
        self.num_pending = num_fragments  # of which no copy was taken
        self.host: Tensor | None = None
        self.copied: Any = None  # event after the copy, on a device


class _Fragment(NamedTuple):
    storage: int  # address
    start: int  # elements from there
    stop: int
    key: Hashable
    live: Tensor


class DeferredCopies:
    """Copies of fragments, made before their memory changes; see [Note: live state]."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._fragments: list[_Fragment] = []
        self._views: dict[Hashable, tuple[_MemoryRange, Tensor]] = {}  # of fragments not taken
        self._ranges: list[_MemoryRange] = []
        self._buffers = HostBuffers()
        self._device = torch.device("cpu")
        self._stream: Any = None
        self._nbytes = 0
        self.peak_nbytes = 0

    def add(self, index: Hashable, live: Tensor) -> None:
        """Register a fragment, before begin()."""
        start = int(live.storage_offset())
        extents = zip(live.shape, live.stride(), strict=True)
        stop = start + 1 + sum((n - 1) * stride for n, stride in extents) if live.numel() else start
        storage = live.untyped_storage().data_ptr()
        self._fragments.append(_Fragment(storage, start, stop, index, live))

    def begin(self, device: torch.device, buffers: HostBuffers) -> None:
        """Join fragments to ranges; from now on a copy holds the writes of the current stream.

        Args:
            device: of the fragments, except for some on the CPU.
            buffers: host memory for the copies, of which one save at a time has any.
        """
        self._device, self._buffers = device, buffers
        current = current_stream(device)
        if current is not None:
            self._stream = torch.get_device_module(device).Stream(device)
            self._stream.wait_event(current.record_event())
        run: list[_Fragment] = []
        for fragment in sorted(self._fragments, key=itemgetter(0, 1)):
            if run and not _continues(run, fragment):
                self._add_range(run)
                run = []
            run.append(fragment)
        if run:
            self._add_range(run)
        self._fragments = []

    def _add_range(self, run: list[_Fragment]) -> None:
        first = run[0]
        numel = max(fragment.stop for fragment in run) - first.start
        memory = _MemoryRange(first.live.as_strided((numel,), (1,), first.start), len(run))
        self._ranges.append(memory)
        self._views |= {fragment.key: (memory, fragment.live) for fragment in run}

    @contextmanager
    def on_own_stream(self) -> Iterator[None]:
        """Run this thread on the device, and on the stream of the copies.

        A new thread uses the host's first device, another rank's, and the default stream, which
        training uses and torch's writer synchronizes with. (Not run on hardware.)
        """
        if self._stream is None:
            yield
            return
        module = torch.get_device_module(self._device)
        module.set_device(self._device)
        with module.stream(self._stream):
            yield

    def take(self, index: Hashable) -> Tensor:
        """Return the copy of a fragment and drop it here; on a device, wait for it."""
        with self._lock:
            memory, live = self._views.pop(index)
            self._copy(memory)
            host = memory.host
            assert host is not None
            memory.num_pending -= 1
            if memory.copied is None and memory.num_pending == 0:  # on the CPU nothing is kept
                self._nbytes -= host.nbytes
                memory.host = None
        if memory.copied is not None:
            memory.copied.synchronize()
        return host.as_strided(live.shape, live.stride(), live.storage_offset() - memory.start)

    def copy_pending(self) -> None:
        """Copy all ranges that have no copy yet.

        Afterwards their memory may change: on a device by later kernels of the current stream.
        """
        self.copy()
        if self._stream is not None:
            current_stream(self._device).wait_stream(self._stream)

    def copy(self) -> None:
        """Copy all ranges that have no copy yet; on a device, do not wait for the copies."""
        with self._lock:
            for memory in self._ranges:
                self._copy(memory)

    def _copy(self, memory: _MemoryRange) -> None:
        live = memory.live
        if live is None or memory.copied is not None:
            return
        if live.device.type == "cpu":
            memory.host = torch.empty(live.shape, dtype=live.dtype).copy_(live)
            memory.live = None
        else:
            memory.host = self._buffers.take(live) if memory.host is None else memory.host
            with torch.get_device_module(live.device).stream(self._stream):
                memory.host.copy_(live, non_blocking=True)
            memory.copied = self._stream.record_event()
        self._nbytes += live.nbytes
        self.peak_nbytes = max(self.peak_nbytes, self._nbytes)

    def close(self) -> None:
        """End the save, complete or not: drop the rest, and keep buffers of a device."""
        with self._lock:
            ranges, self._ranges = self._ranges, []
            self._views.clear()
        for memory in ranges:
            if memory.copied is not None:
                memory.copied.synchronize()  # until then the copy may write to its buffer
        kept = [memory.host for memory in ranges if memory.copied is not None]
        self._buffers.keep(host for host in kept if host is not None)


def _continues(run: list[_Fragment], fragment: _Fragment) -> bool:
    """Return whether ``fragment`` lies behind a run of the same memory, which has room for it."""
    first, last = run[0], run[-1]
    return (
        fragment.storage == first.storage
        and fragment.live.dtype == first.live.dtype
        and fragment.start - last.stop <= _MAX_GAP
        and (fragment.stop - first.start) * first.live.itemsize <= _RANGE_NBYTES
    )
