"""The references that do the updates: torch.optim or an oracle in fp64, and exact rules in fp32.

They have one parameter after another, in order of registration, and take mean gradients. Nothing
here imports shardfuse.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from tests.fuzz.choices import Kind
from tests.fuzz.exact import RULES, State
from tests.support import oracles, oracles_family

Means = Sequence[Tensor | None]


class Engine(Protocol):
    """A full model's optimizer in double precision."""

    groups: list[dict[str, Any]]

    def add_group(
        self, values: Sequence[Tensor], names: Sequence[str], overrides: Mapping[str, Any]
    ) -> None:
        """Add parameters that start from ``values``."""

    def step(self, means: Means) -> None:
        """Update every parameter whose mean gradient is not None."""

    def values(self) -> list[Tensor]:
        """Return all parameters, fp64; writing to them counts."""

    def states(self) -> list[dict[str, Any]]:
        """Return {state name: tensor} of every parameter, with ``step`` where it is counted."""


class TorchEngine:
    """An optimizer of torch.optim, one tensor at a time."""

    def __init__(self, name: str, options: Mapping[str, Any]) -> None:
        self._class, self._options = getattr(torch.optim, name), options
        self._params: list[Tensor] = []
        self._optimizer: Any = None
        self.groups: list[dict[str, Any]] = []

    def add_group(
        self, values: Sequence[Tensor], names: Sequence[str], overrides: Mapping[str, Any]
    ) -> None:
        params = [torch.nn.Parameter(value.detach().double()) for value in values]
        group = {"params": params, **overrides}
        if self._optimizer is None:
            self._optimizer = self._class([group], foreach=False, **self._options)
        else:
            self._optimizer.add_param_group(group)
        self._params += params
        self.groups = self._optimizer.param_groups

    def step(self, means: Means) -> None:
        for param, mean in zip(self._params, means, strict=True):
            param.grad = mean
        self._optimizer.step()

    def values(self) -> list[Tensor]:
        return [param.detach() for param in self._params]

    def states(self) -> list[dict[str, Any]]:
        return [dict(self._optimizer.state.get(param, {})) for param in self._params]


class OracleEngine:
    """An oracle of tests/support/oracles.py or tests/support/oracles_family.py."""

    def __init__(self, name: str, options: Mapping[str, Any]) -> None:
        self._class = getattr(oracles, name, None) or getattr(oracles_family, name)
        self._options = options
        self._oracle: Any = None
        self.groups: list[dict[str, Any]] = []

    def add_group(
        self, values: Sequence[Tensor], names: Sequence[str], overrides: Mapping[str, Any]
    ) -> None:
        group = {"params": list(values), **overrides}
        added = self._class([group], names=[list(names)], **self._options)
        if self._oracle is None:
            self._oracle = added
            self.groups = added.groups
        else:
            self.groups.append(added.groups[0])

    def step(self, means: Means) -> None:
        remaining = iter(means)
        self._oracle.step([[next(remaining) for _ in group["params"]] for group in self.groups])

    def values(self) -> list[Tensor]:
        return list(self._oracle.values())

    def states(self) -> list[dict[str, Any]]:
        params = [param for group in self.groups for param in group["params"]]
        return [{**param.state, "step": param.step} if param.step else {} for param in params]


class ExactEngine:
    """A rule of exact.py over fp32 masters, with the hyper-parameters of another engine's groups.

    Args:
        name: the rule.
        groups: read at every step.
        fused: whether updates are by torch's fused operators, for rules that have one.
    """

    def __init__(self, name: str, groups: Sequence[Mapping[str, Any]], *, fused: bool) -> None:
        self._rule, self.is_fused = RULES[name], fused
        self._groups = groups
        self._params: list[tuple[int, Tensor]] = []
        self._states: list[State] = []
        self._steps: list[int] = []

    def add_group(self, values: Sequence[Tensor]) -> None:
        """Add the parameters by which the groups have grown; they start from ``values``."""
        owners = [number for number, group in enumerate(self._groups) for _ in group["params"]]
        for value in values:
            group = owners[len(self._params)]
            self._params.append((group, value.detach().float().clone()))
            self._states.append({})
            self._steps.append(0)

    def step(self, means: Means) -> None:
        """Update every parameter whose mean gradient is not None."""
        for index, mean in enumerate(means):
            if mean is not None:
                group, value = self._params[index]
                self._steps[index] += 1
                self._rule(
                    value,
                    mean.float(),
                    self._states[index],
                    {**self._groups[group], "fused": self.is_fused},
                    self._steps[index],
                )

    def values(self) -> list[Tensor]:
        """Return all masters, fp32; writing to them counts."""
        return [value for _, value in self._params]

    def states(self) -> list[State]:
        """Return {state name: tensor} of every parameter."""
        return self._states

    def steps(self) -> list[int]:
        """Return how often every parameter was updated."""
        return self._steps


class MuonEngine:
    """ShardedMuon's groups over the exact rule, without fused operators.

    Not in double precision: what bf16 rounds otherwise the iteration may enlarge to any size, so
    only bits can be compared. A group without ``use_muon`` is divided; its matrices come first.
    """

    _MUON: ClassVar[dict[str, Any]] = {
        **{"lr": 1e-3, "weight_decay": 0.1, "momentum": 0.95, "nesterov": True, "eps": 1e-7},
        **{"ns_coefficients": (3.4445, -4.7750, 2.0315), "ns_steps": 5, "adjust_lr_fn": None},
        "split": 1,
    }
    _ADAMW: ClassVar[dict[str, Any]] = {"betas": (0.9, 0.999), "eps": 1e-8, "amsgrad": False}

    def __init__(self, options: Mapping[str, Any]) -> None:
        own = {**self._MUON, **options}
        adamw = own.pop("adamw", {})
        self._defaults = {True: own, False: {**own, **self._ADAMW, **adamw}}
        self.groups: list[dict[str, Any]] = []
        self._exact = ExactEngine("muon", self.groups, fused=False)

    def add_group(
        self, values: Sequence[Tensor], names: Sequence[str], overrides: Mapping[str, Any]
    ) -> None:
        split = overrides.get("split", self._defaults[True]["split"])
        by_kind: dict[bool, list[str]] = {}
        for name, value in zip(names, values, strict=True):
            is_matrix = value.dim() == 2 or (value.dim() == 3 and split != 1)
            by_kind.setdefault(overrides.get("use_muon", is_matrix), []).append(name)
        assert list(by_kind) == sorted(by_kind, reverse=True), "matrices come first"
        for use_muon, members in by_kind.items():
            own = {**self._defaults[use_muon], **overrides}
            self.groups.append({**own, "params": members, "use_muon": use_muon})
        self._exact.add_group(values)

    def step(self, means: Means) -> None:
        self._exact.step(means)

    def values(self) -> list[Tensor]:
        return self._exact.values()

    def states(self) -> list[dict[str, Any]]:
        pairs = zip(self._exact.states(), self._exact.steps(), strict=True)
        return [{**own, "step": step} if "exp_avg" in own else dict(own) for own, step in pairs]


def engine_for(kind: Kind, options: Mapping[str, Any]) -> Engine:
    """Return the engine of a rule, without parameters yet."""
    if kind.exact == "muon":
        return MuonEngine(options)
    if kind.torch:
        return TorchEngine(kind.torch, options)
    return OracleEngine(kind.oracle, options)
