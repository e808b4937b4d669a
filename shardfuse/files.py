"""Files that are on the disk, whole or not at all, and digests of what lies in them."""

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
"""Characters of a digest."""

_MORE_SPACE = "free some space, or name a folder elsewhere"
_REMEDIES = {
    _MORE_SPACE: (errno.ENOSPC, errno.EDQUOT, errno.EFBIG),
    "name a folder that can be written to": (errno.EACCES, errno.EPERM, errno.EROFS),
    "a file is in the way; name another folder": (errno.ENOTDIR, errno.EEXIST),
}


def describe_os_error(error: OSError) -> str:
    """Say in one line what the file system refused, with the remedy where there is one."""
    if error.errno is None:
        # Some libraries tell no more than that a file was not written to its end.
        return f"{' '.join(str(error).split())}; {_MORE_SPACE}"
    remedies = [remedy for remedy, numbers in _REMEDIES.items() if error.errno in numbers]
    place = f" ({error.filename})" if error.filename is not None else ""
    return f"{error.strerror}{place}; {remedies[0] if remedies else 'mend it, or name another'}"


def digest_of(data: bytes) -> str:
    """Return the first 16 bytes of SHA-256, for which CPUs have instructions, as digits."""
    return hashlib.sha256(data).hexdigest()[:DIGEST_LEN]


def digests_in(file: BinaryIO, ranges: Iterable[tuple[int, int]]) -> Iterator[str]:
    """Yield the digest of every (start, length) of a file; "" where the file ends before it does.

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
    """Write a file so that after a crash there is the old one or the new one.

    Raises:
        OSError: it cannot be written.
    """
    with atomic_replacement(path) as temporary:
        temporary.write_bytes(data)


@contextmanager
def atomic_replacement(path: Path, ending: str = "") -> Iterator[Path]:
    """Give a name with ``ending`` to write a file under, which then gets that of ``path``.

    It gets the mode of the file that it replaces, else that which the umask asks for, whoever
    writes it: safetensors makes files of 0600. A link stays, and the file that it names is
    replaced.

    Raises:
        OSError: it cannot be renamed, or ``path`` names something else than a file.
    """
    path = Path(os.path.realpath(path))
    # Short, and not made of the name: that may have the file system's 255 bytes already.
    temporary = path.with_name(f".{secrets.token_hex(8)}.unfinished{ending}")
    try:
        old = _file_mode(path)
        temporary.touch(exist_ok=False)
        mode = stat.S_IMODE(temporary.stat().st_mode) if old is None else old
        yield temporary
        temporary.chmod(mode)
        fsync_path(temporary)
        temporary.replace(path)
    finally:
        with suppress(OSError):
            temporary.unlink()
    fsync_path(path.parent)


def _file_mode(path: Path) -> int | None:
    """Return the permissions of a file; None where there is none. OSError where it is no file."""
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        return None
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "it is no file", str(path))
    return stat.S_IMODE(mode)


def fsync_path(path: Path) -> None:
    """Have a file, or a folder's list of names, written to the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        _fsync(descriptor)
    finally:
        os.close(descriptor)


def _fsync(descriptor: int) -> None:
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Not every file system syncs folders.
        if not stat.S_ISDIR(os.fstat(descriptor).st_mode) or error.errno == errno.EIO:
            raise


class FolderHandle:
    """An open folder: its files are reached through it, whatever name it has or gets.

    So what another process puts in its place is never taken for it. Names are those of files in
    it; links to files are read, and neither written to nor followed to be created or removed.

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
        """Close it."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1

    __del__ = close

    def __enter__(self) -> FolderHandle:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def names(self) -> list[str]:
        """Return the names in it, in order."""
        return sorted(os.listdir(self._descriptor))

    def is_at(self, path: Path) -> bool:
        """Return whether ``path`` names this folder now."""
        try:
            there = os.stat(path)
        except OSError:
            return False
        return os.path.samestat(there, os.fstat(self._descriptor))

    def has_file(self, name: str) -> bool:
        """Return whether there is a file of that name, which may be a link to one."""
        try:
            return stat.S_ISREG(os.stat(name, dir_fd=self._descriptor).st_mode)
        except OSError:
            return False

    def has_folder(self, name: str) -> bool:
        """Return whether there is a folder of that name, and not a link to one."""
        try:
            there = os.stat(name, dir_fd=self._descriptor, follow_symlinks=False)
        except OSError:
            return False
        return stat.S_ISDIR(there.st_mode)

    def size(self, name: str) -> int:
        """Return the bytes of a file."""
        return os.stat(name, dir_fd=self._descriptor).st_size

    def open(self, name: str) -> BinaryIO:
        """Open a file to be read.

        Raises:
            OSError: there is none of that name, or it is a folder, a device or a pipe.
        """
        # A pipe that nobody writes to would be waited for.
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
        """Create a file to be written, in place of one that is there."""
        with suppress(FileNotFoundError):
            self.remove(name)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        return os.fdopen(os.open(name, flags, 0o666, dir_fd=self._descriptor), "wb")

    def write_atomically(self, name: str, data: bytes) -> None:
        """Write a file so that after a crash there is the old one or the new one.

        Raises:
            OSError: it cannot be written.
        """
        temporary = f".{name}.unfinished"
        with self.create(temporary) as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        both = {"src_dir_fd": self._descriptor, "dst_dir_fd": self._descriptor}
        os.rename(temporary, name, **both)
        self.fsync()

    def remove(self, name: str) -> None:
        """Remove a file, or a link; OSError where there is none, or it is a folder."""
        os.unlink(name, dir_fd=self._descriptor)

    def fsync(self) -> None:
        """Have its list of names written to the disk."""
        _fsync(self._descriptor)


def make_folder(path: Path) -> FolderHandle:
    """Create a folder if it is not there, and open it; OSError if something else is there."""
    os.makedirs(path.parent, exist_ok=True)
    with suppress(FileExistsError):
        os.mkdir(path)
    return FolderHandle(path, follow=False)


def exchange_names(one: Path, other: Path) -> bool:
    """Have two folders change names, at once for whoever looks; False: the system cannot.

    Linux can where the file system supports renameat2(RENAME_EXCHANGE): ext4, xfs, btrfs and tmpfs
    do by its manual, and NFS does not.

    Raises:
        OSError: it cannot be done for another reason.
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
    """Return whether ``path`` is a folder and not a link to one."""
    try:
        return stat.S_ISDIR(os.lstat(path).st_mode)
    except OSError:
        return False
