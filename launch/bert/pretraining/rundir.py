"""The run directory: its number, the lock on it, and whether a run is in it.

runs/bert-001/
    .lock    empty but for the process that has it; held as long as that process lives
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import time
from pathlib import Path
from types import TracebackType

from pretraining.errors import UsageError

CONFIG_FILE = "config.json"
LOCK_FILE = ".lock"

_HELD = (errno.EAGAIN, errno.EACCES)
_POLL_S = 0.2
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)


class RunLock:
    """Keeps a second job out of a run directory.

    The operating system releases it when the process ends, however it does, so none is ever stale.
    Over NFS it holds between hosts.
    """

    def __init__(self) -> None:
        self._descriptor: int | None = None

    def __enter__(self) -> RunLock:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._release()

    def _release(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def take(self, folder: Path, patience_s: float = 0.0) -> None:
        """Lock `folder`, for which another job has so long to end, and leave word of it there.

        Raises as `try_out` does.
        """
        deadline = time.monotonic() + patience_s
        while True:
            try:
                self.try_out(folder)
                break
            except UsageError:
                if time.monotonic() > deadline:
                    raise
                self._release()
                time.sleep(_POLL_S)
        assert self._descriptor is not None
        owner = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%F %T")}
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, json.dumps(owner).encode(), 0)

    def try_out(self, folder: Path) -> None:
        """Lock `folder`; raises `UsageError` naming the process that has it, `OSError`."""
        self._descriptor = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in _HELD:
                raise UsageError(
                    f"--run-dir {folder} is in use by {_owner(self._descriptor)}; "
                    "wait for that job to end, or name another folder"
                ) from error
            if error.errno not in _NO_LOCKS:
                raise
            print(
                f"{folder}: no locks on this file system ({error.strerror}): see to it that no "
                "other job is given the same --run-dir",
                flush=True,
            )


def _owner(descriptor: int) -> str:
    try:
        owner = json.loads(os.pread(descriptor, 4096, 0))
        return f"process {owner['pid']} on {owner['host']} since {owner['since']}"
    except (OSError, ValueError, KeyError, TypeError):
        # It has taken the lock this moment.
        return "another job"


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
