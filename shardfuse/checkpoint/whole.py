"""Which checkpoints of a run are there, and which of them are whole."""

from __future__ import annotations

import os
from pathlib import Path

from shardfuse.checkpoint.errors import CheckpointError, DamagedCheckpoint
from shardfuse.checkpoint.index import (
    MANIFEST,
    METADATA,
    Manifest,
    end_faults,
    item_faults,
    step_of,
)
from shardfuse.checkpoint.ranks import Ranks
from shardfuse.checkpoint.replacement import is_name_of_checkpoint, opened
from shardfuse.checkpoint.source import Source
from shardfuse.files import describe


def steps_in(folder: Path) -> list[int]:
    """Return the steps of a run's checkpoints, whole or not, the newest first. Local.

    Among them is one whose name only a killed process has taken away; see replacement.py.
    """
    try:
        names = os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []
    found: dict[int, Path] = {}
    for name in names:
        base, _, ending = name.removeprefix(".").rpartition(".")
        if (step := step_of(name)) is not None and (folder / name).is_dir():
            found[step] = folder / name
        elif (step := step_of(base)) is not None and _is_hidden(folder / name, ending):
            found.setdefault(step, folder / name)
    return sorted((step for step, path in found.items() if _is_one(path)), reverse=True)


def _is_hidden(path: Path, ending: str) -> bool:
    """Return whether a whole checkpoint may lie where a killed process has left it."""
    return ending in ("replaced", "unfinished") and os.path.exists(path / MANIFEST)


def _is_one(path: Path) -> bool:
    """Return whether a folder is a checkpoint, or was: not only what was kept of one."""
    try:
        names = os.listdir(path)
    except OSError:
        return True  # told when it is read
    return not names or any(map(is_name_of_checkpoint, names))


def odd_names_in(folder: Path) -> list[str]:
    """Return names like a checkpoint's that are none's, of a run's folder. Local."""
    try:
        names = sorted(os.listdir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return []
    like = [name for name in names if name.startswith("step-")]
    return [name for name in like if step_of(name) is None or not (folder / name).is_dir()]


def told_steps(ranks: Ranks, folder: Path) -> list[int]:
    """Return steps_in() of the first rank, on all ranks. Collective."""
    mine = steps_in(folder) if ranks.comm.rank == 0 else []
    count = ranks.words(len(mine))[0]
    return [ranks.number_of_first(mine[i] if mine else 0) for i in range(count)]


def is_whole(ranks: Ranks, folder: Path) -> bool:
    """Return whether every byte of a checkpoint is as it was written. Collective.

    Every rank reads its share.
    """
    faults = share_of_faults(folder, ranks.comm.rank, ranks.comm.world_size)
    return all(ranks.words(0 if faults else 1))


def whole_beside(ranks: Ranks, folder: Path) -> str:
    """Return a sentence that names the newest whole checkpoint of the run. Collective.

    Newer ones are read as well; older ones are not. It is empty where ``folder`` is no run's.
    """
    if step_of(folder.name) is None:
        return ""
    for step in told_steps(ranks, folder.parent):
        other = folder.with_name(f"step-{step}")
        if other.name != folder.name and is_whole(ranks, other):
            return f"The newest whole checkpoint beside it is {other}."
    return "No other checkpoint beside it is whole."


def share_of_faults(folder: Path, rank: int = 0, world_size: int = 1) -> list[str]:
    """Return what is damaged in one rank's share of a checkpoint's files. Local.

    The first rank's share has the manifest and ``.metadata``; together all shares have every byte.
    """
    try:
        with opened(folder) as source:
            return _faults_of(source, rank, world_size)
    except DamagedCheckpoint as damage:
        return damage.faults
    except CheckpointError as error:
        return [str(error)]
    except OSError as error:
        return [f"{folder.name} cannot be read: {describe(error)}"]


def _faults_of(source: Source, rank: int, world_size: int) -> list[str]:
    manifest = Manifest.read(source)
    files = [file for file in manifest.files if file.name != METADATA]
    if rank == 0:
        manifest.read_file(source, next(f for f in manifest.files if f.name == METADATA))
    is_all = world_size == 1
    own = None if is_all else range(rank, len(files), world_size)
    parts = manifest.parts(source, own)
    faults = item_faults(source, [item for part in parts for item in part.items])
    return faults + end_faults(source, parts, is_exact=True)
