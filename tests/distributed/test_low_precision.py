"""bf16 and fp16 parameters: fp32 masters and moments, low-precision wires."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import shardfuse
from shardfuse import ShardedAdam, ShardedAdamW, ShardedBertAdam, ShardedLamb, ShardedSGD
from tests.support import contract
from tests.support.harness import run_procs, run_threads
from tests.support.models import rank_grads
from tests.support.oracles import AdamOracle, BertAdamOracle, LambOracle, SGDOracle
from tests.support.placing import on_device
from tests.support.runs import (
    Case,
    assert_bitwise,
    max_relative_error,
    train_oracle,
    train_rank,
    train_unsharded,
)

pytestmark = pytest.mark.timeout(60)

DTYPES = [torch.bfloat16, torch.float16]
# The masters are fp32 and follow the reference as fp32 parameters do.
TOLERANCE = 1e-6
NUM_STEPS = 10


def cases(dtype: torch.dtype) -> dict[str, Case]:
    momentum = {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.1}
    lamb = {"lr": 0.05, "weight_decay": 0.1, "use_global_grad_norm": True}
    return {
        "sgd": Case(ShardedSGD, momentum, SGDOracle, dtype=dtype),
        "adam": Case(ShardedAdam, {"lr": 0.05}, AdamOracle, dtype=dtype),
        "adamw": Case(
            ShardedAdamW,
            {"lr": 0.05, "weight_decay": 0.1, "amsgrad": True},
            AdamOracle,
            {"decoupled": True},
            dtype=dtype,
        ),
        "bert": Case(ShardedBertAdam, {"lr": 0.05}, BertAdamOracle, dtype=dtype),
        "lamb": Case(ShardedLamb, lamb, LambOracle, named=True, dtype=dtype),
    }


NAMES = list(cases(torch.bfloat16))
ELEMENTWISE = ["sgd", "adam", "adamw"]


def train_masters(
    case: Case, kind: Any, num_steps: int, sharding: dict[str, Any]
) -> tuple[list[Tensor], dict[str, Any]]:
    """Return the parameters and the consolidated state dict of this rank."""
    params = case.param_set()
    optimizer = case.build(params, {"kernel": "eager", "bucket_cap_mb": 0.02, **sharding})
    for step in range(num_steps):
        world_size, rank = dist.get_world_size(), dist.get_rank()
        params.assign(rank_grads(kind, world_size, rank, step, case.entries))
        optimizer.step()
    optimizer.consolidate_state_dict(to=None)
    return params.values(), optimizer.state_dict()


def masters_of(case: Case, values: list[Tensor], state_dict: dict[str, Any]) -> list[Tensor]:
    """Return the fp32 masters in entry order; the parameter itself where it has no state."""
    order = [p for group in state_dict["param_groups"] for p in group["params"]]
    grouped = sorted(range(len(case.entries)), key=lambda i: case.entries[i].group)
    masters = [value.float() for value in values]
    for key, index in zip(order, grouped, strict=True):
        entry = state_dict["state"].get(key)
        if entry is not None:
            assert entry["param"].dtype == torch.float32
            masters[index] = entry["param"]
    return masters


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NAMES)
def test_masters_follow_the_oracle(name: str, dtype: torch.dtype) -> None:
    """The fp32 masters stay within fp32 rounding of the reference; parameters are their casts."""
    case = cases(dtype)[name]
    results = run_threads(3, train_masters, case, "integers", NUM_STEPS, {})
    expected = train_oracle(case, "integers", NUM_STEPS, 3)
    start = case.param_set().values()
    for values, state_dict in results:
        masters = masters_of(case, values, state_dict)
        assert max_relative_error(masters, expected, start) < TOLERANCE
        assert_bitwise(values, [master.to(dtype) for master in masters])
        moments = [
            t for e in state_dict["state"].values() for t in e.values() if isinstance(t, Tensor)
        ]
        assert moments
        assert all(t.dtype == torch.float32 for t in moments)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_sharded_is_unsharded(name: str, world_size: int, dtype: torch.dtype) -> None:
    """Elementwise rules on half-precision parameters do not depend on the number of ranks."""
    case = cases(dtype)[name]
    ranks = run_threads(world_size, train_rank, case, "integers", 5, {"bucket_cap_mb": 0.02})
    expected = train_unsharded(case, "integers", 5, world_size)
    for values in ranks:
        assert_bitwise(values, expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_fp32_wire_keeps_the_digits(dtype: torch.dtype) -> None:
    """With grad_sync_dtype=float32 half-precision gradients are averaged as their fp32 values."""
    case = cases(dtype)["adam"]
    sharding = {"grad_sync_dtype": torch.float32}
    results = run_threads(3, train_masters, case, "floats", NUM_STEPS, sharding)
    expected = train_oracle(case, "floats", NUM_STEPS, 3)
    start = case.param_set().values()
    for values, state_dict in results:
        masters = masters_of(case, values, state_dict)
        assert max_relative_error(masters, expected, start) < TOLERANCE


@pytest.mark.parametrize("wire", DTYPES)
def test_low_wire_is_exact_where_it_can_be(wire: torch.dtype) -> None:
    """fp32 gradients that the wire's dtype holds exactly arrive as over an fp32 wire."""
    case = Case(ShardedAdam, {"lr": 0.05})
    ranks = run_threads(4, train_rank, case, "integers", 4, {"grad_sync_dtype": wire})
    expected = train_unsharded(case, "integers", 4, 4)
    for values in ranks:
        assert_bitwise(values, expected)


def train_on_a_sum_of_nine_bits(collectives: str, sharding: dict[str, Any]) -> Tensor:
    weight = torch.nn.Parameter(torch.zeros(3000))
    options = {"grad_sync_dtype": torch.bfloat16, "kernel": "eager", "collectives": collectives}
    optimizer = ShardedSGD([weight], 1.0, sharding={**options, **sharding})
    weight.backward(torch.full((3000,), 256.0 if dist.get_rank() else 1.0))
    optimizer.step()
    return weight.detach().clone()


@pytest.mark.parametrize("collectives", ["auto", "pairwise", "native"])
@pytest.mark.parametrize(
    "sharding", [{}, {"clip_grad_norm": 1e9}, {"stage": 2}], ids=["sent", "kept", "stage 2"]
)
def test_a_low_wire_is_summed_in_fp32(collectives: str, sharding: dict[str, Any]) -> None:
    """Only what travels is rounded, whatever a backend would do; not the sum, nor what is kept."""
    for value in run_procs(2, train_on_a_sum_of_nine_bits, collectives, sharding):
        assert torch.equal(value, torch.full((3000,), -257.0 / 2))


def sum_of_ranks(alike: bool, sharding: dict[str, Any]) -> float:
    """Return the error of a sum of bf16 gradients: its rms over that of the sum in fp64."""
    grads = grads_of_ranks(dist.get_world_size(), alike)
    weight = torch.nn.Parameter(torch.zeros(len(grads[0]), dtype=torch.bfloat16))
    optimizer = ShardedSGD([weight], lr=1.0, sharding={"kernel": "eager", **sharding})
    weight.grad = grads[dist.get_rank()]
    optimizer.step()
    optimizer.consolidate_state_dict(to=None)
    master = optimizer.state_dict()["state"][0]["param"].to(grads[0].device)
    return relative_rms(-master.double() * len(grads), grads)


def grads_of_ranks(world_size: int, alike: bool, numel: int = 4096) -> list[Tensor]:
    """Return standard-normal gradients in bf16; or, ``alike``, of mean 1 and deviation 0.1."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(world_size, numel, generator=generator)
    return list((1 + 0.1 * noise if alike else noise).bfloat16())


def relative_rms(total: Tensor, grads: list[Tensor]) -> float:
    exact = torch.stack(grads).double().sum(0)
    return float((total.double() - exact).norm() / exact.norm())


SUMS: list[dict[str, Any]] = [
    {"collectives": "auto"},
    {"collectives": "pairwise"},
    {"collectives": "pairwise", "stage": 2},
    {"collectives": "native", "grad_sync_dtype": torch.bfloat16},
    {"collectives": "native", "grad_sync_dtype": torch.bfloat16, "stage": 2},
    {"collectives": "native", "grad_sync_dtype": torch.float32},
    {"collectives": "native"},
]


def errors_of_sums() -> list[list[float]]:
    return [[sum_of_ranks(alike, sharding) for alike in (False, True)] for sharding in SUMS]


@pytest.mark.parametrize("world_size", [3, 4])
def test_sums_of_bf16_gradients(world_size: int) -> None:
    """In fp32, unless it is the backend's own sum: that is in bf16, as the page says."""
    for of_rank in run_procs(world_size, errors_of_sums):
        for sharding, found in zip(SUMS, of_rank, strict=True):
            is_gloo = contract.ready() == "gloo" and not on_device()
            is_pairwise = is_gloo and sharding["collectives"] != "native"
            if is_pairwise or "grad_sync_dtype" in sharding:
                assert max(found) < 1e-6, sharding
            else:
                assert 1e-3 < min(found) <= max(found) < 4e-3, sharding


def sum_as_a_ring(grads: list[Tensor]) -> Tensor:
    """Return the sum in the dtype of the gradients, rank by rank."""
    total = grads[0]
    for grad in grads[1:]:
        total = total + grad
    return total


def test_the_table_of_sums() -> None:
    """The figures of the page."""
    page = (Path(shardfuse.__file__).parent / "optim" / "README.md").read_text()
    for world_size in (8, 64, 1024):
        drawn = [grads_of_ranks(world_size, alike) for alike in (False, True)]
        own, alike = (100 * relative_rms(sum_as_a_ring(grads), grads) for grads in drawn)
        fp32 = (relative_rms(sum_as_a_ring([g.float() for g in grads]), grads) for grads in drawn)
        assert max(fp32) < 1e-6
        assert f"| {world_size:,} | {own:.1f} % | {alike:.1f} % |" in page


def test_fp16_sum_does_not_overflow() -> None:
    """fp16 gradients whose sum over ranks exceeds 65504 still have a finite mean."""

    def train() -> Tensor:
        params = [torch.nn.Parameter(torch.zeros(3000, dtype=torch.float16))]
        optimizer = ShardedSGD(params, 2.0**-10)
        params[0].grad = torch.full((3000,), 40_000.0, dtype=torch.float16)
        optimizer.step()
        return params[0].detach().clone()

    for value in run_threads(4, train):
        assert torch.equal(value, torch.full((3000,), -40_000.0 / 1024).half())


def test_small_updates_accumulate() -> None:
    """Updates below half a bf16 ulp of the parameter add up in the master instead of vanishing."""

    def train() -> Tensor:
        params = [torch.nn.Parameter(torch.ones(3000, dtype=torch.bfloat16))]
        optimizer = ShardedSGD(params, 2.0**-12)
        for _ in range(64):
            params[0].grad = torch.ones_like(params[0])
            optimizer.step()
        return params[0].detach().clone()

    for value in run_threads(2, train):
        assert torch.equal(value, torch.full((3000,), 1 - 64 * 2.0**-12).bfloat16())


def test_mixed_dtypes_in_one_group() -> None:
    """fp32, bf16 and fp16 parameters train side by side, each as it would alone."""
    dtypes = [torch.float32, torch.bfloat16, torch.float16, torch.float32]

    def train(members: list[int]) -> dict[int, Tensor]:
        params = {i: torch.nn.Parameter(torch.ones(1500 + i, dtype=dtypes[i])) for i in members}
        optimizer = ShardedAdam(params.values(), lr=0.1)
        for step in range(3):
            for i, param in params.items():
                param.grad = torch.full_like(param, float(i + step + dist.get_rank()))
            optimizer.step()
        return {i: param.detach().clone() for i, param in params.items()}

    together = run_threads(2, train, [0, 1, 2, 3])
    for i in range(4):
        alone = run_threads(2, train, [i])
        for rank in range(2):
            assert together[rank][i].dtype == dtypes[i]
            assert torch.equal(together[rank][i], alone[rank][i])
