"""Adam (L2 decay) and AdamW (decoupled decay), as torch.optim and torch_npu compute them."""

from __future__ import annotations

from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from shardfuse.rules.base import (
    ElementwiseRule,
    Group,
    Settings,
    check_at_least_zero,
    check_betas,
    check_lr,
    divide,
    update_moments,
    vanishes,
    with_takes,
)


class _Flags(NamedTuple):
    decay: bool
    decoupled: bool
    amsgrad: bool
    guard: bool


class _Scalars(NamedTuple):
    beta1: float
    take1: float
    beta2: float
    take2: float
    eps: float
    weight_decay: float
    shrink: float
    step_size: float
    root_correction2: float


class AdamRule(ElementwiseRule):
    """m, v moments of g + weight_decay * p; p -= lr * m_hat / (sqrt(v_hat) + eps).

    amsgrad takes the running maximum of the uncorrected v, as torch does (arXiv 1904.09237). With
    ``decoupled_weight_decay``, p *= 1 - lr * weight_decay in place of the L2 term (arXiv
    1711.05101); the key need not be in a group.
    """

    torch_keys: ClassVar[frozenset[str]] = frozenset({"amsgrad", "decoupled_weight_decay"})
    optional_states: ClassVar[tuple[str, ...]] = ("max_exp_avg_sq",)
    squares: ClassVar[frozenset[str]] = frozenset({"exp_avg_sq", "max_exp_avg_sq"})

    def check_values(self, group: Group) -> None:
        check_lr(group)
        check_at_least_zero(group, "eps", "Invalid epsilon value: {}")
        check_betas(group)
        check_at_least_zero(group, "weight_decay", "Invalid weight_decay value: {}")

    def state_names(self, group: Group) -> tuple[str, ...]:
        names = ("exp_avg", "exp_avg_sq")
        return (*names, "max_exp_avg_sq") if group["amsgrad"] else names

    def is_decoupled(self, group: Group) -> bool:
        """Return whether the decay is of the parameter itself, not of its gradient."""
        return bool(group.get("decoupled_weight_decay", False))

    def settings(self, group: Group, policy: str, step: int) -> Settings:
        lr = float(group["lr"])
        beta1, beta2 = (float(beta) for beta in group["betas"])
        weight_decay = float(group["weight_decay"])
        flags = _Flags(
            decay=weight_decay != 0,
            decoupled=self.is_decoupled(group),
            amsgrad=bool(group["amsgrad"]),
            guard=vanishes(group["eps"]),
        )
        h = _Scalars(
            *with_takes(beta1, beta2),
            eps=float(group["eps"]),
            weight_decay=weight_decay,
            shrink=1.0 - lr * weight_decay,
            step_size=lr / (1.0 - beta1**step),
            root_correction2=(1.0 - beta2**step) ** 0.5,
        )
        return Settings(flags, h)

    def update(self, flags: _Flags, h: _Scalars, p: Tensor, g: Tensor, *state: Tensor) -> None:
        exp_avg, exp_avg_sq = state[:2]
        if flags.decoupled:
            p.mul_(h.shrink)
        elif flags.decay:
            g = g + p * h.weight_decay
        update_moments(h, g, exp_avg, exp_avg_sq)
        if flags.amsgrad:
            exp_avg_sq = torch.maximum(state[2], exp_avg_sq, out=state[2])
        denominator = exp_avg_sq.sqrt() / h.root_correction2 + h.eps
        p.sub_(divide(exp_avg, denominator, guard=flags.guard) * h.step_size)


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
