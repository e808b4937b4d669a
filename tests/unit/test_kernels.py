"""How the math is run: compiled as eagerly, sums per parameter, padding that stays zero."""

from __future__ import annotations

import itertools
import logging
import math
import random
import shutil
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardfuse import (
    ShardedAdadelta,
    ShardedAdam,
    ShardedAdamW,
    ShardedBertAdam,
    ShardedLamb,
    ShardedRMSprop,
    ShardedRMSpropTF,
    ShardedSGD,
)
from shardfuse.engine.kernels import Kernels, Tile, first_pass, only_pass, refresh_master
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
    """Train with a schedule, a parameter that joins late, one that leaves for a step, and edits."""
    generator = torch.Generator().manual_seed(0)
    sizes = [(5000,), (3, 7), (1500,), (2000,)]
    params = [nn.Parameter(torch.randn(s, generator=generator).to(dtype)) for s in sizes]
    optimizer = cls(params, lr=0.1, **options, sharding={"kernel": kernel, "bucket_cap_mb": 0.01})
    for step in range(6):
        optimizer.param_groups[0]["lr"] = 0.1 / (1 + step)
        for index, param in enumerate(params):
            grad = torch.randn(param.shape, generator=generator).to(dtype)
            param.grad = None if (index, step) in ((2, 0), (2, 1), (3, 3)) else grad
        if step in (0, 4):
            with torch.no_grad():
                params[0][100:1100] = 0.5
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
        (ShardedLamb, {"weight_decay": 0.1}, torch.bfloat16),
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


def fail_second_compilation(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list of the passes that are compiled from now on; the second one cannot be run."""
    real, passes = torch.compile, list[str]()

    def no_memory(*args: Any) -> None:
        raise torch._dynamo.exc.InternalTorchDynamoError("no memory")

    def compile_first(function: Any, **options: Any) -> Any:
        passes.append(function.__name__)
        return no_memory if len(passes) > 1 else real(function, dynamic=True, backend="eager")

    monkeypatch.setattr(torch, "compile", compile_first)
    return passes


@NOT_TRACED
def test_edits_survive_a_compiler_that_fails_between_passes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A compiled first pass leaves edits of bf16 params to the second, which is then eager."""
    expected = train(ShardedLamb, {}, "eager", torch.bfloat16)
    passes = fail_second_compilation(monkeypatch)
    values = train(ShardedLamb, {}, "compile", torch.bfloat16)
    assert passes == ["first_pass", "second_pass"]
    assert all(torch.equal(a, b) for a, b in zip(values, expected, strict=True))


@NOT_TRACED
def test_edits_survive_a_compiler_that_fails_in_the_first_pass_of_another_unit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Groups with and without a decay are compiled apart; the second one has no memory left."""

    def stepped(kernel: str) -> list[Tensor]:
        params = [nn.Parameter(torch.ones(700, dtype=torch.bfloat16)) for _ in range(2)]
        groups = [
            {"params": [param], "weight_decay": weight_decay}
            for param, weight_decay in zip(params, (0.0, 0.1), strict=True)
        ]
        optimizer = ShardedLamb(groups, lr=0.1, sharding={"kernel": kernel})
        with torch.no_grad():
            for param in params:
                param.fill_(7.0)
        for param in params:
            param.grad = torch.ones_like(param)
        optimizer.step()
        return [param.detach() for param in params]

    expected = stepped("eager")
    passes = fail_second_compilation(monkeypatch)
    values = stepped("compile")
    assert passes == ["first_pass", "first_pass"]
    assert all(torch.equal(a, b) for a, b in zip(values, expected, strict=True))


def test_auto_says_what_it_chose(caplog: pytest.LogCaptureFixture) -> None:
    """The automatic choice is logged with its reason; small models do not pay for a compiler.

    The stand-in device has no fused operators, and RMSprop none anywhere.
    """
    fused = "fused" if device_type() == "cpu" else "eager"
    for cls, choice in ((ShardedAdam, fused), (ShardedLamb, fused), (ShardedRMSprop, "eager")):
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


ELEMENTWISE: dict[str, tuple[Any, dict[str, Any]]] = {
    "SGD": (ShardedSGD, {"momentum": 0.9, "weight_decay": 0.1, "nesterov": True}),
    "Adam": (ShardedAdam, {"weight_decay": 0.1, "amsgrad": True}),
    "AdamW": (ShardedAdamW, {"weight_decay": 0.1}),
    "BertAdam": (ShardedBertAdam, {}),
    "RMSprop": (ShardedRMSprop, {"momentum": 0.9, "centered": True}),
    "RMSpropTF": (ShardedRMSpropTF, {"momentum": 0.9}),
    "Adadelta": (ShardedAdadelta, {"weight_decay": 0.1}),
}


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_results_do_not_depend_on_the_place(name: str) -> None:
    """Any cut of the elements gives the same bits; fused operators round their last ones otherwise.

    A cut at any place in-place, at multiples of 16 fused, and an odd tail there.
    """
    cls, options = ELEMENTWISE[name]
    optimizer = cls([nn.Parameter(torch.ones(5))], lr=0.1, **options)
    rule, group = optimizer._rule, optimizer.param_groups[0]
    settings = rule.settings(group, "", 3)
    generator = torch.Generator().manual_seed(0)
    count = 2 + len(rule.state_names(group))
    whole = torch.rand(count, 1, 4096 + 7, generator=generator)
    for index, state in enumerate(rule.state_names(group)):
        whole[2 + index] += float(state in rule.squares)  # above the square of the average
    cuts = {"eager": [(1, 8), (3, 40), (17, 1), (4000, 103)]}
    if settings.fused is not None and device_type() == "cpu":
        cuts["fused"] = [(16, 16), (32, 1024 + 16), (4096, 7)]
    for choice, ranges in cuts.items():
        kernels = Kernels(rule, "auto" if choice == "fused" else "eager", whole.device)
        kernels.choose(5)
        assert kernels.choice == choice

        def updated(tensors: Tensor, kernels: Kernels = kernels) -> Tensor:
            p, g, *states = tensors.clone()
            tile = Tile((g,), p, None, tuple(states))
            kernels.run(only_pass, settings, 1 / 3, tile, is_tail=False)
            return torch.stack([p, *states])

        expected = updated(whole)
        for start, numel in ranges:
            part = slice(start, start + numel)
            assert torch.equal(updated(whole[:, :, part].contiguous()), expected[:, :, part])


@pytest.mark.parametrize("kernel", ["eager", "auto"])
@pytest.mark.parametrize("lr", [2e-6, 5e-6])
def test_bert_adam_decays_at_small_rates(lr: float, kernel: str) -> None:
    """The mean of 1,000 updates in fp32 has the decay of those in fp64.

    1 - lr * weight_decay rounds in fp32 to 1, or to a decay that is wrong by half.
    """
    weight_decay, beta1, beta2, eps = 0.01, 0.9, 0.999, 1e-6
    generator = torch.Generator().manual_seed(0)
    exact = 0.1 + 0.02 * torch.randn(16_384, generator=generator, dtype=torch.float64)
    param = nn.Parameter(exact.float())
    exact = param.detach().double()
    optimizer = ShardedBertAdam(
        [param],
        lr=lr,
        weight_decay=weight_decay,
        b1=beta1,
        b2=beta2,
        e=eps,
        max_grad_norm=-1,
        sharding={"kernel": kernel},
    )
    m, v, decay = torch.zeros_like(exact), torch.zeros_like(exact), 0.0
    for _ in range(1000):
        grad = torch.randn(exact.numel(), generator=generator)
        param.grad = grad.clone()
        optimizer.step()
        m = beta1 * m + (1 - beta1) * grad.double()
        v = beta2 * v + (1 - beta2) * grad.double() ** 2
        decay += lr * weight_decay * exact.mean().item()
        exact -= lr * (m / (v.sqrt() + eps) + weight_decay * exact)
    error = (param.detach().double() - exact).mean().item()
    assert abs(error) < 0.02 * decay


@NOT_TRACED
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("weight_decay", [0.1, -0.1, 1e-8, 0.0])
def test_lambs_first_pass_by_an_operator(weight_decay: float, dtype: torch.dtype) -> None:
    """Moments and sums as the in-place forms make them; the same bits wherever rows are cut."""
    optimizer = ShardedLamb([("w", nn.Parameter(torch.ones(5, 2)))], lr=0.1, variant="nvlamb")
    rule, group = optimizer._rule, {**optimizer.param_groups[0], "weight_decay": weight_decay}
    settings = rule.settings(group, "", 3)
    assert settings.fused is not None
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(4, 8, 512, generator=generator)
    values[3].square_()
    values[1, 7], values[2, 7], values[3, 7] = 0.0, values[2, 7] * 1e-8, 1.0  # as the least decay
    low = values[0].to(dtype)
    low[1, 5] = 3.0  # an edit
    results = {}
    for choice in ("auto", "eager"):
        kernels = Kernels(rule, choice, torch.device("cpu"))
        kernels.choose(5)
        for rows in (8, 3):  # 8 is 3 + 3 + 2
            p, g, *states = values.clone()
            sums = torch.full((2, 8), math.nan)
            for part in (slice(i, i + rows) for i in range(0, 8, rows)):
                own_low = None if dtype is torch.float32 else low[part]
                tile = Tile((g[part],), p[part], own_low, tuple(s[part] for s in states))
                tile = tile._replace(aux=sums[:, part])
                kernels.run(first_pass, settings, 1 / 3, tile, is_tail=False)
            results[choice, rows] = p, *states, sums
        assert all(map(torch.equal, results[choice, 8], results[choice, 3]))
    for fused, in_place in zip(results["auto", 8], results["eager", 8], strict=True):
        is_sum = fused is results["auto", 8][-1]
        torch.testing.assert_close(fused, in_place, rtol=1e-6, atol=0.0 if is_sum else 1e-7)
    assert results["auto", 8][0][1, 5] == (values[0][1, 5] if dtype is torch.float32 else 3.0)


@NOT_TRACED
def test_small_units_take_an_operator() -> None:
    """A call of it costs the host less than a compiled one; a rule without one is compiled."""
    found = {}
    for name, build in (("adamw", ShardedAdamW), ("lamb", ShardedLamb)):
        rule = build([nn.Parameter(torch.ones(5))], lr=0.1)._rule
        kernels = Kernels(rule, "auto", torch.device("cpu"))
        for num_units in (1, 4, 5):
            kernels.choose(8 << 20, num_units=num_units)
            found[name, num_units] = kernels.choice
    expected = {("adamw", 5): "fused"}
    assert found == {key: expected.get(key, "compile") for key in found}


@pytest.mark.parametrize("scale", [0.125, -0.25, 1 / 3])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_absorbed_scales_change_no_bit(scale: float, momentum: float) -> None:
    """SGD takes a mean's power of two into its factors, and no other scale."""
    optimizer = ShardedSGD([nn.Parameter(torch.ones(5))], lr=0.3, momentum=momentum)
    rule, group = optimizer._rule, optimizer.param_groups[0]
    settings = rule.settings(group, "", 2)
    kernels = Kernels(rule, "eager", torch.device(device_type()))
    p, g, buf = torch.rand(3, 4, 512, generator=torch.Generator().manual_seed(0))
    results = []
    for grad, factor in ((g, scale), (g * scale, None)):
        tile = Tile((grad,), p.clone(), None, (buf.clone(),)[: int(momentum > 0)])
        kernels.run(only_pass, settings, factor, tile, is_tail=False)
        results.append(tile)
    assert torch.equal(results[0].p, results[1].p)
    assert all(map(torch.equal, results[0].states, results[1].states))
    absorbed = rule.absorb(settings.flags, settings.h, scale)
    assert absorbed is not None


def test_edited_params_win_over_masters() -> None:
    """Masters keep their low half where the rounded param is as it was; edits are taken over."""
    p = torch.tensor([[1.001, 2.003, -3.007, 0.0, 5.0]])
    low = p.bfloat16()
    low[0, 1], low[0, 4] = 7.0, float("nan")
    expected = torch.tensor([[1.001, 7.0, -3.007, 0.0, float("nan")]])
    refresh_master(p, low)
    assert torch.equal(p.nan_to_num(9.0), expected.nan_to_num(9.0))


@NOT_TRACED
@pytest.mark.parametrize(
    ("cls", "function"), [(ShardedAdamW, only_pass), (ShardedLamb, first_pass)]
)
def test_a_device_may_refuse_a_fused_operator(
    cls: Any, function: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is tried once; then the in-place forms run, and a line says so."""

    def refused(*args: Any, **options: Any) -> None:
        raise NotImplementedError("no such operator")

    optimizer = cls([nn.Parameter(torch.ones(5))], lr=0.1)
    rule, group = optimizer._rule, optimizer.param_groups[0]
    kernels = Kernels(rule, "auto", torch.device("cpu"))
    kernels.choose(5)
    monkeypatch.setattr(torch, "_fused_adamw_", refused)
    settings = rule.settings(group, "", 1)

    def run() -> tuple[Tensor, Tensor]:
        p, states = torch.ones(1, 512), torch.zeros(2, 1, 512)
        tile = Tile((torch.ones(1, 512),), p, None, tuple(states))
        kernels.run(function, settings, None, tile, is_tail=False)
        return p, states

    with pytest.raises(NotImplementedError):
        run()  # the CPU has it: another error than that
    monkeypatch.setattr(kernels, "_device", torch.device("meta"))
    monkeypatch.setattr(kernels, "_constant", lambda value: torch.tensor(value))
    with caplog.at_level(logging.WARNING, logger="shardfuse"):
        p, states = run()
        assert bool((states > 0).all())
        assert bool((p < 1).all()) == (function is only_pass)
        run()
    kernels.choose(5)
    assert kernels.choice == "eager"
    assert len(caplog.records) == 1
    assert "no such operator" in caplog.text


@needs_compiler
@NOT_TRACED
def test_padding_does_not_choose_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """LAMB pads each tensor to whole blocks: 64 of 16 elements take 32,768, and hold 1,024."""
    monkeypatch.setattr("shardfuse.engine.kernels.COMPILE_MIN_NUMEL", 1025)
    optimizer = ShardedLamb([nn.Parameter(torch.ones(16)) for _ in range(64)], lr=0.1)
    assert optimizer.layout.flats[0].numel == 64 * 512
    assert optimizer._kernels.choice != "compile", optimizer._kernels.reason
    monkeypatch.setattr("shardfuse.engine.kernels.COMPILE_MIN_NUMEL", 1024)
    optimizer = ShardedLamb([nn.Parameter(torch.ones(16)) for _ in range(64)], lr=0.1)
    assert optimizer._kernels.choice == "compile", optimizer._kernels.reason


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
