"""No garbage collection in calls that allocate several objects per tensor; as before after them."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from shardfuse import ShardedAdam
from shardfuse.checkpoint import load, save

pytestmark = pytest.mark.fast


@pytest.fixture
def collections() -> Iterator[list[int]]:
    """The generations that were collected; a young one is due after ten objects."""
    found: list[int] = []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            found.append(info["generation"])

    thresholds = gc.get_threshold()
    gc.callbacks.append(note)
    gc.set_threshold(10, 10, 10)
    yield found
    gc.set_threshold(*thresholds)
    gc.callbacks.remove(note)
    gc.enable()


def make() -> tuple[torch.nn.Module, ShardedAdam]:
    model = torch.nn.Sequential(*[torch.nn.Linear(2, 2) for _ in range(20)])
    return model, ShardedAdam(model.named_parameters(), lr=0.1)


def counted(collections: list[int], call: Any) -> int:
    """Return the number of collections in a call."""
    gc.collect()
    collections.clear()
    call()
    return len(collections)


@pytest.mark.parametrize("is_enabled", [True, False])
def test_saves_and_loads(is_enabled: bool, tmp_path: Path, collections: list[int]) -> None:
    """Almost none, and the collector is as the program had it, after an error, too."""
    model, optimizer = make()
    state = {"model": model, "optimizer": optimizer}
    if not is_enabled:
        gc.disable()
    assert counted(collections, lambda: save(state, tmp_path / "saved")) < 5
    assert gc.isenabled() == is_enabled
    assert counted(collections, lambda: load(state, tmp_path / "saved")) < 5
    assert gc.isenabled() == is_enabled
    with pytest.raises(Exception, match="no checkpoint"):
        load(state, tmp_path / "nothing")
    assert gc.isenabled() == is_enabled


def test_construction(collections: list[int]) -> None:
    """Fewer collections than parameters: only what comes before the layout is collected."""
    params = [torch.nn.Parameter(torch.zeros(2)) for _ in range(2000)]
    assert counted(collections, lambda: ShardedAdam(params, lr=0.1)) < len(params) / 10
    assert gc.isenabled()
