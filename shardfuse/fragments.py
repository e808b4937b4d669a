"""State in (param, element range) coordinates, which do not depend on the world size.

Two forms. `gather` makes ordinary full tensors, bucket by bucket, for torch-format dicts.
`FragmentTensor` makes nothing: it tells torch.distributed.checkpoint where this rank's fragments
lie in each parameter, so that saving writes every fragment once and loading reads only what
overlaps.

[Note: whom torch asks] The functions of torch.distributed.checkpoint.state_dict take what
``optimizer.state_dict()`` returns, and do not say what they were asked for: with
``full_state_dict`` whole tensors, else this rank's parts. They gather ShardedTensors and DTensors,
which cannot have the bounds of our fragments. ``asked_by_torch`` therefore looks for their frame on
the stack, which tells a collective call of theirs from a user's, too. ``is_stateful_of_torch`` does
the same for ``torch.distributed.checkpoint.save({"optimizer": optimizer})``, and load().
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
        everyone = torch.empty(bucket.numel, dtype=arena.data.dtype, device=arena.data.device)
        comm.all_gather(everyone, arena.view(bucket)).wait()
        if not keep:
            continue
        for slot in flat.slots:
            start = max(slot.start, bucket.start)
            stop = min(slot.start + slot.numel, bucket.start + bucket.numel)
            if start < stop:
                part = everyone[start - bucket.start : stop - bucket.start]
                full[slot.param][start - slot.start : stop - slot.start] = part.cpu()
    return {
        slot.param: full[slot.param].as_strided(spec.shape, spec.stride)
        for slot, spec in zip(flat.slots, specs, strict=True)
        if slot.param in full
    }


def scatter(
    fragments: Iterable[Fragment], segment: Tensor, full: dict[int, Tensor], specs: dict[int, Any]
) -> None:
    """Copy this rank's fragments of full tensors, {param: tensor}, into an arena's ``segment``."""
    for fragment in fragments:
        spec = specs[fragment.param]
        ordered = torch.empty(spec.numel, dtype=full[fragment.param].dtype)
        ordered.as_strided(spec.shape, spec.stride).copy_(full[fragment.param])
        start = fragment.param_start
        stop = fragment.shard_start + fragment.numel
        segment[fragment.shard_start : stop] = ordered[start : start + fragment.numel].to(
            segment.device
        )


class Asked(NamedTuple):
    """What torch.distributed.checkpoint.state_dict was asked for; see its StateDictOptions."""

    full_state_dict: bool
    cpu_offload: bool


def asked_by_torch() -> Asked | None:
    """Return what torch's get_state_dict() and its like want, None where none of them is calling.

    See [Note: whom torch asks].
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if (
            frame.f_code.co_name == "_get_optim_state_dict"
            and frame.f_globals.get("__name__") == "torch.distributed.checkpoint.state_dict"
        ):
            info = frame.f_locals["info"]
            return Asked(info.full_state_dict, info.cpu_offload)
        frame = frame.f_back
    return None


def is_stateful_of_torch() -> bool:
    """Return whether the method that calls this was called by torch's save() or load() themselves.

    See [Note: whom torch asks].
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


class Piece(NamedTuple):
    """A box of a parameter's state, from ``offsets`` on."""

    offsets: tuple[int, ...]
    data: Tensor  # of the box's shape; may alias an arena, so that loading fills it in place


def flat_pieces(spec: ParamSpec, start: int, data: Tensor) -> list[Piece]:
    """Return elements from ``start`` on, in storage order, as a piece of a (numel,) tensor."""
    return [Piece((start,), data)]


def shaped_pieces(spec: ParamSpec, start: int, data: Tensor) -> list[Piece]:
    """Return elements from ``start`` on, in storage order, as pieces of the parameter's shape."""
    order = sorted(range(len(spec.shape)), key=lambda dim: -spec.stride[dim])
    inverse = sorted(range(len(order)), key=order.__getitem__)
    pieces = []
    used = 0
    for offsets, sizes in boxes([spec.shape[d] for d in order], start, start + data.numel()):
        part = data[used : used + math.prod(sizes)]
        used += part.numel()
        placed = tuple(offsets[position] for position in inverse)
        pieces.append(Piece(placed, part.view(sizes).permute(inverse)))
    return pieces


class FragmentTensor(torch.Tensor):
    """A tensor of which this rank holds only ``pieces``.

    It has the three methods by which torch.distributed.checkpoint saves and loads sharded tensors.
    It can be copied, to other devices too, and overwritten by another of the same pieces, which
    ``torch.distributed.checkpoint.async_save`` asks for; nothing else is defined on it. It is not
    pickled, because a file that one rank writes would lack the others' pieces.
    """

    pieces: Sequence[Piece]
    """What this rank holds: (offsets, tensor) pairs, in storage order."""

    @staticmethod
    def __new__(
        cls, shape: Sequence[int], dtype: torch.dtype, device: torch.device, pieces: Sequence[Piece]
    ) -> FragmentTensor:
        self: FragmentTensor = torch.Tensor._make_wrapper_subclass(
            cls, torch.Size(shape), dtype=dtype, device=device
        )
        self.pieces = pieces
        return self

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        ranges = [(piece.offsets, tuple(piece.data.shape)) for piece in self.pieces]
        return f"FragmentTensor(shape={tuple(self.shape)}, dtype={self.dtype}, pieces={ranges})"

    def has_pieces_of(self, other: FragmentTensor) -> bool:
        """Return whether both hold the same pieces of tensors of the same shape."""
        return self.shape == other.shape and [(p.offsets, p.data.shape) for p in self.pieces] == [
            (p.offsets, p.data.shape) for p in other.pieces
        ]

    def _mapped(self, function: Callable[[Tensor], Tensor]) -> FragmentTensor:
        """Return one of the same shape with ``function`` applied to every piece."""
        pieces = [Piece(piece.offsets, function(piece.data)) for piece in self.pieces]
        # Without a piece its dtype and device still follow from the function.
        nothing = torch.empty(0, dtype=self.dtype, device=self.device)
        sample = pieces[0].data if pieces else function(nothing)
        return FragmentTensor(self.shape, sample.dtype, sample.device, pieces)

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
            for piece in args[0].pieces:
                func(piece.data, *args[1:], **kwargs)
            return args[0]
        if func is _ATEN.new_empty.default and tuple(args[1]) == tuple(args[0].shape):
            return args[0]._mapped(lambda data: data.new_empty(data.shape, **kwargs))
        if func is _ATEN.copy_.default and all(isinstance(a, FragmentTensor) for a in args[:2]):
            return _overwrite(*args[:2])
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
        """Return what torch.distributed.checkpoint is to write from this rank."""
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        return [
            WriteItem(
                index=MetadataIndex(fqn, torch.Size(piece.offsets)),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=_chunk(piece),
                    properties=TensorProperties(dtype=self.dtype),
                    size=self.size(),
                ),
            )
            for piece in self.pieces
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """Return the ranges that this rank holds."""
        return [_chunk(piece) for piece in self.pieces]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        """Return the piece that starts at ``index.offset``."""
        for piece in self.pieces:
            if index.offset is not None and piece.offsets == tuple(index.offset):
                return piece.data
        raise ValueError(f"No piece of {index.fqn} starts at {index.offset}.")


_ATEN = torch.ops.aten
_SAME = (_ATEN.detach.default, _ATEN.alias.default)
_MAPPED = (
    _ATEN.clone.default,
    _ATEN._to_copy.default,
    _ATEN.empty_like.default,
    _ATEN.zeros_like.default,
)
_IN_PLACE = (_ATEN.zero_.default, _ATEN.fill_.Scalar)


def _overwrite(target: FragmentTensor, source: FragmentTensor) -> FragmentTensor:
    """Copy every piece of ``source`` into that of ``target``; ValueError if they hold others."""
    if not target.has_pieces_of(source):
        raise ValueError(
            f"{source} holds other pieces than {target}: it is of another rank, another world size "
            "or another model. Save and load it with torch.distributed.checkpoint, which gives "
            "every rank its pieces."
        )
    for piece, other in zip(target.pieces, source.pieces, strict=True):
        if piece.data.data_ptr() != other.data.data_ptr():
            piece.data.copy_(other.data)
    return target


def _reduce_between_processes(tensor: FragmentTensor) -> Any:
    """Pickle a FragmentTensor for another process of this rank, which may write the checkpoint."""
    return FragmentTensor, (tuple(tensor.shape), tensor.dtype, tensor.device, list(tensor.pieces))


ForkingPickler.register(FragmentTensor, _reduce_between_processes)


def _chunk(piece: Piece) -> ChunkStorageMetadata:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    return ChunkStorageMetadata(
        offsets=torch.Size(piece.offsets), sizes=torch.Size(piece.data.shape)
    )
