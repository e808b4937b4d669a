"""Elementwise rules: SGD, Adam, AdamW, BertAdam, RMSprop, RMSpropTF and Adadelta.

Sources of the formulas, which tests compare element by element:

* SGD with momentum, Adam (L2 decay), AdamW (decoupled decay), RMSprop and Adadelta
  (arXiv 1212.5701): torch.optim, and torch_npu's NpuFused classes.
* BertAdam, Adam without bias correction and with decoupled decay, and its schedules: torch_npu's
  NpuFusedBertAdam, after NVIDIA's BERT. The schedules are factors of lr; all rise linearly while
  ``x < warmup``, where x is the fraction of training done. Two upstream defects are fixed:
  ``warmup_cosine`` is 0.5 * (1 + cos(pi * x)), where upstream raises TypeError, and ``warmup_poly``
  stays at 0 past ``x = 1``, where upstream computes the root of a negative number.
* RMSpropTF: torch_npu's NpuFusedRMSpropTF, which follows TensorFlow.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from shardfuse.rules.base import (
    LARGEST,
    Clip,
    ElementwiseRule,
    Fused,
    Group,
    Settings,
    add_,
    add_product_,
    add_quotient_,
    check_at_least_zero,
    check_betas,
    check_number,
    divide,
    is_tensor,
    learning_rate,
    number,
    plus,
    update_moments,
    vanishes,
    with_takes,
)


class _SgdFlags(NamedTuple):
    decay: bool
    momentum: bool
    nesterov: bool


class _SgdScalars(NamedTuple):
    lr: float
    weight_decay: float
    momentum: float
    keep: float
    take: float


class SGDRule(ElementwiseRule):
    """buf = momentum * buf + (1 - dampening) * g (the first time buf = g); p -= lr * buf."""

    counts_steps: ClassVar[bool] = False
    fused_operators: ClassVar[tuple[str, ...]] = ("_fused_sgd_",)
    torch_keys: ClassVar[frozenset[str]] = frozenset({"momentum", "dampening", "nesterov"})
    optional_states: ClassVar[tuple[str, ...]] = ("momentum_buffer",)

    def check_values(self, group: Group) -> None:
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

    def initial(self, name: str) -> float:
        return -0.0  # states have no step by which to tell those before the first update

    def settings(self, group: Group, policy: str, step: int) -> Settings:
        momentum, dampening = float(group["momentum"]), float(group["dampening"])
        first = step == 1
        h = _SgdScalars(
            lr=learning_rate(group),
            weight_decay=float(group["weight_decay"]),
            momentum=momentum,
            keep=0.0 if first else momentum,
            take=1.0 if first else 1.0 - dampening,
        )
        flags = _SgdFlags(h.weight_decay != 0, momentum != 0, bool(group["nesterov"]))
        fused = None  # plain SGD is one kernel as it is
        if not is_tensor(h.lr) and (flags.momentum or flags.decay):
            call = partial(
                _fused_sgd,
                weight_decay=h.weight_decay,
                momentum=momentum,
                lr=h.lr,
                dampening=dampening,
                nesterov=flags.nesterov,
                is_first_step=first,
            )
            fused = Fused("_fused_sgd_", step, call)
        return Settings(flags, h, fused=fused)

    def absorb(self, flags: _SgdFlags, h: _SgdScalars, scale: float) -> _SgdScalars | None:
        if flags.decay or flags.nesterov:
            return None
        return h._replace(take=h.take * scale) if flags.momentum else h._replace(lr=h.lr * scale)

    def update(
        self, flags: _SgdFlags, h: _SgdScalars, p: Tensor, g: Tensor, *state: Tensor
    ) -> None:
        if flags.decay:
            g = plus(g, p, h.weight_decay)
        if flags.momentum:
            (buf,) = state
            add_(buf.mul_(h.keep), g, h.take)
            g = plus(g, buf, h.momentum) if flags.nesterov else buf
        add_(p, g, -h.lr)


def _fused_sgd(
    p: Tensor, g: Tensor, states: Sequence[Tensor], step: Tensor, **options: Any
) -> None:
    torch._fused_sgd_([p], [g], list(states), maximize=False, **options)


class _AdamFlags(NamedTuple):
    decay: bool
    decoupled: bool
    amsgrad: bool
    guard: bool


class _AdamScalars(NamedTuple):
    beta1: float
    take1: float
    beta2: float
    take2: float
    eps: float  # times the root of v's bias correction, as step_size is
    weight_decay: float
    shrink: float
    step_size: float


class AdamRule(ElementwiseRule):
    """m, v moments of g + weight_decay * p; p -= lr * m_hat / (sqrt(v_hat) + eps).

    amsgrad takes the running maximum of the uncorrected v, as torch does (arXiv 1904.09237). With
    ``decoupled_weight_decay``, p *= 1 - lr * weight_decay in place of the L2 term (arXiv
    1711.05101); the key need not be in a group.
    """

    fused_operators: ClassVar[tuple[str, ...]] = ("_fused_adam_", "_fused_adamw_")
    torch_keys: ClassVar[frozenset[str]] = frozenset({"amsgrad", "decoupled_weight_decay"})
    optional_states: ClassVar[tuple[str, ...]] = ("max_exp_avg_sq",)
    squares: ClassVar[frozenset[str]] = frozenset({"exp_avg_sq", "max_exp_avg_sq"})

    def check_values(self, group: Group) -> None:
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
        lr, eps = learning_rate(group), float(group["eps"])
        beta1, beta2 = group["betas"]
        weight_decay, amsgrad = float(group["weight_decay"]), bool(group["amsgrad"])
        numbers = float(beta1), float(beta2), eps, weight_decay
        flags, constants, correction = _adam_constants(
            *numbers, amsgrad=amsgrad, decoupled=self.is_decoupled(group), step=step
        )
        h = _AdamScalars(*constants, shrink=1.0 - lr * weight_decay, step_size=lr * correction)
        fused = None
        if not flags.guard and not is_tensor(lr):
            name = "_fused_adamw_" if flags.decoupled else "_fused_adam_"
            fused = Fused(name, step, partial(fused_adam, name, lr, numbers))
        return Settings(flags, h, fused=fused)

    def update(
        self, flags: _AdamFlags, h: _AdamScalars, p: Tensor, g: Tensor, *state: Tensor
    ) -> None:
        exp_avg, exp_avg_sq = state[:2]
        if flags.decoupled and flags.decay:
            p.mul_(h.shrink)
        elif flags.decay:
            g = plus(g, p, h.weight_decay)
        update_moments(h, g, exp_avg, exp_avg_sq)
        if flags.amsgrad:
            exp_avg_sq = torch.maximum(state[2], exp_avg_sq, out=state[2])
        denominator = exp_avg_sq.sqrt().add_(h.eps)
        add_quotient_(p, exp_avg, denominator, -h.step_size, guard=flags.guard)


@lru_cache(maxsize=1024)
def _adam_constants(
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    *,
    amsgrad: bool,
    decoupled: bool,
    step: int,
) -> tuple[_AdamFlags, tuple[float, float, float, float, float, float], float]:
    """Return (flags, _AdamScalars without those of lr, the factor from lr to step_size).

    Hundreds of groups differ in lr alone, so these are kept.
    """
    root_correction2 = (1.0 - beta2**step) ** 0.5
    scaled_eps = eps * root_correction2
    flags = _AdamFlags(
        decay=weight_decay != 0, decoupled=decoupled, amsgrad=amsgrad, guard=vanishes(scaled_eps)
    )
    constants = (*with_takes(beta1, beta2), scaled_eps, weight_decay)
    return flags, constants, root_correction2 / (1.0 - beta1**step)


def fused_adam(
    name: str,
    lr: float,
    numbers: tuple[float, float, float, float],
    p: Tensor,
    g: Tensor,
    states: Sequence[Tensor],
    step: Tensor,
) -> None:
    """Call torch's operator ``name``; ``numbers`` are (beta1, beta2, eps, weight_decay)."""
    beta1, beta2, eps, weight_decay = numbers
    exp_avg, exp_avg_sq, *largest = states
    getattr(torch, name)(
        [p],
        [g],
        [exp_avg],
        [exp_avg_sq],
        largest,
        [step],
        lr=lr,
        beta1=beta1,
        beta2=beta2,
        weight_decay=weight_decay,
        eps=eps,
        amsgrad=bool(largest),
        maximize=False,
    )


NO_BIAS_CORRECTION = 1e30
"""A number of updates by which Adam's bias corrections are 1, because betas are below 1."""


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


class _BertAdamFlags(NamedTuple):
    decay: bool
    guard: bool


class _BertAdamScalars(NamedTuple):
    beta1: float
    take1: float
    beta2: float
    take2: float
    eps: float
    weight_decay: float
    lr: float


def _fused_bert_adam(
    weight_decay: float,
    lr: float,
    numbers: tuple[float, float, float, float],
    p: Tensor,
    g: Tensor,
    states: Sequence[Tensor],
    step: Tensor,
) -> None:
    """Update the moments and ``p``: p -= lr * (m / (sqrt(v) + eps) + weight_decay * p).

    The operator's own decay multiplies by 1 - lr * weight_decay. In fp32 that is 1, or wrong by up
    to a half of the decay, where lr * weight_decay is about 1e-7 (lr 1e-5).
    """
    if weight_decay == 0.0:
        fused_adam("_fused_adamw_", lr, numbers, p, g, states, step)
        return
    u = p * weight_decay
    fused_adam("_fused_adamw_", -1.0, numbers, u, g, states, step)
    add_(p, u, -lr)


class BertAdamRule(ElementwiseRule):
    """m, v moments of g; p -= lr_t * (m / (sqrt(v) + e) + weight_decay * p).

    Source: torch_npu's NpuFusedBertAdam. lr_t is read at the 0-based step: with a warm-up the first
    update has lr 0. Gradients are first clipped to max_grad_norm per (group, dtype); each group's
    own max_grad_norm counts, where upstream uses the constructor's for all.
    """

    fused_operators: ClassVar[tuple[str, ...]] = ("_fused_adamw_",)
    torch_keys: ClassVar[frozenset[str]] = frozenset({"decoupled_weight_decay"})
    squares: ClassVar[frozenset[str]] = frozenset({"exp_avg_sq"})

    def check_values(self, group: Group) -> None:
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
        lr = learning_rate(group)
        if group["t_total"] != -1:
            schedule = SCHEDULES[group["schedule"]]
            lr = lr * schedule((step - 1) / float(group["t_total"]), float(group["warmup"]))
        b1, b2 = float(group["b1"]), float(group["b2"])
        h = _BertAdamScalars(
            *with_takes(b1, b2),
            eps=float(group["e"]),
            weight_decay=float(group["weight_decay"]),
            lr=lr,
        )
        flags = _BertAdamFlags(h.weight_decay > 0, vanishes(h.eps))
        fused = None
        if not flags.guard and not is_tensor(lr):
            numbers = b1, b2, h.eps, 0.0
            decay = h.weight_decay if flags.decay else 0.0
            call = partial(_fused_bert_adam, decay, lr, numbers)
            fused = Fused("_fused_adamw_", NO_BIAS_CORRECTION, call)
        return Settings(flags, h, fused=fused)

    def clip(self, group: Group) -> Clip | None:
        max_norm = float(group["max_grad_norm"])
        return Clip(max_norm, "flat", eps=1e-6) if max_norm > 0 else None

    def update(
        self, flags: _BertAdamFlags, h: _BertAdamScalars, p: Tensor, g: Tensor, *state: Tensor
    ) -> None:
        exp_avg, exp_avg_sq = state
        update_moments(h, g, exp_avg, exp_avg_sq)
        u = divide(exp_avg, exp_avg_sq.sqrt().add_(h.eps), guard=flags.guard)
        if flags.decay:
            add_(u, p, h.weight_decay)
        add_(p, u, -h.lr)


def warmup_cosine(x: float, warmup: float = 0.002) -> float:
    """Return x / warmup, then half a cosine from 1 to 0."""
    return x / warmup if x < warmup else 0.5 * (1.0 + math.cos(math.pi * x))


def warmup_constant(x: float, warmup: float = 0.002) -> float:
    """Return x / warmup, then 1."""
    return x / warmup if x < warmup else 1.0


def warmup_linear(x: float, warmup: float = 0.002) -> float:
    """Return x / warmup, then a straight line to 0 at x = 1.

    With ``warmup=-1`` the line starts from 1/2, as upstream's does.
    """
    return x / warmup if x < warmup else max((x - 1.0) / (warmup - 1.0), 0.0)


def warmup_poly(x: float, warmup: float = 0.002, degree: float = 0.5) -> float:
    """Return x / warmup, then (1 - x) ** degree down to 0 at x = 1."""
    return x / warmup if x < warmup else max(1.0 - x, 0.0) ** degree


SCHEDULES: dict[str, Callable[[float, float], float]] = {
    "warmup_cosine": warmup_cosine,
    "warmup_constant": warmup_constant,
    "warmup_linear": warmup_linear,
    "warmup_poly": warmup_poly,
}


class _RmspropFlags(NamedTuple):
    decay: bool
    momentum: bool
    centered: bool
    guard: bool
    decoupled: bool = False
    lr_in_momentum: bool = False


class _RmspropScalars(NamedTuple):
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
        h = _RmspropScalars(
            lr=learning_rate(group),
            alpha=alpha,
            take=1.0 - alpha,
            eps=float(group["eps"]),
            weight_decay=float(group["weight_decay"]),
            momentum=float(group["momentum"]),
        )
        return Settings(self._flags(group), h)

    def _flags(self, group: Group) -> _RmspropFlags:
        return _RmspropFlags(
            decay=group["weight_decay"] != 0,
            momentum=group["momentum"] > 0,
            centered=bool(group["centered"]),
            guard=vanishes(group["eps"]),
        )

    def update(
        self, flags: _RmspropFlags, h: _RmspropScalars, p: Tensor, g: Tensor, *state: Tensor
    ) -> None:
        square_avg = state[0]
        if flags.decay:
            g = plus(g, p, h.weight_decay)
        add_product_(square_avg.mul_(h.alpha), g, g, h.take)
        if flags.centered:
            grad_avg = state[-1].lerp_(g, h.take)
            square_avg = square_avg.addcmul(grad_avg, grad_avg, value=-1.0)
        denominator = square_avg.sqrt().add_(h.eps)
        if flags.momentum:
            u = add_quotient_(state[1].mul_(h.momentum), g, denominator, 1.0, guard=flags.guard)
            add_(p, u, -h.lr)
        else:
            add_quotient_(p, g, denominator, -h.lr, guard=flags.guard)


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

    def _flags(self, group: Group) -> _RmspropFlags:
        flags = super()._flags(group)
        return flags._replace(
            decoupled=bool(group["decoupled_decay"]),
            lr_in_momentum=bool(group["lr_in_momentum"]),
        )

    def update(
        self, flags: _RmspropFlags, h: _RmspropScalars, p: Tensor, g: Tensor, *state: Tensor
    ) -> None:
        square_avg = state[0]
        if flags.decay and flags.decoupled:
            p.mul_(1.0 - h.weight_decay)
        elif flags.decay:
            g = plus(g, p, h.weight_decay)
        add_product_(square_avg.mul_(h.alpha), g, g, h.take)
        if flags.centered:
            grad_avg = state[-1].lerp_(g, h.take)
            square_avg = square_avg.addcmul(grad_avg, grad_avg, value=-1.0)
        denominator = (square_avg + h.eps).sqrt_()
        if flags.momentum:
            rate, rest = (h.lr, 1.0) if flags.lr_in_momentum else (1.0, h.lr)
            u = add_quotient_(state[1].mul_(h.momentum), g, denominator, rate, guard=flags.guard)
            add_(p, u, -rest)
        else:
            add_quotient_(p, g, denominator, -h.lr, guard=flags.guard)


class _AdadeltaFlags(NamedTuple):
    decay: bool
    guard: bool


class _AdadeltaScalars(NamedTuple):
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
        if not 0.0 <= number(group["rho"], "rho") <= 1.0:
            raise ValueError(f"Invalid rho value: {group['rho']}")
        check_at_least_zero(group, "eps", "Invalid epsilon value: {}")
        check_at_least_zero(group, "weight_decay", "Invalid weight_decay value: {}")

    def state_names(self, group: Group) -> tuple[str, ...]:
        return ("square_avg", "acc_delta")

    def settings(self, group: Group, policy: str, step: int) -> Settings:
        rho = float(group["rho"])
        h = _AdadeltaScalars(
            lr=learning_rate(group),
            rho=rho,
            take=1.0 - rho,
            eps=float(group["eps"]),
            weight_decay=float(group["weight_decay"]),
        )
        return Settings(_AdadeltaFlags(h.weight_decay != 0, vanishes(h.eps)), h)

    def update(
        self, flags: _AdadeltaFlags, h: _AdadeltaScalars, p: Tensor, g: Tensor, *state: Tensor
    ) -> None:
        square_avg, acc_delta = state
        if flags.decay:
            g = plus(g, p, h.weight_decay)
        add_product_(square_avg.mul_(h.rho), g, g, h.take)
        root = (acc_delta + h.eps).sqrt_()
        delta = divide(root, (square_avg + h.eps).sqrt_(), guard=flags.guard).mul_(g)
        add_product_(acc_delta.mul_(h.rho), delta, delta, h.take)
        add_(p, delta, -h.lr)
