"""Clocks, memory and bytes sent, of this process; medians with spread."""

from __future__ import annotations

import ctypes
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import torch

_KIB = 1024


def time_ms(run: Callable[[], object], device: torch.device | None = None) -> float:
    """Return the milliseconds that ``run()`` takes, on its accelerator if it is on one."""
    if device is None or device.type == "cpu":
        start = time.perf_counter()
        run()
        return (time.perf_counter() - start) * 1e3
    device_module = torch.get_device_module(device)
    events = [device_module.Event(enable_timing=True) for _ in range(2)]
    device_module.synchronize(device)
    events[0].record()
    run()
    events[1].record()
    device_module.synchronize(device)
    return float(events[0].elapsed_time(events[1]))


def _status(key: str) -> int:
    """Return an entry of /proc/self/status in bytes; 0 where there is none."""
    with suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(key + ":"):
                return int(line.split()[1]) * _KIB
    return 0


def return_free_memory() -> None:
    """Have malloc give freed memory back to the system (glibc; elsewhere nothing happens)."""
    with suppress(AttributeError, OSError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)


class PeakMemory:
    """Peak resident bytes of this process above what it had when this was made."""

    def __init__(self) -> None:
        # 5 resets the high-water mark (proc(5)); where that is refused, earlier peaks count too.
        with suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")
        self._start = _status("VmRSS")

    def nbytes(self) -> int:
        """Return the peak so far above the start."""
        return max(0, _status("VmHWM") - self._start)


def bytes_written() -> int:
    """Return the bytes this process has written to files and sockets; 0 where unknown.

    Between two readings around a collective this is what its rank sent through sockets.
    """
    with suppress(OSError):
        for line in Path("/proc/self/io").read_text().splitlines():
            if line.startswith("wchar:"):
                return int(line.split()[1])
    return 0


def median(values: Sequence[float]) -> float:
    """Return the median of at least one value."""
    return statistics.median(values)
