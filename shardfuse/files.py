"""Files that are on the disk, whole or not at all, and digests of what lies in them."""

from __future__ import annotations

import errno
import hashlib
import os
import secrets
import shutil
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


def describe(error: OSError) -> str:
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


def digests_in(path: Path, ranges: Iterable[tuple[int, int]]) -> Iterator[str]:
    """Yield the digest of every (start, length) of a file; "" where the file ends before it does.

    Raises:
        OSError: the file cannot be read.
    """
    with path.open("rb") as file:
        for start, length in ranges:
            file.seek(start)
            yield _digest_of_next(file, length)


def _digest_of_next(file: BinaryIO, length: int) -> str:
    digest = hashlib.sha256()
    while length:
        block = file.read(min(length, _READ_NBYTES))
        if not block:
            return ""
        digest.update(block)
        length -= len(block)
    return digest.hexdigest()[:DIGEST_LEN]


def write_whole(path: Path, data: bytes) -> None:
    """Write a file so that after a crash there is the old one or the new one.

    Raises:
        OSError: it cannot be written.
    """
    with replacing(path) as temporary:
        temporary.write_bytes(data)


@contextmanager
def replacing(path: Path, ending: str = "") -> Iterator[Path]:
    """Give a name with ``ending`` to write a file under, which then gets that of ``path``.

    Its mode is that which the umask asks for, whoever writes it: safetensors makes files of 0600.

    Raises:
        OSError: it cannot be renamed.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.unfinished{ending}")
    try:
        temporary.touch(exist_ok=False)
        mode = temporary.stat().st_mode & 0o777
        yield temporary
        temporary.chmod(mode)
        sync(temporary)
        temporary.replace(path)
    finally:
        with suppress(OSError):
            temporary.unlink()
    sync(path.parent)


def sync(path: Path) -> None:
    """Have a file, or a folder's list of names, written to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError:
        # Not every file system syncs folders.
        if not path.is_dir():
            raise
    finally:
        os.close(descriptor)


def discard(folder: Path) -> None:
    """Remove a folder; what is left of it if that is cut short begins with a dot.

    Raises:
        OSError: it cannot be renamed.
    """
    if folder.exists():
        rest = folder.with_name(f".{folder.name}.discarded")
        shutil.rmtree(rest, ignore_errors=True)
        folder.rename(rest)
        shutil.rmtree(rest, ignore_errors=True)
