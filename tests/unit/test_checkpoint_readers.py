"""Another process loads while one saves, replaces and removes: old or new, never of two saves."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardfuse import ShardedAdamW
from shardfuse.checkpoint import Checkpoints, folder, load, save
from tests.support.harness import run_threads

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.cpu_only("a child of a process has none of the device's threads"),
]

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


SAVES_PER_LOAD = 5
"""How many times the other process saves, at most, while one load is under way.

Fewer than the times that a load starts again: on a busy machine it would not end otherwise.
"""


@contextlib.contextmanager
def saving_often(write: Callable[[dict[str, Any], int], None]) -> Iterator[Callable[[], bool]]:
    """Save many times in a forked process; yield the function to call after each load.

    It returns whether more saves may follow.
    """
    num_loads = ctypes.c_int64.from_buffer(mmap.mmap(-1, 8))  # shared with the child
    child = os.fork()
    if not child:
        status = 1
        try:
            held = state(1)
            seen, num_saves = 0, 0
            for number in range(2, NUM_SAVES + 2):
                while num_saves == SAVES_PER_LOAD and num_loads.value == seen:
                    time.sleep(0.001)
                if num_loads.value != seen:
                    seen, num_saves = num_loads.value, 0
                fill(held, number)
                write(held, number)
                num_saves += 1
            status = 0
        finally:
            os._exit(status)
    is_ended = False

    def goes_on() -> bool:
        nonlocal is_ended
        num_loads.value += 1
        pid, status = os.waitpid(child, os.WNOHANG)
        is_ended = pid != 0
        assert status == 0, "the process that saves has failed"
        return not is_ended

    try:
        yield goes_on
    finally:
        if not is_ended:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def read_meanwhile(
    write: Callable[[dict[str, Any], int], None],
    read: Callable[[dict[str, Any]], object],
    world_size: int,
) -> None:
    """Load until the process that saves has ended. No load may fail or give a mixture."""
    newest, num_loads = 0.0, 0

    def one() -> set[float]:
        held = state(-1)
        read(held)
        dist.barrier()
        return values_of(held)

    with saving_often(write) as goes_on:
        while True:
            found = set[float]().union(*run_threads(world_size, one))
            assert len(found) == 1, f"a mixture of {found}"
            assert max(found) >= newest, "an older one than before"
            newest = max(found)
            num_loads += 1
            if not goes_on():
                break
    assert num_loads >= NUM_SAVES // SAVES_PER_LOAD - 1  # some saves come before the first load
    held = state(-1)
    read(held)
    assert held["number"] == NUM_SAVES + 1


@pytest.mark.parametrize("world_size", [1, 2])
def test_by_name(world_size: int, tmp_path: Path) -> None:
    folder = tmp_path / "ck"
    save(state(1), folder)
    read_meanwhile(
        lambda held, number: save(held, folder), lambda held: load(held, folder), world_size
    )
    assert [path.name for path in tmp_path.iterdir()] == ["ck"]


@pytest.mark.parametrize("world_size", [1, 2])
def test_the_latest(world_size: int, tmp_path: Path) -> None:
    """Of a run that keeps one."""
    Checkpoints(tmp_path, keep=1).save(state(1), 1)
    run = Checkpoints(tmp_path, keep=1)
    read_meanwhile(run.save, Checkpoints(tmp_path).load_latest, world_size)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", f"step-{NUM_SAVES + 1}"]


def test_a_listing_that_misses_both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder is no snapshot: while one name goes and another comes, neither may be listed."""
    Checkpoints(tmp_path).save(state(3), 3)
    listings, list_steps = [0], folder.broadcast_steps

    def listed(*args: Any) -> list[int]:
        listings[0] += 1
        return [] if listings[0] == 1 else list_steps(*args)

    monkeypatch.setattr(folder, "broadcast_steps", listed)
    held = state(-1)
    assert Checkpoints(tmp_path).load_latest(held) == 3
    assert values_of(held) == {3.0}
    assert listings == [2]
