"""Training steps of a whole model, as users of each method write them.

Packages are imported when a method is built: one that is missing costs only its rows.
"""

from __future__ import annotations

import dataclasses
import functools
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.profiler import record_function

import shardfuse
from launch.bench.drivers import LR
from launch.bench.ours import RULES
from launch.bench.transformer import SIZES, Size, Transformer

COMPUTE = "compute alone"
DDP = "DDP + torch Adam fused"
ADAM = "shardfuse adam"
LAMB = "shardfuse lamb"
FEW_BITS = f"{ADAM}, 8-bit gradients, 4-bit params"
RANGES = ("forward", "backward", "step")
"""What a step is made of, annotated as ``train::NAME`` for the profiler."""

_DDP_MB = 25


class Training:
    """A model and what trains it on this rank.

    Args:
        model: its parameters are trained.
        module: the model or its wrapper, called for the forward pass.
        optimizer: stepped after backward; None: gradients are dropped.
    """

    def __init__(self, model: nn.Module, module: nn.Module, optimizer: Any) -> None:
        self._model, self._module, self._optimizer = model, module, optimizer

    def step(self, batch: Tensor) -> Tensor:
        """Run forward, backward and the optimizer's step; return the loss."""
        (self._model if self._optimizer is None else self._optimizer).zero_grad()
        with record_function("train::forward"):
            loss: Tensor = self._module(batch)
        with record_function("train::backward"):
            loss.backward()
        with record_function("train::step"):
            if self._optimizer is not None:
                self._optimizer.step()
        return loss.detach()

    def finish(self) -> None:
        """Wait for what the last step has left in flight; afterwards parameters may be read."""
        synchronize = getattr(self._optimizer, "synchronize", None)
        if synchronize is not None:
            synchronize()

    def checksum(self) -> int:
        """Return a number that differs if any bit of any parameter does. Collective."""
        total = 0
        for param in self._model.parameters():
            value = param.detach()
            value = value.full_tensor() if hasattr(value, "full_tensor") else value
            total = zlib.crc32(value.contiguous().numpy().data, total)
        return total


class EngineTraining(Training):
    """As Training, with DeepSpeed's engine in charge of backward and step."""

    def step(self, batch: Tensor) -> Tensor:
        with record_function("train::forward"):
            loss: Tensor = self._module(batch)
        with record_function("train::backward"):
            self._optimizer.backward(loss)
        with record_function("train::step"):
            self._optimizer.step()
        return loss.detach()

    def finish(self) -> None:
        """Do nothing: the engine's step waits for its own gathers."""


@dataclass(frozen=True)
class Method:
    """One row of a table: how to build it for a model, and what it needs."""

    name: str
    build: Callable[[Transformer, Size], Training]
    package: str | None = None
    """Distribution that must be installed."""

    is_default: bool = True
    """Whether it is measured where nothing says which methods are."""

    rehearse: Callable[[Transformer, Size], Training] | None = None
    """Builds it for a tiny model, to import and compile before memory is read; None is build."""


def built(method: str, size: str, *, rehearsal: bool = False) -> Training:
    """Return a new model of this size with a method around it."""
    chosen, dimensions = METHODS[method], SIZES[size]
    build = chosen.rehearse or chosen.build if rehearsal else chosen.build
    return build(Transformer(dimensions), dimensions)


def _adam(params: Iterable[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.Adam(list(params), lr=LR, fused=True)


def _compute(model: Transformer, size: Size) -> Training:
    return Training(model, model, None)


def _wrapped(model: Transformer) -> Any:
    from torch.nn.parallel import DistributedDataParallel

    return DistributedDataParallel(model, gradient_as_bucket_view=True, bucket_cap_mb=_DDP_MB)


def _ddp(model: Transformer, size: Size) -> Training:
    return Training(model, _wrapped(model), _adam(model.parameters()))


def _ddp_bf16(model: Transformer, size: Size) -> Training:
    """Gradients are cast to bf16 and summed in it, 25 MiB of fp32 at a time."""
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

    wrapped = _wrapped(model)
    # DDP refuses the hook by its name where there is no NCCL; gloo sums bf16 all the same.
    wrapped.register_comm_hook(None, lambda state, bucket: bf16_compress_hook(state, bucket))
    return Training(model, wrapped, _adam(model.parameters()))


def _zero_redundancy(model: Transformer, size: Size) -> Training:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    wrapped = _wrapped(model)
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.Adam, parameters_as_bucket_view=True, lr=LR, fused=True
    )
    return Training(model, wrapped, optimizer)


def _deepspeed(stage: int, model: Transformer, size: Size) -> Training:
    """torch's fused Adam under ZeRO with default buckets."""
    import deepspeed

    config = {
        "train_micro_batch_size_per_gpu": size.batch,
        "train_batch_size": size.batch * dist.get_world_size(),
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage},
    }
    params = list(model.parameters())
    engine, _, _, _ = deepspeed.initialize(
        model=model,
        model_parameters=params,
        optimizer=_adam(params),
        config=config,
        dist_init_required=False,
    )
    return EngineTraining(model, engine, engine)


def _fsdp2(model: Transformer, size: Size) -> Training:
    """fully_shard on every block and the root; parameters stay whole until backward has ended."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=False)
    fully_shard(model, mesh=mesh, reshard_after_forward=False)
    return Training(model, model, _adam(model.parameters()))


def _shardfuse(rule: str, sharding: dict[str, Any], model: Transformer, size: Size) -> Training:
    cls, arguments = RULES[rule]
    optimizer = cls(model.named_parameters(), **arguments, sharding=sharding)
    return Training(model, model, optimizer)


def _ours(name: str, rule: str, sharding: dict[str, Any], *, is_default: bool = True) -> Method:
    return Method(
        name,
        functools.partial(_shardfuse, rule, sharding),
        is_default=is_default,
        rehearse=functools.partial(_shardfuse, rule, {**sharding, "kernel": "compile"}),
    )


_KEYS = {field.name for field in dataclasses.fields(shardfuse.ShardConfig)}
_NO_OVERLAP: dict[str, Any] = {
    key: False for key in ("overlap_grad_sync", "overlap_param_sync") if key in _KEYS
}

_BF16 = {"grad_sync_dtype": torch.bfloat16, "param_sync_dtype": torch.bfloat16}

ALL = [
    Method(COMPUTE, _compute),
    Method(DDP, _ddp),
    Method(f"{DDP}, bf16 hook", _ddp_bf16),
    Method("ZeroRedundancyOptimizer Adam fused", _zero_redundancy),
    *(
        Method(
            f"DeepSpeed ZeRO-{stage} Adam fused",
            functools.partial(_deepspeed, stage),
            package="deepspeed",
        )
        for stage in (1, 2)
    ),
    Method("FSDP2 Adam fused", _fsdp2),
    _ours(ADAM, "adam", {}),
    _ours(LAMB, "lamb", {}),
    _ours(f"{ADAM}, no overlap", "adam", _NO_OVERLAP),
    _ours(f"{ADAM}, stage 2", "adam", {"stage": 2}),
    _ours(f"{ADAM}, bf16 params", "adam", {"param_sync_dtype": torch.bfloat16}),
    _ours(f"{ADAM}, bf16 wire", "adam", _BF16),
    _ours(f"{LAMB}, bf16 wire", "lamb", _BF16),
    _ours(FEW_BITS, "adam", {"grad_sync_bits": 8, "param_sync_bits": 4}),
    *(
        _ours(f"Adam, buckets of {cap_mb} MiB", "adam", {"bucket_cap_mb": cap_mb}, is_default=False)
        for cap_mb in (2, 4, 8, 16, 25, 50)
    ),
]
METHODS = {method.name: method for method in ALL}
