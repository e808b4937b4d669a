"""Checkpoints through torch.distributed.checkpoint: saved at one world size, read at another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor

from shardfuse import ShardedAdam, ShardedLamb, ShardedSGD
from tests.support.harness import run_procs, run_threads
from tests.support.models import rank_grads
from tests.support.runs import Case, assert_bitwise

pytestmark = [
    pytest.mark.timeout(120),
    # torch.distributed.checkpoint's own, on torch 2.13.
    pytest.mark.filterwarnings("ignore::FutureWarning:torch"),
    pytest.mark.filterwarnings("ignore::UserWarning:torch"),
]

# LAMB's trust ratios are off here: with them another world size rounds differently.
CASES: dict[str, Case] = {
    "sgd": Case(ShardedSGD, {"lr": 0.1, "momentum": 0.9}, named=True),
    "adam-bf16": Case(ShardedAdam, {"lr": 0.1}, named=True, dtype=torch.bfloat16),
    "lamb": Case(ShardedLamb, {"lr": 0.1, "adam": True}, named=True),
}
SHARDING = {"kernel": "eager", "bucket_cap_mb": 0.02}
HALF = 3


def advance(case: Case, params: Any, optimizer: Any, steps: range) -> None:
    """Take steps whose mean gradient is the same at every world size."""
    for step in steps:
        scale = float(dist.get_world_size()) if dist.get_rank() == 0 else 0.0
        grads = rank_grads("integers", 1, 0, step, case.entries)
        params.assign([None if g is None else g * scale for g in grads])
        optimizer.step()


def save(name: str, folder: str) -> list[Tensor]:
    params = CASES[name].param_set()
    optimizer = CASES[name].build(params, SHARDING)
    advance(CASES[name], params, optimizer, range(HALF))
    optimizer.param_groups[0]["lr"] = 0.05
    dcp.save(optimizer.sharded_state_dict(), checkpoint_id=folder)
    return params.values()


def load(name: str, folder: str, values: list[Tensor]) -> list[Tensor]:
    params = CASES[name].param_set()
    optimizer = CASES[name].build(params, SHARDING)
    with torch.no_grad():
        for param, value in zip(params.params, values, strict=True):
            param.copy_(value)
    state_dict = optimizer.sharded_state_dict()
    dcp.load(state_dict, checkpoint_id=folder)
    optimizer.load_sharded_state_dict(state_dict)
    assert optimizer.param_groups[0]["lr"] == 0.05
    advance(CASES[name], params, optimizer, range(HALF, 2 * HALF))
    return params.values()


def straight(name: str) -> list[Tensor]:
    params = CASES[name].param_set()
    optimizer = CASES[name].build(params, SHARDING)
    advance(CASES[name], params, optimizer, range(HALF))
    optimizer.param_groups[0]["lr"] = 0.05
    advance(CASES[name], params, optimizer, range(HALF, 2 * HALF))
    return params.values()


@pytest.mark.parametrize("loaded_at", [1, 3])
@pytest.mark.parametrize("name", CASES)
def test_saved_at_two(name: str, loaded_at: int, tmp_path: Path) -> None:
    """What two processes save, one or three load, and train on to the same bits."""
    folder = str(tmp_path / "checkpoint")
    values = run_procs(2, save, name, folder)[0]
    resumed = run_procs(loaded_at, load, name, folder, values)
    expected = run_threads(2, straight, name)[0]
    for members in resumed:
        assert_bitwise(members, expected)


def save_sizes(folder: str) -> int:
    case = CASES["adam-bf16"]
    params = case.param_set()
    optimizer = case.build(params, SHARDING)
    advance(case, params, optimizer, range(1))
    dcp.save(optimizer.sharded_state_dict(), checkpoint_id=folder)
    return int(optimizer.memory_summary().state_nbytes)


def test_every_fragment_is_written_once(tmp_path: Path) -> None:
    """The files together hold each state element once: no padding, no copy per rank."""
    case = CASES["adam-bf16"]
    run_procs(3, save_sizes, str(tmp_path))
    trained = sum(
        p.numel()
        for p, e in zip(case.param_set().params, case.entries, strict=True)
        if e.role != "frozen"
    )
    written = sum(file.stat().st_size for file in tmp_path.glob("*.distcp"))
    # fp32 master and two moments, and a container of at most 4 KiB for each fragment and step.
    exact = 3 * 4 * trained
    assert exact <= written < exact + 4096 * 3 * 3 * len(case.entries)
    assert len(list(tmp_path.glob("*.distcp"))) == 3


def save_frozen(folder: str) -> None:
    """Save the states of a parameter that was trained, then frozen."""
    params = [torch.nn.Parameter(torch.ones(3000)) for _ in range(2)]
    optimizer = ShardedAdam([(f"p{i}", param) for i, param in enumerate(params)], lr=0.1)
    for param in params:
        param.grad = torch.ones(3000)
    optimizer.step()
    optimizer.zero_grad()
    params[1].requires_grad_(False)
    dcp.save(optimizer.sharded_state_dict(), checkpoint_id=folder)


def load_frozen(folder: str, freezes: bool) -> Any:
    """Load them, into an optimizer built before or after freezing; return the error or moments."""
    params = [torch.nn.Parameter(torch.ones(3000)) for _ in range(2)]
    params[1].requires_grad_(not freezes)
    optimizer = ShardedAdam([(f"p{i}", param) for i, param in enumerate(params)], lr=0.1)
    state_dict = optimizer.sharded_state_dict()
    dcp.load(state_dict, checkpoint_id=folder)
    try:
        optimizer.load_sharded_state_dict(state_dict)
    except ValueError as error:
        assert not optimizer.state_dict()["state"]
        return str(error)
    params[1].requires_grad_(False)
    optimizer.consolidate_state_dict(to=None)
    return optimizer.state_dict()["state"][1]["exp_avg"]


def test_states_of_a_frozen_parameter_are_not_lost(tmp_path: Path) -> None:
    """Where there is no place for them the load says so; built before freezing, it has them."""
    folder = str(tmp_path / "checkpoint")
    run_procs(2, save_frozen, folder)
    for text in run_procs(2, load_frozen, folder, True):
        assert "when this one was built, p1 was frozen" in text
    for moments in run_procs(2, load_frozen, folder, False):
        assert torch.equal(moments, torch.full((3000,), 0.1))


def resume_sgd(folder: str, momentum: float) -> str:
    """Load states that a momentum set after construction has made; return the error, if any."""
    param, empty = torch.nn.Parameter(torch.ones(3000)), torch.nn.Parameter(torch.ones(0))
    optimizer = ShardedSGD([("p", param), ("empty", empty)], lr=0.1)
    optimizer.param_groups[0]["momentum"] = 0.5
    param.grad, empty.grad = torch.ones(3000), torch.ones(0)
    optimizer.step()
    dcp.save(optimizer.sharded_state_dict(), checkpoint_id=folder)
    optimizer.zero_grad()
    # Frozen and updated before, but of no elements: there is nothing to lose.
    empty.requires_grad_(False)
    other = ShardedSGD([("p", param), ("empty", empty)], lr=0.1, momentum=momentum)
    state_dict = other.sharded_state_dict()
    dcp.load(state_dict, checkpoint_id=folder)
    try:
        other.load_sharded_state_dict(state_dict)
    except ValueError as error:
        return str(error)
    return ""


def test_states_of_other_hyper_parameters_are_not_lost(tmp_path: Path) -> None:
    """An optimizer built without a momentum does not pass over the buffers of one that has it."""
    for text in run_procs(2, resume_sgd, str(tmp_path / "first"), 0.0):
        assert "momentum_buffer" in text
        assert "hyper-parameters were others" in text
    assert run_procs(2, resume_sgd, str(tmp_path / "second"), 0.5) == ["", ""]
