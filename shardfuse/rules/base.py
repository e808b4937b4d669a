"""What an update rule is: state names, per-step scalars, and pure in-place math on tiles.

A tile is a contiguous (rows, n) fp32 tensor; a NormRule's rows are blocks, each of one parameter.
The math takes what ``settings()`` has made of a group: ``flags``, which select code and are
constant for a flat, and ``h``, a NamedTuple of values. These are Python floats where the math runs
eagerly and 0-D fp32 tensors where it is compiled, so that a schedule never recompiles; the same
code serves both, and calls both float.

Rules import torch and nothing of shardfuse: they see no buffer and no process group.
"""

from __future__ import annotations

import math
import reprlib
from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

Group = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Clip:
    """Scale gradients by ``max_norm / (norm + eps)`` where that is below 1.

    ``scope`` tells whose norm: "global" is all parameters of the optimizer, "group" those of one
    group, "flat" those of one (group, dtype), as torch_npu's BertAdam does, and "tensor", for a
    NormRule, is each parameter alone.
    """

    max_norm: float
    scope: Literal["global", "group", "flat", "tensor"]
    eps: float = 0.0


class Settings(NamedTuple):
    """What the hyper-parameters of a group mean for one policy at one step."""

    flags: Hashable
    """Selects code."""
    h: tuple[float, ...]
    """The rule's own NamedTuple of values, computed in double precision."""
    clip: Clip | None = None
    """How gradients are clipped before the update; the same at every step."""
    adapts: bool = True
    """Whether a ReducingRule needs factors; if not, there are none and nothing is summed."""
    keeps_gradient: bool = False
    """Whether its direction needs the gradient, which is then kept until the second pass."""


class Member(NamedTuple):
    """A trained parameter, as a rule judges it."""

    name: str
    ndim: int
    policy: str
    group: Group


class UpdateRule(ABC):
    """Hyper-parameters, states and settings; subclassed by ElementwiseRule and ReducingRule."""

    granularity: ClassVar[str]
    """What an update depends on: "element" alone, or sums over "block" (and so tensor) or "row".

    One pass over the shards for elements, else two, with an all-reduce of the sums between them.
    """

    counts_steps: ClassVar[bool] = True
    """Whether checkpoints hold a ``step`` per parameter, as the torch optimizer of this name does.

    Otherwise the step only counts updates of the states, to tell the first from the rest.
    """

    counts_in_groups: ClassVar[bool] = False
    """Whether a group has a ``step``, how many steps were not skipped, as apex's groups have.

    It is absent before the first. NVIDIA's learning-rate schedulers read it there, and without it
    go on with their first rate.
    """

    torch_keys: ClassVar[frozenset[str]] = frozenset()
    """Those keys of [Note: torch's keys], and of other rules, that this rule honours."""

    def check(self, group: Group) -> None:
        """Check the hyper-parameters of a group, given here, in a group dict or in a state dict.

        Raises:
            ValueError: one is out of range or NaN, or a key of torch's that would be ignored.
            TypeError: one is not a number.
        """
        check_torch_keys(group, self.torch_keys, type(self).__name__.removesuffix("Rule"))
        self.check_values(group)

    @abstractmethod
    def check_values(self, group: Group) -> None:
        """Raise ValueError if a hyper-parameter of ``group`` is out of range or NaN."""

    def mismatch(self, saved: Group, group: Group) -> str:
        """Return why states mean something else here than where ``saved`` is from; else nothing.

        Args:
            saved: a group of a state dict, as it was saved.
            group: the optimizer's own, as it will be.
        """
        return ""

    @abstractmethod
    def state_names(self, group: Group) -> tuple[str, ...]:
        """Return the names of the fp32 states, in the order in which the math takes them."""

    optional_states: ClassVar[tuple[str, ...]] = ()
    """States that only some hyper-parameters need; where not, loaded ones are kept as they are."""

    squares: ClassVar[frozenset[str]] = frozenset()
    """States that are averages of squares, never below 0."""

    def initial(self, name: str) -> float:
        """Return the value of every element of the state ``name`` before the first update."""
        return 0.0

    def initial_states(self, group: Group) -> dict[str, float]:
        """Return {name: value before the first update} in the order of ``state_names``."""
        return {name: self.initial(name) for name in self.state_names(group)}

    @abstractmethod
    def settings(self, group: Group, policy: str, step: int) -> Settings:
        """Return what the ``step``-th update (from 1) of a policy's parameters goes by."""

    def policy(self, name: str, named: bool, group: Group) -> str:
        """Return the policy of a parameter; parameters of one group and policy are updated alike.

        ``named`` is False where the user gave no names and ``name`` was made up.
        """
        return ""

    def warnings(self, members: Sequence[Member]) -> dict[str, str]:
        """Return {kind: text} of what is legal for these parameters but hardly meant."""
        return {}

    def describe(self) -> str:
        """Return what ranks must agree on besides the groups' hyper-parameters."""
        return type(self).__name__


class ElementwiseRule(UpdateRule):
    """A rule whose new values depend only on the same element of parameter, gradient, states."""

    granularity = "element"

    @abstractmethod
    def update(self, flags: Any, h: Any, p: Tensor, g: Tensor, *state: Tensor) -> None:
        """Update ``p`` and ``state`` in place from the mean gradient ``g``, all (rows, n)."""


class ReducingRule(UpdateRule):
    """A rule of two passes: the step is scaled by factors made of sums over more than one rank.

    First pass: ``moments``, ``direction`` and ``products``, which are summed. Second pass:
    ``direction`` again, and ``apply`` with the factors that NormRule and RowRule make of the sums.
    The direction is computed twice: reading the moments costs no more than reading a stored
    direction would, and no buffer is needed.
    """

    num_sums: ClassVar[int]
    """Sums that the factors need, over each tensor or row."""

    @abstractmethod
    def moments(self, flags: Any, h: Any, p: Tensor, g: Tensor, *state: Tensor) -> None:
        """Update ``state`` in place from the mean gradient ``g``, all (rows, n)."""

    @abstractmethod
    def direction(self, flags: Any, h: Any, p: Tensor, g: Tensor | None, *state: Tensor) -> Tensor:
        """Return the direction (rows, n) of the update; zero where all inputs are zero.

        ``g`` is None in the second pass unless the settings say ``keeps_gradient``.
        """

    @abstractmethod
    def products(self, p: Tensor, g: Tensor, u: Tensor) -> tuple[Tensor, ...]:
        """Return ``num_sums`` tensors (rows, n) to be summed; ``u`` is the direction."""

    @abstractmethod
    def apply(self, flags: Any, h: Any, p: Tensor, u: Tensor, factors: Tensor | None) -> None:
        """Update ``p`` (rows, n) in place along ``u``; None stands for no factors.

        ``factors`` are (num_factors, rows, 1) by tensor, (num_factors, rows, n) by row.
        """


class NormRule(ReducingRule):
    """A rule whose step is scaled per parameter by a ratio of norms over the whole parameter."""

    granularity = "block"

    @abstractmethod
    def ratio(self, sums: Tensor) -> Tensor:
        """Return the ratio per parameter (num_params,) from ``sums`` (num_sums, num_params)."""


class Rows(NamedTuple):
    """The rows of several parameters one after another; row i is param[i] of its parameter."""

    counts: list[int]
    """Rows of each parameter."""
    owner: Tensor
    """(rows,) the parameter of each row, counted from 0."""
    row_numel: Tensor
    """(params,) elements of one row of each parameter."""
    numel: Tensor
    """(params,) elements of each parameter."""


class RowRule(ReducingRule):
    """A rule whose step depends on sums over the rows of parameters of two or more dimensions."""

    granularity = "row"

    neutral: ClassVar[tuple[float, ...]]
    """The factors of parameters that have no rows."""

    @abstractmethod
    def factors(self, group: Group, sums: Tensor, rows: Rows) -> Tensor:
        """Return (num_factors, rows of parameters) from their ``sums`` (num_sums, the same)."""


LARGEST = torch.finfo(torch.float32).max
"""Hyper-parameters beyond this are infinite where the math runs, which is in fp32."""

ROUNDING = 1e-12
"""How far below 0 a learning rate may be: torch's LinearLR ends there, by a schedule's rounding."""


def number(value: Any, name: str) -> float:
    """Return the hyper-parameter ``name``, a number or a one-element tensor, as a float.

    An int that no float holds is NaN, which no check takes.

    Raises:
        TypeError: it is something else; a number written as a string, too.
        ValueError: a tensor of another size.
    """
    if isinstance(value, Tensor) and value.numel() != 1:
        raise ValueError(f"Tensor {name} must be 1-element, got {value.numel()} elements.")
    try:
        if isinstance(value, str | bytes):
            raise TypeError
        return float(value)
    except OverflowError:
        return math.nan
    except (TypeError, ValueError, RuntimeError):  # of complex and meta tensors, too
        kind = type(value).__name__
        raise TypeError(
            f"{name} must be a number, got {reprlib.repr(value)}, which is of type {kind}."
        ) from None


def _shown(value: Any) -> str:
    """Return a value for a message; an int may have hundreds of digits."""
    return reprlib.repr(value) if isinstance(value, int) else f"{value}"


def check_at_least_zero(
    group: Group, name: str, message: str, *, at_most: float = LARGEST, rounding: float = 0.0
) -> None:
    """Raise ValueError(message.format(value)) unless ``group[name]`` is in [0, at_most].

    NaN is refused. A value above ``-rounding`` counts as 0.
    """
    if not -rounding <= number(group[name], name) <= at_most:
        raise ValueError(message.format(_shown(group[name])))


def check_lr(group: Group) -> None:
    """Raise unless ``group["lr"]`` is a finite number of at least 0."""
    message = "Invalid learning rate: {}"
    check_at_least_zero(group, "lr", message, rounding=ROUNDING)


def check_betas(group: Group) -> None:
    """Raise unless ``group["betas"]`` are two numbers in [0, 1)."""
    betas = group["betas"]
    is_sequence = hasattr(betas, "__len__") and hasattr(betas, "__getitem__")
    if isinstance(betas, str | bytes | Mapping) or not is_sequence:
        raise TypeError(f"betas must be two numbers, (beta1, beta2), got {reprlib.repr(betas)}.")
    if (isinstance(betas, Tensor) and betas.dim() == 0) or len(betas) != 2:
        raise ValueError(f"Invalid betas: {betas}. Give two values, (beta1, beta2).")
    for index, beta in enumerate(betas):
        if not 0.0 <= number(beta, f"betas[{index}]") < 1.0:
            raise ValueError(f"Invalid beta parameter at index {index}: {_shown(beta)}")


def check_number(group: Group, name: str, message: str, *, at_most: float = LARGEST) -> None:
    """Raise ValueError(message.format(value)) unless ``group[name]`` is in [-at_most, at_most].

    NaN is refused.
    """
    if not -at_most <= number(group[name], name) <= at_most:
        raise ValueError(message.format(_shown(group[name])))


def check_switch(value: Any, name: str) -> None:
    """Raise TypeError unless ``value`` is True, False, or what equals one of them; None is False.

    Any text would be true, "False", too.
    """
    try:
        is_known = value is None or (not isinstance(value, complex) and value in (0, 1))
    except (TypeError, ValueError, RuntimeError):  # a comparison of several elements
        is_known = False
    if not is_known:
        raise TypeError(f"{name} must be True or False, got {reprlib.repr(value)}.")


_CHANGES_MATH = (
    "amsgrad",
    "centered",
    "dampening",
    "decoupled_weight_decay",
    "momentum",
    "nesterov",
)

_SWITCHES = (
    "amsgrad",
    "centered",
    "decoupled_decay",
    "decoupled_weight_decay",
    "lr_in_momentum",
    "nesterov",
)

_OF_PADDLE = {"lr_scale": 1.0, "l2": 0.0, "grad_clip": None}
"""Keys that every group of Paddle's Lamb has, and where they have no effect."""


def check_torch_keys(group: Group, honoured: frozenset[str], name: str) -> None:
    """Raise ValueError if ``group`` asks for what the optimizer ``name`` would silently leave out.

    [Note: torch's keys] Beside its numbers, a group of torch.optim has keys of three kinds.
    ``maximize`` turns the sign of the gradient, for every rule, where its scale is made.
    ``foreach``, ``fused`` and ``capturable`` choose how torch computes the same, and mean nothing
    here. The rest select another formula: a rule honours such a key, or it is refused wherever it
    comes from, another optimizer's state dict included. Keys that torch does not know belong to
    schedulers and to users, and are kept; but not all of those of Paddle's Lamb together.
    """
    if _is_set(group, "differentiable"):
        raise ValueError(
            f"{name} does not support differentiable=True: its step() records no graph to "
            "differentiate through. Use torch.optim's class for that, or leave the key out."
        )
    for key in _CHANGES_MATH:
        if key not in honoured and _is_set(group, key):
            raise ValueError(
                f"Invalid {key}={group[key]!r} in a parameter group: {name} has no {key} and would "
                "ignore it. Remove the key, or use an optimizer that has it."
            )
    for key in ("maximize", *_SWITCHES):
        if key in group and (key in honoured or key == "maximize"):
            check_switch(group[key], key)
    if group.keys() >= _OF_PADDLE.keys() and not honoured >= _OF_PADDLE.keys():
        for key, without_effect in _OF_PADDLE.items():
            if group[key] != without_effect:
                raise ValueError(
                    f"Invalid {key}={group[key]!r} in a parameter group of Paddle's Lamb: {name} "
                    "has no such key and would ignore it. Use shardfuse.optim.paddle.Lamb, or "
                    "remove the key."
                )


def _is_set(group: Group, key: str) -> bool:
    """Return whether ``group`` has something true as ``key``, or what is neither true nor false."""
    try:
        return bool(group.get(key))
    except (TypeError, ValueError, RuntimeError):
        return True


def with_takes(beta1: float, beta2: float) -> tuple[float, float, float, float]:
    """Return (beta1, take1, beta2, take2) for update_moments(); take is 1 - beta."""
    return beta1, 1.0 - beta1, beta2, 1.0 - beta2


def update_moments(h: Any, g: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor) -> None:
    """Update Adam's moments in place by the betas and takes in ``h``."""
    exp_avg.mul_(h.beta1).add_(g * h.take1)
    exp_avg_sq.mul_(h.beta2).add_(g * g * h.take2)


def vanishes(eps: Any) -> bool:
    """Return whether ``eps`` is zero in fp32, so that 0 / (sqrt(0) + eps) would be NaN."""
    return torch.tensor(float(eps), dtype=torch.float32).item() == 0.0


def divide(numerator: Tensor, denominator: Tensor, *, guard: bool) -> Tensor:
    """Return numerator / denominator; with ``guard``, 0 where the denominator is 0.

    The guard keeps padding at zero when eps is 0; it costs a pass, so callers set it only then.
    """
    quotient = numerator / denominator
    return quotient.masked_fill_(denominator == 0, 0.0) if guard else quotient


def check_group(rule: UpdateRule, group: Group, where: str) -> None:
    """Check the hyper-parameters of a group; an error begins with ``where`` the group is.

    Raises:
        ValueError: one is out of range.
        TypeError: one is of another kind.
    """
    try:
        rule.check(group)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{where}: {error}") from None
