"""Rules with a trust ratio per tensor: LAMB's variants, and Paddle's Lamb.

LAMB is layer-wise adaptive moments (arXiv 1904.00962). Its variants follow the sources of google,
torch_npu, apex, NVIDIA (nvlamb) and DeepSpeed. Paddle's Lamb is the same rule with options per
group.
"""

from __future__ import annotations

import math
import re
import reprlib
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, ClassVar, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from shardfuse.rules.base import (
    Clip,
    Fused,
    Group,
    Member,
    NormRule,
    Settings,
    add_,
    add_product_,
    check_at_least_zero,
    check_betas,
    check_number,
    check_switch,
    divide,
    is_tensor,
    learning_rate,
    number,
    plus,
    update_moments,
    vanishes,
    with_takes,
)
from shardfuse.rules.elementwise import NO_BIAS_CORRECTION, fused_adam

LambVariant = Literal["npu", "apex", "nvlamb", "google", "paddle", "deepspeed"]

NO_DECAY = "no_decay"
NO_ADAPT = "no_adapt"


@dataclass(frozen=True, kw_only=True, slots=True)
class LambSwitches:
    """The options in which the variants of LAMB differ."""

    variant: str = "none"
    """The preset that these began as."""

    bias_correction: bool | Literal["outside"]
    """Divide the moments by 1 - beta ** step: inside the ratio (True), where it cancels up to eps
    and decay, or in the step size ("outside"), where it acts as a second warm-up."""

    clamp_value: float
    """Upper bound of the weight norm; inf for none."""

    always_adapt: bool
    """Use the trust ratio also where weight decay is 0."""

    min_coeff: float = 0.0
    max_coeff: float = math.inf
    """Bounds of the trust ratio itself."""

    exclude_from_weight_decay: tuple[str, ...] = ()
    """Regular expressions, searched in parameter names, of parameters with no decay."""

    exclude_from_layer_adaptation: tuple[str, ...] = ()
    """Regular expressions, searched in parameter names, of parameters with trust ratio 1."""


_GOOGLE_EXCLUSIONS = ("LayerNorm", "layer_norm", "bias")

PRESETS: dict[str, LambSwitches] = {
    # torch_npu NpuFusedLamb; the same as pytorch-lamb.
    "npu": LambSwitches(bias_correction=False, clamp_value=10.0, always_adapt=True),
    # apex FusedLAMB with use_nvlamb=False.
    "apex": LambSwitches(bias_correction=True, clamp_value=math.inf, always_adapt=False),
    # apex FusedLAMB with use_nvlamb=True.
    "nvlamb": LambSwitches(bias_correction=True, clamp_value=math.inf, always_adapt=True),
    # The reference of the paper's authors, lamb_optimizer_v1.py.
    "google": LambSwitches(
        bias_correction=True,
        clamp_value=math.inf,
        always_adapt=True,
        exclude_from_weight_decay=_GOOGLE_EXCLUSIONS,
        exclude_from_layer_adaptation=_GOOGLE_EXCLUSIONS,
    ),
    # paddle.optimizer.Lamb.
    "paddle": LambSwitches(bias_correction=True, clamp_value=math.inf, always_adapt=False),
    # DeepSpeed FusedLamb.
    "deepspeed": LambSwitches(
        bias_correction="outside",
        clamp_value=math.inf,
        always_adapt=True,
        min_coeff=0.01,
        max_coeff=10.0,
    ),
}


def switches_for(variant: str, **overrides: object) -> LambSwitches:
    """Return the preset ``variant`` with every override that is not None applied.

    Raises:
        ValueError: an unknown variant, a bound out of range, or a bad pattern.
        TypeError: patterns that are not a sequence.
    """
    if not isinstance(variant, str) or variant not in PRESETS:
        raise ValueError(f"Invalid variant: {variant!r}. Use one of {get_args(LambVariant)}.")
    given = {name: value for name, value in overrides.items() if value is not None}
    given["variant"] = variant
    for name in ("exclude_from_weight_decay", "exclude_from_layer_adaptation"):
        patterns = given.get(name)
        if patterns is None:
            continue
        if isinstance(patterns, str) or not isinstance(patterns, Sequence):
            raise TypeError(f"{name} must be a list of regular expressions, got {patterns!r}.")
        for pattern in patterns:
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(f"Invalid pattern in {name}: {pattern!r} ({error}).") from error
        given[name] = tuple(patterns)
    for name in ("clamp_value", "min_coeff", "max_coeff"):
        if name in given:
            given[name] = number(given[name], name)
    check_switch(given.get("always_adapt"), "always_adapt")
    switches = replace(PRESETS[variant], **given)  # type: ignore[arg-type]
    if not switches.clamp_value > 0:
        raise ValueError(f"Invalid clamp_value: {switches.clamp_value}. Must be > 0, or inf.")
    corrects = switches.bias_correction
    if not isinstance(corrects, bool) and not (isinstance(corrects, str) and corrects == "outside"):
        raise ValueError(
            f"Invalid bias_correction: {switches.bias_correction!r}. Use True, False or 'outside'."
        )
    if not (0 <= switches.min_coeff <= switches.max_coeff and switches.min_coeff < math.inf):
        raise ValueError(
            f"Invalid min_coeff, max_coeff: {switches.min_coeff}, {switches.max_coeff}. Must be "
            "0 <= min_coeff <= max_coeff."
        )
    return switches


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")


class LambFlags(NamedTuple):
    """Flags that select code in LAMB's math; the last two are Paddle's."""

    decay: bool
    guard: bool
    by_decay: bool  # the direction is divided by the weight decay, else by the gain
    bounded: bool = False
    regularized: bool = False


class LambScalars(NamedTuple):
    """The values of LAMB's math; the last three are Paddle's."""

    beta1: float
    take1: float
    beta2: float
    take2: float
    eps: float
    lr: float
    unit: float  # the direction is u / unit
    share: float  # of p in u / unit, or with by_decay of m / (sqrt(v) + eps)
    l2: float = 0.0
    lower: float = 0.0
    upper: float = 0.0


def _fused_direction(
    flags: LambFlags,
    share: float,
    numbers: tuple[float, float, float, float],
    u: Tensor,
    g: Tensor,
    states: Sequence[Tensor],
    step: Tensor,
) -> None:
    """Update the moments, and make the direction of ``u``, a copy of the parameter.

    AdamW without a decay adds -lr * m / (sqrt(v) + eps), and takes a negative lr.
    """
    lr = -share if flags.by_decay else -1.0
    if not flags.decay:
        u.zero_()
    elif not flags.by_decay:
        u.mul_(share)
    fused_adam("_fused_adamw_", lr, numbers, u, g, states, step)


class LambRule(NormRule):
    """m, v moments of g; u = m / (sqrt(v) + eps) + weight_decay * p; p -= lr * ratio * u.

    ratio = min(||p||, clamp_value) / ||u|| per parameter, 1 where either norm is 0; p before the
    update. With ``adam=True`` the ratio is 1 everywhere.
    """

    counts_in_groups: ClassVar[bool] = True
    fused_operators: ClassVar[tuple[str, ...]] = ("_fused_adamw_",)
    torch_keys: ClassVar[frozenset[str]] = frozenset({"decoupled_weight_decay"})
    squares: ClassVar[frozenset[str]] = frozenset({"exp_avg_sq"})
    num_sums: ClassVar[int] = 2

    # The remedies that warnings() names, in terms of the optimizer class that has this rule.
    _adapt_again: ClassVar[str] = (
        "Set weight_decay above 0, or always_adapt=True (apex: use_nvlamb); or pass adam=True"
    )
    _leave_out: ClassVar[str] = (
        "give (name, parameter) pairs, and patterns that match them, such as ['bias', 'norm'], as "
        "exclude_from_weight_decay and exclude_from_layer_adaptation (variant='google' has "
        "BERT's); or put them in a group with weight_decay=0"
    )

    def __init__(
        self,
        switches: LambSwitches,
        adam: bool = False,
        use_global_grad_norm: bool = False,
        max_grad_norm: float | None = None,
    ) -> None:
        bound = 1.0 if max_grad_norm is None else number(max_grad_norm, "max_grad_norm")
        check_switch(adam, "adam")
        check_switch(use_global_grad_norm, "use_global_grad_norm")
        if math.isnan(bound) or (use_global_grad_norm and not bound > 0):
            raise ValueError(f"Invalid max_grad_norm: {max_grad_norm}. Must be > 0.")
        self.switches = switches
        self.adam = adam
        self.use_global_grad_norm = use_global_grad_norm
        self.max_grad_norm = bound
        self._has_idle_bound = max_grad_norm is not None and not use_global_grad_norm

    def check_values(self, group: Group) -> None:
        check_betas(group)
        check_at_least_zero(group, "eps", "Invalid epsilon value: {}")
        check_number(group, "weight_decay", "Invalid weight_decay value: {}")

    def describe(self) -> str:
        switches = ", ".join(
            f"{f.name}={getattr(self.switches, f.name)!r}" for f in fields(self.switches)
        )
        return (
            f"{type(self).__name__}({switches}, adam={self.adam}, "
            f"use_global_grad_norm={self.use_global_grad_norm}, max_grad_norm={self.max_grad_norm})"
        )

    def state_names(self, group: Group) -> tuple[str, ...]:
        return ("exp_avg", "exp_avg_sq")

    def policy(self, name: str, named: bool, shape: tuple[int, ...], group: Group) -> str:
        undecayed = self.switches.exclude_from_weight_decay
        unadapted = self.switches.exclude_from_layer_adaptation
        if not named and (undecayed or unadapted):
            raise ValueError(
                "exclude_from_weight_decay and exclude_from_layer_adaptation (set by "
                "variant='google') match parameter names, but the parameters have none. Pass "
                "model.named_parameters(), or give both as empty lists."
            )
        no_decay = any(re.search(pattern, name) for pattern in undecayed)
        no_adapt = any(re.search(pattern, name) for pattern in unadapted)
        return ",".join([NO_DECAY] * no_decay + [NO_ADAPT] * no_adapt)

    def _weight_decay(self, group: Group, policy: str) -> float:
        return 0.0 if NO_DECAY in policy else float(group["weight_decay"])

    def adapts(self, group: Group, policy: str) -> bool:
        if self.adam or NO_ADAPT in policy:
            return False
        return self.switches.always_adapt or self._weight_decay(group, policy) != 0

    def warnings(self, members: Sequence[Member]) -> dict[str, str]:
        adapted = [m for m in members if self.adapts(m.group, m.policy)]
        candidates = [m.name for m in members if NO_ADAPT not in m.policy]
        found = {}
        if members and self._has_idle_bound:
            found["nothing is clipped"] = (
                f"max_grad_norm={self.max_grad_norm} does nothing without "
                "use_global_grad_norm=True: gradients are not clipped. Set that too, or leave "
                "max_grad_norm out."
            )
        if candidates and not adapted and not self.adam:
            found["nothing is adapted"] = (
                "A trust ratio is taken only where the weight decay is not 0, and it is 0 for all "
                f"parameters ({_listed(candidates)}): every trust ratio is 1, so this is Adam, "
                f"not LAMB. {self._adapt_again}, if Adam is intended."
            )
        vectors = [
            m.name for m in adapted if m.ndim < 2 and self._weight_decay(m.group, m.policy) != 0
        ]
        if vectors:
            found["vectors are adapted"] = (
                f"{len(vectors)} parameter{'s' * (len(vectors) > 1)} of fewer than two dimensions "
                f"({_listed(vectors)}) {'are' if len(vectors) > 1 else 'is'} decayed and scaled by "
                f"a trust ratio. Recipes for LAMB leave biases and norms out of both: "
                f"{self._leave_out}."
            )
        return found

    def settings(self, group: Group, policy: str, step: int) -> Settings:
        beta1, beta2 = (float(beta) for beta in group["betas"])
        lr, eps, weight_decay = (
            learning_rate(group),
            float(group["eps"]),
            self._weight_decay(group, policy),
        )
        # u = gain * m / (sqrt(v) + eps) + weight_decay * p, with the corrections in gain and eps.
        gain, root_correction2 = 1.0, (1.0 - beta2**step) ** 0.5
        corrections = root_correction2 / (1.0 - beta1**step)
        if self.switches.bias_correction == "outside":
            lr = lr * corrections
        elif self.switches.bias_correction:
            gain, eps = corrections, eps * root_correction2
        # The least decay keeps squares of u / weight_decay, and their sums, far from overflow.
        by_decay = abs(weight_decay) > 1e-6 * gain
        h = LambScalars(
            *with_takes(beta1, beta2),
            eps=eps,
            lr=lr,
            unit=weight_decay if by_decay else gain,
            share=gain / weight_decay if by_decay else weight_decay / gain,
        )
        flags = LambFlags(weight_decay != 0, vanishes(h.eps), by_decay)
        fused = None
        if not flags.guard:
            call = partial(_fused_direction, flags, h.share, (beta1, beta2, h.eps, 0.0))
            fused = Fused("_fused_adamw_", NO_BIAS_CORRECTION, call)
        return Settings(flags, h, fused=fused)

    def clip(self, group: Group) -> Clip | None:
        return Clip(self.max_grad_norm, "global") if self.use_global_grad_norm else None

    def moments(self, flags: Any, h: LambScalars, p: Tensor, g: Tensor, *state: Tensor) -> None:
        update_moments(h, g, *state)

    def direction(
        self, flags: Any, h: LambScalars, p: Tensor, g: Tensor | None, *state: Tensor
    ) -> Tensor:
        exp_avg, exp_avg_sq = state
        denominator = exp_avg_sq.sqrt().add_(h.eps)
        if flags.by_decay:
            if flags.guard or is_tensor(h.share):
                return plus(p, divide(exp_avg, denominator, guard=flags.guard), h.share)
            return torch.addcdiv(p, exp_avg, denominator, value=h.share)
        u = divide(exp_avg, denominator, guard=flags.guard)
        return add_(u, p, h.share) if flags.decay else u

    def vectors(
        self, flags: Any, h: LambScalars, p: Tensor, u: Tensor
    ) -> tuple[tuple[Tensor, Any], ...]:
        return (p, None), (u, h.unit)

    def ratio(self, sums: Tensor) -> Tensor:
        weight_norm, update_norm = sums.sqrt()
        weight_norm = weight_norm.clamp(max=self.switches.clamp_value)
        usable = (weight_norm != 0) & (update_norm != 0)
        ratio = (weight_norm / update_norm).clamp(self.switches.min_coeff, self.switches.max_coeff)
        return torch.where(usable, ratio, torch.ones_like(ratio))

    def apply(
        self, flags: Any, h: LambScalars, p: Tensor, u: Tensor, factors: Tensor | None
    ) -> None:
        rate = -h.lr * h.unit
        if factors is None:
            add_(p, u, rate)
        else:
            add_product_(p, u, factors[0], rate)

    def move(
        self,
        flags: Any,
        h: LambScalars,
        p: Tensor,
        g: Tensor | None,
        factors: Tensor | None,
        *state: Tensor,
    ) -> None:
        if not flags.by_decay or flags.guard or is_tensor(h.share):
            super().move(flags, h, p, g, factors, *state)
            return
        # u / unit is p - end, so p moves towards ``end``: a pass less than by the direction.
        exp_avg, exp_avg_sq = state
        share = 1.0 / h.share
        end = exp_avg / torch.rsub(exp_avg_sq.sqrt(), -h.eps * share, alpha=share)
        weight = h.lr * h.unit if factors is None else factors[0] * (h.lr * h.unit)
        p.lerp_(end, weight.to(p.dtype) if isinstance(weight, Tensor) else weight)


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

    In addition to LambRule's keys, groups have ``lr_scale``, ``l2`` and ``grad_clip``, a GroupClip
    or None. The trust ratio is used where the decay is above 0, or everywhere with
    ``always_adapt``.
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
        self.undecayed: set[str] = set()  # names of parameters; filled before the first policy()

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

    def policy(self, name: str, named: bool, shape: tuple[int, ...], group: Group) -> str:
        return NO_DECAY if name in self.undecayed else ""

    def adapts(self, group: Group, policy: str) -> bool:
        return self.switches.always_adapt or self._weight_decay(group, policy) > 0

    def settings(self, group: Group, policy: str, step: int) -> Settings:
        rate = learning_rate(group) * float(group["lr_scale"])
        plain = super().settings({**group, "lr": rate}, policy, step)
        assert isinstance(plain.flags, LambFlags)
        assert isinstance(plain.h, LambScalars)
        grad_clip: GroupClip | None = group["grad_clip"]
        kind, upper, lower = grad_clip or (None, 0.0, 0.0)
        h = plain.h._replace(l2=float(group["l2"]), lower=lower, upper=upper)
        flags = plain.flags._replace(bounded=kind == "value", regularized=h.l2 != 0)
        has_raw_gradient = not (flags.bounded or flags.regularized)
        return Settings(flags, h, fused=plain.fused if has_raw_gradient else None)

    def clip(self, group: Group) -> Clip | None:
        grad_clip: GroupClip | None = group["grad_clip"]
        if grad_clip is None or grad_clip[0] == "value":
            return None
        return Clip(grad_clip[1], "tensor" if grad_clip[0] == "norm" else "group")

    def moments(self, flags: Any, h: LambScalars, p: Tensor, g: Tensor, *state: Tensor) -> None:
        if flags.bounded:
            g = g.clamp(h.lower, h.upper)
        if flags.regularized:
            g = plus(g, p, h.l2)
        super().moments(flags, h, p, g, *state)
