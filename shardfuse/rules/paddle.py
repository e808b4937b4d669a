"""The rule behind optim.paddle.Lamb: LAMB's own, with what Paddle lets every group have."""

from __future__ import annotations

from typing import Any, ClassVar, Literal, NamedTuple

from torch import Tensor

from shardfuse.rules.base import (
    Clip,
    Group,
    Scalars,
    as_float,
    check_at_least_zero,
    check_number,
)
from shardfuse.rules.lamb import NO_DECAY, LambRule, switches_for

ClipKind = Literal["global_norm", "norm", "value"]
GroupClip = tuple[ClipKind, float, float]
"""A group's clip in plain values, as state dicts hold it: (kind, bound, lower bound of values)."""


class _Flags(NamedTuple):
    decay: bool
    guard: bool
    bounded: bool
    regularized: bool


class PaddleLambRule(LambRule):
    """Variant "paddle" of LambRule on g' = clip(g) + l2 * p, at the rate lr * lr_scale.

    Beside LambRule's, groups have ``lr_scale``, ``l2`` and ``grad_clip``, a GroupClip or None. The
    trust ratio is taken where the decay is above 0, or everywhere with ``always_adapt``.
    """

    counts_in_groups: ClassVar[bool] = False
    _adapt_again: ClassVar[str] = (
        "Set lamb_weight_decay above 0, or always_adapt=True; or use ShardedAdam"
    )
    _leave_out: ClassVar[str] = (
        "give exclude_from_weight_decay_fn=lambda param: param.dim() < 2; or put them in a group "
        "with lamb_weight_decay=0"
    )

    def __init__(self, *, always_adapt: bool) -> None:
        super().__init__(switches_for("paddle", always_adapt=always_adapt))
        self.undecayed: set[str] = set()  # names of parameters; filled before policy() is asked

    def check_values(self, group: Group) -> None:
        super().check_values(group)
        if group.get("maximize"):
            raise ValueError(
                "Invalid maximize=True in a group: Paddle's Lamb has no such key, and its clips "
                "are of the gradient as it is. Negate the loss, or use "
                "ShardedLamb(variant='paddle')."
            )
        check_at_least_zero(group, "lr_scale", "Invalid learning_rate of a group: {}")
        check_number(group, "l2", "Invalid weight_decay value: {}")

    def policy(self, name: str, named: bool, group: Group) -> str:
        return NO_DECAY if name in self.undecayed else ""

    def adapts(self, group: Group, policy: str) -> bool:
        return self.switches.always_adapt or self._weight_decay(group, policy) > 0

    def flags(self, group: Group, policy: str) -> _Flags:
        decay, guard = super().flags(group, policy)[:2]
        return _Flags(decay, guard, _kind(group) == "value", as_float(group["l2"]) != 0)

    def scalars(self, group: Group, policy: str, step: int) -> tuple[float, ...]:
        rate = as_float(group["lr"]) * as_float(group["lr_scale"])
        _, upper, lower = group["grad_clip"] or ("", 0.0, 0.0)
        own = (as_float(group["l2"]), lower, upper)
        return super().scalars({**group, "lr": rate}, policy, step) + own

    def clip(self, group: Group) -> Clip | None:
        kind = _kind(group)
        if kind is None or kind == "value":
            return None
        return Clip(group["grad_clip"][1], "tensor" if kind == "norm" else "group")

    def moments(self, flags: Any, h: Scalars, p: Tensor, g: Tensor, *state: Tensor) -> None:
        l2, lower, upper = h[9:]
        if flags.bounded:
            g = g.clamp(lower, upper)  # type: ignore[arg-type]
        if flags.regularized:
            g = g + p * l2
        super().moments(flags, h, p, g, *state)


def _kind(group: Group) -> ClipKind | None:
    clip: GroupClip | None = group["grad_clip"]
    return None if clip is None else clip[0]
