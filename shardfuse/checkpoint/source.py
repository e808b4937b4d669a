"""A checkpoint that is read, by descriptors: what is verified is what is read.

Another process may save in its place, rename or remove it at any moment. The open folder stays the
same one. Files that are kept open can be read to their end, though they have been removed. (On NFS
only if the same host has removed them.)
"""

from __future__ import annotations

import errno
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from shardfuse.checkpoint.errors import CheckpointError, DamagedCheckpoint
from shardfuse.files import Folder, describe

_MOST_OPEN = 256
"""Files kept open; a process may have 1,024."""

_IN_THE_WAY = (errno.ENOTDIR, errno.ENAMETOOLONG, errno.ELOOP)


class Source:
    """The folder of a checkpoint, open; also a context manager, which closes it.

    Args:
        path: the folder.

    Raises:
        CheckpointError: there is none, or it cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._kept: dict[str, BinaryIO] = {}
        try:
            self.folder = Folder(path)
        except FileNotFoundError:
            raise CheckpointError(f"There is no checkpoint {path}.") from None
        except ValueError:  # a NUL byte
            raise CheckpointError(f"{str(path)!r} is no name of a folder.") from None
        except OSError as error:
            if error.errno in _IN_THE_WAY:
                raise CheckpointError(f"There is no checkpoint {path}: {error.strerror}.") from None
            raise CheckpointError(f"{path} cannot be read: {describe(error)}.") from None

    @property
    def name(self) -> str:
        """Name of the folder."""
        return self.path.name

    @property
    def has_moved(self) -> bool:
        """Whether ``path`` names another checkpoint by now, or none."""
        return not self.folder.is_at(self.path)

    def __enter__(self) -> Source:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the folder and its files."""
        for file in self._kept.values():
            file.close()
        self._kept.clear()
        self.folder.close()

    def keep(self, names: Iterable[str]) -> None:
        """Open files that will be read more than once, and keep them open."""
        for name in sorted(set(names) - set(self._kept))[: _MOST_OPEN - len(self._kept)]:
            with suppress(OSError):  # told by whoever reads it
                self._kept[name] = self.folder.open(name)

    @contextmanager
    def opened(self, name: str) -> Iterator[BinaryIO]:
        """Give a file to be read. OSError: it cannot be."""
        if name in self._kept:
            yield self._kept[name]
            return
        with self.folder.open(name) as file:
            yield file

    def read(self, name: str, nbytes: int | None, most: int) -> bytes:
        """Return the contents of a file.

        Args:
            name: of the file.
            nbytes: length that it must have; None: any.
            most: length that it must not exceed.

        Raises:
            DamagedCheckpoint: it is not there, has another length, or cannot be read.
        """
        place = f"{self.name}/{name}"
        try:
            with self.opened(name) as file:
                size = file.seek(0, 2)
                if nbytes is not None and size != nbytes:
                    raise DamagedCheckpoint([f"{place} has {size:,} bytes of {nbytes:,}"])
                if size > most:
                    raise DamagedCheckpoint([f"{place} has {size:,} bytes, of at most {most:,}"])
                file.seek(0)
                return file.read(size)
        except FileNotFoundError:
            raise DamagedCheckpoint([f"{place} is missing"]) from None
        except OSError as error:
            raise DamagedCheckpoint([f"{place} cannot be read ({error.strerror})"]) from None
