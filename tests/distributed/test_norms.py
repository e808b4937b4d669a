"""Norms and clipping of the mean gradient, and loss scaling: one decision for all ranks."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp import GradScaler

from shardfuse import ShardedAdam, ShardedBertAdam, ShardedGradScaler, ShardedLamb, ShardedSGD
from tests.support.harness import run_procs, run_threads
from tests.support.models import MIXED, ParamSet, mean_grads, rank_grads
from tests.support.oracles import AdamOracle, BertAdamOracle, LambOracle
from tests.support.placing import device_type, here
from tests.support.runs import assert_bitwise, max_relative_error

pytestmark = pytest.mark.timeout(60)

# Norms add fp32 squares block by block.
TOLERANCE = 1e-6


def mean_norm(world_size: int, step: int) -> float:
    grads = mean_grads("floats", world_size, step)
    return math.sqrt(sum(float(grad.square().sum()) for grad in grads if grad is not None))


def feed(params: ParamSet, step: int) -> None:
    params.assign(rank_grads("floats", dist.get_world_size(), dist.get_rank(), step))


def take_norm(dtype: torch.dtype) -> tuple[float, torch.dtype, int]:
    params = ParamSet(dtype=dtype)
    optimizer: Any = ShardedAdam(params.groups(), sharding={"bucket_cap_mb": 0.02})
    feed(params, 0)
    norm = optimizer.grad_norm()
    return float(norm), norm.dtype, norm.dim()


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_norm_of_the_mean(world_size: int) -> None:
    """grad_norm() is that of the mean over ranks, over all groups, the same on every rank."""
    results = run_threads(world_size, take_norm, torch.float32)
    assert results[0] == (
        pytest.approx(mean_norm(world_size, 0), rel=TOLERANCE),
        torch.float32,
        0,
    )
    assert all(result == results[0] for result in results)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 1e-2), (torch.float16, 2e-3)])
def test_norm_in_low_precision(dtype: torch.dtype, tolerance: float) -> None:
    """Half-precision gradients are squared in fp32: only their own rounding shows."""
    norm, norm_dtype, _ = run_threads(3, take_norm, dtype)[0]
    assert norm_dtype == torch.float32
    assert norm == pytest.approx(mean_norm(3, 0), rel=tolerance)


def test_norm_does_not_overflow() -> None:
    """fp16 gradients whose squares exceed 65504 have a finite norm."""

    def norm() -> float:
        param = nn.Parameter(torch.zeros(4096, dtype=torch.float16))
        optimizer: Any = ShardedSGD([param], 0.1)
        param.grad = torch.full((4096,), 1000.0, dtype=torch.float16)
        return float(optimizer.grad_norm())

    assert run_threads(2, norm) == pytest.approx([64_000.0, 64_000.0], rel=1e-6)


NUM_STEPS = 6


def train_clipped(max_norms: list[float]) -> tuple[list[Tensor], list[float]]:
    params = ParamSet()
    optimizer: Any = ShardedAdam(params.groups(), lr=0.1, sharding={"bucket_cap_mb": 0.02})
    norms = []
    for step in range(NUM_STEPS):
        feed(params, step)
        before = [float(optimizer.clip_grad_norm(bound)) for bound in max_norms]
        norms.append(before[0])
        optimizer.step()
    return params.values(), norms


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("max_norms", [[1.0], [1e6], [8.0, 2.0]], ids=str)
def test_clipping(max_norms: list[float], world_size: int) -> None:
    """The step takes max_norm / (norm + 1e-6) times the mean gradient, as torch's clipping."""
    params = ParamSet()
    oracle = AdamOracle(params.groups(), lr=0.1)
    order = sorted(range(len(MIXED)), key=lambda i: MIXED[i].group)
    split = [sum(e.group == 0 for e in MIXED), len(MIXED)]
    norms = [mean_norm(world_size, step) for step in range(NUM_STEPS)]
    for step in range(NUM_STEPS):
        factor = 1.0
        for bound in max_norms:
            factor *= min(1.0, bound / (norms[step] * factor + 1e-6))
        means = mean_grads("floats", world_size, step)
        flat = [None if means[i] is None else means[i] * factor for i in order]
        oracle.step([flat[: split[0]], flat[split[0] :]])
    expected = dict(zip(order, oracle.values(), strict=True))
    for values, taken in run_threads(world_size, train_clipped, max_norms):
        assert taken == pytest.approx(norms, rel=TOLERANCE)
        ends = [expected[i] for i in range(len(MIXED))]
        assert max_relative_error(values, ends, params.values()) < TOLERANCE


@pytest.mark.parametrize("max_norm", [0.0, -1.0, math.nan])
def test_bad_bounds(max_norm: float) -> None:
    """A bound that is not above 0 is refused."""
    optimizer: Any = ShardedSGD([nn.Parameter(torch.ones(3))], 0.1)
    with pytest.raises(ValueError, match="max_norm"):
        optimizer.clip_grad_norm(max_norm)


def clip_then_accumulate() -> str:
    param = nn.Parameter(torch.ones(2000))
    optimizer: Any = ShardedSGD([param], 0.1)
    param.sum().backward()
    optimizer.clip_grad_norm(1.0)
    param.sum().backward()
    try:
        optimizer.step()
    except RuntimeError as error:
        return str(error)
    return "none"


def test_clipping_too_early() -> None:
    """A backward pass between clipping and the step is an error: its gradient was not measured."""
    for text in run_threads(2, clip_then_accumulate):
        assert "clip_grad_norm" in text


def test_clipping_is_for_one_step() -> None:
    """The factor does not outlive the step or zero_grad()."""

    def train() -> list[float]:
        param = nn.Parameter(torch.zeros(1024))
        optimizer: Any = ShardedSGD([param], 1.0)
        ends = []
        for clip in (True, False):
            param.grad = torch.ones(1024)
            if clip:
                optimizer.clip_grad_norm(16.0)
            optimizer.step()
            ends.append(float(param[0].detach()))
        param.grad = torch.ones(1024)
        optimizer.clip_grad_norm(16.0)
        optimizer.zero_grad()
        param.grad = torch.ones(1024)
        optimizer.step()
        return [*ends, float(param[0].detach())]

    for values in run_threads(2, train):
        assert values == pytest.approx([-0.5, -1.5, -2.5], rel=1e-6)


def train_scaled(names: str, scaler_class: Any = ShardedGradScaler) -> dict[str, Any]:
    """Train three scaled steps; in the second, one rank's gradient overflows."""
    cls: Any = {"sgd": ShardedSGD, "bert": ShardedBertAdam, "lamb": ShardedLamb}[names]
    params = [nn.Parameter(torch.zeros(3000)), nn.Parameter(torch.zeros(5))]
    optimizer = cls(params, lr=0.5, weight_decay=0.0)
    scaler = scaler_class(device_type(), init_scale=8.0, growth_interval=100)
    values, scales = [], []
    for step in range(3):
        inputs = torch.ones(3000)
        if step == 1 and dist.get_rank() == 1:
            inputs[2999] = math.inf
        loss = (params[0] * inputs).sum() + params[1].sum()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        values.append([p.detach().clone() for p in params])
        scales.append(scaler.get_scale())
    return {"values": values, "scales": scales}


@pytest.mark.parametrize("run", [run_threads, run_procs])
@pytest.mark.parametrize("name", ["sgd", "bert", "lamb"])
def test_overflow_on_one_rank(name: str, run: Any) -> None:
    """All ranks skip the step, halve the scale and go on; parameters stay finite and equal."""
    results = run(3, train_scaled, name)
    for result in results:
        first, second, third = result["values"]
        assert result["scales"] == [8.0, 4.0, 4.0]
        assert_bitwise(second, first)
        assert not torch.equal(third[0], second[0])
        for ours, others in zip(result["values"], results[0]["values"], strict=True):
            assert_bitwise(ours, others)


@pytest.mark.parametrize("name", ["sgd", "bert", "lamb"])
def test_plain_scaler_skips_on_all_ranks(name: str) -> None:
    """torch's own scaler lowers the scale of one rank only; the training is the same all the same.

    All scales are powers of two, so that undoing different ones before the sum is exact.
    """
    plain = run_threads(3, train_scaled, name, GradScaler)
    sharded = run_threads(3, train_scaled, name)
    assert [result["scales"][-1] for result in plain] == [8.0, 4.0, 8.0]
    for ours, reference in zip(plain, sharded, strict=True):
        for values, expected in zip(ours["values"], reference["values"], strict=True):
            assert_bitwise(values, expected)


def train_half(world_size: int) -> tuple[list[Tensor], dict[str, Any]]:
    """Train fp16 parameters under a scaler, unscaled inside the step, with one overflow."""
    rank = dist.get_rank() if world_size > 1 else 0
    param = nn.Parameter(torch.linspace(-1, 1, 3000, dtype=torch.float16))
    optimizer = ShardedAdam([param], lr=0.1)
    scaler = ShardedGradScaler(device_type(), init_scale=64.0, growth_interval=100)
    for step in range(4):
        loss = (param.float() ** 2).sum() * (1e30 if step == 1 and rank == world_size - 1 else 1.0)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    optimizer.consolidate_state_dict(to=None)
    return [param.detach().clone()], optimizer.state_dict()


@pytest.mark.parametrize("world_size", [1, 2])
def test_half_precision_parameters_under_a_scaler(world_size: int) -> None:
    """fp16 gradients are unscaled in the kernel in fp32; a skipped step counts nowhere."""
    reference = torch.linspace(-1, 1, 3000, dtype=torch.float16).double()
    params = [nn.Parameter(reference)]
    oracle = AdamOracle([{"params": params}], lr=0.1)
    for _ in range(3):
        rounded = oracle.values()[0].half().double()
        # The gradient of the fp16 parameter, scaled by a power of two, in fp16: exact.
        oracle.step([[2 * rounded]])
    results = run_threads(world_size, train_half, world_size) if world_size > 1 else [train_half(1)]
    for values, state_dict in here(results):  # a state dict is on the CPU
        assert state_dict["state"][0]["step"] == 3
        torch.testing.assert_close(
            state_dict["state"][0]["param"].double(), oracle.values()[0], rtol=1e-5, atol=1e-6
        )
        assert torch.equal(values[0], state_dict["state"][0]["param"].half())


def test_rank_without_gradients() -> None:
    """A rank that has no gradient at all takes part in the scaler's decision and in the step."""

    def train() -> Tensor:
        param = nn.Parameter(torch.zeros(3000))
        optimizer = ShardedSGD([param], 1.0)
        scaler = ShardedGradScaler(device_type(), init_scale=8.0)
        loss = scaler.scale(param.sum())
        if dist.get_rank() == 0:
            loss.backward()
        scaler.step(optimizer)
        scaler.update()
        return param.detach().clone()

    for value in run_threads(2, train):
        assert torch.equal(value, torch.full((3000,), -0.5))


def test_scaled_gradients_are_unscaled() -> None:
    """A scaled run without overflow is the unscaled run, bit for bit, for a scale of 2^n."""

    def train(enabled: bool) -> Tensor:
        param = nn.Parameter(torch.linspace(-1, 1, 3000))
        optimizer = ShardedAdam([param], lr=0.1)
        scaler = ShardedGradScaler(device_type(), init_scale=1024.0, enabled=enabled)
        for _ in range(3):
            scaler.scale((param**2).sum()).backward()
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        return param.detach().clone()

    for scaled, plain in zip(
        run_threads(2, train, True), run_threads(2, train, False), strict=True
    ):
        assert torch.equal(scaled, plain)


@pytest.mark.parametrize("name", ["bert", "lamb"])
def test_small_norms(name: str) -> None:
    """BertAdam's clip divides by norm + 1e-6, LAMB's by the norm: seen where the norm is small.

    An eps of 1 makes the updates proportional to the gradients, so that the factor shows.
    """
    bound = 1e-4
    cls, oracle_class, options = {
        "bert": (ShardedBertAdam, BertAdamOracle, {"e": 1.0, "max_grad_norm": bound}),
        "lamb": (
            ShardedLamb,
            LambOracle,
            {"eps": 1.0, "adam": True, "use_global_grad_norm": True, "max_grad_norm": bound},
        ),
    }[name]
    options = {"lr": 1e4, "weight_decay": 0.0, **options}
    grad = torch.full((3000,), 1e-5)

    def train() -> Tensor:
        param = nn.Parameter(torch.zeros(3000))
        optimizer = cls([param], **options)
        param.grad = torch.full_like(param, 1e-5)
        optimizer.step()
        return param.detach().clone()

    start = torch.zeros(3000)
    oracle = oracle_class([{"params": [start]}], **options)
    oracle.step([[grad]])
    for value in run_threads(2, train):
        assert max_relative_error([value], oracle.values(), [start]) < TOLERANCE


def look_then_change() -> Tensor:
    """Change the gradient of one rank between looking at its norm and the step."""
    param = nn.Parameter(torch.zeros(3000))
    optimizer = ShardedSGD([param], 1.0)
    param.grad = torch.ones(3000)
    optimizer.grad_norm()
    if dist.get_rank() == 0:
        param.grad = torch.full((3000,), 3.0)
    optimizer.step()
    return param.detach().clone()


def test_one_rank_changes_its_gradient_after_a_look() -> None:
    """Looking at the norm binds no rank: the step takes the gradients that it finds."""
    for value in run_threads(2, look_then_change):
        assert torch.equal(value, torch.full((3000,), -2.0))
