"""shardfuse.optim.npu under gradient scalers: torch_npu's protocol, torch's, our own."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp import GradScaler

from shardfuse import ShardedGradScaler
from shardfuse.optim import npu
from tests.distributed.test_npu import CASES, SHARDING
from tests.support.harness import run_procs, run_threads
from tests.support.npu_scaler import NpuScaler
from tests.support.placing import device_type
from tests.support.runs import TOLERANCE, assert_bitwise, max_relative_error

pytestmark = pytest.mark.timeout(60)

SCALERS: dict[str, Any] = {
    "npu": lambda: NpuScaler(64.0),
    "npu-static": lambda: NpuScaler(64.0, dynamic=False),
    "torch": lambda: GradScaler(device_type(), init_scale=64.0, growth_interval=1000),
    "sharded": lambda: ShardedGradScaler(device_type(), init_scale=64.0, growth_interval=1000),
}
OVERFLOW_STEP = 2


def train_scaled(
    name: str, scaler_name: str, dtype: torch.dtype, clip: bool, overflow: bool
) -> tuple[list[list[Tensor]], list[Any], list[float]]:
    """Train five steps, with an overflow on the last rank only in one of them.

    Returns parameters and step counters after each step, and the scales.
    """
    rank = dist.get_rank() if dist.is_initialized() else 0
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    params = [nn.Parameter(torch.linspace(-1, 1, n).to(dtype)) for n in (2500, 7)]
    params.append(nn.Parameter(torch.ones(3)))
    case = CASES[name]
    optimizer: Any = case.optimizer(params, **case.options, sharding=SHARDING)
    scaler = SCALERS[scaler_name]()
    values, counters, scales = [], [], []
    for step in range(5):
        bad = overflow and step == OVERFLOW_STEP and rank == world_size - 1
        loss = sum(((p.float() - 0.25) ** 2).sum() for p in params)
        scaler.scale(loss * (math.inf if bad else 1.0)).backward()
        if overflow or step != OVERFLOW_STEP:
            if clip:
                scaler.unscale_(optimizer)
                optimizer.clip_grad_norm_fused_(0.5)
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad()
        values.append([p.detach().clone() for p in params])
        scales.append(scaler.get_scale())
        optimizer.consolidate_state_dict(to=None)
        counters.append(copy.deepcopy(optimizer.state_dict()["state"]))
    return values, counters, scales


def assert_skipped(results: list[Any], reference: Any) -> None:
    """Fail unless the overflowing step changed nothing on any rank and training went on."""
    for values, states, _ in results:
        assert_bitwise(values[OVERFLOW_STEP], values[OVERFLOW_STEP - 1])
        for key, entry in states[OVERFLOW_STEP].items():
            for item, value in entry.items():
                before = states[OVERFLOW_STEP - 1][key][item]
                same = torch.equal(value, before) if isinstance(value, Tensor) else value == before
                assert same, (key, item)
        for after, expected in zip(values, reference[0], strict=True):
            assert_bitwise(after, expected)
        assert not torch.equal(values[-1][0], values[OVERFLOW_STEP][0])


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("clip", [False, True], ids=["", "clip"])
@pytest.mark.parametrize("scaler", SCALERS)
@pytest.mark.parametrize("name", ["adam", "bert", "lamb", "adamp"])
def test_overflow_on_one_rank(name: str, scaler: str, clip: bool, world_size: int) -> None:
    """Any scaler: all ranks skip together, and end where a run without that step ends.

    All scales are powers of two, so that lowering one changes no bit of the training.
    """
    arguments = (name, scaler, torch.float32, clip)
    results = run_threads(world_size, train_scaled, *arguments, True)
    reference = run_threads(world_size, train_scaled, *arguments, False)[0]
    assert_skipped(results, reference)
    for rank, (_, _, scales) in enumerate(results):
        # torch's own scaler lowers the scale of the rank that overflowed only.
        lowered = scaler in ("npu", "sharded") or (scaler == "torch" and rank == world_size - 1)
        assert scales == [64.0, 64.0, *([32.0] * 3 if lowered else [64.0] * 3)]


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("clip", [False, True], ids=["", "clip"])
@pytest.mark.parametrize("scaler", ["npu", "npu-static"])
def test_half_precision_under_the_scaler(scaler: str, clip: bool, world_size: int) -> None:
    """fp16 parameters: unscaled, clipped and stepped as torch_npu's scaler allows; torch's not."""
    arguments = ("adam", scaler, torch.float16, clip)
    results = run_threads(world_size, train_scaled, *arguments, True)
    reference = run_threads(world_size, train_scaled, *arguments, False)[0]
    assert_skipped(results, reference)


def test_overflow_over_gloo() -> None:
    """Two real processes skip together; neither waits for the other."""
    results = run_procs(2, train_scaled, "lamb", "npu", torch.float32, True, True)
    threads = run_threads(2, train_scaled, "lamb", "npu", torch.float32, True, True)
    for (values, _, scales), (expected, _, _) in zip(results, threads, strict=True):
        assert scales[-1] == 32.0
        for value, other in zip(values, expected, strict=True):
            assert max_relative_error(value, other, other) < TOLERANCE


def test_scaled_equals_unscaled() -> None:
    """A step under the scaler, absent gradients among them, is the step without it."""

    def train(scaled: bool) -> list[Tensor]:
        params = [nn.Parameter(torch.linspace(-1, 1, 3000)) for _ in range(2)]
        optimizer = npu.NpuFusedAdamW(params, lr=0.1, sharding=SHARDING)
        scaler = NpuScaler(1024.0)
        for step in range(4):
            loss = params[0].square().sum()
            if step == 0 or (step == 2 and dist.get_rank() == 0):
                loss = loss + params[1].square().sum()
            if scaled:
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
            else:
                loss.backward()
                optimizer.step()
            optimizer.zero_grad()
        return [param.detach().clone() for param in params]

    for ours, plain in zip(run_threads(2, train, True), run_threads(2, train, False), strict=True):
        assert_bitwise(ours, plain)


@pytest.mark.parametrize("scaler", SCALERS)
def test_gradients_replaced_after_unscaling(scaler: str) -> None:
    """The step applies the gradients that p.grad holds then, edited or new."""

    def train() -> list[Tensor]:
        params = [nn.Parameter(torch.zeros(3000)) for _ in range(2)]
        optimizer = npu.NpuFusedSGD(params, 1.0, sharding=SHARDING)
        scale = SCALERS[scaler]()
        scale.scale(params[0].sum() + params[1].sum()).backward()
        scale.unscale_(optimizer)
        params[0].grad = torch.full((3000,), 3.0)
        params[1].grad.mul_(2.0)
        scale.step(optimizer)
        scale.update()
        return [param.detach().clone() for param in params]

    for values in run_threads(2, train):
        assert_bitwise(values, [torch.full((3000,), -3.0), torch.full((3000,), -2.0)])


def test_two_optimizers_under_one_scaler() -> None:
    """Both are unscaled before either steps; one overflow, on one rank, stops both on all."""

    def train() -> tuple[list[Tensor], float]:
        params = [nn.Parameter(torch.ones(3000)) for _ in range(2)]
        optimizers = [npu.NpuFusedSGD([p], 0.25, sharding=SHARDING) for p in params]
        scaler = NpuScaler(64.0)
        bad = math.inf if dist.get_rank() == 1 else 1.0
        scaler.scale(params[0].sum() + params[1].sum() * bad).backward()
        for optimizer in optimizers:
            scaler.unscale_(optimizer)
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        return [param.detach().clone() for param in params], scaler.get_scale()

    for values, scale in run_threads(2, train):
        assert scale == 32.0
        assert_bitwise(values, [torch.ones(3000)] * 2)


@pytest.mark.parametrize("scaler", SCALERS)
def test_rank_without_gradients(scaler: str) -> None:
    """A rank that has no gradient at all takes part in the decision and in the step."""

    def train() -> Tensor:
        param = nn.Parameter(torch.zeros(3000))
        optimizer = npu.NpuFusedSGD([param], 1.0)
        scale = SCALERS[scaler]()
        loss = scale.scale(param.sum())
        if dist.get_rank() == 0:
            loss.backward()
        scale.step(optimizer)
        if scaler != "torch":  # whose update() refuses to go on without gradients
            scale.update()
        return param.detach().clone()

    for value in run_threads(2, train):
        assert torch.equal(value, torch.full((3000,), -0.5))


def test_misuse_of_the_scaler() -> None:
    """A clip of scaled gradients, and a closure, are refused on every rank; nothing is lost."""

    def train() -> Tensor:
        param = nn.Parameter(torch.zeros(3000))
        optimizer: Any = npu.NpuFusedSGD([param], 1.0)
        scaler = NpuScaler(64.0)
        scaler.scale(param.sum()).backward()
        with pytest.raises(RuntimeError, match="Closure"):
            scaler.step(optimizer, lambda: None)
        optimizer.clip_grad_norm_fused_(1.0)
        with pytest.raises(RuntimeError, match=r"scaler\.unscale_\(optimizer\)"):
            scaler.step(optimizer)
        optimizer.clip_grad_norm_fused_(1.0)
        scaler.unscale_(optimizer)
        with pytest.raises(RuntimeError, match="Gradients changed between"):
            scaler.step(optimizer)
        scaler.step(optimizer)
        return param.detach().clone()

    for value in run_threads(2, train):
        assert torch.equal(value, torch.full((3000,), -1.0))


# Under DistributedDataParallel


def train_reduced(scaled: bool) -> list[Tensor]:
    """Train on gradients that are the mean already."""
    params = [nn.Parameter(torch.linspace(-1, 1, 3000).half()), nn.Parameter(torch.ones(3))]
    optimizer: Any = npu.NpuFusedAdam(
        params, lr=0.1, sharding={**SHARDING, "grads_are_reduced": True}
    )
    scaler = NpuScaler(64.0)
    with pytest.raises(RuntimeError, match="grads_are_reduced"):
        optimizer.get_combined_grads()
    assert [t is None for t in optimizer.get_combined_params()] == [False, False]
    for step in range(3):
        loss = sum((p.float() ** 2).sum() for p in params)
        if scaled:
            scaler.scale(loss * (math.inf if step == 1 else 1.0)).backward()
            scaler.step(optimizer)
            scaler.update()
        elif step != 1:
            loss.backward()
            optimizer.step()
        grads = [param.grad for param in params]
        optimizer.zero_grad()
        for param, grad in zip(params, grads, strict=True):
            assert param.grad is grad
            assert grad is None or not grad.any()
    return [param.detach().clone() for param in params]


def test_reduced_gradients() -> None:
    """Under DDP p.grad stays DDP's: zeroed in place, unscaled one by one, never combined."""
    scaled, plain = run_threads(2, train_reduced, True), run_threads(2, train_reduced, False)
    for ours, expected in zip(scaled, plain, strict=True):
        assert_bitwise(ours, expected)


def skip_then_step(scaler_name: str) -> bool:
    """Return whether rank 0 has the whole state after a skipped step and one more."""
    param = nn.Parameter(torch.ones(3000))
    optimizer = npu.NpuFusedAdam([param], lr=0.1, sharding={"consolidate_every": 2})
    scaler = SCALERS[scaler_name]()
    for factor in (math.inf, 1.0):
        scaler.scale(param.sum() * factor).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return dist.get_rank() > 0 or len(optimizer.state_dict()["state"]) == 1


@pytest.mark.parametrize("scaler_name", ["npu", "torch", "sharded"])
def test_skipped_steps_count_for_consolidation(scaler_name: str) -> None:
    """Every so many calls of step(), under any scaler: torch_npu's skipped ones did not count."""
    assert run_threads(2, skip_then_step, scaler_name) == [True, True]
