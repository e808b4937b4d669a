"""One rank's model, sharded optimizer, scaler and hooks; and the way to a new optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor

import shardfuse
from shardfuse.optim import npu
from tests.fuzz.choices import kind_of
from tests.fuzz.local import LocalModel
from tests.fuzz.program import LOW, Group, Program
from tests.fuzz.ranks import GROWTH_INTERVAL, INITIAL_SCALE


class Job:
    """What a training script of one rank holds.

    Args:
        program: what to do.
        rank: this rank.
        folder: an empty one that all ranks see.
    """

    def __init__(self, program: Program, rank: int, folder: Path) -> None:
        self.program, self.rank, self.folder = program, rank, folder
        self.local = LocalModel(program, rank)
        self.groups: list[Group] = []
        self.sharding = dict(program.sharding)
        self.scheduler: Any = None
        self.hooks: list[str] = []
        self.calls = [0, 0]  # of a pre-hook and a post-hook that count
        self.buffers = {
            "mean": torch.zeros(7),
            "count": torch.zeros((), dtype=torch.int64),
            "short": torch.zeros(2, 3, dtype=torch.float16),
        }
        self._process_group = dist.new_group() if program.own_group else None
        self._old: list[Any] = []
        self._num_saved = 0
        for group in program.groups:
            self.make(group)
        self.optimizer = self._build()
        self.scaler = self._make_scaler()

    def make(self, group: Group) -> list[torch.nn.Parameter]:
        """Make a group's parameters; those of other ranks than the first may differ."""
        self.groups.append(group)
        params = self.local.add(group.specs)
        if self.program.differs and self.rank > 0:
            for param in params:
                param.data.add_(1.0)
        return params

    def _build(self, params: Mapping[str, Tensor] | None = None, cls: Any = None) -> Any:
        """Return an optimizer over all groups: of the program's class over the model's own."""
        params = self.local.params if params is None else params
        groups = [group_dict(group, params, self.program.named) for group in self.groups]
        if cls is not None:
            return cls(groups, **self.program.options)
        name = self.program.optimizer
        cls = getattr(npu if name.startswith("NpuFused") else shardfuse, name)
        sharding = {**self.sharding, "process_group": self._process_group}
        kind = self.program.model
        given = self._module() if kind == "handed over" and len(groups) == 1 else groups
        optimizer = cls(given, **self.program.options, sharding=sharding)
        if kind and given is groups:
            optimizer.broadcast_buffers(self._module())
        return optimizer

    def _module(self) -> torch.nn.Module:
        """Return a module that has all parameters and buffers."""
        module = torch.nn.Module()
        for name, param in self.local.params.items():
            *path, last = name.split(".")
            inner = module
            for part in path:
                if part not in inner._modules:
                    inner.add_module(part, torch.nn.Module())
                inner = inner._modules[part]  # type: ignore[assignment]
            inner.register_parameter(last, param)
        for name, buffer in self.buffers.items():
            module.register_buffer(name, buffer)
        return module

    def _make_scaler(self) -> Any:
        if not self.program.scaler:
            return None
        options = {"init_scale": INITIAL_SCALE, "growth_interval": GROWTH_INTERVAL}
        if self.program.scaler == "torch":
            scaler: Any = torch.amp.GradScaler("cpu", **options)
        else:
            scaler = shardfuse.ShardedGradScaler(
                "cpu", **options, process_group=self._process_group
            )
        scaler.scale(torch.ones(()))  # makes the scale
        self.local.scale = INITIAL_SCALE
        return scaler

    def close(self) -> None:
        """Give back what outlives the program."""
        if self._process_group is not None:
            dist.destroy_process_group(self._process_group)

    def register(self, kind: str) -> None:
        """Register a hook on the present optimizer's step()."""
        if kind == "halve":
            self.optimizer.register_step_pre_hook(self._halve)
        elif kind == "shift":
            self.optimizer.register_step_post_hook(self._shift)
        else:
            self.optimizer.register_step_pre_hook(lambda *_: self._count(0))
            self.optimizer.register_step_post_hook(lambda *_: self._count(1))

    def _halve(self, *_: Any) -> None:
        for param in self.local.params.values():
            if param.grad is not None:
                param.grad.mul_(0.5)

    def _shift(self, *_: Any) -> None:
        for name, param in self.local.params.items():
            if self.local.specs[name].dtype not in LOW:
                param.data.add_(0.25)

    def _count(self, index: int) -> None:
        self.calls[index] += 1

    def full_state(self, to: int | None = None) -> dict[str, Any]:
        """Return the full state dict on every rank."""
        self.optimizer.consolidate_state_dict(to=to)
        if to is None:
            return self.optimizer.state_dict()  # type: ignore[no-any-return]
        box = [self.optimizer.state_dict() if self.rank == to else None]
        if self.program.world > 1:
            dist.broadcast_object_list(box, src=to)
        assert box[0] is not None
        return box[0]

    def reload(self, mode: str, sharding: Mapping[str, Any], keep: bool) -> None:
        """Move the state to a new optimizer, over the same parameters or copies."""
        saved: Any = None
        if mode == "sharded":
            self._num_saved += 1
            path = str(self.folder / str(self._num_saved))
            saved = self.optimizer.sharded_state_dict()
            dcp.save(saved, checkpoint_id=path)
        else:
            saved = self.full_state(0 if mode == "first_rank" else None)
        if mode == "torch":
            saved = self._through_torch(saved)
        if keep:
            self._old.append(self.optimizer)
        if mode == "copies":
            self.local.replace()
        self.sharding = {**self.sharding, **sharding}
        self.scheduler = None
        if mode == "sharded":
            self._load_sharded(path, set(saved))
        else:
            self.optimizer = self._build()
            self.optimizer.load_state_dict(saved)
        for kind in self.hooks:
            self.register(kind)

    def _load_sharded(self, path: str, keys: set[str]) -> None:
        """Load into an optimizer built while just those parameters train that have states saved."""
        specs = self.optimizer.layout.specs
        trained = [param.requires_grad for param in self.local.params.values()]
        saved = {
            key.removeprefix("state.").rpartition(".")[0] for key in keys if key[-5:] != ".step"
        }
        for spec, param in zip(specs, self.local.params.values(), strict=True):
            if spec.numel and saved & {other.name for other in specs}:
                param.requires_grad_(spec.name in saved)
        if "momentum" in self.program.options and "Muon" not in self.program.optimizer:
            # It may have been set later; an optimizer built without one has no buffers to load.
            self.groups = [
                group._replace(overrides={**group.overrides, "momentum": own["momentum"]})
                for group, own in zip(self.groups, self.optimizer.param_groups, strict=True)
            ]
        self.optimizer = self._build()
        loaded = self.optimizer.sharded_state_dict()
        dcp.load(loaded, checkpoint_id=path)
        self.optimizer.load_sharded_state_dict(loaded)
        for param, value in zip(self.local.params.values(), trained, strict=True):
            param.requires_grad_(value)

    def _through_torch(self, saved: dict[str, Any]) -> dict[str, Any]:
        """Return what torch's optimizer of the same name makes of a state dict."""
        copies = {name: p.detach().clone() for name, p in self.local.params.items()}
        other = self._build(copies, getattr(torch.optim, kind_of(self.program.optimizer).torch))
        other.load_state_dict(saved)
        return other.state_dict()  # type: ignore[no-any-return]


def group_dict(group: Group, params: Mapping[str, Tensor], named: bool) -> dict[str, Any]:
    """Return a group as an optimizer takes it."""
    members = [(spec.name, params[spec.name]) for spec in group.specs]
    return {"params": members if named else [p for _, p in members], **group.overrides}
