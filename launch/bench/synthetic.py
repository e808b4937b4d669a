"""A model without layers: parameters, and gradients that every process can compute.

Gradients are a function of (tensor, step, rank), so their exact mean over ranks is known anywhere
and a result can be checked without a second run. They are multiples of 2**-14 below 2**-5, which
makes sums over ranks exact in any order.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from launch.bench.shapes import Shape

_PERIOD = 4093
_INITIAL = -1


@functools.lru_cache(maxsize=64)
def _pattern(step: int, rank: int) -> Tensor:
    """Return (2 * _PERIOD,) values that repeat after _PERIOD."""
    generator = torch.Generator().manual_seed(1_000_003 * rank + step + 1)
    values = torch.randint(-511, 512, (_PERIOD,), generator=generator) / (1 << 14)
    return values.repeat(2)


def fill_(out: Tensor, index: int, step: int, rank: int) -> Tensor:
    """Write the gradient of tensor ``index`` at ``step`` on ``rank`` into ``out`` (contiguous)."""
    flat = out.detach().view(-1)
    start = 37 * index % _PERIOD
    values = _pattern(step, rank)[start : start + _PERIOD].to(out.device)
    rows = flat.numel() // _PERIOD
    flat[: rows * _PERIOD].view(rows, _PERIOD).copy_(values.expand(rows, _PERIOD))
    flat[rows * _PERIOD :].copy_(values[: flat.numel() - rows * _PERIOD])
    return out


def mean_grad(like: Tensor, index: int, step: int, world_size: int) -> Tensor:
    """Return the mean over ranks of what ``fill_`` gives, in ``like``'s shape."""
    total = fill_(torch.empty_like(like), index, step, 0)
    part = torch.empty_like(like)
    for rank in range(1, world_size):
        total += fill_(part, index, step, rank)
    return total.div_(world_size)


class GradSource:
    """Which step's gradients backward gives; the same object in all functions of a model."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.step = 0


class _GiveGrad(torch.autograd.Function):
    """Pass a number on; in backward, make the parameter's gradient, one parameter at a time."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, param: Tensor, index: int, source: GradSource) -> Tensor:
        ctx.like, ctx.index, ctx.source = param.shape, index, source
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        grad = torch.empty(ctx.like, device=grads[0].device)
        fill_(grad, ctx.index, ctx.source.step, ctx.source.rank)
        return grads[0], grad, None, None


class Block(nn.Module):
    """Some parameters; forward passes a number through and hangs a gradient on each of them."""

    def __init__(
        self, shapes: Sequence[Shape], first: int, source: GradSource, device: torch.device
    ) -> None:
        super().__init__()
        self._first = first
        self._source = source
        self.weights = nn.ParameterList(
            fill_(torch.empty(shape, device=device), first + i, _INITIAL, 0)
            for i, shape in enumerate(shapes)
        )

    def forward(self, x: Tensor) -> Tensor:
        for offset, param in enumerate(self.weights):
            x = _GiveGrad.apply(x, param, self._first + offset, self._source)
        return x


class Model(nn.Module):
    """Blocks of parameters of given shapes, with values that depend on nothing but the shapes."""

    def __init__(self, blocks: Sequence[Sequence[Shape]], rank: int, device: torch.device) -> None:
        super().__init__()
        self.source = GradSource(rank)
        self.blocks = nn.ModuleList()
        first = 0
        for shapes in blocks:
            self.blocks.append(Block(shapes, first, self.source, device))
            first += len(shapes)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def run_backward(self, module: nn.Module, step: int) -> None:
        """Give every parameter its gradient through autograd; ``module`` is this or its wrapper."""
        self.source.step = step
        device = next(self.parameters()).device
        module(torch.ones((), device=device, requires_grad=True)).backward()


def initial_values(blocks: Sequence[Sequence[Shape]], device: torch.device) -> Iterator[Tensor]:
    """Yield the values that a Model starts from."""
    shapes = [shape for block in blocks for shape in block]
    for index, shape in enumerate(shapes):
        yield fill_(torch.empty(shape, device=device), index, _INITIAL, 0)
