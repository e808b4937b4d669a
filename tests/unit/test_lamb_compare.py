"""The translator between LAMB variants: it runs the real rule, and its figures follow by hand."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardfuse import LambComparison, ShardedLamb, compare_lamb_variants

ROOT = Path(__file__).parent.parent.parent

BETAS = (0.9, 0.999)
VARIANTS = ["npu", "apex", "nvlamb", "google", "paddle", "deepspeed"]
OUTSIDE = {"variant": "nvlamb", "bias_correction": "outside"}


def normal(*shape: int, seed: int = 0) -> nn.Parameter:
    """Return weights as BERT starts with, of standard deviation 0.02."""
    return nn.Parameter(0.02 * torch.randn(shape, generator=torch.Generator().manual_seed(seed)))


def one(comparison: LambComparison) -> tuple[float, float, float]:
    (size,) = comparison.params
    return size.norm, size.other_norm, size.ratio


def test_word_embedding_of_bert_large() -> None:
    """Without a clamp the step is the weight norm, 111.8; npu bounds it by 10: 11 times smaller."""
    expected = 0.02 * math.sqrt(30522 * 1024)
    assert round(expected, 1) == 111.8
    # A sixteenth of its elements, four times as large: the same norm, and that is all that counts.
    weight = nn.Parameter(4 * normal(30522, 64).detach())
    comparison = compare_lamb_variants([weight], "npu", "nvlamb", weight_decay=0.0)
    assert one(comparison) == pytest.approx((10.0, expected, 10.0 / expected), rel=1e-3)
    assert comparison.lr_factor == pytest.approx(11.18, rel=1e-3)


def test_layer_norm_gain_of_bert_large() -> None:
    """A gain of ones has norm 32: that is its step where it is adapted, and npu bounds it too."""
    gain = [("encoder.LayerNorm.weight", nn.Parameter(torch.ones(1024)))]
    comparison = compare_lamb_variants(gain, "npu", "nvlamb")
    assert one(comparison) == pytest.approx((10.0, 32.0, 10.0 / 32.0), rel=1e-5)
    # With ratio 1 a first step is the sign of the gradient, of norm sqrt(1024).
    assert one(compare_lamb_variants(gain, "google"))[0] == pytest.approx(32.0, rel=1e-5)


@pytest.mark.parametrize(("num_steps", "rounded"), [(1, 0.32), (10, 0.15), (1000, 0.80)])
def test_correction_outside_is_a_hidden_warmup(num_steps: int, rounded: float) -> None:
    """Outside of the ratio the correction scales the step by sqrt(1 - b2^t) / (1 - b1^t)."""
    factor = math.sqrt(1 - BETAS[1] ** num_steps) / (1 - BETAS[0] ** num_steps)
    assert round(factor, 2) == rounded
    comparison = compare_lamb_variants(
        [normal(64, 48)], OUTSIDE, "nvlamb", betas=BETAS, weight_decay=0.0, num_steps=num_steps
    )
    assert one(comparison)[2] == pytest.approx(factor, rel=1e-4)


def test_zero_bias() -> None:
    """A bias of zeros has ratio 1; without correction its first step is 1 / sqrt(0.1) larger."""
    comparison = compare_lamb_variants([("bias", nn.Parameter(torch.zeros(400)))], "npu")
    expected = (1 - BETAS[0]) / math.sqrt(1 - BETAS[1])
    assert one(comparison) == pytest.approx((20 * expected, 20.0, expected), rel=1e-3)


def small_model() -> list[tuple[str, nn.Parameter]]:
    params = [
        ("embedding.weight", nn.Parameter(normal(300, 40).detach() * 60)),
        ("dense.weight", normal(40, 70, seed=1)),
        ("dense.bias", nn.Parameter(torch.zeros(70))),
        ("LayerNorm.weight", nn.Parameter(torch.ones(70))),
        ("scale", nn.Parameter(torch.tensor(1.5))),
    ]
    generator = torch.Generator().manual_seed(7)
    for _, param in params:
        param.grad = torch.randn(param.shape, generator=generator)
    return params


@pytest.mark.parametrize("num_steps", [1, 4])
@pytest.mark.parametrize("variant", VARIANTS)
def test_is_what_the_optimizer_does(variant: Any, num_steps: int) -> None:
    """ShardedLamb itself, its weights put back after every step, moves by lr times these norms."""
    comparison = compare_lamb_variants(small_model(), variant, num_steps=num_steps)
    params = small_model()
    optimizer = ShardedLamb(params, lr=1.0, weight_decay=0.01, variant=variant)
    start = [param.detach().clone() for _, param in params]
    moved: list[Tensor] = []
    for _ in range(num_steps):
        optimizer.step()
        moved = [param.detach() - old for (_, param), old in zip(params, start, strict=True)]
        with torch.no_grad():
            for (_, param), old in zip(params, start, strict=True):
                param.copy_(old)
    assert [size.name for size in comparison.params] == [name for name, _ in params]
    for size, difference in zip(comparison.params, moved, strict=True):
        assert size.norm == pytest.approx(float(difference.norm()), rel=1e-5)


def test_changes_nothing() -> None:
    """Weights, gradients and torch's own random numbers are as before; noise is the seed's."""
    params = small_model()
    params[0][1].grad = None
    before = [(p.detach().clone(), None if p.grad is None else p.grad.clone()) for _, p in params]
    random_state = torch.get_rng_state()
    comparison = compare_lamb_variants(params, "npu", num_steps=3)
    assert torch.equal(torch.get_rng_state(), random_state)
    for (_, param), (value, grad) in zip(params, before, strict=True):
        assert torch.equal(param.detach(), value)
        assert (param.grad is None) == (grad is None)
        assert grad is None or torch.equal(param.grad, grad)
    assert compare_lamb_variants(params, "npu", num_steps=3) == comparison
    adam: Any = {"variant": "npu", "adam": True}  # no ratio, which would hide the noise
    first, second = (
        compare_lamb_variants(params, adam, num_steps=3, seed=seed).params for seed in (0, 5)
    )
    assert [a.norm == b.norm for a, b in zip(first, second, strict=True)] == [False] + [True] * 4


def test_summary_figures() -> None:
    """The median is over all parameters, the factor over the matrices, one over their median."""
    comparison = compare_lamb_variants(small_model(), "npu")
    ratios = sorted(size.ratio for size in comparison.params)
    assert comparison.median_ratio == ratios[2]
    assert comparison.max_ratio == ratios[-1]
    matrices = [size.ratio for size in comparison.params if len(size.shape) == 2]
    assert len(matrices) == 2
    assert comparison.lr_factor == pytest.approx(2 / sum(matrices))
    same = compare_lamb_variants(small_model(), "google", "google")
    assert (same.median_ratio, same.max_ratio, same.lr_factor) == (1.0, 1.0, 1.0)


def test_prints_as_a_table() -> None:
    """One line per parameter, both labels, the median and the factor for the learning rate."""
    comparison = compare_lamb_variants(small_model(), {"variant": "npu", "clamp_value": 5.0})
    text = str(comparison)
    assert "npu clamp_value=5.0" in text
    assert f"multiply lr by {comparison.lr_factor:.3g}" in text
    assert f"median {comparison.median_ratio:.3g}" in text
    for size in comparison.params:
        assert re.search(rf"^{size.name} .* {size.norm:.4g} .* {size.ratio:.3g}$", text, re.M)
    with pytest.raises(dataclasses.FrozenInstanceError):
        comparison.num_steps = 2  # type: ignore[misc]


def test_groups_have_their_own_options() -> None:
    """A group's weight decay holds for its parameters; frozen and empty ones are left out."""
    frozen = nn.Parameter(torch.ones(3, 3), requires_grad=False)
    groups = [
        {"params": [("a", normal(30, 30)), ("frozen", frozen)]},
        {"params": [("b", normal(30, 30)), ("empty", nn.Parameter(torch.ones(0)))]},
    ]
    groups[1]["weight_decay"] = 0.0  # type: ignore[assignment]
    a, b = compare_lamb_variants(groups, "apex", "nvlamb", num_steps=3, weight_decay=0.1).params
    assert (a.name, b.name) == ("a", "b")
    assert a.ratio == 1.0
    # Without decay apex takes no ratio: the step is that of Adam.
    assert b.ratio > 10


def test_adam_and_half_precision() -> None:
    """``adam`` is a switch like the others; bf16 weights are compared in fp32."""
    param = nn.Parameter(torch.ones(50, 50, dtype=torch.bfloat16))
    adam = {"variant": "nvlamb", "adam": True}
    norm, other, _ = one(compare_lamb_variants([param], adam, "nvlamb", weight_decay=0.0))
    assert norm == pytest.approx(50.0, rel=1e-4)  # the sign of the gradient
    assert other == pytest.approx(50.0, rel=1e-4)  # the weight norm
    assert param.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("params", "options", "message"),
    [
        ([("w", torch.ones(3))], {"num_steps": 0}, "num_steps: 0"),
        ([("w", torch.ones(3))], {"variant": "lars"}, "Invalid variant: 'lars'"),
        ([("w", torch.ones(3))], {"betas": (0.9, 1.0)}, "Invalid beta parameter at index 1"),
        ([torch.ones(3)], {}, "named_parameters"),
        ([], {}, "an empty parameter list"),
    ],
    ids=str,
)
def test_errors(params: list[Any], options: dict[str, Any], message: str) -> None:
    """Wrong arguments are named, and google needs names here too."""
    with pytest.raises(ValueError, match=re.escape(message)):
        compare_lamb_variants(params, **{"variant": "npu", **options})


def test_what_is_no_list_of_parameters() -> None:
    """As for optimizers; a tensor would be taken for a list of its rows. A model is one."""
    model = nn.Sequential(nn.Linear(4, 3))
    named = compare_lamb_variants(model.named_parameters(), "npu", "apex")
    assert str(compare_lamb_variants(model, "npu", "apex")) == str(named)
    for params in (model.state_dict(), model[0].weight):
        with pytest.raises(TypeError, match="named_parameters"):
            compare_lamb_variants(params, "npu", "apex")


def encoder_layer(hidden: int = 768) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the params of one encoder layer of BERT-base, and of its position table, at init."""
    matrices = {"position": (512, hidden), "intermediate": (4 * hidden, hidden)}
    matrices |= dict.fromkeys(("query", "key", "value", "attention"), (hidden, hidden))
    matrices["output"] = (hidden, 4 * hidden)
    for seed, (name, shape) in enumerate(matrices.items()):
        yield f"{name}.weight", normal(*shape, seed=seed)
        if name != "position":
            yield f"{name}.bias", nn.Parameter(torch.zeros(shape[0]))
    for name in ("attention", "output"):
        yield f"{name}.LayerNorm.weight", nn.Parameter(torch.ones(hidden))
        yield f"{name}.LayerNorm.bias", nn.Parameter(torch.zeros(hidden))


def cell(comparison: LambComparison) -> str:
    ratios = [size.ratio for size in comparison.params]
    return f"{1 / comparison.lr_factor:.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


def test_table_of_the_readme() -> None:
    """The figures in the table of variants, in optim/README.md, are as measured."""
    params = list(encoder_layer())
    text = (ROOT / "shardfuse" / "optim" / "README.md").read_text().split("## Variants of LAMB")[1]
    rows = [line for line in text.split("\n## ")[0].splitlines() if line.startswith("| ")]
    printed = {row.split(" | ")[0].strip("| "): row for row in rows}
    variants: Any = VARIANTS
    for variant in variants:
        cells = [
            cell(compare_lamb_variants(params, variant, num_steps=num_steps))
            for num_steps in (1, 10)
        ]
        assert printed[variant].endswith(f"| {cells[0]} | {cells[1]} |"), (variant, cells)
