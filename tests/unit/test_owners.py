"""Looking through all objects of a process does no harm to its other threads."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Iterator

import pytest
from torch import nn

from shardfuse.engine.ddp import Owners


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
    roots = [Owners(list(model.parameters())).roots() for _ in range(20)]
    is_over.set()
    thread.join()
    assert made
    assert not errors
    assert all(found == [model] for found in roots)
