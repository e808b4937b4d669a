"""shardfuse.optim.npu on several ranks: zeroed gradients, combined tensors, clipping."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardfuse.optim import npu
from tests.support.counting import counted
from tests.support.harness import run_threads
from tests.support.models import MIXED, rank_grads
from tests.support.oracles import AdamOracle, BertAdamOracle, LambOracle, SGDOracle
from tests.support.oracles_family import AdadeltaOracle, AdamPOracle, RMSpropOracle, RMSpropTFOracle
from tests.support.runs import (
    NUM_STEPS,
    TOLERANCE,
    Case,
    assert_bitwise,
    max_relative_error,
    train_oracle,
    train_unsharded,
)

pytestmark = pytest.mark.timeout(60)

SHARDING = {"kernel": "eager", "bucket_cap_mb": 0.04}

CASES: dict[str, Case] = {
    "sgd": Case(npu.NpuFusedSGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}, SGDOracle),
    "adam": Case(npu.NpuFusedAdam, {"lr": 0.1, "weight_decay": 0.1}, AdamOracle),
    "adamw": Case(
        npu.NpuFusedAdamW, {"lr": 0.1, "weight_decay": 0.1}, AdamOracle, {"decoupled": True}
    ),
    "bert": Case(npu.NpuFusedBertAdam, {"lr": 0.1, "warmup": 0.3, "t_total": 10}, BertAdamOracle),
    "lamb": Case(
        npu.NpuFusedLamb,
        {"lr": 0.05, "weight_decay": 0.1, "use_global_grad_norm": True},
        LambOracle,
    ),
    "rmsprop": Case(npu.NpuFusedRMSprop, {"lr": 0.05, "momentum": 0.9}, RMSpropOracle),
    "rmsproptf": Case(npu.NpuFusedRMSpropTF, {"lr": 0.1, "momentum": 0.9}, RMSpropTFOracle),
    "adadelta": Case(npu.NpuFusedAdadelta, {"lr": 20.0}, AdadeltaOracle),
    "adamp": Case(npu.NpuFusedAdamP, {"lr": 0.05, "weight_decay": 0.1}, AdamPOracle),
}
ELEMENTWISE = ["sgd", "adam", "adamw", "rmsprop", "rmsproptf", "adadelta"]


def train_by_backward(case: Case, kind: Any, num_steps: int) -> list[Tensor]:
    """Train as a user of torch_npu does: backward, step, zero_grad() that keeps the tensors.

    Parameters of the roles "some" and "late" are then unused in some steps, on some ranks or all.
    """
    params = case.param_set()
    optimizer = case.build(params, SHARDING)
    for step in range(num_steps):
        optimizer.zero_grad()
        grads = rank_grads(kind, dist.get_world_size(), dist.get_rank(), step, case.entries)
        pairs = [(p, g) for p, g in zip(params.params, grads, strict=True) if g is not None]
        sum((p * g.to(p.dtype)).sum() for p, g in pairs).backward()
        optimizer.step()
    return params.values()


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("name", CASES)
def test_unused_parameters_are_absent(name: str, world_size: int) -> None:
    """After zero_grad(), which keeps the tensors, what no rank used is left alone, as with None."""
    case = CASES[name]
    ranks = run_threads(world_size, train_by_backward, case, "floats", NUM_STEPS)
    expected = train_oracle(case, "floats", NUM_STEPS, world_size)
    assert max_relative_error(ranks[0], expected, case.param_set().values()) < TOLERANCE
    for values in ranks[1:]:
        assert_bitwise(values, ranks[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_backward_is_unsharded(name: str, dtype: torch.dtype) -> None:
    """So trained on integers, ranks end bitwise where gradients of None, unsharded, end."""
    case = Case(CASES[name].optimizer, CASES[name].options, dtype=dtype)
    expected = train_unsharded(case, "integers", 5, 3)
    for values in run_threads(3, train_by_backward, case, "integers", 5):
        assert_bitwise(values, expected)


def edit_combined() -> list[Tensor]:
    """Halve the parameters and double the gradients through the combined tensors."""
    case = CASES["sgd"]
    params = case.param_set()
    optimizer = case.build(params, SHARDING)
    for tensor in optimizer.get_combined_params():
        if tensor is not None:
            tensor.mul_(0.5)
    params.assign(rank_grads("integers", dist.get_world_size(), dist.get_rank(), 2, case.entries))
    grads = optimizer.get_combined_grads()[0]
    grads.mul_(2.0)
    optimizer.step()
    return params.values()


def test_combined_edits_are_trained_on() -> None:
    """What is edited in the combined tensors on every rank is what the step starts from."""
    case = CASES["sgd"]
    oracle_params = [value * 0.5 for value in case.param_set().values()]
    ranks = run_threads(3, edit_combined)
    for index, entry in enumerate(MIXED):
        grads = [rank_grads("integers", 3, rank, 2)[index] for rank in range(3)]
        present = [grad for grad in grads if grad is not None]
        value = oracle_params[index]
        if present:
            lr, decay = (0.1, 0.1) if entry.group == 0 else (0.02, 0.2)
            value = value - lr * (2 * torch.stack(present).sum(0) / 3 + decay * value)
        for values in ranks:
            torch.testing.assert_close(values[index], value, rtol=1e-6, atol=1e-6)


def clip_mean(norm_type: float) -> tuple[float, list[Tensor], list[Tensor]]:
    """Clip gradients that differ between ranks, in two groups and three dtypes."""
    rank = dist.get_rank()
    dtypes = [torch.float32, torch.float16, torch.bfloat16, torch.float32]
    params = [nn.Parameter(torch.zeros(1500 + i, dtype=d)) for i, d in enumerate(dtypes)]
    optimizer = npu.NpuFusedSGD(
        [{"params": params[:2]}, {"params": params[2:]}], 1.0, sharding=SHARDING
    )
    for index, param in enumerate(params):
        if rank != index:
            param.grad = torch.full_like(param, float(2 ** (index - 1) * (rank - 1)))
    norm = optimizer.clip_grad_norm_fused_(1.0, norm_type)
    grads = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in params]
    optimizer.step()
    return float(norm), grads, [param.detach().clone() for param in params]


@pytest.mark.parametrize("norm_type", [2.0, 1.0, 3.0, math.inf])
@pytest.mark.parametrize("world_size", [2, 3])
def test_clip_is_that_of_the_mean(world_size: int, norm_type: float) -> None:
    """The norm is that of the mean over ranks, alike on all; the step is its clipped mean."""
    ranks = run_threads(world_size, clip_mean, norm_type)
    columns = zip(*(grads for _, grads, _ in ranks), strict=True)
    means = [torch.stack(column).double().mean(0) for column in columns]
    expected = float(torch.linalg.vector_norm(torch.cat(means), norm_type))
    for norm, _, values in ranks:
        assert norm == ranks[0][0]
        assert norm == pytest.approx(expected, rel=1e-6)
        for value, mean in zip(values, means, strict=True):
            rounding = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
            clipped = -mean * min(1.0, 1.0 / (expected + 1e-6))
            torch.testing.assert_close(
                value.double(), clipped, rtol=rounding[value.dtype], atol=1e-9
            )


@pytest.mark.parametrize("norm_type", [2.0, 3.0, math.inf])
def test_collectives_of_a_clipped_step(norm_type: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clip adds one small all-reduce; step() does not reduce the gradients again."""

    def step() -> tuple[Counter[str], int, int]:
        case = CASES["adam"]
        params = case.param_set()
        optimizer = case.build(params, {**SHARDING, "process_group": counted()})
        params.assign(rank_grads("floats", 2, dist.get_rank(), 0))
        optimizer.communicator.calls.clear()
        optimizer.clip_grad_norm_fused_(0.5, norm_type)
        optimizer.step()
        calls = optimizer.communicator.calls
        num_buckets = sum(len(flat.buckets) for flat in optimizer.layout.flats if not flat.frozen)
        largest = max(call.numel for call in calls if call.op == "all_reduce")
        return Counter(call.op for call in calls), num_buckets, largest

    for counts, num_buckets, largest in run_threads(2, step):
        assert counts == {"reduce_scatter": num_buckets, "all_gather": num_buckets, "all_reduce": 1}
        assert largest <= 4


@pytest.mark.parametrize("norm_type", [2.0, 1.0, math.inf])
def test_nan_norm_is_that_of_all_ranks(norm_type: float) -> None:
    """A NaN in one rank's gradient makes the norm NaN on all, and nothing is clipped."""

    def clip() -> tuple[bool, Tensor]:
        param = nn.Parameter(torch.zeros(5000))
        optimizer = npu.NpuFusedSGD([param], 1.0, sharding=SHARDING)
        param.grad = torch.full((5000,), 4.0)
        if dist.get_rank() == 1:
            param.grad[3333] = math.nan
        norm = optimizer.clip_grad_norm_fused_(1e-3, norm_type)
        optimizer.step()
        return bool(norm.isnan()), param.detach().clone()

    expected = torch.full((5000,), -4.0)
    expected[3333] = math.nan
    for is_nan, value in run_threads(3, clip):
        assert is_nan
        torch.testing.assert_close(value, expected, equal_nan=True, rtol=1e-6, atol=0.0)
