"""Reading the memory of other processes on this host, which Linux allows among equals.

``process_vm_readv`` copies once, where a socket copies into the kernel and out of it again, and
wakes a thread on either side. It is refused between users, between containers, and where the Yama
security module restricts tracing (``kernel.yama.ptrace_scope``), so callers try it first.
"""

from __future__ import annotations

import ctypes
import os
import platform
import select
import weakref
from typing import Any

import torch

_MAX_NBYTES = 1 << 30
"""Of one call; the kernel stops at 2 GiB less a page."""


class _IoVec(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


def _find() -> Any:
    try:
        function = ctypes.CDLL(None, use_errno=True).process_vm_readv
    except (AttributeError, OSError, TypeError):
        return None
    vector = ctypes.POINTER(_IoVec)
    size = ctypes.c_ulong
    function.argtypes = [ctypes.c_int, vector, size, vector, size, size]
    function.restype = ctypes.c_ssize_t
    return function


_process_vm_readv = _find()


def host_id() -> int:
    """Return a number that processes share only if they see the same processes.

    Raises:
        OSError: the system cannot tell, or has no such call.
    """
    if _process_vm_readv is None:
        raise OSError("the system has no process_vm_readv")
    # Others have to see the writes of a process in the order in which it made them.
    if platform.machine().lower() not in ("x86_64", "amd64"):
        raise OSError(f"the order of writes is not kept on {platform.machine()}")
    # In a process namespace that still has the /proc of another, process ids name strangers there.
    if os.readlink("/proc/self") != str(os.getpid()):
        raise OSError("/proc is that of another process namespace")
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        boot = int(file.read().strip().replace("-", ""), 16)
    namespace = os.stat("/proc/self/ns/pid").st_ino
    return (boot ^ namespace) % (1 << 62)


def is_running(pid: int) -> bool:
    """Return whether process ``pid`` is there and has not ended; one that nobody awaited has."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            state = file.read().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in ("Z", "X")


class Life:
    """Of a process, whose number another one may have after it.

    Args:
        pid: of the process. Whether it is the one that is meant is known once that has answered.
    """

    def __init__(self, pid: int) -> None:
        self._poll = select.poll()
        self._descriptor = None
        try:
            self._descriptor = os.pidfd_open(pid)
        except (AttributeError, OSError):  # Linux before 5.3; is_running() remains
            return
        self._poll.register(self._descriptor, select.POLLIN)
        weakref.finalize(self, os.close, self._descriptor)

    def lasts(self) -> bool:
        """Return whether it has not ended, as far as the system can tell. Takes a microsecond."""
        return self._descriptor is None or not self._poll.poll(0)


def read(pid: int, address: int, out: torch.Tensor) -> None:
    """Overwrite ``out``, contiguous on the CPU, by what process ``pid`` has at ``address``.

    Raises:
        OSError: the process is gone, or the kernel refuses.
    """
    start, stop = 0, out.nbytes
    while start < stop:
        nbytes = min(_MAX_NBYTES, stop - start)
        here = _IoVec(out.data_ptr() + start, nbytes)
        there = _IoVec(address + start, nbytes)
        done = _process_vm_readv(pid, ctypes.byref(here), 1, ctypes.byref(there), 1, 0)
        if done <= 0:
            error = ctypes.get_errno()
            raise OSError(error, f"Cannot read memory of process {pid}: {os.strerror(error)}")
        start += done
