"""Jobs that DeepSpeed drives, run on every rank of a real gloo group, and their fp64 references.

A job's loss is the sum of every parameter times a given tensor, so that its gradient is that tensor
exactly, in every dtype and under autocast.
"""

from __future__ import annotations

import logging
import math
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.models import MIXED, Entry, GradKind, mean_grads, rank_grads, split_by_group
from tests.support.oracles import AdamOracle, BertAdamOracle, LambOracle, Oracle, SGDOracle
from tests.support.oracles_family import (
    AdadeltaOracle,
    AdamPOracle,
    RMSpropOracle,
    RMSpropTFOracle,
)

WORLD = 2

# DeepSpeed gives absent gradients as zeros at stages 1 and 2, so that all are present here, and it
# cannot broadcast parameters of no dimension.
ENTRIES = tuple(
    entry
    for entry in MIXED
    if entry.role in ("used", "frozen") and entry.shape and 0 not in entry.shape
)

ORACLES: dict[str, type[Oracle]] = {
    "ShardedLamb": LambOracle,
    "ShardedAdamW": AdamOracle,
    "ShardedAdam": AdamOracle,
    "ShardedBertAdam": BertAdamOracle,
    "ShardedSGD": SGDOracle,
    "ShardedRMSprop": RMSpropOracle,
    "ShardedRMSpropTF": RMSpropTFOracle,
    "ShardedAdadelta": AdadeltaOracle,
    "ShardedAdamP": AdamPOracle,
}

# Large rates: parameters move by about their own size, so that errors show.
PARAMS: dict[str, dict[str, Any]] = {
    "ShardedLamb": {"lr": 0.05, "weight_decay": 0.1},
    "ShardedAdamW": {"lr": 0.05, "weight_decay": 0.1},
    "ShardedAdam": {"lr": 0.05, "weight_decay": 0.1},
    "ShardedBertAdam": {"lr": 0.05, "weight_decay": 0.1},
    "ShardedSGD": {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.1},
    "ShardedRMSprop": {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.1},
    "ShardedRMSpropTF": {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.1},
    "ShardedAdadelta": {"lr": 1.0, "weight_decay": 0.1},
    "ShardedAdamP": {"lr": 0.05, "weight_decay": 0.1},
}

MODES: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 4}},
    "autocast": {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}},
}


@dataclass(frozen=True)
class Job:
    """What to train with DeepSpeed, and how."""

    name: str = "ShardedLamb"
    params: Mapping[str, Any] = field(default_factory=dict)
    stage: int = 0
    mode: str = "fp32"
    zero: Mapping[str, Any] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)
    clip: float = 0.0
    gas: int = 1
    steps: int = 10
    kind: GradKind = "floats"
    how: str = "name"  # or "instance" or "callable"
    overflow_at: int | None = None  # the step in which the last rank has an infinite gradient
    alike: bool = False  # all ranks have the same gradients, however many they are
    shift: float = 0.0  # added to all parameters before they are trained
    entries: tuple[Entry, ...] = ENTRIES

    @property
    def options(self) -> dict[str, Any]:
        """Arguments of the optimizer."""
        return {**PARAMS.get(self.name, {}), **self.params}

    def config(self, world_size: int = WORLD) -> dict[str, Any]:
        """Return the JSON."""
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": self.gas,
            "train_batch_size": self.gas * world_size,
            "gradient_clipping": self.clip,
            "zero_optimization": {"stage": self.stage, **self.zero},
            **MODES[self.mode],
            **self.extra,
        }
        if self.how == "name":
            config["optimizer"] = {"type": self.name, "params": self.options}
        return config


class Weights(torch.nn.Module):
    """The parameters of `entries` under their own names."""

    def __init__(self, entries: Sequence[Entry]) -> None:
        super().__init__()
        self.entries = entries
        generator = torch.Generator().manual_seed(0)
        self.members: list[torch.nn.Parameter] = []
        for entry in entries:
            value = torch.randn(entry.shape, generator=generator)
            if entry.init is not None:
                value.fill_(entry.init)
            owner: torch.nn.Module = self
            *path, last = entry.name.split(".")
            for part in path:
                if not hasattr(owner, part):
                    owner.add_module(part, torch.nn.Module())
                owner = getattr(owner, part)
            param = torch.nn.Parameter(value, requires_grad=entry.role != "frozen")
            owner.register_parameter(last, param)
            self.members.append(param)

    def forward(self, grads: Sequence[Tensor | None]) -> Tensor:
        """Return a loss whose gradients are `grads`; matrices go through an autocast product."""
        total = torch.zeros(())
        for param, grad in zip(self.members, grads, strict=True):
            if grad is None or not param.requires_grad:
                continue
            used = param
            if param.dim() == 2:
                eye = torch.eye(param.shape[1], dtype=param.dtype)
                used = torch.nn.functional.linear(eye, param).t()
            total = total + (used.float() * grad).sum()
        return total

    def groups(self) -> list[dict[str, Any]]:
        """Return group dicts; the second has a learning rate and a decay of its own."""
        first, second = split_by_group(self.entries, self.members)
        return [{"params": first}, {"params": second, "lr": 0.02, "weight_decay": 0.2}]


def start_deepspeed(*, registered: bool = True) -> Any:
    """Return the deepspeed module, quiet, on the process group that exists, on the CPU."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    os.environ["LOCAL_RANK"] = str(dist.get_rank())
    import deepspeed

    # A C++ extension for all-reduces of inference, which takes a minute to compile.
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # type: ignore[attr-defined]
    deepspeed.utils.logger.setLevel(logging.ERROR)
    accelerator = deepspeed.accelerator.get_accelerator()
    # DeepSpeed refuses fp16 on CPUs; torch has had it for long.
    accelerator.is_fp16_supported = lambda: True
    import shardfuse.deepspeed

    if registered:
        shardfuse.deepspeed.register()
    return deepspeed


def build(job: Job, **kwargs: Any) -> tuple[Any, Weights]:
    """Return (engine, model)."""
    import shardfuse

    deepspeed = start_deepspeed()
    model = Weights(job.entries)
    with torch.no_grad():
        for param in model.members:
            param += job.shift
    if job.how == "name":
        kwargs["model_parameters"] = model.groups()
    elif job.how == "callable":
        kwargs["model_parameters"] = model.groups()
        kwargs["optimizer"] = lambda params: getattr(shardfuse, job.name)(params, **job.options)
    elif "optimizer" not in kwargs:
        kwargs["optimizer"] = getattr(shardfuse, job.name)(model.groups(), **job.options)
    engine, *_ = deepspeed.initialize(
        model=model, config=job.config(dist.get_world_size()), **kwargs
    )
    return engine, model


def build_unregistered(job: Job) -> tuple[Any, Weights]:
    """Return (engine, model) of an instance given to DeepSpeed without the plug-in."""
    import shardfuse

    deepspeed = start_deepspeed(registered=False)
    model = Weights(job.entries)
    optimizer = getattr(shardfuse, job.name)(model.groups(), **job.options)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=job.config())
    return engine, model


def train(job: Job, engine: Any, first: int = 0, last: int | None = None) -> None:
    """Run optimizer steps [first, last) of the job."""
    world_size, rank = dist.get_world_size(), dist.get_rank()
    for step in range(first, job.steps if last is None else last):
        for micro in range(job.gas):
            number = step * job.gas + micro
            ranks = (1, 0) if job.alike else (world_size, rank)
            grads = list(rank_grads(job.kind, *ranks, number, job.entries))
            if step == job.overflow_at and rank == world_size - 1:
                grads[0] = torch.full_like(grads[0], math.inf)  # type: ignore[arg-type]
            engine.backward(engine(grads))
            engine.step()


def masters(job: Job, engine: Any, model: Weights) -> list[Tensor]:
    """Return the fp32 values of all parameters, from the masters where there are any.

    DeepSpeed's way to them, get_full_hp_param, does not know of round_robin_gradients.
    """
    if job.mode in ("fp32", "autocast"):
        return [p.detach().clone() for p in model.members]
    if job.stage == 0:
        optimizer = engine.optimizer
        optimizer.consolidate_state_dict(to=None)
        state = type(optimizer).state_dict(optimizer)["state"]
        order = [id(p) for group in optimizer.param_groups for p in group["params"]]
        held = [state.get(order.index(id(p)), {}).get("param") for p in model.members]
    else:
        held = [p.get_full_hp_param() if p.requires_grad else None for p in model.members]
    pairs = zip(model.members, held, strict=True)
    return [(p.detach().float() if h is None else h.view(p.shape)).clone() for p, h in pairs]


def run(job: Job) -> dict[str, Any]:
    """Train on this rank; return the values, or the refusal."""
    try:
        engine, model = build(job)
    except (ValueError, RuntimeError, AssertionError, NotImplementedError) as error:
        return {"refusal": f"{type(error).__name__}: {error}"}
    train(job, engine)
    norm = engine.get_global_grad_norm()
    result = {
        "values": masters(job, engine, model),
        "model": [p.detach().float().clone() for p in model.members],
        "norm": None if norm is None else float(norm),
        "skipped": engine.skipped_steps,
        "lr": engine.get_lr(),
        "ratios": getattr(engine.basic_optimizer, "trust_ratios", dict)(),
    }
    engine.destroy()
    return result


def run_all(jobs: Sequence[Job]) -> list[dict[str, Any]]:
    """Run several jobs one after another."""
    return [run(job) for job in jobs]


def step_grads(job: Job, step: int) -> list[Tensor | None]:
    """Return the fp64 mean gradient of a step before clipping."""
    world_size = 1 if job.alike else WORLD
    columns = [
        mean_grads(job.kind, world_size, step * job.gas + micro, job.entries)
        for micro in range(job.gas)
    ]
    means: list[Tensor | None] = []
    for column in zip(*columns, strict=True):
        present = [grad for grad in column if grad is not None]
        means.append(sum(present[1:], present[0]) / job.gas if present else None)
    return means


def grad_norm(grads: Sequence[Tensor | None]) -> float:
    """Return the fp64 norm of all gradients."""
    return math.sqrt(sum(float(g.pow(2).sum()) for g in grads if g is not None))


def reference(job: Job) -> list[Tensor]:
    """Return what per-tensor fp64 math makes of the job, in the order of the entries."""
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(job.mode, torch.float32)
    model = Weights(job.entries).to(dtype)
    names = split_by_group(job.entries, [entry.name for entry in job.entries])
    options = {key: value for key, value in job.options.items() if key != "sharding"}
    if "clip_grad_norm" in options:
        options["max_grad_norm"] = options.pop("clip_grad_norm")
    if job.name == "ShardedAdamW":
        options["decoupled"] = True
    sign = -1.0 if options.pop("maximize", False) else 1.0
    oracle = ORACLES[job.name](model.groups(), names=names, **options)
    for step in range(job.steps):
        grads = step_grads(job, step)
        norm = grad_norm(grads)
        if job.clip and norm > job.clip:
            grads = [None if g is None else g * (job.clip / (norm + 1e-6)) for g in grads]
        grads = [None if g is None else g * sign for g in grads]
        oracle.step(split_by_group(job.entries, grads))
    order = [i for group in split_by_group(job.entries, range(len(job.entries))) for i in group]
    placed = dict(zip(order, oracle.values(), strict=True))
    return [placed[i] for i in range(len(job.entries))]


class CountOps(TorchDispatchMode):
    """Counts the elements that every collective of c10d is called with."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            leaves = torch.utils._pytree.tree_leaves(args)
            numel = max((t.numel() for t in leaves if isinstance(t, Tensor)), default=0)
            self.calls.append((func.__name__.partition(".")[0], numel))
        return func(*args, **(kwargs or {}))
