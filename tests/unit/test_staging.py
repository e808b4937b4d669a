"""What is kept of an input that a backend may change, and of collectives in flight."""

from __future__ import annotations

import math
import sys
import threading
import time
from collections.abc import Callable

import pytest
import torch

from shardfuse.comm import transport
from shardfuse.comm.transport import Completion, restore_if_changed


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_put_back(dtype: torch.dtype) -> None:
    """Any other bit is found, also where numbers are equal, and NaN is no change."""
    kept = torch.tensor([1.0, math.nan, -0.0, math.inf], dtype=dtype)
    input = kept.clone()
    assert not restore_if_changed(input, kept)
    input[2] = 0.0
    assert restore_if_changed(input, kept)
    assert math.copysign(1.0, float(input[2])) == -1.0
    assert not restore_if_changed(input, kept)


class Work:
    """A work of which a signal's handler runs while it is waited for."""

    def __init__(self, done: list[str], name: str, handler: Callable[[], object] = int) -> None:
        self.done, self.name, self.handler = done, name, handler

    def wait(self) -> None:
        self.done.append(self.name)
        self.handler()


def test_a_handler_waits_for_what_is_waited_for() -> None:
    """It has the result, each work is waited for once, and the outer wait goes on."""
    done: list[str] = []
    seen: list[list[str] | None] = []
    completion: Completion[list[str]] = Completion(
        lambda: list(done),
        [Work(done, "a", lambda: seen.append(completion.wait())), Work(done, "b")],
    )
    assert completion.wait() == ["a", "b"]
    assert seen == [["a", "b"]]
    assert done == ["a", "b"]


def test_only_works_of_torch_are_kept() -> None:
    """Others hold memory of peers and tensors, for as long as the process would live."""
    before = len(transport._unfinished)
    for are_of_torch in (False, True):
        Completion(list, [Work([], "a")], are_of_torch=are_of_torch)
        assert len(transport._unfinished) == before + are_of_torch
    transport._unfinished.pop()


def test_threads_get_the_gil_before_the_interpreter_ends() -> None:
    """A thread of gloo that waited for it at the end would abort the process."""
    seen: list[int] = []

    def take_gil() -> None:
        time.sleep(0.01)
        seen.append(1)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000.0)
    try:
        thread = threading.Thread(target=take_gil)
        thread.start()
        end = time.perf_counter() + 0.5
        while time.perf_counter() < end:  # the thread's sleep ends meanwhile
            pass
        assert not seen
        kept, transport._unfinished[:] = transport._unfinished[:], []
        transport._release_unfinished()
        transport._unfinished[:] = kept
        assert seen
    finally:
        sys.setswitchinterval(interval)
        thread.join()
