"""The base classes of update rules: state names, per-step scalars, in-place math on tiles.

A tile is a contiguous (rows, n) fp32 tensor; a NormRule's rows are blocks, each of one parameter.
The math gets the results of ``settings()`` for a group: ``flags``, which select code and are
constant for a flat, and ``h``, a NamedTuple of values. These are Python floats in eager mode and
0-D fp32 tensors in compiled mode, so that a schedule never recompiles. The same code runs in both
modes, and annotates both as float.

[Note: eager passes] In eager mode every operator is a kernel and a pass over memory, so rules use
operators of several operands: ``lerp_``, and plus(), add_(), add_product_() and add_quotient_(),
which are torch's add, addcmul and addcdiv. These take their factor as a number; where it is a
tensor, torch would wait for the device to read it, and the four functions multiply by it instead.
An element's result does not depend on its place in the tensor (tests/unit/test_kernels.py), so
that it is the same in any cut of the shards.

Rules import torch and nothing of shardfuse. They have no access to buffers and process groups.
"""

from __future__ import annotations

import math
import reprlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

Group = Mapping[str, Any]

Product = Tensor | tuple[Tensor, Tensor]
"""A tensor, or two whose product is meant."""


@dataclass(frozen=True, slots=True)
class Clip:
    """Scale gradients by ``max_norm / (norm + eps)`` where that is below 1.

    ``scope`` is the set of parameters under one norm. "global": all of the optimizer. "group": all
    of one group. "flat": all of one (group, dtype), as in torch_npu's BertAdam. "tensor", for a
    NormRule: each parameter alone.
    """

    max_norm: float
    scope: Literal["global", "group", "flat", "tensor"]
    eps: float = 0.0


class Fused(NamedTuple):
    """An operator of torch's that makes the whole update in one kernel, for fp32 elements.

    Of a rule of two passes it updates the states, and makes the direction, in the first pass. Its
    results depend on the place of an element modulo 16 alone, if at all.
    """

    name: str
    """Of the operator, such as "_fused_adamw_"; some devices have none of that name."""
    step: float
    """Number of the update, from 1."""
    call: Callable[[Tensor, Tensor, Sequence[Tensor], Tensor], None]
    """Takes the parameter, the mean gradient, the states, and the step as a () fp32 tensor.

    Of a rule of two passes it takes a copy of the parameter, which becomes the direction.
    """


class Settings(NamedTuple):
    """The constants of the math for one group, policy and step."""

    flags: Hashable
    """Selects the code of the math."""
    h: tuple[float, ...]
    """The rule's own NamedTuple of values, computed in double precision."""
    keeps_gradient: bool = False
    """Whether the direction needs the gradient, which is then kept until the second pass."""
    fused: Fused | None = None
    """The same as one operator of torch's, if there is one under these flags."""


class Member(NamedTuple):
    """The properties of a trained parameter that warnings() depends on."""

    name: str
    ndim: int
    policy: str
    group: Group


class UpdateRule(ABC):
    """Hyper-parameters, states and settings; subclassed by ElementwiseRule and ReducingRule."""

    granularity: ClassVar[str]
    """The unit that an update depends on: "element", "tensor", or sums over "block" or "row".

    The driver makes one pass over the shards for elements. Otherwise it makes two, and between them
    all-reduces the sums, by tensor where they are over blocks, or moves whole tensors.
    """

    counts_steps: ClassVar[bool] = True
    """Whether checkpoints hold a ``step`` per parameter, as the torch optimizer of this name does.

    Otherwise the step only distinguishes the first update of the states from later ones.
    """

    fixed_keys: ClassVar[frozenset[str]] = frozenset()
    """Keys of groups on which the states depend, so that a loaded value must be the present one."""

    def has_step(self, group: Group) -> bool:
        """Return whether the states of ``group`` have a ``step``; see counts_steps."""
        return self.counts_steps

    counts_in_groups: ClassVar[bool] = False
    """Whether a group has a ``step``, the number of steps that were not skipped, as in apex.

    It is absent before the first step. NVIDIA's learning-rate schedulers read it from the group,
    and stay at their first rate without it.
    """

    torch_keys: ClassVar[frozenset[str]] = frozenset()
    """The keys of [Note: torch's keys], and of other rules, that this rule implements."""

    def check(self, group: Group) -> None:
        """Check the hyper-parameters of a group: arguments, group dict, or state dict.

        Raises:
            ValueError: one is out of range or NaN, or a key of torch's that would be ignored.
            TypeError: one is not a number.
        """
        check_torch_keys(group, self.torch_keys, type(self).__name__.removesuffix("Rule"))
        check_lr(group)
        self.check_values(group)

    @abstractmethod
    def check_values(self, group: Group) -> None:
        """Raise ValueError if any hyper-parameter but ``lr`` is out of range or NaN.

        A schedule changes ``lr`` alone, which check_lr() checks in each step.
        """

    def mismatch(self, saved: Group, group: Group) -> str:
        """Return why saved states have another meaning under ``group``; empty if they have not.

        Args:
            saved: a group of a state dict.
            group: the optimizer's group after the load.
        """
        return ""

    @abstractmethod
    def state_names(self, group: Group) -> tuple[str, ...]:
        """Return the names of the fp32 states, in the order of the math's arguments."""

    fused_operators: ClassVar[tuple[str, ...]] = ()
    """The names of operators in ``Settings.fused``."""

    optional_states: ClassVar[tuple[str, ...]] = ()
    """States that only some hyper-parameters need; without them, loaded ones do not change."""

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
        """Return the settings of the ``step``-th update (from 1) of parameters of a policy."""

    def clip(self, group: Group) -> Clip | None:
        """Return how the gradients of ``group`` are clipped before each update; None: not."""
        return None

    def policy(self, name: str, named: bool, shape: tuple[int, ...], group: Group) -> str:
        """Return the policy of a parameter; parameters of one group and policy are updated alike.

        ``named`` is False if the user passed no names, so that ``name`` is generated.

        Raises:
            ValueError: the rule does not apply to a parameter of this shape.
        """
        return ""

    def storage(self, group: Group) -> str:
        """Return a name of the states of ``group``: only groups of equal ones share a flat."""
        return ""

    def warnings(self, members: Sequence[Member]) -> dict[str, str]:
        """Return {kind: text} of settings that are valid but unlikely to be intended."""
        return {}

    def describe(self) -> str:
        """Return the rule's options, on which ranks must agree, besides the groups' options."""
        return type(self).__name__


class ElementwiseRule(UpdateRule):
    """A rule where an element's update depends only on that element of param, grad, states."""

    granularity = "element"

    @abstractmethod
    def update(self, flags: Any, h: Any, p: Tensor, g: Tensor, *state: Tensor) -> None:
        """Update ``p`` and ``state`` in place from the mean gradient ``g``, all (rows, n)."""

    def absorb(self, flags: Any, h: Any, scale: float) -> Any:
        """Return ``h`` for gradients that are still to be multiplied by ``scale``; None if not.

        ``scale`` is plus or minus a power of two, so that factors round as the gradient would.
        """
        return None


class MatrixRule(ElementwiseRule):
    """A rule that maps whole matrices to whole matrices, and updates other groups elementwise.

    First pass: ``direction``, this rank's part of it, in ``wire_dtype``. The parts of a matrix are
    then sent to the rank that owns it for the step, which calls ``transform``; the results return.
    Second pass: ``apply``. A parameter is a matrix of some shape, or several of one shape, which
    its policy tells.
    """

    granularity = "tensor"

    wire_dtype: ClassVar[torch.dtype] = torch.bfloat16

    @abstractmethod
    def takes_matrices(self, group: Group) -> bool:
        """Return whether the parameters of ``group`` are matrices; else update() is called."""

    @abstractmethod
    def matrix_shape(self, policy: str) -> tuple[int, int]:
        """Return the shape of one matrix of a parameter of this policy."""

    @abstractmethod
    def direction(self, flags: Any, h: Any, p: Tensor, g: Tensor, *state: Tensor) -> Tensor:
        """Update ``state`` in place from the mean gradient ``g``, all (rows, n); return (rows, n).

        The result is the part of the matrix to be transformed.
        """

    @abstractmethod
    def transform(self, group: Group, matrices: Tensor) -> Tensor:
        """Return the transformed ``matrices`` (k, m, n) of ``wire_dtype``, each on its own."""

    @abstractmethod
    def apply(self, flags: Any, h: Any, p: Tensor, u: Tensor) -> None:
        """Update ``p`` (rows, n) in place along the transformed direction ``u``, ``wire_dtype``."""


class ReducingRule(UpdateRule):
    """A rule of two passes: factors from sums over several ranks scale the step.

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
    def products(self, p: Tensor, g: Tensor, u: Tensor) -> tuple[Product, ...]:
        """Return ``num_sums`` products (rows, n) to be summed; ``u`` is the direction."""

    @abstractmethod
    def apply(self, flags: Any, h: Any, p: Tensor, u: Tensor, factors: Tensor | None) -> None:
        """Update ``p`` (rows, n) in place along ``u``; None stands for no factors.

        ``factors`` are (num_factors, rows, 1) by tensor, (num_factors, rows, n) by row.
        """

    def move(
        self,
        flags: Any,
        h: Any,
        p: Tensor,
        g: Tensor | None,
        factors: Tensor | None,
        *state: Tensor,
    ) -> None:
        """Do all of the second pass: direction() and apply(), or the same in fewer passes."""
        self.apply(flags, h, p, self.direction(flags, h, p, g, *state), factors)


class NormRule(ReducingRule):
    """A rule that scales each parameter's step by a ratio of norms of the full parameter."""

    granularity = "block"

    def adapts(self, group: Group, policy: str) -> bool:
        """Return whether parameters of a policy have ratios; if not, nothing is summed."""
        return True

    @abstractmethod
    def vectors(self, flags: Any, h: Any, p: Tensor, u: Tensor) -> tuple[tuple[Tensor, Any], ...]:
        """Return ``num_sums`` pairs (tensor (rows, n), factor) whose product's squares are summed.

        A factor is a value of ``h``, or None for 1. ``u`` is the direction.
        """

    def products(self, p: Tensor, g: Tensor, u: Tensor) -> tuple[Product, ...]:
        """Raise NotImplementedError: the sums are those of vectors()."""
        raise NotImplementedError

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
    """A rule with sums over the rows of parameters of two or more dimensions."""

    granularity = "row"

    neutral: ClassVar[tuple[float, ...]]
    """The factors of parameters that have no rows."""

    @abstractmethod
    def factors(self, group: Group, sums: Tensor, rows: Rows) -> Tensor:
        """Return (num_factors, rows of parameters) from their ``sums`` (num_sums, the same)."""


LARGEST = torch.finfo(torch.float32).max
"""Hyper-parameters beyond this are infinite in fp32, in which the math runs."""

ROUNDING = 1e-12
"""How far below 0 a learning rate may be: torch's LinearLR ends there, by a schedule's rounding."""


def number(value: Any, name: str) -> float:
    """Return the hyper-parameter ``name``, a number or a one-element tensor, as a float.

    An int that is too large for a float becomes NaN, which every check refuses.

    Raises:
        TypeError: it has another type; a number written as a string, too.
        ValueError: a tensor of another size.
    """
    if type(value) is float:
        return value
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
    """Return a value's text for a message; an int may have hundreds of digits."""
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
    """Raise TypeError unless ``value`` is None or equals True or False.

    Text is refused, because "False" would be true.
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
"""Keys that every group of Paddle's Lamb has: {key: value without effect}."""


def check_torch_keys(group: Group, honoured: frozenset[str], name: str) -> None:
    """Raise ValueError if ``group`` has an option that the optimizer ``name`` would ignore.

    [Note: torch's keys] Beside its numbers, a group of torch.optim has keys of three kinds.
    ``maximize`` is part of the gradient's scale, for every rule. ``foreach``, ``fused`` and
    ``capturable`` select an implementation of torch's, and have no effect here. The other keys
    select another formula. A rule implements such a key, or refuses it, also in a state dict of
    another optimizer. Keys unknown to torch belong to schedulers and users, and are kept. Only a
    group with all keys of Paddle's Lamb is refused.
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
    """Return whether ``group[key]`` is true, or has no truth value."""
    try:
        return bool(group.get(key))
    except (TypeError, ValueError, RuntimeError):
        return True


def with_takes(beta1: float, beta2: float) -> tuple[float, float, float, float]:
    """Return (beta1, take1, beta2, take2) for update_moments(), where take = 1 - beta."""
    return beta1, 1.0 - beta1, beta2, 1.0 - beta2


def learning_rate(group: Group) -> Any:
    """Return ``group["lr"]`` as a float, or as a () tensor if it lies on an accelerator.

    The host would wait for the device to read that; the math then runs on tensors (see [Note: eager
    passes]), also where ``lr`` is annotated as float.
    """
    lr = group["lr"]
    if isinstance(lr, Tensor) and lr.device.type != "cpu":
        return lr.detach().reshape(())
    return float(lr)


def is_tensor(value: Any) -> bool:
    """Return whether a value of ``h`` is a tensor, although ``h`` is annotated as of floats."""
    return isinstance(value, Tensor)


def plus(x: Tensor, y: Tensor, factor: float) -> Tensor:
    """Return x + factor * y."""
    return x + y * factor if is_tensor(factor) else torch.add(x, y, alpha=factor)


def add_(out: Tensor, x: Tensor, factor: float) -> Tensor:
    """Add factor * x to ``out``, which is returned."""
    return out.add_(x * factor) if is_tensor(factor) else out.add_(x, alpha=factor)


def add_product_(out: Tensor, x: Tensor, y: Tensor, factor: float) -> Tensor:
    """Add factor * x * y to ``out``, which is returned."""
    if is_tensor(factor):
        return out.add_(x * y * factor)
    return out.addcmul_(x, y, value=factor)


def add_quotient_(out: Tensor, x: Tensor, y: Tensor, factor: float, *, guard: bool) -> Tensor:
    """Add factor * divide(x, y, guard=guard) to ``out``, which is returned."""
    if guard or is_tensor(factor):
        return add_(out, divide(x, y, guard=guard), factor)
    return out.addcdiv_(x, y, value=factor)


def update_moments(h: Any, g: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor) -> None:
    """Update Adam's moments in place by the betas and takes in ``h``."""
    if is_tensor(h.take1):
        exp_avg.mul_(h.beta1).add_(g * h.take1)  # lerp_ keeps inductor from joining LAMB's sums
    else:
        exp_avg.lerp_(g, h.take1)
    add_product_(exp_avg_sq.mul_(h.beta2), g, g, h.take2)


def vanishes(eps: Any) -> bool:
    """Return whether ``eps`` is zero in fp32, so that 0 / (sqrt(0) + eps) would be NaN."""
    return float(eps) <= 2.0**-150  # half of the least fp32 number, and rounds to even


def divide(numerator: Tensor, denominator: Tensor, *, guard: bool) -> Tensor:
    """Return numerator / denominator; with ``guard``, 0 where the denominator is 0.

    The guard keeps padding at zero when eps is 0; it costs a pass, so callers set it only then.
    """
    quotient = numerator / denominator
    return quotient.masked_fill_(denominator == 0, 0.0) if guard else quotient


SCHEDULED = frozenset({"lr"})
"""The keys of groups that a schedule changes, on which no other check and no state depends."""


def check_group(
    rule: UpdateRule, group: Group, where: str, changed: Collection[str] | None = None
) -> None:
    """Check the hyper-parameters of a group; errors begin with ``where``, the group's place.

    ``changed``: the keys of others than were checked before; None: any.

    Raises:
        ValueError: one is out of range.
        TypeError: one has another type.
    """
    try:
        if changed is not None and SCHEDULED.issuperset(changed):
            check_lr(group)
        else:
            rule.check(group)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{where}: {error}") from None
