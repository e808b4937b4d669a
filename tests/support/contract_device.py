"""How a contract group's collectives begin and end on the device that their tensors lie on.

On the CPU a launch is its beginning, and who waits blocks. On an npu a collective begins when the
stream that it was launched from has come to it; who waits has its current stream wait.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


class Times:
    """Of a collective on the CPU: at once, and nothing but its thread is waited for."""

    blocks_host = True

    def end(self) -> None:
        """Let streams go on that wait."""

    def block(self) -> bool:
        """Have the current stream wait; return whether there is one."""
        return False


class HostStream:
    """Of collectives over tensors of the CPU."""

    def times(self) -> Times:
        """Return those of a collective that is launched now."""
        return Times()

    @contextmanager
    def after(self, times: Times) -> Iterator[None]:
        """Do what is in the block when the collective begins."""
        yield


class _NpuTimes(Times):
    def __init__(self) -> None:
        from tests.support import npu

        self.device = torch.npu.current_device()  # type: ignore[attr-defined]
        self.begin = torch.npu.Event()  # type: ignore[attr-defined]
        self.begin.record()
        self._end = npu.Deferred()
        self.blocks_host = False  # but for a barrier

    def end(self) -> None:
        self._end.complete()

    def block(self) -> bool:
        if self.blocks_host:
            return False
        self._end.block(self.device)
        return True


class NpuStream(HostStream):
    """Of collectives over tensors of the stand-in's; each has a stream of the device, too."""

    def __init__(self) -> None:
        self._streams: dict[int, Any] = {}

    def times(self) -> Times:
        return _NpuTimes()

    @contextmanager
    def after(self, times: Times) -> Iterator[None]:
        assert isinstance(times, _NpuTimes)
        device, module = times.device, torch.npu  # type: ignore[attr-defined]
        if device not in self._streams:
            self._streams[device] = module.Stream(device)
        with module.stream(self._streams[device]):
            self._streams[device].wait_event(times.begin)
            yield
            # What the block has read and written may be freed then.
            self._streams[device].synchronize()
