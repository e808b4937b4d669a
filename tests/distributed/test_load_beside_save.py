"""Loads, hooks and an early end of the process while an asynchronous save runs."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from shardfuse import ShardedAdam
from shardfuse.checkpoint import Checkpoints, async_save, load, save
from shardfuse.checkpoint.storage import ShardWriter
from shardfuse.training import Job as LoopJob
from tests.support.checkpoints import Job, assert_same
from tests.support.harness import run_threads

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.filterwarnings("ignore:.*fewer than two dimensions.*:UserWarning"),
]


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Saves write only once this is set."""
    go, write = threading.Event(), ShardWriter.write

    def late(planned: ShardWriter) -> Any:
        assert go.wait(60)
        return write(planned)

    monkeypatch.setattr(ShardWriter, "write", late)
    go.set()
    return go


def by_load(job: Job, folder: Path) -> None:
    load(job.objects, folder / "before")


def by_load_state_dict(job: Job, folder: Path) -> None:
    other = Job(ShardedAdam, seed=2)
    other.train(1)
    other.optimizer.consolidate_state_dict(to=None)
    job.optimizer.load_state_dict(other.optimizer.state_dict())


@pytest.mark.parametrize("how", [by_load, by_load_state_dict])
def test_a_load_while_it_is_written(
    how: Callable[[Job, Path], None], held: threading.Event, tmp_path: Path
) -> None:
    """The checkpoint is of the moment of the call, and the load of what it loads."""

    def body() -> None:
        job = Job(ShardedAdam)
        job.train(1)
        save(job.objects, tmp_path / "before")
        job.train(2)
        expected = job.values()
        dist.barrier()
        held.clear()
        saving = async_save(job.objects, tmp_path / "during")
        how(job, tmp_path)
        assert not saving.is_done
        dist.barrier()
        held.set()
        saving.wait()
        other = Job(ShardedAdam, seed=1)
        objects = other.objects
        load(objects, tmp_path / "during")
        other.step = objects["step"]
        assert_same(other.values(), expected)

    run_threads(2, body)


def test_load_latest_waits(held: threading.Event, tmp_path: Path) -> None:
    """The newest checkpoint is the one that is being written."""

    def body() -> int | None:
        job, checkpoints = Job(ShardedAdam), Checkpoints(tmp_path)
        job.train(1)
        checkpoints.save(job.objects, 1)
        job.train(1)
        dist.barrier()
        held.clear()
        checkpoints.save(job.objects, 2, async_save=True)
        dist.barrier()
        threading.Timer(0.2, held.set).start()
        return checkpoints.load_latest(job.objects)

    assert run_threads(2, body) == [2, 2]


def test_hooks_of_others_stay_in_order(tmp_path: Path) -> None:
    """A save that is over leaves the step that finds it so alone, with later hooks."""

    def body() -> list[int]:
        called: list[int] = []
        job = Job(ShardedAdam)
        for index in range(3):
            saving = async_save(job.objects, tmp_path / str(index))
            if not called:
                job.optimizer.register_step_pre_hook(lambda *_: called.append(0))
            while not saving.is_done:
                dist.barrier()
            dist.barrier()
            job.train(1)
            saving.wait()
            job.train(1)
        return called

    assert run_threads(1, body) == [[0] * 6]


def test_a_loop_that_is_left_by_break(held: threading.Event, tmp_path: Path) -> None:
    """Leaving the job waits for what it still writes."""

    def body() -> None:
        job = Job(ShardedAdam)
        with LoopJob(tmp_path, job.objects, save_every=1, async_save=True) as loop:
            for step in loop.steps(5):
                if step == 1:
                    break
                dist.barrier()
                held.clear()
                job.train(1)
            dist.barrier()
            threading.Timer(0.2, held.set).start()
        assert Checkpoints(tmp_path).steps() == [1]

    run_threads(2, body)
