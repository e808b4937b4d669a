"""What a checkpoint holds and what is damaged in it, for people and for scripts."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from shardfuse.checkpoint.errors import CheckpointError
from shardfuse.checkpoint.folder import Checkpoints
from shardfuse.checkpoint.index import MANIFEST, Kind, Manifest, Part, checkpoints_in
from shardfuse.checkpoint.replacement import opened
from shardfuse.checkpoint.whole import share_of_faults
from shardfuse.files import describe

_NUM_SHOWN = 30


@dataclass
class Held:
    """What lies under one key."""

    key: str
    dtype: str  # empty for a value that is not a tensor
    shape: tuple[int, ...]
    num_fragments: int
    nbytes: int  # in files


@dataclass
class Contents:
    """What a checkpoint holds."""

    folder: str
    world_size: int
    info: Mapping[str, Any]
    nbytes: int
    held: list[Held]

    def to_json(self) -> dict[str, Any]:
        """Return values that JSON has."""
        return asdict(self)

    def describe(self) -> str:
        """Return a table to be printed."""
        lines = [
            f"{self.folder}",
            f"saved by {self.world_size} ranks, {self.nbytes:,} bytes, {len(self.held)} keys",
            *(f"{name}: {value}" for name, value in self.info.items()),
            "",
            f"{'bytes':>15}  {'fragments':>9}  {'dtype':<9} {'shape':<18} key",
        ]
        for held in self.held[:_NUM_SHOWN]:
            shape = str(list(held.shape)) if held.dtype else ""
            lines.append(
                f"{held.nbytes:>15,}  {held.num_fragments:>9}  {held.dtype or 'value':<9} "
                f"{shape:<18} {held.key}"
            )
        if len(self.held) > _NUM_SHOWN:
            lines.append(f"... and {len(self.held) - _NUM_SHOWN} more; --json has all")
        return "\n".join(lines)


def inspect(folder: Path) -> Contents:
    """Return what a checkpoint holds, the largest first; its data is not read.

    Raises:
        DamagedCheckpoint: the files that say so are damaged.
        CheckpointError: there is no checkpoint.
    """
    with opened(folder) as source:
        manifest = Manifest.read(source)
        parts = manifest.parts(source)
        files = {item.file for part in parts for item in part.items}
        files |= {MANIFEST, *(file.name for file in manifest.files)}
        nbytes = sum(source.folder.size(n) for n in files if source.folder.has_file(n))
    held = _held(parts)
    return Contents(str(folder), manifest.world_size, manifest.info, nbytes, held)


def _held(parts: Iterable[Part]) -> list[Held]:
    found: dict[str, Held] = {}
    for part in parts:
        for item in part.items:
            kind = part.kinds.get(item.key, Kind("", ()))
            held = found.setdefault(item.key, Held(item.key, *kind, 0, 0))
            held.num_fragments += 1
            held.nbytes += item.length
    return sorted(found.values(), key=lambda held: (-held.nbytes, held.key))


@dataclass
class Verdict:
    """Whether one checkpoint is whole."""

    folder: str
    faults: list[str]

    def describe(self) -> str:
        """Return lines to be printed."""
        if not self.faults:
            return f"{self.folder}: whole"
        return "\n".join([f"{self.folder}: DAMAGED", *(f"  {fault}" for fault in self.faults)])


def verify(folder: Path) -> list[Verdict]:
    """Read every byte of a checkpoint, or of all in a run's folder; the newest first.

    Raises:
        CheckpointError: there is neither.
    """
    try:
        steps = Checkpoints(folder).steps()
        folders = [Checkpoints(folder).path(step) for step in steps]
        if not folders and not os.path.exists(folder / MANIFEST):
            folders = checkpoints_in(folder)  # of a run's folder
        if not folders and not any(folder.glob("*.json")):
            raise CheckpointError(f"There is no checkpoint in {folder}.")
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be read: {describe(error)}.") from None
    except ValueError as error:  # a NUL byte
        raise CheckpointError(f"{str(folder)!r} is no name of a folder: {error}.") from None
    folders = folders or [folder]
    return [Verdict(str(path), share_of_faults(path)) for path in folders]
