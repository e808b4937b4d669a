"""RMSprop as torch.optim computes it, and RMSpropTF, which follows TensorFlow."""

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
    vanishes,
)


class _Flags(NamedTuple):
    decay: bool
    momentum: bool
    centered: bool
    guard: bool
    decoupled: bool = False
    lr_in_momentum: bool = False


class _Scalars(NamedTuple):
    lr: float
    alpha: float
    take: float
    eps: float
    weight_decay: float
    momentum: float


class RMSpropRule(ElementwiseRule):
    """s average of g^2; buf = momentum * buf + g / (sqrt(s) + eps); p -= lr * buf.

    g has weight_decay * p added. With ``centered``, s - a^2 stands for s, a the average of g.
    """

    torch_keys: ClassVar[frozenset[str]] = frozenset({"momentum", "centered"})
    optional_states: ClassVar[tuple[str, ...]] = ("momentum_buffer", "grad_avg")
    squares: ClassVar[frozenset[str]] = frozenset({"square_avg"})

    def check_values(self, group: Group) -> None:
        check_lr(group)
        check_at_least_zero(group, "eps", "Invalid epsilon value: {}")
        check_at_least_zero(group, "momentum", "Invalid momentum value: {}")
        check_at_least_zero(group, "weight_decay", "Invalid weight_decay value: {}")
        check_at_least_zero(group, "alpha", "Invalid alpha value: {}")
        effects = {
            "lr_in_momentum": group["momentum"] > 0,
            "decoupled_decay": group["weight_decay"] != 0,
        }
        for key, has_effect in effects.items():
            if has_effect and group.get(key) and key not in self.torch_keys:
                raise ValueError(
                    f"Invalid {key}={group[key]!r} in a parameter group: RMSprop has no {key} and "
                    "would ignore it. Use ShardedRMSpropTF; or load the model alone, and begin "
                    "with new states."
                )

    def state_names(self, group: Group) -> tuple[str, ...]:
        names = ["square_avg"]
        if group["momentum"] > 0:
            names.append("momentum_buffer")
        if group["centered"]:
            names.append("grad_avg")
        return tuple(names)

    def settings(self, group: Group, policy: str, step: int) -> Settings:
        alpha = float(group["alpha"])
        h = _Scalars(
            lr=float(group["lr"]),
            alpha=alpha,
            take=1.0 - alpha,
            eps=float(group["eps"]),
            weight_decay=float(group["weight_decay"]),
            momentum=float(group["momentum"]),
        )
        return Settings(self._flags(group), h)

    def _flags(self, group: Group) -> _Flags:
        return _Flags(
            decay=group["weight_decay"] != 0,
            momentum=group["momentum"] > 0,
            centered=bool(group["centered"]),
            guard=vanishes(group["eps"]),
        )

    def update(self, flags: _Flags, h: _Scalars, p: Tensor, g: Tensor, *state: Tensor) -> None:
        square_avg = state[0]
        if flags.decay:
            g = g + p * h.weight_decay
        square_avg.mul_(h.alpha).add_(g * g * h.take)
        if flags.centered:
            grad_avg = state[-1]
            grad_avg.mul_(h.alpha).add_(g * h.take)
            square_avg = square_avg - grad_avg * grad_avg
        u = divide(g, square_avg.sqrt() + h.eps, guard=flags.guard)
        if flags.momentum:
            u = state[1].mul_(h.momentum).add_(u)
        p.sub_(u * h.lr)


class RMSpropTFRule(RMSpropRule):
    """RMSprop with s from 1, eps inside the root, and lr inside the momentum.

    Source: torch_npu's NpuFusedRMSpropTF. Decoupled decay is p -= weight_decay * p, without lr.
    """

    torch_keys: ClassVar[frozenset[str]] = RMSpropRule.torch_keys | {
        "lr_in_momentum",
        "decoupled_decay",
    }

    def mismatch(self, saved: Group, group: Group) -> str:
        is_of_rmsprop = "lr_in_momentum" not in saved
        if not is_of_rmsprop or not group["lr_in_momentum"] or not group["momentum"] > 0:
            return ""
        return (
            "RMSprop's momentum has no lr in it. Build RMSpropTF with lr_in_momentum=False; or "
            "load the model alone, and begin with new states."
        )

    def initial(self, name: str) -> float:
        return 1.0 if name == "square_avg" else 0.0

    def _flags(self, group: Group) -> _Flags:
        flags = super()._flags(group)
        return flags._replace(
            decoupled=bool(group["decoupled_decay"]),
            lr_in_momentum=bool(group["lr_in_momentum"]),
        )

    def update(self, flags: _Flags, h: _Scalars, p: Tensor, g: Tensor, *state: Tensor) -> None:
        square_avg = state[0]
        if flags.decay and flags.decoupled:
            p.sub_(p * h.weight_decay)
        elif flags.decay:
            g = g + p * h.weight_decay
        square_avg.add_((g * g - square_avg) * h.take)
        if flags.centered:
            grad_avg = state[-1]
            grad_avg.add_((g - grad_avg) * h.take)
            square_avg = square_avg - grad_avg * grad_avg
        u = divide(g, (square_avg + h.eps).sqrt(), guard=flags.guard)
        if flags.momentum and flags.lr_in_momentum:
            p.sub_(state[1].mul_(h.momentum).add_(u * h.lr))
        elif flags.momentum:
            p.sub_(state[1].mul_(h.momentum).add_(u) * h.lr)
        else:
            p.sub_(u * h.lr)
