"""Adadelta (arXiv 1212.5701), as torch.optim and torch_npu compute it."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from shardfuse.rules.base import (
    ElementwiseRule,
    Group,
    Scalars,
    as_float,
    check_at_least_zero,
    divide,
    number,
    vanishes,
)


class _Flags(NamedTuple):
    decay: bool
    guard: bool


class AdadeltaRule(ElementwiseRule):
    """d = g * sqrt(acc + eps) / sqrt(s + eps); p -= lr * d; s, acc averages of g^2 and d^2.

    g has weight_decay * p added; acc is the one before the step.
    """

    def check_values(self, group: Group) -> None:
        check_at_least_zero(group, "lr", "Invalid learning rate: {}")
        if not 0.0 <= number(group["rho"], "rho") <= 1.0:
            raise ValueError(f"Invalid rho value: {group['rho']}")
        check_at_least_zero(group, "eps", "Invalid epsilon value: {}")
        check_at_least_zero(group, "weight_decay", "Invalid weight_decay value: {}")

    def state_names(self, group: Group) -> tuple[str, ...]:
        return ("square_avg", "acc_delta")

    def flags(self, group: Group, policy: str) -> _Flags:
        return _Flags(group["weight_decay"] != 0, vanishes(group["eps"]))

    def scalars(self, group: Group, policy: str, step: int) -> tuple[float, ...]:
        rho = as_float(group["rho"])
        return (
            as_float(group["lr"]),
            rho,
            1.0 - rho,
            as_float(group["eps"]),
            as_float(group["weight_decay"]),
        )

    def update(self, flags: _Flags, h: Scalars, p: Tensor, g: Tensor, *state: Tensor) -> None:
        lr, rho, take, eps, weight_decay = h
        square_avg, acc_delta = state
        if flags.decay:
            g = g + p * weight_decay
        square_avg.mul_(rho).add_(g * g * take)
        root = (acc_delta + eps).sqrt_()
        delta = divide(root, (square_avg + eps).sqrt_(), guard=flags.guard).mul_(g)
        acc_delta.mul_(rho).add_(delta * delta * take)
        p.sub_(delta * lr)
