"""Adadelta (arXiv 1212.5701), as torch.optim and torch_npu compute it."""

from __future__ import annotations

from typing import ClassVar, NamedTuple

from torch import Tensor

from shardfuse.rules.base import (
    ElementwiseRule,
    Group,
    Settings,
    check_at_least_zero,
    check_lr,
    divide,
    number,
    vanishes,
)


class _Flags(NamedTuple):
    decay: bool
    guard: bool


class _Scalars(NamedTuple):
    lr: float
    rho: float
    take: float
    eps: float
    weight_decay: float


class AdadeltaRule(ElementwiseRule):
    """d = g * sqrt(acc + eps) / sqrt(s + eps); p -= lr * d; s, acc averages of g^2 and d^2.

    g has weight_decay * p added; acc is the one before the step.
    """

    squares: ClassVar[frozenset[str]] = frozenset({"square_avg", "acc_delta"})

    def check_values(self, group: Group) -> None:
        check_lr(group)
        if not 0.0 <= number(group["rho"], "rho") <= 1.0:
            raise ValueError(f"Invalid rho value: {group['rho']}")
        check_at_least_zero(group, "eps", "Invalid epsilon value: {}")
        check_at_least_zero(group, "weight_decay", "Invalid weight_decay value: {}")

    def state_names(self, group: Group) -> tuple[str, ...]:
        return ("square_avg", "acc_delta")

    def settings(self, group: Group, policy: str, step: int) -> Settings:
        rho = float(group["rho"])
        h = _Scalars(
            lr=float(group["lr"]),
            rho=rho,
            take=1.0 - rho,
            eps=float(group["eps"]),
            weight_decay=float(group["weight_decay"]),
        )
        return Settings(_Flags(h.weight_decay != 0, vanishes(h.eps)), h)

    def update(self, flags: _Flags, h: _Scalars, p: Tensor, g: Tensor, *state: Tensor) -> None:
        square_avg, acc_delta = state
        if flags.decay:
            g = g + p * h.weight_decay
        square_avg.mul_(h.rho).add_(g * g * h.take)
        root = (acc_delta + h.eps).sqrt_()
        delta = divide(root, (square_avg + h.eps).sqrt_(), guard=flags.guard).mul_(g)
        acc_delta.mul_(h.rho).add_(delta * delta * h.take)
        p.sub_(delta * h.lr)
