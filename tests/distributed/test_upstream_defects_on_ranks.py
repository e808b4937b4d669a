"""Defects of torch_npu's optimizers that are not to be carried over, on several ranks.

The same defects on one rank: tests/unit/test_upstream_defects.py and test_upstream_crashes.py.
"""

from __future__ import annotations

import copy
import gc
import math
import pickle
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardfuse.optim import npu
from tests.support.harness import run_threads
from tests.support.models import flat_buffers, lie_in
from tests.support.oracles import BertAdamOracle, LambOracle
from tests.support.runs import TOLERANCE, assert_bitwise, max_relative_error
from tests.support.upstream import build, every_optimizer, fresh_params, noise, reference

pytestmark = pytest.mark.timeout(60)

every_world = pytest.mark.parametrize("world_size", [2, 3])
# The first tensor is cut over ranks, and over buckets.
SHAPES: tuple[tuple[int, ...], ...] = ((5000,), (6, 7), (3,))
SHARDING = {"bucket_cap_mb": 0.01}
Absent = Callable[[int, int, int], bool]


def rank_grad(shape: tuple[int, ...], seed: int, rank: int) -> Tensor:
    """Return one rank's gradient; the ranks' have equal signs, so that sums keep their digits."""
    return noise(shape, seed).sign() * noise(shape, 1000 * (rank + 1) + seed).abs()


def rank_grads(step: int, rank: int, absent: Absent) -> list[Tensor | None]:
    """Return one rank's gradients, None where absent(step, rank, index)."""
    return [
        None if absent(step, rank, i) else rank_grad(s, 100 * step + i, rank)
        for i, s in enumerate(SHAPES)
    ]


def backward(params: list[nn.Parameter], grads: list[Tensor | None]) -> None:
    pairs = zip(params, grads, strict=True)
    torch.autograd.backward([(p * g.to(p.dtype)).sum() for p, g in pairs if g is not None])


def values_of(params: list[nn.Parameter]) -> list[Tensor]:
    return [p.detach().clone() for p in params]


def expected_of(name: str, world_size: int, num_steps: int, absent: Absent) -> list[Tensor]:
    """Return the reference's values after steps on the mean; None counts as zero where not all."""
    oracle = reference(name, fresh_params(SHAPES))
    for step in range(num_steps):
        columns = zip(*(rank_grads(step, rank, absent) for rank in range(world_size)), strict=True)
        present = [[g.double() for g in column if g is not None] for column in columns]
        oracle.step([[sum(grads) / world_size if grads else None for grads in present]])
    return oracle.values()


def everywhere(step: int, rank: int, index: int) -> bool:
    return False


def check(ranks: list[list[Tensor]], expected: list[Tensor]) -> None:
    """Fail unless all ranks have equal values, and the expected ones within rounding."""
    start = values_of(fresh_params(SHAPES))
    assert max_relative_error(ranks[0], expected, start) < TOLERANCE
    for values in ranks[1:]:
        assert_bitwise(values, ranks[0])


# Schedules and clips


@pytest.mark.parametrize("schedule", ["warmup_cosine", "warmup_poly"])
def test_5_c_cosine_and_poly_schedules(schedule: str) -> None:
    """(1 + cos(pi x)) / 2 and sqrt(1 - x), the latter 0 past t_total."""

    def train() -> list[float]:
        param = nn.Parameter(torch.zeros(3000))
        options = {"warmup": 0.4, "t_total": 5, "schedule": schedule}
        optimizer = npu.NpuFusedBertAdam([param], 1.0, b1=0.0, b2=0.0, e=0.0, **options)
        optimizer.param_groups[0]["weight_decay"] = 0.0
        values = [0.0]
        for _ in range(7):
            param.grad = torch.ones(3000)
            optimizer.step()
            values.append(-float(param.detach()[2999]))
        return [after - before for before, after in pairwise(values)]

    after = {
        "warmup_cosine": [0.5 * (1 + math.cos(math.pi * x / 5)) for x in range(2, 7)],
        "warmup_poly": [math.sqrt(max(0.0, 1 - x / 5)) for x in range(2, 7)],
    }[schedule]
    for factors in run_threads(2, train):
        assert factors == pytest.approx([0.0, 0.5, *after], abs=1e-6)


@every_world
def test_5_c_per_group_max_grad_norm(world_size: int) -> None:
    """Each group's mean gradient is clipped to the group's own bound."""
    bounds = (0.5, -1.0, 2.0)
    options = {"lr": 1.0, "e": 1.0, "max_grad_norm": 4.0}

    def grouped(params: list[nn.Parameter]) -> list[dict[str, Any]]:
        pairs = zip(params, bounds, strict=True)
        return [{"params": [p], "max_grad_norm": bound} for p, bound in pairs]

    def train() -> list[Tensor]:
        params = fresh_params(SHAPES)
        optimizer = npu.NpuFusedBertAdam(grouped(params), **options, sharding=SHARDING)
        for step in range(3):
            optimizer.zero_grad()
            backward(params, rank_grads(step, dist.get_rank(), everywhere))
            optimizer.step()
        return values_of(params)

    oracle = BertAdamOracle(grouped(fresh_params(SHAPES)), **options)
    for step in range(3):
        ranks = [rank_grads(step, rank, everywhere) for rank in range(world_size)]
        means = [torch.stack(column).double().mean(0) for column in zip(*ranks, strict=True)]
        oracle.step([[mean] for mean in means])
    check(run_threads(world_size, train), oracle.values())


# Gradients


def takes_turns(step: int, rank: int, index: int) -> bool:
    """The first is late, the second is some ranks' only, the third is unused in odd steps."""
    return (step < 2, (step + rank) % 2 == 0, step % 2 == 1)[index]


@every_world
@pytest.mark.parametrize("clear", ["zero_grad", "set_to_none", "model.zero_grad"])
@every_optimizer
def test_5_c_late_none_and_unused_gradients(name: str, clear: str, world_size: int) -> None:
    """Absent on all ranks, a parameter is left alone; on some, the others' mean moves it."""

    def train() -> list[Tensor]:
        params = fresh_params(SHAPES)
        model = nn.ParameterList(params)
        optimizer = build(name, params, sharding=SHARDING)
        for step in range(5):
            if clear == "model.zero_grad":
                model.zero_grad()
            else:
                optimizer.zero_grad(set_to_none=clear == "set_to_none")
            backward(params, rank_grads(step, dist.get_rank(), takes_turns))
            optimizer.step()
        return values_of(params)

    expected = expected_of(name, world_size, 5, takes_turns)
    check(run_threads(world_size, train), expected)


@every_optimizer
def test_5_c_gradients_that_share_their_storage(name: str) -> None:
    """Through torch.cat autograd hands out views of one tensor; through expand, of one element."""

    def train() -> list[Tensor]:
        params = [nn.Parameter(noise((2000,), i)) for i in range(2)]
        scaled = nn.Parameter(noise((2000,), 2))
        optimizer = build(name, [*params, scaled], sharding=SHARDING)
        for step in range(3):
            optimizer.zero_grad()
            joined = torch.cat(params)
            (joined * rank_grad((4000,), step, dist.get_rank())).sum().backward()
            scaled.sum().backward()
            optimizer.step()
        return values_of([*params, scaled])

    start = [noise((2000,), i) for i in range(3)]
    oracle = reference(name, start)
    for step in range(3):
        mean = torch.stack([rank_grad((4000,), step, rank).double() for rank in range(2)]).mean(0)
        oracle.step([[mean[:2000], mean[2000:], torch.ones(2000)]])
    for values in run_threads(2, train):
        assert max_relative_error(values, oracle.values(), start) < TOLERANCE


@every_optimizer
def test_5_c_closures(name: str) -> None:
    """backward() in a closure is differentiable, and its gradients are averaged."""

    def train() -> list[Tensor]:
        params = fresh_params(SHAPES)
        optimizer = build(name, params, sharding=SHARDING)
        for step in range(3):

            def closure(step: int = step) -> int:
                optimizer.zero_grad()
                backward(params, rank_grads(step, dist.get_rank(), everywhere))
                return step

            assert optimizer.step(closure) == step
        return values_of(params)

    check(run_threads(2, train), expected_of(name, 2, 3, everywhere))


# States and copies


@every_optimizer
def test_5_c_load_after_steps_and_no_copies(name: str) -> None:
    """A state loaded into a used optimizer is the state; copying one is refused on every rank."""

    def train() -> list[Tensor]:
        params, used = fresh_params(SHAPES), fresh_params(SHAPES)
        first = build(name, params, sharding=SHARDING)
        second = build(name, used, sharding=SHARDING)
        for step in range(4):
            optimizer, trained = (first, params) if step < 2 else (second, used)
            if step == 0:
                backward(used, rank_grads(9, dist.get_rank(), everywhere))
                second.step()
                second.zero_grad()
            if step == 2:
                first.consolidate_state_dict(to=None)
                second.load_state_dict(copy.deepcopy(first.state_dict()))
                with torch.no_grad():
                    for mine, saved in zip(used, params, strict=True):
                        mine.copy_(saved)
            optimizer.zero_grad()
            backward(trained, rank_grads(step, dist.get_rank(), everywhere))
            optimizer.step()
        for how in (copy.deepcopy, pickle.dumps):
            with pytest.raises(TypeError, match="cannot be pickled or deep-copied"):
                how(second)
        return values_of(used)

    check(run_threads(2, train), expected_of(name, 2, 4, everywhere))


# Dtypes and memory formats


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@every_optimizer
def test_5_c_half_precision(name: str, dtype: torch.dtype) -> None:
    """bf16 and fp16 parameters have fp32 masters, which follow the reference."""
    start = [p.detach() for p in fresh_params(SHAPES, dtype)]
    # Every rank has the same gradients, so that their mean is exact.
    grads = [[noise(s, 10 * step + i).to(dtype) for i, s in enumerate(SHAPES)] for step in range(3)]
    oracle = reference(name, start)
    for members in grads:
        oracle.step([members])

    def train(grads: list[list[Tensor]]) -> tuple[list[Tensor], list[Tensor]]:
        params = fresh_params(SHAPES, dtype)
        optimizer = build(name, params, sharding=SHARDING)
        for members in grads:
            optimizer.zero_grad()
            backward(params, list(members))
            optimizer.step()
        optimizer.consolidate_state_dict(to=None)
        state = optimizer.state_dict()["state"]
        return values_of(params), [state[i]["param"].clone() for i in range(len(params))]

    for values, masters in run_threads(2, train, grads):
        assert max_relative_error(masters, oracle.values(), start) < TOLERANCE
        assert_bitwise(values, [master.to(dtype) for master in masters])


@every_world
def test_5_c_fp16_lamb_does_not_overflow(world_size: int) -> None:
    """Neither the sum of gradients over ranks nor that of an update's squares passes 65504."""
    start = noise((70_000,), 0).half()
    grad = 40_000.0 * noise((70_000,), 1).sign().half()
    oracle = LambOracle([{"params": [start]}], lr=0.5)

    def train(start: Tensor, grad: Tensor) -> Tensor:
        param = nn.Parameter(start.clone())
        optimizer = npu.NpuFusedLamb([param], lr=0.5)
        for _ in range(2):
            param.grad = grad.clone()
            optimizer.step()
        optimizer.consolidate_state_dict(to=None)
        return optimizer.state_dict()["state"][0]["param"].clone()

    for _ in range(2):
        oracle.step([[grad]])
    for master in run_threads(world_size, train, start, grad):
        # The mean over three ranks is taken in fp16 on the wire.
        bound = TOLERANCE if world_size == 2 else 2.0**-10
        assert max_relative_error([master], oracle.values(), [start]) < bound
        assert not torch.equal(master, start.float())


@every_optimizer
def test_5_c_channels_last(name: str) -> None:
    """Parameters keep their memory format and follow the contiguous reference."""
    shape = (20, 30, 3, 3)
    oracle = reference(name, [noise(shape, 0)])

    def train() -> tuple[bool, Tensor]:
        value = noise(shape, 0).contiguous(memory_format=torch.channels_last)
        param = nn.Parameter(value)
        optimizer = build(name, [param], sharding=SHARDING)
        for step in range(3):
            optimizer.zero_grad()
            (param * noise(shape, 1 + step)).sum().backward()
            optimizer.step()
        return param.is_contiguous(memory_format=torch.channels_last), param.detach().clone()

    for step in range(3):
        oracle.step([[noise(shape, 1 + step)]])
    for kept, value in run_threads(2, train):
        assert kept
        assert max_relative_error([value], oracle.values(), [noise(shape, 0)]) < TOLERANCE


# Memory


@every_optimizer
def test_5_c_reallocation_is_a_clear_error(name: str) -> None:
    """Every rank names the parameter and the remedy, changes nothing, and trains after it."""

    def train() -> list[Tensor]:
        params = fresh_params(SHAPES)
        optimizer = build(name, [(f"p{i}", p) for i, p in enumerate(params)], sharding=SHARDING)
        params[1].data = params[1].data.clone()
        backward(params, rank_grads(0, dist.get_rank(), everywhere))
        with pytest.raises(RuntimeError, match=r"re-allocated.*\(p1\).*opt\.rebind\(\)"):
            optimizer.step()
        assert_bitwise(values_of(params), values_of(fresh_params(SHAPES)))
        optimizer.rebind()
        optimizer.step()
        return values_of(params)

    check(run_threads(2, train), expected_of(name, 2, 1, everywhere))


def test_5_c_parameters_outlive_the_optimizer() -> None:
    """Dropped on every rank, it leaves values that stay, and no memory of its states."""

    def train() -> tuple[list[Tensor], list[Tensor]]:
        params = fresh_params(SHAPES)
        optimizer = build("NpuFusedLamb", params, sharding=SHARDING)
        backward(params, rank_grads(0, dist.get_rank(), everywhere))
        optimizer.step()
        values = values_of(params)
        del optimizer
        gc.collect()
        garbage = [torch.full((5000,), math.nan) for _ in range(10)]
        assert len(garbage) == 10
        return values, values_of(params)

    for before, after in run_threads(2, train):
        assert_bitwise(after, before)


@every_world
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_5_c_alignment_and_memory(dtype: torch.dtype, world_size: int) -> None:
    """Parameters and shards start at multiples of 512 bytes; states are divided by W."""
    numel = sum(math.prod(s) for s in SHAPES)

    def measure() -> tuple[list[int], int]:
        params = fresh_params(SHAPES, dtype)
        optimizer = build("NpuFusedLamb", params, sharding=SHARDING)
        (buffer,) = flat_buffers(optimizer)
        assert lie_in(params, [buffer])
        starts = [p.data_ptr() - buffer.data_ptr() for p in params]
        for flat in optimizer.layout.flats:
            starts += [bucket.shard_numel * dtype.itemsize for bucket in flat.buckets]
        return starts, optimizer.memory_summary().state_nbytes

    held = 0
    for starts, nbytes in run_threads(world_size, measure):
        assert len(starts) > len(SHAPES) + 1
        assert all(start % 512 == 0 for start in starts)
        held += nbytes
    # Two moments, and a master for fp16; padded to blocks, and to the world size.
    per_element = 8 if dtype == torch.float32 else 12
    assert per_element * numel <= held
    assert held <= per_element * (numel + 512 * (len(SHAPES) + 3 * world_size))
