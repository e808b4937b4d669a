"""fp32 parameters that travel in bf16 or fp16: rounded alike on all ranks, exact in the masters."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from shardfuse import ShardedAdam, ShardedAdamW, ShardedLamb, ShardedSGD
from shardfuse.buffers import FlatBuffer
from shardfuse.codecs import CastParamCodec
from shardfuse.layout import FlatLayout, ParamSpec
from tests.support.harness import run_procs, run_threads
from tests.support.models import rank_grads
from tests.support.runs import Case, assert_bitwise, train_rank, train_unsharded

pytestmark = pytest.mark.timeout(60)

WIRES = [torch.bfloat16, torch.float16]
NUM_STEPS = 5
CASES = {
    "sgd": Case(ShardedSGD, {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.1}),
    "adam": Case(ShardedAdam, {"lr": 0.05}),
    "adamw": Case(ShardedAdamW, {"lr": 0.05, "weight_decay": 0.1, "amsgrad": True}),
}
LAMB = Case(ShardedLamb, {"lr": 0.05, "weight_decay": 0.1}, named=True)


def rounded(case: Case, values: list[Tensor], wire: torch.dtype) -> list[Tensor]:
    """Return ``values`` as they travel; frozen parameters do not."""
    params = case.param_set().params
    return [
        value.to(wire).float() if param.requires_grad else value
        for param, value in zip(params, values, strict=True)
    ]


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("name", CASES)
def test_is_the_rounded_result_of_none(name: str, world_size: int, wire: torch.dtype) -> None:
    """Where gradients do not depend on parameters, rounding those changes nothing but them."""
    case, sharding = CASES[name], {"bucket_cap_mb": 0.02, "param_sync_dtype": wire}
    expected = train_unsharded(case, "integers", NUM_STEPS, world_size)
    for values in run_threads(world_size, train_rank, case, "integers", NUM_STEPS, sharding):
        assert_bitwise(values, rounded(case, expected, wire))


def test_norms_are_of_masters() -> None:
    """LAMB's trust ratios do not see the rounding."""
    sharding = {"bucket_cap_mb": 0.02}
    plain = run_threads(3, train_rank, LAMB, "floats", NUM_STEPS, sharding)
    sharding["param_sync_dtype"] = torch.bfloat16  # type: ignore[assignment]
    for values in run_threads(3, train_rank, LAMB, "floats", NUM_STEPS, sharding):
        assert_bitwise(values, rounded(LAMB, plain[0], torch.bfloat16))


def test_one_rank_alone_rounds_nothing() -> None:
    case = CASES["adam"]
    sharding = {"param_sync_dtype": torch.bfloat16}
    values = run_threads(1, train_rank, case, "integers", NUM_STEPS, sharding)[0]
    assert_bitwise(values, train_unsharded(case, "integers", NUM_STEPS, 1))


def train_with_a_stop(how: str, at: int) -> tuple[list[Tensor], list[Tensor]]:
    """Train; then do so with a save and a load into new objects in the middle."""
    case, sharding = CASES["adamw"], {"kernel": "eager", "param_sync_dtype": torch.bfloat16}
    found = []
    for stops in (False, True):
        params = case.param_set()
        optimizer = case.build(params, sharding)
        for step in range(6):
            if step == at and stops:
                optimizer.consolidate_state_dict(to=None)
                values, saved = params.values(), copy.deepcopy(optimizer.state_dict())
                params = case.param_set()
                if how == "loads the model first":
                    load(params, values)
                optimizer = case.build(params, sharding)
                optimizer.load_state_dict(saved)
                if how == "loads the model last":
                    load(params, values)
            world_size, rank = dist.get_world_size(), dist.get_rank()
            params.assign(rank_grads("integers", world_size, rank, step, case.entries))
            optimizer.step()
        found.append(params.values())
    return found[0], found[1]


def load(params: Any, values: list[Tensor]) -> None:
    with torch.no_grad():
        for param, value in zip(params.params, values, strict=True):
            param.copy_(value)


@pytest.mark.parametrize("at", [1, 3])  # before and after the first gradients of some
@pytest.mark.parametrize("how", ["loads the model first", "loads the model last"])
def test_resumes_bit_for_bit(how: str, at: int) -> None:
    """What the masters have beyond the parameters' digits is saved and loaded."""
    for straight, stopped in run_threads(2, train_with_a_stop, how, at):
        assert_bitwise(stopped, straight)


def edit(wire: torch.dtype | None) -> list[Tensor]:
    """Overwrite some elements of a parameter between steps, by digits that the wire lacks."""
    weight = torch.nn.Parameter(torch.linspace(-1, 1, 3000))
    options = {"kernel": "eager", "param_sync_dtype": wire}
    optimizer = ShardedSGD([("weight", weight)], lr=2.0**-6, sharding=options)
    for step in range(3):
        weight.grad = torch.full_like(weight, float(step))
        optimizer.step()
        if step == 1:
            weight.data[1000:2000] = 1.0 + 2.0**-20
    return [weight.detach().clone()]


def test_an_edit_wins_over_the_master() -> None:
    plain, rounded = (run_threads(2, edit, wire) for wire in (None, torch.bfloat16))
    for values, others in zip(rounded, plain, strict=True):
        assert_bitwise(values, [value.bfloat16().float() for value in others])


def edit_by_less_than_a_digit() -> tuple[Tensor, Tensor]:
    """Return what an edit too small for the wire is worth after many steps of nothing."""
    weight = torch.nn.Parameter(torch.ones(2000))
    options = {"kernel": "eager", "param_sync_dtype": torch.bfloat16}
    optimizer = ShardedSGD([("weight", weight)], lr=1.0, sharding=options)
    for step in range(9):
        weight.grad = torch.full_like(weight, -(2.0**-11) if step else 0.0)
        optimizer.step()
        if step == 0:
            weight.data.add_(2.0**-10)
    return weight.detach().clone(), torch.full((2000,), 1 + 2.0**-10 + 8 * 2.0**-11)


def test_small_steps_and_edits_accumulate() -> None:
    """Steps that bf16 cannot tell are kept in the master, and so is an edit."""
    for value, expected in run_threads(2, edit_by_less_than_a_digit):
        assert torch.equal(value, expected.bfloat16().float())
        assert not torch.equal(value, torch.ones(2000))


def held(wire: torch.dtype | None) -> tuple[int, int, int]:
    weight = torch.nn.Parameter(torch.zeros(512 * 512))
    options = {"kernel": "eager", "param_sync_dtype": wire}
    optimizer = ShardedAdam([("weight", weight)], lr=0.1, sharding=options)
    summary = optimizer.memory_summary()
    return summary.param_nbytes, summary.state_nbytes, weight.nbytes


@pytest.mark.parametrize("world_size", [2, 4])
def test_memory(world_size: int) -> None:
    """2 bytes an element more, and a master."""
    for param_nbytes, state_nbytes, nbytes in run_threads(world_size, held, torch.bfloat16):
        assert param_nbytes == nbytes + nbytes // 2
        assert state_nbytes == 3 * nbytes // world_size


def train_over_sockets(wire: torch.dtype | None) -> list[Tensor]:
    options = {"collectives": "pairwise", "bucket_cap_mb": 0.02, "param_sync_dtype": wire}
    return train_rank(CASES["adamw"], "integers", NUM_STEPS, options)


def test_over_sockets() -> None:
    """Gathers left under way are cast when they arrive."""
    plain = run_procs(2, train_over_sockets, None)[0]
    for values in run_procs(2, train_over_sockets, torch.bfloat16):
        assert_bitwise(values, rounded(CASES["adamw"], plain, torch.bfloat16))


@pytest.mark.parametrize("edited", [[0], [70_000], [65_535, 65_536, 199_999], []])
def test_an_edit_anywhere_in_a_large_shard_wins_over_the_master(edited: list[int]) -> None:
    """The search goes through a shard in parts of 65,536 elements."""
    spec = ParamSpec("p", (200_000,), (1,), "float32", "cpu", 0)
    (flat,) = FlatLayout.build([spec], world_size=1, granularity="element").flats
    params = FlatBuffer(flat, torch.zeros(flat.numel))
    codec = CastParamCodec(params, 0, torch.bfloat16)
    codec.allocate()
    for bucket in flat.buckets:
        master, _ = codec.begin_update(bucket)
        master.fill_(1.0 + 2**-12)  # no bf16 number
        codec.commit(bucket)
        codec.decode(bucket)
    params.data[edited] = 3.0
    masters = torch.cat([codec.begin_update(bucket)[0] for bucket in flat.buckets])
    expected = torch.full_like(masters, 1.0 + 2**-12)
    expected[edited] = 3.0
    assert torch.equal(masters, expected)
