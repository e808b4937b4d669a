"""The rule behind optim.paddle.Lamb: LAMB's own, with what Paddle lets every group have."""

from __future__ import annotations

import reprlib
from typing import Any, ClassVar, Literal, get_args

from torch import Tensor

from shardfuse.rules.base import (
    Clip,
    Group,
    Settings,
    check_at_least_zero,
    check_number,
    number,
)
from shardfuse.rules.lamb import NO_DECAY, LambFlags, LambRule, LambScalars, switches_for

ClipKind = Literal["global_norm", "norm", "value"]
GroupClip = tuple[ClipKind, float, float]
"""A group's clip in plain values, as state dicts hold it: (kind, bound, lower bound of values)."""


def _check_clip(clip: Any) -> None:
    """Raise unless ``clip`` is a GroupClip that a clip of Paddle's may have become, or None."""
    if clip is None:
        return
    if not isinstance(clip, tuple) or len(clip) != 3 or clip[0] not in get_args(ClipKind):
        raise ValueError(
            f"Invalid grad_clip: {reprlib.repr(clip)}. Must be (kind, bound, lower bound), with "
            f"one of {get_args(ClipKind)}, or None."
        )
    kind, upper, lower = clip[0], number(clip[1], "grad_clip"), number(clip[2], "grad_clip")
    if not (lower <= 0 <= upper and lower < upper) or (kind != "value" and lower != 0):
        raise ValueError(f"Invalid bounds of grad_clip: [{lower}, {upper}]. 0 must lie between.")


class PaddleLambRule(LambRule):
    """Variant "paddle" of LambRule on g' = clip(g) + l2 * p, at the rate lr * lr_scale.

    Beside LambRule's, groups have ``lr_scale``, ``l2`` and ``grad_clip``, a GroupClip or None. The
    trust ratio is taken where the decay is above 0, or everywhere with ``always_adapt``.
    """

    counts_in_groups: ClassVar[bool] = False
    torch_keys: ClassVar[frozenset[str]] = LambRule.torch_keys | {"lr_scale", "l2", "grad_clip"}
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
        _check_clip(group["grad_clip"])

    def policy(self, name: str, named: bool, group: Group) -> str:
        return NO_DECAY if name in self.undecayed else ""

    def _adapts(self, group: Group, policy: str) -> bool:
        return self.switches.always_adapt or self._weight_decay(group, policy) > 0

    def settings(self, group: Group, policy: str, step: int) -> Settings:
        rate = float(group["lr"]) * float(group["lr_scale"])
        plain = super().settings({**group, "lr": rate}, policy, step)
        assert isinstance(plain.flags, LambFlags)
        assert isinstance(plain.h, LambScalars)
        grad_clip: GroupClip | None = group["grad_clip"]
        kind, upper, lower = grad_clip or (None, 0.0, 0.0)
        h = plain.h._replace(l2=float(group["l2"]), lower=lower, upper=upper)
        flags = plain.flags._replace(bounded=kind == "value", regularized=h.l2 != 0)
        clip = None
        if kind == "norm" or kind == "global_norm":
            clip = Clip(upper, "tensor" if kind == "norm" else "group")
        return plain._replace(flags=flags, h=h, clip=clip)

    def moments(self, flags: Any, h: LambScalars, p: Tensor, g: Tensor, *state: Tensor) -> None:
        if flags.bounded:
            g = g.clamp(h.lower, h.upper)
        if flags.regularized:
            g = g + p * h.l2
        super().moments(flags, h, p, g, *state)
