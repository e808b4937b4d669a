"""Sixteen ranks: the bits of one process, on meshes too; an error reaches all of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.distributed.test_faults import SLOWNESS_S
from tests.distributed.test_mesh import mesh_of
from tests.distributed.test_overlap import OPTIMIZERS
from tests.faults.runner import Setting, run
from tests.faults.table import FAULTS
from tests.support.harness import run_procs
from tests.support.models import MIXED, ParamSet, mean_grads, rank_grads

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.cpu_only("about processes, of which a device may have none so many"),
]

WORLD_SIZE = 16
NAMES = ("ShardedAdam", "ShardedLamb")


def train(name: str, rank: int | None, **sharding: Any) -> list[Tensor]:
    """Train on a rank's integers, or on their mean, which is exact; return the params."""
    params = ParamSet(MIXED, overrides=({}, {"weight_decay": 0.25}))
    options = {"kernel": "eager", "bucket_cap_mb": 0.05, **sharding}
    optimizer = OPTIMIZERS[name](params.groups(named=True), lr=0.05, sharding=options)
    for step in range(3):
        if rank is None:
            means = mean_grads("integers", WORLD_SIZE, step, MIXED)
            params.assign([None if mean is None else mean.float() for mean in means])
        else:
            params.assign(rank_grads("integers", WORLD_SIZE, rank, step, MIXED))
        optimizer.step()
    return params.values()


def train_both(shape: tuple[int, int] | None, collectives: str) -> dict[str, list[Tensor]]:
    sharding = {"mesh": mesh_of(shape), "collectives": collectives}
    return {name: train(name, dist.get_rank(), **sharding) for name in NAMES}


@pytest.mark.parametrize("collectives", ["auto", "pairwise"])
@pytest.mark.parametrize("shape", [None, (4, 4), (2, 8)])
def test_the_bits_of_one_process(shape: tuple[int, int] | None, collectives: str) -> None:
    """Adam has all of them; LAMB, whose norms are sums in another order, within 1e-6."""
    expected = {name: train(name, None, process_group="alone") for name in NAMES}
    every = run_procs(WORLD_SIZE, train_both, shape, collectives, timeout=240)
    for found in every:
        assert all(map(torch.equal, found["ShardedAdam"], expected["ShardedAdam"]))
        assert all(map(torch.equal, found["ShardedLamb"], every[0]["ShardedLamb"]))
    pairs = zip(every[0]["ShardedLamb"], expected["ShardedLamb"], strict=True)
    for value, other in pairs:
        torch.testing.assert_close(value, other, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", [name for name, fault in FAULTS.items() if fault.bound_s <= 2])
def test_an_error_reaches_all(name: str) -> None:
    """Those that need no timeout: within the table's two seconds, on a machine that is quiet."""
    fault = FAULTS[name]
    collectives = (fault.only or ("auto",))[0]
    endings = run(name, Setting(collectives, "adam", WORLD_SIZE))
    bound_s = fault.bound_s + SLOWNESS_S
    verdicts = [ending.verdict(fault, bad=WORLD_SIZE - 1, bound_s=bound_s) for ending in endings]
    assert verdicts == ["ok"] * WORLD_SIZE, [ending.message for ending in endings]
