"""How much larger or smaller the steps of one LAMB variant are than another's at equal lr."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor

from shardfuse.comm import SingleRank
from shardfuse.engine import setup
from shardfuse.engine.external import ForeignShards, Segment
from shardfuse.engine.kernels import Kernels
from shardfuse.engine.step import StepEngine
from shardfuse.rules import LambRule
from shardfuse.rules.lamb import LambVariant, switches_for

VariantOrSwitches = LambVariant | Mapping[str, Any]
"""A variant's name, or a dict of ShardedLamb's ``variant``, ``adam`` and switches."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LambStepSize:
    """The step of one parameter under both variants: its L2 norm, divided by the learning rate.

    Args:
        name: name of the parameter.
        shape: shape of the parameter.
        norm: the step under the first variant.
        other_norm: the step under the other variant.
    """

    name: str
    shape: tuple[int, ...]
    norm: float
    other_norm: float

    @property
    def ratio(self) -> float:
        """norm / other_norm; NaN if both are 0, inf if only the other is 0."""
        if self.other_norm == 0:
            return math.nan if self.norm == 0 else math.inf
        return self.norm / self.other_norm


@dataclass(frozen=True, kw_only=True, slots=True)
class LambComparison:
    """The result of compare_lamb_variants(); ``str()`` makes a table of it.

    Args:
        variant: the first variant, with its switches.
        other: the other variant, with its switches.
        num_steps: number of the compared step, from 1.
        params: a LambStepSize for each trained parameter.
    """

    variant: str
    other: str
    num_steps: int
    params: tuple[LambStepSize, ...]

    @property
    def median_ratio(self) -> float:
        """Median of the parameters' ratios; NaN if no parameter moves."""
        return _median(self.params)

    @property
    def max_ratio(self) -> float:
        """Largest of the parameters' ratios; NaN if no parameter moves."""
        return max(_ratios(self.params), default=math.nan)

    @property
    def lr_factor(self) -> float:
        """Factor from other's lr to variant's lr that keeps the step of the median matrix.

        Matrices are parameters of two or more dimensions. Without any, all parameters count.
        """
        matrices = [size for size in self.params if len(size.shape) > 1]
        ratio = _median(matrices or self.params)
        return 1.0 / ratio if ratio else math.inf

    def __str__(self) -> str:
        width = max([len("parameter"), *(len(size.name) for size in self.params)])
        lines = [
            f"|step {self.num_steps}| / lr: {self.variant} and {self.other}",
            f"{'parameter':{width}}  {'variant':>10}  {'other':>10}  {'ratio':>8}",
        ]
        lines += [
            f"{size.name:{width}}  {size.norm:10.4g}  {size.other_norm:10.4g}  {size.ratio:8.3g}"
            for size in self.params
        ]
        lines += [
            f"ratio: median {self.median_ratio:.3g}, largest {self.max_ratio:.3g}",
            f"From {self.other} to {self.variant}: multiply lr by {self.lr_factor:.3g} to keep the "
            "step of the median matrix.",
        ]
        return "\n".join(lines)


@torch.no_grad()
def compare_lamb_variants(
    params: Iterable[Any],
    variant: VariantOrSwitches,
    other: VariantOrSwitches = "google",
    *,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-6,
    weight_decay: float = 0.01,
    num_steps: int = 1,
    seed: int = 0,
) -> LambComparison:
    """Compare the steps of two LAMB variants at equal lr, per parameter. Local.

    Runs the optimizer's own rule, tensor by tensor, from zero moments: ``num_steps`` updates of the
    moments, then the step of the last update, divided by the learning rate. Gradients are
    ``p.grad``, the same in every step. If that is None, they are new standard-normal noise in every
    step. Weights do not move, and nothing in the model changes.

    The result shows the effect of norms, clamps, exclusions, bias correction and decay on these
    weights and gradients. It does not show which variant trains better, or how weights and
    gradients would diverge. Clipping by the global norm is left out.

    Args:
        params: parameters, (name, parameter) pairs, or group dicts holding either, which may have
            their own betas, eps and weight_decay. Frozen parameters are left out.
        variant, other: a variant's name, or a dict such as ``{"variant": "npu", "clamp_value":
            math.inf}`` with any of ShardedLamb's switches.
        betas, eps, weight_decay: as in ShardedLamb, whose default weight_decay is 0.
        num_steps: number of the compared step, from 1.
        seed: seed of the noise.

    Raises:
        ValueError: a hyper-parameter, variant or ``num_steps`` out of range, or names are needed.
        TypeError: parameters that ShardedLamb would refuse, such as a module.
    """
    if num_steps < 1:
        raise ValueError(f"Invalid num_steps: {num_steps}. Must be >= 1.")
    defaults = {"lr": 1.0, "betas": betas, "eps": eps, "weight_decay": weight_decay}
    groups = _groups(params, defaults)
    rules = [_rule(variant), _rule(other)]
    members = [setup.read(groups, 0, rule) for rule in rules]
    sizes = []
    for index, ((param, spec), (_, other_spec)) in enumerate(zip(*members, strict=True)):
        if spec.frozen or not param.numel():
            continue
        group = groups[spec.group]
        first, second = (
            _step_norm(rule, {**group, "lr": 1.0}, policy, param, (num_steps, seed + index))
            for rule, policy in zip(rules, (spec.policy, other_spec.policy), strict=True)
        )
        sizes.append(LambStepSize(name=spec.name, shape=spec.shape, norm=first, other_norm=second))
    return LambComparison(
        variant=_label(variant), other=_label(other), num_steps=num_steps, params=tuple(sizes)
    )


def _step_norm(
    rule: LambRule, group: Mapping[str, Any], policy: str, param: Tensor, run: tuple[int, int]
) -> float:
    """Return the norm of step ``run[0]`` of ``param``, with noise of seed ``run[1]``."""
    num_steps, seed = run
    # In fp64, so that the step can be told from the weights, and its norm summed.
    start = param.detach().double().reshape(-1)
    p = start.clone()
    states = (torch.zeros_like(p), torch.zeros_like(p))
    shards = ForeignShards(rule, p, [Segment(0, 0, p.numel(), policy)], policies=[policy])
    kernels = Kernels(rule, "eager", p.device)
    engine = StepEngine(rule, shards, comm=SingleRank(), kernels=kernels)
    generator = torch.Generator().manual_seed(seed)
    for step in range(1, num_steps + 1):
        if param.grad is None:
            p.grad = torch.randn(p.shape, generator=generator).to(p)
        else:
            p.grad = param.grad.to(p).reshape(-1)
        p.copy_(start)
        shards.set_step(group, states, step)
        engine.run(None, None)
    return float(torch.linalg.vector_norm(p - start))


def _rule(variant: VariantOrSwitches) -> LambRule:
    if isinstance(variant, str):
        return LambRule(switches_for(variant))
    switches = {"variant": "npu", **variant}
    adam = switches.pop("adam", False)
    return LambRule(switches_for(**switches), adam=adam)


def _label(variant: VariantOrSwitches) -> str:
    if isinstance(variant, str):
        return variant
    switches = dict(variant)
    name = switches.pop("variant", "npu")
    return " ".join([str(name), *(f"{key}={value}" for key, value in switches.items())])


def _groups(params: Iterable[Any], defaults: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return group dicts as an optimizer has them: parameters, and names where pairs were given."""
    items = setup.given(params)
    groups = []
    for group in items if isinstance(items[0], Mapping) else [{"params": items}]:
        given = group["params"]
        members = [given] if isinstance(given, Tensor) else list(given)
        own = {**defaults, **group, "params": members}
        if members and isinstance(members[0], tuple):
            own["param_names"] = [name for name, _ in members]
            own["params"] = [param for _, param in members]
        groups.append(own)
    return groups


def _ratios(sizes: Sequence[LambStepSize]) -> list[float]:
    return [size.ratio for size in sizes if not math.isnan(size.ratio)]


def _median(sizes: Sequence[LambStepSize]) -> float:
    ratios = _ratios(sizes)
    return median(ratios) if ratios else math.nan
