"""What building takes: parameters move into flat buffers, and are not there twice for long."""

from __future__ import annotations

import ctypes
import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from shardfuse import ShardedAdam, ShardedSGD
from shardfuse import buffers as buffers_module
from tests.support import placing
from tests.support.harness import run_procs

pytestmark = pytest.mark.timeout(100)

_M_MMAP_THRESHOLD = -3
"""glibc's name of an option."""


def resident(field: str) -> int:
    """Return bytes of this process's memory, "VmRSS" or its peak "VmHWM"."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = [line for line in lines if line.startswith(f"{field}:")]
    return int(line.split()[1]) << 10


def grown(is_one: bool) -> float:
    """Return by how much building lets the peak of this process grow above the model, in P."""
    ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 128 << 10)  # as of a process that has freed none
    ShardedSGD([nn.Parameter(torch.ones(5))], lr=0.1)  # what libraries load
    model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(1 if is_one else 32)))
    if is_one:
        model[0].weight = nn.Parameter(torch.ones(1 << 15, 1 << 10))
    gc.collect()
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    ShardedSGD(model.named_parameters(), lr=0.1)
    nbytes = sum(param.nbytes for param in model.parameters())
    return (resident("VmHWM") - before) / nbytes


@pytest.mark.cpu_only("devices are below")
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="only Linux tells the peak")
@pytest.mark.parametrize("is_one", [False, True])
def test_a_model_is_not_there_twice(is_one: bool) -> None:
    """Of 128 MiB in tensors of 4, no more than three are; gradients take nothing before backward.

    Nor is one tensor of 128 MiB. Padding, huge pages and Python's own objects are in it.
    """
    (found,) = run_procs(1, grown, is_one)
    assert found <= (0.2 if is_one else 3 / 32)


@pytest.mark.cpu_only("about the host's memory")
@pytest.mark.parametrize("dim", [0, 1])
def test_a_large_tensor_keeps_its_values(dim: int) -> None:
    """It moves piece by piece; what else has its memory keeps the values, too."""
    value = torch.arange(9 << 20, dtype=torch.float32).view(1 << 10, -1).movedim(0, dim)
    lone = nn.Parameter(value.clone())
    array = value.numpy().copy()
    shared, foreign = nn.Parameter(value.clone()), nn.Parameter(torch.from_numpy(array))
    kept = shared.detach()
    ShardedSGD([lone, shared, foreign], lr=0.1)
    assert all(torch.equal(param, value) for param in (lone, shared, foreign, kept))
    assert torch.equal(torch.from_numpy(array), value)
    assert len({tensor.data_ptr() for tensor in (shared, kept)}) == 2


def lacking(monkeypatch: pytest.MonkeyPatch, num: int) -> None:
    """Have so many of the next large allocations find no memory."""
    zeros, calls = buffers_module.zeros, iter(range(num))

    def short(*args: Any) -> torch.Tensor:
        if next(calls, None) is not None:
            raise torch.OutOfMemoryError("out of memory")
        return zeros(*args)

    monkeypatch.setattr(buffers_module, "zeros", short)


def mixed() -> list[tuple[str, nn.Parameter]]:
    torch.manual_seed(0)
    tensors = [torch.randn(300, 200), torch.randn(64, 40).t(), torch.randn(7, dtype=torch.float16)]
    tensors += [torch.randn(()), torch.randn(0, 3), torch.randn(2, 3, 4, 5)]
    tensors[-1] = tensors[-1].to(memory_format=torch.channels_last)
    named = [(f"p{i}", nn.Parameter(placing.here(tensor))) for i, tensor in enumerate(tensors)]
    named[3][1].requires_grad_(False)
    return named


@pytest.mark.parametrize("num_failures", [1, 2])
def test_where_memory_is_short(num_failures: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parameters go through the host; if that is no help, they are what they were."""
    named = mixed()
    before = [param.detach().clone() for _, param in named]
    strides = [param.stride() for _, param in named]
    lacking(monkeypatch, num_failures)
    if num_failures == 2:
        with pytest.raises(torch.OutOfMemoryError):
            ShardedAdam(named)
    else:
        optimizer = ShardedAdam(named)
        for _, param in named[:2]:
            param.grad = torch.ones_like(param)
        optimizer.step()
        assert not torch.equal(named[0][1], before[0])
        del before[:2], named[:2], strides[:2]
    for (_, param), value, stride in zip(named, before, strides, strict=True):
        assert torch.equal(param, value)
        assert param.stride() == stride


@pytest.mark.skipif(not placing.on_device(), reason="the host's memory is looked at above")
def test_through_the_host_nothing_is_there_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without: old and new. Through the host: the larger of both."""
    device: Any = torch.npu  # type: ignore[attr-defined]
    peaks = []
    for num_failures in (0, 1):
        gc.collect()
        before = device.memory_allocated()
        named = [(f"p{i}", nn.Parameter(torch.ones(100_000))) for i in range(10)]
        nbytes = device.memory_allocated() - before
        for _, param in named:
            param.requires_grad_(False)
        lacking(monkeypatch, num_failures)
        device.reset_peak_memory_stats()
        ShardedSGD(named, lr=0.1)
        peaks.append((device.max_memory_allocated() - before) / nbytes)
        monkeypatch.undo()
        del named, param
    assert peaks == pytest.approx([2.0, 1.0], abs=0.01)


class Writes(TorchDispatchMode):
    """Lists operators that write to memory."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        if name.endswith("_") and name not in ("aten::set_", "aten::detach_"):
            self.names.append(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_of_building_do_not_grow_with_params(dtype: torch.dtype) -> None:
    """Up to 1 MiB of them: one copy, and one fill of all padding."""
    counts = []
    for num in (10, 1000):
        params = [nn.Parameter(placing.here(torch.ones(37, dtype=dtype))) for _ in range(num)]
        with Writes() as writes:
            ShardedAdam(params)
        counts.append(writes.names)
    assert counts[0] == counts[1]
    assert "aten::_foreach_copy_" in counts[0]
