"""DDP kept: what a rank's memory grows by, as the system counts it."""

from __future__ import annotations

import ctypes
import gc
from pathlib import Path

import pytest
import torch
from torch import nn

from shardfuse import ShardedAdamW
from shardfuse.engine import kernels as engine
from tests.distributed.test_partitioned_memory import _M_MMAP_THRESHOLD, resident
from tests.support.harness import run_procs, run_threads

pytestmark = pytest.mark.timeout(300)


def train(width: int, depth: int, bucket_view: bool) -> int:
    """Train for two steps under DDP; return the parameters' bytes."""
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(depth)))
    wrapped = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=bucket_view)
    sharding = {"grads_are_reduced": True, "kernel": "eager", "bucket_cap_mb": 4}
    optimizer = ShardedAdamW(model.parameters(), sharding=sharding)
    for _ in range(2):
        wrapped(torch.ones(2, width)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return sum(param.nbytes for param in model.parameters())


def grown(bucket_view: bool) -> float:
    """Return by how much the peak has grown, in P, for a model of 64 MiB."""
    # Freed pieces go back to the system at once, as in test_partitioned_memory.py.
    ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 128 << 10)
    train(64, 4, bucket_view)  # what libraries load and keep
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    before = resident("VmRSS")
    nbytes = train(512, 64, bucket_view)
    return (resident("VmHWM") - before) / nbytes


@pytest.mark.gloo_only("the stand-in copies what it carries")
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="only Linux tells the peak")
@pytest.mark.parametrize("bucket_view", [False, True])
def test_no_copy_of_the_gradients(bucket_view: bool) -> None:
    """Parameters, gradients, DDP's buckets and half of two moments; 0.5 more were gradients."""
    held = 1 + 1 + (not bucket_view) + 2 / 2
    for found in run_procs(2, grown, bucket_view, timeout=200):
        assert held < found <= held + 0.3


def clear_after_compiling(calls: list[None]) -> None:
    param = nn.Parameter(torch.ones(5000))
    optimizer = ShardedAdamW([param], sharding={"kernel": "compile"})
    expected = 0
    for step in range(3):
        param.grad = torch.ones(5000)
        optimizer.step()
        assert len(calls) == expected
        optimizer.zero_grad()
        expected = 1
        assert len(calls) == expected, step


def test_freed_memory_is_given_back_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """When gradients are cleared after a compilation, and not in the steps that follow."""
    calls: list[None] = []
    monkeypatch.setattr(engine, "return_freed_memory", lambda: calls.append(None))
    run_threads(1, clear_after_compiling, calls)
