"""Jobs over FSDP2 that are killed while torch.distributed.checkpoint saves: they go on bitwise."""

from __future__ import annotations

import multiprocessing
import os
import random
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


def adamw_and_lamb(params: Sequence[Any]) -> list[Any]:
    eager = {"kernel": "eager"}
    return [
        ShardedAdamW(params[:2], lr=0.05, sharding=eager),
        ShardedLamb(params[2:], lr=0.05, variant="nvlamb", sharding=eager),
    ]


def muon(params: Sequence[Any]) -> list[Any]:
    return [ShardedMuon(params, lr=0.05, sharding={"kernel": "eager"})]


def train(
    make: Callable[..., list[Any]],
    folder: str,
    victim: int = -1,
    kills_at: int = 0,
    delay_s: float = 0.0,
) -> list[Any]:
    """Train from the newest checkpoint, with one after each step; return the parameters.

    Rank ``victim`` is killed ``delay_s`` seconds after it has begun the save of step ``kills_at``.
    """
    rank, root = dist.get_rank(), Path(folder)
    model = fsdp_net(names=NAMES)
    params = list(model.named_parameters())
    optimizers = make(params)
    first = newest(root)
    if first:
        load(model, optimizers, root / str(first))
    dist.barrier()  # all have looked for the newest
    for step in range(first, NUM_STEPS):
        model(rank_grads(step, rank, WORLD_SIZE)).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        own = dict(zip(("model", "optimizer"), get_state_dict(model, optimizers), strict=True))
        dies = rank == victim and step + 1 == kills_at
        if dies:
            threading.Timer(delay_s, os.kill, (os.getpid(), signal.SIGKILL)).start()
        dcp.save(own, checkpoint_id=root / str(step + 1))
        if dies:
            time.sleep(60)
    return [full(param) for param in model.parameters()]


def load(model: nn.Module, optimizers: Any, folder: Path) -> None:
    own_model, own = get_state_dict(model, optimizers)
    dcp.load({"model": own_model, "optimizer": own}, checkpoint_id=folder)
    set_state_dict(model, optimizers, model_state_dict=own_model, optim_state_dict=own)


def killed(rank: int, store: str, *args: Any) -> None:
    """Train as a rank of which one is killed."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", rank=rank, world_size=WORLD_SIZE, store=dist.FileStore(store, WORLD_SIZE)
    )
    train(*args)


def run_until_killed(
    make: Callable[..., list[Any]],
    folder: Path,
    store: Path,
    victim: int,
    step: int,
    delay_s: float,
) -> None:
    """Have a rank killed in a save, and end the other, which waits for it or has failed."""
    context = multiprocessing.get_context("forkserver")
    args = (str(store), make, str(folder), victim, step, delay_s)
    ranks = [context.Process(target=killed, args=(rank, *args)) for rank in range(WORLD_SIZE)]
    for rank in ranks:
        rank.start()
    ranks[victim].join(60)
    assert ranks[victim].exitcode == -signal.SIGKILL
    other = ranks[1 - victim]
    other.join(0.2)
    other.kill()
    other.join()


@pytest.mark.parametrize(
    ("num_kills", "make"), [(4, adamw_and_lamb), (20, adamw_and_lamb), (20, muon)]
)
def test_killed_while_saving(
    num_kills: int, make: Callable[..., list[Any]], tmp_path: Path
) -> None:
    """At any moment of a save: the last whole checkpoint loads, and the job goes on bitwise."""
    expected = run_procs(WORLD_SIZE, train, make, str(tmp_path / "whole"), timeout=100.0)[0]
    chance, folder, num_torn = random.Random(num_kills), tmp_path / "killed", 0
    for number in range(num_kills):
        last = newest(folder)
        step = min(last + 1 + chance.randrange(2), NUM_STEPS)
        if step == last:
            for path in folder.glob(f"{last}/.metadata"):
                path.unlink()  # the same save again
        victim, delay_s = chance.randrange(WORLD_SIZE), chance.uniform(0.0, 0.05)
        run_until_killed(make, folder, tmp_path / f"store{number}", victim, step, delay_s)
        assert newest(folder) in (step, step - 1)
        num_torn += newest(folder) == step - 1
    assert num_torn, "no kill came before the end of a save"
    found = run_procs(WORLD_SIZE, train, make, str(folder), timeout=100.0)
    for own in found:
        assert all(torch.equal(a, b) for a, b in zip(own, expected, strict=True))
