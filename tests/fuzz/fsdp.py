"""Programs over models that FSDP2 has sharded, from a seed, and what does them as one rank.

The reference is that of all programs, and knows neither shards nor FSDP2. A gradient is absent on
every rank or on none: torch has no word for others.
"""

from __future__ import annotations

import time
import traceback
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import distribute_tensor
from torch.utils._pytree import tree_map_only

import shardfuse
from shardfuse.optim import npu
from tests.fuzz.actor import Outcome
from tests.fuzz.compare import NORM_TOLERANCE, digest, state_difference, value_difference
from tests.fuzz.draw import Draws
from tests.fuzz.features import FEATURES
from tests.fuzz.program import Group, Op, Program, Spec, gradient, initial_value, names_of
from tests.fuzz.reference import Reference, edit
from tests.support.dtensors import full

_SHAPES = ((1,), (5,), (513,), (1500,), (17, 40), (40, 420), (3, 5, 7), (6, 3, 4, 4), (2, 7))


def generate_fsdp(seed: int, worlds: Sequence[int] = (1, 2, 3, 4), optimizer: str = "") -> Program:
    """Return the program of a seed; four ranks are a mesh of 2 x 2, or a line.

    Args:
        seed: any number.
        worlds: the sizes to choose among.
        optimizer: a class; empty to draw one.
    """
    return _Generator(seed, worlds, FEATURES, optimizer).program()


class _Generator(Draws):
    has_empty = False

    def program(self) -> Program:
        """Draw everything, in one order."""
        chance = self.chance
        low = chance.random() < 0.25
        num_groups = min(chance.randint(1, 3), self.most_groups)
        groups = tuple(self._group(low) for _ in range(num_groups))
        for _ in range(chance.randint(3, 7)):
            self._round()
        self.add("check_state")
        meshes = ["line", "grid"] if self.world == 4 else ["line"]
        travels = chance.choice(["", "", "bfloat16"])
        return Program(
            seed=self.seed,
            world=self.world,
            optimizer=self.optimizer,
            options=self.options,
            groups=groups,
            sharding={"kernel": chance.choice(["eager", "auto"])},
            ops=tuple(self.ops),
            named=True,
            largest=1,
            model=f"FSDP2 {chance.choice(meshes)} {chance.choice(['reshard', 'keep'])} {travels}",
        )

    def _group(self, low: bool) -> Group:
        own = self.draw_group(frozen_share=0.0)
        if self.is_muon:
            dtype = "bfloat16" if low else "float32"
            kept = [s if s.numel and s.shape else s._replace(shape=(5,)) for s in own.specs]
            names = [s.name.replace(".", "_") for s in kept]
            specs = [
                Spec(name, s.shape, dtype, init=s.init) for name, s in zip(names, kept, strict=True)
            ]
            self.specs[-len(specs) :] = specs
            return Group(tuple(specs), own.overrides)
        specs = [
            Spec(
                name=spec.name.replace(".", "_"),
                shape=self.chance.choice(_SHAPES),
                dtype=self.chance.choice(["float32", "bfloat16"]) if low else "float32",
                init=spec.init,
            )
            for spec in own.specs
        ]
        self.specs[-len(specs) :] = specs
        return Group(tuple(specs), own.overrides)

    def _round(self) -> None:
        chance, names = self.chance, names_of(self.specs)
        by_model = self.optimizer.startswith("NpuFused")  # whose zeros count as absent elsewhere
        self.add("zero_grad", to_none=self.maybe(0.7), by_model=by_model or self.maybe(0.3))
        absent = self.some(names, 0.25) if self.maybe(0.3) else []
        parts = chance.choice([1, 1, 2, 3])
        for part in range(parts):
            self.add(
                "backward",
                seed=chance.randrange(10**6),
                absent=dict.fromkeys(range(self.world), absent),
                is_sent=part == parts - 1 or self.maybe(0.5),
            )
        if self.maybe(0.3):
            self.add("set_option", group=chance.randrange(3), key="lr", value=0.03)
        if self.maybe(0.2):
            whole = [spec.name for spec in self.specs if spec.dtype == "float32"]
            self.add("edit_param", names=self.some(whole, 0.3), how="add", seed=0)
        step: dict[str, Any] = {}
        if self.maybe(0.2):
            step["clip"] = chance.choice(self.max_norms)
        if self.maybe(0.2):
            step["norm_first"] = True
        self.add("step", **step)
        if self.maybe(0.3):
            mode = chance.choice(["sharded", "full", "flat", "own", "files"])
            if mode == "full" and self.options.get("momentum") == 0:
                mode = "sharded"  # torch refuses whole states without a tensor, of its SGD, too
            self.add("reload", mode=mode, sharding={}, keep=False)
            self.add("check_state")


class _Layer(nn.Module):
    def __init__(self, specs: Sequence[Spec]) -> None:
        super().__init__()
        for spec in specs:
            self.register_parameter(spec.name, nn.Parameter(initial_value(spec)))

    def forward(self, factors: Mapping[str, Tensor]) -> Tensor:
        """Return the sum of the parameters times their factors; those without one are unused."""
        own = {name: param for name, param in self.named_parameters() if name in factors}
        terms = [(p * factors[name].to(p.dtype)).sum().float() for name, p in own.items()]
        return torch.stack(terms).sum()


class _Net(nn.Module):
    """A layer for each dtype of a group."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        layers = []
        for group in program.groups:
            for dtype in sorted({spec.dtype for spec in group.specs}):
                layers.append(_Layer([s for s in group.specs if s.dtype == dtype]))
        self.layers = nn.ModuleList(layers)

    def forward(self, factors: Mapping[str, Tensor]) -> Tensor:
        """Return the sum over layers that have a factor."""
        used = [m for m in self.layers if any(n in factors for n, _ in m.named_parameters())]
        return torch.stack([layer(factors) for layer in used]).sum()


class FsdpActor:
    """One rank with a model of FSDP2's; the reference does each operation after it."""

    def __init__(self, program: Program, rank: int, folder: Path) -> None:
        self.program, self.rank, self.folder = program, rank, folder
        self.reference = Reference(program)
        self.specs = {spec.name: spec for spec in program.all_specs()}
        _, shape, keeps, *travels = program.model.split()
        sizes = (2, 2) if shape == "grid" else (program.world,)
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("rows", "shards")[-len(sizes) :])
        self.model: Any = _Net(program)
        policy = MixedPrecisionPolicy(param_dtype=getattr(torch, travels[0])) if travels else None
        options = {} if policy is None else {"mp_policy": policy}
        for layer in self.model.layers:
            fully_shard(layer, mesh=mesh, reshard_after_forward=keeps == "reshard", **options)
        fully_shard(self.model, mesh=mesh, **options)
        self.fqns = {name.rpartition(".")[2]: name for name, _ in self.model.named_parameters()}
        self.optimizer = self._build()
        self.num_files = 0

    @property
    def params(self) -> dict[str, Any]:
        """The parameters by the names of their specs, in the order of groups."""
        own = dict(self.model.named_parameters())
        return {name: own[self.fqns[name]] for name in self.specs}

    def _build(self) -> Any:
        name, params = self.program.optimizer, self.params
        cls = getattr(shardfuse if name.startswith("Sharded") else npu, name)
        groups = [
            {"params": [(self.fqns[s.name], params[s.name]) for s in g.specs], **g.overrides}
            for g in self.program.groups
        ]
        return cls(groups, **self.program.options, sharding=dict(self.program.sharding))

    @property
    def whole(self) -> Any:
        """What compare.py looks at: whole parameters."""
        values = {name: full(param) for name, param in self.params.items()}
        return SimpleNamespace(params=values, specs=self.specs)

    def apply(self, op: Op) -> list[float]:
        """Do ``op``; return norms."""
        return getattr(self, op.name)(**op.args) or []

    # Operations, by name

    def zero_grad(self, to_none: bool, by_model: bool) -> None:
        """Clear the gradients."""
        (self.model if by_model else self.optimizer).zero_grad(set_to_none=to_none)

    def backward(self, seed: int, absent: Mapping[int, Sequence[str]], is_sent: bool) -> None:
        """Accumulate gradients, and reduce them or not."""
        self.model.set_requires_gradient_sync(is_sent)
        factors = {
            name: gradient(self.program, spec, seed, self.rank)
            for name, spec in self.specs.items()
            if name not in absent[self.rank]
        }
        if factors:
            self.model(factors).backward()

    def set_option(self, group: int, key: str, value: Any) -> None:
        """Set a hyper-parameter."""
        if group < len(self.optimizer.param_groups):
            self.optimizer.param_groups[group][key] = value

    @torch.no_grad()
    def edit_param(self, names: Sequence[str], how: str, seed: int) -> None:
        """Change parameters in place."""
        for name, param in self.params.items():
            if name in names:
                value = full(param).clone()
                edit(value, self.program, self.specs[name], how, seed)
                param.copy_(distribute_tensor(value, param.device_mesh, param.placements))

    def step(self, clip: float | None = None, norm_first: bool = False) -> list[float]:
        """Take a step; return the norms that it gave."""
        found = [float(self.optimizer.grad_norm())] if norm_first else []
        if clip is not None:
            found.append(float(self.optimizer.clip_grad_norm(clip)))
        self.optimizer.step()
        return found

    def reload(self, mode: str, sharding: Mapping[str, Any], keep: bool) -> None:
        """Move the states to a new optimizer."""
        options = StateDictOptions(
            full_state_dict=mode == "full", flatten_optimizer_state_dict=mode == "flat"
        )
        old, self.optimizer = self.optimizer, self._build()
        if mode == "own":
            self.optimizer.load_state_dict(old.state_dict())
            return
        saved = get_optimizer_state_dict(self.model, old, options=options)
        if mode == "files":
            self.num_files += 1
            files = self.folder / f"files-{self.num_files}"
            dcp.save({"optimizer": saved}, checkpoint_id=files)
            saved = get_optimizer_state_dict(self.model, self.optimizer, options=options)
            dcp.load({"optimizer": saved}, checkpoint_id=files)
        copied = tree_map_only(torch.Tensor, torch.clone, saved)
        set_optimizer_state_dict(self.model, self.optimizer, copied, options=options)

    def check_state(self) -> None:
        """See difference()."""

    def difference(self, op: Op, got: list[float], expected: Any) -> str:
        """Return where this rank differs from the reference after ``op``; "" if nowhere."""
        for own, norm in zip(got, expected or [], strict=True):
            if not abs(own - norm.value) <= NORM_TOLERANCE * max(norm.value, 1e-30):
                return f"the norm is {own!r}, not {norm.value!r}"
        text = value_difference(self.whole, self.reference)
        if text or op.name != "check_state":
            return text
        saved = {}
        updated = self.reference.engine.states()
        for index, (name, param) in enumerate(self.params.items()):
            own = {key: full(value) for key, value in self.optimizer.state.get(param, {}).items()}
            if updated[index]:
                saved[index] = own
            elif own.get("step", 0) != 0:  # else they are states of a first update to come
                return f"{name} was never updated, and has had {own['step']} steps"
        return state_difference(saved, self.reference)


def run_fsdp_program(program: Program, rank: int, folder: Path) -> Outcome:
    """Run a program on this rank; after a mismatch go on, so that no other rank waits."""
    at, begin = -1, time.monotonic()
    digests, mismatch = [], None
    try:
        if not dist.is_initialized():  # a world of one process
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            actor = FsdpActor(program, rank, folder)
            for at, op in enumerate(program.ops):
                begin = time.monotonic()
                got = actor.apply(op)
                args = {key: value for key, value in op.args.items() if key != "is_sent"}
                expected = actor.reference.apply(op._replace(args=args))
                digests.append((at, digest(actor.whole)))
                text = "" if mismatch else actor.difference(op, got, expected)
                mismatch = (at, text) if text else mismatch
    except BaseException:  # torch.distributed.checkpoint's own errors are no Exceptions
        seconds = time.monotonic() - begin
        return Outcome("error", at, traceback.format_exc(), seconds, digests)
    if mismatch is not None:
        return Outcome("mismatch", *mismatch, 0.0, digests)
    return Outcome("ok", len(program.ops), "", 0.0, digests)
