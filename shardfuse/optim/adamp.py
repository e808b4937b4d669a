"""ShardedAdamP."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from shardfuse.config import ShardConfig
from shardfuse.optim.base import ShardedOptimizer
from shardfuse.optim.torch_like import TorchOptions
from shardfuse.rules import AdamPRule

if TYPE_CHECKING:
    from typing_extensions import Unpack


class ShardedAdamP(ShardedOptimizer):
    """AdamP (arXiv 2006.08217), sharded; the formula and signature of torch_npu's NpuFusedAdamP.

        m = beta1 * m + (1 - beta1) * g;    v = beta2 * v + (1 - beta2) * g^2
        u = (beta1 * m + (1 - beta1) * g if nesterov else m) / (sqrt(v) / sqrt(1 - beta2^t) + eps)
        for tensors of two or more dimensions, over rows, else over the whole tensor:
            if max |<g, p>| / (|g| + eps) / (|p| + eps) < delta / sqrt(elements):
                u -= p * <p, u> / (|p| + eps)^2;    decay by wd_ratio * weight_decay
        p *= 1 - lr * weight_decay;    p -= lr / (1 - beta1^t) * u

    One index along dimension 0 selects a row. Sums are over whole rows, although tensors are cut
    across ranks: each step has one all-reduce of 4 floats per row. With nesterov the reduced
    gradient shards are kept until the update (4 bytes / W per element).

    Args:
        params: parameters, (name, parameter) pairs, or group dicts holding either.
        lr, betas, eps, weight_decay, delta, wd_ratio, nesterov: as in the formula.
        sharding: a ShardConfig, or a plain dict with its keys.
        torch_options: ``maximize`` and other keywords of torch.optim's; see ShardedOptimizer.

    Raises:
        ValueError: a hyper-parameter is out of range or NaN, here or in a group dict (torch_npu
            checks nothing); or the ranks disagree about the parameters.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        delta: float = 0.1,
        wd_ratio: float = 0.1,
        nesterov: bool = False,
        *,
        sharding: ShardConfig | Mapping[str, Any] | None = None,
        **torch_options: Unpack[TorchOptions],
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "delta": delta,
            "wd_ratio": wd_ratio,
            "nesterov": nesterov,
        }
        super().__init__(params, defaults, AdamPRule, sharding, **torch_options)
