"""Jobs over FSDP2 that are killed while they save: they go on bitwise.

By torch.distributed.checkpoint in a loop of one's own, and by a Job of shardfuse.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import shutil
import signal
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from shardfuse import ShardedAdamW, ShardedLamb, ShardedMuon
from shardfuse.checkpoint import Checkpoints
from shardfuse.checkpoint.export import verify
from shardfuse.training import Job
from tests.support.dtensors import fsdp_net, full, rank_grads
from tests.support.harness import run_procs

pytestmark = [
    pytest.mark.timeout(280),
    pytest.mark.cpu_only("processes of their own"),
    pytest.mark.gloo_only("processes of their own"),
]

NUM_STEPS, WORLD_SIZE = 12, 2
NAMES = ("wide", "odd", "norm", "head")


def newest(folder: Path) -> int:
    """Return the last step of which a whole checkpoint is there; torch writes .metadata last."""
    return max((int(p.parent.name) for p in folder.glob("*/.metadata")), default=0)


Make = Callable[[Sequence[Any]], list[Any]]


def adamw_and_lamb(params: Sequence[Any]) -> list[Any]:
    eager = {"kernel": "eager"}
    return [
        ShardedAdamW(params[:2], lr=0.05, sharding=eager),
        ShardedLamb(params[2:], lr=0.05, variant="nvlamb", sharding=eager),
    ]


def muon(params: Sequence[Any]) -> list[Any]:
    return [ShardedMuon(params, lr=0.05, sharding={"kernel": "eager"})]


def build(make: Make = adamw_and_lamb) -> tuple[Any, list[Any]]:
    model = fsdp_net(names=NAMES)
    return model, make(list(model.named_parameters()))


def step_once(model: nn.Module, optimizers: list[Any], step: int) -> None:
    model(rank_grads(step, dist.get_rank(), WORLD_SIZE)).backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def kill_after(delay_s: float) -> None:
    threading.Timer(delay_s, os.kill, (os.getpid(), signal.SIGKILL)).start()


def train(
    folder: str,
    victim: int = -1,
    kills_at: int = 0,
    delay_s: float = 0.0,
    make: Make = adamw_and_lamb,
) -> list[Any]:
    """Train from the newest checkpoint, with one after each step; return the parameters.

    Rank ``victim`` is killed ``delay_s`` seconds after it has begun the save of step ``kills_at``.
    """
    rank, root = dist.get_rank(), Path(folder)
    model, optimizers = build(make)
    first = newest(root)
    if first:
        load(model, optimizers, root / str(first))
    dist.barrier()  # all have looked for the newest
    for step in range(first, NUM_STEPS):
        step_once(model, optimizers, step)
        own = dict(zip(("model", "optimizer"), get_state_dict(model, optimizers), strict=True))
        dies = rank == victim and step + 1 == kills_at
        if dies:
            kill_after(delay_s)
        dcp.save(own, checkpoint_id=root / str(step + 1))
        if dies:
            time.sleep(60)
    return [full(param) for param in model.parameters()]


def train_muon(*args: Any) -> list[Any]:
    return train(*args, make=muon)


def load(model: nn.Module, optimizers: Any, folder: Path) -> None:
    own_model, own = get_state_dict(model, optimizers)
    dcp.load({"model": own_model, "optimizer": own}, checkpoint_id=folder)
    set_state_dict(model, optimizers, model_state_dict=own_model, optim_state_dict=own)


def train_job(folder: str, victim: int = -1, kills_at: int = 0, delay_s: float = 0.0) -> list[Any]:
    """Train by a Job, which saves after each step; otherwise as train()."""
    model, optimizers = build()
    state = {"model": model, "first": optimizers[0], "second": optimizers[1]}
    with Job(folder, state, save_every=1, async_save=kills_at % 2 == 0) as job:
        for step in job.steps(NUM_STEPS):
            step_once(model, optimizers, step)
            if dist.get_rank() == victim and step + 1 == kills_at:
                kill_after(delay_s)
    if victim == dist.get_rank():
        time.sleep(60)
    return [full(param) for param in model.parameters()]


def killed(train: Callable[..., Any], rank: int, store: str, *args: Any) -> None:
    """Train as a rank of which one is killed."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", rank=rank, world_size=WORLD_SIZE, store=dist.FileStore(store, WORLD_SIZE)
    )
    train(*args)


def run_until_killed(
    train: Callable[..., Any], folder: Path, store: Path, victim: int, step: int, delay_s: float
) -> None:
    """Have a rank killed in a save, and end the other, which waits for it or has failed."""
    context = multiprocessing.get_context("forkserver")
    args = (str(store), str(folder), victim, step, delay_s)
    ranks = [
        context.Process(target=killed, args=(train, rank, *args)) for rank in range(WORLD_SIZE)
    ]
    for rank in ranks:
        rank.start()
    ranks[victim].join(60)
    assert ranks[victim].exitcode == -signal.SIGKILL
    other = ranks[1 - victim]
    other.join(0.2)
    other.kill()
    other.join()


@pytest.mark.parametrize(("num_kills", "train"), [(4, train), (20, train), (20, train_muon)])
def test_killed_while_saving(num_kills: int, train: Callable[..., Any], tmp_path: Path) -> None:
    """At any moment of a save: the last whole checkpoint loads, and the job goes on bitwise."""
    expected = run_procs(WORLD_SIZE, train, str(tmp_path / "whole"), timeout=100.0)[0]
    chance, folder, num_torn = random.Random(num_kills), tmp_path / "killed", 0
    for number in range(num_kills):
        last = newest(folder)
        step = min(last + 1 + chance.randrange(2), NUM_STEPS)
        if step == last:
            for path in folder.glob(f"{last}/.metadata"):
                path.unlink()  # the same save again
        victim, delay_s = chance.randrange(WORLD_SIZE), chance.uniform(0.0, 0.05)
        run_until_killed(train, folder, tmp_path / f"store{number}", victim, step, delay_s)
        assert newest(folder) in (step, step - 1)
        num_torn += newest(folder) == step - 1
    assert num_torn, "no kill came before the end of a save"
    found = run_procs(WORLD_SIZE, train, str(folder), timeout=100.0)
    for own in found:
        assert all(torch.equal(a, b) for a, b in zip(own, expected, strict=True))


def newest_of(folder: Path) -> int:
    """Return the step of a Job's newest checkpoint; all that are there must be whole."""
    steps = Checkpoints(folder).steps()
    assert not steps or not [verdict for verdict in verify(folder) if verdict.faults]
    return max(steps, default=0)


@pytest.mark.parametrize("num_kills", [4, 20])
def test_killed_job(num_kills: int, tmp_path: Path) -> None:
    """In a step or a save, asynchronous or not: it continues bitwise from an intact checkpoint."""
    expected = run_procs(WORLD_SIZE, train, str(tmp_path / "whole"), timeout=100.0)[0]
    chance, folder = random.Random(num_kills), tmp_path / "job"
    ends = []
    for number in range(num_kills):
        last = newest_of(folder)
        if last == NUM_STEPS:
            shutil.rmtree(folder)
            last = 0
        step = min(last + 1 + chance.randrange(2), NUM_STEPS)
        victim, delay_s = chance.randrange(WORLD_SIZE), chance.uniform(0.0, 0.3) if number else 0.0
        run_until_killed(train_job, folder, tmp_path / f"store{number}", victim, step, delay_s)
        assert newest_of(folder) >= last
        ends.append(newest_of(folder) - step)
    assert min(ends) < 0, "no kill came before the end of a save"
    print(ends)
    for own in run_procs(WORLD_SIZE, train_job, str(folder), timeout=100.0):
        assert all(torch.equal(a, b) for a, b in zip(own, expected, strict=True))
