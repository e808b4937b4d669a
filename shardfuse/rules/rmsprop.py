"""RMSprop as torch.optim computes it, and RMSpropTF, which follows TensorFlow."""

from __future__ import annotations

from typing import ClassVar, NamedTuple

from torch import Tensor

from shardfuse.rules.base import (
    ElementwiseRule,
    Group,
    Scalars,
    as_float,
    check_at_least_zero,
    divide,
    vanishes,
)


class _Flags(NamedTuple):
    decay: bool
    momentum: bool
    centered: bool
    guard: bool
    decoupled: bool = False
    lr_in_momentum: bool = False


class RMSpropRule(ElementwiseRule):
    """s average of g^2; buf = momentum * buf + g / (sqrt(s) + eps); p -= lr * buf.

    g has weight_decay * p added. With ``centered``, s - a^2 stands for s, a the average of g.
    """

    torch_keys: ClassVar[frozenset[str]] = frozenset({"momentum", "centered"})

    def check_values(self, group: Group) -> None:
        check_at_least_zero(group, "lr", "Invalid learning rate: {}")
        check_at_least_zero(group, "eps", "Invalid epsilon value: {}")
        check_at_least_zero(group, "momentum", "Invalid momentum value: {}")
        check_at_least_zero(group, "weight_decay", "Invalid weight_decay value: {}")
        check_at_least_zero(group, "alpha", "Invalid alpha value: {}")

    def state_names(self, group: Group) -> tuple[str, ...]:
        names = ["square_avg"]
        if group["momentum"] > 0:
            names.append("momentum_buffer")
        if group["centered"]:
            names.append("grad_avg")
        return tuple(names)

    def flags(self, group: Group, policy: str) -> _Flags:
        return _Flags(
            decay=group["weight_decay"] != 0,
            momentum=group["momentum"] > 0,
            centered=bool(group["centered"]),
            guard=vanishes(group["eps"]),
        )

    def scalars(self, group: Group, policy: str, step: int) -> tuple[float, ...]:
        alpha = as_float(group["alpha"])
        return (
            as_float(group["lr"]),
            alpha,
            1.0 - alpha,
            as_float(group["eps"]),
            as_float(group["weight_decay"]),
            as_float(group["momentum"]),
        )

    def update(self, flags: _Flags, h: Scalars, p: Tensor, g: Tensor, *state: Tensor) -> None:
        lr, alpha, take, eps, weight_decay, momentum = h
        square_avg = state[0]
        if flags.decay:
            g = g + p * weight_decay
        square_avg.mul_(alpha).add_(g * g * take)
        if flags.centered:
            grad_avg = state[-1]
            grad_avg.mul_(alpha).add_(g * take)
            square_avg = square_avg - grad_avg * grad_avg
        u = divide(g, square_avg.sqrt() + eps, guard=flags.guard)
        if flags.momentum:
            u = state[1].mul_(momentum).add_(u)
        p.sub_(u * lr)


class RMSpropTFRule(RMSpropRule):
    """RMSprop with s from 1, eps inside the root, and lr inside the momentum.

    Source: torch_npu's NpuFusedRMSpropTF. Decoupled decay is p -= weight_decay * p, without lr.
    """

    def initial(self, name: str) -> float:
        return 1.0 if name == "square_avg" else 0.0

    def flags(self, group: Group, policy: str) -> _Flags:
        return (
            super()
            .flags(group, policy)
            ._replace(
                decoupled=bool(group["decoupled_decay"]),
                lr_in_momentum=bool(group["lr_in_momentum"]),
            )
        )

    def update(self, flags: _Flags, h: Scalars, p: Tensor, g: Tensor, *state: Tensor) -> None:
        lr, _, take, eps, weight_decay, momentum = h
        square_avg = state[0]
        if flags.decay and flags.decoupled:
            p.sub_(p * weight_decay)
        elif flags.decay:
            g = g + p * weight_decay
        square_avg.add_((g * g - square_avg) * take)
        if flags.centered:
            grad_avg = state[-1]
            grad_avg.add_((g - grad_avg) * take)
            square_avg = square_avg - grad_avg * grad_avg
        u = divide(g, (square_avg + eps).sqrt(), guard=flags.guard)
        if flags.momentum and flags.lr_in_momentum:
            p.sub_(state[1].mul_(momentum).add_(u * lr))
        elif flags.momentum:
            p.sub_(state[1].mul_(momentum).add_(u) * lr)
        else:
            p.sub_(u * lr)
