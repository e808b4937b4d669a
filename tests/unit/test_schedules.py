"""LR schedulers and hyper-parameters changed between steps act at the next step."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from shardfuse import ShardedAdam, ShardedAdamW, ShardedBertAdam, ShardedLamb, ShardedSGD
from tests.support.oracles import BertAdamOracle, LambOracle

# fp32 rounding of the updates, on both sides.
TOLERANCE = 2e-6
NUM_STEPS = 12

SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "lambda": lambda opt: lr_scheduler.LambdaLR(opt, lambda step: 1 / (1 + step)),
    "step": lambda opt: lr_scheduler.StepLR(opt, 3, 0.5),
    "cosine": lambda opt: lr_scheduler.CosineAnnealingLR(opt, NUM_STEPS),
    "polynomial": lambda opt: lr_scheduler.PolynomialLR(opt, NUM_STEPS, 2.0),
    "warm-up": lambda opt: lr_scheduler.LinearLR(opt, 0.1, total_iters=5),
    "one-cycle": lambda opt: lr_scheduler.OneCycleLR(opt, 0.1, total_steps=NUM_STEPS + 1),
    "plateau": lambda opt: lr_scheduler.ReduceLROnPlateau(opt, patience=1),
}
PAIRS: dict[str, tuple[Callable[..., Any], Callable[..., Any], dict[str, Any]]] = {
    "sgd": (ShardedSGD, torch.optim.SGD, {"lr": 0.05, "momentum": 0.9}),
    "adam": (ShardedAdam, torch.optim.Adam, {"lr": 0.05}),
    "adamw": (ShardedAdamW, torch.optim.AdamW, {"lr": 0.05, "weight_decay": 0.1}),
}


def make_params() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(s, generator=generator)) for s in ((1100,), (7, 3), ())]


def gradients(step: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(p.shape, generator=generator) for p in make_params()]


@pytest.mark.parametrize("schedule", SCHEDULERS)
@pytest.mark.parametrize("name", PAIRS)
def test_schedulers(name: str, schedule: str) -> None:
    """torch's schedulers drive lr (one-cycle: momentum and betas too) as they do torch.optim."""
    cls, torch_class, options = PAIRS[name]
    params, reference = make_params(), make_params()
    optimizers = [cls(params, **options), torch_class(reference, **options, foreach=False)]
    schedulers = [SCHEDULERS[schedule](optimizer) for optimizer in optimizers]
    rates = set()
    for step in range(NUM_STEPS):
        for members, optimizer, scheduler in zip(
            (params, reference), optimizers, schedulers, strict=True
        ):
            for param, grad in zip(members, gradients(step), strict=True):
                param.grad = grad
            optimizer.step()
            scheduler.step(*([1.0] if schedule == "plateau" else []))
        rates.add(optimizers[0].param_groups[0]["lr"])
    assert len(rates) > 2
    for param, other in zip(params, reference, strict=True):
        torch.testing.assert_close(param, other, rtol=TOLERANCE, atol=TOLERANCE)


CHANGES: dict[str, tuple[Callable[..., Any], dict[str, Any], dict[str, Any]]] = {
    "apex-decay": (ShardedLamb, {"variant": "apex"}, {"weight_decay": 0.3}),
    "npu-decay": (ShardedLamb, {"weight_decay": 0.3}, {"weight_decay": 0.0, "lr": 0.2}),
    "lamb-betas": (ShardedLamb, {}, {"betas": (0.5, 0.7), "eps": 1e-2}),
    "bert-clip": (ShardedBertAdam, {"max_grad_norm": -1}, {"max_grad_norm": 0.1}),
    "bert-decay": (ShardedBertAdam, {"weight_decay": 0.0}, {"weight_decay": 0.3, "e": 1e-2}),
}


@pytest.mark.filterwarnings("ignore:A trust ratio is taken only")
@pytest.mark.parametrize("name", CHANGES)
def test_changed_options_act_at_once(name: str) -> None:
    """Any option written into param_groups counts from the next step, trust ratios included."""
    cls, options, change = CHANGES[name]
    params = make_params()
    optimizer = cls(params, lr=0.1, **options)
    oracle_class = LambOracle if cls is ShardedLamb else BertAdamOracle
    oracle = oracle_class([{"params": params}], lr=0.1, **options)
    before = [value.clone() for value in oracle.values()]
    for step in range(6):
        if step == 3:
            optimizer.param_groups[0].update(change)
            oracle.groups[0].update(change)
        for param, grad in zip(params, gradients(step), strict=True):
            param.grad = grad
        optimizer.step()
        oracle.step([gradients(step)])
    for param, value, start in zip(params, oracle.values(), before, strict=True):
        error = (param.detach().double() - value).abs().max()
        assert error < TOLERANCE * max(value.abs().max(), start.abs().max())


def test_momentum_switched_on_later() -> None:
    """Momentum raised from 0 starts with the gradient of that step, as in torch."""
    params, reference = make_params(), make_params()
    optimizer = ShardedSGD(params, 0.1, dampening=0.5)
    expected = torch.optim.SGD(reference, 0.1, dampening=0.5, foreach=False)
    for step in range(6):
        for members, opt in ((params, optimizer), (reference, expected)):
            opt.param_groups[0]["momentum"] = 0.9 if step >= 2 else 0.0
            for param, grad in zip(members, gradients(step), strict=True):
                param.grad = grad
            opt.step()
    for param, other in zip(params, reference, strict=True):
        torch.testing.assert_close(param, other, rtol=TOLERANCE, atol=TOLERANCE)


def test_tensor_lr() -> None:
    """A learning rate held in a one-element tensor is read at every step."""
    param = nn.Parameter(torch.zeros(1500))
    lr = torch.tensor(0.5)
    optimizer = ShardedSGD([param], lr)
    param.grad = torch.ones(1500)
    optimizer.step()
    lr.fill_(0.25)
    optimizer.step()
    assert torch.equal(param.detach(), torch.full((1500,), -0.75))


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("warmup_linear", [0, 0.5, 1, 2 / 3, 1 / 3, 0, 0]),
        ("warmup_poly", [0, 0.5, 0.6**0.5, 0.4**0.5, 0.2**0.5, 0, 0]),
        ("warmup_constant", [0, 0.5, 1, 1, 1, 1, 1]),
        ("warmup_cosine", [0, 0.5] + [0.5 + 0.5 * math.cos(math.pi * i / 5) for i in range(2, 7)]),
    ],
)
def test_bert_schedules_scale_the_update(schedule: str, expected: list[float]) -> None:
    """BertAdam's schedule starts at step 0, where lr is 0, and stays at its end past t_total."""
    param = nn.Parameter(torch.zeros(1500))
    optimizer = ShardedBertAdam(
        [param], 1.0, 0.4, 5, schedule, b1=0.0, b2=0.0, e=0.0, weight_decay=0.0
    )
    moved = []
    for _ in range(7):
        before = param.detach().clone()
        param.grad = torch.ones(1500)
        optimizer.step()
        moved.append(float((before - param.detach())[0]))
    # The parameter itself is up to 4, hence its rounding.
    assert moved == pytest.approx(expected, abs=1e-6)
