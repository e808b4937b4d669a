"""ShardedRMSprop and ShardedRMSpropTF."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from shardfuse.config import ShardConfig
from shardfuse.optim.base import ShardedOptimizer
from shardfuse.optim.torch_like import TorchOptions
from shardfuse.rules import RMSpropRule, RMSpropTFRule

if TYPE_CHECKING:
    from typing_extensions import Unpack


class ShardedRMSprop(ShardedOptimizer):
    """RMSprop, sharded; the formula and signature of torch_npu's NpuFusedRMSprop.

        g = grad + weight_decay * p
        s = alpha * s + (1 - alpha) * g^2;    a = alpha * a + (1 - alpha) * g
        u = g / (sqrt(s - a^2 if centered else s) + eps)
        buf = momentum * buf + u;    p -= lr * (buf if momentum else u)

    The same as torch.optim.RMSprop up to rounding. If eps is 0, an element whose s is 0 does not
    change (torch: NaN).

    Args:
        params: parameters, (name, parameter) pairs, or group dicts holding either.
        lr, alpha, eps, weight_decay, momentum, centered: as in the formula.
        sharding: a ShardConfig, or a plain dict with its keys.
        torch_options: ``maximize`` and other keywords of torch.optim's; see ShardedOptimizer.

    Raises:
        ValueError: hyper-parameters out of range or NaN, also in a group dict; ranks that disagree.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-2,
        alpha: float = 0.99,
        eps: float = 1e-8,
        weight_decay: float = 0,
        momentum: float = 0,
        centered: bool = False,
        *,
        sharding: ShardConfig | Mapping[str, Any] | None = None,
        **torch_options: Unpack[TorchOptions],
    ) -> None:
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "alpha": alpha,
            "eps": eps,
            "centered": centered,
            "weight_decay": weight_decay,
        }
        super().__init__(params, defaults, RMSpropRule, sharding, **torch_options)


class ShardedRMSpropTF(ShardedOptimizer):
    """RMSprop as TensorFlow has it, sharded; as torch_npu's NpuFusedRMSpropTF, and timm's.

        g = grad + weight_decay * p                   (decoupled_decay: p -= weight_decay * p)
        s += (1 - alpha) * (g^2 - s), s from 1;    a += (1 - alpha) * (g - a)
        u = g / sqrt((s - a^2 if centered else s) + eps)
        buf = momentum * buf + lr * u;    p -= buf if momentum else lr * u

    Without lr_in_momentum, buf = momentum * buf + u and p -= lr * buf. Decoupled decay does not
    use lr: each step shrinks p by weight_decay itself, as in torch_npu.

    Args:
        params: parameters, (name, parameter) pairs, or group dicts holding either.
        lr, alpha, eps, weight_decay, momentum, centered: as in the formula.
        decoupled_decay, lr_in_momentum: as in the formula.
        sharding: a ShardConfig, or a plain dict with its keys.
        torch_options: ``maximize`` and other keywords of torch.optim's; see ShardedOptimizer.

    Raises:
        ValueError: hyper-parameters out of range or NaN, also in a group dict; ranks that disagree.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-2,
        alpha: float = 0.9,
        eps: float = 1e-10,
        weight_decay: float = 0,
        momentum: float = 0.0,
        centered: bool = False,
        decoupled_decay: bool = False,
        lr_in_momentum: bool = True,
        *,
        sharding: ShardConfig | Mapping[str, Any] | None = None,
        **torch_options: Unpack[TorchOptions],
    ) -> None:
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "alpha": alpha,
            "eps": eps,
            "centered": centered,
            "weight_decay": weight_decay,
            "decoupled_decay": decoupled_decay,
            "lr_in_momentum": lr_in_momentum,
        }
        super().__init__(params, defaults, RMSpropTFRule, sharding, **torch_options)
