"""References in double precision: one loop over parameters, the published formulas, nothing flat.

Written from the formulas of torch, torch_npu, NVIDIA's BertAdam, the LAMB paper and Paddle, and
independent of the package: nothing here imports shardfuse. `params` of every group are cloned to
float64, and `step(grads)` takes one list of gradients per group. A gradient of None leaves the
parameter, its moments and its step count untouched.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

Grads = Sequence[Sequence[Tensor | None]]


class OracleParam:
    """One parameter in float64 with the state its rule has created so far."""

    def __init__(self, value: Tensor, name: str) -> None:
        self.value = value.detach().double().clone()
        # The dtype of the model's own tensor: BertAdam clips per (group, dtype).
        self.dtype = value.dtype
        self.name = name
        self.step = 0
        self.state: dict[str, Tensor] = {}

    def moment(self, key: str) -> Tensor:
        """Return the moment `key`, zero when it does not exist yet."""
        return self.state.setdefault(key, torch.zeros_like(self.value))


class Oracle:
    """Walk over groups and parameters; subclasses say what happens to one parameter."""

    defaults: ClassVar[Mapping[str, Any]] = {}

    def __init__(
        self,
        groups: Sequence[Mapping[str, Any]],
        names: Sequence[Sequence[str]] | None = None,
        **options: Any,
    ) -> None:
        self.groups: list[dict[str, Any]] = []
        for index, group in enumerate(groups):
            params = list(group["params"])
            own_names = names[index] if names is not None else [""] * len(params)
            members = [OracleParam(p, n) for p, n in zip(params, own_names, strict=True)]
            own = {key: value for key, value in group.items() if key != "params"}
            self.groups.append({**self.defaults, **options, **own, "params": members})

    def step(self, grads: Grads) -> None:
        """Apply one update to every parameter that has a gradient."""
        ready: list[list[tuple[OracleParam, Tensor]]] = []
        for group, group_grads in zip(self.groups, grads, strict=True):
            pairs = zip(group["params"], group_grads, strict=True)
            ready.append([(p, g.detach().double().clone()) for p, g in pairs if g is not None])
        self.prepare(ready)
        for group, members in zip(self.groups, ready, strict=True):
            for param, grad in members:
                param.step += 1
                self.update(group, param, grad)

    def prepare(self, ready: list[list[tuple[OracleParam, Tensor]]]) -> None:
        """Scale gradients in place before any parameter moves."""

    def update(self, group: dict[str, Any], param: OracleParam, grad: Tensor) -> None:
        """Move one parameter by one step; `param.step` is 1 for the first."""
        raise NotImplementedError

    def values(self) -> list[Tensor]:
        """Return every parameter's value, in registration order."""
        return [param.value for group in self.groups for param in group["params"]]


class SGDOracle(Oracle):
    """Torch's SGD: L2 decay; the first momentum buffer is the gradient, without dampening."""

    defaults: ClassVar[Mapping[str, Any]] = {
        "momentum": 0.0,
        "dampening": 0.0,
        "weight_decay": 0.0,
        "nesterov": False,
    }

    def update(self, group: dict[str, Any], param: OracleParam, grad: Tensor) -> None:
        grad = grad + group["weight_decay"] * param.value
        if group["momentum"] != 0:
            if "momentum_buffer" not in param.state:
                param.state["momentum_buffer"] = grad.clone()
            else:
                buffer = param.state["momentum_buffer"]
                buffer.mul_(group["momentum"]).add_((1 - group["dampening"]) * grad)
            buffer = param.state["momentum_buffer"]
            grad = grad + group["momentum"] * buffer if group["nesterov"] else buffer
        param.value -= group["lr"] * grad


class AdamOracle(Oracle):
    """Torch's Adam (L2 decay) or, with `decoupled`, AdamW (p *= 1 - lr * decay first)."""

    defaults: ClassVar[Mapping[str, Any]] = {
        "lr": 1e-3,
        "betas": (0.9, 0.999),
        "eps": 1e-8,
        "weight_decay": 0.0,
        "amsgrad": False,
        "decoupled": False,
    }

    def update(self, group: dict[str, Any], param: OracleParam, grad: Tensor) -> None:
        beta1, beta2 = group["betas"]
        if group["decoupled"]:
            param.value *= 1 - group["lr"] * group["weight_decay"]
        else:
            grad = grad + group["weight_decay"] * param.value
        first, second = param.moment("exp_avg"), param.moment("exp_avg_sq")
        first.mul_(beta1).add_((1 - beta1) * grad)
        second.mul_(beta2).add_((1 - beta2) * grad * grad)
        if group["amsgrad"]:
            largest = param.moment("max_exp_avg_sq")
            torch.maximum(largest, second, out=largest)
            second = largest
        corrected = second / (1 - beta2**param.step)
        direction = first / (1 - beta1**param.step) / (corrected.sqrt() + group["eps"])
        param.value -= group["lr"] * direction


def bert_schedule(name: str, progress: float, warmup: float) -> float:
    """Return NVIDIA's factor on the learning rate; cosine and poly as their authors meant them."""
    if progress < warmup:
        return progress / warmup
    if name == "warmup_constant":
        return 1.0
    if name == "warmup_linear":
        return max((progress - 1.0) / (warmup - 1.0), 0.0)
    if name == "warmup_poly":
        return math.sqrt(max(1.0 - progress, 0.0))
    if name == "warmup_cosine":
        return 0.5 * (1.0 + math.cos(math.pi * progress))
    raise ValueError(name)


class BertAdamOracle(Oracle):
    """NVIDIA's BertAdam: no bias correction, 0-based schedule, clip per (group, dtype)."""

    defaults: ClassVar[Mapping[str, Any]] = {
        "warmup": -1,
        "t_total": -1,
        "schedule": "warmup_linear",
        "b1": 0.9,
        "b2": 0.999,
        "e": 1e-6,
        "weight_decay": 0.01,
        "max_grad_norm": 1.0,
    }

    def prepare(self, ready: list[list[tuple[OracleParam, Tensor]]]) -> None:
        for group, members in zip(self.groups, ready, strict=True):
            limit = group["max_grad_norm"]
            if limit <= 0:
                continue
            for dtype in {param.dtype for param, _ in members}:
                grads = [grad for param, grad in members if param.dtype == dtype]
                norm = math.sqrt(sum(float(grad.pow(2).sum()) for grad in grads))
                if limit / (norm + 1e-6) < 1:
                    for grad in grads:
                        grad *= limit / (norm + 1e-6)

    def update(self, group: dict[str, Any], param: OracleParam, grad: Tensor) -> None:
        first, second = param.moment("exp_avg"), param.moment("exp_avg_sq")
        first.mul_(group["b1"]).add_((1 - group["b1"]) * grad)
        second.mul_(group["b2"]).add_((1 - group["b2"]) * grad * grad)
        direction = first / (second.sqrt() + group["e"])
        if group["weight_decay"] > 0:
            direction += group["weight_decay"] * param.value
        lr = group["lr"]
        if group["t_total"] != -1:
            progress = (param.step - 1) / group["t_total"]
            lr *= bert_schedule(group["schedule"], progress, group["warmup"])
        param.value -= lr * direction


LAMB_PRESETS: dict[str, dict[str, Any]] = {
    "npu": {"bias_correction": False, "clamp_value": 10.0, "always_adapt": True},
    "apex": {"bias_correction": True, "clamp_value": math.inf, "always_adapt": False},
    "google": {"bias_correction": True, "clamp_value": math.inf, "always_adapt": True},
    "nvlamb": {"bias_correction": True, "clamp_value": math.inf, "always_adapt": True},
    "paddle": {"bias_correction": True, "clamp_value": math.inf, "always_adapt": False},
    "deepspeed": {
        "bias_correction": "outside",
        "clamp_value": math.inf,
        "always_adapt": True,
        "min_coeff": 0.01,
        "max_coeff": 10.0,
    },
}
GOOGLE_EXCLUDED = ("LayerNorm", "layer_norm", "bias")


class LambOracle(Oracle):
    """LAMB in six variants; eps is outside the root in all of them."""

    defaults: ClassVar[Mapping[str, Any]] = {
        "lr": 1e-3,
        "betas": (0.9, 0.999),
        "eps": 1e-6,
        "weight_decay": 0.0,
        "adam": False,
        "use_global_grad_norm": False,
        "max_grad_norm": 1.0,
        "min_coeff": 0.0,
        "max_coeff": math.inf,
    }

    def __init__(
        self,
        groups: Sequence[Mapping[str, Any]],
        names: Sequence[Sequence[str]] | None = None,
        variant: str = "npu",
        **options: Any,
    ) -> None:
        excluded = GOOGLE_EXCLUDED if variant == "google" else ()
        given = {key: value for key, value in options.items() if value is not None}
        self.no_decay = given.pop("exclude_from_weight_decay", excluded)
        self.no_adaptation = given.pop("exclude_from_layer_adaptation", excluded)
        super().__init__(groups, names, **{**LAMB_PRESETS[variant], **given})

    def prepare(self, ready: list[list[tuple[OracleParam, Tensor]]]) -> None:
        if not self.groups[0]["use_global_grad_norm"]:
            return
        limit = self.groups[0]["max_grad_norm"]
        grads = [grad for members in ready for _, grad in members]
        norm = math.sqrt(sum(float(grad.pow(2).sum()) for grad in grads))
        if norm > limit:
            for grad in grads:
                grad *= limit / norm

    def update(self, group: dict[str, Any], param: OracleParam, grad: Tensor) -> None:
        beta1, beta2 = group["betas"]
        first, second = param.moment("exp_avg"), param.moment("exp_avg_sq")
        first.mul_(beta1).add_((1 - beta1) * grad)
        second.mul_(beta2).add_((1 - beta2) * grad * grad)
        corrected = group["bias_correction"]
        first_bias, second_bias = 1 - beta1**param.step, 1 - beta2**param.step
        first_scale = first_bias if corrected is True else 1.0
        second_scale = second_bias if corrected is True else 1.0
        lr = group["lr"]
        if corrected == "outside":
            lr *= math.sqrt(second_bias) / first_bias
        direction = (first / first_scale) / ((second / second_scale).sqrt() + group["eps"])
        decay = 0.0 if _matches(self.no_decay, param.name) else group["weight_decay"]
        direction = direction + decay * param.value
        param.value -= lr * self.ratio(group, param, direction, decay) * direction

    def ratio(
        self, group: dict[str, Any], param: OracleParam, direction: Tensor, decay: float
    ) -> float:
        """Return the trust ratio of one parameter."""
        if group["adam"] or _matches(self.no_adaptation, param.name):
            return 1.0
        if decay == 0 and not group["always_adapt"]:
            return 1.0
        weight_norm = min(math.sqrt(float(param.value.pow(2).sum())), group["clamp_value"])
        direction_norm = math.sqrt(float(direction.pow(2).sum()))
        if weight_norm == 0 or direction_norm == 0:
            return 1.0
        return min(max(weight_norm / direction_norm, group["min_coeff"]), group["max_coeff"])


def _matches(patterns: Sequence[str], name: str) -> bool:
    return any(re.search(pattern, name) for pattern in patterns)
