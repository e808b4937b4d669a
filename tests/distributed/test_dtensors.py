"""Parameters that torch has sharded: every optimizer, placement and mesh, against one process."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from shardfuse import ShardedAdamW
from tests.support import dtensors
from tests.support.deepspeed_runs import ORACLES, PARAMS
from tests.support.dtensors import BUILD, GROUPS, REDUCING, SECOND, SHAPES, WORLDS, Sharded
from tests.support.harness import run_procs
from tests.support.runs import max_relative_error

pytestmark = [
    pytest.mark.timeout(240),
    pytest.mark.cpu_only("DTensors gather by coalesced collectives; see test_fsdp_device.py"),
]

STEPS = 3


def train_all(world: str) -> dict[str, dict[str, Tensor]]:
    """Train each optimizer for three steps; return the whole parameters."""
    found = {}
    for name, build in BUILD.items():
        params = Sharded(world)
        optimizer = build(dtensors.groups_of(params.params), sharding={"kernel": "eager"})
        for step in range(STEPS):
            params.assign(step)
            optimizer.step()
        found[name] = params.values()
    return found


@pytest.fixture(scope="module")
def expected() -> dict[str, dict[str, Tensor]]:
    return {name: dtensors.train_plain(build, STEPS)[0] for name, build in BUILD.items()}


ORDER = [name for names in GROUPS for name in names]


def reference(name: str) -> list[Tensor]:
    """Return the parameters of the reference in double precision, in ORDER."""
    start = dtensors.plain()
    groups = [
        {"params": [start[n] for n in names], **extra}
        for names, extra in zip(GROUPS, ({}, SECOND), strict=True)
    ]
    oracle = ORACLES[name](groups, names=GROUPS, **PARAMS[name])
    for step in range(STEPS):
        oracle.step([[dtensors.grad_of(n, step) for n in names] for names in GROUPS])
    return oracle.values()


@pytest.mark.gloo_only("torch averages by ReduceOp.AVG or coalesces, which HCCL does not")
@pytest.mark.parametrize("world", WORLDS)
def test_every_optimizer(world: str, expected: dict[str, dict[str, Tensor]]) -> None:
    """Bit for bit those of one process where a rule has no norms, else within 1e-6 of fp64."""
    ranks = run_procs(dtensors.size_of(world), train_all, world, timeout=200.0)
    start = [dtensors.whole(name, 0) for name in ORDER]
    for name in REDUCING:
        if name in ORACLES:
            values = [ranks[0][name][param] for param in ORDER]
            assert max_relative_error(values, reference(name), start) < 1e-6, name
    for found in ranks:
        for name, own in found.items():
            for param, value in own.items():
                if name in REDUCING:  # in another order than in one process, alike on all ranks
                    assert torch.equal(value, ranks[0][name][param]), (name, param)
                    torch.testing.assert_close(
                        value, expected[name][param], rtol=2e-6, atol=2e-6, msg=name + param
                    )
                else:
                    assert torch.equal(value, expected[name][param]), (name, param)
    assert set(ORDER) == set(SHAPES)


def train_with_copies(*, is_sharded: bool, num_frozen: int) -> list[Tensor]:
    """Train five groups, each of a sharded parameter and a replicated one; some frozen at first."""
    generator = torch.Generator().manual_seed(0)
    placements: list[Any] = [Shard(0), Replicate()]
    params = []
    for number in range(10):
        value = torch.randn(9, 11, generator=generator)
        if is_sharded:
            mesh = init_device_mesh("cpu", (dist.get_world_size(),))
            value = distribute_tensor(value, mesh, [placements[number % 2]])
        params.append(nn.Parameter(value))
    for param in params[::2][:num_frozen]:
        param.requires_grad_(False)
    groups = [{"params": params[i : i + 2], "lr": 0.01 * (1 + i)} for i in range(0, 10, 2)]
    sharding = {"kernel": "eager", **({} if is_sharded else {"process_group": "alone"})}
    optimizer = ShardedAdamW(groups, weight_decay=0.1, sharding=sharding)
    for _ in range(STEPS):
        for param in params:
            param.requires_grad_(True)
            grad = torch.randn(9, 11, generator=generator)
            param.grad = grad
            if is_sharded:
                place: Any = param
                param.grad = distribute_tensor(grad, place.device_mesh, place.placements)
        optimizer.step()
    return [dtensors.full(p) for p in params]


@pytest.mark.gloo_only("torch averages by ReduceOp.AVG or coalesces, which HCCL does not")
@pytest.mark.parametrize("num_frozen", [0, 3])
def test_copies_do_not_change_bits(num_frozen: int) -> None:
    """Sets of few elements share calls where they do without sharding: of five, or of eight."""
    train = functools.partial(train_with_copies, num_frozen=num_frozen)
    expected = train(is_sharded=False)
    for found in run_procs(2, functools.partial(train, is_sharded=True)):
        assert all(map(torch.equal, found, expected))
