"""Adam (L2 decay) and AdamW (decoupled decay), as torch.optim and torch_npu compute them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from shardfuse.optim.rules.base import (
    ElementwiseRule,
    Group,
    Scalars,
    as_float,
    check_at_least_zero,
    check_betas,
    divide,
    vanishes,
)


class _Flags(NamedTuple):
    decay: bool
    amsgrad: bool
    guard: bool


class AdamRule(ElementwiseRule):
    """m, v moments of g + weight_decay * p; p -= lr * m_hat / (sqrt(v_hat) + eps).

    amsgrad takes the running maximum of the uncorrected v, as torch does (arXiv 1904.09237).
    """

    def check(self, group: Group) -> None:
        check_at_least_zero(group["lr"], "Invalid learning rate: {}")
        check_at_least_zero(group["eps"], "Invalid epsilon value: {}")
        check_betas(group["betas"])
        check_at_least_zero(group["weight_decay"], "Invalid weight_decay value: {}")

    def state_names(self, group: Group) -> tuple[str, ...]:
        names = ("exp_avg", "exp_avg_sq")
        return (*names, "max_exp_avg_sq") if group["amsgrad"] else names

    def flags(self, group: Group, policy: str) -> _Flags:
        return _Flags(group["weight_decay"] != 0, bool(group["amsgrad"]), vanishes(group["eps"]))

    def scalars(self, group: Group, policy: str, step: int) -> tuple[float, ...]:
        lr = as_float(group["lr"])
        beta1, beta2 = (as_float(beta) for beta in group["betas"])
        weight_decay = as_float(group["weight_decay"])
        return (
            beta1,
            1.0 - beta1,
            beta2,
            1.0 - beta2,
            as_float(group["eps"]),
            weight_decay,
            1.0 - lr * weight_decay,
            lr / (1.0 - beta1**step),
            (1.0 - beta2**step) ** 0.5,
        )

    def decay(self, flags: _Flags, h: Scalars, p: Tensor, g: Tensor) -> Tensor:
        """Return the gradient with L2 decay added."""
        return g + p * h[5] if flags.decay else g

    def update(self, flags: _Flags, h: Scalars, p: Tensor, g: Tensor, *state: Tensor) -> None:
        beta1, take1, beta2, take2, eps, _, _, step_size, root_correction2 = h
        exp_avg, exp_avg_sq = state[:2]
        g = self.decay(flags, h, p, g)
        exp_avg.mul_(beta1).add_(g * take1)
        exp_avg_sq.mul_(beta2).add_(g * g * take2)
        if flags.amsgrad:
            exp_avg_sq = torch.maximum(state[2], exp_avg_sq, out=state[2])
        denominator = exp_avg_sq.sqrt() / root_correction2 + eps
        p.sub_(divide(exp_avg, denominator, guard=flags.guard) * step_size)


class AdamWRule(AdamRule):
    """p *= 1 - lr * weight_decay, then Adam on the raw gradient (arXiv 1711.05101)."""

    def decay(self, flags: _Flags, h: Scalars, p: Tensor, g: Tensor) -> Tensor:
        p.mul_(h[6])
        return g
