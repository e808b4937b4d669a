"""async_save(): the state of the call, whatever training does meanwhile; and its failures."""

from __future__ import annotations

import functools
import resource
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardfuse import ShardedAdam, ShardedLamb
from shardfuse.checkpoint import CheckpointError, Checkpoints, async_save
from shardfuse.checkpoint import saving as saving_module
from shardfuse.checkpoint.storage import ShardWriter
from shardfuse.comm.session import PeerError
from shardfuse.engine.torch_state import arenas_of
from shardfuse.optim.base import ShardedOptimizer
from tests.distributed.test_resharding import loaded
from tests.support import placing
from tests.support.checkpoints import Job, assert_same
from tests.support.harness import STAYING, run_procs, run_scripts, run_threads

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.filterwarnings("ignore:.*fewer than two dimensions.*:UserWarning"),
]

BUILDS: dict[str, Any] = {
    "adam": ShardedAdam,
    "lamb": ShardedLamb,
    "stage 2": functools.partial(ShardedAdam),
}


def padded(optimizer: ShardedOptimizer) -> tuple[int, int]:
    """Return bytes with padding: of what all ranks save, and of a rank's params or an arena."""
    flats = optimizer._flats
    arenas = [arena.data.nbytes for state in flats for arena in arenas_of(state).values()]
    params = sum(state.params_buffer.data.nbytes for state in flats)
    steps = 8 * sum(len(state.params) for state in flats)
    world_size = optimizer.communicator.world_size
    largest = max(params // world_size, *arenas)
    return params + world_size * (sum(arenas) + steps), largest


@pytest.mark.parametrize("may_write", ["at once", "after two steps"])
@pytest.mark.parametrize("name", BUILDS)
def test_the_state_of_the_call(
    name: str, may_write: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit, whether a step comes before the first fragment is written or after the last."""
    go, write = threading.Event(), ShardWriter.write

    def late(planned: ShardWriter) -> Any:
        assert go.wait(60)
        return write(planned)

    monkeypatch.setattr(ShardWriter, "write", late)
    sharding = {"stage": 2} if name == "stage 2" else {}

    def train() -> Any:
        go.clear()
        job = Job(BUILDS[name], sharding)
        job.train(3)
        half = job.values()
        dist.barrier()
        saving = async_save(job.objects, tmp_path / "a", info={"step": 3})
        if may_write == "at once":
            go.set()
            while not saving.is_done:
                time.sleep(0.001)
        job.train(2)
        assert saving.is_done == (may_write == "at once")
        dist.barrier()  # before the other's may be done, too
        go.set()
        job.train(1)
        saving.wait()
        saving.wait()
        params = [p for group in job.optimizer.param_groups for p in group["params"]]
        nbytes = sum(p.numel() * (p.itemsize + 4 * 2 * p.requires_grad) + 8 for p in params)
        nbytes += 4 * job.model.halved.numel()  # its master
        return half, job.values(), saving.extra_nbytes, (nbytes, *padded(job.optimizer))

    results = run_threads(2, train)
    half, end, _, (nbytes, all_padded, largest) = results[0]
    extras = [extra for _, _, extra, _ in results]
    if may_write == "at once" and not placing.on_device():  # no more than one kind
        assert max(extras) <= largest
    else:  # every rank's part, and nothing twice
        assert nbytes <= sum(extras) <= all_padded
    for found, went_on in run_threads(2, lambda: loaded(BUILDS[name], tmp_path / "a", sharding)):
        assert_same(found, half)
        assert_same(went_on, end)


def test_never_two_at_once(tmp_path: Path) -> None:
    """Each is there, and named, before the next begins; old ones go."""

    def save() -> list[int]:
        job, checkpoints = Job(ShardedAdam), Checkpoints(tmp_path, keep=2)
        for step in (1, 2, 3, 4):
            job.train(1)
            checkpoints.save(job.objects, step, async_save=True)
            assert checkpoints.under_way is not None
        checkpoints.wait()
        assert checkpoints.under_way is None
        assert (tmp_path / "latest").read_text() == "step-4"
        return checkpoints.steps()

    assert run_threads(2, save) == [[4, 3], [4, 3]]


def fail(folder: Path, how: str) -> str:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    job, checkpoints = Job(ShardedAdam), Checkpoints(folder)
    job.train(1)
    checkpoints.save(job.objects, 1, async_save=True)
    checkpoints.wait()
    if dist.get_rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
    checkpoints.save(job.objects, 2, async_save=True)
    try:
        if how == "wait":
            checkpoints.wait()
        else:
            saving = checkpoints.under_way
            assert saving is not None
            while not saving.is_done:
                time.sleep(0.01)
            job.train(1)
            dist.barrier()
    except (CheckpointError, PeerError) as error:
        STAYING.append(error)  # its connections stay open
        if how == "step":
            with pytest.raises((CheckpointError, PeerError), match="File too large"):
                checkpoints.wait()
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize("how", ["step", "wait"])
def test_a_failure_is_raised(how: str, tmp_path: Path) -> None:
    """By the next step, or by wait(); on both ranks; the checkpoint before stays."""
    texts = run_procs(2, fail, tmp_path, how)
    assert all("File too large" in text for text in texts), texts
    assert sorted(path.name for path in tmp_path.glob("[!.]*")) == ["latest", "step-1"]


def test_a_commit_that_fails_is_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the next step as well, where the first rank cannot give the folder its name."""

    def train() -> str:
        job = Job(ShardedAdam)
        job.train(1)
        saving = async_save(job.objects, tmp_path / "a")
        while not saving.is_done:
            time.sleep(0.01)
        with pytest.raises(CheckpointError) as caught:
            job.train(1)
        return str(caught.value)

    monkeypatch.setattr(saving_module, "commit_staging", _refuse)
    (text,) = run_threads(1, train)
    assert "a is not saved" in text
    assert "Not a directory" in text


def _refuse(target: Path) -> None:
    raise NotADirectoryError(20, "Not a directory", str(target))


DIES = """
import os, sys, threading, time
from pathlib import Path
from shardfuse import ShardedAdam
from shardfuse.checkpoint import Checkpoints
from shardfuse.checkpoint import collective, saving
from tests.support.checkpoints import Job
from tests.support.harness import join_world

rank = int(sys.argv[1])
join_world(rank, 2, sys.argv[2])
job, checkpoints = Job(ShardedAdam), Checkpoints(sys.argv[3])
job.train(1)
checkpoints.save(job.objects, 1)
if rank == int(sys.argv[4]):
    if sys.argv[5] == "writes":
        saving.checksum_of = lambda data: os._exit(9)  # in the writer's thread
    else:
        collective.CheckpointGroup.agree = lambda *_: os._exit(9)  # on the step
checkpoints.save(job.objects, 2, async_save=True)
checkpoints.wait()
"""


@pytest.mark.parametrize("when", ["writes", "agrees"])
@pytest.mark.parametrize("rank", ["0", "1"])
def test_a_rank_that_dies_in_a_save(rank: str, when: str, tmp_path: Path) -> None:
    """The other is told, long before the group's timeout; what was there stays."""
    ended = run_scripts(DIES, 2, tmp_path, str(tmp_path / "saved"), rank, when, timeout=50)
    codes = [code for code, _ in ended]
    assert codes[int(rank)] == 9, ended
    assert codes[1 - int(rank)] == 1, ended
    assert Checkpoints(tmp_path / "saved").steps() == [1]


def save_if_first(state: dict[str, Any], folder: Path) -> None:
    if dist.get_rank() == 0:
        STAYING.append(async_save(state, folder))
    state["optimizer"].step()


def save_alone(folder: Path) -> tuple[str, list[int]]:
    weight, checkpoints = torch.nn.Parameter(torch.ones(600)), Checkpoints(folder)
    state = {"optimizer": ShardedAdam([("weight", weight)])}
    (weight * 2).sum().backward()
    with pytest.raises(PeerError) as caught:
        save_if_first(state, folder / "of-one")
    state["optimizer"].step()
    checkpoints.save(state, 1, async_save=True)
    checkpoints.wait()
    return str(caught.value), checkpoints.steps()


@pytest.mark.cpu_only("where waits do not block the host, ranks hear of it in a later call")
def test_one_rank_alone_has_begun_a_save(tmp_path: Path) -> None:
    """Both hear of it; the next save, which is of both, is not taken for the second and first."""
    for text, steps in run_procs(2, save_alone, tmp_path, timeout=30):
        assert "rank 0 is in checkpoint.async_save()" in text or "rank 1 is in step()" in text
        assert steps == [1]
