"""Which checkpoints of a run exist, and which of them are intact."""

from __future__ import annotations

import os
from pathlib import Path

from shardfuse.checkpoint.collective import CheckpointGroup
from shardfuse.checkpoint.index import (
    MANIFEST,
    METADATA,
    CheckpointError,
    CheckpointReader,
    DamagedCheckpoint,
    Manifest,
    entry_faults,
    length_faults,
    step_in_name,
)
from shardfuse.checkpoint.replacement import is_checkpoint_file_name, open_checkpoint
from shardfuse.files import describe_os_error


def list_steps(folder: Path) -> list[int]:
    """Return the steps of a run's checkpoints, intact or not, newest first. Local.

    This includes a checkpoint without its name, because a process was killed between two
    renames; see replacement.py.
    """
    try:
        names = os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []
    found: dict[int, Path] = {}
    for name in names:
        base, _, ending = name.removeprefix(".").rpartition(".")
        if (step := step_in_name(name)) is not None and (folder / name).is_dir():
            found[step] = folder / name
        elif (step := step_in_name(base)) is not None and _is_interrupted(folder / name, ending):
            found.setdefault(step, folder / name)
    return sorted(
        (step for step, path in found.items() if _has_checkpoint_files(path)), reverse=True
    )


def _is_interrupted(path: Path, ending: str) -> bool:
    """Return whether a staging or backup folder has a manifest, so it may be intact."""
    return ending in ("replaced", "unfinished") and os.path.exists(path / MANIFEST)


def _has_checkpoint_files(path: Path) -> bool:
    """Return whether a folder has files of a checkpoint, and not only other files."""
    try:
        names = os.listdir(path)
    except OSError:
        return True  # reading it reports the error
    return not names or any(map(is_checkpoint_file_name, names))


def malformed_step_names(folder: Path) -> list[str]:
    """Return names in a run's folder that begin with ``step-`` but are no checkpoint. Local."""
    try:
        names = sorted(os.listdir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return []
    like = [name for name in names if name.startswith("step-")]
    return [name for name in like if step_in_name(name) is None or not (folder / name).is_dir()]


def broadcast_steps(ranks: CheckpointGroup, folder: Path) -> list[int]:
    """Return the first rank's list_steps() on all ranks. Collective."""
    return ranks.broadcast_list(list_steps(folder) if ranks.comm.rank == 0 else [])


def is_intact(ranks: CheckpointGroup, folder: Path, share_faults: list[str] | None = None) -> bool:
    """Return whether every byte of a checkpoint is as it was written. Collective.

    Each rank verifies its share, unless it has ``share_faults`` already.
    """
    faults = share_faults
    if faults is None:
        faults = verify_share(folder, ranks.comm.rank, ranks.comm.world_size)
    return all(ranks.gather_numbers(0 if faults else 1))


def name_intact_sibling(ranks: CheckpointGroup, folder: Path) -> str:
    """Return a sentence that names the newest intact checkpoint of the same run. Collective.

    Reads checkpoints from the newest until one is intact. Returns "" if ``folder`` is not named
    ``step-N``.
    """
    if step_in_name(folder.name) is None:
        return ""
    for step in broadcast_steps(ranks, folder.parent):
        other = folder.with_name(f"step-{step}")
        if other.name != folder.name and is_intact(ranks, other):
            return f"The newest whole checkpoint beside it is {other}."
    return "No other checkpoint beside it is whole."


def verify_share(folder: Path, rank: int = 0, world_size: int = 1) -> list[str]:
    """Return the damage in one rank's share of a checkpoint's files. Local.

    The first rank's share includes the manifest and ``.metadata``. The shares of all ranks cover
    every byte.
    """
    try:
        with open_checkpoint(folder) as source:
            return _share_faults(source, rank, world_size)
    except DamagedCheckpoint as damage:
        return damage.faults
    except CheckpointError as error:
        return [str(error)]
    except OSError as error:
        return [f"{folder.name} cannot be read: {describe_os_error(error)}"]


def _share_faults(source: CheckpointReader, rank: int, world_size: int) -> list[str]:
    manifest = Manifest.read(source)
    files = [file for file in manifest.files if file.name != METADATA]
    if rank == 0:
        manifest.read_file(source, next(f for f in manifest.files if f.name == METADATA))
    is_all = world_size == 1
    own = None if is_all else range(rank, len(files), world_size)
    indices = manifest.read_indices(source, own)
    faults = entry_faults(source, [entry for index in indices for entry in index.entries])
    return faults + length_faults(source, indices, is_exact=True)
