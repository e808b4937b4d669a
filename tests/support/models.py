"""Parameter sets that exercise the layout, and gradients whose mean over ranks is known.

A block is 512 elements, so the larger tensors here are cut over three ranks and over buckets,
while the small ones share a shard.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from tests.support import placing

Role = Literal["used", "frozen", "unused", "late", "some"]
GradKind = Literal["integers", "floats"]

# The first step at which parameters of the role "late" have a gradient.
LATE_STEP = 2


class Entry(NamedTuple):
    """One parameter of a set.

    Roles: "used" gets a gradient on every rank in every step, "frozen" has requires_grad=False,
    "unused" never gets one, "late" gets one from LATE_STEP on, and "some" gets one on the first
    rank only, in even steps.
    """

    name: str
    shape: tuple[int, ...]
    group: int = 0
    role: Role = "used"
    init: float | None = None


# About 27,000 elements. Names follow BERT's, so that the exclusions of LAMB's google variant match.
MIXED = (
    Entry("embedding.weight", (211, 40)),
    Entry("dense.weight", (64, 70)),
    Entry("dense.bias", (70,), init=0.0),
    Entry("LayerNorm.weight", (70,), init=1.0),
    Entry("scale", (), init=1.5),
    Entry("empty.weight", (0, 5)),
    Entry("frozen.weight", (33, 3), role="frozen"),
    Entry("unused.weight", (1000,), role="unused"),
    Entry("late.weight", (30, 50), role="late"),
    Entry("head.weight", (9001,), group=1),
    Entry("head.scale", (1,), group=1, init=-2.0),
    Entry("head.LayerNorm.bias", (3, 5, 7), group=1),
    Entry("head.some.weight", (11, 100), group=1, role="some"),
)

# What group 1 has of its own; every optimizer knows these two.
GROUP_OVERRIDES: tuple[Mapping[str, Any], ...] = ({}, {"lr": 0.02, "weight_decay": 0.2})


@dataclass
class ParamSet:
    """Parameters of `entries`, all of one dtype, equal for equal seeds."""

    entries: tuple[Entry, ...] = MIXED
    dtype: torch.dtype = torch.float32
    seed: int = 0
    overrides: Sequence[Mapping[str, Any]] = GROUP_OVERRIDES
    params: list[torch.nn.Parameter] = field(init=False)

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.seed)
        self.params = []
        for entry in self.entries:
            value = torch.randn(entry.shape, generator=generator)
            if entry.init is not None:
                value.fill_(entry.init)
            trained = entry.role != "frozen"
            self.params.append(torch.nn.Parameter(value.to(self.dtype), requires_grad=trained))

    @property
    def num_groups(self) -> int:
        """Number of param groups."""
        return 1 + max(entry.group for entry in self.entries)

    def groups(self, *, named: bool = False) -> list[dict[str, Any]]:
        """Return group dicts for an optimizer; with `named`, of (name, parameter) pairs."""
        pairs = list(zip(self.entries, self.params, strict=True))
        return [
            {
                "params": [(e.name, p) if named else p for e, p in pairs if e.group == index],
                **self.overrides[index],
            }
            for index in range(self.num_groups)
        ]

    def names(self) -> list[list[str]]:
        """Return the parameters' names, one list per group."""
        return split_by_group(self.entries, [entry.name for entry in self.entries])

    def assign(self, grads: Sequence[Tensor | None]) -> None:
        """Set every `p.grad` to a fresh copy of its gradient, or to None."""
        for param, grad in zip(self.params, grads, strict=True):
            param.grad = None if grad is None else grad.detach().to(param.dtype, copy=True)

    def values(self) -> list[Tensor]:
        """Return copies of all parameters."""
        return [param.detach().clone() for param in self.params]


def split_by_group(entries: Sequence[Entry], values: Sequence[Any]) -> list[list[Any]]:
    """Return `values`, one per entry, as one list per group."""
    num_groups = 1 + max(entry.group for entry in entries)
    pairs = list(zip(entries, values, strict=True))
    return [[v for e, v in pairs if e.group == index] for index in range(num_groups)]


def has_grad(entry: Entry, rank: int, step: int) -> bool:
    """Tell whether `rank` (0 is the first) has a gradient for this parameter in this step."""
    if entry.role == "late":
        return step >= LATE_STEP
    if entry.role == "some":
        return rank == 0 and step % 2 == 0
    return entry.role == "used"


Grads = Sequence[Tensor | None]


def rank_grads(
    kind: GradKind, world_size: int, rank: int, step: int, entries: tuple[Entry, ...] = MIXED
) -> Grads:
    """Return one rank's fp32 gradients of one step, one per entry, None where it has none.

    "integers" are multiples of the world size in [-3, 3] * W, so that their mean is an integer and
    exact in any order of summation and any dtype. "floats" have magnitudes in [0.1, 1) and a sign
    that all ranks share: where ranks cancel to 1e-6 the fp32 sum has few digits left, and Adam's
    first step, sign(g) with eps beside it, would show that and not an error of the optimizer.
    """
    return placing.here(_rank_grads(kind, world_size, rank, step, entries))


@lru_cache(maxsize=512)
@placing.on_host
def _rank_grads(
    kind: GradKind, world_size: int, rank: int, step: int, entries: tuple[Entry, ...]
) -> Grads:
    generator = torch.Generator().manual_seed(1_000_003 * step + rank)
    shared = torch.Generator().manual_seed(1_000_003 * step + 999_983)
    grads: list[Tensor | None] = []
    for entry in entries:
        if kind == "integers":
            grad = torch.randint(-3, 4, entry.shape, generator=generator) * float(world_size)
        else:
            sign = torch.randint(0, 2, entry.shape, generator=shared) * 2.0 - 1.0
            grad = sign * (0.1 + 0.9 * torch.rand(entry.shape, generator=generator))
        grads.append(grad if has_grad(entry, rank, step) else None)
    return grads


def mean_grads(
    kind: GradKind,
    world_size: int,
    step: int,
    entries: tuple[Entry, ...] = MIXED,
    dtype: torch.dtype = torch.float32,
) -> Grads:
    """Return the float64 mean of all ranks' gradients, each rounded to `dtype` first.

    No gradient counts as zero on that rank; None where no rank has one.
    """
    return placing.here(_mean_grads(kind, world_size, step, entries, dtype))


@lru_cache(maxsize=512)
@placing.on_host
def _mean_grads(
    kind: GradKind, world_size: int, step: int, entries: tuple[Entry, ...], dtype: torch.dtype
) -> Grads:
    ranks = [_rank_grads(kind, world_size, rank, step, entries) for rank in range(world_size)]
    means: list[Tensor | None] = []
    for column in zip(*ranks, strict=True):
        present = [grad.to(dtype).double() for grad in column if grad is not None]
        total = sum(present, torch.zeros_like(present[0])) if present else None
        means.append(None if total is None else total / world_size)
    return means


class TiedModel(torch.nn.Module):
    """A small language model with one tensor used twice, a frozen one and one never used."""

    VOCABULARY = 211

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(self.VOCABULARY, 24)
        self.hidden = torch.nn.Linear(24, 60)
        self.LayerNorm = torch.nn.LayerNorm(60)
        self.back = torch.nn.Linear(60, 24)
        self.decoder = torch.nn.Linear(24, self.VOCABULARY)
        self.unused = torch.nn.Linear(3, 3)
        self.shift = torch.nn.Parameter(torch.ones(24), requires_grad=False)
        self.scale = torch.nn.Parameter(torch.tensor(1.0))
        self.decoder.weight = self.embedding.weight
        # Not by the global generator, which ranks that are threads would share.
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for name, param in self.named_parameters():
                if param.dim() == 2:
                    param.copy_(torch.randn(param.shape, generator=generator) / 5)
                elif name.endswith("bias"):
                    param.fill_(0.01)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the mean loss of predicting every token of (batch, length) from the one before."""
        x = self.embedding(tokens[:, :-1]) + self.shift
        x = self.back(torch.tanh(self.LayerNorm(self.hidden(x)))) * self.scale
        logits = self.decoder(x)
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    @classmethod
    def batch(cls, step: int, size: int) -> Tensor:
        """Return (size, 9) tokens in which each follows from the one before by a fixed rule."""
        generator = torch.Generator().manual_seed(step)
        first = torch.randint(cls.VOCABULARY, (size, 1), generator=generator)
        return (first + 5 * torch.arange(9)) % cls.VOCABULARY


def flat_buffers(optimizer: Any) -> list[Tensor]:
    """Return the tensors that the parameters of an optimizer of ours lie in, padding included."""
    return [buffer for buffer in optimizer._buffers.combined if buffer is not None]


def lie_in(params: Iterable[Tensor], buffers: Sequence[Tensor]) -> bool:
    """Return whether every parameter's memory, where it has some, is part of one of the buffers."""
    ranges = [(b.data_ptr(), b.data_ptr() + b.nbytes) for b in buffers]
    return all(
        any(start <= p.data_ptr() and p.data_ptr() + p.nbytes <= stop for start, stop in ranges)
        for p in params
        if p.numel()
    )
