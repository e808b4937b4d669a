"""State in (param, element range) coordinates, which do not depend on the world size.

There are two forms. `gather` makes full tensors, bucket by bucket, for state dicts in torch's
format. `FragmentTensor` copies nothing: torch.distributed.checkpoint reads from it the offsets of
this rank's fragments in each parameter. So saving writes every fragment once, and loading reads
only the fragments that overlap.

[Note: calls by torch] The functions of torch.distributed.checkpoint.state_dict call
``optimizer.state_dict()`` without their options: with ``full_state_dict`` they need full tensors,
else this rank's fragments. They gather ShardedTensors and DTensors themselves, but these cannot
have the bounds of our fragments. ``torch_request`` therefore searches the stack for the frame of
such a function. The frame also distinguishes torch's collective call from a local one by the user.
``is_stateful_of_torch`` does the same for
``torch.distributed.checkpoint.save({"optimizer": optimizer})``, and load().
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from multiprocessing.reduction import ForkingPickler
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from shardfuse.buffers import ShardArena
from shardfuse.comm import Communicator
from shardfuse.layout import Flat, Fragment, ParamSpec
from shardfuse.runtime import caller

if TYPE_CHECKING:  # a second to import, and called only by torch.distributed.checkpoint itself
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
    from torch.distributed.checkpoint.planner import WriteItem


def gather(
    comm: Communicator, flat: Flat, arena: ShardArena, specs: Sequence[ParamSpec], *, keep: bool
) -> dict[int, Tensor]:
    """Return {param: full CPU tensor} of one state of ``flat``; empty where ``keep`` is False.

    Collective: one all-gather per bucket, with one bucket of extra memory.
    """
    full = {}
    if keep:
        full = {slot.param: torch.zeros(slot.numel, dtype=arena.data.dtype) for slot in flat.slots}
    for bucket in flat.buckets:
        gathered = torch.empty(bucket.numel, dtype=arena.data.dtype, device=arena.data.device)
        comm.all_gather(gathered, arena.view(bucket)).wait()
        if not keep:
            continue
        for slot in flat.slots:
            start = max(slot.start, bucket.start)
            stop = min(slot.start + slot.numel, bucket.start + bucket.numel)
            if start < stop:
                part = gathered[start - bucket.start : stop - bucket.start]
                full[slot.param][start - slot.start : stop - slot.start] = part.cpu()
    return {
        slot.param: full[slot.param].as_strided(spec.shape, spec.stride)
        for slot, spec in zip(flat.slots, specs, strict=True)
        if slot.param in full
    }


def scatter(
    fragments: Iterable[Fragment], shard: Tensor, full: dict[int, Tensor], specs: dict[int, Any]
) -> None:
    """Copy this rank's fragments of full tensors, {param: tensor}, into an arena's ``shard``."""
    for fragment in fragments:
        spec = specs[fragment.param]
        ordered = torch.empty(spec.numel, dtype=full[fragment.param].dtype)
        ordered.as_strided(spec.shape, spec.stride).copy_(full[fragment.param])
        start = fragment.param_start
        stop = fragment.shard_start + fragment.numel
        shard[fragment.shard_start : stop] = ordered[start : start + fragment.numel].to(
            shard.device
        )


class StateDictRequest(NamedTuple):
    """Options of torch.distributed.checkpoint.state_dict; see its StateDictOptions."""

    full_state_dict: bool
    cpu_offload: bool


def torch_request() -> StateDictRequest | None:
    """Return the options of torch's get_state_dict() and its like; None if none of them calls.

    See [Note: calls by torch].
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if (
            frame.f_code.co_name == "_get_optim_state_dict"
            and frame.f_globals.get("__name__") == "torch.distributed.checkpoint.state_dict"
        ):
            info = frame.f_locals["info"]
            return StateDictRequest(info.full_state_dict, info.cpu_offload)
        frame = frame.f_back
    return None


def is_stateful_of_torch() -> bool:
    """Return whether the method that calls this was called by torch's save() or load() themselves.

    See [Note: calls by torch].
    """
    asks = ("state_dict_saver", "state_dict_loader")
    asking = caller(2).f_globals.get("__name__")
    return asking in [f"torch.distributed.checkpoint.{n}" for n in asks]


def boxes(
    shape: Sequence[int], start: int, stop: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yield (offsets, sizes) of the boxes that elements [start, stop) of ``shape`` make up.

    Elements count in C order; so do the boxes. There are at most ``2 * len(shape) - 1``.
    """
    if not shape:
        yield (), ()
        return
    row = math.prod(shape[1:])
    first, last = -(-start // row), stop // row  # whole rows
    if first > last:  # a part of one row
        for offsets, sizes in boxes(shape[1:], start - last * row, stop - last * row):
            yield (last, *offsets), (1, *sizes)
        return
    if start < first * row:
        for offsets, sizes in boxes(shape[1:], start - (first - 1) * row, row):
            yield (first - 1, *offsets), (1, *sizes)
    if first < last:
        yield (first, *(0 for _ in shape[1:])), (last - first, *shape[1:])
    if last * row < stop:
        for offsets, sizes in boxes(shape[1:], 0, stop - last * row):
            yield (last, *offsets), (1, *sizes)


class Chunk(NamedTuple):
    """A box of a parameter's state at ``offsets``, as in torch.distributed.checkpoint."""

    offsets: tuple[int, ...]
    data: Tensor  # of the box's shape; may alias an arena, so that loading fills it in place


def flat_chunks(spec: ParamSpec, start: int, data: Tensor) -> list[Chunk]:
    """Return elements from ``start`` on, in storage order, as a chunk of a (numel,) tensor."""
    return [Chunk((start,), data)]


def shaped_chunks(spec: ParamSpec, start: int, data: Tensor) -> list[Chunk]:
    """Return elements from ``start`` on, in storage order, as chunks of the parameter's shape."""
    order = sorted(range(len(spec.shape)), key=lambda dim: -spec.stride[dim])
    inverse = sorted(range(len(order)), key=order.__getitem__)
    chunks = []
    used = 0
    for offsets, sizes in boxes([spec.shape[d] for d in order], start, start + data.numel()):
        part = data[used : used + math.prod(sizes)]
        used += part.numel()
        placed = tuple(offsets[position] for position in inverse)
        chunks.append(Chunk(placed, part.view(sizes).permute(inverse)))
    return chunks


class FragmentTensor(torch.Tensor):
    """A tensor of which this rank has only the chunks in ``pieces``.

    It has the three methods by which torch.distributed.checkpoint saves and loads sharded tensors.
    It can be copied, to other devices too, and overwritten by one with the same chunks, because
    ``torch.distributed.checkpoint.async_save`` does both. No other operation is defined. It cannot
    be pickled, because a file that one rank writes would lack the peers' chunks.
    """

    pieces: Sequence[Chunk]
    """This rank's chunks: (offsets, tensor) pairs, in storage order."""

    _by_offsets: dict[tuple[int, ...], Tensor]  # made where it is asked for

    @staticmethod
    def __new__(
        cls, shape: Sequence[int], dtype: torch.dtype, device: torch.device, pieces: Sequence[Chunk]
    ) -> FragmentTensor:
        self: FragmentTensor = torch.Tensor._make_wrapper_subclass(
            cls, torch.Size(shape), dtype=dtype, device=device
        )
        self.pieces = pieces
        self._by_offsets = {}
        return self

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        ranges = [(chunk.offsets, tuple(chunk.data.shape)) for chunk in self.pieces]
        return f"FragmentTensor(shape={tuple(self.shape)}, dtype={self.dtype}, pieces={ranges})"

    def has_same_chunks(self, other: FragmentTensor) -> bool:
        """Return whether both have the same chunks of tensors of the same shape."""
        return self.shape == other.shape and [(p.offsets, p.data.shape) for p in self.pieces] == [
            (p.offsets, p.data.shape) for p in other.pieces
        ]

    def _mapped(self, function: Callable[[Tensor], Tensor]) -> FragmentTensor:
        """Return one of the same shape with ``function`` applied to every chunk."""
        chunks = [Chunk(chunk.offsets, function(chunk.data)) for chunk in self.pieces]
        # Without a chunk, the dtype and device still follow from the function.
        nothing = torch.empty(0, dtype=self.dtype, device=self.device)
        sample = chunks[0].data if chunks else function(nothing)
        return FragmentTensor(self.shape, sample.dtype, sample.device, chunks)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _SAME:
            return args[0]
        if func in _MAPPED:
            return args[0]._mapped(lambda data: func(data, *args[1:], **kwargs))
        if func in _IN_PLACE:
            for chunk in args[0].pieces:
                func(chunk.data, *args[1:], **kwargs)
            return args[0]
        if func is _ATEN.new_empty.default and tuple(args[1]) == tuple(args[0].shape):
            return args[0]._mapped(lambda data: data.new_empty(data.shape, **kwargs))
        if func is _ATEN.copy_.default and all(isinstance(a, FragmentTensor) for a in args[:2]):
            return _copy_chunks(*args[:2])
        raise NotImplementedError(
            f"{func} is not defined on a FragmentTensor: it holds only this rank's part of an "
            "optimizer state. For whole tensors call consolidate_state_dict() on all ranks, or "
            "get_optimizer_state_dict() with full_state_dict=True. Where async_save() of an older "
            "torch got here, dcp.save() a copy.deepcopy() of the state dict in a thread."
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> FragmentTensor:
        if id(self) not in memo:
            memo[id(self)] = self._mapped(torch.clone)
        copied: FragmentTensor = memo[id(self)]
        return copied

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            "A FragmentTensor cannot be pickled: it holds only this rank's part of an optimizer "
            "state, and the file would lack the others'. Save it with torch.distributed.checkpoint "
            "on all ranks; for torch.save() on one, call consolidate_state_dict() on all ranks and "
            "state_dict() on that one, or get_optimizer_state_dict() with full_state_dict=True."
        )

    def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:
        """Return the write items of this rank's chunks, for torch.distributed.checkpoint."""
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        return [
            WriteItem(
                index=MetadataIndex(fqn, torch.Size(chunk.offsets)),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=_chunk_metadata(chunk),
                    properties=TensorProperties(dtype=self.dtype),
                    size=self.size(),
                ),
            )
            for chunk in self.pieces
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """Return the ranges of this rank's chunks."""
        return [_chunk_metadata(chunk) for chunk in self.pieces]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        """Return the data of the chunk that starts at ``index.offset``."""
        if not self._by_offsets:  # a shard along another dimension than the first has many pieces
            self._by_offsets = {chunk.offsets: chunk.data for chunk in self.pieces}
        offsets = () if index.offset is None else tuple(index.offset)
        if index.offset is None or offsets not in self._by_offsets:
            raise ValueError(f"No piece of {index.fqn} starts at {index.offset}.")
        return self._by_offsets[offsets]


_ATEN = torch.ops.aten
_SAME = (_ATEN.detach.default, _ATEN.alias.default)
_MAPPED = (
    _ATEN.clone.default,
    _ATEN._to_copy.default,
    _ATEN.empty_like.default,
    _ATEN.zeros_like.default,
)
_IN_PLACE = (_ATEN.zero_.default, _ATEN.fill_.Scalar)


def _copy_chunks(target: FragmentTensor, source: FragmentTensor) -> FragmentTensor:
    """Copy the chunks of ``source`` into those of ``target``; ValueError if they differ."""
    if not target.has_same_chunks(source):
        raise ValueError(
            f"{source} holds other pieces than {target}: it is of another rank, another world size "
            "or another model. Save and load it with torch.distributed.checkpoint, which gives "
            "every rank its pieces."
        )
    for chunk, other in zip(target.pieces, source.pieces, strict=True):
        if chunk.data.data_ptr() != other.data.data_ptr():
            chunk.data.copy_(other.data)
    return target


def _reduce_between_processes(tensor: FragmentTensor) -> Any:
    """Pickle a FragmentTensor for a process that writes this rank's part of a checkpoint."""
    return FragmentTensor, (tuple(tensor.shape), tensor.dtype, tensor.device, list(tensor.pieces))


ForkingPickler.register(FragmentTensor, _reduce_between_processes)


def _chunk_metadata(chunk: Chunk) -> ChunkStorageMetadata:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    return ChunkStorageMetadata(
        offsets=torch.Size(chunk.offsets), sizes=torch.Size(chunk.data.shape)
    )
