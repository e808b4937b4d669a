"""Files that appear whole or not at all, and the file system's errors as one line."""

from __future__ import annotations

import errno
import hashlib
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from pretraining.errors import UsageError

_READ_NBYTES = 1 << 20

_MORE_SPACE = "free some space, or name a folder elsewhere"
_REMEDIES = {
    _MORE_SPACE: (errno.ENOSPC, errno.EDQUOT, errno.EFBIG),
    "name a folder that can be written to": (errno.EACCES, errno.EPERM, errno.EROFS),
    "a file is in the way; name another folder": (errno.ENOTDIR, errno.EEXIST),
}


@contextmanager
def blaming(option: str, path: Path) -> Iterator[None]:
    """Turn an `OSError` inside into a `UsageError` of one line that names `option` and `path`."""
    try:
        yield
    except OSError as error:
        raise UsageError(f"{option} {path}: {describe(error)}") from error


def describe(error: OSError) -> str:
    """Say in one line what the file system refused, with the remedy where there is one."""
    if error.errno is None:
        # numpy and tokenizers tell no more than that a file was not written to its end.
        return f"{' '.join(str(error).split())}; {_MORE_SPACE}"
    reason = error.strerror
    remedies = [remedy for remedy, numbers in _REMEDIES.items() if error.errno in numbers]
    place = f" ({error.filename})" if error.filename is not None else ""
    return f"{reason}{place}; {remedies[0] if remedies else 'mend it, or name another'}"


@contextmanager
def unfinished(path: Path) -> Iterator[Path]:
    """Give a name beside `path` to write or build under, to be renamed; it is gone afterwards.

    No other job on any host has the same.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.unfinished")
    try:
        yield temporary
    finally:
        if temporary.is_dir():
            shutil.rmtree(temporary, ignore_errors=True)
        with suppress(OSError):
            temporary.unlink()


def write_whole(path: Path, text: str) -> None:
    """Write a text file so that after a crash there is the old one or the new one."""
    with unfinished(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
        sync(temporary)
        temporary.replace(path)
    sync(path.parent)


def sync(path: Path) -> None:
    """Have a file or a folder's list of names written to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError:
        # Not every file system syncs folders.
        if not path.is_dir():
            raise
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """Have a folder with all that is in it written to the disk."""
    for path in folder.rglob("*"):
        sync(path)
    sync(folder)


def sha256(path: Path) -> bytes:
    """Return the digest of a file's contents."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_READ_NBYTES):
            digest.update(block)
    return digest.digest()
