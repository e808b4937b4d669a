"""RMSprop, RMSpropTF and Adadelta: the rest of torch_npu's family, sharded without a change."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardfuse.optim.npu import NpuFusedAdadelta, NpuFusedRMSprop, NpuFusedRMSpropTF
from tests.support.harness import run_threads
from tests.support.models import flat_buffers, mean_grads, rank_grads, split_by_group
from tests.support.oracles_family import AdadeltaOracle, RMSpropOracle, RMSpropTFOracle
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

# What RMSprop and RMSpropTF have in common.
SHARED_OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "decay": {"weight_decay": 0.1, "alpha": 0.8},
    "momentum": {"momentum": 0.9},
    "centered": {"centered": True},
    "all": {"momentum": 0.5, "centered": True, "weight_decay": 0.1, "alpha": 0.9, "eps": 1e-3},
}
TF_OPTIONS: dict[str, dict[str, Any]] = {
    **SHARED_OPTIONS,
    "lr-outside": {"momentum": 0.9, "lr_in_momentum": False},
    "decoupled": {"weight_decay": 0.05, "decoupled_decay": True},
    "decoupled-all": {"decoupled_decay": True, **SHARED_OPTIONS["all"]},
}
ADADELTA_OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {"lr": 20.0},
    "decay": {"lr": 20.0, "rho": 0.8, "eps": 1e-4, "weight_decay": 0.1},
    "rho1": {"lr": 0.1, "rho": 1.0},
}

RMSPROP_CASES = {
    f"rmsprop-{key}": Case(NpuFusedRMSprop, {"lr": 0.05, **o}, RMSpropOracle)
    for key, o in SHARED_OPTIONS.items()
}
TF_CASES = {
    f"rmsproptf-{key}": Case(NpuFusedRMSpropTF, {"lr": 0.1, **o}, RMSpropTFOracle)
    for key, o in TF_OPTIONS.items()
}
ADADELTA_CASES = {
    f"adadelta-{key}": Case(NpuFusedAdadelta, o, AdadeltaOracle)
    for key, o in ADADELTA_OPTIONS.items()
}
CASES = {**RMSPROP_CASES, **TF_CASES, **ADADELTA_CASES}

SHARDING = {"kernel": "eager", "bucket_cap_mb": 0.02}


@pytest.mark.parametrize("bucket_cap_mb", [0.01, 25])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("name", CASES)
def test_sharded_is_unsharded(name: str, world_size: int, bucket_cap_mb: float) -> None:
    """On integer gradients every rank ends bitwise where the same class ends without a group."""
    check_is_unsharded(CASES[name], world_size, bucket_cap_mb)


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("name", CASES)
def test_follows_the_oracle(name: str, world_size: int) -> None:
    """On float gradients 25 sharded steps stay within rounding of the float64 reference."""
    check_follows_oracle(CASES[name], world_size)


def test_cases_differ() -> None:
    """Every option takes the oracle elsewhere, so that agreeing with it says something."""
    ends = {name: train_oracle(case, "floats", 4, 1) for name, case in CASES.items()}
    start = CASES["rmsprop-plain"].param_set().values()
    same = {
        (a, b) for a in ends for b in ends if max_relative_error(ends[a], ends[b], start) < 1e-3
    }
    # At a constant rate it does not matter when it is multiplied in; test_rmsprop_tf_by_hand().
    equal = {"rmsproptf-momentum", "rmsproptf-lr-outside"}
    assert {pair for pair in same if pair[0] != pair[1]} == set(itertools.permutations(equal))


@pytest.mark.parametrize("name", {**RMSPROP_CASES, **ADADELTA_CASES})
def test_oracle_is_torch(name: str) -> None:
    """In double precision the references of RMSprop and Adadelta are torch.optim's."""
    case = CASES[name]
    assert case.oracle is not None
    torch_class = torch.optim.RMSprop if "rmsprop" in name else torch.optim.Adadelta
    params = case.param_set()
    for param in params.params:
        param.data = param.data.double()
    oracle = case.oracle(params.groups(), names=params.names(), **case.options)
    optimizer = torch_class(params.groups(), foreach=False, **case.options)
    for step in range(NUM_STEPS):
        grads = mean_grads("floats", 2, step, case.entries)
        params.assign(grads)
        optimizer.step()
        oracle.step(split_by_group(case.entries, grads))
    expected = [param for group in split_by_group(case.entries, params.params) for param in group]
    for value, param in zip(oracle.values(), expected, strict=True):
        torch.testing.assert_close(value, param.detach(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        # g = 3: s = 1 + 0.1 * (9 - 1) = 1.8, then 1.8 + 0.1 * (9 - 1.8) = 2.52.
        ({}, 2 - 0.5 * 3 / 1.8**0.5 - 0.5 * 3 / 2.52**0.5),
        ({"eps": 0.45}, 2 - 0.5 * 3 / 1.5 - 0.5 * 3 / 2.97**0.5),
        # The rate drops to 0.1 for the second step: only what is added then feels it.
        ({"momentum": 0.9, "drop": True}, 2 - 1.9 * 1.5 / 1.8**0.5 - 0.1 * 3 / 2.52**0.5),
        (
            {"momentum": 0.9, "lr_in_momentum": False, "drop": True},
            2 - 1.5 / 1.8**0.5 - 0.1 * (2.7 / 1.8**0.5 + 3 / 2.52**0.5),
        ),
        # Decay by the factor itself, not by lr times it.
        (
            {"weight_decay": 0.1, "decoupled_decay": True},
            (2 * 0.9 - 1.5 / 1.8**0.5) * 0.9 - 1.5 / 2.52**0.5,
        ),
    ],
)
def test_rmsprop_tf_by_hand(options: dict[str, Any], expected: float) -> None:
    """Two RMSpropTF steps on one number give what pencil and paper give."""
    given = {"eps": 0.0, **options}
    drop = given.pop("drop", False)
    param = nn.Parameter(torch.tensor([2.0]))
    optimizer = NpuFusedRMSpropTF([param], 0.5, **given)
    oracle = RMSpropTFOracle([{"params": [torch.tensor([2.0])]}], lr=0.5, **given)
    for step in range(2):
        if step and drop:
            optimizer.param_groups[0]["lr"] = oracle.groups[0]["lr"] = 0.1
        param.grad = torch.tensor([3.0])
        optimizer.step()
        oracle.step([[torch.tensor([3.0])]])
    assert float(oracle.values()[0]) == pytest.approx(expected, rel=1e-12)
    assert param.item() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    "name", ["rmsprop-all", "rmsproptf-decoupled-all", "adadelta-decay", "adadelta-rho1"]
)
def test_unused_and_frozen_stay(name: str) -> None:
    """A parameter with no gradient on any rank keeps its bits though weight decay is on."""
    case = CASES[name]
    before = case.param_set().values()
    after = run_threads(3, train_rank, case, "floats", 3)[1]
    for entry, old, new in zip(case.entries, before, after, strict=True):
        untouched = entry.role in ("unused", "frozen") or old.numel() == 0
        assert torch.equal(old, new) == untouched, entry.name


@pytest.mark.parametrize(
    ("cls", "options"),
    [
        (NpuFusedRMSprop, {"eps": 0.0, "centered": True}),
        (NpuFusedRMSprop, {"eps": 1e-60, "momentum": 0.9}),
        (NpuFusedRMSpropTF, {"eps": 0.0, "alpha": 0.0}),
        (NpuFusedRMSpropTF, {"eps": 0.0, "momentum": 0.9, "decoupled_decay": True}),
        (NpuFusedAdadelta, {"eps": 0.0}),
    ],
)
def test_vanishing_eps(cls: Any, options: dict[str, Any]) -> None:
    """With an eps of 0 elements without gradient and padding stay, and nothing becomes NaN."""
    param = nn.Parameter(torch.ones(1500))
    optimizer = cls([param], lr=0.01, **options)
    grad = torch.zeros(1500)
    for step in range(3):
        grad[:700] = 1.0 - 0.3 * step
        param.grad = grad.clone()
        optimizer.step()
    assert torch.isfinite(param).all()
    assert torch.equal(param.detach()[700:], torch.ones(800))
    # Adadelta starts from steps of size sqrt(eps).
    assert (param.detach()[:700] < 1.0).all() == (cls is not NpuFusedAdadelta)
    (buffer,) = flat_buffers(optimizer)
    assert buffer.numel() > 1500
    assert not buffer[1500:].any()


# State


def advance(case: Case, params: Any, optimizer: Any, steps: range) -> None:
    """Take steps whose mean gradient is the same integers at every world size."""
    for step in steps:
        grads = rank_grads("integers", 1, 0, step, case.entries)
        scale = float(dist.get_world_size()) if dist.get_rank() == 0 else 0.0
        params.assign([None if g is None else g * scale for g in grads])
        optimizer.step()


def save_half(case: Case) -> tuple[list[Tensor], dict[str, Any], list[Tensor]]:
    """Return parameters and state after one step, and parameters after four."""
    params = case.param_set()
    optimizer = case.build(params, SHARDING)
    advance(case, params, optimizer, range(1))
    optimizer.consolidate_state_dict(to=None)
    state_dict = copy.deepcopy(optimizer.state_dict())
    values = params.values()
    advance(case, params, optimizer, range(1, 4))
    return values, state_dict, params.values()


def load_half(
    case: Case, values: list[Tensor], state_dict: dict[str, Any], used: bool
) -> list[Tensor]:
    params = case.param_set()
    optimizer = case.build(params, SHARDING)
    if used:
        advance(case, params, optimizer, range(3))
    with torch.no_grad():
        for param, value in zip(params.params, values, strict=True):
            param.copy_(value)
    optimizer.load_state_dict(state_dict)
    advance(case, params, optimizer, range(1, 4))
    return params.values()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("used", [False, True], ids=["new", "used"])
@pytest.mark.parametrize("name", ["rmsprop-all", "rmsproptf-decoupled-all", "adadelta-decay"])
def test_resume(name: str, used: bool, dtype: torch.dtype) -> None:
    """A state saved at three ranks goes on bitwise at two, also in an optimizer that was used.

    When it is saved some parameters had no gradient yet: RMSpropTF's average is one there.
    """
    case = CASES[name]
    case = Case(case.optimizer, case.options, dtype=dtype)
    values, state_dict, expected = run_threads(3, save_half, case)[0]
    assert len(state_dict["state"]) < len(case.entries)
    for resumed in run_threads(2, load_half, case, values, state_dict, used):
        assert_bitwise(resumed, expected)


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("rmsprop-plain", ["step", "square_avg"]),
        ("rmsprop-all", ["step", "square_avg", "momentum_buffer", "grad_avg"]),
        ("rmsproptf-plain", ["step", "square_avg"]),
        ("rmsproptf-all", ["step", "square_avg", "momentum_buffer", "grad_avg"]),
        ("adadelta-plain", ["step", "square_avg", "acc_delta"]),
    ],
)
def test_state_names(name: str, keys: list[str]) -> None:
    """State dicts have torch_npu's keys, and steps that count from 1."""
    _, state_dict, _ = run_threads(2, save_half, CASES[name])[0]
    for entry in state_dict["state"].values():
        assert list(entry) == keys
        assert entry["step"] == 1


def test_initial_state_is_in_use() -> None:
    """RMSpropTF's average after one step with a gradient of zero is alpha, on every element."""
    param = nn.Parameter(torch.ones(3, 500))
    optimizer = NpuFusedRMSpropTF([param], alpha=0.75)
    param.grad = torch.zeros(3, 500)
    optimizer.step()
    square_avg = optimizer.state_dict()["state"][0]["square_avg"]
    assert torch.equal(square_avg.cpu(), torch.full((3, 500), 0.75, device="cpu"))


@pytest.mark.parametrize("name", {**RMSPROP_CASES, **ADADELTA_CASES})
def test_state_of_torch(name: str) -> None:
    """A state dict of torch.optim loads, and training goes on as there."""
    case = CASES[name]
    torch_class = torch.optim.RMSprop if "rmsprop" in name else torch.optim.Adadelta
    theirs = case.param_set()
    reference = torch_class(theirs.groups(), foreach=False, **case.options)
    ours = case.param_set()
    optimizer = case.build(ours, {"kernel": "eager"})
    for step in range(6):
        if step == 3:
            with torch.no_grad():
                for param, value in zip(ours.params, theirs.values(), strict=True):
                    param.copy_(value)
            optimizer.load_state_dict(reference.state_dict())
        grads = mean_grads("floats", 1, step, case.entries)
        theirs.assign(grads)
        reference.step()
        if step >= 3:
            ours.assign(grads)
            optimizer.step()
    start = case.param_set().values()
    assert max_relative_error(ours.values(), theirs.values(), start) < TOLERANCE
