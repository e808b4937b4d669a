"""An exclusive lock on a folder that is held while its process lives.

[Note: lock ownership] flock() belongs to an open file description, which a forked child shares:
DataLoader workers that outlive a trainer would keep its lock. So a child closes its copy first
thing after fork(). O_CLOEXEC does so for exec(). Alternatives: fcntl() locks are not inherited, but
a process loses them when it closes any descriptor of the file, as copying or searching the folder
does, and they do not exclude a second job in the same process. Locks of open file descriptions
(F_OFD_SETLK) are inherited as well, and NFS lacks them. Linux maps flock() on NFS to a lock of the
server, which is released with the last copy of the descriptor, not the first, so the child's close
leaves it.

[Note: why not filelock] torch requires filelock, in any version. Up to 3.20 at least, it truncates
the lock file when it opens it, before it has the lock, so a refusal could not say which process
holds it; and a forked child keeps the lock. 4.3 does neither. But no version lets its caller check
the file of the lock's path (a FIFO, a device, a hard link to the user's data), and none continues
with a warning on file systems without locks (ENOLCK, EOPNOTSUPP).
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
"""Name of the lock file. It contains the process that holds the lock, as JSON."""

_HELD_ERRNOS = (errno.EAGAIN, errno.EACCES)
_NO_LOCKS_ERRNOS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)
_POLL_S = 0.2


class FolderInUse(RuntimeError):
    """Another process holds the lock; ``str(error)`` names it and since when."""


class FolderLock:
    """A lock that keeps a second job out of a folder; also a context manager, which releases it.

    The operating system releases the lock when the process ends for any reason, so it is never
    stale. A forked child does not have it: see [Note: lock ownership]. Over NFS it also works
    between hosts.
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
        """Lock ``folder``, and write there which process holds the lock.

        Args:
            folder: an existing folder.
            patience_s: seconds to wait for another process to release it.

        Raises:
            FolderInUse: another process holds the lock.
            OSError: the folder cannot be written to; or the name of the lock file is that of a
                link, a FIFO, a device or a folder, or of a file with other contents. None of these
                is followed or changed.
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
        os.ftruncate(self._descriptor, 0)  # only now: until here a refusal may read the holder
        os.pwrite(self._descriptor, json.dumps(owner).encode(), 0)

    def try_out(self, folder: Path) -> None:
        """Lock ``folder`` without writing there which process holds the lock.

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
    """Open the lock file and return its descriptor; create it if there is none."""
    with suppress(FileNotFoundError):
        _check_kind(os.lstat(path), path)  # before open(), which may act on a device
    try:
        descriptor = os.open(path, _OPEN_FLAGS, 0o644)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EMLINK):  # replaced by a link after lstat()
            raise _foreign_file_error(path, _FILE_KINDS[stat.S_IFLNK]) from error
        raise
    try:
        _check_kind(os.fstat(descriptor), path)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


# O_NONBLOCK: a FIFO without a reader must not block. O_NOCTTY: a terminal must not become ours.
_OPEN_FLAGS = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


def _check_kind(found: os.stat_result, path: Path) -> None:
    kind = stat.S_IFMT(found.st_mode)
    if kind != stat.S_IFREG:
        raise _foreign_file_error(path, _FILE_KINDS.get(kind, "no file"))


def _check_content(descriptor: int, path: Path) -> None:
    """Raise OSError if a file has contents that no lock has written, such as a hard link's.

    After a power failure the file may consist of zeros.
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
        # The holder has the lock and has not written its name yet.
        return "another job"
