"""Parameters that torch shards: DTensors placed in every way, on meshes of one and two dimensions.

A model's loss is the sum of every parameter times a given tensor, so that its gradient is that
tensor exactly. Whole tensors come from the seed alone: one process can train the same.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

import shardfuse
from shardfuse import ShardedLamb
from shardfuse.optim import paddle
from tests.support.deepspeed_runs import PARAMS
from tests.support.placing import device_type

# Large and small; of less rows than ranks; uneven; not whole blocks; of one element; of none; no
# dimension.
SHAPES: dict[str, tuple[int, ...]] = {
    "embedding": (8191, 6),
    "wide": (48, 512),
    "few.rows": (2, 33),
    "odd": (7, 5),
    "cube": (5, 4, 3),
    "norm": (37,),
    "one": (1,),
    "empty": (0, 4),
    "head": (64, 300),
    "scalar": (),
}

_NOT_FSDP = ("empty", "scalar")
"""Those that fully_shard() does not take."""

GROUPS = (
    ("embedding", "wide", "few.rows", "odd"),
    ("cube", "norm", "one", "empty", "head", "scalar"),
)
SECOND = {"weight_decay": 0.25}

BUILD: dict[str, Callable[..., Any]] = {
    name: functools.partial(getattr(shardfuse, name), **PARAMS[name]) for name in PARAMS
} | {
    "lamb_global": functools.partial(
        ShardedLamb, lr=0.05, weight_decay=0.1, use_global_grad_norm=True, variant="nvlamb"
    ),
    "adamw_amsgrad": functools.partial(shardfuse.ShardedAdamW, lr=0.05, amsgrad=True),
    "adamp_nesterov": functools.partial(
        shardfuse.ShardedAdamP, lr=0.05, weight_decay=0.1, nesterov=True
    ),
}

REDUCING = ("ShardedLamb", "ShardedAdamP", "ShardedBertAdam", "lamb_global", "adamp_nesterov")
"""Those whose steps have sums over ranks, in another order than in one process."""

Placed = Mapping[str, tuple[str, tuple[Any, ...]]]
"""{parameter: (mesh, placements)}."""

_S0, _S1, _R = Shard(0), Shard(1), Replicate()

LINE: Placed = dict.fromkeys(SHAPES, ("all", (_S0,))) | {
    "wide": ("all", (_S1,)),
    "cube": ("all", (_S1,)),
    "norm": ("all", (_R,)),
    "scalar": ("all", (_R,)),
}

HYBRID: Placed = dict.fromkeys(SHAPES, ("all", (_R, _S0))) | {
    "odd": ("all", (_R, _R)),
    "wide": ("all", (_R, _S1)),
    "scalar": ("all", (_R, _R)),
}

TENSOR: Placed = {
    "embedding": ("all", (_S0, _S1)),
    "wide": ("all", (_StridedShard(0, split_factor=2), _S0)),
    "few.rows": ("all", (_S0, _S1)),
    "odd": ("all", (_S0, _R)),
    "cube": ("all", (_S0, _S0)),
    "norm": ("dp", (_S0,)),
    "one": ("dp", (_S0,)),
    "empty": ("all", (_S0, _S1)),
    "head": ("all", (_R, _S0)),
    "scalar": ("dp", (_R,)),
}

WORLDS: dict[str, tuple[tuple[int, ...], tuple[str, ...], Placed]] = {
    "1": ((1,), ("dp",), LINE),
    "2": ((2,), ("dp",), LINE),
    "3": ((3,), ("dp",), LINE),
    "2x2 HSDP": ((2, 2), ("replicate", "shard"), HYBRID),
    "2x2 FSDP x TP": ((2, 2), ("dp", "tp"), TENSOR),
}


def size_of(world: str) -> int:
    """Return the number of ranks."""
    return int(torch.tensor(WORLDS[world][0]).prod())


def whole(name: str, seed: int) -> Tensor:
    """Return a whole tensor of a parameter's shape: values, or gradients of a step."""
    generator = torch.Generator().manual_seed(1000 * seed + list(SHAPES).index(name))
    return torch.randn(SHAPES[name], generator=generator)


def grad_of(name: str, step: int) -> Tensor:
    """Return the whole gradient of a step."""
    return whole(name, 1 + step)


def groups_of(params: Mapping[str, Tensor]) -> list[dict[str, Any]]:
    """Return two group dicts of (name, parameter) pairs."""
    first, second = ([(name, params[name]) for name in names] for names in GROUPS)
    return [{"params": first}, {"params": second, **SECOND}]


class Sharded:
    """DTensor parameters on this rank."""

    def __init__(self, world: str, dtype: torch.dtype = torch.float32) -> None:
        shape, names, self.placed = WORLDS[world]
        mesh = init_device_mesh(device_type(), shape, mesh_dim_names=names)
        self.meshes: dict[str, DeviceMesh] = {"all": mesh}
        if "dp" in names:
            self.meshes["dp"] = mesh["dp"]
        self.params = {
            name: nn.Parameter(self.put(name, whole(name, 0).to(dtype))) for name in SHAPES
        }

    def put(self, name: str, value: Tensor) -> Any:
        """Return a whole tensor as a DTensor with the placement of a parameter."""
        mesh, placements = self.placed[name]
        return distribute_tensor(value, self.meshes[mesh], placements)

    def assign(self, step: int, without: Sequence[str] = ()) -> None:
        """Set the gradients of a step."""
        for name, param in self.params.items():
            grad = None if name in without else self.put(name, grad_of(name, step).to(param.dtype))
            param.grad = grad

    def values(self) -> dict[str, Tensor]:
        """Return the whole parameters."""
        return {name: full(param) for name, param in self.params.items()}


def full(value: Any) -> Tensor:
    """Return a whole tensor, on the CPU, of a DTensor."""
    tensor = value.detach().full_tensor() if isinstance(value, DTensor) else value.detach()
    return tensor.cpu()


def plain() -> dict[str, Tensor]:
    """Return the same parameters as plain tensors."""
    return {name: nn.Parameter(whole(name, 0)) for name in SHAPES}


def train_plain(build: Callable[..., Any], steps: int, without: Sequence[str] = ()) -> Any:
    """Return (parameters, optimizer) of one process after some steps."""
    params = plain()
    sharding = {"process_group": "alone", "kernel": "eager"}
    optimizer = build(groups_of(params), sharding=sharding)
    for step in range(steps):
        for name, param in params.items():
            param.grad = None if name in without else grad_of(name, step)
        optimizer.step()
    return {name: param.detach().clone() for name, param in params.items()}, optimizer


class Net(nn.Module):
    """The parameters of SHAPES that FSDP2 can shard, in layers; the loss's gradient is given."""

    def __init__(
        self, names: Sequence[str] = tuple(n for n in SHAPES if n not in _NOT_FSDP)
    ) -> None:
        super().__init__()
        self.names = names
        self.layers = nn.ModuleList(_Layer(name) for name in self.names)

    def forward(self, grads: Mapping[str, Tensor]) -> Tensor:
        """Return the sum of every parameter times its gradient."""
        terms = [layer(grads[name]) for layer, name in zip(self.layers, self.names, strict=True)]
        return torch.stack(terms).sum()


class _Layer(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(whole(name, 0))

    def forward(self, grad: Tensor) -> Tensor:
        return (self.weight * grad.to(self.weight.dtype)).sum()


def rank_grads(step: int, rank: int, world_size: int) -> dict[str, Tensor]:
    """Return integer gradients of a rank, whose mean over 1, 2, 3 or 4 ranks is exact."""
    del world_size
    return {
        name: (12 * whole(name, 50 + 10 * step + rank)).round() * 12
        for name in SHAPES
        if name not in _NOT_FSDP
    }


def fsdp_net(mesh: DeviceMesh | None = None, names: Sequence[str] = (), **options: Any) -> Net:
    """Return the model, each of its layers sharded by FSDP2; of some parameters, or of all."""
    net = Net(names) if names else Net()
    if mesh is None:
        mesh = init_device_mesh(device_type(), (dist.get_world_size(),))
    for layer in net.layers:
        fully_shard(layer, mesh=mesh, **options)
    fully_shard(net, mesh=mesh, **options)
    return net


def paddle_lamb(params: Any, **options: Any) -> Any:
    """Return Paddle's Lamb, clipped by the norm of each tensor."""
    clip = paddle.ClipGradByNorm(0.5)
    return paddle.Lamb(0.05, 0.1, parameters=params, grad_clip=clip, **options)
