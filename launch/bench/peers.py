"""What others offer for the same step, each driven as its own documentation has it.

Packages are imported when a method is built: one that is missing costs only its rows.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
import types
from typing import Any

import torch
from torch import Tensor

from launch.bench.drivers import (
    LR,
    BucketReducer,
    ByHand,
    Driver,
    Method,
    WithBackward,
    tensors_nbytes,
)
from launch.bench.references import MakeOptimizer, NpuLamb
from launch.bench.synthetic import Model

_DDP_MB = 25

_fused_adam: MakeOptimizer = functools.partial(torch.optim.Adam, lr=LR, fused=True)
_plain_adam: MakeOptimizer = functools.partial(torch.optim.Adam, lr=LR)


def _replicated(make: MakeOptimizer, model: Model) -> Driver:
    """Every rank averages all gradients and updates all parameters."""
    params: list[Tensor] = list(model.parameters())
    optimizer = make(params)
    reduce = BucketReducer(params, getattr(optimizer, "grad_flat", None))

    def run() -> None:
        reduce()
        optimizer.step()

    def state_nbytes() -> int:
        state = tensors_nbytes(list(optimizer.state.values()))
        return state + tensors_nbytes(getattr(optimizer, "buffers", None))

    return ByHand(model, run, state_nbytes)


def _ddp(model: Model, *, gradient_as_bucket_view: bool = True) -> Driver:
    """DistributedDataParallel itself, whose all-reduces overlap backward, and fused Adam."""
    from torch.nn.parallel import DistributedDataParallel

    wrapped = DistributedDataParallel(
        model, gradient_as_bucket_view=gradient_as_bucket_view, bucket_cap_mb=_DDP_MB
    )
    optimizer = _fused_adam(list(model.parameters()))
    return WithBackward(
        model, wrapped, optimizer, lambda: tensors_nbytes(list(optimizer.state.values()))
    )


def _zero_redundancy(model: Model) -> Driver:
    """torch's ZeroRedundancyOptimizer, fused Adam on whole tensors, gradients averaged before."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    params = list(model.parameters())
    optimizer = ZeroRedundancyOptimizer(
        params, torch.optim.Adam, parameters_as_bucket_view=True, lr=LR, fused=True
    )
    reduce = BucketReducer(params)

    def run() -> None:
        reduce()
        optimizer.step()

    return ByHand(model, run, lambda: tensors_nbytes(list(optimizer.optim.state.values())))


def _fsdp2(model: Model) -> Driver:
    """fully_shard on every block and the root; parameters stay whole after forward."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=False)
    fully_shard(model, mesh=mesh, reshard_after_forward=False)
    optimizer = _fused_adam(list(model.parameters()))

    def state_nbytes() -> int:
        states = [value for state in optimizer.state.values() for value in state.values()]
        return sum(tensors_nbytes(getattr(t, "to_local", lambda t=t: t)()) for t in states)

    return WithBackward(model, model, optimizer, state_nbytes)


def _timm_lamb(params: list[Tensor]) -> Any:
    """timm's Lamb with the ratio on every tensor that decays, not clipped."""
    if "timm.optim.lamb" not in sys.modules and importlib.util.find_spec("torchvision") is None:
        # timm/__init__.py wants torchvision, its optimizers do not: packages without their code.
        spec = importlib.util.find_spec("timm")
        assert spec is not None
        assert spec.submodule_search_locations is not None
        root = spec.submodule_search_locations[0]
        for name, path in (("timm", root), ("timm.optim", f"{root}/optim")):
            package = types.ModuleType(name)
            package.__path__ = [path]
            sys.modules.setdefault(name, package)
    lamb = importlib.import_module("timm.optim.lamb").Lamb
    return lamb(params, lr=LR, weight_decay=0.01, max_grad_norm=None)


def _pytorch_optimizer_lamb(params: list[Tensor]) -> Any:
    """pytorch_optimizer's Lamb."""
    from pytorch_optimizer import Lamb

    return Lamb(params, lr=LR, weight_decay=0.01)


def _npu_lamb(params: list[Tensor]) -> NpuLamb:
    return NpuLamb(params, lr=LR, weight_decay=0.01)


def _lamb(name: str, make: MakeOptimizer, package: str | None) -> Method:
    build = functools.partial(_replicated, make)
    return Method(name, "lamb", build, reference=make, package=package)


METHODS = [
    Method("DDP + torch Adam fused", "adam", _ddp, _plain_adam, has_backward=True),
    Method(
        "DDP + torch Adam fused, gradients no views",
        "adam",
        functools.partial(_ddp, gradient_as_bucket_view=False),
        _plain_adam,
        has_backward=True,
    ),
    Method(
        "replicated torch Adam fused",
        "adam",
        functools.partial(_replicated, _fused_adam),
        _plain_adam,
    ),
    Method("ZeroRedundancyOptimizer Adam fused", "adam", _zero_redundancy, _plain_adam),
    Method("FSDP2 Adam fused", "adam", _fsdp2, _plain_adam, has_backward=True),
    _lamb("replicated LAMB of timm", _timm_lamb, "timm"),
    _lamb("replicated LAMB of pytorch_optimizer", _pytorch_optimizer_lamb, "pytorch_optimizer"),
    _lamb("replicated NpuFusedLamb algorithm", _npu_lamb, None),
]
