"""Storage: flat buffers and their views. Nothing here communicates."""

from __future__ import annotations

import ctypes
import itertools
import mmap
import operator
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from shardfuse.layout import Bucket, Flat, ParamSpec

_CPU = torch.device("cpu")
_STAGGER_NBYTES = 16 << 10
_LARGE_NBYTES = 4 << 20
_NUM_TURNS = 16
_turns = itertools.cycle(range(_NUM_TURNS))


def _find_madvise() -> Any:
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return None
    function = ctypes.CDLL(None).madvise
    function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    function.restype = ctypes.c_int
    return function


_madvise = _find_madvise()


def zeros(numel: int, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """Return (numel,) zeros at an address that does not conflict with other large buffers.

    A kernel reads and writes several buffers side by side. Where their addresses differ by a large
    power of two, as those of buffers of 2**k elements do, they compete for the same cache entries
    (in the way predictor of AMD's, it seems): Adam over 32 Mi elements took 28 ms in place of 17.
    On the CPU the addresses of large buffers therefore differ in their last 18 bits.

    Large buffers request huge pages, too: peers read such memory at 12 GB/s, in place of 5 to 8.
    They take memory page by page as they are written: a model that moves into one is not there
    twice, because each param is freed once it has moved.
    """
    if device.type != "cpu" or numel * dtype.itemsize < _LARGE_NBYTES:
        return torch.zeros(numel, dtype=dtype, device=device)
    period = _NUM_TURNS * _STAGGER_NBYTES
    memory = torch.empty(numel + period // dtype.itemsize, dtype=dtype, device=device)
    _make_zero(memory)
    # From the address itself: the allocator returns other addresses in each call.
    offset = (next(_turns) * _STAGGER_NBYTES - memory.data_ptr()) % period
    start = offset // dtype.itemsize
    return memory[start : start + numel]


def _make_zero(memory: torch.Tensor) -> None:
    """Fill ``memory`` with zeros; on Linux without a write, in huge pages.

    Pages of malloc() that are dropped are zero when they are read or written next.
    """
    if _madvise is not None:
        address, page = memory.data_ptr(), mmap.PAGESIZE
        start, stop = -(-address // page) * page, (address + memory.nbytes) // page * page
        _madvise(start, stop - start, mmap.MADV_HUGEPAGE)
        if _madvise(start, stop - start, mmap.MADV_DONTNEED) == 0:
            in_bytes = memory.view(torch.uint8)
            in_bytes[: start - address].zero_()
            in_bytes[stop - address :].zero_()
            return
    memory.zero_()


_PIECE_NBYTES = 16 << 20


def _count_owners(tensor: torch.Tensor) -> int:
    """Return how many tensors have the storage of ``tensor``, and one more for this look."""
    count = getattr(torch._C, "_storage_Use_Count", None)
    return sys.maxsize if count is None else int(count(tensor.untyped_storage()._cdata))


_SOLE_OWNER = _count_owners(torch.empty(1))


def move(source: torch.Tensor, target: torch.Tensor) -> None:
    """Copy ``source`` into ``target``; the caller frees ``source`` then.

    A large one on the CPU goes piece by piece, and on Linux the system gets the pages of each piece
    back, so that it is not there twice. Not if other code could read them later: another tensor has
    the storage, or torch did not allocate it, such as numpy's memory (storages that torch cannot
    resize).
    """
    is_large = _madvise and source.device.type == "cpu" and source.nbytes > _PIECE_NBYTES
    if (
        not is_large
        or source.stride() != target.stride()
        or not source.untyped_storage().resizable()
        or _count_owners(source) > _SOLE_OWNER
    ):
        target.copy_(source.detach())
        return
    step, page, numel = _PIECE_NBYTES // source.itemsize, mmap.PAGESIZE, source.numel()
    old = source.detach().as_strided((numel,), (1,))
    new = target.as_strided((numel,), (1,))
    for piece, place in zip(torch.split(old, step), torch.split(new, step), strict=True):
        place.copy_(piece)
        start, stop = piece.data_ptr(), piece.data_ptr() + piece.nbytes
        start, stop = -(-start // page) * page, stop // page * page
        _madvise(start, stop - start, mmap.MADV_DONTNEED)


def foreach_copy(sources: list[torch.Tensor], targets: list[torch.Tensor]) -> None:
    """Copy each source into its target, small ones by one call; the caller frees them then."""
    if len(sources) == 1:
        move(sources[0], targets[0])
        return
    with torch.no_grad():
        torch._foreach_copy_(targets, sources)


def return_freed_memory(device: torch.device = _CPU) -> None:
    """Return all free memory of glibc, or of a device's allocator, to the system.

    glibc keeps freed memory for later allocations. If small allocations lie between freed large
    ones, large allocations do not fit there again: they use new memory, and the old memory stays
    resident, unused. Allocators of devices do so, too. Elsewhere this has no effect.
    """
    if device.type not in ("cpu", "meta"):
        torch.get_device_module(device).empty_cache()
        return
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)


PLAIN_FORMATS = {-1: "UNDEFINED", 0: "NCHW", 1: "NHWC", 2: "ND", 27: "NDHWC", 30: "NCDHW"}
PLAIN_FORMATS |= {35: "NC", 47: "NCL"}
"""Members of torch_npu.Format in which sizes and strides describe the memory; not NZ, ..."""


def internal_format(tensor: torch.Tensor) -> int | None:
    """Return the number of the internal format in which an NPU holds ``tensor``, None if plain.

    (Not run on hardware.) A tensor on an NPU exists only if torch_npu is imported.
    """
    torch_npu = sys.modules.get("torch_npu")
    if torch_npu is None or tensor.device.type != "npu":
        return None
    number = int(torch_npu.get_npu_format(tensor))
    return None if number in PLAIN_FORMATS else number


def are_at(tensors: Iterable[torch.Tensor], addresses: Iterable[int]) -> bool:
    """Return whether each tensor begins at its address."""
    return all(map(operator.eq, map(torch.Tensor.data_ptr, tensors), addresses))


def has_own_storage(param: torch.Tensor) -> bool:
    """Return whether a parameter in a flat buffer has a storage to itself."""
    return param.device.type in ("cpu", "cuda") and param.numel() > 0


@dataclass(eq=False)
class FlatBuffer:
    """A 1-D tensor of ``flat.numel`` elements; all tensors that methods return alias it.

    Padding is zero at construction and stays outside every view.
    """

    flat: Flat
    data: torch.Tensor  # (flat.numel,) zeros at first; may be a slice of a larger tensor
    padding: float = 0.0  # or -0.0: the value that clear_padding() and join() write

    def view(self, position: int, spec: ParamSpec) -> torch.Tensor:
        """Return slot ``position`` shaped and strided like its parameter."""
        # as_strided() counts from the start of the storage, not of the tensor.
        start = self.data.storage_offset() + self.flat.slots[position].start
        return self.data.as_strided(spec.shape, spec.stride, start)

    def views(self, specs: Sequence[ParamSpec]) -> list[torch.Tensor]:
        """Return view() of every slot, with the parameters' ``specs`` by position."""
        first, as_strided = self.data.storage_offset(), self.data.as_strided
        return [
            as_strided(spec.shape, spec.stride, first + slot.start)
            for slot, spec in zip(self.flat.slots, specs, strict=True)
        ]

    def views_with_own_storage(self, specs: Sequence[ParamSpec]) -> list[torch.Tensor]:
        """Return views() as tensors that have a storage of their own each, over the same memory.

        Code that saves models works on storages: torch.save() writes the full storage of every
        tensor, safetensors and Accelerate refuse tensors that share one, copy.deepcopy() copies it.
        A storage per parameter over one allocation works with all of them, and costs nothing.
        Addresses do not change, reads and writes through the buffer have the same effect, and each
        storage keeps the allocation alive. Alternative: a hook that clones the tensors of a
        module's state_dict(). But submodules and lists of parameters have no hook, the clones
        double the model's memory, and ``model.state_dict()[name].copy_(value)`` would not write to
        the model.

        Out-of-tree devices (Ascend) have a storage class of their own, and a slice is of another
        class: there a parameter is a view. So is an empty one, which has no memory.
        """
        if not has_own_storage(self.data):
            return self.views(specs)
        storage, itemsize, empty = self.data.untyped_storage(), self.data.itemsize, self.data[:0]
        first, views = self.data.storage_offset(), []
        for slot, spec in zip(self.flat.slots, specs, strict=True):
            if not slot.numel:
                views.append(empty.as_strided(spec.shape, spec.stride, first + slot.start))
                continue
            start = (first + slot.start) * itemsize
            part = storage[start : start + slot.numel * itemsize]
            views.append(empty.new_empty(0).set_(part, 0, spec.shape, spec.stride))
        return views

    def join(self, first: int, tensors: Sequence[torch.Tensor]) -> None:
        """Write 1-D ``tensors`` into the slots from ``first`` on, and the padding between.

        They have their slots' sizes. For thousands of small tensors on the CPU, one cat() takes two
        thirds of the time of single copies, because each of these waits for memory.
        """
        last = self.flat.slots[first + len(tensors) - 1]
        parts = [*tensors, *tensors[1:]]
        parts[::2] = tensors
        parts[1::2] = self._gaps[first : first + len(tensors) - 1]
        start = self.flat.slots[first].start
        torch.cat(parts, out=self.data[start : last.start + last.numel])

    @cached_property
    def _gaps(self) -> list[torch.Tensor]:
        """Views of padding values, one for the gap between each slot and the next."""
        numels = [stop - start for start, stop in self._padding()[:-1]]
        longest = self.data.new_full((max(numels, default=0),), self.padding)
        views = {numel: longest[:numel] for numel in set(numels)}
        return [views[numel] for numel in numels]

    def _padding(self) -> list[tuple[int, int]]:
        """Return the (start, stop) of the padding behind each slot."""
        starts = [slot.start for slot in self.flat.slots[1:]] + [self.flat.numel]
        return [
            (slot.start + slot.numel, stop)
            for slot, stop in zip(self.flat.slots, starts, strict=True)
        ]

    def clear(self, position: int) -> None:
        """Fill a slot, and the padding behind it, with the padding's value."""
        slots = self.flat.slots
        stop = self.flat.numel if position + 1 == len(slots) else slots[position + 1].start
        self.data[slots[position].start : stop].fill_(self.padding)

    def set_padding(self, value: float) -> None:
        """Have ``value`` as the padding's, in a buffer to which nothing was written yet.

        The slots may get it, too: one kernel instead of one per slot. On the CPU they do if that
        writes to no more pages of memory, because a page takes memory when it is first written.
        """
        self.padding = value
        pages = self.data.nbytes // mmap.PAGESIZE
        if self.data.device.type != "cpu" or pages <= len(self.flat.slots):
            self.data.fill_(value)
        else:
            self.clear_padding()

    def clear_padding(self) -> None:
        """Set all elements outside the parameters to the padding's value."""
        for start, stop in self._padding():
            if start < stop:
                self.data[start:stop].fill_(self.padding)

    def bucket(self, bucket: Bucket) -> torch.Tensor:
        """Return ``bucket`` as a (bucket.numel,) tensor."""
        return self.data[bucket.start : bucket.start + bucket.numel]

    def shard(self, bucket: Bucket, rank: int) -> torch.Tensor:
        """Return ``rank``'s part of ``bucket`` as a (bucket.shard_numel,) tensor."""
        start = bucket.shard_start(rank)
        return self.data[start : start + bucket.shard_numel]


class CombinedBuffers:
    """Flat buffers in consecutive ranges of one 1-D tensor per dtype and call of add().

    ``combined`` lists these tensors: fp32 and fp16 of the first call, each None if it has no
    parameters; bf16 of the first call, if it has any; then those of later calls.
    """

    def __init__(self) -> None:
        self.combined: list[torch.Tensor | None] = []

    def add(self, flats: Sequence[Flat], device: torch.device) -> list[FlatBuffer]:
        """Allocate zeros for ``flats`` and return their buffers, in the same order."""
        combined: list[torch.Tensor | None] = []
        buffers: dict[int, FlatBuffer] = {}
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            members = [flat for flat in flats if flat.dtype == str(dtype).removeprefix("torch.")]
            if members:
                # Frozen flats last: the rest has the same offsets in parameters and in gradients.
                members.sort(key=lambda flat: flat.frozen)
                numel = sum(flat.numel for flat in members)
                base = zeros(numel, device, dtype)
                start = 0
                for flat in members:
                    data = base[start : start + flat.numel]
                    buffers[flat.index] = FlatBuffer(flat, data)
                    start += flat.numel
                combined.append(base)
            elif not self.combined and dtype != torch.bfloat16:
                combined.append(None)
        self.combined += combined  # nothing, where memory is short
        return [buffers[flat.index] for flat in flats]

    def extents(self) -> list[tuple[int, int]]:
        """Return the first and last address of every tensor."""
        tensors = [tensor for tensor in self.combined if tensor is not None]
        return [(t.data_ptr(), t.data_ptr() + max(t.nbytes, 1) - 1) for t in tensors]


class ShardArena:
    """This rank's shards of one state of a flat, (shard_numel,) per bucket, in bucket order.

    They have the dtype in which updates are computed.
    """

    data: torch.Tensor  # (flat.numel / world_size,)

    def __init__(self, flat: Flat, device: torch.device, dtype: torch.dtype) -> None:
        numel = sum(bucket.shard_numel for bucket in flat.buckets)
        self.data = zeros(numel, device, dtype)
        self._views: dict[int, torch.Tensor] = {}
        start = 0
        for bucket in flat.buckets:
            self._views[bucket.index] = self.data[start : start + bucket.shard_numel]
            start += bucket.shard_numel

    def view(self, bucket: Bucket) -> torch.Tensor:
        """Return the shard of ``bucket``, (bucket.shard_numel,)."""
        return self._views[bucket.index]


# Aliases of slots
#
# A gradient lies in a slot of a flat buffer, which the next backward writes again. So a slot is
# written only if no other code refers to the tensor in it; otherwise that tensor is copied out.


def _count_references(tensors: Sequence[torch.Tensor], position: int) -> int:
    # Python's count lacks, in older torch, a p.grad.
    return sys.getrefcount(tensors[position]) + int(
        tensors[position]._use_count()  # type: ignore[attr-defined]
    )


_SOLE_REFS = _count_references([torch.empty(0)], 0)


def has_external_refs(tensors: Sequence[torch.Tensor], position: int) -> bool:
    """Return whether anything but the list refers to one of its tensors."""
    return _count_references(tensors, position) > _SOLE_REFS


def _count_references_of_grad(param: torch.Tensor) -> int:
    return sys.getrefcount(param.grad) + int(param.grad._use_count())  # type: ignore[union-attr]


def _count_storage_references(param: torch.Tensor) -> int:
    assert param.grad is not None
    count = getattr(torch._C, "_storage_Use_Count", None)
    return sys.maxsize if count is None else int(count(param.grad.untyped_storage()._cdata))


def _counts_of_sole_owner() -> tuple[int, int]:
    """Return both counts, of a gradient that its parameter and one variable refer to."""
    param = torch.empty(1, requires_grad=True)
    param.grad = torch.empty(1)
    grad = param.grad
    counts = _count_references_of_grad(param), _count_storage_references(param)
    del grad
    return counts


_SOLE_GRAD_REFS, _SOLE_STORAGE_REFS = _counts_of_sole_owner()


def is_sole_owner(param: torch.Tensor) -> bool:
    """Return whether only ``param`` and one variable refer to ``param.grad``, and to its memory."""
    if _count_references_of_grad(param) > _SOLE_GRAD_REFS:
        return False
    return _count_storage_references(param) <= _SOLE_STORAGE_REFS


def detach_copy(grad: torch.Tensor) -> None:
    """Copy a view of a slot that is about to be overwritten to memory of its own.

    Under torch every gradient has its own memory, so callers may keep one past zero_grad(), or
    assign it to another parameter.
    """
    grad.data = grad.detach().clone()
