"""Files that appear whole or not at all, and the file system's errors as one line."""

from __future__ import annotations

import hashlib
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from pretraining.errors import UsageError
from shardfuse import files
from shardfuse.files import describe_os_error as describe
from shardfuse.files import fsync_path as sync

__all__ = [
    "as_os_error",
    "blaming",
    "describe",
    "sha256",
    "sync",
    "sync_tree",
    "unfinished",
    "write_whole",
]

_READ_NBYTES = 1 << 20


@contextmanager
def blaming(option: str, path: Path) -> Iterator[None]:
    """Turn an `OSError` inside into a `UsageError` of one line that names `option` and `path`."""
    try:
        yield
    except OSError as error:
        raise UsageError(f"{option} {path}: {describe(error)}") from error


@contextmanager
def as_os_error() -> Iterator[None]:
    """Turn the errors inside of libraries that write files, one class each, into `OSError`."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        raise OSError(" ".join(str(error).split())) from error


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
    files.write_atomically(path, text.encode())


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
