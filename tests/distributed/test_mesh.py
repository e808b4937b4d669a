"""Hybrid sharding: shards over one axis of ranks, sums over two, copies along the other."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from shardfuse import ShardedAdam, ShardedGradScaler, ShardedLamb
from tests.distributed.test_overlap import OPTIMIZERS
from tests.support.harness import run_procs
from tests.support.models import MIXED, ParamSet, rank_grads
from tests.support.overlap import OFF, ON, PROGRAMS, Net, tokens
from tests.support.placing import device_type
from tests.support.runs import assert_bitwise

pytestmark = pytest.mark.timeout(150)

NAMED = ("replicate", "shard")


def mesh_of(shape: tuple[int, int] | None, names: tuple[str, ...] | None = NAMED) -> Any:
    return None if shape is None else init_device_mesh(device_type(), shape, mesh_dim_names=names)


def train(shape: tuple[int, int] | None, name: str, sharding: dict[str, Any]) -> list[Tensor]:
    """Train by gradients of small integers; return the parameters and whole states."""
    params = ParamSet(MIXED, overrides=({}, {"weight_decay": 0.25}))
    options = {"kernel": "eager", "bucket_cap_mb": 0.02, "mesh": mesh_of(shape), **sharding}
    named = params.groups(named=name.startswith("lamb"))
    optimizer = OPTIMIZERS[name](named, lr=0.05, sharding=options)
    for step in range(4):
        grads = rank_grads("integers", dist.get_world_size(), dist.get_rank(), step, MIXED)
        params.assign(grads)
        optimizer.step()
    assert optimizer.communicator.world_size == (
        dist.get_world_size() if shape is None else shape[1]
    )
    optimizer.consolidate_state_dict(to=None)
    states = optimizer.state_dict()["state"].values()
    return params.values() + [v for s in states for v in s.values() if isinstance(v, Tensor)]


def train_all(shape: tuple[int, int] | None) -> dict[str, list[Tensor]]:
    return {name: train(shape, name, {}) for name in OPTIMIZERS}


@pytest.fixture(scope="module")
def flat() -> dict[str, list[Tensor]]:
    found: dict[str, list[Tensor]] = run_procs(4, train_all, None)[0]
    return found


def test_every_optimizer_is_that_of_all_ranks(flat: dict[str, list[Tensor]]) -> None:
    """2 x 2 against 4: bit for bit where a rule has no norms, else within another order of sums."""
    for found in run_procs(4, train_all, (2, 2)):
        for name, values in found.items():
            assert len(values) == len(flat[name])
            for value, other in zip(values, flat[name], strict=True):
                if any(word in name.lower() for word in ("lamb", "bert", "adamp")):
                    torch.testing.assert_close(value, other, rtol=1e-6, atol=1e-6)
                else:
                    assert torch.equal(value, other)


def train_shapes(shape: tuple[int, int] | None, collectives: str) -> list[Tensor]:
    return train(shape, "ShardedAdamW", {"collectives": collectives})


@pytest.mark.parametrize("collectives", ["auto", "pairwise", "native"])
@pytest.mark.parametrize("shape", [(2, 2), (3, 2), (2, 3), (1, 4)])
def test_shapes_and_transports(shape: tuple[int, int], collectives: str) -> None:
    """Three rows cut shards into pieces that are not whole blocks; one row is no copy at all."""
    world_size = shape[0] * shape[1]
    expected = run_procs(world_size, train_shapes, None, "auto")[0]
    for values in run_procs(world_size, train_shapes, shape, collectives):
        assert_bitwise(values, expected)


WIRES: dict[str, dict[str, Any]] = {
    "bf16": {"grad_sync_dtype": torch.bfloat16},
    "fp16": {"grad_sync_dtype": torch.float16},
    "bf16 params": {"param_sync_dtype": torch.bfloat16},
    "4-bit params": {"param_sync_bits": 4},
    "clip": {"clip_grad_norm": 0.5},
}


def train_wires(shape: tuple[int, int] | None) -> dict[str, list[Tensor]]:
    return {name: train(shape, "ShardedAdamW", sharding) for name, sharding in WIRES.items()}


def test_wires() -> None:
    """What travels along either axis is rounded alike; small integers pass both unrounded."""
    expected = run_procs(4, train_wires, None)[0]
    for found in run_procs(4, train_wires, (2, 2)):
        for name, values in found.items():
            if name == "clip":
                torch.testing.assert_close(values, expected[name], rtol=1e-6, atol=1e-6)
            elif name != "4-bit params":  # whose blocks lie as shards do
                assert_bitwise(values, expected[name])


def train_model(names: list[str], sharding: dict[str, Any]) -> tuple[list[Tensor], list[Tensor]]:
    """Train by a program a step; return this rank's parameters, and those of rank 0."""
    model, rank = Net(), dist.get_rank()
    mesh = mesh_of((2, dist.get_world_size() // 2))
    options = {"bucket_cap_mb": 0.004, "kernel": "eager", "mesh": mesh, **sharding}
    optimizer = ShardedLamb(model.named_parameters(), lr=0.01, sharding=options)
    for step, name in enumerate(names):
        model.with_sometimes, model.reentrant = False, None
        PROGRAMS[name](model, optimizer, rank, step)
        optimizer.step()
        optimizer.zero_grad()
    optimizer.synchronize()
    values = [param.detach().clone() for param in model.parameters()]
    first = [value.clone() for value in values]
    for value in first:
        dist.broadcast(value, 0)
    return values, first


MODES: dict[str, dict[str, Any]] = {
    "on": ON,
    "debug": {**ON, "debug_sync": True},
    "stage 2": {"stage": 2},
}


@pytest.mark.parametrize("collectives", ["auto", "pairwise", "native"])
def test_modes_have_the_same_bits(collectives: str) -> None:
    """Overlap on, off and waiting at once, and stage 2; copies stay equal in all of them."""
    names = ["plain", "no_sync", "on_one_rank", "clipped", "without_backward", "plain"]
    base = {"collectives": collectives}
    expected = run_procs(4, train_model, names, {**base, **OFF})
    for sharding in MODES.values():
        for values, first in run_procs(4, train_model, names, {**base, **sharding}):
            assert_bitwise(values, first)
            assert_bitwise(values, expected[0][0])


def test_what_changes_under_backward_is_sent_anew_over_both_axes() -> None:
    names = ["plain", "scaled", "twice", "replaced", "discarded", "plain"]
    base = {"collectives": "pairwise"}
    expected = run_procs(4, train_model, names, {**base, **OFF})
    for values, first in run_procs(4, train_model, names, {**base, **ON}):
        assert_bitwise(values, first)
        assert_bitwise(values, expected[0][0])


def train_beside_others(sharding: dict[str, Any]) -> list[Tensor]:
    """Train with a layer that rank 0 uses once; the program communicates before it steps."""
    model, rank = Net(), dist.get_rank()
    options = {"bucket_cap_mb": 0.004, "kernel": "eager", "mesh": mesh_of((2, 2)), **sharding}
    optimizer = ShardedAdam(model.named_parameters(), lr=0.01, sharding=options)
    for step in range(3):
        model.with_sometimes = rank > 0 or step == 1
        loss = model(tokens(rank, step))
        loss.backward()
        dist.all_reduce(loss.detach().clone())
        optimizer.step()
        optimizer.zero_grad()
    return [param.detach().clone() for param in model.parameters()]


@pytest.mark.parametrize("collectives", ["auto", "pairwise", "native"])
def test_programs_may_communicate_between_backward_and_step(collectives: str) -> None:
    """A rank whose first bucket lacks a gradient kept it until step(), and others waited for it."""
    base = {"collectives": collectives}
    expected = run_procs(4, train_beside_others, {**base, **OFF})[0]
    for sharding in ({}, ON, {"stage": 2}):
        for values in run_procs(4, train_beside_others, {**base, **sharding}):
            assert_bitwise(values, expected)


def overflow(stage: int) -> tuple[float, bool, tuple[str, int] | None]:
    model = Net()
    options = {"mesh": mesh_of((2, 2)), "stage": stage, "report_overflow": True}
    optimizer = ShardedAdam(model.named_parameters(), lr=0.1, sharding=options)
    scaler = ShardedGradScaler(device_type(), init_scale=8.0)
    before = [param.detach().clone() for param in model.parameters()]
    loss = model(torch.zeros(2, 6, dtype=torch.long))
    scaler.scale(loss * (float("inf") if dist.get_rank() == 3 else 1.0)).backward()
    scaler.step(optimizer)
    scaler.update()
    same = all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))
    return scaler.get_scale(), same, optimizer.last_overflow


@pytest.mark.parametrize("stage", [1, 2])
def test_an_overflow_anywhere_skips_everywhere(stage: int) -> None:
    for scale, same, last in run_procs(4, overflow, stage):
        assert scale == 4.0
        assert same
        assert last is not None
        assert stage == 2 or last[1] == 3


# Checkpoints


def save(folder: str, shape: tuple[int, int] | None) -> list[Tensor]:
    params = ParamSet(MIXED)
    options = {"mesh": mesh_of(shape, None), "kernel": "eager", "bucket_cap_mb": 0.02}
    optimizer = ShardedAdam(params.groups(), lr=0.1, sharding=options)
    for step in range(3):
        params.assign(rank_grads("integers", 4, dist.get_rank(), step, MIXED))
        optimizer.step()
    dcp.save({"optimizer": optimizer.sharded_state_dict()}, checkpoint_id=folder)
    optimizer.consolidate_state_dict(to=3)
    assert (dist.get_rank() == 3) == (optimizer._consolidated is not None)
    optimizer.consolidate_state_dict(to=None)
    return _states(optimizer)


def _states(optimizer: Any) -> list[Tensor]:
    entries = optimizer.state_dict()["state"].values()
    return [v for s in entries for v in s.values() if isinstance(v, Tensor)]


def load(folder: str, shape: tuple[int, int] | None) -> list[Tensor]:
    params = ParamSet(MIXED)
    options = {"mesh": mesh_of(shape), "kernel": "eager", "bucket_cap_mb": 0.03}
    optimizer = ShardedAdam(params.groups(), lr=0.1, sharding=options)
    state = {"optimizer": optimizer.sharded_state_dict()}
    dcp.load(state, checkpoint_id=folder)
    optimizer.load_sharded_state_dict(state["optimizer"])
    optimizer.consolidate_state_dict(to=None)
    return _states(optimizer)


def test_checkpoints(tmp_path: Any) -> None:
    """Saved by copies, each piece once; loaded by another mesh, and by ranks without one."""
    folder, sizes = str(tmp_path / "saved"), []
    for name, shape in (("flat", None), ("saved", (2, 2))):
        saved = run_procs(4, save, str(tmp_path / name), shape)
        sizes.append(sum(path.stat().st_size for path in (tmp_path / name).glob("*.distcp")))
    # With fewer pieces than four shards have.
    assert sizes[1] < sizes[0]
    for world_size, shape in ((4, (2, 2)), (2, None), (6, (2, 3))):
        for values in run_procs(world_size, load, folder, shape):
            assert_bitwise(values, saved[0])


# What it costs


def count() -> dict[str, list[tuple[str, int]]]:
    """Return (name, bytes sent to other ranks) of one step's collectives, by axis."""
    param = torch.nn.Parameter(torch.zeros(64 * 512))
    options = {"mesh": mesh_of((2, 2)), "kernel": "eager", "collectives": "native"}
    optimizer = ShardedLamb([param], sharding=options)
    calls: dict[str, list[tuple[str, int]]] = {"shard": [], "replicate": [], "everyone": []}
    comm: Any = optimizer.communicator
    for axis, inner in (
        ("shard", comm._shard),
        ("replicate", comm.replicate),
        ("everyone", comm._world),
    ):
        inner._launch = functools.partial(_counted, inner._launch, calls[axis])
    param.grad = torch.ones_like(param)
    optimizer.step()
    return calls


def _counted(launch: Any, calls: list[tuple[str, int]], function: Any, *args: Any, **k: Any) -> Any:
    tensors = [arg for arg in args if isinstance(arg, Tensor)]
    calls.append((function.__name__, max(tensor.nbytes for tensor in tensors) // 2))
    return launch(function, *args, **k)


def test_bytes_along_each_axis() -> None:
    """Half of the gradients, and of the params, in a row; a quarter, twice, between the rows."""
    for calls in run_procs(4, count):
        nbytes = 64 * 512 * 4
        kinds = {axis: [(n.rsplit("_", 1)[0], size) for n, size in c] for axis, c in calls.items()}
        sums = [size for name, size in calls["shard"] if "all_reduce" in name]
        assert sums == [4 * 2 // 2]  # LAMB's, of one parameter
        moved = [size for name, size in calls["shard"] if "all_reduce" not in name]
        assert moved == [nbytes // 2, nbytes // 2], kinds
        assert [size for _, size in calls["replicate"]] == [nbytes // 4, nbytes // 4]
        assert [name for name, _ in calls["everyone"] if name not in ("irecv", "isend")] == []
