"""One checkpoint takes the place of another: every name that has a part in it, and what is removed.

    ck              the checkpoint
    .ck.unfinished  the next one while it is written; after both have changed names, the old one
    .ck.replaced    the old one, where the file system cannot exchange names (NFS)

At each moment one of these names has a whole checkpoint, the old or the new one. Only a process
that saves renames or removes; one that reads takes the first of them that is there, by opened().

[Note: what is removed] A save removes files that are a checkpoint's, by its own manifest, and
nothing else. Of a damaged one it removes what has a checkpoint's names. Anything else is an error
before anything is written; what another process puts there later is kept, under another name.
"""

from __future__ import annotations

import logging
import os
import re
from contextlib import suppress
from pathlib import Path

from shardfuse.checkpoint.index import (
    MANIFEST,
    METADATA,
    CheckpointError,
    CheckpointReader,
    Manifest,
    step_in_name,
)
from shardfuse.files import FolderHandle, exchange_names, fsync_path, is_folder, make_folder

logger = logging.getLogger("shardfuse")

_DATA_NAME = re.compile(r"__([0-9]{1,9})_[0-9]+\.distcp")
_INDEX_NAMES = r"part-[0-9]+\.json|manifest\.json|\.metadata"
_CHECKPOINT_NAME = re.compile(rf"{_INDEX_NAMES}|{_DATA_NAME.pattern}")
_TEMPORARY_NAME = re.compile(rf"\.({_INDEX_NAMES})(\.[0-9a-f]+)?\.unfinished")
_INDEX_PREFIX = b'{"digest":"'
"""How manifests and indices begin."""


def staging_path(target: Path) -> Path:
    """Return the name of a checkpoint while it is written."""
    return target.with_name(f".{target.name}.unfinished")


def backup_path(target: Path) -> Path:
    """Return the name of an old checkpoint while a new one takes its place."""
    return target.with_name(f".{target.name}.replaced")


def open_checkpoint(target: Path) -> CheckpointReader:
    """Open the checkpoint of that name, also where a process was killed that saved in its place.

    Raises:
        CheckpointError: there is none.
    """
    # Again, because names may change in between.
    real = resolve_link(target)
    hidden = [backup_path(real), staging_path(real)] if real.name else []
    for path in 2 * [target, *hidden]:
        if os.path.exists(path / MANIFEST):
            with suppress(CheckpointError):
                return CheckpointReader(path)
    return CheckpointReader(target)


def resolve_link(path: str | os.PathLike[str]) -> Path:
    """Return where a checkpoint is saved: a link stays, and what it names is replaced."""
    path = Path(path).absolute()
    return Path(os.path.realpath(path)) if path.is_symlink() else path


def prepare_staging(target: Path) -> None:
    """Have a save into ``unfinished(target)`` possible. Of one process, before others write.

    It finishes what a killed process was about to do.

    Raises:
        CheckpointError: there is something that is no checkpoint.
        OSError: the file system refuses.
    """
    new, old = staging_path(target), backup_path(target)
    if os.path.lexists(target) and not is_folder(target):
        raise CheckpointError("it is a file; name a folder.")
    for path in (new, old):
        if os.path.lexists(path) and not is_folder(path):
            _keep_under_other_name(path)
    if not is_folder(target):
        if is_folder(old):
            os.rename(old, target)
        elif _has_manifest(new):
            os.rename(new, target)
    others = unrelated_names(target)
    if others:
        more = f" and {len(others) - 1} more" if others[1:] else ""
        raise CheckpointError(
            f"the folder has {others[0]}{more}, of no checkpoint, which saving would remove; name "
            "another, such as a new one inside of it."
        )
    for path in (new, old):
        if is_folder(path) and (path == old or unrelated_names(path, is_ours=True)):
            remove_checkpoint(path)
    with make_folder(new) as folder, suppress(FileNotFoundError):
        folder.remove(MANIFEST)  # first of all: what it lists is overwritten


def commit_staging(target: Path) -> None:
    """Give the finished checkpoint its name, and remove the old one. Of one process.

    Raises:
        OSError: the file system refuses; the old one has its name.
    """
    new, old = staging_path(target), backup_path(target)
    if not is_folder(target):
        os.rename(new, target)
        fsync_path(target.parent)
        return
    if exchange_names(new, target):
        old = new
        try:
            fsync_path(target.parent)
        except OSError:
            exchange_names(new, target)
            raise
    else:
        os.rename(target, old)
        try:
            os.rename(new, target)
        except OSError:
            with suppress(OSError):  # something else has taken the name; readers find the old one
                os.rename(old, target)
            raise
        fsync_path(target.parent)
    remove_checkpoint(old)


def remove_checkpoint(folder: Path) -> None:
    """Remove a checkpoint that nobody will read by this name, and nothing else.

    What else is in it is left, under a name that shows it; a warning says so. Errors of the file
    system are left to the next save, which tries again.
    """
    try:
        remove_checkpoint_files(folder)
        if os.listdir(folder):
            _keep_under_other_name(folder)
        else:
            os.rmdir(folder)
    except OSError as error:
        logger.warning("%s is not removed: %s", folder, error)


def _keep_under_other_name(path: Path) -> None:
    """Rename what is in the way and no checkpoint's, to a name that shows it."""
    name, number = path.name.strip("."), 1
    while os.path.lexists(kept := path.with_name(f"{name}.kept{number if number > 1 else ''}")):
        number += 1
    os.rename(path, kept)
    logger.warning("%s is of no checkpoint, and was in the way.", kept)


def recover_interrupted(folder: Path) -> None:
    """Finish or remove what killed processes have left of a run. Of the process that saves."""
    for name in sorted(os.listdir(folder)):
        base, _, ending = name.removeprefix(".").rpartition(".")
        is_left = name.startswith(".") and ending in ("unfinished", "replaced", "discarded")
        if not is_left or step_in_name(base) is None or not is_folder(folder / name):
            continue
        is_whole = ending == "replaced" or (ending == "unfinished" and _has_manifest(folder / name))
        if is_whole and not os.path.lexists(folder / base):
            os.rename(folder / name, folder / base)
        else:
            remove_checkpoint(folder / name)


def remove_checkpoint_files(path: Path) -> None:
    """Remove a checkpoint's files, the manifest first: without it, it is none."""
    others = unrelated_names(path, is_ours=path.name.startswith("."))
    with FolderHandle(path, follow=False) as folder:
        names = [name for name in folder.names() if name not in others]
        for name in sorted(names, key=lambda name: name != MANIFEST):
            with suppress(FileNotFoundError):
                folder.remove(name)


def unrelated_names(path: Path, *, is_ours: bool = False) -> list[str]:
    """Return names in a folder that are no checkpoint's. See [Note: what is removed].

    Args:
        path: the folder; without one, there is nothing in it.
        is_ours: whether nobody but a save has made it; else its files show it.
    """
    if not is_folder(path):
        return []
    with CheckpointReader(path) as source:
        folder = source.folder
        names = [name for name in folder.names() if not _TEMPORARY_NAME.fullmatch(name)]
        listed, ranks = {MANIFEST, METADATA}, range(0)
        try:
            manifest = Manifest.read(source)
        except CheckpointError:
            is_rest = METADATA not in names and all(map(is_checkpoint_file_name, names))
            if not is_ours and not is_rest and not any(_begins_as_index(folder, n) for n in names):
                return names
            others = [name for name in names if not _CHECKPOINT_NAME.fullmatch(name)]
        else:
            listed, ranks = {file.name for file in manifest.files}, range(manifest.world_size)
            others = [
                n for n in names if n not in listed | {MANIFEST} and _rank_in_name(n) not in ranks
            ]
        return others + [name for name in names if name not in others and folder.has_folder(name)]


def is_checkpoint_file_name(name: str) -> bool:
    """Return whether a file of a checkpoint may be called so."""
    return _CHECKPOINT_NAME.fullmatch(name) is not None


def _rank_in_name(name: str) -> int:
    """Return the rank whose data a file is named for; -1: it is not named so."""
    found = _DATA_NAME.fullmatch(name)
    return int(found[1]) if found else -1


def _begins_as_index(folder: FolderHandle, name: str) -> bool:
    """Return whether a file begins as a manifest or an index does, which may be damaged."""
    if not _CHECKPOINT_NAME.fullmatch(name) or not folder.has_file(name):
        return False
    with folder.open(name) as file:
        return file.read(len(_INDEX_PREFIX)) == _INDEX_PREFIX


def _has_manifest(path: Path) -> bool:
    if not is_folder(path):
        return False
    with FolderHandle(path, follow=False) as folder:
        return folder.has_file(MANIFEST)
