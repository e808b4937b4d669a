"""torch.npu of the stand-in: what torch asks of a device's module, and what jobs call."""

from __future__ import annotations

import ctypes
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import torch

from tests.support.npu import library, noted_syncs

_Device = torch.device | str | int | None


def _index(device: _Device = None) -> int:
    if device is None:
        return current_device()
    if isinstance(device, int):
        return device
    index = torch.device(device).index
    return current_device() if index is None else index


_utils = SimpleNamespace(_get_device_index=lambda device, optional=False: _index(device))


def is_available() -> bool:
    return True


def is_initialized() -> bool:
    return True


def init() -> None:
    """Do nothing: devices begin at their first use."""


_lazy_init = init


def _is_in_bad_fork() -> bool:
    return False


def device_count() -> int:
    return int(library().npu_count())


def current_device() -> int:
    return int(library().npu_get_device())


def set_device(device: _Device) -> None:
    if library().npu_set_device(_index(device)):
        raise RuntimeError(f"npu: invalid device ordinal {device}")


@contextmanager
def device(index: _Device) -> Iterator[None]:
    """Make it the current one of this thread."""
    before = current_device()
    set_device(index)
    try:
        yield
    finally:
        set_device(before)


def synchronize(device: _Device = None) -> None:
    torch.accelerator.synchronize(_index(device))


def set_sync_debug_mode(mode: str) -> None:
    """Have this thread's waits for a device refused ("error"), or warned of once that is over."""
    if mode == "default":
        for name in noted_syncs():
            warnings.warn(f"called a synchronizing NPU operation: {name}", stacklevel=2)
    else:
        library().npu_note_syncs(int(mode == "error"))


def Stream(device: _Device = None, priority: int = 0) -> torch.Stream:
    """Return a new stream of the current device, or of ``device``."""
    return torch.Stream(torch.device("npu", _index(device)), priority=priority)


def Event(enable_timing: bool = False, blocking: bool = False) -> torch.Event:
    """Return a new event. Not a subclass, which torch.Stream.record_event() would not take."""
    return torch.Event("npu", enable_timing=enable_timing, blocking=blocking)


def current_stream(device: _Device = None) -> torch.Stream:
    return torch.accelerator.current_stream(torch.device("npu", _index(device)))


def default_stream(device: _Device = None) -> torch.Stream:
    found = current_stream(device)
    return torch.Stream(stream_id=0, device_index=found.device_index, device_type=found.device_type)


def set_stream(stream: torch.Stream) -> None:
    torch.accelerator.set_stream(stream)


@contextmanager
def stream(stream: torch.Stream | None) -> Iterator[None]:
    """Launch on ``stream`` what this thread launches."""
    if stream is None:
        yield
        return
    before_device, before = current_device(), current_stream(stream.device)
    set_stream(stream)
    try:
        yield
    finally:
        set_stream(before)
        set_device(before_device)


def manual_seed(seed: int) -> None:
    library().npu_manual_seed(current_device(), ctypes.c_uint64(seed))


def manual_seed_all(seed: int) -> None:
    for index in range(device_count()):
        library().npu_manual_seed(index, ctypes.c_uint64(seed))


def get_rng_state(device: _Device = "npu") -> torch.Tensor:
    state: torch.Tensor = torch.ops.shardfuse_npu.get_rng_state(_index(device))
    return state


def set_rng_state(state: torch.Tensor, device: _Device = "npu") -> None:
    torch.ops.shardfuse_npu.set_rng_state(state, _index(device))


def memory_allocated(device: _Device = None) -> int:
    return int(library().npu_memory(_index(device), 0))


def max_memory_allocated(device: _Device = None) -> int:
    return int(library().npu_memory(_index(device), 1))


def reset_peak_memory_stats(device: _Device = None) -> None:
    library().npu_reset_peak(_index(device))


def empty_cache() -> None:
    """Keep all memory: a stream may still fill it."""


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.float16, torch.bfloat16]


def get_device_name(device: _Device = None) -> str:
    """Return what no NPU is called."""
    return "a stand-in for an NPU, on the CPU"
