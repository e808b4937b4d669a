"""Elementwise update rules in fp32, one tensor at a time, for comparison bit by bit.

Written from the formulas in the docstrings of the classes, by torch's in-place operators, whose
products are not rounded; or by its fused operators, where ``options["fused"]``. Where gradients
have an exact mean, elementwise updates do not depend on how tensors are cut, so sharded ones must
have these bits. Nothing here imports shardfuse.

A rule is called as ``rule(p, g, state, options, step)`` and changes ``p`` and ``state`` in place;
``step`` is 1 for a parameter's first update.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tests.support.oracles import bert_schedule

State = dict[str, Tensor]
Options = Mapping[str, Any]
Rule = Callable[[Tensor, Tensor, State, Options, int], None]


def _state(state: State, name: str, p: Tensor, value: float = 0.0) -> Tensor:
    return state.setdefault(name, torch.full_like(p, value))


def _fused(operator: str, tensors: Sequence[Tensor], call: Callable[..., None]) -> None:
    """Call an operator of torch's on flat tensors of full vectors: a tail is rounded otherwise."""
    numel = tensors[0].numel()
    padded = [torch.nn.functional.pad(t.flatten(), (0, -numel % 16)) for t in tensors]
    call(getattr(torch, operator), *([tensor] for tensor in padded))
    for tensor, own in zip(tensors, padded, strict=True):
        tensor.copy_(own[:numel].view_as(tensor))


def sgd(p: Tensor, g: Tensor, state: State, o: Options, step: int) -> None:
    """Momentum starts from the gradient, undamped."""
    names = ("lr", "weight_decay", "momentum", "dampening", "nesterov")
    is_first = "momentum_buffer" not in state
    if o["fused"] and (o["weight_decay"] != 0 or o["momentum"] != 0):
        buffers = [_state(state, "momentum_buffer", p)] if o["momentum"] != 0 else []
        options = {name: o[name] for name in names}
        _fused(
            "_fused_sgd_",
            [p, g.clone(), *buffers],
            lambda operator, p, g, *buffer: operator(
                p, g, *(buffer or [[]]), **options, maximize=False, is_first_step=is_first
            ),
        )
        return
    if o["weight_decay"] != 0:
        g = torch.add(g, p, alpha=o["weight_decay"])
    if o["momentum"] != 0:
        if not is_first:
            buffer = state["momentum_buffer"].mul_(o["momentum"])
            buffer.add_(g, alpha=1.0 - o["dampening"])
        else:
            buffer = state["momentum_buffer"] = g.clone()
        g = torch.add(g, buffer, alpha=o["momentum"]) if o["nesterov"] else buffer
    p.add_(g, alpha=-o["lr"])


def _adam(p: Tensor, g: Tensor, state: State, o: Options, step: int, decoupled: bool) -> None:
    beta1, beta2 = o["betas"]
    m, v = _state(state, "exp_avg", p), _state(state, "exp_avg_sq", p)
    largest = [_state(state, "max_exp_avg_sq", p)] if o["amsgrad"] else []
    if o["fused"]:
        options = {name: o[name] for name in ("lr", "weight_decay", "eps", "amsgrad")}
        steps = [torch.tensor(float(step))]
        _fused(
            "_fused_adamw_" if decoupled else "_fused_adam_",
            [p, g.clone(), m, v, *largest],
            lambda operator, p, g, m, v, *largest: operator(
                *(p, g, m, v, *(largest or [[]]), steps),
                **options,
                beta1=beta1,
                beta2=beta2,
                maximize=False,
            ),
        )
        return
    if o["weight_decay"] != 0:
        if decoupled:
            p.mul_(1.0 - o["lr"] * o["weight_decay"])
        else:
            g = torch.add(g, p, alpha=o["weight_decay"])
    m.lerp_(g, 1.0 - beta1)
    v.mul_(beta2).addcmul_(g, g, value=1.0 - beta2)
    if largest:
        v = torch.maximum(largest[0], v, out=largest[0])
    root = (1.0 - beta2**step) ** 0.5
    step_size = o["lr"] * (root / (1.0 - beta1**step))
    p.addcdiv_(m, v.sqrt().add_(o["eps"] * root), value=-step_size)


def adam(p: Tensor, g: Tensor, state: State, o: Options, step: int) -> None:
    """Adam with an L2 penalty."""
    _adam(p, g, state, o, step, decoupled=False)


def adamw(p: Tensor, g: Tensor, state: State, o: Options, step: int) -> None:
    """Adam with decoupled decay."""
    _adam(p, g, state, o, step, decoupled=True)


def bert_adam(p: Tensor, g: Tensor, state: State, o: Options, step: int) -> None:
    """NVIDIA's, unclipped; AdamW after so many steps that no bias is left makes the direction."""
    m, v = _state(state, "exp_avg", p), _state(state, "exp_avg_sq", p)
    lr, decay = o["lr"], max(o["weight_decay"], 0.0)
    if o["t_total"] != -1:
        lr *= bert_schedule(o["schedule"], (step - 1) / o["t_total"], o["warmup"])
    if o["fused"]:
        u = p * decay if decay > 0 else p
        _fused(
            "_fused_adamw_",
            [u, g.clone(), m, v],
            lambda operator, *lists: operator(
                *(*lists, [], [torch.tensor(1e30)]),
                beta1=o["b1"],
                beta2=o["b2"],
                eps=o["e"],
                weight_decay=0.0,
                lr=-1.0 if decay > 0 else lr,
                amsgrad=False,
                maximize=False,
            ),
        )
        if decay > 0:
            p.add_(u, alpha=-lr)
        return
    m.lerp_(g, 1.0 - o["b1"])
    v.mul_(o["b2"]).addcmul_(g, g, value=1.0 - o["b2"])
    u = m / v.sqrt().add_(o["e"])
    if decay > 0:
        u.add_(p, alpha=decay)
    p.add_(u, alpha=-lr)


def _centered(square: Tensor, g: Tensor, state: State, o: Options, p: Tensor) -> Tensor:
    if not o["centered"]:
        return square
    mean = _state(state, "grad_avg", p).lerp_(g, 1.0 - o["alpha"])
    return square.addcmul(mean, mean, value=-1.0)


def rmsprop(p: Tensor, g: Tensor, state: State, o: Options, step: int) -> None:
    """Torch's: eps outside the root."""
    if o["weight_decay"] != 0:
        g = torch.add(g, p, alpha=o["weight_decay"])
    square = _state(state, "square_avg", p)
    square.mul_(o["alpha"]).addcmul_(g, g, value=1.0 - o["alpha"])
    denominator = _centered(square, g, state, o, p).sqrt().add_(o["eps"])
    if o["momentum"] > 0:
        buffer = _state(state, "momentum_buffer", p).mul_(o["momentum"])
        p.add_(buffer.addcdiv_(g, denominator), alpha=-o["lr"])
    else:
        p.addcdiv_(g, denominator, value=-o["lr"])


def rmsprop_tf(p: Tensor, g: Tensor, state: State, o: Options, step: int) -> None:
    """TensorFlow's: averages from one, eps inside the root."""
    if o["weight_decay"] != 0 and o["decoupled_decay"]:
        p.mul_(1.0 - o["weight_decay"])
    elif o["weight_decay"] != 0:
        g = torch.add(g, p, alpha=o["weight_decay"])
    square = _state(state, "square_avg", p, 1.0)
    square.mul_(o["alpha"]).addcmul_(g, g, value=1.0 - o["alpha"])
    denominator = (_centered(square, g, state, o, p) + o["eps"]).sqrt_()
    if o["momentum"] == 0:
        p.addcdiv_(g, denominator, value=-o["lr"])
        return
    inside, outside = (o["lr"], 1.0) if o["lr_in_momentum"] else (1.0, o["lr"])
    buffer = _state(state, "momentum_buffer", p).mul_(o["momentum"])
    p.add_(buffer.addcdiv_(g, denominator, value=inside), alpha=-outside)


def adadelta(p: Tensor, g: Tensor, state: State, o: Options, step: int) -> None:
    """The ratio of two root mean squares."""
    if o["weight_decay"] != 0:
        g = torch.add(g, p, alpha=o["weight_decay"])
    square, moved = _state(state, "square_avg", p), _state(state, "acc_delta", p)
    square.mul_(o["rho"]).addcmul_(g, g, value=1.0 - o["rho"])
    delta = (moved + o["eps"]).sqrt_() / (square + o["eps"]).sqrt_() * g
    moved.mul_(o["rho"]).addcmul_(delta, delta, value=1.0 - o["rho"])
    p.add_(delta, alpha=-o["lr"])


def _orthogonal(matrices: Tensor, o: Options) -> Tensor:
    """Iterate as torch.optim.Muon does, which torch has from 2.9 on, over (k, m, n).

    Products of few elements are rounded otherwise where ``matrices`` are multiplied one by one, and
    all where they have another layout.
    """
    a, b, c = o["ns_coefficients"]
    x = matrices.bfloat16()
    is_tall = x.shape[1] > x.shape[2]
    x = x.mT if is_tall else x
    for matrix in x:
        matrix.div_(matrix.norm().clamp(min=o["eps"]))
    for _ in range(o["ns_steps"]):
        gram = torch.bmm(x, x.mT)
        update = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, update, x, beta=a)
    return x.mT if is_tall else x


def muon(p: Tensor, g: Tensor, state: State, o: Options, step: int) -> None:
    """Each of ``split`` matrices by itself; AdamW where ``use_muon`` is False."""
    if not o["use_muon"]:
        adamw(p, g, state, o, step)
        return
    g = torch.empty_like(p).copy_(g)  # products round by the layout in memory
    momentum = _state(state, "momentum_buffer", p).lerp_(g, 1.0 - o["momentum"])
    u = torch.lerp(g, momentum, o["momentum"]) if o["nesterov"] else momentum
    *_, rows, columns = p.shape
    rows = rows if p.dim() == 3 else rows // o["split"]
    ratio = max(1.0, rows / columns) ** 0.5
    if o["adjust_lr_fn"] == "match_rms_adamw":
        ratio = 0.2 * max(rows, columns) ** 0.5
    if p.numel():
        u = _orthogonal(u.reshape(-1, rows, columns), o).reshape(p.shape).float()
        p.mul_(1.0 - o["lr"] * o["weight_decay"]).add_(u, alpha=-o["lr"] * ratio)


RULES: dict[str, Rule] = {
    rule.__name__: rule
    for rule in (sgd, adam, adamw, bert_adam, rmsprop, rmsprop_tf, adadelta, muon)
}
