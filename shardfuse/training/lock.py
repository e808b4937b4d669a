"""A lock on a folder, for as long as the process that has it lives."""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import socket
import time
from pathlib import Path
from types import TracebackType

logger = logging.getLogger("shardfuse")

LOCK_FILE = ".lock"
"""Empty, but for who has the lock."""

_HELD = (errno.EAGAIN, errno.EACCES)
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)
_POLL_S = 0.2


class FolderInUse(RuntimeError):
    """Another process holds the lock; ``str(error)`` says which, and since when."""


class FolderLock:
    """A lock that keeps a second job out of a folder; also a context manager, which releases it.

    The operating system releases the lock when the process ends for any reason, so it is never
    stale. Over NFS it also works between hosts.
    """

    def __init__(self) -> None:
        self._descriptor: int | None = None

    def __enter__(self) -> FolderLock:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()

    def release(self) -> None:
        """Release the lock."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def take(self, folder: Path, patience_s: float = 0.0) -> None:
        """Lock ``folder``, and write there who holds the lock.

        Args:
            folder: an existing folder.
            patience_s: seconds to wait for another process to release it.

        Raises:
            FolderInUse: another process holds the lock.
            OSError: the folder cannot be written to.
        """
        deadline = time.monotonic() + patience_s
        while True:
            try:
                self.try_out(folder)
                break
            except FolderInUse:
                if time.monotonic() > deadline:
                    raise
                self.release()
                time.sleep(_POLL_S)
        assert self._descriptor is not None
        owner = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%F %T")}
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, json.dumps(owner).encode(), 0)

    def try_out(self, folder: Path) -> None:
        """Lock ``folder`` without writing there who holds the lock.

        Args:
            folder: an existing folder.

        Raises:
            FolderInUse, OSError: as for take().
        """
        self._descriptor = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in _HELD:
                raise FolderInUse(f"{folder} is in use by {_owner(self._descriptor)}") from error
            if error.errno not in _NO_LOCKS:
                raise
            logger.warning(
                "%s: this file system has no locks (%s). Make sure that no other job uses the same "
                "folder.",
                folder,
                error.strerror,
            )


def _owner(descriptor: int) -> str:
    try:
        owner = json.loads(os.pread(descriptor, 4096, 0))
        return f"process {owner['pid']} on {owner['host']} since {owner['since']}"
    except (OSError, ValueError, KeyError, TypeError):
        # It has taken the lock this moment.
        return "another job"
