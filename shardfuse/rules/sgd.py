"""Stochastic gradient descent with momentum, as torch.optim.SGD and torch_npu's NpuFusedSGD."""

from __future__ import annotations

import math
from typing import ClassVar, NamedTuple

from torch import Tensor

from shardfuse.rules.base import (
    ElementwiseRule,
    Group,
    Settings,
    check_at_least_zero,
    check_lr,
    check_number,
    number,
)


class _Flags(NamedTuple):
    decay: bool
    momentum: bool
    nesterov: bool


class _Scalars(NamedTuple):
    lr: float
    weight_decay: float
    momentum: float
    keep: float
    take: float


class SGDRule(ElementwiseRule):
    """buf = momentum * buf + (1 - dampening) * g (the first time buf = g); p -= lr * buf."""

    counts_steps: ClassVar[bool] = False
    torch_keys: ClassVar[frozenset[str]] = frozenset({"momentum", "dampening", "nesterov"})
    optional_states: ClassVar[tuple[str, ...]] = ("momentum_buffer",)

    def check_values(self, group: Group) -> None:
        check_lr(group)
        check_at_least_zero(group, "momentum", "Invalid momentum value: {}")
        check_at_least_zero(group, "weight_decay", "Invalid weight_decay value: {}")
        check_number(group, "dampening", "Invalid dampening value: {}")
        undamped = math.isclose(number(group["dampening"], "dampening"), 0.0, abs_tol=1e-15)
        if group["nesterov"] and (group["momentum"] <= 0 or not undamped):
            raise ValueError("Nesterov momentum requires a momentum and zero dampening")

    def mismatch(self, saved: Group, group: Group) -> str:
        if not {"alpha", "centered"} <= saved.keys() or not group["momentum"] > 0:
            return ""
        return (
            "RMSprop's momentum is of steps, and SGD's of gradients. Load the model alone, and "
            "begin with new states."
        )

    def state_names(self, group: Group) -> tuple[str, ...]:
        return ("momentum_buffer",) if group["momentum"] != 0 else ()

    def settings(self, group: Group, policy: str, step: int) -> Settings:
        momentum = float(group["momentum"])
        first = step == 1
        h = _Scalars(
            lr=float(group["lr"]),
            weight_decay=float(group["weight_decay"]),
            momentum=momentum,
            keep=0.0 if first else momentum,
            take=1.0 if first else 1.0 - float(group["dampening"]),
        )
        return Settings(_Flags(h.weight_decay != 0, momentum != 0, bool(group["nesterov"])), h)

    def update(self, flags: _Flags, h: _Scalars, p: Tensor, g: Tensor, *state: Tensor) -> None:
        if flags.decay:
            g = g + p * h.weight_decay
        if flags.momentum:
            (buf,) = state
            buf.mul_(h.keep).add_(g * h.take)
            g = g + buf * h.momentum if flags.nesterov else buf
        p.sub_(g * h.lr)
