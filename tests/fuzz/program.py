"""What a program is: a small set of parameters, an optimizer, and operations in order."""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

LOW = ("bfloat16", "float16")


class Spec(NamedTuple):
    """One parameter: how it is made, and how often a backward uses it."""

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"
    layout: str = "contiguous"
    frozen: bool = False
    uses: int = 1
    init: float | None = None

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


class Group(NamedTuple):
    """Parameters of one group and the hyper-parameters that it has of its own."""

    specs: tuple[Spec, ...]
    overrides: Mapping[str, Any] = {}


class Op(NamedTuple):
    """One operation: every rank does it, at the same place of the program."""

    name: str
    args: Mapping[str, Any] = {}

    def __str__(self) -> str:
        given = ", ".join(f"{key}={value!r}" for key, value in self.args.items())
        return f"{self.name}({given})"


@dataclass(frozen=True)
class Program:
    """A seed's parameters, optimizer and operations; equal on every rank."""

    seed: int
    world: int
    optimizer: str
    options: Mapping[str, Any]
    groups: tuple[Group, ...]
    sharding: Mapping[str, Any] = field(default_factory=dict)
    ops: tuple[Op, ...] = ()
    named: bool = False
    kind: str = "integers"  # of gradients: "integers" have an exact mean, "floats" have not
    largest: int = 3  # of integers, before they are multiplied by the world size
    scaler: str = ""  # "", "torch" or "sharded"
    own_group: bool = False  # whether a process group is made for the optimizer
    spoils: bool = False  # whether a step under unequal loss scales may change gradients
    differs: bool = False  # whether ranks other than the first start from other values
    model: str = ""  # "handed over" in place of groups, "told" of beside them, or ""
    joined: bool = False  # whether one function of torch takes all parameters of a loss

    @property
    def first_fault(self) -> int | None:
        """Where ranks begin to do different things: from there on an error on all is right."""
        return next((i for i, op in enumerate(self.ops) if op.name == "one_rank"), None)

    def all_specs(self) -> list[Spec]:
        """Return every parameter, also of groups that are added later."""
        specs = [spec for group in self.groups for spec in group.specs]
        added = [op.args["specs"] for op in self.ops if op.name == "add_group"]
        return specs + [spec for group in added for spec in group]

    def __str__(self) -> str:
        lines = [
            f"seed {self.seed}, world {self.world}: {self.optimizer}({dict(self.options)})",
            f"  sharding={dict(self.sharding)} named={self.named} kind={self.kind} "
            f"largest={self.largest} scaler={self.scaler!r} own_group={self.own_group} "
            f"spoils={self.spoils} differs={self.differs} model={self.model!r} "
            f"joined={self.joined}",
        ]
        for index, group in enumerate(self.groups):
            lines.append(f"  group {index}: {dict(group.overrides)}")
            lines += [f"    {_describe(spec)}" for spec in group.specs]
        lines += [f"  {index:3} {op}" for index, op in enumerate(self.ops)]
        return "\n".join(lines)


def _describe(spec: Spec) -> str:
    extra = [spec.layout] * (spec.layout != "contiguous") + ["frozen"] * spec.frozen
    extra += [f"used {spec.uses} times"] * (spec.uses != 1)
    return " ".join([spec.name, str(spec.shape), spec.dtype, *extra])


def number(*parts: Any) -> int:
    """Return a number that depends on ``parts`` alone, equal in every process."""
    return zlib.crc32("/".join(map(str, parts)).encode())


def initial_value(spec: Spec) -> Tensor:
    """Return the parameter's first value in its dtype and layout."""
    generator = torch.Generator().manual_seed(number("init", spec.name))
    value = torch.randn(spec.shape, generator=generator)
    if spec.init is not None:
        value.fill_(spec.init)
    return laid_out(value.to(getattr(torch, spec.dtype)), spec.layout)


def laid_out(value: Tensor, layout: str) -> Tensor:
    """Return the values of ``value`` in memory as ``layout`` says."""
    if layout == "channels_last" and value.dim() == 4:
        return value.contiguous(memory_format=torch.channels_last)
    if layout == "transposed" and value.dim() == 2:
        return value.t().contiguous().t()
    if layout == "gapped" and value.dim() > 0:
        wide = value.new_zeros((*value.shape[:-1], 2 * value.shape[-1]))
        wide[..., ::2] = value
        return wide[..., ::2]
    return value


def gradient(program: Program, spec: Spec, seed: int, rank: int, use: int = 0) -> Tensor:
    """Return a gradient of one use of a parameter on one rank, fp32.

    "integers" are multiples of the world size, so that their mean is exact in any order and dtype;
    none is -0.0. "floats" have magnitudes in [0.1, 1) and, per element, one sign in all of the
    program: where numbers cancel, a sum in fp32 has few digits left, and a small denominator shows
    that rather than an error of the optimizer.
    """
    generator = torch.Generator().manual_seed(number(seed, rank, use, spec.name))
    if program.kind == "integers":
        top = program.largest
        values = torch.randint(-top, top + 1, spec.shape, generator=generator)
        return values.float() * float(program.world)
    shared = torch.Generator().manual_seed(number("sign", program.seed, spec.name))
    sign = torch.randint(0, 2, spec.shape, generator=shared) * 2.0 - 1.0
    return sign * (0.1 + 0.9 * torch.rand(spec.shape, generator=generator))


def names_of(specs: Sequence[Spec]) -> list[str]:
    """Return the names of ``specs``."""
    return [spec.name for spec in specs]
