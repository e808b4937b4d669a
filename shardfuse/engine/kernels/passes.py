"""One pass over a tile: what is read and written, around the rules' math."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardfuse.rules import ElementwiseRule, ReducingRule
from shardfuse.rules.base import Group

Scale = float | Tensor | None


class Tile(NamedTuple):
    """Rows of elements that one call reads and writes; None is what it has no need of.

    ``grad`` are tensors in any dtype that add up to the summed gradient, as they came from the
    ranks: adding them here saves a pass over memory.
    """

    grad: tuple[Tensor, ...]
    """Each (rows, n); () where a second pass needs none."""
    p: Tensor | None = None
    """(rows, n), the fp32 master, updated in place."""
    low: Tensor | None = None
    """(rows, n), the parameter itself where it is of lower precision. An edit made to it since the
    last step (by a loaded model, say) wins over the master; the second pass writes it anew."""
    states: tuple[Tensor, ...] = ()
    """Each (rows, n) fp32, updated in place by the first pass."""
    extra: Tensor | None = None
    """The first pass writes sums to it, (k, rows) over rows or (k, rows, n); the second reads
    factors from it, of the same shapes."""


def ascending(scale: Scale, group: Group) -> Scale:
    """Return ``scale``, negated where ``group`` has ``maximize``: descent along -g is ascent.

    Rules then see the negative gradient, as in torch.optim; norms are taken before.
    """
    if not group.get("maximize"):
        return scale
    return -1.0 if scale is None else -scale


def refresh_master(p: Tensor, low: Tensor) -> None:
    """Overwrite elements of ``p`` whose rounding is no longer ``low``.

    Compares bits: a compiler is free to compare without rounding ``p`` first, and then every master
    would lose its low half in each step.
    """
    edited = p.to(low.dtype).view(torch.int16) != low.view(torch.int16)
    torch.where(edited, low.to(p.dtype), p, out=p)


def _mean(grad: tuple[Tensor, ...], scale: Scale, dtype: torch.dtype) -> Tensor:
    g = grad[0].to(dtype)
    for part in grad[1:]:
        g = g + part
    return g if scale is None else g * scale


def only_pass(rule: ElementwiseRule, flags: Any, h: Any, scale: Scale, tile: Tile) -> None:
    """Update a tile by an elementwise rule.

    ``scale``, one factor or (rows, 1), turns the summed gradient into the clipped mean; None is 1.
    """
    p, low = tile.p, tile.low
    assert p is not None
    if low is not None:
        refresh_master(p, low)
    rule.update(flags, h, p, _mean(tile.grad, scale, p.dtype), *tile.states)
    if low is not None:
        low.copy_(p)


def first_pass(rule: ReducingRule, flags: Any, h: Any, scale: Scale, tile: Tile) -> None:
    """Update the states of a tile, and write what is to be summed, if anything is."""
    p, sums = tile.p, tile.extra
    assert p is not None
    if tile.low is not None:
        refresh_master(p, tile.low)
    g = _mean(tile.grad, scale, p.dtype)
    rule.moments(flags, h, p, g, *tile.states)
    if sums is None:
        return
    u = rule.direction(flags, h, p, g, *tile.states)
    for out, product in zip(sums, rule.products(p, g, u), strict=True):
        out.copy_(product.sum(1) if out.dim() == 1 else product)


def second_pass(rule: ReducingRule, flags: Any, h: Any, scale: Scale, tile: Tile) -> None:
    """Update the parameters of a tile along the direction, by its factors."""
    p, factors = tile.p, tile.extra
    assert p is not None
    g = _mean(tile.grad, scale, p.dtype) if tile.grad else None
    if factors is not None and factors.dim() == 2:
        factors = factors[:, :, None]
    rule.apply(flags, h, p, rule.direction(flags, h, p, g, *tile.states), factors)
    if tile.low is not None:
        tile.low.copy_(p)


def square_sum_pass(rule: None, flags: Any, h: Any, scale: Scale, tile: Tile) -> None:
    """Write the row sums of squares of the gradient to ``extra`` (1, rows), in fp32."""
    sums = tile.extra
    assert sums is not None
    g = _mean(tile.grad, scale, sums.dtype)
    sums[0].copy_((g * g).sum(1))
