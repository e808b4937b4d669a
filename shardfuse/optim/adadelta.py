"""ShardedAdadelta."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from shardfuse.config import ShardConfig
from shardfuse.optim.base import ShardedOptimizer
from shardfuse.optim.torch_like import TorchOptions
from shardfuse.rules import AdadeltaRule

if TYPE_CHECKING:
    from typing_extensions import Unpack


class ShardedAdadelta(ShardedOptimizer):
    """Adadelta, sharded; the formula and signature of torch_npu's NpuFusedAdadelta.

        g = grad + weight_decay * p
        s = rho * s + (1 - rho) * g^2
        d = g * sqrt(acc + eps) / sqrt(s + eps)
        acc = rho * acc + (1 - rho) * d^2;    p -= lr * d

    The same as torch.optim.Adadelta up to rounding (arXiv 1212.5701). If eps is 0, nothing changes
    (torch: NaN where a gradient is 0).

    Args:
        params: parameters, (name, parameter) pairs, or group dicts holding either.
        lr, rho, eps, weight_decay: as in the formula.
        sharding: a ShardConfig, or a plain dict with its keys.
        torch_options: ``maximize`` and other keywords of torch.optim's; see ShardedOptimizer.

    Raises:
        ValueError: hyper-parameters out of range or NaN, also in a group dict; ranks that disagree.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1.0,
        rho: float = 0.9,
        eps: float = 1e-6,
        weight_decay: float = 0,
        *,
        sharding: ShardConfig | Mapping[str, Any] | None = None,
        **torch_options: Unpack[TorchOptions],
    ) -> None:
        defaults = {"lr": lr, "rho": rho, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults, AdadeltaRule, sharding, **torch_options)
