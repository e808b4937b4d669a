"""ShardedBertAdam."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch.optim.optimizer import required

from shardfuse.config import ShardConfig
from shardfuse.optim.base import ShardedOptimizer
from shardfuse.optim.torch_like import TorchOptions
from shardfuse.rules import BertAdamRule

if TYPE_CHECKING:
    from typing_extensions import Unpack


class ShardedBertAdam(ShardedOptimizer):
    """BERT's Adam, sharded; the formula and signature of torch_npu's NpuFusedBertAdam.

        g = grad * min(1, max_grad_norm / (norm + 1e-6))     (norm over the (group, dtype))
        m = b1 * m + (1 - b1) * g;    v = b2 * v + (1 - b2) * g^2      (no bias correction)
        p -= lr_t * (m / (sqrt(v) + e) + weight_decay * p)
        lr_t = lr * schedule(t / t_total, warmup), t from 0;    lr_t = lr where t_total is -1

    Fixed here: ``warmup_cosine`` works, ``warmup_poly`` stays at 0 past t_total, and a group's own
    max_grad_norm is used.

    Args:
        params: parameters, (name, parameter) pairs, or group dicts holding either.
        lr: peak learning rate, required.
        warmup: fraction of t_total in which lr rises; -1 for none. With -1 and a t_total,
            ``warmup_linear`` starts from lr / 2, as in torch_npu.
        t_total: number of steps of the schedule; -1 for a constant lr.
        schedule: warmup_linear, warmup_constant, warmup_cosine or warmup_poly.
        b1, b2, e: betas and epsilon.
        weight_decay: decoupled decay, where > 0.
        max_grad_norm: bound of the gradient norm; <= 0 for none. Costs one all-reduce per step.
        sharding: a ShardConfig, or a plain dict with its keys.
        torch_options: ``maximize`` and other keywords of torch.optim's; see ShardedOptimizer.

    Raises:
        ValueError: hyper-parameters out of range or NaN, also in a group dict; ranks that disagree.
    """

    def __init__(
        self,
        params: Any,
        lr: float = required,  # type: ignore[assignment]
        warmup: float = -1,
        t_total: float = -1,
        schedule: str = "warmup_linear",
        b1: float = 0.9,
        b2: float = 0.999,
        e: float = 1e-6,
        weight_decay: float = 0.01,
        max_grad_norm: float = 1.0,
        *,
        sharding: ShardConfig | Mapping[str, Any] | None = None,
        **torch_options: Unpack[TorchOptions],
    ) -> None:
        defaults = {
            "lr": lr,
            "warmup": warmup,
            "t_total": t_total,
            "schedule": schedule,
            "b1": b1,
            "b2": b2,
            "e": e,
            "weight_decay": weight_decay,
            "max_grad_norm": max_grad_norm,
        }
        super().__init__(params, defaults, BertAdamRule, sharding, **torch_options)
