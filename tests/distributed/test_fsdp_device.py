"""FSDP2 on the stand-in device: training, host waits of a step, and what is refused.

torch's DTensors gather and scatter through coalesced collectives, which HCCL has from CANN 9.0 on;
the stand-in is older. So the tests here look at local shards, and those of test_fsdp.py and
test_dtensors.py, which look at whole tensors, run on the CPU alone.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from shardfuse import ShardedAdamP, ShardedAdamW, ShardedBertAdam, ShardedLamb, ShardedSGD
from shardfuse.checkpoint import async_save, load, save
from shardfuse.engine.dtensors import local_part
from tests.support import npu, placing
from tests.support.dtensors import Net, rank_grads
from tests.support.harness import run_procs
from tests.support.placing import device_type

pytestmark = [
    pytest.mark.skipif(not placing.on_device(), reason="test_fsdp.py has the same for the CPU"),
    pytest.mark.timeout(120),
]

EAGER = {"kernel": "eager"}
NAMES = ("wide", "odd", "norm", "head")


def sharded_net(**options: Any) -> Net:
    """Return a model of FSDP2's whose gradients are summed and divided: HCCL has no mean."""
    net = Net(NAMES)
    for module in (*net.layers, net):
        fully_shard(module, **options)
        module.set_force_sum_reduction_for_comms(True)
    return net


def train(build: Callable[..., Any]) -> list[bool]:
    """Return for each parameter whether its local shard is that of one process."""
    rank, size = dist.get_rank(), dist.get_world_size()
    model, alone = sharded_net(), Net(NAMES)
    optimizer = build(list(model.named_parameters()), sharding=EAGER)
    other = build(list(alone.named_parameters()), sharding={**EAGER, "process_group": "alone"})
    for step in range(3):
        model(rank_grads(step, rank, size)).backward()
        every = [rank_grads(step, each, size) for each in range(size)]
        alone({key: sum(g[key] for g in every) / size for key in every[0]}).backward()
        # Without it torch.optim, too, has NaN here: memory of the stand-in does not outlive what
        # other streams of FSDP2's still do with it.
        torch.accelerator.synchronize()
        for each in (optimizer, other):
            each.step()
            each.zero_grad()
        torch.accelerator.synchronize()
    found = []
    for own, whole in zip(model.parameters(), alone.parameters(), strict=True):
        expected = local_part(whole.detach(), own.placements, own.device_mesh)
        found.append(torch.equal(own.to_local(), expected))
    return found


def train_adamw() -> list[bool]:
    return train(lambda params, **options: ShardedAdamW(params, lr=0.05, **options))


def test_trains_as_one_process() -> None:
    for found in run_procs(2, train_adamw, timeout=100.0):
        assert found == [True] * len(NAMES)


BUILDS: dict[str, tuple[type, dict[str, Any]]] = {
    "adamw": (ShardedAdamW, {}),
    "sgd": (ShardedSGD, {"lr": 0.1, "momentum": 0.9}),
    "lamb": (ShardedLamb, {"use_global_grad_norm": True}),
    "adamp": (ShardedAdamP, {}),
    "bertadam": (ShardedBertAdam, {"lr": 0.1}),
}


def count_waits(dtype: torch.dtype) -> dict[str, list[list[str]]]:
    """Return what the host has waited for, step by step; small and large shards, and none."""
    mesh = init_device_mesh(device_type(), (dist.get_world_size(),))

    def made(*shape: int) -> Tensor:
        local = torch.ones(shape, dtype=dtype)
        return DTensor.from_local(local, mesh, [Shard(0)], run_check=False)

    shapes = [(1100, 1024), (64, 40), (7,), (1, 3), (5, 5)]
    found = {}
    for name, (cls, options) in BUILDS.items():
        params = [nn.Parameter(made(*shape)) for shape in shapes]
        optimizer = cls([(f"p{i}", p) for i, p in enumerate(params)], **options, sharding=EAGER)
        found[name] = []
        for _ in range(4):
            for param, shape in zip(params[:-1], shapes, strict=False):  # the last has none
                param.grad = made(*shape)
            with npu.host_syncs() as waits:
                optimizer.step()
                optimizer.zero_grad()
            found[name].append(waits)
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_host_waits(dtype: torch.dtype) -> None:
    """From the second step on: at first ranks compare options, and tables are made."""
    for found in run_procs(2, count_waits, dtype, timeout=100.0):
        assert {name: own[1:] for name, own in found.items()} == {key: [[]] * 3 for key in BUILDS}


def save_and_load(folder: str) -> None:
    """By save() and async_save(): a fresh model has the state of the call."""

    def step(model: Net, optimizer: Any, number: int) -> None:
        model(rank_grads(number, dist.get_rank(), 2)).backward()
        torch.accelerator.synchronize()
        optimizer.step()
        optimizer.zero_grad()

    def state_of(model: Net, optimizer: Any) -> list[Tensor]:
        torch.accelerator.synchronize()
        params: list[Any] = list(model.parameters())
        moments: list[Any] = [optimizer.state[param]["exp_avg"] for param in params]
        return [each.detach().to_local().clone() for each in (*params, *moments)]

    model = sharded_net()
    optimizer = ShardedAdamW(list(model.named_parameters()), lr=0.05, sharding=EAGER)
    for is_async in (False, True):
        for number in range(2):
            step(model, optimizer, number)
        kept = state_of(model, optimizer)
        state = {"model": model, "optimizer": optimizer}
        if is_async:
            saving = async_save(state, f"{folder}/{is_async}")
            step(model, optimizer, 2)
            saving.wait()
        else:
            save(state, f"{folder}/{is_async}")
            step(model, optimizer, 2)
        other = sharded_net()
        fresh = ShardedAdamW(list(other.named_parameters()), lr=0.05, sharding=EAGER)
        load({"model": other, "optimizer": fresh}, f"{folder}/{is_async}")
        assert all(map(torch.equal, state_of(other, fresh), kept)), is_async
        assert not all(map(torch.equal, state_of(model, optimizer), kept))


def test_checkpoints(tmp_path: Path) -> None:
    run_procs(2, save_and_load, str(tmp_path), timeout=100.0)


def offload() -> None:
    model = sharded_net(offload_policy=CPUOffloadPolicy(pin_memory=False))
    with pytest.raises(ValueError, match=r"layers.0.weight is on cpu.*without it, or use torch"):
        ShardedAdamW(list(model.named_parameters()))


def test_cpu_offload_is_refused() -> None:
    run_procs(2, offload, timeout=100.0)
