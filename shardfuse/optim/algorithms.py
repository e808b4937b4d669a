"""Public classes of the elementwise rules and of AdamP; signatures of torch and torch_npu."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch.optim.optimizer import required

from shardfuse.config import ShardConfig
from shardfuse.optim.base import ShardedOptimizer
from shardfuse.optim.compat import TorchOptions
from shardfuse.rules import (
    AdadeltaRule,
    AdamPRule,
    AdamRule,
    AdamWRule,
    BertAdamRule,
    RMSpropRule,
    RMSpropTFRule,
    SGDRule,
)

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


if TYPE_CHECKING:
    from typing_extensions import Unpack


class ShardedAdam(ShardedOptimizer):
    """Adam with an L2 penalty, sharded; the formula and signature of torch_npu's NpuFusedAdam.

        g = grad + weight_decay * p
        m = beta1 * m + (1 - beta1) * g;    v = beta2 * v + (1 - beta2) * g^2
        p -= lr / (1 - beta1^t) * m / (sqrt(v) / sqrt(1 - beta2^t) + eps)

    The same as torch.optim.Adam up to rounding (arXiv 1412.6980). With amsgrad, v is replaced by
    its running maximum. If eps is 0, elements with v = 0 do not change (torch: NaN).

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


if TYPE_CHECKING:
    from typing_extensions import Unpack


class ShardedRMSprop(ShardedOptimizer):
    """RMSprop, sharded; the formula and signature of torch_npu's NpuFusedRMSprop.

        g = grad + weight_decay * p
        s = alpha * s + (1 - alpha) * g^2;    a = alpha * a + (1 - alpha) * g
        u = g / (sqrt(s - a^2 if centered else s) + eps)
        buf = momentum * buf + u;    p -= lr * (buf if momentum else u)

    The same as torch.optim.RMSprop up to rounding. If eps is 0, elements with s = 0 do not
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
