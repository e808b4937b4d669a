"""States of torch.optim and ZeroRedundancyOptimizer are imported, and training goes on as there."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.optim import ZeroRedundancyOptimizer

import shardfuse
from shardfuse.checkpoint.imports import read_torch, read_zero_redundancy
from tests.support.harness import run_procs, run_threads
from tests.support.models import MIXED, ParamSet, mean_grads
from tests.support.runs import TOLERANCE, assert_bitwise, max_relative_error

pytestmark = [
    pytest.mark.timeout(180),
    pytest.mark.filterwarnings("ignore:.*fewer than two dimensions.*:UserWarning"),
]

SAVED_AT = 4
END = 9

# Large rates: parameters move by about their own size, so that errors show.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "adam": ("Adam", {"lr": 0.05, "weight_decay": 0.1, "amsgrad": True}),
    "adamw": ("AdamW", {"lr": 0.05, "weight_decay": 0.1}),
    "sgd": ("SGD", {"lr": 0.05, "momentum": 0.9, "nesterov": True}),
    "sgd-plain": ("SGD", {"lr": 0.05}),
    "rmsprop": ("RMSprop", {"lr": 0.05, "momentum": 0.5, "centered": True}),
    "adadelta": ("Adadelta", {"lr": 1.0, "weight_decay": 0.1}),
}


def train(params: ParamSet, optimizer: Any, first: int, last: int) -> None:
    """Take steps by gradients that are the same on every rank."""
    for step in range(first, last):
        params.assign(mean_grads("integers", 1, step, MIXED))
        optimizer.step()


def go_on(name: str, values: list[Tensor], state: dict[str, Any]) -> list[Tensor]:
    """Train to the end from imported states and the parameters of that time."""
    kind, options = CASES[name]
    params = ParamSet(seed=1)
    with torch.no_grad():
        for param, value in zip(params.params, values, strict=True):
            param.copy_(value)
    # Of other hyper-parameters, where states do not depend on them: they are the file's after it.
    options = {**options, "lr": 7.0}
    optimizer = getattr(shardfuse, f"Sharded{kind}")(
        params.groups(), **options, sharding={"kernel": "eager", "bucket_cap_mb": 0.01}
    )
    optimizer.load_state_dict(state)
    train(params, optimizer, SAVED_AT, END)
    return params.values()


def assert_goes_on(
    name: str, at: list[Tensor], state: dict[str, Any], expected: list[Tensor]
) -> None:
    """Compare with the other optimizer at its end, at one rank, two and three; those bit by bit."""
    alone = go_on(name, at, state)
    assert max_relative_error(alone, expected, at) < TOLERANCE
    for world_size in (2, 3):
        for found in run_threads(world_size, go_on, name, at, state):
            assert_bitwise(found, alone)


def assert_imported(found: dict[str, Any], saved: dict[str, Any]) -> None:
    """Compare states bit by bit."""
    expected = {
        number: {key: value for key, value in entry.items() if value is not None}
        for number, entry in saved["state"].items()
    }
    assert found["state"].keys() == {number for number, entry in expected.items() if entry}
    for number, entry in found["state"].items():
        assert entry.keys() == expected[number].keys()
        assert all(value.dtype == torch.float32 for value in entry.values())
        assert_bitwise(list(entry.values()), [expected[number][key] for key in entry])


@pytest.mark.parametrize("name", CASES)
def test_torch(name: str, tmp_path: Path) -> None:
    """A file of torch.optim's, in a training loop's dict."""
    kind, options = CASES[name]
    params = ParamSet()
    theirs = getattr(torch.optim, kind)(params.groups(), **options, foreach=False)
    train(params, theirs, 0, SAVED_AT)
    torch.save({"step": SAVED_AT, "optimizer": theirs.state_dict()}, tmp_path / "a.pt")
    at = params.values()
    found = read_torch(tmp_path / "a.pt")
    assert_imported(found, theirs.state_dict())
    train(params, theirs, SAVED_AT, END)
    assert_goes_on(name, at, found, params.values())


def train_zero_redundancy(path: str) -> Any:
    kind, options = CASES["adamw"]
    params = ParamSet()
    groups = params.groups()
    optimizer = ZeroRedundancyOptimizer(
        groups, optimizer_class=getattr(torch.optim, kind), **options, foreach=False
    )
    train(params, optimizer, 0, SAVED_AT)
    optimizer.consolidate_state_dict(to=0)
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()  # it copies to the CPU without waiting
    # Its tensors are those that rank 0 goes on to train with.
    saved = copy.deepcopy(optimizer.state_dict()) if dist.get_rank() == 0 else None
    if saved is not None:
        torch.save(saved, f"{path}/a.pt")
    at = params.values()
    train(params, optimizer, SAVED_AT, END)
    return saved, at, params.values()


def test_zero_redundancy(tmp_path: Path) -> None:
    """Two real ranks of ZeroRedundancyOptimizer, and what rank 0 saves."""
    (saved, at, expected), _ = run_procs(2, train_zero_redundancy, str(tmp_path))
    found = read_zero_redundancy(tmp_path / "a.pt")
    assert_imported(found, saved)
    assert_goes_on("adamw", at, found, expected)
