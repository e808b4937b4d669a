"""The references agree with torch.optim and with values worked out by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.oracles import (
    AdamOracle,
    BertAdamOracle,
    LambOracle,
    Oracle,
    SGDOracle,
    bert_schedule,
)

# Both sides are double precision and differ in the order of a few operations only.
TOLERANCE = 1e-12
SHAPES = [[(7, 3), ()], [(11,), (2, 2)]]

CASES: list[tuple[type[Oracle], type[torch.optim.Optimizer], dict[str, Any]]] = [
    (SGDOracle, torch.optim.SGD, {"lr": 0.1}),
    (SGDOracle, torch.optim.SGD, {"lr": 0.1, "weight_decay": 0.1}),
    (SGDOracle, torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.3}),
    (SGDOracle, torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    (AdamOracle, torch.optim.Adam, {"lr": 0.1}),
    (AdamOracle, torch.optim.Adam, {"lr": 0.1, "weight_decay": 0.1, "betas": (0.5, 0.9)}),
    (AdamOracle, torch.optim.Adam, {"lr": 0.1, "amsgrad": True, "eps": 1e-3}),
    (AdamOracle, torch.optim.AdamW, {"lr": 0.1, "weight_decay": 0.1}),
    (AdamOracle, torch.optim.AdamW, {"lr": 0.1, "weight_decay": 0.1, "amsgrad": True}),
]


def make_groups() -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(0)
    groups: list[dict[str, Any]] = []
    for shapes in SHAPES:
        tensors = [torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes]
        groups.append({"params": [torch.nn.Parameter(t) for t in tensors]})
    groups[1]["lr"] = 0.03
    return groups


@pytest.mark.parametrize(("oracle_class", "torch_class", "options"), CASES)
def test_equal_to_torch(
    oracle_class: type[Oracle],
    torch_class: type[torch.optim.Optimizer],
    options: dict[str, Any],
) -> None:
    """SGD, Adam and AdamW follow torch.optim, also for a parameter that skips steps."""
    groups = make_groups()
    decoupled = {"decoupled": True} if torch_class is torch.optim.AdamW else {}
    oracle = oracle_class(groups, **options, **decoupled)
    optimizer = torch_class(groups, foreach=False, **options)
    generator = torch.Generator().manual_seed(1)
    for step in range(6):
        grads: list[list[Tensor | None]] = []
        for group in groups:
            drawn = [torch.randn(p.shape, generator=generator).double() for p in group["params"]]
            grads.append([None if step in (0, 3) and g.dim() == 0 else g for g in drawn])
            for param, grad in zip(group["params"], grads[-1], strict=True):
                param.grad = None if grad is None else grad.clone()
        oracle.step(grads)
        optimizer.step()
    params = [p for group in groups for p in group["params"]]
    for value, param in zip(oracle.values(), params, strict=True):
        torch.testing.assert_close(value, param.detach(), rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize(
    ("name", "factors"),
    [
        # Executed with torch_npu's own schedules, warm-up 0.4 of 5 steps, steps 0 to 6.
        ("warmup_linear", [0, 0.5, 1, 2 / 3, 1 / 3, 0, 0]),
        ("warmup_poly", [0, 0.5, 0.6**0.5, 0.4**0.5, 0.2**0.5, 0, 0]),
        ("warmup_constant", [0, 0.5, 1, 1, 1, 1, 1]),
        ("warmup_cosine", [0, 0.5] + [0.5 + 0.5 * math.cos(math.pi * i / 5) for i in range(2, 7)]),
    ],
)
def test_bert_schedules(name: str, factors: list[float]) -> None:
    """A BertAdam schedule starts at zero, rises over the warm-up and falls as its name says."""
    assert [bert_schedule(name, i / 5, 0.4) for i in range(7)] == pytest.approx(factors)


def test_linear_schedule_without_warmup_is_halved() -> None:
    """A warm-up of -1 with a linear schedule halves the rate, as NVIDIA's code does."""
    assert bert_schedule("warmup_linear", 0.2, -1) == pytest.approx(0.4)


def test_bert_adam_by_hand() -> None:
    """One BertAdam step on one number gives what pencil and paper give, clip included."""
    oracle = BertAdamOracle([{"params": [torch.tensor([2.0])]}], lr=0.5, weight_decay=0.1)
    oracle.step([[torch.tensor([4.0])]])
    grad = 4.0 * (1.0 / (4.0 + 1e-6))
    direction = 0.1 * grad / (math.sqrt(0.001 * grad * grad) + 1e-6) + 0.1 * 2.0
    assert float(oracle.values()[0]) == pytest.approx(2.0 - 0.5 * direction, rel=1e-14)


@pytest.mark.parametrize(
    ("variant", "expected"),
    [
        # ||w|| = 50 is clamped to 10, no bias correction: u = 0.1 g / (sqrt(0.001) |g|).
        ("npu", (30.0 - 0.1 * 10 / math.sqrt(2), 40.0 - 0.1 * 10 / math.sqrt(2))),
        # Without decay apex and Paddle take the plain Adam step of lr * sign(g).
        ("apex", (29.9, 39.9)),
        ("paddle", (29.9, 39.9)),
        ("google", (30.0 - 0.1 * 50 / math.sqrt(2), 40.0 - 0.1 * 50 / math.sqrt(2))),
    ],
)
def test_lamb_by_hand(variant: str, expected: tuple[float, float]) -> None:
    """One LAMB step on w = (30, 40), g = (1, 1) gives each variant's own known result."""
    groups = [{"params": [torch.tensor([30.0, 40.0])]}]
    oracle = LambOracle(groups, [["dense.weight"]], variant, lr=0.1, eps=0.0)
    oracle.step([[torch.ones(2)]])
    assert oracle.values()[0].tolist() == pytest.approx(expected, rel=1e-12)
    excluded = LambOracle(groups, [["dense.weight"]], variant, lr=0.1, eps=0.0, adam=True)
    excluded.step([[torch.ones(2)]])
    rate = 0.1 * (0.1 / math.sqrt(0.001) if variant == "npu" else 1.0)
    assert excluded.values()[0].tolist() == pytest.approx((30.0 - rate, 40.0 - rate), rel=1e-12)


def test_lamb_exclusion_by_name() -> None:
    """Google's variant takes names with bias or LayerNorm out of decay and of adaptation."""
    names = [["dense.weight", "dense.bias"]]
    groups = [{"params": [torch.tensor([30.0, 40.0]), torch.tensor([30.0, 40.0])]}]
    oracle = LambOracle(groups, names, "google", lr=0.1, eps=0.0, weight_decay=0.5)
    oracle.step([[torch.ones(2), torch.ones(2)]])
    weight, bias = oracle.values()
    assert bias.tolist() == pytest.approx((29.9, 39.9), rel=1e-12)
    direction = torch.tensor([1 + 15.0, 1 + 20.0], dtype=torch.float64)
    moved = torch.tensor([30.0, 40.0]).double() - 0.1 * 50 / direction.norm() * direction
    assert weight.tolist() == pytest.approx(moved.tolist(), rel=1e-12)


def test_lamb_global_norm_scales_before_the_moments() -> None:
    """With use_global_grad_norm gradients above the threshold shrink to it over all groups."""
    groups = [{"params": [torch.ones(1)]}, {"params": [torch.ones(1)]}]
    oracle = LambOracle(groups, use_global_grad_norm=True, max_grad_norm=2.0)
    oracle.step([[torch.tensor([3.0])], [torch.tensor([4.0])]])
    moments = [group["params"][0].state["exp_avg"].item() for group in oracle.groups]
    assert moments == pytest.approx([0.1 * 3 * 2 / 5, 0.1 * 4 * 2 / 5], rel=1e-12)
