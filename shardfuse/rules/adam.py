"""Adam (L2 decay) and AdamW (decoupled decay), as torch.optim and torch_npu compute them."""

from __future__ import annotations

from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from shardfuse.rules.base import (
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
    decoupled: bool
    amsgrad: bool
    guard: bool


class AdamRule(ElementwiseRule):
    """m, v moments of g + weight_decay * p; p -= lr * m_hat / (sqrt(v_hat) + eps).

    amsgrad takes the running maximum of the uncorrected v, as torch does (arXiv 1904.09237). With
    ``decoupled_weight_decay``, p *= 1 - lr * weight_decay in place of the L2 term (arXiv
    1711.05101); the key need not be in a group.
    """

    torch_keys: ClassVar[frozenset[str]] = frozenset({"amsgrad", "decoupled_weight_decay"})

    def check_values(self, group: Group) -> None:
        check_at_least_zero(group, "lr", "Invalid learning rate: {}")
        check_at_least_zero(group, "eps", "Invalid epsilon value: {}")
        check_betas(group)
        check_at_least_zero(group, "weight_decay", "Invalid weight_decay value: {}")

    def state_names(self, group: Group) -> tuple[str, ...]:
        names = ("exp_avg", "exp_avg_sq")
        return (*names, "max_exp_avg_sq") if group["amsgrad"] else names

    def flags(self, group: Group, policy: str) -> _Flags:
        return _Flags(
            group["weight_decay"] != 0,
            self.is_decoupled(group),
            bool(group["amsgrad"]),
            vanishes(group["eps"]),
        )

    def is_decoupled(self, group: Group) -> bool:
        """Return whether the decay is of the parameter itself, not of its gradient."""
        return bool(group.get("decoupled_weight_decay", False))

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

    def update(self, flags: _Flags, h: Scalars, p: Tensor, g: Tensor, *state: Tensor) -> None:
        beta1, take1, beta2, take2, eps, weight_decay, shrink, step_size, root_correction2 = h
        exp_avg, exp_avg_sq = state[:2]
        if flags.decoupled:
            p.mul_(shrink)
        elif flags.decay:
            g = g + p * weight_decay
        exp_avg.mul_(beta1).add_(g * take1)
        exp_avg_sq.mul_(beta2).add_(g * g * take2)
        if flags.amsgrad:
            exp_avg_sq = torch.maximum(state[2], exp_avg_sq, out=state[2])
        denominator = exp_avg_sq.sqrt() / root_correction2 + eps
        p.sub_(divide(exp_avg, denominator, guard=flags.guard) * step_size)


class AdamWRule(AdamRule):
    """p *= 1 - lr * weight_decay, then Adam on the raw gradient (arXiv 1711.05101)."""

    def check_values(self, group: Group) -> None:
        super().check_values(group)
        if not group.get("decoupled_weight_decay", True):
            raise ValueError(
                "Invalid decoupled_weight_decay=False in a parameter group: AdamW always decouples "
                "its decay. Use ShardedAdam; or, to go on as AdamW from a dict of Adam's, set the "
                "key to True in its param_groups."
            )

    def is_decoupled(self, group: Group) -> bool:
        return True
