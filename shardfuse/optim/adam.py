"""ShardedAdam and ShardedAdamW."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from shardfuse.config import ShardConfig
from shardfuse.optim.base import ShardedOptimizer
from shardfuse.optim.torch_like import TorchOptions
from shardfuse.rules import AdamRule, AdamWRule

if TYPE_CHECKING:
    from typing_extensions import Unpack


class ShardedAdam(ShardedOptimizer):
    """Adam with an L2 penalty, sharded; the formula and signature of torch_npu's NpuFusedAdam.

        g = grad + weight_decay * p
        m = beta1 * m + (1 - beta1) * g;    v = beta2 * v + (1 - beta2) * g^2
        p -= lr / (1 - beta1^t) * m / (sqrt(v) / sqrt(1 - beta2^t) + eps)

    The same as torch.optim.Adam up to rounding (arXiv 1412.6980). With amsgrad, v is replaced by
    its running maximum. If eps is 0, an element whose v is 0 does not change (torch: NaN).

    Args:
        params: parameters, (name, parameter) pairs, or group dicts holding either.
        lr, betas, eps, weight_decay, amsgrad: as in the formula.
        sharding: a ShardConfig, or a plain dict with its keys.
        torch_options: ``maximize`` and other keywords of torch.optim's; see ShardedOptimizer.

    Raises:
        ValueError: hyper-parameters out of range or NaN, also in a group dict; ranks that disagree.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        amsgrad: bool = False,
        *,
        sharding: ShardConfig | Mapping[str, Any] | None = None,
        **torch_options: Unpack[TorchOptions],
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "amsgrad": amsgrad,
        }
        super().__init__(params, defaults, AdamRule, sharding, **torch_options)


class ShardedAdamW(ShardedOptimizer):
    """Adam with decoupled weight decay, sharded; as torch_npu's NpuFusedAdamW.

        p *= 1 - lr * weight_decay, then Adam on the gradient alone (arXiv 1711.05101)

    The same as torch.optim.AdamW up to rounding.

    Args:
        params: parameters, (name, parameter) pairs, or group dicts holding either.
        lr, betas, eps, weight_decay, amsgrad: as for ShardedAdam.
        sharding: a ShardConfig, or a plain dict with its keys.
        torch_options: ``maximize`` and other keywords of torch.optim's; see ShardedOptimizer.

    Raises:
        ValueError: hyper-parameters out of range or NaN, also in a group dict; ranks that disagree.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        sharding: ShardConfig | Mapping[str, Any] | None = None,
        **torch_options: Unpack[TorchOptions],
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "amsgrad": amsgrad,
        }
        super().__init__(params, defaults, AdamWRule, sharding, **torch_options)
