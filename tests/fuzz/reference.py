"""Interprets a program for all ranks in one process: the mean gradient, then a full update.

Imports nothing of shardfuse. Every rank runs it for itself and compares after each operation.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tests.fuzz.choices import kind_of
from tests.fuzz.engines import ExactEngine, Means, engine_for
from tests.fuzz.local import LOCAL
from tests.fuzz.program import LOW, Op, Program, Spec, gradient, initial_value
from tests.fuzz.ranks import AllRanks

# Ranks are late, the actor compares states, parameters are re-allocated: all values stay.
WITHOUT_EFFECT = ("delay", "check_state", "realloc", "write_buffers")
MOST_KINDS = 8
CANCELLED = 1e-4
"""Of groups and dtypes: so many small ones share kernel calls."""

STALE = Op("edit_grad", {"names": None, "ranks": range(9), "factor": 0.5})


class Norm(NamedTuple):
    """What a norm or a clip must return."""

    value: float


class Reference(AllRanks):
    """All ranks' gradients and one full model."""

    def __init__(self, program: Program) -> None:
        super().__init__(program)
        kind = kind_of(program.optimizer)
        self.engine = engine_for(kind, program.options)
        self.exact: ExactEngine | None = None
        self._kinds: set[tuple[int, str, bool]] = set()  # those with a range of a flat
        self._groups: list[int] = []  # of each parameter
        self._exact_rule = kind.exact if program.kind == "integers" else ""
        self.largest: list[float] = []  # of each parameter's values so far
        self.largest_grad = 1.0
        self.cancelled: list[Tensor] = []  # of each parameter, elements whose update is ill-defined
        self.coefficient = 1.0
        self.hooks: list[str] = []
        self.overflow: tuple[str, int] | None = None
        # Masters before they were edited, by engine, where there was no update since.
        self.edited: dict[str, list[Tensor]] = {}
        self.is_spoiled = False  # whether gradients may be anything until they are cleared
        for group in program.groups:
            self.add_group(group.specs, group.overrides)
        if program.options.get("max_grad_norm", 0) > 0:
            self.loses_bits()
        self.start_scaling()

    # What is compared

    def loses_bits(self) -> None:
        """Note that from here on results are rounded in some order."""
        self.exact = None
        self._exact_rule = ""

    def visible(self, index: int) -> Tensor:
        """Return a parameter as the model has it: in its own dtype if exact, else fp64."""
        if self.exact is not None:
            return self.exact.values()[index].to(getattr(torch, self.specs[index].dtype))
        return self.engine.values()[index]

    # Operations, by name

    def apply(self, op: Op) -> Any:
        """Do ``op``; return what it must return."""
        if op.name in LOCAL:
            self.apply_to_ranks(op)
            return None
        if op.name in WITHOUT_EFFECT:
            return None
        return getattr(self, op.name)(**op.args)

    def add_group(self, specs: Sequence[Spec], overrides: Mapping[str, Any]) -> None:
        """Add parameters to every rank and to the full model."""
        for model in self.ranks:
            model.add(specs)
        values = [initial_value(spec) for spec in specs]
        self.engine.add_group(values, [spec.name for spec in specs], overrides)
        if not self.names and self._exact_rule:
            is_fused = self.program.sharding.get("kernel", "auto") == "auto"
            self.exact = ExactEngine(self._exact_rule, self.engine.groups, fused=is_fused)
        if self.exact is not None:
            self.exact.add_group(values)
        for spec, value in zip(specs, values, strict=True):
            self.names.append(spec.name)
            self.specs.append(spec)
            self.largest.append(magnitude(value))
            self.cancelled.append(torch.zeros_like(value, dtype=torch.bool))
            self._groups.append(len(self.engine.groups))
        self._lay_out()

    def _lay_out(self) -> None:
        """Note how parameters are laid out now: frozen ones by themselves."""
        params = self.ranks[0].params
        for spec, group in zip(self.specs, self._groups, strict=True):
            self._kinds.add((group, spec.dtype, params[spec.name].requires_grad))
        if len(self._kinds) >= MOST_KINDS:
            self.loses_bits()  # their numbers are tensors, by which updates are rounded otherwise

    def _note_cancelled(self, means: Means) -> None:
        """Note where a gradient and its decay leave a difference of about their rounding.

        Adam divides it by its own size.
        """
        for index, mean in enumerate(means):
            if mean is not None:
                group = self.engine.groups[self._groups[index] - 1]
                decay = float(group.get("weight_decay") or 0.0) * self.engine.values()[index]
                size = mean.abs() + decay.abs()
                self.cancelled[index] |= (mean + decay).abs() < CANCELLED * size

    def zero_grad(self, to_none: bool, by_model: bool) -> None:
        """Clear gradients as the optimizer, which forgets its clip too, or as the model does."""
        super().zero_grad(to_none, by_model)
        self.is_spoiled = False
        if not by_model:
            self.coefficient = 1.0

    def set_option(self, group: int, key: str, value: Any) -> None:
        """Set a hyper-parameter."""
        if group < len(self.engine.groups):
            self.engine.groups[group][key] = value

    def decay_lr(self) -> None:
        """Halve all learning rates, as ExponentialLR(0.5)."""
        for group in self.engine.groups:
            group["lr"] *= 0.5

    def hook_step(self, kind: str) -> None:
        """Register a hook on step()."""
        self.hooks.append(kind)

    def reload(self, mode: str, sharding: Mapping[str, Any], keep: bool) -> None:
        """Move the state to a new optimizer: values stay; over copies, gradients do not."""
        if mode == "copies":
            for model in self.ranks:
                model.replace()
        for cleared in self.cleared:
            cleared.clear()
        self.coefficient = 1.0
        self.overflow = None
        self._lay_out()
        if self.exact is not None and "kernel" in sharding:
            self.exact.is_fused = sharding["kernel"] == "auto"

    def edit_param(self, names: Sequence[str], how: str, seed: int) -> None:
        """Change parameters in place, alike on all ranks."""
        engines = [self.engine] if self.exact is None else [self.engine, self.exact]
        for index, (name, spec) in enumerate(zip(self.names, self.specs, strict=True)):
            if name not in names:
                continue
            values = [engine.values()[index] for engine in engines]
            before = self.edited.setdefault(name, [value.clone() for value in values])
            for value, old in zip(values, before, strict=False):
                edit(value, self.program, spec, how, seed, old)
            self._note(index)

    # Gradients of all ranks

    def norm(self, factors: Sequence[float], power: float = 2.0) -> float:
        """Return the norm of the mean gradient with the clips made so far."""
        grads = [mean.flatten() for mean in self.means(factors) if mean is not None]
        flat = torch.cat([torch.zeros(1), *grads])
        return float(torch.linalg.vector_norm(flat, power)) * self.coefficient

    def grad_norm(self) -> Norm:
        """Return the norm; nothing changes."""
        if self.program.sharding.get("grads_are_reduced"):
            self.reduce()
        return Norm(self.norm([1.0] * len(self.ranks)))

    # The step

    def can_step(self) -> bool:
        """Whether a step can be taken: torch's scalers want a gradient on every rank."""
        return not self.program.scaler or self.all_have_gradients()

    def can_be_stale(self) -> bool:
        """Whether every rank has a gradient to change after a clip, and no hook does."""
        return not self.hooks and self.all_have_gradients()

    def step(
        self,
        clip: float | None = None,
        power: float = 2.0,
        norm_first: bool = False,
        unscale: bool = False,
        closure: Mapping[str, Any] | None = None,
    ) -> list[Norm] | None:
        """Take a step; return the norms that it must give, or None where it cannot be taken."""
        if not self.can_step():
            return None
        scaled = bool(self.program.scaler)
        if self.program.sharding.get("grads_are_reduced") and closure is None:
            self.reduce()
        found = [self.overflows(rank) for rank in range(len(self.ranks))] if scaled else []
        if scaled:
            self.overflow = self.first_overflow() or self.overflow
        factors = [1.0] * len(self.ranks)
        if scaled and unscale:
            for model, scale in zip(self.ranks, self.scales, strict=True):
                for param in model.params.values():
                    if param.grad is not None:
                        param.grad.mul_(1.0 / scale.value)
        elif scaled:
            factors = [1.0 / scale.value for scale in self.scales]
            self.is_spoiled = self.program.spoils and len(set(factors)) > 1
        norms = [Norm(self.norm(factors))] if norm_first else []
        if clip is not None:
            norms.append(Norm(self._clip(factors, clip, power)))
        self._update(factors, closure, skip=any(found))
        if scaled:
            if self.program.scaler == "sharded":
                found = [any(found)] * len(found)
            for model, scale, overflowed in zip(self.ranks, self.scales, found, strict=True):
                scale.update(overflowed)
                model.scale = scale.value
        return norms

    def _clip(self, factors: Sequence[float], limit: float, power: float) -> float:
        norm = self.norm(factors, power)
        if math.isfinite(norm):
            ratio = limit / (norm + 1e-6)
            if ratio < 1.001:
                self.loses_bits()
            self.coefficient *= min(1.0, ratio)
        return norm

    def _update(
        self, factors: Sequence[float], closure: Mapping[str, Any] | None, skip: bool
    ) -> None:
        for _ in range(self.hooks.count("halve")):
            for model in self.ranks:
                for param in model.params.values():
                    if param.grad is not None:
                        param.grad.mul_(0.5)
        if closure is not None:
            super().zero_grad(to_none=True, by_model=True)
            self.apply_to_ranks(Op("backward", closure))
        if not skip:
            means = self.means(factors)
            clipped = [None if mean is None else mean * self.coefficient for mean in means]
            self._note_cancelled(clipped)
            self.engine.step(clipped)
            if self.exact is not None:
                self.exact.step(means)
            for index, mean in enumerate(clipped):
                if mean is not None:
                    self._note(index)
                    self.edited.pop(self.names[index], None)
                    self.largest_grad = max(self.largest_grad, magnitude(mean))
        self.coefficient = 1.0
        for _ in range(self.hooks.count("shift")):
            names = [s.name for s in self.specs if s.dtype not in LOW]
            self.edit_param(names, "add", 0)

    def stale_clip(self) -> None:
        """Clip, then change all gradients: step() must raise."""
        if not self.can_be_stale():
            return
        if self.program.sharding.get("grads_are_reduced"):
            self.reduce()
        self.apply_to_ranks(STALE)
        self.coefficient = 1.0

    def _note(self, index: int) -> None:
        self.largest[index] = max(self.largest[index], magnitude(self.engine.values()[index]))


def magnitude(value: Tensor) -> float:
    """Return the largest absolute value, 0 where there is none."""
    return float(value.detach().abs().max()) if value.numel() else 0.0


def edit(
    value: Tensor, program: Program, spec: Spec, how: str, seed: int, before: Tensor | None = None
) -> None:
    """Change a parameter in place, or a reference's master of it, which was ``before``.

    A master keeps its digits where in the end its parameter has the value that it had.
    """
    if how == "scale":
        value.mul_(0.5)
    elif how == "add":
        value.add_(0.25)
    else:
        dtype = getattr(torch, spec.dtype)
        fresh = gradient(program, spec, seed, 0).to(dtype)
        before = value if before is None else before
        value.copy_(torch.where(before.to(dtype) == fresh, before, fresh.to(value.dtype)))
