"""Replacement of a checkpoint on disk: the names in use, and the files to remove.

    ck              the checkpoint
    .ck.unfinished  staging: the next checkpoint while it is written; after both have exchanged
                    names, the old one
    .ck.replaced    backup: the old checkpoint, if the file system cannot exchange names (NFS)

At each moment one of these names is a complete checkpoint, the old or the new one. Only a saving
process renames or removes. A reader opens the first complete one of them (open_checkpoint()).

[Note: removed files] A save removes only files that the checkpoint's own manifest lists. If the
manifest is damaged, it removes files with the names of a checkpoint's files. Any other file is an
error before anything is written. Files that another process adds later are kept, under another
name.
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
"""First bytes of a manifest or index file."""


def staging_path(target: Path) -> Path:
    """Return where the checkpoint ``target`` is written before it is committed."""
    return target.with_name(f".{target.name}.unfinished")


def backup_path(target: Path) -> Path:
    """Return where the old checkpoint is while the new one takes its name."""
    return target.with_name(f".{target.name}.replaced")


def open_checkpoint(target: Path) -> CheckpointReader:
    """Open the checkpoint ``target``, even if a process was killed while it replaced it.

    Raises:
        CheckpointError: there is none.
    """
    # Two rounds: a saving process may rename between two of these checks.
    real = resolve_link(target)
    hidden = [backup_path(real), staging_path(real)] if real.name else []
    for path in 2 * [target, *hidden]:
        if os.path.exists(path / MANIFEST):
            with suppress(CheckpointError):
                return CheckpointReader(path)
    return CheckpointReader(target)


def resolve_link(path: str | os.PathLike[str]) -> Path:
    """Return the folder that a save replaces: the target of a link; the link itself stays."""
    path = Path(path).absolute()
    return Path(os.path.realpath(path)) if path.is_symlink() else path


def prepare_staging(target: Path) -> None:
    """Make a save into ``staging_path(target)`` possible. One process, before any rank writes.

    First completes the replacement that a killed process had begun.

    Raises:
        CheckpointError: ``target`` has files that are not a checkpoint's.
        OSError: a file system operation failed.
    """
    new, old = staging_path(target), backup_path(target)
    if os.path.lexists(target) and not is_folder(target):
        raise CheckpointError("it is a file; name a folder.")
    for path in (new, old):
        if os.path.lexists(path) and not is_folder(path):
            _keep_under_other_name(path)
    if not is_folder(target):  # killed between two renames: backup, or complete staging folder
        if is_folder(old):
            os.rename(old, target)
        elif _has_manifest(new):
            os.rename(new, target)
    unrelated = unrelated_names(target)
    if unrelated:
        more = f" and {len(unrelated) - 1} more" if unrelated[1:] else ""
        raise CheckpointError(
            f"the folder has {unrelated[0]}{more}, of no checkpoint, which saving would remove; "
            "name another, such as a new one inside of it."
        )
    for path in (new, old):
        if is_folder(path) and (path == old or unrelated_names(path, is_ours=True)):
            remove_checkpoint(path)
    with make_folder(new) as folder, suppress(FileNotFoundError):
        folder.remove(MANIFEST)  # first: the ranks overwrite the files that it lists


def commit_staging(target: Path) -> None:
    """Give the complete checkpoint its name, and remove the old one. One process.

    Raises:
        OSError: a file system operation failed; the old checkpoint has its name.
    """
    new, old = staging_path(target), backup_path(target)
    if not is_folder(target):
        os.rename(new, target)
        fsync_path(target.parent)  # makes the rename durable
        return
    if exchange_names(new, target):
        old = new  # the staging name is the old checkpoint's now
        try:
            fsync_path(target.parent)
        except OSError:
            exchange_names(new, target)  # not durable, so the old checkpoint gets its name back
            raise
    else:
        os.rename(target, old)
        try:
            os.rename(new, target)
        except OSError:
            with suppress(OSError):  # the name is taken again; readers open the backup
                os.rename(old, target)
            raise
        fsync_path(target.parent)
    # Only after the fsync: until then a power failure may undo the renames.
    remove_checkpoint(old)


def remove_checkpoint(folder: Path) -> None:
    """Remove the files of a checkpoint under a name that no reader opens any more.

    If the folder has other files, they are kept under another name, with a warning. Errors of the
    file system are logged; the next save tries again.
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
    """Rename a file or folder that is not a checkpoint's, and warn."""
    name, number = path.name.strip("."), 1
    while os.path.lexists(kept := path.with_name(f"{name}.kept{number if number > 1 else ''}")):
        number += 1
    os.rename(path, kept)
    logger.warning("%s is of no checkpoint, and was in the way.", kept)


def recover_interrupted(folder: Path) -> None:
    """Finish or remove unfinished saves of killed processes. Called only by saving processes."""
    for name in sorted(os.listdir(folder)):
        base, _, ending = name.removeprefix(".").rpartition(".")
        is_left = name.startswith(".") and ending in ("unfinished", "replaced", "discarded")
        if not is_left or step_in_name(base) is None or not is_folder(folder / name):
            continue
        is_complete = ending == "replaced" or (
            ending == "unfinished" and _has_manifest(folder / name)
        )
        if is_complete and not os.path.lexists(folder / base):
            os.rename(folder / name, folder / base)
        else:
            remove_checkpoint(folder / name)


def remove_checkpoint_files(path: Path) -> None:
    """Remove a checkpoint's files, the manifest first: without it there is no checkpoint."""
    unrelated = unrelated_names(path, is_ours=path.name.startswith("."))
    with FolderHandle(path, follow=False) as folder:
        names = [name for name in folder.names() if name not in unrelated]
        for name in sorted(names, key=lambda name: name != MANIFEST):
            with suppress(FileNotFoundError):
                folder.remove(name)


def unrelated_names(path: Path, *, is_ours: bool = False) -> list[str]:
    """Return the names in a folder that are not a checkpoint's. See [Note: removed files].

    Args:
        path: the folder; if it does not exist, the result is empty.
        is_ours: True if only a save can have created the folder; False: its contents must show
            that it is a checkpoint.
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
            unrelated = [name for name in names if not _CHECKPOINT_NAME.fullmatch(name)]
        else:
            listed, ranks = {file.name for file in manifest.files}, range(manifest.world_size)
            unrelated = [
                n for n in names if n not in listed | {MANIFEST} and _rank_in_name(n) not in ranks
            ]
        return unrelated + [
            name for name in names if name not in unrelated and folder.has_folder(name)
        ]


def is_checkpoint_file_name(name: str) -> bool:
    """Return whether a file of a checkpoint can have this name."""
    return _CHECKPOINT_NAME.fullmatch(name) is not None


def _rank_in_name(name: str) -> int:
    """Return the rank in the name of a data file; -1 for other names."""
    found = _DATA_NAME.fullmatch(name)
    return int(found[1]) if found else -1


def _begins_as_index(folder: FolderHandle, name: str) -> bool:
    """Return whether a file begins as a manifest or index does; it may be damaged."""
    if not _CHECKPOINT_NAME.fullmatch(name) or not folder.has_file(name):
        return False
    with folder.open(name) as file:
        return file.read(len(_INDEX_PREFIX)) == _INDEX_PREFIX


def _has_manifest(path: Path) -> bool:
    if not is_folder(path):
        return False
    with FolderHandle(path, follow=False) as folder:
        return folder.has_file(MANIFEST)
