"""References in double precision for RMSprop, RMSpropTF, Adadelta and AdamP; see `oracles.py`.

Written from the formulas of torch, torch_npu and timm; nothing here imports shardfuse.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from tests.support.oracles import Oracle, OracleParam


class RMSpropOracle(Oracle):
    """Torch's RMSprop: L2 decay, eps outside the root, the learning rate outside the momentum."""

    defaults: ClassVar[Mapping[str, Any]] = {
        "lr": 1e-2,
        "alpha": 0.99,
        "eps": 1e-8,
        "weight_decay": 0.0,
        "momentum": 0.0,
        "centered": False,
    }

    def update(self, group: dict[str, Any], param: OracleParam, grad: Tensor) -> None:
        grad = grad + group["weight_decay"] * param.value
        variance = self.variance(group, param, grad)
        step = grad / (variance.sqrt() + group["eps"])
        if group["momentum"] > 0:
            buffer = param.moment("momentum_buffer")
            buffer.mul_(group["momentum"]).add_(step)
            step = buffer
        param.value -= group["lr"] * step

    def variance(self, group: dict[str, Any], param: OracleParam, grad: Tensor) -> Tensor:
        """Update the averages of one parameter and return what the root is taken of."""
        alpha = group["alpha"]
        square = param.moment("square_avg")
        square.copy_(alpha * square + (1 - alpha) * grad * grad)
        if not group["centered"]:
            return square
        mean = param.moment("grad_avg")
        mean.copy_(alpha * mean + (1 - alpha) * grad)
        return square - mean * mean


class RMSpropTFOracle(RMSpropOracle):
    """TensorFlow's: the average starts at one, eps is inside the root, lr inside the momentum."""

    defaults: ClassVar[Mapping[str, Any]] = {
        **RMSpropOracle.defaults,
        "alpha": 0.9,
        "eps": 1e-10,
        "decoupled_decay": False,
        "lr_in_momentum": True,
    }

    def update(self, group: dict[str, Any], param: OracleParam, grad: Tensor) -> None:
        if group["decoupled_decay"]:
            param.value *= 1 - group["weight_decay"]
        else:
            grad = grad + group["weight_decay"] * param.value
        param.state.setdefault("square_avg", torch.ones_like(param.value))
        step = grad / (self.variance(group, param, grad) + group["eps"]).sqrt()
        lr = group["lr"]
        if group["momentum"] == 0:
            param.value -= lr * step
            return
        inside, outside = (lr, 1.0) if group["lr_in_momentum"] else (1.0, lr)
        buffer = param.moment("momentum_buffer")
        buffer.mul_(group["momentum"]).add_(inside * step)
        param.value -= outside * buffer


class AdadeltaOracle(Oracle):
    """Torch's Adadelta: the ratio of two root mean squares, L2 decay."""

    defaults: ClassVar[Mapping[str, Any]] = {
        "lr": 1.0,
        "rho": 0.9,
        "eps": 1e-6,
        "weight_decay": 0.0,
    }

    def update(self, group: dict[str, Any], param: OracleParam, grad: Tensor) -> None:
        rho, eps = group["rho"], group["eps"]
        grad = grad + group["weight_decay"] * param.value
        square, moved = param.moment("square_avg"), param.moment("acc_delta")
        square.copy_(rho * square + (1 - rho) * grad * grad)
        delta = (moved + eps).sqrt() / (square + eps).sqrt() * grad
        moved.copy_(rho * moved + (1 - rho) * delta * delta)
        param.value -= group["lr"] * delta


class AdamPOracle(Oracle):
    """AdamP: Adam, projected off the weights over channels, else over the layer, if over any."""

    defaults: ClassVar[Mapping[str, Any]] = {
        "lr": 1e-3,
        "betas": (0.9, 0.999),
        "eps": 1e-8,
        "weight_decay": 0.0,
        "delta": 0.1,
        "wd_ratio": 0.1,
        "nesterov": False,
    }

    def update(self, group: dict[str, Any], param: OracleParam, grad: Tensor) -> None:
        beta1, beta2 = group["betas"]
        first, second = param.moment("exp_avg"), param.moment("exp_avg_sq")
        first.mul_(beta1).add_((1 - beta1) * grad)
        second.mul_(beta2).add_((1 - beta2) * grad * grad)
        direction = beta1 * first + (1 - beta1) * grad if group["nesterov"] else first
        root = second.sqrt() / math.sqrt(1 - beta2**param.step)
        direction, decay = self.projected(group, param, grad, direction / (root + group["eps"]))
        param.value *= 1 - group["lr"] * group["weight_decay"] * decay
        param.value -= group["lr"] / (1 - beta1**param.step) * direction

    def projected(
        self, group: dict[str, Any], param: OracleParam, grad: Tensor, direction: Tensor
    ) -> tuple[Tensor, float]:
        """Return the direction to go in and the factor on the decay."""
        shape, eps = param.value.shape, group["eps"]
        if len(shape) < 2 or not param.value.numel():
            return direction, 1.0
        for view in ((shape[0], -1), (1, -1)):
            p, g, u = (x.reshape(view) for x in (param.value, grad, direction))
            cosine = (p * g).sum(1).abs() / (p.norm(dim=1) + eps) / (g.norm(dim=1) + eps)
            if self.is_small(cosine.max(), group["delta"] / math.sqrt(p.shape[1])):
                unit = p / (p.norm(dim=1, keepdim=True) + eps)
                u = u - unit * (unit * u).sum(1, keepdim=True)
                return u.reshape(shape), group["wd_ratio"]
        return direction, 1.0

    def is_small(self, cosine: Tensor, bound: float) -> bool:
        """Tell whether the gradient counts as normal to the weights."""
        return float(cosine) < bound
