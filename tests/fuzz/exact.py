"""Elementwise update rules in fp32, one tensor at a time, for comparison bit by bit.

Written from the formulas in the docstrings of the classes, each operation rounded to fp32 in the
order in which it is written there. Where gradients have an exact mean, elementwise updates do not
depend on how tensors are cut, so sharded ones must have these bits. Nothing here imports shardfuse.

A rule is called as ``rule(p, g, state, options, step)`` and changes ``p`` and ``state`` in place;
``step`` is 1 for a parameter's first update.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from tests.support.oracles import bert_schedule

State = dict[str, Tensor]
Options = Mapping[str, Any]
Rule = Callable[[Tensor, Tensor, State, Options, int], None]


def _state(state: State, name: str, p: Tensor, value: float = 0.0) -> Tensor:
    return state.setdefault(name, torch.full_like(p, value))


def _average(moment: Tensor, beta: float, value: Tensor) -> None:
    moment.mul_(beta).add_(value * (1.0 - beta))


def sgd(p: Tensor, g: Tensor, state: State, o: Options, step: int) -> None:
    """Momentum starts from the gradient, undamped."""
    if o["weight_decay"] != 0:
        g = g + p * o["weight_decay"]
    if o["momentum"] != 0:
        if "momentum_buffer" in state:
            buffer = state["momentum_buffer"].mul_(o["momentum"]).add_(g * (1.0 - o["dampening"]))
        else:
            buffer = state["momentum_buffer"] = g.clone()
        g = g + buffer * o["momentum"] if o["nesterov"] else buffer
    p.sub_(g * o["lr"])


def _adam(p: Tensor, g: Tensor, state: State, o: Options, step: int) -> None:
    beta1, beta2 = o["betas"]
    m, v = _state(state, "exp_avg", p), _state(state, "exp_avg_sq", p)
    _average(m, beta1, g)
    _average(v, beta2, g * g)
    if o["amsgrad"]:
        largest = _state(state, "max_exp_avg_sq", p)
        v = torch.maximum(largest, v, out=largest)
    denominator = v.sqrt() / (1.0 - beta2**step) ** 0.5 + o["eps"]
    p.sub_(m / denominator * (o["lr"] / (1.0 - beta1**step)))


def adam(p: Tensor, g: Tensor, state: State, o: Options, step: int) -> None:
    """Adam with an L2 penalty."""
    _adam(p, g + p * o["weight_decay"] if o["weight_decay"] != 0 else g, state, o, step)


def adamw(p: Tensor, g: Tensor, state: State, o: Options, step: int) -> None:
    """Adam with decoupled decay."""
    p.mul_(1.0 - o["lr"] * o["weight_decay"])
    _adam(p, g, state, o, step)


def bert_adam(p: Tensor, g: Tensor, state: State, o: Options, step: int) -> None:
    """NVIDIA's, unclipped."""
    m, v = _state(state, "exp_avg", p), _state(state, "exp_avg_sq", p)
    _average(m, o["b1"], g)
    _average(v, o["b2"], g * g)
    u = m / (v.sqrt() + o["e"])
    if o["weight_decay"] > 0:
        u = u + p * o["weight_decay"]
    lr = o["lr"]
    if o["t_total"] != -1:
        lr *= bert_schedule(o["schedule"], (step - 1) / o["t_total"], o["warmup"])
    p.sub_(u * lr)


def rmsprop(p: Tensor, g: Tensor, state: State, o: Options, step: int) -> None:
    """Torch's: eps outside the root."""
    if o["weight_decay"] != 0:
        g = g + p * o["weight_decay"]
    square = _state(state, "square_avg", p)
    _average(square, o["alpha"], g * g)
    if o["centered"]:
        mean = _state(state, "grad_avg", p)
        _average(mean, o["alpha"], g)
        square = square - mean * mean
    u = g / (square.sqrt() + o["eps"])
    if o["momentum"] > 0:
        u = _state(state, "momentum_buffer", p).mul_(o["momentum"]).add_(u)
    p.sub_(u * o["lr"])


def rmsprop_tf(p: Tensor, g: Tensor, state: State, o: Options, step: int) -> None:
    """TensorFlow's: averages from one, eps inside the root."""
    take = 1.0 - o["alpha"]
    if o["weight_decay"] != 0 and o["decoupled_decay"]:
        p.sub_(p * o["weight_decay"])
    elif o["weight_decay"] != 0:
        g = g + p * o["weight_decay"]
    square = _state(state, "square_avg", p, 1.0)
    square.add_((g * g - square) * take)
    if o["centered"]:
        mean = _state(state, "grad_avg", p)
        mean.add_((g - mean) * take)
        square = square - mean * mean
    u = g / (square + o["eps"]).sqrt()
    if o["momentum"] == 0:
        p.sub_(u * o["lr"])
        return
    buffer = _state(state, "momentum_buffer", p).mul_(o["momentum"])
    if o["lr_in_momentum"]:
        p.sub_(buffer.add_(u * o["lr"]))
    else:
        p.sub_(buffer.add_(u) * o["lr"])


def adadelta(p: Tensor, g: Tensor, state: State, o: Options, step: int) -> None:
    """The ratio of two root mean squares."""
    if o["weight_decay"] != 0:
        g = g + p * o["weight_decay"]
    square, moved = _state(state, "square_avg", p), _state(state, "acc_delta", p)
    _average(square, o["rho"], g * g)
    delta = (moved + o["eps"]).sqrt() / (square + o["eps"]).sqrt() * g
    _average(moved, o["rho"], delta * delta)
    p.sub_(delta * o["lr"])


RULES: dict[str, Rule] = {
    rule.__name__: rule for rule in (sgd, adam, adamw, bert_adam, rmsprop, rmsprop_tf, adadelta)
}
