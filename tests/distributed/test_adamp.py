"""AdamP: projections over channels and layers that are cut across ranks anywhere."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardfuse.engine.step import _add_rows
from shardfuse.engine.units import ParamRows
from shardfuse.layout import ParamSpec
from shardfuse.optim.npu import NpuFusedAdamP
from tests.support.counting import counted
from tests.support.harness import run_threads
from tests.support.models import MIXED, Entry, flat_buffers, rank_grads
from tests.support.oracles_family import AdamPOracle
from tests.support.runs import (
    NUM_STEPS,
    TOLERANCE,
    Case,
    assert_bitwise,
    check_follows_oracle,
    check_is_unsharded,
    max_relative_error,
    train_oracle,
    train_rank,
)

pytestmark = pytest.mark.timeout(60)

SHARDING = {"kernel": "eager", "bucket_cap_mb": 0.02}

# Rows of 1, 2, 40, 70, 3000 elements, two rows, one row, rows of rows.
ENTRIES = (
    *MIXED,
    Entry("tall.weight", (3000, 1)),
    Entry("conv.weight", (6, 3, 5, 5)),
    Entry("wide.weight", (2, 3000), group=1),
    Entry("one.weight", (1, 2500), group=1),
    Entry("pairs.weight", (1111, 2), group=1),
)

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "always": {"delta": 1e9, "weight_decay": 0.1},
    "never": {"delta": 0.0, "weight_decay": 0.1},
    # About half of the tensors are projected, by rows, as a whole, or not.
    "some": {"delta": 2.5, "weight_decay": 0.1, "wd_ratio": 0.5},
    "nesterov": {"nesterov": True, "delta": 2.5, "weight_decay": 0.1},
    "eps": {"eps": 1e-2, "delta": 2.5, "betas": (0.8, 0.95)},
}
CASES = {
    key: Case(NpuFusedAdamP, {"lr": 0.05, **options}, AdamPOracle, entries=ENTRIES)
    for key, options in OPTIONS.items()
}
CASES["groups"] = replace(
    CASES["some"], overrides=({"nesterov": True}, {"delta": 1e9, "lr": 0.02, "wd_ratio": 0.0})
)


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("name", CASES)
def test_follows_the_oracle(name: str, world_size: int) -> None:
    """25 sharded steps stay within rounding of the float64 per-tensor reference."""
    check_follows_oracle(CASES[name], world_size, bucket_cap_mb=0.02)


@pytest.mark.parametrize("bucket_cap_mb", [0.01, 0.04, 25])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_sharded_is_unsharded(world_size: int, bucket_cap_mb: float) -> None:
    """On integer gradients sharding moves AdamP by no more than another order of summation."""
    check_is_unsharded(CASES["nesterov"], world_size, bucket_cap_mb, bitwise=False)


@pytest.mark.cpu_only("of the oracle alone, which takes a minute there")
def test_all_branches_are_taken() -> None:
    """The cases meet projections over rows, over tensors, and none; none is a close call."""
    taken: Counter[str] = Counter()

    class Recording(AdamPOracle):
        def is_small(self, cosine: Tensor, bound: float) -> bool:
            if 0 < bound < 1e6:
                assert abs(float(cosine) / bound - 1) > 1e-5
            return super().is_small(cosine, bound)

        def projected(self, group: Any, param: Any, grad: Any, direction: Any) -> Any:
            result = super().projected(group, param, grad, direction)
            if param.value.ndim > 1 and param.value.numel():
                row = (result[0] * param.value).flatten(1).sum(1).abs().max()
                whole = abs(float((result[0] * param.value).sum()))
                by_tensor = "tensor" if whole < 1e-6 else "none"
                taken["rows" if float(row) < 1e-6 else by_tensor] += 1
            return result

    for name in ("plain", "some", "nesterov", "eps", "groups"):
        for world_size in (1, 2, 3):
            train_oracle(replace(CASES[name], oracle=Recording), "floats", NUM_STEPS, world_size)
    assert min(taken[kind] for kind in ("rows", "tensor", "none")) >= 5, taken


@pytest.mark.parametrize("seed", range(40))
def test_row_sums(seed: int) -> None:
    """Rows add up exactly for every cut, and for every order of dimensions in storage."""
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=generator))

    shape = tuple(draw(1, 9) for _ in range(draw(2, 5)))
    order = torch.randperm(len(shape), generator=generator).tolist()
    values = torch.randint(-8, 9, shape, generator=generator).float()
    inverse = [order.index(d) for d in range(len(shape))]
    param = values.permute(order).contiguous().permute(inverse)
    assert torch.equal(param, values)
    spec = ParamSpec("p", shape, param.stride(), "float32", "cpu", 0)
    storage = param.as_strided((spec.numel,), (1,))
    cuts = sorted({0, spec.numel, *(draw(0, spec.numel + 1) for _ in range(draw(0, 5)))})
    sums = torch.zeros(2, shape[0])
    for start, stop in itertools.pairwise(cuts):
        part = torch.stack([storage[start:stop], 2 * storage[start:stop]])
        _add_rows(sums, part, start, ParamRows.whole(spec).stride)
    expected = values.reshape(shape[0], -1).sum(1)
    assert torch.equal(sums, torch.stack([expected, 2 * expected]))


def train_strided(order: tuple[int, ...]) -> list[Tensor]:
    """Return a tensor stored in another order after three steps."""
    generator = torch.Generator().manual_seed(1)
    shape = (30, 7, 5, 11)
    inverse = [order.index(d) for d in range(len(shape))]
    value = torch.randn(shape, generator=generator).permute(order).contiguous().permute(inverse)
    param = nn.Parameter(value)
    optimizer = NpuFusedAdamP([param], 0.05, delta=1e9, sharding=SHARDING)
    for _ in range(3):
        param.grad = torch.randn(shape, generator=generator)
        optimizer.step()
    return [param.detach().clone().contiguous()]


@pytest.mark.parametrize("order", [(0, 2, 3, 1), (1, 0, 2, 3), (3, 2, 1, 0)])
def test_storage_order(order: tuple[int, ...]) -> None:
    """Rows are those of the tensor, however it lies in memory (channels_last, transposed)."""
    expected = run_threads(1, train_strided, (0, 1, 2, 3))[0]
    for values in run_threads(2, train_strided, order):
        assert max_relative_error(values, expected, expected) < TOLERANCE


@pytest.mark.parametrize("name", ["always", "nesterov"])
def test_unused_and_frozen_stay(name: str) -> None:
    """A parameter with no gradient on any rank keeps its bits though weight decay is on."""
    case = CASES[name]
    before = case.param_set().values()
    after = run_threads(3, train_rank, case, "floats", 3)[1]
    for entry, old, new in zip(case.entries, before, after, strict=True):
        untouched = entry.role in ("unused", "frozen") or old.numel() == 0
        assert torch.equal(old, new) == untouched, entry.name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision(dtype: torch.dtype) -> None:
    """Parameters of 16 bits are the rounded masters of the fp32 run on their gradients."""
    case = replace(CASES["nesterov"], dtype=dtype)
    ranks = run_threads(2, train_rank, case, "integers", 4, SHARDING)
    expected = train_oracle(case, "integers", 4, 2)
    start = case.param_set().values()
    for values in ranks:
        assert max_relative_error(values, expected, start) < 2.0**-8


def test_vanishing_eps() -> None:
    """With an eps of 0 zero rows, zero gradients and padding stay, and nothing becomes NaN."""
    param = nn.Parameter(torch.ones(50, 30))
    with torch.no_grad():
        param[:10] = 0.0
    before = param.detach().clone()
    optimizer = NpuFusedAdamP([param], 0.1, eps=0.0, delta=1e9, nesterov=True)
    for _ in range(3):
        param.grad = torch.zeros(50, 30)
        param.grad[20:, :7] = 1.0
        optimizer.step()
    assert torch.isfinite(param).all()
    assert torch.equal(param.detach()[:20], before[:20])
    assert not torch.equal(param.detach()[20:], before[20:])
    (buffer,) = flat_buffers(optimizer)
    assert not buffer[1500:].any()


def half(case: Case, steps: range, saved: Any) -> Any:
    """Train on integers that do not depend on the world size; return values and state."""
    params = case.param_set()
    optimizer = case.build(params, SHARDING)
    if saved is not None:
        with torch.no_grad():
            for param, value in zip(params.params, saved[0], strict=True):
                param.copy_(value)
        optimizer.load_state_dict(saved[1])
    for step in steps:
        grads = rank_grads("integers", 1, 0, step, case.entries)
        scale = float(dist.get_world_size()) if dist.get_rank() == 0 else 0.0
        params.assign([None if g is None else g * scale for g in grads])
        optimizer.step()
    optimizer.consolidate_state_dict(to=None)
    return params.values(), optimizer.state_dict()


def test_resume() -> None:
    """A state saved at three ranks goes on bitwise at three, with torch_npu's keys."""
    case = CASES["nesterov"]
    expected, _ = run_threads(3, half, case, range(5), None)[0]
    saved = run_threads(3, half, case, range(2), None)[0]
    for entry in saved[1]["state"].values():
        assert list(entry) == ["step", "exp_avg", "exp_avg_sq"]
    for values, _ in run_threads(3, half, case, range(2, 5), saved):
        assert_bitwise(values, expected)


def calls_of_step(case: Case) -> tuple[list[Any], int]:
    params = case.param_set()
    optimizer = case.build(params, {**SHARDING, "process_group": counted()})
    grads = rank_grads("floats", dist.get_world_size(), dist.get_rank(), 0, case.entries)
    params.assign(grads)
    optimizer.communicator.calls.clear()
    optimizer.step()
    num_buckets = sum(len(flat.buckets) for flat in optimizer.layout.flats if not flat.frozen)
    return list(optimizer.communicator.calls), num_buckets


@pytest.mark.parametrize("name", ["plain", "nesterov"])
def test_collectives_per_step(name: str) -> None:
    """B reduce-scatters, B all-gathers, and one all-reduce of four floats per row."""
    trained = [e for e in ENTRIES if len(e.shape) > 1 and e.role != "frozen" and math.prod(e.shape)]
    for calls, num_buckets in run_threads(3, calls_of_step, CASES[name]):
        counts = Counter(call.op for call in calls)
        expected = {"reduce_scatter": num_buckets, "all_gather": num_buckets, "all_reduce": 1}
        assert counts == expected
        sums = next(call for call in calls if call.op == "all_reduce")
        assert sums.numel == 4 * sum(entry.shape[0] for entry in trained)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"delta": -0.1}, "Invalid delta value: -0.1"),
        ({"delta": math.nan}, "Invalid delta value: nan"),
        ({"wd_ratio": math.nan}, "Invalid wd_ratio value: nan"),
        ({"betas": (0.9, 1.0)}, "Invalid beta parameter at index 1: 1.0"),
        ({"lr": math.nan}, "Invalid learning rate: nan"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    """What upstream lets pass is refused, here and in a group dict."""
    params = [nn.Parameter(torch.ones(3, 3))]
    with pytest.raises(ValueError, match=message):
        NpuFusedAdamP(params, **options)
    with pytest.raises(ValueError, match=message):
        NpuFusedAdamP([{"params": params, **options}])
