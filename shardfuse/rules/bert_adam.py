"""BertAdam: Adam without bias correction, decoupled decay, own schedule and clipping."""

from __future__ import annotations

import math
from typing import ClassVar, NamedTuple

from torch import Tensor

from shardfuse.rules.base import (
    LARGEST,
    Clip,
    ElementwiseRule,
    Group,
    Settings,
    check_at_least_zero,
    check_lr,
    check_number,
    divide,
    number,
    update_moments,
    vanishes,
    with_takes,
)
from shardfuse.rules.schedules import SCHEDULES


class _Flags(NamedTuple):
    decay: bool
    guard: bool


class _Scalars(NamedTuple):
    beta1: float
    take1: float
    beta2: float
    take2: float
    eps: float
    weight_decay: float
    lr: float


class BertAdamRule(ElementwiseRule):
    """m, v moments of g; p -= lr_t * (m / (sqrt(v) + e) + weight_decay * p).

    Source: torch_npu's NpuFusedBertAdam. lr_t is read at the 0-based step: with a warm-up the first
    update has lr 0. Gradients are first clipped to max_grad_norm per (group, dtype); each group's
    own max_grad_norm counts, where upstream uses the constructor's for all.
    """

    torch_keys: ClassVar[frozenset[str]] = frozenset({"decoupled_weight_decay"})
    squares: ClassVar[frozenset[str]] = frozenset({"exp_avg_sq"})

    def check_values(self, group: Group) -> None:
        check_lr(group)
        warmup = number(group["warmup"], "warmup")
        if not (warmup == -1 or 0.0 <= warmup < 1.0):
            raise ValueError(f"Invalid warmup: {group['warmup']}")
        schedule = group["schedule"]
        if not isinstance(schedule, str) or schedule not in SCHEDULES:
            raise ValueError(f"Invalid schedule parameter: {schedule}")
        for name in ("b1", "b2"):
            if not 0.0 <= number(group[name], name) < 1.0:
                raise ValueError(f"Invalid {name} parameter: {group[name]}")
        check_at_least_zero(group, "e", "Invalid epsilon value: {}")
        check_number(group, "weight_decay", "Invalid weight_decay value: {}")
        message = "Invalid max_grad_norm value: {}"
        check_number(group, "max_grad_norm", message, at_most=math.inf)
        t_total = number(group["t_total"], "t_total")
        if not (t_total == -1 or 0 < t_total <= LARGEST):
            raise ValueError(f"Invalid t_total: {group['t_total']}. Must be > 0 steps, or -1.")

    def state_names(self, group: Group) -> tuple[str, ...]:
        return ("exp_avg", "exp_avg_sq")

    def settings(self, group: Group, policy: str, step: int) -> Settings:
        lr = float(group["lr"])
        if group["t_total"] != -1:
            schedule = SCHEDULES[group["schedule"]]
            lr *= schedule((step - 1) / float(group["t_total"]), float(group["warmup"]))
        b1, b2 = float(group["b1"]), float(group["b2"])
        h = _Scalars(
            *with_takes(b1, b2),
            eps=float(group["e"]),
            weight_decay=float(group["weight_decay"]),
            lr=lr,
        )
        max_norm = float(group["max_grad_norm"])
        clip = Clip(max_norm, "flat", eps=1e-6) if max_norm > 0 else None
        return Settings(_Flags(h.weight_decay > 0, vanishes(h.eps)), h, clip)

    def update(self, flags: _Flags, h: _Scalars, p: Tensor, g: Tensor, *state: Tensor) -> None:
        exp_avg, exp_avg_sq = state
        update_moments(h, g, exp_avg, exp_avg_sq)
        u = divide(exp_avg, exp_avg_sq.sqrt() + h.eps, guard=flags.guard)
        if flags.decay:
            u += p * h.weight_decay
        p.sub_(u * h.lr)
