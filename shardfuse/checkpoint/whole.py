"""Which checkpoints of a run are there, and which of them are whole."""

from __future__ import annotations

import re
from pathlib import Path

from shardfuse.checkpoint.errors import CheckpointError, DamagedCheckpoint
from shardfuse.checkpoint.index import METADATA, Manifest, item_faults
from shardfuse.checkpoint.ranks import Ranks
from shardfuse.files import describe

NAME = re.compile(r"step-(\d+)")
"""What the folder of a run's checkpoint is called."""


def steps_in(folder: Path) -> list[int]:
    """Return the steps of a run's checkpoints, whole or not, the newest first. Local."""
    if not folder.is_dir():
        return []
    found = [NAME.fullmatch(path.name) for path in folder.iterdir()]
    return sorted((int(match[1]) for match in found if match), reverse=True)


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
    if NAME.fullmatch(folder.name) is None:
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
        manifest = Manifest.read(folder)
        files = [file for file in manifest.files if file.name != METADATA]
        if rank == 0:
            manifest.read_file(folder, next(f for f in manifest.files if f.name == METADATA))
        own = Manifest(manifest.world_size, files[rank::world_size], {}).parts(folder)
    except DamagedCheckpoint as damage:
        return damage.faults
    except CheckpointError as error:
        return [str(error)]
    except OSError as error:
        return [f"{folder.name} cannot be read: {describe(error)}"]
    return item_faults(folder, [item for part in own for item in part.items])
