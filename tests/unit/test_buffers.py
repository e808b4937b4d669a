"""Where large buffers lie, and what the kernel is told of them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from shardfuse.buffers import zeros

CPU = torch.device("cpu")
LARGE = 4 << 20
"""Elements of a buffer that is large."""


@pytest.mark.parametrize("numel", [0, 5, LARGE, LARGE + 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_zeros(numel: int, dtype: torch.dtype) -> None:
    """Contiguous zeros of the length asked for."""
    buffer = zeros(numel, CPU, dtype)
    assert buffer.shape == (numel,)
    assert buffer.dtype == dtype
    assert buffer.is_contiguous()
    assert not buffer.any()


def test_zeros_of_used_memory() -> None:
    """Pages are dropped, and what is in front of the first and behind the last is written."""
    for numel in (LARGE, LARGE + 3, LARGE + 5000):
        used = [torch.ones(LARGE // 4) for _ in range(16)]
        del used
        assert not zeros(numel, CPU, torch.float32).any()


def test_large_buffers_do_not_compete() -> None:
    """Addresses of any 16 in a row differ, modulo 2**18, wherever the allocator puts them."""
    buffers = []
    others = []
    for index in range(16):
        others.append(torch.empty(LARGE + 5000 * index))
        buffers.append(zeros(LARGE, CPU, torch.float32))
    places = sorted(buffer.data_ptr() % (1 << 18) for buffer in buffers)
    assert places == [index << 14 for index in range(16)]


@pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="no huge pages in this kernel"
)
def test_large_buffers_may_have_huge_pages() -> None:
    """The mapping around a large buffer has the flag hg, which madvise() sets."""
    buffer = zeros(LARGE, CPU, torch.float32)
    middle = buffer.data_ptr() + buffer.nbytes // 2
    flags = None
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split()[0]
        if not first.endswith(":"):
            start, stop = (int(end, 16) for end in first.split("-"))
            inside = start <= middle < stop
        elif inside and first == "VmFlags:":
            flags = line.split()[1:]
    assert flags is not None
    assert "hg" in flags


def test_without_madvise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the system has no such call, buffers are made all the same."""
    monkeypatch.setattr(sys.modules["shardfuse.buffers"], "_madvise", None)
    assert not zeros(LARGE, CPU, torch.float32).any()
