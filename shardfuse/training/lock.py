"""A lock on a folder, for as long as the process that has it lives.

[Note: who has the lock] flock() belongs to an open file, which a forked child shares: workers of a
DataLoader that outlive a trainer would keep its lock. So a child closes its copy as the first thing
after fork(); what it execs never has one (O_CLOEXEC). Locks of fcntl() are not shared with
children, but a process loses them as soon as it closes any descriptor of the file, which whoever
copies or searches the folder does, and they do not keep two jobs of one process apart. Locks of
open files (F_OFD_SETLK) are shared with children as well, and NFS does not have them. Linux turns
flock() on NFS into a lock of the server's, which is released with the last copy of the descriptor,
not the first, so closing the child's leaves it.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import socket
import stat
import time
import weakref
from contextlib import suppress
from pathlib import Path
from types import TracebackType

logger = logging.getLogger("shardfuse")

LOCK_FILE = ".lock"
"""Empty, but for who has the lock."""

_HELD_ERRNOS = (errno.EAGAIN, errno.EACCES)
_NO_LOCKS_ERRNOS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)
_POLL_S = 0.2


class FolderInUse(RuntimeError):
    """Another process holds the lock; ``str(error)`` says which, and since when."""


class FolderLock:
    """A lock that keeps a second job out of a folder; also a context manager, which releases it.

    The operating system releases the lock when the process ends for any reason, so it is never
    stale. A child that is forked does not have it: see [Note: who has the lock]. Over NFS it also
    works between hosts.
    """

    def __init__(self) -> None:
        self._descriptor: int | None = None
        _locks.add(self)

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
            OSError: the folder cannot be written to; or what has the name of the lock file is a
                link, a FIFO, a device or a folder, or holds something else. None of these is
                followed or changed.
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
        _check_content(self._descriptor, folder / LOCK_FILE)
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
        self.release()
        self._descriptor = _open_lock_file(folder / LOCK_FILE)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in _HELD_ERRNOS:
                raise FolderInUse(f"{folder} is in use by {_owner(self._descriptor)}") from error
            if error.errno not in _NO_LOCKS_ERRNOS:
                raise
            logger.warning(
                "%s: this file system has no locks (%s). Make sure that no other job uses the same "
                "folder.",
                folder,
                error.strerror,
            )


_locks: weakref.WeakSet[FolderLock] = weakref.WeakSet()


def _release_in_child() -> None:
    for lock in list(_locks):
        lock.release()


os.register_at_fork(after_in_child=_release_in_child)


_FILE_KINDS = {
    stat.S_IFLNK: "a symbolic link, which is not followed",
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def _open_lock_file(path: Path) -> int:
    """Return a descriptor of the lock file, which is made if there is none."""
    with suppress(FileNotFoundError):
        _check_kind(os.lstat(path), path)  # opening a device may do something
    try:
        descriptor = os.open(path, _OPEN_FLAGS, 0o644)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EMLINK):  # a link since then
            raise _foreign_file_error(path, _FILE_KINDS[stat.S_IFLNK]) from error
        raise
    try:
        _check_kind(os.fstat(descriptor), path)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


# A FIFO that nobody reads must not block, and a terminal must not become this process's.
_OPEN_FLAGS = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


def _check_kind(found: os.stat_result, path: Path) -> None:
    kind = stat.S_IFMT(found.st_mode)
    if kind != stat.S_IFREG:
        raise _foreign_file_error(path, _FILE_KINDS.get(kind, "no file"))


def _check_content(descriptor: int, path: Path) -> None:
    """Raise OSError where a file holds what no lock has written, such as a link's other name.

    A host that lost its power may leave zeros.
    """
    start = os.pread(descriptor, 4096, 0)
    if start.strip(b"\0") and not start.startswith(b'{"pid"'):
        raise _foreign_file_error(path, "a file with something else in it")


def _foreign_file_error(path: Path, what: str) -> OSError:
    text = f"the name of the lock file is that of {what}: remove it, or name another folder"
    return OSError(errno.EINVAL, text, str(path))


def _owner(descriptor: int) -> str:
    try:
        owner = json.loads(os.pread(descriptor, 4096, 0))
        return f"process {owner['pid']} on {owner['host']} since {owner['since']}"
    except (OSError, ValueError, KeyError, TypeError):
        # It has taken the lock this moment.
        return "another job"
