"""Ranks that decide and fail together, and the lock of a run directory."""

from __future__ import annotations

import errno
import fcntl
import json
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from pretraining import ranks as ranks_module
from pretraining import rundir
from pretraining.config import parse_config
from pretraining.errors import UsageError
from pretraining.files import blaming, write_whole
from pretraining.launch import Launch, refuse
from pretraining.ranks import Ranks
from pretraining.rundir import RunLock, check_unused, claim

WORLD = 3

pytestmark = pytest.mark.timeout(60)


def on_ranks(act: Callable[[Ranks], Any], monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Call `act` on three ranks in threads that share a store; return results or errors."""
    store = dist.HashStore()
    monkeypatch.setattr(ranks_module, "rendezvous", lambda url: iter([(store, 0, 0)]))

    def of_rank(rank: int) -> Any:
        try:
            return act(Ranks(Launch(rank, rank, WORLD, is_distributed=True)))
        except Exception as error:
            return error

    with ThreadPoolExecutor(WORLD) as pool:
        return list(pool.map(of_rank, range(WORLD)))


def test_one_rank_decides_and_all_hear(monkeypatch: pytest.MonkeyPatch) -> None:
    """What another rank would have said does not count; what all say comes in rank order."""

    def act(ranks: Ranks) -> Any:
        own = ranks.launch.rank
        said = ranks.once(lambda: f"by {own}"), ranks.gather(lambda: own * 10)
        return [*said, ranks.together(lambda: object()) is not None, ranks.once(lambda: own)]

    assert on_ranks(act, monkeypatch) == [["by 0", [0, 10, 20], True, 0]] * WORLD


def test_an_error_of_any_rank_is_one_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same text everywhere, with the rank; what all have in common has none."""

    def failing(ranks: Ranks) -> Any:
        def report() -> None:
            if ranks.launch.rank:
                raise UsageError(f"no file {ranks.launch.rank}")

        return ranks.gather(report)

    def alike(ranks: Ranks) -> Any:
        def report() -> None:
            raise UsageError("no file")

        return ranks.together(report)

    errors = on_ranks(failing, monkeypatch)
    assert {type(error) for error in errors} == {UsageError}
    assert {str(error) for error in errors} == {"no file 1 (rank 1); no file 2 (rank 2)"}
    assert {str(error) for error in on_ranks(alike, monkeypatch)} == {"no file"}


@pytest.mark.parametrize("method", ["once", "gather"])
def test_an_unexpected_error_is_raised_where_it_was_and_heard_elsewhere(
    monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """No rank waits for one that has failed."""

    def act(ranks: Ranks) -> Any:
        def report() -> None:
            if ranks.launch.rank == 0:
                raise ZeroDivisionError("here")

        return getattr(ranks, method)(report)

    monkeypatch.setattr(ranks_module, "_GOODBYE_LIMIT", ranks_module.timedelta(seconds=1))
    errors = on_ranks(act, monkeypatch)
    assert [type(error) for error in errors] == [ZeroDivisionError, UsageError, UsageError]
    assert str(errors[1]).startswith("ZeroDivisionError: here")


def test_a_rank_that_does_not_answer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others are told after the limit."""

    def act(ranks: Ranks) -> Any:
        ranks._answer_limit = ranks_module.timedelta(seconds=0.5)
        return ranks.gather(lambda: 1) if ranks.launch.rank != 2 else None

    monkeypatch.setattr(ranks_module, "_GOODBYE_LIMIT", ranks_module.timedelta(seconds=0.5))
    errors = on_ranks(act, monkeypatch)
    assert errors[2] is None
    for error in errors[:2]:
        assert isinstance(error, UsageError)
        assert "rank 2 does not answer" in str(error)


def test_keys_of_the_past_are_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long run does not fill the launcher's memory."""
    stores = []

    def act(ranks: Ranks) -> int:
        for _ in range(20):
            ranks.once(lambda: 1)
            ranks.gather(lambda: 2)
        ranks.gather(lambda: 3)
        stores.append(ranks._store)
        return 0

    assert on_ranks(act, monkeypatch) == [0] * WORLD
    assert stores[0].num_keys() <= 4  # two of them name this attempt's part


def test_a_lock_is_one_s_own_until_it_is_let_go(tmp_path: Path) -> None:
    """The second learns whose it is; what a dead process wrote into the file is no obstacle."""
    (tmp_path / rundir.LOCK_FILE).write_text('{"pid": 1, "host": "gone", "since": "1999"}')
    with RunLock() as lock:
        lock.take(tmp_path)
        with (
            pytest.raises(UsageError, match=rf"in use by process {os.getpid()} on .* since"),
            RunLock() as other,
        ):
            other.take(tmp_path)
        (tmp_path / "config.json").touch()
        with pytest.raises(UsageError, match="in use by"):
            check_unused(tmp_path)
    with RunLock() as lock:
        lock.take(tmp_path)


def test_a_file_system_without_locks_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The run goes on: where there are no locks nobody could run at all otherwise."""

    def flock(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", flock)
    with RunLock() as lock:
        lock.take(tmp_path)
    assert "this file system has no locks (No locks available)" in caplog.text


def test_a_numbered_directory_that_another_job_took_is_left_to_it(tmp_path: Path) -> None:
    """The next number is as good; a directory that the user named is not to be changed."""
    taken = tmp_path / "bert-001"
    taken.mkdir()
    (taken / "config.json").touch()
    with RunLock() as lock:
        assert claim(taken, lock, is_numbered=True) == tmp_path / "bert-002"
    with RunLock() as lock, pytest.raises(UsageError, match="is not empty; pass --resume"):
        claim(taken, lock, is_numbered=False)


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "{}", "7", '{"corpus_digest": "a", "steps": "many"}', "\0\0\0"]
    + [json.dumps({"corpus_digest": "a", name: None}) for name in ("steps", "corpus", "betas")],
)
def test_a_damaged_configuration_is_one_line(tmp_path: Path, text: str) -> None:
    """Cut off, of another kind, or with a value that cannot be."""
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(UsageError) as caught:
        parse_config(["--resume", "--run-dir", str(tmp_path)])
    assert "\n" not in str(caught.value)
    assert (tmp_path / "config.json").read_text() == text


def test_a_file_is_the_old_one_or_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that is full when it is synced leaves the old contents and nothing beside them."""
    path = tmp_path / "file"
    write_whole(path, "old")

    def fsync(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", fsync)
    with (
        pytest.raises(UsageError, match=r"--run-dir .*file: No space left on device; free some"),
        blaming("--run-dir", path),
    ):
        write_whole(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_torchrun_s_report_gets_the_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As torchrun's own handler would leave it, and whole: torchrun reads it at any time."""
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    assert refuse(UsageError("no file"), None) == 2
    detail = json.loads((tmp_path / "error.json").read_text())["message"]
    assert detail["message"] == "pretrain.py: error: no file"
    assert int(detail["extraInfo"]["timestamp"]) > 0
    assert capsys.readouterr().err == "pretrain.py: error: no file\n"
