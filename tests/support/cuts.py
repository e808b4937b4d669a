"""Every call of the file system that a function makes, cut at: killed, refused, or looked on at.

What changes files is called through ``os`` (pathlib does, too), or by ``exchange_names``. Here each
such call is counted. At a chosen one the process ends, or the call fails, or a reader comes in
between.
"""

from __future__ import annotations

import errno
import functools
import io
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any

from shardfuse import files
from shardfuse.checkpoint import replacement

_NAMES = (
    "open",
    "mkdir",
    "rename",
    "replace",
    "unlink",
    "rmdir",
    "chmod",
    "fsync",
)

ENDS = ("killed", "EIO", "ENOSPC", "reader")


class Cut:
    """Has one call of a number end in a way.

    Args:
        number: of the call, from 0.
        end: of ENDS.
        reader: called in between for "reader".
    """

    def __init__(self, number: int, end: str, reader: Callable[[], None]) -> None:
        self.count = 0
        self._number, self._end, self._reader = number, end, reader
        self._is_off = False

    def install(self, *, exchanges: bool) -> None:
        """Count the calls of this process from now on.

        Args:
            exchanges: whether the file system can exchange names.
        """
        for name in _NAMES:
            setattr(os, name, self._counted(getattr(os, name)))
        make = os.fdopen

        def fdopen(descriptor: int, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
            if mode != "wb":
                return make(descriptor, mode, *args, **kwargs)
            return io.BufferedWriter(_Raw(descriptor, self))  # type: ignore[arg-type]

        os.fdopen = fdopen  # type: ignore[assignment]
        exchange = self._counted(files.exchange_names) if exchanges else lambda one, other: False
        replacement.exchange_names = exchange  # type: ignore[attr-defined]

    def off(self) -> None:
        """Count no more."""
        self._is_off = True

    def at_call(self) -> None:
        """Count one call, and end it where its turn has come."""
        if self._is_off:
            return
        number, self.count = self.count, self.count + 1
        if number != self._number:
            return
        if self._end == "killed":
            os._exit(0)
        if self._end == "reader":
            self._is_off = True
            self._reader()
            self._is_off = False
        else:
            code = getattr(errno, self._end)
            raise OSError(code, os.strerror(code))

    def _counted(self, original: Any) -> Any:
        @functools.wraps(original)
        def counted(*args: Any, **kwargs: Any) -> Any:
            if original.__name__ != "open" or args[1] & (os.O_CREAT | os.O_WRONLY | os.O_RDWR):
                self.at_call()
            return original(*args, **kwargs)

        return counted


class _Raw(io.RawIOBase):
    """A file whose writes are counted."""

    def __init__(self, descriptor: int, cut: Cut) -> None:
        super().__init__()
        self._file, self._cut = io.FileIO(descriptor, "w"), cut

    def fileno(self) -> int:
        return self._file.fileno()

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, *args: Any) -> int:
        return self._file.seek(*args)

    def tell(self) -> int:
        return self._file.tell()

    def write(self, data: Any) -> int | None:
        self._cut.at_call()
        return self._file.write(data)

    def close(self) -> None:
        if not self._file.closed:
            self._file.close()
        super().close()


def in_a_child(act: Callable[[], object]) -> int:
    """Call ``act`` in a forked process; return its exit status: 0 if it returned or was killed."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            act()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
