"""shardfuse.checkpoint and Job over DTensors: any placement and number of ranks, and without FSDP2.

Gradients are whole numbers whose sums are exact, so training continues bitwise.
"""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from shardfuse import ShardedAdamW, ShardedLamb
from shardfuse.checkpoint import (
    CheckpointError,
    DamagedCheckpoint,
    async_save,
    load,
    loading,
    save,
)
from shardfuse.checkpoint.export import read_optimizer
from shardfuse.checkpoint.index import CheckpointReader, Manifest
from shardfuse.training import Job
from tests.support.dtensors import (
    BUILD,
    REDUCING,
    WORLDS,
    Net,
    Sharded,
    fsdp_net,
    full,
    grad_of,
    plain,
    rank_grads,
    size_of,
)
from tests.support.harness import run_procs
from tests.support.placing import device_type

pytestmark = [
    pytest.mark.timeout(240),
    pytest.mark.cpu_only("DTensors gather by coalesced collectives; see test_fsdp_device.py"),
]

EAGER = {"kernel": "eager"}
NAMES = ("ShardedAdamW", "ShardedLamb", "ShardedSGD", "ShardedRMSpropTF", "ShardedAdamP")


def build(name: str, *, is_sharded: bool, dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    model = fsdp_net() if is_sharded else Net().to(device_type())
    model.to(dtype)
    return model, BUILD[name](list(model.named_parameters()), sharding=EAGER)


def train(model: nn.Module, optimizer: Any, step: int) -> None:
    """Step with the mean gradient of two ranks, whatever the number of ranks is."""
    parts = [rank_grads(step, rank, 2) for rank in range(2)]
    optimizer.zero_grad()
    model({key: (parts[0][key] + parts[1][key]) / 2 for key in parts[0]}).backward()
    optimizer.step()


def values(model: nn.Module) -> list[Tensor]:
    return [full(param) for param in model.parameters()]


def save_and_go_on(folder: str, is_sharded: bool) -> dict[str, list[Tensor]]:
    found = {}
    for name in NAMES:
        model, optimizer = build(name, is_sharded=is_sharded)
        for step in range(2):
            train(model, optimizer, step)
        state = {"model": model, "optimizer": optimizer, "epoch": 3}
        if name == "ShardedAdamW":
            saving = async_save(state, f"{folder}/{name}")
            train(model, optimizer, 2)
            saving.wait()
        else:
            save(state, f"{folder}/{name}")
            train(model, optimizer, 2)
        found[name] = values(model)
    return found


def load_and_go_on(folder: str, is_sharded: bool) -> dict[str, list[Tensor]]:
    found = {}
    for name in NAMES:
        model, optimizer = build(name, is_sharded=is_sharded)
        train(model, optimizer, 7)  # other values and states, which are replaced
        state = {"model": model, "optimizer": optimizer, "epoch": 0}
        load(state, f"{folder}/{name}")
        assert state["epoch"] == 3
        train(model, optimizer, 2)
        found[name] = values(model)
    return found


@pytest.mark.gloo_only("torch averages by ReduceOp.AVG or coalesces, which HCCL does not")
@pytest.mark.parametrize("is_saved_sharded", [True, False])
def test_another_number_of_ranks(is_saved_sharded: bool, tmp_path: Path) -> None:
    """Saved at 2 under FSDP2 or without it; loaded at 3 and 1 under it, and at 2 without it."""
    expected = run_procs(2, save_and_go_on, str(tmp_path), is_saved_sharded, timeout=200.0)[0]
    for world_size, is_sharded in ((3, True), (1, True), (2, False)):
        for own in run_procs(world_size, load_and_go_on, str(tmp_path), is_sharded, timeout=200.0):
            for name in NAMES:
                for value, same in zip(own[name], expected[name], strict=True):
                    if name in REDUCING:
                        torch.testing.assert_close(value, same, rtol=1e-6, atol=1e-6)
                    else:
                        assert torch.equal(value, same), (name, world_size)


# Placements


class Holder(nn.Module):
    """A module of given parameters."""

    def __init__(self, params: dict[str, Any]) -> None:
        super().__init__()
        for name, param in params.items():
            self.register_parameter(name.replace(".", "_"), param)


def most(params: dict[str, Any]) -> dict[str, Any]:
    """Return the parameters without the one that some of these placements cut most."""
    return {name: param for name, param in params.items() if name != "embedding"}


def lamb(params: dict[str, Any], **sharding: Any) -> ShardedLamb:
    options = {"lr": 0.05, "variant": "nvlamb", "exclude_from_weight_decay": ["norm"]}
    return ShardedLamb(list(params.items()), **options, sharding={**EAGER, **sharding})


def save_placed(world: str, folder: str) -> None:
    own = Sharded(world)
    params = most(own.params)
    optimizer = lamb(params)
    for step in range(2):
        own.assign(step)
        optimizer.step()
    save({"model": Holder(params), "optimizer": optimizer}, f"{folder}/{world}")


Whole = dict[str, list[Tensor]]


def load_placed(world: str, folder: str, saved: list[str]) -> dict[str, Whole]:
    """Return the whole parameters and states of each checkpoint."""
    found = {}
    for other in saved:
        params = most(Sharded(world).params)
        with torch.no_grad():
            for param in params.values():
                param.zero_()
        optimizer = lamb(params)
        load({"model": Holder(params), "optimizer": optimizer}, f"{folder}/{other}")
        found[other] = of_optimizer(optimizer, params)
    return found


def load_alone(folder: str, saved: list[str]) -> dict[str, Whole]:
    found = {}
    for other in saved:
        params = most(plain())
        optimizer = lamb(params, process_group="alone")
        load({"model": Holder(params), "optimizer": optimizer}, f"{folder}/{other}")
        found[other] = of_optimizer(optimizer, params)
    return found


def of_optimizer(optimizer: Any, params: dict[str, Any]) -> Whole:
    found = {}
    for name, param in params.items():
        state = optimizer.state[param]
        assert int(state["step"]) == 2
        found[name] = [full(param).clone(), full(state["exp_avg"]), full(state["exp_avg_sq"])]
    return found


def test_every_placement(tmp_path: Path) -> None:
    """Shards of any dimension, copies, sub-meshes: saved by each mesh and loaded by each other."""
    worlds = list(WORLDS)
    for world in worlds:
        run_procs(size_of(world), save_placed, world, str(tmp_path))
    found = [load_alone(str(tmp_path), worlds)]
    for world in worlds:
        found += run_procs(size_of(world), load_placed, world, str(tmp_path), worlds, timeout=200.0)
    params = most(plain())
    optimizer = lamb(params, process_group="alone")
    for step in range(2):
        for name, param in params.items():
            param.grad = grad_of(name, step)
        optimizer.step()
    for own in found:
        assert own.keys() == set(worlds)
        for world in worlds:
            for name, param in params.items():
                value = param.detach()
                torch.testing.assert_close(own[world][name][0], value, rtol=2e-6, atol=2e-6)
                # What one checkpoint has is what everybody reads of it.
                for mine, same in zip(own[world][name], found[0][world][name], strict=True):
                    assert torch.equal(mine, same), (world, name)


def save_columns(dtype: torch.dtype, folder: str) -> dict[str, Tensor]:
    """Save a matrix that is sharded by columns; return it and its states."""
    mesh = init_device_mesh(device_type(), (2,))
    generator = torch.Generator().manual_seed(0)
    value, grad = (torch.randn(8192, 6, generator=generator).to(dtype) for _ in range(2))
    param: Any = nn.Parameter(distribute_tensor(value, mesh, [Shard(1)]))
    optimizer = ShardedAdamW([("matrix", param)], lr=0.1, sharding=EAGER)
    param.grad = distribute_tensor(grad, mesh, [Shard(1)])
    optimizer.step()
    state = {"model": Holder({"matrix": param}), "optimizer": optimizer}
    save(state, folder)
    kept = {"weight": full(param), **{k: full(v) for k, v in optimizer.state[param].items()}}
    for value in optimizer.state[param].values():
        value.zero_()
    with torch.no_grad():
        param.zero_()
    load(state, folder)
    own = {"weight": full(param), **{k: full(v) for k, v in optimizer.state[param].items()}}
    assert all(torch.equal(own[name], kept[name]) for name in kept)
    return kept


def load_columns(folder: str, kept: dict[str, Tensor]) -> None:
    """Load into flat buffers, in fp32, where masters are the parameter."""
    param = nn.Parameter(torch.zeros(8192, 6))
    optimizer = ShardedAdamW([("matrix", param)], lr=0.1, sharding=EAGER)
    load({"model": Holder({"matrix": param}), "optimizer": optimizer}, folder)
    optimizer.consolidate_state_dict(to=None)
    own = optimizer.state_dict()["state"][0]
    assert all(torch.equal(own[name], kept[name]) for name in ("exp_avg", "exp_avg_sq"))
    assert torch.equal(param.detach(), kept.get("param", kept["weight"]))


@pytest.mark.gloo_only("torch averages by ReduceOp.AVG or coalesces, which HCCL does not")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_columns_are_few_entries(dtype: torch.dtype, tmp_path: Path) -> None:
    """A rank writes one box of each tensor, and no run for each row; all readers read it."""
    folder = str(tmp_path / "saved")
    kept = run_procs(2, save_columns, dtype, folder)[0]
    for rank in range(2):
        items = json.loads((tmp_path / "saved" / f"part-{rank}.json").read_text())["content"]
        keys = [key for key, *_ in items["items"] if "matrix" in key and not key.endswith("step")]
        assert len(keys) == len(set(keys)) == len(kept) - 1
    run_procs(3, load_columns, folder, kept)
    state = read_optimizer(folder)["state"][0]
    assert torch.equal(state["exp_avg"], kept["exp_avg"])


# Masters


def save_in(dtype: torch.dtype, folder: str) -> None:
    model, optimizer = build("ShardedAdamW", is_sharded=True, dtype=dtype)
    for step in range(2):
        train(model, optimizer, step)
    save({"model": model, "optimizer": optimizer}, folder)


def load_in(dtype: torch.dtype, is_sharded: bool, folder: str) -> tuple[list[Tensor], ...]:
    """Return the parameters, and their masters."""
    model, optimizer = build("ShardedAdamW", is_sharded=is_sharded, dtype=dtype)
    load({"model": model, "optimizer": optimizer}, folder)
    if dtype == torch.float32:
        return values(model), values(model)
    assert is_sharded
    return values(model), [full(optimizer.state[p]["param"]) for p in model.parameters()]


def test_masters(tmp_path: Path) -> None:
    """Masters of bf16 parameters become fp32 parameters, with FSDP2 or without, and back."""
    low, high = str(tmp_path / "low"), str(tmp_path / "high")
    run_procs(2, save_in, torch.bfloat16, low)
    _, masters = run_procs(3, load_in, torch.bfloat16, True, low)[0]
    for is_sharded in (True, False):
        params, _ = run_procs(2, load_in, torch.float32, is_sharded, low)[0]
        assert all(map(torch.equal, params, masters))
    run_procs(2, save_in, torch.float32, high)
    params, _ = run_procs(2, load_in, torch.float32, True, high)[0]
    rounded, masters = run_procs(2, load_in, torch.bfloat16, True, high)[0]
    assert all(map(torch.equal, params, masters))
    assert all(torch.equal(a, b.bfloat16()) for a, b in zip(rounded, params, strict=True))


# What a checkpoint holds, and what is refused


def save_for_readers(folder: str) -> tuple[list[Tensor], list[int]]:
    """Return the parameters, and how many index files each load has read."""
    model, optimizer = build("ShardedAdamW", is_sharded=True)
    train(model, optimizer, 0)
    save({"model": model, "optimizer": optimizer}, folder)
    kept = values(model)
    other, _ = build("ShardedAdamW", is_sharded=True)
    own_model, _ = get_state_dict(other, [])
    dcp.load({"model": own_model}, checkpoint_id=folder)
    assert all(map(torch.equal, values(other), kept))
    with CheckpointReader(Path(folder)) as source:
        manifest = Manifest.read(source)
    parts = {"optimizer": optimizer.parts()}
    ranks = loading.ranks_to_read(manifest.layouts, manifest.world_size, parts, dist.get_rank())
    return kept, sorted(ranks)


@pytest.mark.gloo_only("torch averages by ReduceOp.AVG or coalesces, which HCCL does not")
def test_what_is_written(tmp_path: Path) -> None:
    """torch.distributed.checkpoint reads it; a rank needs its own index file and the first one."""
    for rank, (_, ranks) in enumerate(run_procs(3, save_for_readers, str(tmp_path / "saved"))):
        assert ranks == sorted({0, rank})
    listed = json.loads((tmp_path / "saved" / "part-1.json").read_text())["content"]["items"]
    sizes = {key: sizes for key, _, sizes, *_ in listed if key == "model.layers.0.weight"}
    assert sizes == {"model.layers.0.weight": [2731, 6]}  # rows of one rank of three
    runs = [key for key, *_ in listed if key == "optimizer.state.layers.0.weight.exp_avg"]
    assert len(runs) == 1


def be_refused(folder: str) -> None:
    model, optimizer = build("ShardedAdamW", is_sharded=True)
    train(model, optimizer, 0)
    # A DTensor that no optimizer of the state has.
    mesh = init_device_mesh(device_type(), (2,))
    extra = nn.Module()
    own = nn.Parameter(distribute_tensor(torch.ones(4), mesh, [Shard(0)]))
    extra.register_parameter("own", own)
    with pytest.raises(CheckpointError, match=r"extra.own is a DTensor.* torch.distributed.check"):
        save({"extra": extra, "optimizer": optimizer}, folder)
    # Elements in another order than those of the whole tensor.
    local = torch.ones(6, 2).t()
    shape, stride = torch.Size((4, 6)), (6, 1)
    turned = DTensor.from_local(local, mesh, [Shard(0)], shape=shape, stride=stride)
    param = nn.Parameter(turned)
    with pytest.raises(CheckpointError, match=r"x has the strides \(6, 1\), and its local shard"):
        save({"optimizer": ShardedAdamW([("x", param)], sharding=EAGER)}, folder)
    # States for which there is no place.
    largest = ShardedAdamW(list(model.named_parameters()), amsgrad=True, sharding=EAGER)
    train(model, largest, 0)
    save({"model": model, "optimizer": largest}, f"{folder}-largest")
    before = values(model)
    with pytest.raises(CheckpointError, match=r"no place for its max_exp_avg_sq.* were others"):
        load({"model": model, "optimizer": optimizer}, f"{folder}-largest")
    save({"model": model, "optimizer": optimizer}, folder)
    model.zero_grad()
    model.requires_grad_(False)
    model.layers[0].weight.requires_grad_(True)
    frozen = ShardedAdamW(list(model.named_parameters()), lr=0.1, sharding=EAGER)
    with pytest.raises(CheckpointError, match=r"no place for its exp_avg.* was frozen"):
        load({"model": model, "optimizer": frozen}, folder)
    assert all(map(torch.equal, before, values(model)))
    # Damage in the file of one rank.
    dist.barrier()
    if dist.get_rank() == 0:
        path = Path(folder) / "__1_0.distcp"
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    dist.barrier()
    with pytest.raises(DamagedCheckpoint, match=r"__1_0\.distcp"):
        load({"model": model, "optimizer": optimizer}, folder)


@pytest.mark.gloo_only("torch averages by ReduceOp.AVG or coalesces, which HCCL does not")
def test_refusals(tmp_path: Path) -> None:
    """On every rank, in words; nothing was loaded."""
    run_procs(2, be_refused, str(tmp_path / "saved"))


def fail_to_write(folder: str) -> str:
    model, optimizer = build("ShardedAdamW", is_sharded=True)
    if dist.get_rank() == 1:
        folder = f"{folder}-of-rank-1"
    try:
        save({"model": model, "optimizer": optimizer}, f"{folder}/saved")
    except CheckpointError as error:
        return str(error)
    return ""


def test_one_rank_fails(tmp_path: Path) -> None:
    """Ranks that write to different file systems: all raise."""
    for text in run_procs(2, fail_to_write, str(tmp_path / "host")):
        assert "must write to one file system" in text


# Jobs


def run_job(folder: str, stop_at: int | None = None, **options: Any) -> tuple[int, list[Tensor]]:
    """Train for 8 steps; rank 1 is told to stop in step ``stop_at``."""
    model = fsdp_net(names=("wide", "odd", "norm", "head"))
    params = list(model.named_parameters())
    first = ShardedAdamW(params[:2], lr=0.05, sharding=EAGER)
    second = ShardedLamb(params[2:], lr=0.05, variant="nvlamb", sharding=EAGER)
    state = {"model": model, "first": first, "second": second}
    with Job(folder, state, save_every=3, **options) as job:
        for step in job.steps(8):
            model(rank_grads(step, dist.get_rank(), 2)).backward()
            for optimizer in (first, second):
                optimizer.step()
                optimizer.zero_grad()
            if step == stop_at and dist.get_rank() == 1:
                os.kill(os.getpid(), signal.SIGUSR1)
    return job.step, values(model)


def _stop_job(folder: str, stop_at: int, is_async: bool) -> tuple[int, list[Tensor]]:
    return run_job(folder, stop_at, async_save=is_async)


@pytest.mark.gloo_only("torch averages by ReduceOp.AVG or coalesces, which HCCL does not")
@pytest.mark.parametrize("is_async", [False, True])
def test_a_stopped_job(is_async: bool, tmp_path: Path) -> None:
    """It goes on bitwise, also with asynchronous saves."""
    expected = run_procs(2, run_job, str(tmp_path / "whole"))
    for step, _ in run_procs(2, _stop_job, str(tmp_path / "cut"), 2, is_async):
        assert step == 5
    for own, same in zip(run_procs(2, run_job, str(tmp_path / "cut")), expected, strict=True):
        assert own[0] == same[0] == 8
        assert all(map(torch.equal, own[1], same[1]))
