"""One pass over the tiles of a shard: what is read and written, around the rules' math.

``p`` (rows, n) is the fp32 master, updated in place. ``low`` is the parameter itself where it
is of lower precision, else None: an edit made to it since the last step (by a loaded model, say)
wins over the master, and it is written from the master at the end. ``grad`` are tensors in any
dtype that add up to the summed gradient, as they came from the ranks: adding them here saves a pass
over memory. ``scale``, one factor or (rows, 1), turns it into the clipped mean; None stands for 1.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shardfuse.rules import ElementwiseRule, NormRule, RowRule
from shardfuse.rules.base import Group, Scalars

Scale = float | Tensor | None
Grad = tuple[Tensor, ...]
Tensors = tuple[Tensor | None, ...]


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


def _mean(grad: Grad, scale: Scale, dtype: torch.dtype) -> Tensor:
    g = grad[0].to(dtype)
    for part in grad[1:]:
        g = g + part
    return g if scale is None else g * scale


def elementwise_pass(
    rule: ElementwiseRule, flags: Any, h: Scalars, scale: Scale, grad: Grad, tensors: Tensors
) -> None:
    """Update ``tensors`` = (p, low, *state) by an elementwise rule."""
    p, low, *state = tensors
    assert p is not None
    if low is not None:
        refresh_master(p, low)
    rule.update(flags, h, p, _mean(grad, scale, p.dtype), *state)  # type: ignore[arg-type]
    if low is not None:
        low.copy_(p)


def direction_pass(
    rule: NormRule, flags: Any, h: Scalars, scale: Scale, grad: Grad, tensors: Tensors
) -> None:
    """Update the states of ``tensors`` = (sums or None, p, low, *state) by a norm rule.

    Row sums of the rule's products go into ``sums`` (num_sums, rows).
    """
    sums, p, low, *state = tensors
    assert p is not None
    if low is not None:
        refresh_master(p, low)
    rule.moments(flags, h, p, _mean(grad, scale, p.dtype), *state)  # type: ignore[arg-type]
    if sums is not None:
        u = rule.direction(flags, h, p, *state)  # type: ignore[arg-type]
        for row, product in zip(sums, rule.products(p, u), strict=True):
            row.copy_(product.sum(1))


def apply_pass(
    rule: NormRule, flags: Any, h: Scalars, scale: Scale, grad: Grad, tensors: Tensors
) -> None:
    """Update ``tensors`` = (ratio or None, p, low, *state) along the direction of a norm rule.

    ``ratio`` is (rows,). The direction is computed again from the moments: reading them costs no
    more than reading a stored direction would, and no buffer is needed.
    """
    ratio, p, low, *state = tensors
    assert p is not None
    u = rule.direction(flags, h, p, *state)  # type: ignore[arg-type]
    rule.apply(h, p, u, None if ratio is None else ratio[:, None])
    if low is not None:
        low.copy_(p)


def row_direction_pass(
    rule: RowRule, flags: Any, h: Scalars, scale: Scale, grad: Grad, tensors: Tensors
) -> None:
    """Update the states of ``tensors`` = (products or None, p, low, *state) by a row rule.

    ``products`` (num_sums, rows, n) takes the rule's products, element by element.
    """
    products, p, low, *state = tensors
    assert p is not None
    if low is not None:
        refresh_master(p, low)
    g = _mean(grad, scale, p.dtype)
    rule.moments(flags, h, p, g, *state)  # type: ignore[arg-type]
    if products is not None:
        u = rule.direction(flags, h, g, *state)  # type: ignore[arg-type]
        for out, product in zip(products, rule.products(p, g, u), strict=True):
            out.copy_(product)


def row_apply_pass(
    rule: RowRule, flags: Any, h: Scalars, scale: Scale, grad: Grad, tensors: Tensors
) -> None:
    """Update ``tensors`` = (factors or None, p, low, *state) by a row rule; grad may be ()."""
    factors, p, low, *state = tensors
    assert p is not None
    g = _mean(grad, scale, p.dtype) if grad else None
    u = rule.direction(flags, h, g, *state)  # type: ignore[arg-type]
    rule.apply(flags, h, p, u, factors)
    if low is not None:
        low.copy_(p)


def square_sum_pass(
    rule: None, flags: Any, h: Scalars, scale: Scale, grad: Grad, tensors: Tensors
) -> None:
    """Write the row sums of squares of ``grad`` into ``tensors`` = (sums (rows,),), in fp32."""
    (sums,) = tensors
    assert sums is not None
    g = _mean(grad, scale, sums.dtype)
    sums.copy_((g * g).sum(1))
