"""FolderLock: what it does not follow, and who has it after a fork."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from shardfuse.training import FolderInUse, FolderLock

ROOT = Path(__file__).parents[2]
HOLDER = """
import os, sys, time
from pathlib import Path
from shardfuse.training import FolderLock
lock = FolderLock()
lock.take(Path(sys.argv[1]))
if not os.fork():
    print(os.getpid(), flush=True)
time.sleep(600)
"""

pytestmark = pytest.mark.timeout(120)


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    """Neither to a file, whose content is kept, nor to none, which is not made."""
    run = tmp_path / "run"
    run.mkdir()
    for target in (tmp_path / "precious.txt", tmp_path / "none"):
        (tmp_path / "precious.txt").write_text("precious")
        (run / ".lock").unlink(missing_ok=True)
        (run / ".lock").symlink_to(target)
        with pytest.raises(OSError, match=r"a symbolic link, which is not followed: remove it"):
            FolderLock().take(run)
        assert (tmp_path / "precious.txt").read_text() == "precious"
        assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("kind", ["FIFO", "folder", "socket", "file with something else in it"])
def test_what_is_no_lock_file_is_named(kind: str, tmp_path: Path) -> None:
    """Also a hard link: it is a file like any other, with somebody else's content."""
    path = tmp_path / ".lock"
    with socket.socket(socket.AF_UNIX) as unix:
        if kind == "FIFO":
            os.mkfifo(path)
        elif kind == "folder":
            path.mkdir()
        elif kind == "socket":
            before = Path.cwd()
            os.chdir(tmp_path)  # a socket's path has to be short
            unix.bind(".lock")
            os.chdir(before)
        else:
            (tmp_path / "mine.txt").write_text("mine")
            path.hardlink_to(tmp_path / "mine.txt")
        with FolderLock() as lock, pytest.raises(OSError, match=f"is that of a {kind}") as caught:
            lock.take(tmp_path)
    assert caught.value.filename == str(path)
    if kind.startswith("file"):
        assert path.read_text() == "mine"


def test_what_a_lost_power_leaves_is_taken(tmp_path: Path) -> None:
    (tmp_path / ".lock").write_bytes(b"\0" * 64)
    with FolderLock() as lock:
        lock.take(tmp_path)
        assert (tmp_path / ".lock").read_bytes().startswith(b'{"pid"')


def test_a_child_does_not_keep_the_lock_of_a_dead_owner(tmp_path: Path) -> None:
    """As workers of a DataLoader, which outlive a trainer that was killed."""
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
    )
    assert holder.stdout is not None
    child = int(holder.stdout.readline())
    try:
        with FolderLock() as lock, pytest.raises(FolderInUse, match=f"process {holder.pid} "):
            lock.take(tmp_path)  # the child has closed its copy, and the owner has the lock
        holder.kill()
        holder.wait()
        os.kill(child, 0)
        with FolderLock() as lock:
            lock.take(tmp_path)
    finally:
        os.kill(child, signal.SIGKILL)
        holder.stdout.close()
