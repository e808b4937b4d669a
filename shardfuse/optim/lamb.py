"""ShardedLamb."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from shardfuse.config import ShardConfig
from shardfuse.optim.base import ShardedOptimizer
from shardfuse.optim.torch_like import TorchOptions
from shardfuse.rules import LambRule
from shardfuse.rules.lamb import LambVariant, switches_for
from shardfuse.untraced import untraced

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
        exclude_from_weight_decay: regular expressions; parameters whose names match have no decay.
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
        ratio = (self._foreign or self._engine).ratio
        if ratio is None:
            return {}
        names = (spec.name for spec in self.layout.specs)
        return dict(zip(names, ratio.tolist(), strict=True))
