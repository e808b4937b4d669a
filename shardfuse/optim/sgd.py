"""ShardedSGD."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch.optim.optimizer import required

from shardfuse.config import ShardConfig
from shardfuse.optim.base import ShardedOptimizer
from shardfuse.optim.torch_like import TorchOptions
from shardfuse.rules import SGDRule

if TYPE_CHECKING:
    from typing_extensions import Unpack


class ShardedSGD(ShardedOptimizer):
    """SGD with momentum, sharded; the formula and signature of torch_npu's NpuFusedSGD.

        g = grad + weight_decay * p
        buf = momentum * buf + (1 - dampening) * g      (at the first update: buf = g)
        p -= lr * (g + momentum * buf if nesterov else buf)

    Args:
        params: parameters, (name, parameter) pairs, or group dicts holding either.
        lr: learning rate, required.
        momentum, dampening, weight_decay: as in the formula; weight_decay is an L2 penalty.
        nesterov: needs momentum > 0 and dampening 0.
        sharding: a ShardConfig, or a plain dict with its keys.
        torch_options: ``maximize`` and other keywords of torch.optim's; see ShardedOptimizer.

    Raises:
        ValueError: hyper-parameters out of range or NaN, also in a group dict; ranks that disagree.
    """

    def __init__(
        self,
        params: Any,
        lr: float = required,  # type: ignore[assignment]
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        sharding: ShardConfig | Mapping[str, Any] | None = None,
        **torch_options: Unpack[TorchOptions],
    ) -> None:
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "dampening": dampening,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
        }
        super().__init__(params, defaults, SGDRule, sharding, **torch_options)
