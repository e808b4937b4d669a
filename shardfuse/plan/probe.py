"""What an optimizer holds per element and sends per parameter, learnt from a step of a tiny one.

So there is no second description of the rules: a rule with another state, or another norm, is
planned as it is.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from shardfuse.comm.transport import (
    AsyncModel,
    Completion,
    PartialSums,
    ReduceOp,
    SingleRank,
    completed,
)
from shardfuse.config import ShardConfig

_NUMEL = 4096
_WORLD_SIZE = 2


class Tally(SingleRank):
    """The first of ``world_size`` ranks, without the others: counts what would go to them."""

    def __init__(self, world_size: int, async_model: AsyncModel) -> None:
        self.world_size, self.async_model = world_size, async_model
        self.all_reduces: list[int] = []
        """Elements of each."""

    def reduce_scatter(
        self, input: torch.Tensor, into: torch.Tensor | None = None, **_: Any
    ) -> Completion[PartialSums]:
        part = input.chunk(self.world_size)[0]
        return completed((part if into is None else into.copy_(part),))

    def all_gather(
        self, output: torch.Tensor, input: torch.Tensor, *, label: str | None = None
    ) -> Completion[None]:
        return completed(None)

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> Completion[None]:
        self.all_reduces.append(tensor.numel())
        return completed(None)


@dataclass(frozen=True)
class Traits:
    """Of an optimizer's class and configuration."""

    grain: str
    """As of FlatLayout."""

    param_itemsize: float
    """Bytes an element on every rank: the parameter, and what it travels in."""

    state_itemsize: float
    """Bytes an element of a rank's shard: moments, masters."""

    keeps_reduced: bool
    """Whether a step keeps the reduced gradients, in fp32, of a rank's shard."""

    all_reduces: tuple[tuple[float, float], ...]
    """Small ones of a step: each of (elements, elements for each parameter)."""


def probe(build: Callable[..., Any], dtype: torch.dtype, config: ShardConfig) -> Traits:
    """Return the traits of ``build(params, sharding=config)`` for parameters of ``dtype``."""
    held = _build(build, dtype, config, 2)
    summary = held.memory_summary()
    padded = sum(flat.numel for flat in held.layout.flats)
    plain = replace(config, grad_sync_dtype=None, param_sync_dtype=None, grad_sync_bits=None)
    plain = replace(plain, param_sync_bits=None, stage=1)
    calls = []
    for num_params in (2, 4):
        stepped = _build(build, dtype, plain, num_params)
        for _ in range(2):
            stepped.communicator.all_reduces.clear()
            params = [param for group in stepped.param_groups for param in group["params"]]
            for param in params:
                param.grad = torch.ones_like(param)
            stepped.step()
        calls.append(list(stepped.communicator.all_reduces))
    slopes = [(more - fewer) / 2 for fewer, more in zip(*calls, strict=True)]
    return Traits(
        grain=held.layout.grain,
        param_itemsize=summary.param_nbytes / padded,
        state_itemsize=summary.state_nbytes * _WORLD_SIZE / padded,
        keeps_reduced=config.stage == 1 and _keeps_more_than_gradients(stepped, dtype),
        all_reduces=tuple(
            (fewer - 2 * slope, slope) for fewer, slope in zip(calls[0], slopes, strict=True)
        ),
    )


def _build(
    build: Callable[..., Any], dtype: torch.dtype, config: ShardConfig, num_params: int
) -> Any:
    """Return an optimizer of so many parameters, alone with a Tally."""
    params = [(f"p{i}", nn.Parameter(torch.ones(_NUMEL, dtype=dtype))) for i in range(num_params)]
    own = replace(
        config,
        process_group="alone",  # at first, for errors to be those of one rank
        mesh=None,
        kernel="eager",
        overlap_grad_sync=False,
        overlap_param_sync=False,
        consolidate_every=0,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of names and shapes that are nobody's
        build(params, sharding=own)
        return build(
            params, sharding=replace(own, process_group=Tally(_WORLD_SIZE, AsyncModel.ORDERED))
        )


def _keeps_more_than_gradients(optimizer: Any, dtype: torch.dtype) -> bool:
    padded = sum(flat.numel for flat in optimizer.layout.flats)
    return bool(optimizer.memory_summary().grad_nbytes > padded * dtype.itemsize)
