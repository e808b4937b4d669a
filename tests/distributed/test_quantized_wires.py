"""Gradients in 8 bits, and parameters as differences in 8 or 4: exact where bits suffice."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from shardfuse import ShardedAdam, ShardedAdamP, ShardedGradScaler, ShardedLamb, ShardedSGD
from shardfuse.layout import PART_NBYTES, round_up
from tests.distributed.test_overlap import OPTIMIZERS
from tests.support.counting import counted
from tests.support.harness import run_procs, run_threads
from tests.support.placing import device_type
from tests.support.runs import assert_bitwise

pytestmark = pytest.mark.timeout(120)

SHAPES = [(7,), (40, 60), (0,), (1,), (513,), (9, 5, 3), (2000,)]
BLOCK = 512
GRADS, PARAMS = {"grad_sync_bits": 8}, {"param_sync_bits": 4}
BOTH = {"grad_sync_bits": 8, "param_sync_bits": 8}


def new_params(dtype: torch.dtype = torch.float32) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [
        torch.nn.Parameter((torch.randint(-8, 9, shape, generator=generator) / 16).to(dtype))
        for shape in SHAPES
    ]


def whole_steps(param: Tensor, seed: int, most: int) -> Tensor:
    """Return integers of which the first of every block is ``most``, so that scales are 1."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(-most, most + 1, (param.numel(),), generator=generator).to(param.dtype)
    values[::BLOCK] = most
    return values.view(param.shape)


def floats(param: Tensor, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(param.shape, generator=generator).to(param.dtype)


def train(
    build: Callable[..., Any],
    sharding: dict[str, Any],
    grad_of: Callable[[Tensor, int], Tensor],
    num_steps: int = 5,
    **options: Any,
) -> tuple[list[Tensor], Any]:
    """Train on this rank; return the parameters and the optimizer."""
    params = new_params()
    named = [(f"p{i}", param) for i, param in enumerate(params)]
    sharding = {"bucket_cap_mb": 0.01, "kernel": "eager", **sharding}
    optimizer = build(named, **options, sharding=sharding)
    rank = dist.get_rank() if dist.is_initialized() else 0
    for step in range(num_steps):
        for index, param in enumerate(params):
            is_absent = index == 3 or (index == 4 and step % 2 == 0) or (index == 5 and rank == 0)
            param.grad = None if is_absent else grad_of(param, 100 * step + 10 * index + rank)
        optimizer.step()
    return [param.detach().clone() for param in params], optimizer


def states_of(optimizer: Any) -> list[Tensor]:
    optimizer.consolidate_state_dict(to=None)
    entries = optimizer.state_dict()["state"].values()
    return [t for entry in entries for name, t in entry.items() if isinstance(t, Tensor)]


# Gradients


def train_on_whole_steps(build: Callable[..., Any], sharding: dict[str, Any]) -> list[Tensor]:
    values, optimizer = train(build, sharding, lambda p, seed: whole_steps(p, seed, 127), lr=0.1)
    return values + states_of(optimizer)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_gradients_that_8_bits_hold_are_exact(name: str, world_size: int) -> None:
    """All optimizers, bit for bit, with gradients that are absent here, or everywhere."""
    args = (train_on_whole_steps, OPTIMIZERS[name])
    expected = run_threads(world_size, *args, {})
    for values, others in zip(run_threads(world_size, *args, GRADS), expected, strict=True):
        assert len(values) == len(others) >= len(SHAPES)
        if name in ("ShardedAdamP", "ShardedBertAdam"):  # whose sums are taken slot by slot
            for value, other in zip(values, others, strict=True):
                torch.testing.assert_close(value, other, rtol=1e-6, atol=1e-6)
        else:
            assert_bitwise(values, others)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_gradients(dtype: torch.dtype) -> None:
    """What arrives is added up in fp32, whatever dtype gradients have: here 2 * 60000 in fp16."""

    def body(sharding: dict[str, Any]) -> list[Tensor]:
        param = torch.nn.Parameter(torch.zeros(1024, dtype=dtype))
        optimizer = ShardedSGD([param], lr=2.0**-14, sharding={"kernel": "eager", **sharding})
        param.grad = torch.full_like(param, 60000.0)
        optimizer.step()
        return [param.detach().clone()]

    for (value,) in run_threads(2, body, GRADS):
        assert torch.equal(value, torch.full_like(value, -60000.0 * 2.0**-14))


def sum_of_floats(sharding: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """Return SGD's step on a gradient, that gradient's mean, and a bound of the error."""
    param = torch.nn.Parameter(torch.zeros(5000))
    optimizer = ShardedSGD([param], lr=1.0, sharding={"kernel": "eager", **sharding})
    world_size = dist.get_world_size()
    grads = [floats(param, seed).double() for seed in range(world_size)]
    param.grad = grads[dist.get_rank()].float()
    optimizer.step()
    padded = [torch.nn.functional.pad(g, (0, 5120 - 5000)).view(-1, BLOCK).abs() for g in grads]
    bound = sum(p.amax(dim=1, keepdim=True) / 127 / 2 for p in padded) / world_size
    assert isinstance(bound, Tensor)
    wide = bound.expand(-1, BLOCK).flatten()[:5000]
    return -param.detach().double(), sum(grads) / world_size, wide  # type: ignore[return-value]


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_error_of_a_sum_is_bounded(world_size: int) -> None:
    """Half a step of each sender's block, and not nothing."""
    for found, mean, bound in run_threads(world_size, sum_of_floats, GRADS):
        assert ((found - mean).abs() <= bound * (1 + 1e-4) + 1e-7).all()
        assert ((found - mean).abs() > 1e-5).any()


def overflow(sharding: dict[str, Any]) -> tuple[float, bool, tuple[str, int] | None]:
    """One rank's gradient overflows under a gradient scaler."""
    params = new_params()
    named = [(f"p{i}", param) for i, param in enumerate(params)]
    options = {"kernel": "eager", "report_overflow": True, **sharding}
    optimizer = ShardedAdam(named, lr=0.1, sharding=options)
    scaler = ShardedGradScaler(device_type(), init_scale=4.0)
    before = [param.detach().clone() for param in params]
    loss = torch.stack([(param * param).sum() for param in params]).sum()
    scaler.scale(loss * (float("inf") if dist.get_rank() == 0 else 1.0)).backward()
    scaler.step(optimizer)
    scaler.update()
    is_same = all(torch.equal(p, b) for p, b in zip(params, before, strict=True))
    return scaler.get_scale(), is_same, optimizer.last_overflow


@pytest.mark.parametrize("stage", [1, 2])
def test_an_overflow_on_one_rank_skips_the_step_on_all(stage: int) -> None:
    for scale, is_same, last in run_procs(2, overflow, {**BOTH, "stage": stage}):
        assert scale == 2.0
        assert is_same
        assert last is not None


# Parameters


@pytest.mark.parametrize(("bits", "most"), [(8, 127), (4, 7)])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_differences_that_fit_are_exact(world_size: int, bits: int, most: int) -> None:
    """Steps of whole numbers, alike on all ranks, are those of full digits bit for bit."""

    def body(sharding: dict[str, Any]) -> list[Tensor]:
        def grad_of(param: Tensor, seed: int) -> Tensor:
            return whole_steps(param, seed // 10, most)

        return train(ShardedSGD, sharding, grad_of, lr=1.0)[0]

    expected = run_threads(1, body, {})[0]
    # Parameter 5 has no gradient on rank 0: its mean is no whole number.
    for values in run_threads(world_size, body, {"param_sync_bits": bits}):
        assert_bitwise(values[:5] + values[6:], expected[:5] + expected[6:])


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_ranks_are_equal_and_lack_what_is_kept(name: str, world_size: int, bits: int) -> None:
    """Parameters are the same everywhere; with what is kept beside them they are those of no wire.

    Gradients do not depend on parameters; LAMB's norms do, of the values that are kept.
    """

    def body(sharding: dict[str, Any]) -> list[list[Tensor]]:
        _, optimizer = train(OPTIMIZERS[name], sharding, floats, 8, lr=2.0**-6)
        optimizer.consolidate_state_dict(to=None)
        params = [param for group in optimizer.param_groups for param in group["params"]]
        values = [param.detach().clone() for param in params]  # in the order of the states
        entries = optimizer.state_dict()["state"]
        errors = [entries.get(i, {}).get("param_error") for i in range(len(values))]
        values = [value.cpu() for value in values]
        whole = [v if e is None else v + e for v, e in zip(values, errors, strict=True)]
        return [values, whole]

    expected = run_threads(world_size, body, {})[0][0]
    found = run_threads(world_size, body, {"param_sync_bits": bits})
    for values, whole in found:
        assert_bitwise(values, found[0][0])
        for one, other in zip(whole, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
        assert any(not torch.equal(one, other) for one, other in zip(values, whole, strict=True))


def small_steps(sharding: dict[str, Any]) -> float:
    """Return how far an element goes whose steps are 1/100 of its block's largest."""
    param = torch.nn.Parameter(torch.zeros(1024))
    optimizer = ShardedSGD([param], lr=1.0, sharding={"kernel": "eager", **sharding})
    for _ in range(200):
        param.grad = torch.full_like(param, -0.01)
        param.grad[::BLOCK] = -1.0
        optimizer.step()
    return float(param.detach()[100])


@pytest.mark.parametrize(("feedback", "expected"), [(True, 2.0), (False, 0.0)])
def test_what_is_rounded_off_adds_up(feedback: bool, expected: float) -> None:
    """With error feedback a small step is late; without it is lost."""
    sharding = {"param_sync_bits": 4, "error_feedback": feedback}
    for value in run_threads(2, small_steps, sharding):
        assert abs(value - expected) < 0.15


# Saved, loaded, edited


def train_with_a_stop(how: str, sharding: dict[str, Any]) -> tuple[list[Tensor], list[Tensor]]:
    """Train; then do so with a save and a load into new objects in the middle."""
    found = []
    for stops in (False, True):
        params = new_params()
        options = {"kernel": "eager", **BOTH, **sharding}
        optimizer = ShardedAdam(params, lr=0.1, sharding=options)
        for step in range(6):
            if step == 3 and stops:
                optimizer.consolidate_state_dict(to=None)
                values, saved = [p.detach().clone() for p in params], optimizer.state_dict()
                saved, params = copy.deepcopy(saved), new_params()
                if how == "model first":
                    load(params, values)
                optimizer = ShardedAdam(params, lr=0.1, sharding=options)
                optimizer.load_state_dict(saved)
                if how == "model last":
                    load(params, values)
            for index, param in enumerate(params):
                param.grad = floats(param, 100 * step + 10 * index + dist.get_rank())
            optimizer.step()
        found.append([param.detach().clone() for param in params])
    return found[0], found[1]


def load(params: list[Any], values: list[Tensor]) -> None:
    with torch.no_grad():
        for param, value in zip(params, values, strict=True):
            param.copy_(value)


@pytest.mark.parametrize("feedback", [True, False])
@pytest.mark.parametrize("how", ["model first", "model last"])
def test_resumes_bit_for_bit(how: str, feedback: bool) -> None:
    for straight, stopped in run_threads(2, train_with_a_stop, how, {"error_feedback": feedback}):
        assert_bitwise(stopped, straight)


def edit(who: str) -> Tensor:
    """Overwrite a parameter between steps."""
    param = torch.nn.Parameter(torch.zeros(3000))
    optimizer = ShardedSGD([("weight", param)], lr=1.0, sharding={"kernel": "eager", **PARAMS})
    for step in range(3):
        if step == 1 and (who == "all" or dist.get_rank() == 0):
            param.data[1000:2000] = 4.0
        param.grad = torch.ones_like(param)
        optimizer.step()
    optimizer.synchronize()
    return param.detach().clone()


def test_an_edit_on_all_ranks_stays() -> None:
    for value in run_threads(2, edit, "all"):
        assert torch.equal(value[1000:2000], torch.full((1000,), 2.0))
        assert torch.equal(value[:1000], torch.full((1000,), -3.0))


def edit_here(collectives: str) -> str:
    """Return the error that comes of an edit of one element on rank 0 alone."""
    param = torch.nn.Parameter(torch.zeros(1 << 20))
    options = {"kernel": "eager", "collectives": collectives, **PARAMS}
    optimizer = ShardedSGD([("body.weight", param)], lr=1.0, sharding=options)
    try:
        for step in range(4):
            if step == 1 and dist.get_rank() == 0:
                param.data[777_777] = 1e-7
            param.grad = torch.ones_like(param)
            optimizer.step()
            float(param.detach().sum())
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("collectives", ["auto", "pairwise", "native"])
def test_an_edit_on_one_rank_is_an_error_on_all(collectives: str) -> None:
    """One element of a million, in the other rank's shard: ranks would differ from then on."""
    for text in run_procs(3, edit_here, collectives):
        assert "body.weight" in text
        assert "leave param_sync_bits out" in text


def fail_in_the_middle() -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """A step that fails on all ranks after its buckets were opened; then save, edit, and go on."""
    params = new_params()
    options = {"kernel": "eager", "param_sync_bits": 8}
    named = [(f"p{i}", param) for i, param in enumerate(params)]
    optimizer = ShardedLamb(named, lr=0.1, sharding=options)
    sums = optimizer._driver._reduction
    original = sums.totals
    for step in range(4):
        for index, param in enumerate(params):
            param.grad = floats(param, 10 * step + index + dist.get_rank())
        before = [param.detach().clone() for param in params]
        sums.totals = original if step < 2 else lambda: 1 / 0
        with pytest.raises(ZeroDivisionError) if step > 1 else nullcontext():
            optimizer.step()
        if step == 2:
            optimizer.consolidate_state_dict(to=None)
            errors = [entry["param_error"] for entry in optimizer.state_dict()["state"].values()]
            assert_bitwise([param.detach().clone() for param in params], before)
    for param in params:
        param.data.fill_(4.0)
    sums.totals, optimizer.param_groups[0]["lr"] = original, 0.0
    optimizer.step()
    return errors, before, [param.detach().clone() for param in params]


def test_a_step_that_fails_leaves_what_is_kept() -> None:
    """What lies beside a parameter is a small part of it; the rest came back after an edit."""
    for errors, values, edited in run_threads(2, fail_in_the_middle):
        assert errors
        assert max(float(error.abs().max()) for error in errors if error.numel()) < 0.05
        assert max(float(value.abs().max()) for value in values if value.numel()) > 0.3
        assert min(float(value.min()) for value in edited if value.numel()) > 3.9


# What it costs


def count(sharding: dict[str, Any]) -> tuple[dict[str, int], int, int, int]:
    """Return bytes by collective of one step, of parameters, of states, and of one copy."""
    recorder = counted("native")
    param = torch.nn.Parameter(torch.zeros(64 * BLOCK))
    options = {"process_group": recorder, "kernel": "eager", **sharding}
    optimizer = ShardedSGD([param], lr=0.1, sharding=options)
    recorder.calls.clear()
    param.grad = torch.ones_like(param)
    optimizer.step()
    nbytes: dict[str, int] = {}
    for call in recorder.calls:
        nbytes[call.op] = nbytes.get(call.op, 0) + call.nbytes
    summary = optimizer.memory_summary()
    return nbytes, summary.param_nbytes, summary.state_nbytes, param.nbytes


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("world_size", [2, 4])
def test_bytes_on_the_wire_and_in_memory(world_size: int, bits: int) -> None:
    """bits / 8 an element, 4 for each block, and 8 for the checksum of each rank's part, padded."""
    sharding = {"grad_sync_bits": 8, "param_sync_bits": bits}
    for nbytes, param_nbytes, state_nbytes, copy_nbytes in run_threads(world_size, count, sharding):
        blocks = 64 // world_size
        params = world_size * round_up(blocks * (BLOCK * bits // 8 + 4) + 8, PART_NBYTES)
        grads = world_size * round_up(blocks * (BLOCK + 4), PART_NBYTES)
        assert nbytes["reduce_scatter"] == grads
        assert nbytes["all_gather"] == params
        assert param_nbytes == copy_nbytes + params
        assert state_nbytes == copy_nbytes // world_size  # SGD has no others


# Over real transports


def train_here(sharding: dict[str, Any]) -> list[Tensor]:
    return train(ShardedAdamP, {**BOTH, **sharding}, floats, lr=0.01)[0]


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("world_size", [2, 3])
def test_over_gloo(world_size: int, stage: int) -> None:
    """Shared memory, sockets and gloo's all-to-all: the same bits on all ranks."""
    expected = run_procs(world_size, train_here, {"collectives": "auto", "stage": stage})
    for collectives in ("pairwise", "native"):
        sharding = {"collectives": collectives, "stage": stage}
        for values in run_procs(world_size, train_here, sharding):
            assert_bitwise(values, expected[0])
