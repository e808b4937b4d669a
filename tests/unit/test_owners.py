"""Looking through all objects of a process: no harm to its other threads, and none in a step."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import shardfuse
from shardfuse.engine import ddp
from shardfuse.engine.ddp import ModuleWatch, Owners
from tests.support.harness import run_procs


@pytest.fixture
def _busy() -> Iterator[None]:
    """Have threads take turns all the time."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    gc.unfreeze()  # what may have been frozen for speed
    yield
    sys.setswitchinterval(interval)
    gc.freeze()


@pytest.mark.usefixtures("_busy")
def test_a_thread_that_makes_tuples() -> None:
    """Python ends it with a SystemError if anybody refers to a tuple that is not finished."""
    model, errors, is_over = (
        nn.Sequential(nn.Linear(2, 2)),
        list[BaseException](),
        threading.Event(),
    )
    made = 0

    def make() -> None:
        nonlocal made
        while not is_over.is_set():
            try:
                made += len(tuple(number for number in range(200)))
            except SystemError as error:
                errors.append(error)

    thread = threading.Thread(target=make)
    thread.start()
    roots = [Owners(list(model.parameters())).roots for _ in range(20)]
    is_over.set()
    thread.join()
    assert made
    assert not errors
    assert all(found == [model] for found in roots)


def add_and_drop(model: nn.Module) -> None:
    """Build a part of ``model``, and drop it again."""
    model.part = nn.Linear(1, 1)
    model.register_parameter("scale", nn.Parameter(torch.ones(1)))
    del model.part, model.scale


def watch_and_note(watch: ModuleWatch) -> None:
    watch.note(nn.Linear(1, 1))


def keep_buffers(_: None) -> None:
    ddp.ModuleBuffers(None, torch.device("cpu")).add([])


def look_at(model: nn.Module) -> None:
    assert Owners([], [model]).roots == []
    owners = Owners([torch.ones(1)], [model])
    owners._fsdps = [model]
    assert owners.sharded_by() is None


LOOKS = {
    "children": (lambda: nn.Sequential(*map(nn.Identity, range(500))), add_and_drop, look_at),
    "noted modules": (lambda: ModuleWatch(MODULES), watch_and_note, ModuleWatch.modules),
    "buffers": (lambda: None, keep_buffers, lambda _: ddp.buffers_of_all()),
}
MODULES = [nn.Identity() for _ in range(500)]


@pytest.mark.usefixtures("_busy")
@pytest.mark.parametrize("kind", LOOKS)
def test_a_thread_that_builds_a_model(kind: str) -> None:
    """Python ends a loop over a dict or a set with a RuntimeError once it has grown."""
    build, change, look = LOOKS[kind]
    looked_at, is_over = build(), threading.Event()
    kept = [ddp.ModuleBuffers(None, torch.device("cpu")) for _ in range(500 * (kind == "buffers"))]
    for buffers in kept:
        buffers.add([])
    num_changes = 0

    def run() -> None:
        nonlocal num_changes
        while not is_over.is_set():
            change(looked_at)
            num_changes += 1

    thread = threading.Thread(target=run)
    thread.start()
    try:
        while num_changes < 200:
            look(looked_at)
    finally:
        is_over.set()
        thread.join()


def step_without_scan(is_by_hand: bool) -> int:
    """Return how often the first two steps looked through all objects."""
    model = nn.Linear(4, 4)
    optimizer = shardfuse.ShardedAdam(model.parameters(), lr=0.1)
    wrapper = nn.Sequential(model)
    counts = [0]

    def scan(*bases: type) -> list[object]:
        counts[0] += 1
        return []

    ddp._instances = scan
    for _ in range(2):
        if is_by_hand:
            model.weight.grad, model.bias.grad = torch.ones(4, 4), torch.ones(4)
        else:
            wrapper(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return counts[0]


@pytest.mark.parametrize("is_by_hand", [True, False])
def test_the_first_step_does_not_scan_the_heap(is_by_hand: bool) -> None:
    assert run_procs(2, step_without_scan, is_by_hand) == [0, 0]


def late_wrapper() -> list[bool]:
    model = nn.Linear(2, 2)
    params = list(model.parameters())
    watch = ModuleWatch([model])
    inner = nn.Sequential(model)
    found = [Owners(params, watch.modules()).roots == [inner]]
    wrapped = DistributedDataParallel(inner)
    owners = Owners(params, watch.modules())
    found += [owners.roots == [wrapped], owners.is_averaged()]
    other = nn.Module()
    other.tied = model.weight
    found.append(other in Owners(params, watch.modules()).roots)
    return found


def test_wrappers_of_later_are_seen() -> None:
    assert run_procs(2, late_wrapper) == [[True] * 4] * 2


def test_a_watch_keeps_nothing_alive() -> None:
    gc.collect()  # of optimizers that earlier tests have dropped
    model, num_before = nn.Linear(2, 2), len(ddp._watches)
    watch = ModuleWatch([model])
    parent = nn.Sequential(model)
    assert watch.modules() == [model, parent]
    del model, parent
    gc.collect()
    assert watch.modules() == []
    for _ in range(100):  # an optimizer that never steps, beside models that come and go
        nn.Linear(2, 2)
    gc.collect()
    assert not watch._by_id
    del watch
    assert len(ddp._watches) == num_before
