"""AdamP: Adam without the part of the step along the weights (arXiv 2006.08217)."""

from __future__ import annotations

import math
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from shardfuse.rules.base import (
    Group,
    Product,
    RowRule,
    Rows,
    Settings,
    add_,
    add_product_,
    check_at_least_zero,
    check_betas,
    divide,
    learning_rate,
    update_moments,
    vanishes,
    with_takes,
)


class _Flags(NamedTuple):
    decay: bool
    nesterov: bool
    guard: bool


class _Scalars(NamedTuple):
    beta1: float
    take1: float
    beta2: float
    take2: float
    eps: float  # times the root of v's bias correction, as step_size is: u is without it
    decay: float
    step_size: float


class AdamPRule(RowRule):
    """m, v moments of g; u = m / (sqrt(v_hat) + eps), projected off p where g is nearly normal.

    Nearly normal is |cos(g, p)| < delta / sqrt(n), of all rows (channels) of n elements, or else of
    the whole tensor. There u -= p * <p, u> / (|p| + eps)^2, per row or whole, and the decay is
    wd_ratio times weaker. p *= 1 - lr * weight_decay; p -= lr / (1 - beta1^t) * u.
    """

    torch_keys: ClassVar[frozenset[str]] = frozenset({"nesterov", "decoupled_weight_decay"})
    squares: ClassVar[frozenset[str]] = frozenset({"exp_avg_sq"})
    num_sums: ClassVar[int] = 4
    neutral: ClassVar[tuple[float, ...]] = (0.0, 1.0)

    def check_values(self, group: Group) -> None:
        check_betas(group)
        check_at_least_zero(group, "eps", "Invalid epsilon value: {}")
        check_at_least_zero(group, "weight_decay", "Invalid weight_decay value: {}")
        check_at_least_zero(group, "delta", "Invalid delta value: {}", at_most=math.inf)
        check_at_least_zero(group, "wd_ratio", "Invalid wd_ratio value: {}")

    def state_names(self, group: Group) -> tuple[str, ...]:
        return ("exp_avg", "exp_avg_sq")

    def settings(self, group: Group, policy: str, step: int) -> Settings:
        lr = learning_rate(group)
        beta1, beta2 = (float(beta) for beta in group["betas"])
        nesterov = bool(group["nesterov"])
        root_correction2 = (1.0 - beta2**step) ** 0.5
        h = _Scalars(
            *with_takes(beta1, beta2),
            eps=float(group["eps"]) * root_correction2,
            decay=lr * float(group["weight_decay"]),
            step_size=lr * (root_correction2 / (1.0 - beta1**step)),
        )
        flags = _Flags(group["weight_decay"] > 0, nesterov, vanishes(h.eps))
        return Settings(flags, h, keeps_gradient=nesterov)

    def moments(self, flags: _Flags, h: _Scalars, p: Tensor, g: Tensor, *state: Tensor) -> None:
        update_moments(h, g, *state)

    def direction(
        self, flags: _Flags, h: _Scalars, p: Tensor, g: Tensor | None, *state: Tensor
    ) -> Tensor:
        exp_avg, exp_avg_sq = state
        if flags.nesterov:
            assert g is not None
            exp_avg = exp_avg.lerp(g, h.take1)
        return divide(exp_avg, exp_avg_sq.sqrt().add_(h.eps), guard=flags.guard)

    def products(self, p: Tensor, g: Tensor, u: Tensor) -> tuple[Product, ...]:
        return (p, p), (g, g), (p, g), (p, u)

    def factors(self, group: Group, sums: Tensor, rows: Rows) -> Tensor:
        eps, delta = float(group["eps"]), float(group["delta"])
        whole = torch.stack([part.sum(1) for part in torch.split(sums, rows.counts, 1)], dim=1)
        row_cos, row_along = _cosine(sums, eps)
        cos, along = _cosine(whole, eps)
        worst = torch.stack([part.max() for part in torch.split(row_cos, rows.counts)])
        by_row = worst < delta * rows.row_numel.rsqrt()
        by_tensor = ~by_row & (cos < delta * rows.numel.rsqrt())
        projected = torch.where(by_row[rows.owner], row_along, along[rows.owner])
        projects = (by_row | by_tensor)[rows.owner]
        return torch.stack(
            [
                torch.where(projects, projected, torch.zeros_like(projected)),
                torch.where(projects, float(group["wd_ratio"]), torch.ones_like(projected)),
            ]
        )

    def apply(
        self, flags: _Flags, h: _Scalars, p: Tensor, u: Tensor, factors: Tensor | None
    ) -> None:
        if factors is None:
            if flags.decay:
                p.mul_(1.0 - h.decay)
        else:
            u = u.addcmul(p, factors[0], value=-1.0)
            if flags.decay:
                add_product_(p, p, factors[1], -h.decay)
        add_(p, u, -h.step_size)


def _cosine(sums: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return |cos(g, p)| and <p, u> / (|p| + eps)^2 from sums of p^2, g^2, p g, p u."""
    p_norm, g_norm = sums[0].sqrt() + eps, sums[1].sqrt() + eps
    cos = divide(divide(sums[2].abs(), p_norm, guard=True), g_norm, guard=True)
    return cos, divide(divide(sums[3], p_norm, guard=True), p_norm, guard=True)
