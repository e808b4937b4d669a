"""A device "npu" without one: torch's PrivateUse1, over the host's memory and the CPU's kernels.

    load()                     then torch.device("npu") is one, and torch.npu its module
    pytest --device npu        the suite with its params there

As on a device:

* Tensors are of the type "npu" and no others: an operator over one of them and one of the CPU
  raises, and so does .numpy(). Data pass by copies only.
* A launch does not wait. Each stream is a thread, which does what is launched on it in order;
  events order streams. .item(), .cpu() and data-dependent shapes wait for the current stream.
* Memory is reused in the order of the stream that it was made on. Before that it is filled with
  NaN, on that stream: who reads it later on another stream without record_stream() reads NaN. So
  does who reads torch.empty().
* An error of a kernel is raised where the host waits next.
* Random numbers have generators of their own.

Where the host waits is noted (host_syncs()). What the stand-in does not have: pinned memory,
autocast, graphs, formats such as NZ, sparse tensors (but that one can be a gradient), and the speed
of anything. Operators for which torch has no meta kernel run at once, which is not noted. There are
eight devices; ranks that are threads need one each, as their collectives wait for each other on its
stream.

The C++ of this folder is compiled by load(), once for its text and torch's version.
"""

from __future__ import annotations

import atexit
import ctypes
import hashlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path

import torch

LIBRARY_VARIABLE = "SHARDFUSE_TEST_NPU_LIBRARY"
"""What the process that has compiled it hands to the ranks: where the library is."""

_ROOM = 1 << 20


_COMPILE = """
import sys
from torch.utils import cpp_extension
source, folder = sys.argv[1:]
cpp_extension.load(
    "shardfuse_npu", [source], extra_cflags=["-O1"], build_directory=folder, is_python_module=False
)
"""


def build() -> str:
    """Return the path of the library, compiled unless it is there; needs g++ and ninja."""
    folder = Path(__file__).parent
    text = b"".join(path.read_bytes() for path in [*sorted(folder.glob("*.h")), folder / "npu.cpp"])
    digest = hashlib.sha256(text + f"{torch.__version__} {sys.version}".encode()).hexdigest()[:16]
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "shardfuse-tests"
    path = cache / f"npu-{digest}.so"
    if not path.exists():
        cache.mkdir(parents=True, exist_ok=True)
        # In a folder of its own: torch's lock in a shared one outlives a process that is killed.
        with tempfile.TemporaryDirectory(dir=cache) as own:
            command = [sys.executable, "-c", _COMPILE, str(folder / "npu.cpp"), own]
            # Where torch loads the stand-in by itself (autoload.py), this one is not to build it.
            alone = os.environ | {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
            done = subprocess.run(command, env=alone, capture_output=True, text=True)
            if done.returncode != 0:
                raise RuntimeError(f"The stand-in npu was not compiled:\n{done.stderr[-4000:]}")
            (Path(own) / "shardfuse_npu.so").replace(path)
    return str(path)


@lru_cache(maxsize=1)
def library() -> ctypes.CDLL:
    """Return the library's own functions; ctypes calls them without the interpreter's lock."""
    path = os.environ.get(LIBRARY_VARIABLE)
    if path is None:
        path = os.environ[LIBRARY_VARIABLE] = build()
    torch.ops.load_library(path)
    functions = ctypes.CDLL(path)
    functions.npu_event.restype = ctypes.c_void_p
    functions.npu_memory.restype = ctypes.c_longlong
    return functions


@lru_cache(maxsize=1)
def load() -> None:
    """Have torch know the device "npu"."""
    from tests.support.npu import module

    library()
    torch.utils.rename_privateuse1_backend("npu")
    torch._register_device_module("npu", module)
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    # A thread of a stream in the middle of a kernel would not outlive torch's own end.
    atexit.register(library().npu_drain_all)


@contextmanager
def host_syncs(*, refused: bool = False) -> Iterator[list[str]]:
    """Note what this thread waits for a device for: operators, copies, synchronize().

    A copy to the device counts as well: memory that is not pinned is waited for there, too.

    Args:
        refused: raise where it would wait, which shows who it is.
    """
    found: list[str] = []
    library().npu_note_syncs(int(refused))
    try:
        yield found
    finally:
        found += noted_syncs()


def noted_syncs() -> list[str]:
    """Return what this thread has waited for since it began to note that, and end it."""
    text = ctypes.create_string_buffer(_ROOM)
    library().npu_noted_syncs(text, _ROOM)
    return text.value.decode().splitlines()


class Deferred:
    """An event that lies ahead: streams may wait for it before anybody has launched it.

    What a collective is that a thread of the host carries out.
    """

    def __init__(self) -> None:
        self._event = ctypes.c_void_p(library().npu_event())
        library().npu_event_reserve(self._event)

    def block(self, device: int) -> None:
        """Have the current stream of ``device`` wait; the host does not."""
        library().npu_event_block(self._event, device)

    def complete(self) -> None:
        """Let those go on who wait."""
        library().npu_event_complete(self._event)

    def complete_after_stream(self, device: int) -> None:
        """Do that when the current stream of ``device`` has done what was launched on it."""
        library().npu_event_complete_after(self._event, device)

    def is_done(self) -> bool:
        """Return whether nobody has to wait."""
        return bool(library().npu_event_is_done(self._event))

    def __del__(self) -> None:
        library().npu_event_free(self._event)


@contextmanager
def held(device: int | None = None) -> Iterator[Deferred]:
    """Have the current stream wait until the block is left, or what it yields is completed."""
    gate = Deferred()
    gate.block(torch.npu.current_device() if device is None else device)
    try:
        yield gate
    finally:
        gate.complete()
