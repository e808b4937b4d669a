"""State in (param, element range) coordinates, which do not depend on the world size.

Two forms. `gather` makes ordinary full tensors, bucket by bucket, for torch-format dicts.
`FragmentTensor` makes nothing: it tells torch.distributed.checkpoint where this rank's fragments
lie in each parameter, so that saving writes every fragment once and loading reads only what
overlaps.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from shardfuse.buffers import ShardArena
from shardfuse.comm import Communicator
from shardfuse.layout import Flat, Fragment, ParamSpec

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
        comm.all_gather(everyone, arena.segment(bucket)).wait()
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


class Piece(NamedTuple):
    """Elements [start, start + data.numel()) of a parameter's state, in storage order."""

    start: int
    data: Tensor  # alias of an arena, so that loading fills it in place


class FragmentTensor(torch.Tensor):
    """A (numel,) tensor of which this rank holds only some ranges.

    It has the three methods by which torch.distributed.checkpoint saves and loads sharded tensors,
    and nothing else: no operation on it is defined.
    """

    pieces: Sequence[Piece]

    @staticmethod
    def __new__(cls, numel: int, dtype: torch.dtype, pieces: Sequence[Piece]) -> FragmentTensor:
        self: FragmentTensor = torch.Tensor._make_wrapper_subclass(cls, (numel,), dtype=dtype)
        self.pieces = pieces
        return self

    def __init__(self, numel: int, dtype: torch.dtype, pieces: Sequence[Piece]) -> None:
        super().__init__()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        ranges = [(piece.start, piece.start + piece.data.numel()) for piece in self.pieces]
        return f"FragmentTensor(numel={self.numel()}, dtype={self.dtype}, ranges={ranges})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return args[0]
        raise NotImplementedError(
            f"{func} is not defined on a FragmentTensor: it holds only this rank's part of an "
            "optimizer state. Save and load it with torch.distributed.checkpoint."
        )

    def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:
        """Return what torch.distributed.checkpoint is to write from this rank."""
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        return [
            WriteItem(
                index=MetadataIndex(fqn, torch.Size([piece.start])),
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
            if index.offset is not None and piece.start == index.offset[0]:
                return piece.data
        raise ValueError(f"No piece of {index.fqn} starts at {index.offset}.")


def _chunk(piece: Piece) -> ChunkStorageMetadata:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    return ChunkStorageMetadata(
        offsets=torch.Size([piece.start]), sizes=torch.Size([piece.data.numel()])
    )
