"""ShardedLamb, and a comparison of its variants on one step of given gradients."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from shardfuse.comm import SingleRank
from shardfuse.config import ShardConfig
from shardfuse.engine import setup
from shardfuse.engine.external import PartitionShards, PartitionSlice
from shardfuse.engine.kernels import Kernels
from shardfuse.engine.step import StepDriver
from shardfuse.optim.base import ShardedOptimizer
from shardfuse.optim.compat import TorchOptions
from shardfuse.rules import LambRule
from shardfuse.rules.lamb import LambVariant, switches_for
from shardfuse.runtime import untraced

if TYPE_CHECKING:
    from typing_extensions import Unpack


class ShardedLamb(ShardedOptimizer):
    """LAMB with exact per-tensor trust ratios over shards; signature of torch_npu's NpuFusedLamb.

        [g *= min(1, max_grad_norm / norm of all gradients)        with use_global_grad_norm]
        m = beta1 * m + (1 - beta1) * g;    v = beta2 * v + (1 - beta2) * g^2
        u = m / (sqrt(v) + eps) + weight_decay * p         (m, v bias-corrected in some variants)
        p -= lr * min(||p||, clamp_value) / ||u|| * u      (ratio 1 where either norm is 0)

    Norms are those of whole parameter tensors (arXiv 1904.00962), although tensors are cut across
    ranks. A step has one all-reduce of 2 floats per parameter, and one more of a few floats with
    use_global_grad_norm. The variants:

        variant   bias correction   clamp_value   ratio where weight decay is 0   exclusions
        npu       no                10            yes                             none
        apex      yes               none          no                              none
        nvlamb    yes               none          yes                             none
        google    yes               none          yes                             LayerNorm, bias
        paddle    yes               none          no                              none
        deepspeed in the step size  none          yes; ratio in [0.01, 10]        none

    At equal lr, steps of two variants differ by a factor of up to 11, so a recipe belongs to its
    variant. compare_lamb_variants() shows the factor for a model.

    Args:
        params: parameters, (name, parameter) pairs, or group dicts holding either.
        lr, betas, eps, weight_decay: as in the formula.
        adam: set every trust ratio to 1. Only variants that correct bias then equal Adam.
        use_global_grad_norm: clip by the norm over all groups and dtypes. (torch_npu 2.13 raises
            AttributeError here.) No variant turns it on; apex's and Google's own LAMB clip at 1.
        variant: preset of the switches below. A switch that is not None overrides it.
        max_grad_norm: bound of the global gradient norm, by default 1; only with
            use_global_grad_norm.
        bias_correction: divide the moments by 1 - beta^t: True inside the ratio, "outside" in the
            step size, False not at all.
        clamp_value: upper bound of the weight norm; ``math.inf`` for none.
        min_coeff, max_coeff: bounds of the trust ratio.
        always_adapt: use the ratio also where weight decay is 0 (apex: use_nvlamb).
        exclude_from_weight_decay: regular expressions; parameters with such names have no decay.
        exclude_from_layer_adaptation: regular expressions; the trust ratio of such parameters is 1.
        sharding: a ShardConfig, or a plain dict with its keys.
        torch_options: ``maximize`` and other keywords of torch.optim's; see ShardedOptimizer.

    Raises:
        ValueError: a hyper-parameter is out of range or NaN, here or in a group dict; names are
            needed and not given; or the ranks disagree about the parameters.

    Warns:
        UserWarning: once, on the first rank, if ratios need a decay and no parameter has one, so
            that this is Adam; if a parameter of fewer than two dimensions is decayed and adapted;
            or if max_grad_norm has no effect, because use_global_grad_norm is not given.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0,
        adam: bool = False,
        use_global_grad_norm: bool = False,
        *,
        variant: LambVariant = "npu",
        max_grad_norm: float | None = None,
        bias_correction: bool | Literal["outside"] | None = None,
        clamp_value: float | None = None,
        min_coeff: float | None = None,
        max_coeff: float | None = None,
        always_adapt: bool | None = None,
        exclude_from_weight_decay: Sequence[str] | None = None,
        exclude_from_layer_adaptation: Sequence[str] | None = None,
        sharding: ShardConfig | Mapping[str, Any] | None = None,
        **torch_options: Unpack[TorchOptions],
    ) -> None:
        def make_rule() -> LambRule:
            switches = switches_for(
                variant,
                bias_correction=bias_correction,
                clamp_value=clamp_value,
                min_coeff=min_coeff,
                max_coeff=max_coeff,
                always_adapt=always_adapt,
                exclude_from_weight_decay=exclude_from_weight_decay,
                exclude_from_layer_adaptation=exclude_from_layer_adaptation,
            )
            return LambRule(switches, adam, use_global_grad_norm, max_grad_norm)

        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults, make_rule, sharding, **torch_options)

    @untraced
    def trust_ratios(self) -> dict[str, float]:
        """Return {parameter name: trust ratio} of the last step; empty before the first. Local.

        The ratio is 1 if the variant takes none, and for a parameter that was not updated. Every
        rank has all ratios, so this needs no communication. Reading them waits for the device.
        """
        ratio = (self._stepped_by or self._driver).ratio
        if ratio is None:
            return {}
        names = (spec.name for spec in self.layout.specs)
        return dict(zip(names, ratio.tolist(), strict=True))


# A comparison of variants


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
    def median_matrix_ratio(self) -> float:
        """Median of the ratios of matrices: parameters of two or more dimensions.

        Without any, all parameters count. NaN if none moves.
        """
        matrices = [size for size in self.params if len(size.shape) > 1]
        return _median(matrices or self.params)

    @property
    def lr_factor(self) -> float:
        """Factor from other's lr to variant's lr that keeps the step of the median matrix."""
        ratio = self.median_matrix_ratio
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
            f"ratio over all parameters: median {self.median_ratio:.3g}, largest "
            f"{self.max_ratio:.3g}; median over matrices {self.median_matrix_ratio:.3g}",
            f"From {self.other} to {self.variant}: multiply lr by {self.lr_factor:.3g} to keep the "
            "step of the median matrix. Biases and norms, which have few weights, do not count.",
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
    gradients would diverge. It does not include clipping by the global norm.

    Args:
        params: parameters, (name, parameter) pairs, or group dicts holding either, which may have
            their own betas, eps and weight_decay. Frozen parameters are not compared.
        variant, other: a variant's name, or a dict such as ``{"variant": "npu", "clamp_value":
            math.inf}`` with any of ShardedLamb's switches.
        betas, eps, weight_decay: as in ShardedLamb, with another default of weight_decay.
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
    # In fp64: the step is the difference of weights, and its norm a long sum.
    start = param.detach().double().reshape(-1)
    p = start.clone()
    states = (torch.zeros_like(p), torch.zeros_like(p))
    shards = PartitionShards(rule, p, [PartitionSlice(0, 0, p.numel(), policy)], policies=[policy])
    kernels = Kernels(rule, "eager", p.device)
    engine = StepDriver(rule, shards, comm=SingleRank(), kernels=kernels)
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
    items = setup.as_list(params)
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
