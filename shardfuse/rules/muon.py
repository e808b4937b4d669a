"""Muon: momentum, orthogonalised matrix by matrix; AdamW for all other parameters."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from shardfuse.rules.base import (
    Group,
    MatrixRule,
    Member,
    Settings,
    add_,
    check_at_least_zero,
    learning_rate,
    number,
)
from shardfuse.rules.elementwise import AdamWRule

NS_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the quintic Newton-Schulz iteration, as in torch.optim.Muon."""

ADJUST_LR = (None, "original", "match_rms_adamw")

_NOT_HIDDEN = ("embed", "wte", "wpe", "lm_head", "head.weight", "output.weight")
"""Parts of names of matrices that are usually embeddings or output layers."""


class _MuonFlags(NamedTuple):
    nesterov: bool


class _MuonScalars(NamedTuple):
    take: float
    momentum: float
    shrink: float
    step_size: float


class MuonRule(MatrixRule):
    """b = momentum * b + (1 - momentum) * g; p -= lr * (weight_decay * p + ratio * orthogonal(b)).

    Source: torch.optim.Muon; K. Jordan et al., "Muon: An optimizer for hidden layers in neural
    networks", 2024, and arXiv 2502.16982 for the ratio "match_rms_adamw". With ``nesterov``, b is
    replaced by g + momentum * (b - g). ``orthogonal`` is a Newton-Schulz iteration in bf16. Groups
    with ``use_muon`` False follow AdamW.
    """

    fused_operators: ClassVar[tuple[str, ...]] = AdamWRule.fused_operators
    torch_keys: ClassVar[frozenset[str]] = AdamWRule.torch_keys | {"momentum", "nesterov"}
    optional_states: ClassVar[tuple[str, ...]] = AdamWRule.optional_states
    squares: ClassVar[frozenset[str]] = AdamWRule.squares
    fixed_keys: ClassVar[frozenset[str]] = frozenset({"use_muon", "split"})

    def __init__(self) -> None:
        self._adamw = AdamWRule()

    def takes_matrices(self, group: Group) -> bool:
        return bool(group["use_muon"])

    def check_values(self, group: Group) -> None:
        if not self.takes_matrices(group):
            self._adamw.check_values(group)
            return
        if group["amsgrad"]:
            raise ValueError("Invalid amsgrad: Muon has none. Set it in groups that follow AdamW.")
        check_at_least_zero(group, "momentum", "Invalid momentum value: {}", at_most=1.0)
        check_at_least_zero(group, "weight_decay", "Invalid weight_decay value: {}")
        check_at_least_zero(group, "eps", "Invalid epsilon value: {}")
        steps = group["ns_steps"]
        if not isinstance(steps, int) or not 0 <= steps < 100:
            raise ValueError(f"Invalid ns_steps: {steps}. Must be an integer in [0, 100).")
        coefficients = group["ns_coefficients"]
        if isinstance(coefficients, str | bytes) or len(tuple(coefficients)) != 3:
            raise ValueError(f"Invalid ns_coefficients: {coefficients}. Give three numbers.")
        for index, value in enumerate(coefficients):
            if not math.isfinite(number(value, f"ns_coefficients[{index}]")):
                raise ValueError(f"Invalid ns_coefficients: {coefficients}. Give three numbers.")
        if group["adjust_lr_fn"] not in ADJUST_LR:
            raise ValueError(
                f"Invalid adjust_lr_fn: {group['adjust_lr_fn']!r}. Use None, which is "
                '"original", or "match_rms_adamw".'
            )
        split = group["split"]
        if not isinstance(split, int) or split < 1:
            raise ValueError(f"Invalid split: {split}. Must be an integer of at least 1.")

    def state_names(self, group: Group) -> tuple[str, ...]:
        if self.takes_matrices(group):
            return ("momentum_buffer",)
        return self._adamw.state_names(group)

    def has_step(self, group: Group) -> bool:
        return not self.takes_matrices(group)

    def storage(self, group: Group) -> str:
        return "muon" if self.takes_matrices(group) else "adamw"

    def policy(self, name: str, named: bool, shape: tuple[int, ...], group: Group) -> str:
        """Return split and the shape of one matrix, such as "1*2048x512"; empty under AdamW."""
        if not self.takes_matrices(group):
            return ""
        split = group["split"]
        if 0 in shape:
            return f"{split}*1x1"
        if len(shape) == 3 and shape[0] == split:
            return f"{split}*{shape[1]}x{shape[2]}"
        if len(shape) == 2 and shape[0] % split == 0:
            return f"{split}*{shape[0] // split}x{shape[1]}"
        if len(shape) == 3:
            remedy = f'give stacked matrices a group of their own with "split": {shape[0]}'
        elif len(shape) == 2:
            remedy = "its rows are no multiple of split"
        else:
            remedy = 'give it to a group with "use_muon": False, which follows AdamW'
        raise ValueError(
            f"Parameter {name} {tuple(shape)} is in a group of Muon with split={split}, and Muon "
            f"updates matrices: {remedy}."
        )

    def matrix_shape(self, policy: str) -> tuple[int, int]:
        rows, _, columns = policy.partition("*")[2].partition("x")
        return int(rows), int(columns)

    def settings(self, group: Group, policy: str, step: int) -> Settings:
        split = str(group["split"]) if self.takes_matrices(group) else ""
        if split != policy.partition("*")[0]:
            raise ValueError(
                "use_muon or split of a parameter group has changed, on which its states depend. "
                "Build a new optimizer."
            )
        if not split:
            return self._adamw.settings(group, policy, step)
        lr, momentum = learning_rate(group), float(group["momentum"])
        h = _MuonScalars(
            take=1.0 - momentum,
            momentum=momentum,
            shrink=1.0 - lr * float(group["weight_decay"]),
            step_size=lr * self._ratio(group["adjust_lr_fn"], *self.matrix_shape(policy)),
        )
        return Settings(_MuonFlags(bool(group["nesterov"])), h)

    @staticmethod
    def _ratio(adjust_lr_fn: str | None, rows: int, columns: int) -> float:
        if adjust_lr_fn == "match_rms_adamw":
            return 0.2 * math.sqrt(max(rows, columns))
        return math.sqrt(max(1.0, rows / columns))

    def update(self, flags: Any, h: Any, p: Tensor, g: Tensor, *state: Tensor) -> None:
        self._adamw.update(flags, h, p, g, *state)

    def absorb(self, flags: Any, h: Any, scale: float) -> Any:
        return self._adamw.absorb(flags, h, scale)

    def direction(
        self, flags: _MuonFlags, h: _MuonScalars, p: Tensor, g: Tensor, *state: Tensor
    ) -> Tensor:
        (momentum,) = state
        momentum.lerp_(g, h.take)
        return torch.lerp(g, momentum, h.momentum) if flags.nesterov else momentum

    def transform(self, group: Group, matrices: Tensor) -> Tensor:
        coefficients = tuple(float(value) for value in group["ns_coefficients"])
        return orthogonalize(matrices, coefficients, group["ns_steps"], eps=float(group["eps"]))

    def apply(self, flags: _MuonFlags, h: _MuonScalars, p: Tensor, u: Tensor) -> None:
        p.mul_(h.shrink)
        add_(p, u.to(p.dtype), -h.step_size)

    def warnings(self, members: Sequence[Member]) -> dict[str, str]:
        """Warn of embeddings and output layers, which are matrices, but not of hidden layers."""
        found = [
            member.name
            for member in members
            if self.takes_matrices(member.group) and is_named_like_embedding(member.name)
        ]
        if not found:
            return {}
        names = ", ".join(found[:3]) + (", ..." if len(found) > 3 else "")
        return {
            "not hidden": f"Muon orthogonalises the updates of {names}. It is meant for hidden "
            "layers: give embeddings and output layers to a group with use_muon=False, which "
            "follows AdamW; or pass the model itself, whose nn.Embedding and output layer are "
            "found."
        }


def is_named_like_embedding(name: str) -> bool:
    """Return whether a matrix of this name is usually an embedding or an output layer."""
    return any(part in name.lower() for part in _NOT_HIDDEN)


def orthogonalize(
    matrices: Tensor, coefficients: Sequence[float], steps: int, *, eps: float
) -> Tensor:
    """Return nearly orthogonal matrices (k, m, n) of the directions of ``matrices``, in bf16.

    The quintic Newton-Schulz iteration of torch.optim.Muon, with its roundings; equal shapes share
    the matrix products. Singular values become about 0.7 to 1.2. ``matrices`` is overwritten.
    """
    a, b, c = coefficients
    is_tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.mT if is_tall else matrices
    for matrix in x:  # one by one: a norm over two dimensions of three is rounded otherwise
        matrix.div_(matrix.norm().clamp(min=eps))
    for _ in range(steps):
        gram = torch.bmm(x, x.mT)
        update = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, update, x, beta=a)
    return x.mT if is_tall else x
