"""Jobs with ShardedMuon, killed at random moments of saves and loads: they go on bitwise."""

from __future__ import annotations

import itertools
import multiprocessing
import random
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardfuse import ShardedMuon
from shardfuse.training import Job
from tests.distributed.test_muon import EAGER, SHAPES, backward, grads_of, new_params, values_of
from tests.launch import kills
from tests.support.harness import run_procs

pytestmark = [
    pytest.mark.timeout(280),
    pytest.mark.cpu_only("processes of their own"),
    pytest.mark.gloo_only("processes of their own"),
    pytest.mark.filterwarnings("ignore:Muon orthogonalises"),
]

WORLD_SIZE = 2


def train(folder: str, num_steps: int) -> list[Tensor]:
    """Train from the newest checkpoint, with one after each step; return params and states."""
    params = new_params()
    optimizer = ShardedMuon(params, lr=0.02, sharding=EAGER)
    state = {"model": nn.ParameterList(params), "optimizer": optimizer}
    with Job(folder, state, save_every=1) as job:
        for step in job.steps(num_steps):
            backward(params, grads_of(SHAPES, step, dist.get_rank(), WORLD_SIZE))
            optimizer.step()
            optimizer.zero_grad()
    return values_of(optimizer, params)


def killed(rank: int, store: str, folder: str, seed: int) -> None:
    """Train four steps more, as one of the ranks of which one is killed, if its moment comes."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", rank=rank, world_size=WORLD_SIZE, store=dist.FileStore(store, WORLD_SIZE)
    )
    num_steps = kills.newest(Path(folder)) + 4
    dist.barrier()
    kills.draw(random.Random(seed), WORLD_SIZE)[1](rank)
    train(folder, num_steps)


def run_until_killed(store: Path, folder: Path, seed: int) -> bool:
    """Return whether a rank was killed; end the other, which waits for it or has failed."""
    context = multiprocessing.get_context("forkserver")
    args = str(store), str(folder), seed
    ranks = [context.Process(target=killed, args=(rank, *args)) for rank in range(WORLD_SIZE)]
    for rank in ranks:
        rank.start()
    deadline = time.monotonic() + 60
    while all(rank.exitcode is None for rank in ranks) and time.monotonic() < deadline:
        time.sleep(0.01)
    for rank in ranks:
        rank.join(0.3)
    was_killed = any(rank.exitcode == -signal.SIGKILL for rank in ranks)
    for rank in ranks:
        rank.kill()
        rank.join()
    return was_killed


@pytest.mark.parametrize("num_kills", [3, 20])
def test_killed_in_saves_and_loads(num_kills: int, tmp_path: Path) -> None:
    """No checkpoint that is there is torn; parameters, momenta and AdamW's states go on."""
    folder, num_killed = tmp_path / "killed", 0
    for seed in itertools.count():
        num_killed += run_until_killed(tmp_path / f"store{seed}", folder, seed)
        num_steps = kills.newest(folder) + 4
        if num_killed == num_kills:
            break
    whole = str(tmp_path / "whole")
    expected = run_procs(WORLD_SIZE, train, whole, num_steps, timeout=100.0)[0]
    for found in run_procs(WORLD_SIZE, train, str(folder), num_steps, timeout=100.0):
        assert all(map(torch.equal, found, expected))
