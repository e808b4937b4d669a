"""Fixtures every test relies on."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch

from tests.support.tiers import EXHAUSTIVE, FAST


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    # Ranks are threads or processes of one machine: each one gets a single core.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put tests into their tiers, before those that were not asked for are left out."""
    for item in items:
        if FAST.search(item.nodeid):
            item.add_marker("fast")
        if EXHAUSTIVE.search(item.nodeid):
            item.add_marker("exhaustive")


def pytest_collection_finish() -> None:
    """Leave what was imported and collected out of every later garbage collection."""
    gc.collect()
    gc.freeze()
