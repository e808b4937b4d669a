"""Copies of live memory for an asynchronous save: how many, when, and what is left of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from shardfuse.checkpoint import copies as copies_module
from shardfuse.checkpoint.copies import DeferredCopies, HostBuffers

CPU = torch.device("cpu")
pytestmark = pytest.mark.cpu_only("the stand-in's are in test_stand_in_npu.py")


def cut(arena: Tensor, num: int, copies: DeferredCopies) -> list[Tensor]:
    """Register ``num`` equal fragments of ``arena``, the last first, each but for some padding."""
    fragments = [part[:-3] for part in arena.chunk(num)]
    for index in reversed(range(num)):
        copies.add((arena.data_ptr(), index), fragments[index])
    copies.begin(CPU, HostBuffers())
    return fragments


@pytest.fixture
def num_copies(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Elements of each copy that is made."""
    made: list[int] = []
    copy = torch.Tensor.copy_

    def counted(self: Tensor, *args: Any, **options: Any) -> Tensor:
        made.append(self.numel())
        return copy(self, *args, **options)

    monkeypatch.setattr(torch.Tensor, "copy_", counted)
    return made


@pytest.mark.parametrize("num", [1, 8, 512])
def test_one_copy_of_an_arena(num: int, num_copies: list[int]) -> None:
    """Whatever the number of its fragments; what was live at the copy is what is taken."""
    arena, copies = torch.arange(8192.0), DeferredCopies()
    fragments = cut(arena, num, copies)
    before = [fragment.clone() for fragment in fragments]
    copies.copy_pending()
    arena.fill_(-1.0)
    assert num_copies == [8189]
    for index, value in enumerate(before):
        assert torch.equal(copies.take((arena.data_ptr(), index)), value)
    assert copies.peak_nbytes == 4 * 8189
    assert copies._nbytes == 0  # nothing is held that was taken


def test_large_arenas_are_cut(num_copies: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Between fragments, so that on the CPU a piece is freed before the next is copied."""
    monkeypatch.setattr(copies_module, "_RANGE_NBYTES", 4 * 2048)
    arena, copies = torch.arange(8192.0), DeferredCopies()
    cut(arena, 16, copies)
    for index in range(16):
        copies.take((arena.data_ptr(), index))
    assert num_copies == [2045] * 4
    assert copies.peak_nbytes == 4 * 2045


def test_a_peers_shard_is_not_copied(num_copies: list[int]) -> None:
    """Shards of one buffer are a piece each, also with what lies right before them."""
    buffer, copies = torch.arange(4096.0), DeferredCopies()
    for start in (512, 2560):
        copies.add(start, buffer[start : start + 1024])
    copies.add("int", buffer.view(torch.int32)[3584:])
    copies.add("transposed", buffer[1536:2560].view(32, 32).t()[:, 16:])
    copies.begin(CPU, HostBuffers())
    assert torch.equal(copies.take("transposed"), buffer[1536:2560].view(32, 32).t()[:, 16:])
    copies.copy_pending()
    assert sorted(num_copies) == [512, 1024, 512 + 1024]  # of int32; the first; the rest


def test_close_drops_what_is_left(num_copies: list[int]) -> None:
    """As after an error of the file system: a later step() copies nothing."""
    arena, copies = torch.arange(8192.0), DeferredCopies()
    cut(arena, 8, copies)
    copies.close()
    copies.copy_pending()
    assert num_copies == []
    with pytest.raises(KeyError):
        copies.take((arena.data_ptr(), 0))


def test_buffers_are_used_again() -> None:
    """Those of the last save only, and one for each tensor."""
    buffers = HostBuffers()
    first = [buffers.take(torch.empty(n)) for n in (3, 3, 5)]
    buffers.keep(first)
    again = [buffers.take(torch.empty(n)) for n in (3, 5, 3, 5)]
    assert {t.data_ptr() for t in again[:3]} == {t.data_ptr() for t in first}
    assert again[3].data_ptr() not in {t.data_ptr() for t in first}
    buffers.keep(again[:1])
    assert buffers.take(torch.empty(3)) is again[0]
    assert buffers.take(torch.empty(5)) is not again[1]
