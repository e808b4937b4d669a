"""Atomic and durable file replacement, folders held open by descriptor, and digests."""

from __future__ import annotations

import ctypes
import errno
import hashlib
import os
import secrets
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

_READ_NBYTES = 1 << 20

DIGEST_LEN = 32
"""Characters of a digest in hex."""

_MORE_SPACE = "free some space, or name a folder elsewhere"
_REMEDIES = {
    _MORE_SPACE: (errno.ENOSPC, errno.EDQUOT, errno.EFBIG),
    "name a folder that can be written to": (errno.EACCES, errno.EPERM, errno.EROFS),
    "a file is in the way; name another folder": (errno.ENOTDIR, errno.EEXIST),
}


def describe_os_error(error: OSError) -> str:
    """Describe a file system error in one line, with a remedy if one is known."""
    if error.errno is None:
        # Some libraries only report that a file was not written completely.
        return f"{' '.join(str(error).split())}; {_MORE_SPACE}"
    remedies = [remedy for remedy, numbers in _REMEDIES.items() if error.errno in numbers]
    place = f" ({error.filename})" if error.filename is not None else ""
    return f"{error.strerror}{place}; {remedies[0] if remedies else 'mend it, or name another'}"


def digest_of(data: bytes) -> str:
    """Return the first 16 bytes of SHA-256, which CPUs have instructions for, as hex digits."""
    return hashlib.sha256(data).hexdigest()[:DIGEST_LEN]


def digests_in(file: BinaryIO, ranges: Iterable[tuple[int, int]]) -> Iterator[str]:
    """Yield the digest of each (start, length) of a file; "" for a range that is cut off.

    Raises:
        OSError: the file cannot be read.
    """
    for start, length in ranges:
        file.seek(start)
        yield _digest_of_next_bytes(file, length)


def _digest_of_next_bytes(file: BinaryIO, length: int) -> str:
    digest = hashlib.sha256()
    while length:
        block = file.read(min(length, _READ_NBYTES))
        if not block:
            return ""
        digest.update(block)
        length -= len(block)
    return digest.hexdigest()[:DIGEST_LEN]


def write_atomically(path: Path, data: bytes) -> None:
    """Replace a file so that after a crash it has the old or the new contents.

    Raises:
        OSError: the file cannot be written.
    """
    with atomic_replacement(path) as temporary:
        temporary.write_bytes(data)


@contextmanager
def atomic_replacement(path: Path, ending: str = "") -> Iterator[Path]:
    """Yield a temporary path with suffix ``ending``; afterwards that file replaces ``path``.

    The file gets the mode of the file that it replaces, else the umask's default, whichever library
    writes it: safetensors creates files with mode 0600. If ``path`` is a link, its target is
    replaced.

    Raises:
        OSError: the file cannot be renamed, or ``path`` is not a regular file.
    """
    path = Path(os.path.realpath(path))
    # A short name: that of ``path`` may already have the file system's limit of 255 bytes.
    temporary = path.with_name(f".{secrets.token_hex(8)}.unfinished{ending}")
    try:
        old = _file_mode(path)
        temporary.touch(exist_ok=False)
        mode = stat.S_IMODE(temporary.stat().st_mode) if old is None else old
        yield temporary
        temporary.chmod(mode)
        # Contents first: a rename that is durable before the contents could leave an empty file.
        fsync_path(temporary)
        temporary.replace(path)
    finally:
        with suppress(OSError):
            temporary.unlink()
    fsync_path(path.parent)


def _file_mode(path: Path) -> int | None:
    """Return a file's permissions; None if there is none. Raise OSError if it is no file."""
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        return None
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "it is no file", str(path))
    return stat.S_IMODE(mode)


def fsync_path(path: Path) -> None:
    """Flush a file, or a folder's list of names, to the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        _fsync(descriptor)
    finally:
        os.close(descriptor)


def _fsync(descriptor: int) -> None:
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some file systems cannot fsync folders; a real I/O error counts all the same.
        if not stat.S_ISDIR(os.fstat(descriptor).st_mode) or error.errno == errno.EIO:
            raise


class FolderHandle:
    """A folder held open by descriptor: file operations do not depend on its current name.

    If another process replaces the folder, this handle still refers to the old one. Names are those
    of files in the folder. Links to files are followed for reading only.

    Args:
        path: the folder.
        follow: whether ``path`` may be a link.

    Raises:
        OSError: there is no such folder.
    """

    def __init__(self, path: Path, *, follow: bool = True) -> None:
        self.path, self._descriptor = path, -1
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW)
        self._descriptor = os.open(path, flags)

    def close(self) -> None:
        """Close the descriptor."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1

    __del__ = close

    def __enter__(self) -> FolderHandle:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def names(self) -> list[str]:
        """Return the names in the folder, sorted."""
        return sorted(os.listdir(self._descriptor))

    def is_at(self, path: Path) -> bool:
        """Return whether ``path`` names this folder now."""
        try:
            there = os.stat(path)
        except OSError:
            return False
        return os.path.samestat(there, os.fstat(self._descriptor))

    def has_file(self, name: str) -> bool:
        """Return whether ``name`` is a regular file or a link to one."""
        try:
            return stat.S_ISREG(os.stat(name, dir_fd=self._descriptor).st_mode)
        except OSError:
            return False

    def has_folder(self, name: str) -> bool:
        """Return whether ``name`` is a folder, and not a link to one."""
        try:
            there = os.stat(name, dir_fd=self._descriptor, follow_symlinks=False)
        except OSError:
            return False
        return stat.S_ISDIR(there.st_mode)

    def size(self, name: str) -> int:
        """Return the size of a file in bytes."""
        return os.stat(name, dir_fd=self._descriptor).st_size

    def open(self, name: str) -> BinaryIO:
        """Open a file for reading.

        Raises:
            OSError: there is no such file, or it is a folder, a device or a pipe.
        """
        # O_NONBLOCK: opening a pipe without a writer would block.
        flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
        descriptor = os.open(name, flags, dir_fd=self._descriptor)
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise OSError(errno.EINVAL, "it is no file", str(self.path / name))
            return os.fdopen(descriptor, "rb")
        except BaseException:
            os.close(descriptor)
            raise

    def create(self, name: str) -> BinaryIO:
        """Create a file for writing; an existing one is removed first."""
        with suppress(FileNotFoundError):
            self.remove(name)
        # O_EXCL and O_NOFOLLOW: never write through a link that another process creates here.
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        return os.fdopen(os.open(name, flags, 0o666, dir_fd=self._descriptor), "wb")

    def write_atomically(self, name: str, data: bytes) -> None:
        """Replace a file so that after a crash it has the old or the new contents.

        Raises:
            OSError: the file cannot be written.
        """
        temporary = f".{name}.unfinished"
        with self.create(temporary) as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())  # before the rename, as in atomic_replacement()
        both = {"src_dir_fd": self._descriptor, "dst_dir_fd": self._descriptor}
        os.rename(temporary, name, **both)
        self.fsync()

    def remove(self, name: str) -> None:
        """Remove a file or a link; raise OSError if there is none, or for a folder."""
        os.unlink(name, dir_fd=self._descriptor)

    def fsync(self) -> None:
        """Flush the folder's list of names to the disk."""
        _fsync(self._descriptor)


def make_folder(path: Path) -> FolderHandle:
    """Create a folder unless it exists, and open it; raise OSError if a file is in the way."""
    os.makedirs(path.parent, exist_ok=True)
    with suppress(FileExistsError):
        os.mkdir(path)
    return FolderHandle(path, follow=False)


def exchange_names(one: Path, other: Path) -> bool:
    """Exchange the names of two folders atomically; return False if the system cannot.

    Linux can if the file system supports renameat2(RENAME_EXCHANGE): ext4, xfs, btrfs and tmpfs do
    by its manual, NFS does not.

    Raises:
        OSError: the exchange failed for another reason.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "renameat2"):
        return False
    paths = os.fsencode(one), os.fsencode(other)
    if libc.renameat2(_AT_FDCWD, paths[0], _AT_FDCWD, paths[1], _RENAME_EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
        return False
    raise OSError(number, os.strerror(number), str(one), None, str(other))


_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


def is_folder(path: Path) -> bool:
    """Return whether ``path`` is a folder, and not a link to one."""
    try:
        return stat.S_ISDIR(os.lstat(path).st_mode)
    except OSError:
        return False
