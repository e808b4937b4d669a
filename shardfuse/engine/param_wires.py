"""How updated parameters travel to the other ranks, and what is kept beside them for that.

[Note: rounded on the way] What every rank has is what has travelled, on its owner too. So where
fewer bits travel than an update has, all parameters are rounded by each step, and the owner keeps
what they lack: a master in fp32, or the difference to one. An edit of a parameter wins over a
master that it does not fit any more; a difference is added to whatever the parameter is.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from shardfuse.buffers import FlatBuffer, ShardArena, zeros
from shardfuse.layout import PART_NBYTES, Bucket, round_up
from shardfuse.quantize import BlockQuantizer

MASTER_DTYPE = torch.float32

MASTER = "param"
"""State key of the fp32 master of a parameter that is rounded."""

ERROR = "param_error"
"""State key of what a parameter lacks of its value, where differences travel."""

CHECK_NBYTES = 8


class DifferentParams(RuntimeError):
    """Parameters that were equal on all ranks no longer are; ``bucket`` holds them."""

    def __init__(self, bucket: Bucket) -> None:
        super().__init__(bucket)
        self.bucket = bucket


class ParamWire:
    """As they are: parameters that are updated in place, or rounded by who updates their master.

    Args:
        params: where all ranks' parameters of one flat lie.
        rank: rank in the shard group.
    """

    key: str | None = None
    """Under which ``arena`` is part of the state, if it is."""

    def __init__(self, params: FlatBuffer, rank: int) -> None:
        self._params, self._rank = params, rank
        self.arena: ShardArena | None = None
        """fp32, this rank's: what is kept beside the parameters, from allocate() on."""
        if params.data.dtype != MASTER_DTYPE:
            self.key = MASTER

    @property
    def keeps_arena(self) -> bool:
        """Whether there is one, once allocated."""
        return self.key is not None

    @property
    def nbytes(self) -> int:
        """Bytes of what parameters travel in, if not in their own memory."""
        return 0

    def allocate(self) -> None:
        """Make the arena that there is to be."""
        if self.keeps_arena and self.arena is None:
            flat = self._params.flat
            self.arena = ShardArena(flat, self._params.data.device, MASTER_DTYPE)
            self._fill(self.arena)

    def _fill(self, arena: ShardArena) -> None:
        for bucket in self._params.flat.buckets:
            arena.segment(bucket).copy_(self._shard(bucket))

    def _shard(self, bucket: Bucket) -> Tensor:
        return self._params.shard(bucket, self._rank)

    def settle(self) -> None:
        """Have the arena hold what is saved, whatever an error has interrupted."""

    def open(self, bucket: Bucket) -> tuple[Tensor, Tensor | None]:
        """Return (fp32 shard to update, low-precision shard for the result or None)."""
        shard = self._shard(bucket)
        return (shard, None) if self.arena is None else (self.arena.segment(bucket), shard)

    def close(self, bucket: Bucket) -> None:
        """Write the updated shard of ``bucket`` as it travels."""

    def sent(self, bucket: Bucket) -> Tensor:
        """Return what an all-gather of ``bucket`` fills, parts of all ranks in their order."""
        return self._params.bucket(bucket)

    def part(self, bucket: Bucket) -> Tensor:
        """Return this rank's part of sent(), where it lies."""
        whole = self.sent(bucket)
        numel = whole.numel() * bucket.shard_numel // bucket.numel
        return whole[self._rank * numel : (self._rank + 1) * numel]

    def unpack(self, bucket: Bucket) -> None:
        """Bring what has arrived to where parameters are read."""


class CastWire(ParamWire):
    """fp32 parameters in another dtype, from masters."""

    key = MASTER

    def __init__(self, params: FlatBuffer, rank: int, dtype: torch.dtype) -> None:
        super().__init__(params, rank)
        data = zeros(params.flat.numel, params.data.device, dtype)
        self._buffer = FlatBuffer(params.flat, data)

    @property
    def nbytes(self) -> int:
        return self._buffer.data.nbytes

    def open(self, bucket: Bucket) -> tuple[Tensor, Tensor | None]:
        """Return (master, None); edits of parameters are in it."""
        if self.arena is None:
            return self._shard(bucket), None
        shard, master = self._shard(bucket), self.arena.segment(bucket)
        # Rounded to what travels by close(), not by who updates: a compiled kernel that writes
        # both took five times as long.
        expected = self.part(bucket).copy_(master).to(shard.dtype)
        if shard.device.type != "cpu" or not _same_bits(expected, shard):
            edited = expected.view(torch.int32) != shard.view(torch.int32)
            torch.where(edited, shard, master, out=master)
        return master, None

    def close(self, bucket: Bucket) -> None:
        if self.arena is not None:
            self.part(bucket).copy_(self.arena.segment(bucket))

    def sent(self, bucket: Bucket) -> Tensor:
        return self._buffer.bucket(bucket)

    def unpack(self, bucket: Bucket) -> None:
        self._params.bucket(bucket).copy_(self.sent(bucket))


class DifferenceWire(ParamWire):
    """fp32 parameters as differences to what all ranks have, in few bits.

    Between steps the arena holds what each parameter lacks of its value; from open() to close()
    that value. A part has a checksum of the parameters that the difference is to, and padding.

    Args:
        params, rank: as of ParamWire.
        quantizer: makes the bits.
        has_feedback: whether what is rounded off goes into the next difference.
    """

    def __init__(
        self, params: FlatBuffer, rank: int, quantizer: BlockQuantizer, *, has_feedback: bool
    ) -> None:
        super().__init__(params, rank)
        self._quantizer = quantizer
        self._has_feedback = has_feedback
        self.key = ERROR if has_feedback else None
        self._open: set[int] = set()  # buckets of which the arena holds the values
        self._sent: dict[int, Tensor] = {}
        flat, start = params.flat, 0
        world_size = flat.buckets[0].numel // flat.buckets[0].shard_numel if flat.buckets else 1
        sizes = [world_size * self._part_nbytes(bucket) for bucket in flat.buckets]
        self._data = zeros(sum(sizes), params.data.device, torch.uint8)
        for bucket, size in zip(flat.buckets, sizes, strict=True):
            self._sent[bucket.index] = self._data[start : start + size]
            start += size

    def _part_nbytes(self, bucket: Bucket) -> int:
        nbytes = self._quantizer.nbytes(bucket.shard_numel) + CHECK_NBYTES
        return round_up(nbytes, PART_NBYTES)

    def _split(self, bucket: Bucket, part: Tensor) -> tuple[Tensor, Tensor]:
        """Return the codes and the checksum of a part."""
        num_codes = self._quantizer.nbytes(bucket.shard_numel)
        return part[:num_codes], part[num_codes : num_codes + CHECK_NBYTES]

    @property
    def keeps_arena(self) -> bool:
        return True

    @property
    def nbytes(self) -> int:
        return self._data.nbytes

    def _fill(self, arena: ShardArena) -> None:
        """Leave zeros: nothing has been rounded off."""

    def settle(self) -> None:
        for bucket in self._params.flat.buckets:
            if bucket.index in self._open and self.arena is not None:
                self.arena.segment(bucket).sub_(self._shard(bucket))
        self._open.clear()

    def open(self, bucket: Bucket) -> tuple[Tensor, Tensor | None]:
        if self.arena is None:
            return self._shard(bucket), None
        value = self.arena.segment(bucket)
        if bucket.index not in self._open:
            self._open.add(bucket.index)
            value.add_(self._shard(bucket))
        return value, None

    def close(self, bucket: Bucket) -> None:
        """Write the difference, and have this rank's own parameters be what others will have."""
        if self.arena is None:
            return
        value, shard = self.arena.segment(bucket), self._shard(bucket)
        codes, check = self._split(bucket, self.part(bucket))
        check.copy_(_checksum(shard))
        self._quantizer.encode(value - shard, codes)
        self._quantizer.add(codes, shard)
        value.sub_(shard)
        if not self._has_feedback:
            value.zero_()
        self._open.discard(bucket.index)

    def sent(self, bucket: Bucket) -> Tensor:
        return self._sent[bucket.index]

    def unpack(self, bucket: Bucket) -> None:
        """Add the differences of other ranks.

        Raises:
            DifferentParams: parameters here are not those that the differences are to.
        """
        whole = torch.split(self.sent(bucket), self._part_nbytes(bucket))
        parts = [self._split(bucket, part) for part in whole]
        shards = [self._params.shard(bucket, rank) for rank in range(len(parts))]
        others = [rank for rank in range(len(parts)) if rank != self._rank]
        for rank in others:
            if not torch.equal(parts[rank][1], _checksum(shards[rank])):
                raise DifferentParams(bucket)
        for rank in others:
            self._quantizer.add(parts[rank][0], shards[rank])


def _checksum(values: Tensor) -> Tensor:
    """Return the sum of the bits of ``values`` (n,), eight bytes a number, as bytes (8,)."""
    return values.view(torch.int64).sum().view(1).view(torch.uint8)


def _same_bits(one: Tensor, other: Tensor) -> bool:
    """Return whether fp32 tensors of a shard are the same; a NaN is itself, and -0.0 is not 0.0."""
    return torch.equal(one.view(torch.int64), other.view(torch.int64))


class ParamWireChoice(NamedTuple):
    """How fp32 parameters travel: in ``bits`` as differences, in ``dtype``, or as they are."""

    dtype: torch.dtype | None = None
    bits: int | None = None
    has_feedback: bool = True

    def of(self, params: FlatBuffer, rank: int) -> ParamWire:
        """Return how the parameters of a flat travel."""
        is_fp32 = params.data.dtype == MASTER_DTYPE
        if is_fp32 and self.bits is not None:
            quantizer = BlockQuantizer(self.bits)
            return DifferenceWire(params, rank, quantizer, has_feedback=self.has_feedback)
        if is_fp32 and self.dtype is not None:
            return CastWire(params, rank, self.dtype)
        return ParamWire(params, rank)
