"""Jobs that prepare text and are killed, wait for each other, or lose a process."""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
from pretraining import building, prepared
from pretraining.errors import UsageError
from pretraining.prepared import PreparedCorpus

from tests.launch import dying
from tests.launch.jobs import snapshot, wait_until
from tests.launch.texts import check_text, have_small_shards, prepare

pytestmark = pytest.mark.timeout(120)


def _killing(module: object, name: str, number: int, *, is_after: bool) -> None:
    """Kill this process at a call of a function, which is counted from 1."""
    act, count = getattr(module, name), itertools.count(1)

    def wrapped(*args: object) -> object:
        is_now = next(count) == number
        if is_now and not is_after:
            os.kill(os.getpid(), signal.SIGKILL)
        result = act(*args)
        if is_now:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(module, name, wrapped)


def _in_child(act: Callable[[], object]) -> int | None:
    child = multiprocessing.get_context("fork").Process(target=act)
    child.start()
    child.join(60)
    return child.exitcode


class Kill(NamedTuple):
    """A call in which a process kills itself, and what that leaves to the next one."""

    name: str
    number: int
    is_after: bool = False
    has_survey: bool = True
    num_shards: int = 0


KILLS = {
    "before the vocabulary": Kill("train_vocabulary", 1, has_survey=False),
    "before the survey is noted": Kill("train_vocabulary", 1, is_after=True, has_survey=False),
    "in the first shard": Kill("encode", 2),
    "before a shard is noted": Kill("write_shard", 2, is_after=True, num_shards=1),
    "in the third shard": Kill("encode", 8, num_shards=2),
    "before the index": Kill("sha256", 1, num_shards=4),
}


@pytest.mark.parametrize("moment", KILLS)
def test_a_kill_leaves_nothing_that_is_taken_for_whole(
    text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """The next one keeps the shards that were whole, and makes the rest."""
    kill = KILLS[moment]
    have_small_shards(monkeypatch)

    def killed() -> None:
        _killing(building, kill.name, kill.number, is_after=kill.is_after)
        prepare([text_file], tmp_path)

    assert _in_child(killed) == -signal.SIGKILL
    (left,) = tmp_path.glob("*prepared-*")
    assert left.name.startswith(".prepared-")
    whole = [path.with_suffix(".bin") for path in left.glob("shard-*.json")]
    times = {path.name: path.stat().st_mtime_ns for path in whole}
    assert len(times) == kill.num_shards
    said: list[str] = []
    folder = prepare([text_file], tmp_path, say=said.append)
    assert sorted(tmp_path.iterdir()) == sorted([tmp_path / ".lock", folder])
    assert not [path for path in folder.iterdir() if path.name.startswith(".")]
    assert {name: (folder / name).stat().st_mtime_ns for name in times} == times
    assert ("going on where an earlier job was" in said) == kill.has_survey
    check_text(PreparedCorpus.open(folder))


def test_a_second_job_waits_for_the_first(text_file: Path, tmp_path: Path) -> None:
    """And takes what that has prepared."""
    data, said = tmp_path / "data", tmp_path / "said"
    data.mkdir()
    said.touch()
    # Forked before there is a lock, which it would have as well.
    context = multiprocessing.get_context("fork")
    is_locked = context.Event()

    def prepare_too() -> None:
        is_locked.wait()
        with said.open("a", buffering=1) as file:
            prepare([text_file], data, say=lambda line: file.write(line + "\n"))

    other = context.Process(target=prepare_too, daemon=True)
    other.start()
    with prepared.FolderLock() as lock:
        lock.take(data)
        is_locked.set()
        wait_until(lambda: "waiting for another job" in said.read_text(), "the other job")
        elsewhere = prepare([text_file], tmp_path / "elsewhere")
        shutil.copytree(elsewhere, data / elsewhere.name)
        before = snapshot(data)
    other.join(30)
    assert other.exitcode == 0
    assert f"prepares text: {data} is in use by process {os.getpid()} on" in said.read_text()
    assert said.read_text().endswith(f"text: prepared before in {data / elsewhere.name}\n")
    assert snapshot(data) == before


def test_a_killed_process_that_encodes_is_an_error_of_one_line(
    text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by the system where memory is short; what is whole stays for the next run."""
    have_small_shards(monkeypatch, processes_from=2)
    monkeypatch.setattr(building, "encode", dying.die)
    with pytest.raises(UsageError, match="was killed; is there enough memory"):
        prepare([text_file], tmp_path)
    monkeypatch.undo()
    said: list[str] = []
    check_text(PreparedCorpus.open(prepare([text_file], tmp_path, say=said.append)))
    assert "going on where an earlier job was" in said


def test_processes_that_encode_end_with_the_one_they_work_for(
    text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where that is killed while they are busy."""
    have_small_shards(monkeypatch, processes_from=2)
    monkeypatch.setattr(building, "encode", dying.hang)
    context = multiprocessing.get_context("fork")
    job = context.Process(target=prepare, args=([text_file], tmp_path))
    job.start()
    assert job.pid is not None
    wait_until(lambda: _encoders_of(job.pid), "processes that encode")
    encoders = _encoders_of(job.pid)
    job.kill()
    job.join()
    wait_until(lambda: not any(map(_is_alive, encoders)), "their end")


def _encoders_of(pid: int | None) -> list[int]:
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            # Field 4, after the parenthesised name, is the parent's id.
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
            if parent == pid and b"spawn_main" in stat.with_name("cmdline").read_bytes():
                found.append(int(stat.parent.name))
    return found


def _is_alive(pid: int) -> bool:
    try:
        return " Z " not in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
