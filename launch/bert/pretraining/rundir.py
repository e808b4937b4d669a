"""The run directory: its number, the lock on it, and whether a run is in it.

runs/bert-001/
    .lock    empty but for the process that has it; held as long as that process lives
"""

from __future__ import annotations

from pathlib import Path

from pretraining.errors import UsageError
from shardfuse.training.lock import LOCK_FILE, FolderInUse, FolderLock

CONFIG_FILE = "config.json"


class RunLock(FolderLock):
    """Keeps a second job out of a run directory; raises `UsageError` naming who has it."""

    def __enter__(self) -> RunLock:
        return self

    def try_out(self, folder: Path) -> None:
        try:
            super().try_out(folder)
        except FolderInUse as error:
            raise RunInUse(
                f"--run-dir {error}; wait for that job to end, or name another folder"
            ) from error


class RunInUse(UsageError, FolderInUse):
    """Another process has the lock."""


def check_unused(folder: Path) -> None:
    """Raise `UsageError` where a new run cannot be in `folder`; changes nothing there."""
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"--run-dir {folder} is a file; name a folder")
    if not _is_used(folder):
        return
    if (folder / LOCK_FILE).exists():
        with RunLock() as lock:
            lock.try_out(folder)
    raise _used(folder)


def claim(folder: Path, lock: RunLock, *, is_numbered: bool) -> Path:
    """Create and lock the folder of a new run; return it.

    A folder whose number was chosen here, not by the user, is the next free one where another job
    was faster. Raises `UsageError`, `OSError`.
    """
    while True:
        try:
            folder.mkdir(parents=True, exist_ok=not is_numbered)
            break
        except FileExistsError:
            if not is_numbered or folder.parent.is_file():
                raise
            folder = next_run_dir(folder.parent)
    lock.take(folder)
    if _is_used(folder):
        raise _used(folder)
    return folder


def _is_used(folder: Path) -> bool:
    """Return whether there is anything but what a job leaves that ended before its run began."""
    if not folder.is_dir():
        return False
    names = {path.name for path in folder.iterdir()}
    return any(name != LOCK_FILE and not name.startswith(f".{CONFIG_FILE}.") for name in names)


def _used(folder: Path) -> UsageError:
    return UsageError(
        f"--run-dir {folder} is not empty; pass --resume to continue the run in it, "
        "or name another folder"
    )


def next_run_dir(runs_dir: Path) -> Path:
    """Return the first `bert-NNN` after all that are there."""
    return runs_dir / f"bert-{max(_numbers(runs_dir), default=0) + 1:03d}"


def newest_run_dir(runs_dir: Path) -> Path:
    """Return the `bert-NNN` of the highest number; raises `UsageError` where there is none."""
    numbers = _numbers(runs_dir)
    if not numbers:
        raise UsageError(f"--resume: {runs_dir} holds no run; name one with --run-dir")
    return runs_dir / f"bert-{max(numbers):03d}"


def _numbers(runs_dir: Path) -> list[int]:
    return [int(path.name[5:]) for path in runs_dir.glob("bert-*") if path.name[5:].isdecimal()]
