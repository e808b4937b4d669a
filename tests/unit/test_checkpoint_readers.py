"""Another process loads while one saves, replaces and removes: old or new, never of two saves."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardfuse import ShardedAdamW
from shardfuse.checkpoint import Checkpoints, load, save
from tests.support.harness import run_threads

pytestmark = pytest.mark.timeout(300)

NUM_SAVES = int(os.environ.get("SHARDFUSE_TEST_SAVES", "60"))
"""Of the process that saves; of a minute where that is asked for by hand."""


def state(number: float) -> dict[str, Any]:
    """Return a state all of whose elements are ``number``."""
    model = nn.Linear(200, 200)
    optimizer = ShardedAdamW(model.named_parameters(), lr=0.0, weight_decay=0.0)
    held = {"model": model, "optimizer": optimizer, "number": number}
    fill(held, number)
    return held


def fill(held: dict[str, Any], number: float) -> None:
    """Give all elements of a state another value."""
    held["number"] = number
    with torch.no_grad():
        for param in held["model"].parameters():
            param.fill_(number)


def values_of(held: dict[str, Any]) -> set[float]:
    """Return the different numbers in what was loaded: one, or it is a mixture."""
    params = (value for p in held["model"].parameters() for value in p.detach().unique().tolist())
    return {*params, float(held["number"])}


def save_often(write: Callable[[dict[str, Any], int], None]) -> int:
    """Save in a forked process, many times; return its number."""
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        held = state(1)
        for number in range(2, NUM_SAVES + 2):
            fill(held, number)
            write(held, number)
        status = 0
    finally:
        os._exit(status)


def read_meanwhile(child: int, read: Callable[[dict[str, Any]], object], world_size: int) -> int:
    """Load until the child has ended; return how often. No load may fail or give a mixture."""
    seen: list[set[float]] = []
    while not seen or os.waitpid(child, os.WNOHANG) == (0, 0):

        def one() -> set[float]:
            held = state(-1)
            read(held)
            dist.barrier()
            return values_of(held)

        found = set[float]().union(*run_threads(world_size, one))
        assert len(found) == 1, f"a mixture of {found}"
        assert not seen or max(seen[-1]) <= max(found), "an older one than before"
        seen.append(found)
    held = state(-1)
    read(held)
    assert held["number"] == NUM_SAVES + 1, "the process that saves has failed"
    return len(seen)


@pytest.mark.parametrize("world_size", [1, 2])
def test_by_name(world_size: int, tmp_path: Path) -> None:
    folder = tmp_path / "ck"
    save(state(1), folder)
    child = save_often(lambda held, number: save(held, folder))
    assert read_meanwhile(child, lambda held: load(held, folder), world_size) > 5
    assert [path.name for path in tmp_path.iterdir()] == ["ck"]


@pytest.mark.parametrize("world_size", [1, 2])
def test_the_latest(world_size: int, tmp_path: Path) -> None:
    """Of a run that keeps one."""
    Checkpoints(tmp_path, keep=1).save(state(1), 1)
    run = Checkpoints(tmp_path, keep=1)
    child = save_often(run.save)
    read = Checkpoints(tmp_path).load_latest
    assert read_meanwhile(child, read, world_size) > 5
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", f"step-{NUM_SAVES + 1}"]
