"""How the math is run: compiled as eagerly, sums per parameter, padding that stays zero."""

from __future__ import annotations

import itertools
import logging
import random
import shutil
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardfuse import ShardedAdam, ShardedAdamW, ShardedBertAdam, ShardedLamb, ShardedSGD
from shardfuse.engine.step import SegmentSum
from tests.support.models import flat_buffers
from tests.support.placing import device_type

needs_compiler = pytest.mark.skipif(
    shutil.which("g++") is None and shutil.which("clang++") is None,
    reason="torch.compile needs a C++ compiler on the CPU",
)

NOT_TRACED = pytest.mark.cpu_only("torch.compile traces neither the stand-in nor what places on it")

# Compiled code fuses multiplications and additions, and takes scalars in fp32: a few ulps per step.
TOLERANCE = 1e-6


def train(cls: Any, options: dict[str, Any], kernel: str, dtype: torch.dtype) -> list[Tensor]:
    """Train with a schedule, a parameter that joins late, and one that leaves for a step."""
    generator = torch.Generator().manual_seed(0)
    sizes = [(5000,), (3, 7), (1500,), (2000,)]
    params = [nn.Parameter(torch.randn(s, generator=generator).to(dtype)) for s in sizes]
    optimizer = cls(params, lr=0.1, **options, sharding={"kernel": kernel, "bucket_cap_mb": 0.01})
    for step in range(6):
        optimizer.param_groups[0]["lr"] = 0.1 / (1 + step)
        for index, param in enumerate(params):
            grad = torch.randn(param.shape, generator=generator).to(dtype)
            param.grad = None if (index, step) in ((2, 0), (2, 1), (3, 3)) else grad
        optimizer.step()
    return [param.detach().clone() for param in params]


@needs_compiler
@NOT_TRACED
@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("cls", "options", "dtype"),
    [
        (ShardedAdam, {"weight_decay": 0.1}, torch.float32),
        (ShardedLamb, {"use_global_grad_norm": True, "variant": "nvlamb"}, torch.float32),
        (ShardedSGD, {"momentum": 0.9}, torch.bfloat16),
    ],
)
def test_compiled_is_eager(
    cls: Any, options: dict[str, Any], dtype: torch.dtype, caplog: pytest.LogCaptureFixture
) -> None:
    """torch.compile runs the same math: equal to the eager run but for fused roundings."""
    with caplog.at_level(logging.INFO, logger="shardfuse"):
        compiled = train(cls, options, "compile", dtype)
    # A compilation that failed would fall back to the very code it is compared with.
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert any("kernel=compile" in record.getMessage() for record in caplog.records)
    told = [record for record in caplog.records if "first step compiles" in record.getMessage()]
    assert len(told) == 1
    # Of bf16 parameters only the rounded masters are compared: one ulp.
    tolerance = TOLERANCE if dtype == torch.float32 else 2.0**-7
    for value, other in zip(compiled, train(cls, options, "eager", dtype), strict=True):
        torch.testing.assert_close(value, other, rtol=tolerance, atol=tolerance)


def test_failed_compilation_falls_back(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Without a working compiler the step runs eagerly, to the same bits, and says so once."""

    def failing(function: Any, **options: Any) -> Any:
        def run(*args: Any) -> None:
            raise torch._dynamo.exc.InternalTorchDynamoError("no compiler")

        return run

    expected = train(ShardedAdam, {}, "eager", torch.float32)
    monkeypatch.setattr(torch, "compile", failing)
    with caplog.at_level(logging.WARNING, logger="shardfuse"):
        values = train(ShardedAdam, {}, "compile", torch.float32)
    assert all(torch.equal(a, b) for a, b in zip(values, expected, strict=True))
    assert len(caplog.records) == 1
    assert "no compiler" in caplog.text


def test_auto_says_what_it_chose(caplog: pytest.LogCaptureFixture) -> None:
    """The automatic choice is logged with its reason; small models do not pay for a compiler.

    The stand-in device has no fused operators, and LAMB none anywhere.
    """
    fused = "fused" if device_type() == "cpu" else "eager"
    for cls, choice in ((ShardedAdam, fused), (ShardedLamb, "eager")):
        caplog.clear()
        with caplog.at_level(logging.INFO, logger="shardfuse"):
            cls([nn.Parameter(torch.ones(5))], lr=0.1)
        told = [record.getMessage() for record in caplog.records]
        assert any(line.startswith(f"kernel={choice} on") for line in told), told


@pytest.mark.parametrize("seed", range(20))
def test_segment_sums(seed: int) -> None:
    """Values are added per segment: repeated, unordered, huge and absent segments, and gaps."""
    rng = random.Random(seed)
    num_values, num_segments = rng.choice([1, 33, 2000, 40_000]), rng.randrange(1, 9)
    cuts = sorted(rng.sample(range(num_values + 1), min(num_values, 12)))
    ranges = list(itertools.pairwise(cuts))
    rng.shuffle(ranges)
    segments = [(rng.randrange(num_segments), start, stop) for start, stop in ranges]
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(-8, 9, (2, num_values), generator=generator).float()
    expected = torch.zeros(2, num_segments)
    for segment, start, stop in segments:
        expected[:, segment] += values[:, start:stop].sum(1)
    add = SegmentSum(
        segments,
        num_values=num_values,
        num_segments=num_segments,
        device=torch.device(device_type()),
    )
    assert torch.equal(add(values), expected)


def test_segment_sums_keep_digits() -> None:
    """Adding a million fp32 values in levels loses a few roundings, not a million."""
    values = torch.full((1, 1_000_000), 0.1)
    add = SegmentSum(
        [(0, 0, 1_000_000)],
        num_values=1_000_000,
        num_segments=1,
        device=torch.device(device_type()),
    )
    exact = values.double().sum()
    assert abs(add(values).double() - exact) < 1e-6 * exact


@pytest.mark.parametrize(
    ("cls", "options"),
    [
        (ShardedAdam, {"eps": 0.0, "amsgrad": True}),
        (ShardedBertAdam, {"e": 0.0, "weight_decay": 0.0}),
        (ShardedLamb, {"eps": 0.0, "variant": "apex", "always_adapt": True}),
        (ShardedLamb, {"eps": 1e-60}),
    ],
)
def test_vanishing_eps(cls: Any, options: dict[str, Any]) -> None:
    """With an eps of 0 elements without gradient and padding give 0, not 0/0, also in the norms."""
    param = nn.Parameter(torch.ones(1500))
    optimizer = cls([param], lr=0.1, **options)
    grad = torch.zeros(1500)
    grad[:700] = 1.0
    for _ in range(3):
        param.grad = grad.clone()
        optimizer.step()
    assert torch.isfinite(param).all()
    assert torch.equal(param.detach()[700:], torch.ones(800))
    assert (param.detach()[:700] < 1.0).all()
    (buffer,) = flat_buffers(optimizer)
    assert buffer.numel() > 1500
    assert not buffer[1500:].any()


@NOT_TRACED
def test_many_variants_stay_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Optimizers of one process do not use up each other's recompilations."""
    real = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, **_: real(f, dynamic=True, backend="eager"))
    monkeypatch.setattr(torch._dynamo.config, "fail_on_recompile_limit_hit", True)
    variants: list[tuple[Any, dict[str, Any]]] = [
        (cls, {"amsgrad": amsgrad, "weight_decay": decay, "eps": eps})
        for cls in (ShardedAdam, ShardedAdamW)
        for amsgrad, decay, eps in itertools.product((False, True), (0.0, 0.1), (0.0, 1e-8))
    ]
    for index, (cls, options) in enumerate(variants):
        param = nn.Parameter(torch.ones(3000 + 2000 * index))
        optimizer = cls([param], **options, sharding={"kernel": "compile"})
        for step in range(2):
            optimizer.param_groups[0]["lr"] = 0.1 / (step + 1)
            param.grad = torch.ones_like(param)
            optimizer.step()
        assert optimizer._kernels.choice == "compile"
