"""Codecs: how gradients and parameters are encoded for a collective; 32, 16, 8 or 4 bits.

[Note: lossy parameters] All ranks, including the owner, use the decoded values. With a lossy codec
every step therefore rounds the parameters; the owner keeps an fp32 master, or the rounding error
(error feedback). If a parameter was edited, the edit replaces a master that it no longer matches;
a rounding error is added to the edited parameter.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

from shardfuse.buffers import FlatBuffer, ShardArena, zeros
from shardfuse.comm import Communicator
from shardfuse.comm.transport import BufferPool, Completion, Label, PartialSums
from shardfuse.layout import BLOCK, PART_NBYTES, Bucket, round_up
from shardfuse.runtime import copy_to_host

_HOST = ("cpu",)
"""Types of device whose results the host reads without a wait for earlier kernels."""

_TILE_BLOCKS = 128
"""Blocks encoded at a time on the host, so that temporaries stay in the cache."""

_NEGATIVE_ZERO = -(1 << 31)
"""The bits of -0.0 in fp32, the least number of 32 bits."""

_TINY = torch.finfo(torch.float32).tiny
"""Smaller scales have no reciprocal in fp32; they count as zero."""

MASTER_DTYPE = torch.float32

MASTER = "param"
"""State key of the fp32 master of a parameter that is rounded."""

ERROR = "param_error"
"""State key of the rounding error of a parameter that is sent as differences."""

CHECK_NBYTES = 8


class BlockQuantizer(NamedTuple):
    """``bits`` (8 or 4) an element, and an fp32 scale for each block of 512.

    The largest magnitude of a block becomes 127, or 7; other elements are rounded to the nearest
    step, halves to even, so that the error of an element is at most half of its block's scale. If
    an element is not finite, no element of its decoded block is. A block of -0.0 alone is decoded
    as -0.0; see [Note: absent gradients] in grads/full.py.

    On an accelerator the number of kernels depends on neither k nor n, and encode() makes fp32
    temporaries of all elements.
    """

    bits: int

    @property
    def _most(self) -> int:
        return (1 << (self.bits - 1)) - 1

    def nbytes(self, numel: int) -> int:
        """Return the bytes of ``numel`` encoded elements, which are whole blocks."""
        return numel * self.bits // 8 + numel // BLOCK * 4

    def part_nbytes(self, numel: int, num_more: int = 0) -> int:
        """Return the bytes of one rank's part and so many more, padded to an aligned end."""
        return round_up(self.nbytes(numel) + num_more, PART_NBYTES)

    def encode(self, values: Tensor, out: Tensor, factor: float | None = None) -> None:
        """Write parts ``values`` (k, n) times ``factor`` as bytes into ``out`` (k, nbytes(n))."""
        for part, scales, codes in self._tiles(values, out):
            rows = part.float()
            rows = rows if factor is None else rows * factor
            most = rows.abs().amax(-1)
            scale = most / self._most
            is_small = scale < _TINY
            scale.masked_fill_(is_small, 0.0)
            # On an accelerator always: the host would wait for the condition.
            if rows.device.type not in _HOST or (most == 0).any():
                scale.masked_fill_(rows.view(torch.int32).amax(-1) == _NEGATIVE_ZERO, -0.0)
            scales.copy_(scale)
            inverse = scale.reciprocal_().masked_fill_(is_small, 0.0)
            steps = (rows * inverse[..., None]).round_()
            if self.bits == 8:
                codes.view(torch.int8).copy_(steps)
            else:
                low, high = steps.to(torch.int8).add_(8).view(torch.uint8).chunk(2, dim=-1)
                torch.add(low, high, alpha=16, out=codes)

    def add(self, encoded: Tensor, into: Tensor) -> None:
        """Add decoded ``encoded`` (k, nbytes(n)) to fp32 ``into`` (k, n); equal on every rank."""
        for part, scales, codes in self._tiles(into, encoded):
            if self.bits == 8:
                steps = codes.view(torch.int8).float()
            else:
                steps = torch.cat([codes & 15, codes >> 4], dim=-1).float().sub_(8.0)
            part.add_(steps.mul_(scales[..., None]))

    def _tiles(self, values: Tensor, encoded: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield (rows (..., 512), their scales (...), their codes (..., bytes)) of parts.

        All scales come first in ``encoded``. On an accelerator there is one tile.
        """
        num_parts, num_blocks = len(values), values.shape[1] // BLOCK
        rows = values.view(num_parts, num_blocks, BLOCK)
        scales = encoded[:, : 4 * num_blocks].view(torch.float32)
        codes = encoded[:, 4 * num_blocks :].view(num_parts, num_blocks, -1)
        if values.device.type not in _HOST:
            yield rows, scales, codes
            return
        for part, start in product(range(num_parts), range(0, num_blocks, _TILE_BLOCKS)):
            tile = part, slice(start, start + _TILE_BLOCKS)
            yield rows[tile], scales[tile], codes[tile]


def _others(parts: Tensor, rank: int) -> list[Tensor]:
    """Return those of ``parts`` (world_size, n) before and after that of ``rank``, as (k, n)."""
    return [others for others in (parts[:rank], parts[rank + 1 :]) if len(others) > 0]


# Gradients


@dataclass(frozen=True)
class ReduceRequest:
    """One reduce-scatter of a bucket.

    Args:
        whole: its gradients (world_size * n,), not written until the reduce-scatter is complete.
        factor: multiplies them; None is 1.
        send_buffer: index of the buffer to send from, if ``whole`` itself is not sent.
        slot, label: as of Communicator.reduce_scatter().
        into: fp32 (n,) for the sum, or None.
    """

    whole: Tensor
    factor: float | None = None
    send_buffer: int = 0
    slot: int = 0
    label: Label | None = None
    into: Tensor | None = None


class GradCodec(ABC):
    """How the gradients of one flat are encoded and summed."""

    def factor_after_sum(self, num_summed: int) -> float | None:
        """Return the factor from the sum to the mean; None is 1."""
        return None if num_summed == 1 else 1.0 / num_summed

    @abstractmethod
    def launch(
        self, comm: Communicator, buffers: BufferPool, request: ReduceRequest
    ) -> Completion[PartialSums]:
        """Launch the reduce-scatter; its result are tensors (n,) that add up to this shard."""

    @abstractmethod
    def _message(self, comm: Communicator, bucket: Bucket) -> tuple[int, torch.dtype]:
        """Return the size and the dtype of the message that launch() sends of a bucket."""

    def post_receive(
        self, comm: Communicator, bucket: Bucket, where: Tensor, label: Label, slot: int
    ) -> None:
        """Post the receives of the bucket of that label ahead, on the device of ``where``."""
        numel, dtype = self._message(comm, bucket)
        like = torch.empty(1, dtype=dtype, device=where.device).expand(numel)
        comm.post_receive("reduce_scatter", like, label=label, slot=slot)


@dataclass(frozen=True)
class CastCodec(GradCodec):
    """In a dtype of torch's.

    Args:
        dtype: of the message.
        is_summed: whether a backend may sum in transit, in this dtype; else the receiver sums in
            fp32.
    """

    dtype: torch.dtype
    is_summed: bool = True

    def factor_after_sum(self, num_summed: int) -> float | None:
        return None if self.dtype == torch.float16 else super().factor_after_sum(num_summed)

    def launch(
        self, comm: Communicator, buffers: BufferPool, request: ReduceRequest
    ) -> Completion[PartialSums]:
        factor = request.factor
        if self.dtype == torch.float16:
            # Gradients are divided before the sum, which would overflow at 65504.
            factor = (1.0 if factor is None else factor) / comm.world.world_size
        send = self._encode(buffers, request, factor)
        into = request.into if self.dtype == torch.float32 else None
        return comm.reduce_scatter(
            send, into, slot=request.slot, label=request.label, is_summed=self.is_summed
        )

    def _encode(self, buffers: BufferPool, request: ReduceRequest, factor: float | None) -> Tensor:
        """Return the bucket times ``factor`` in this dtype; the bucket itself, if that is it."""
        whole = request.whole
        if factor is None and whole.dtype == self.dtype:
            return whole
        like = torch.empty(0, dtype=self.dtype, device=whole.device)
        send = buffers.get("send", request.send_buffer, whole.numel(), like)
        if factor is None:
            return send.copy_(whole)
        if self.dtype.itemsize > whole.dtype.itemsize:
            return send.copy_(whole).mul_(factor)
        return torch.mul(whole, factor, out=send)

    def _message(self, comm: Communicator, bucket: Bucket) -> tuple[int, torch.dtype]:
        return bucket.numel, self.dtype


@dataclass(frozen=True)
class QuantCodec(GradCodec):
    """In 8 or 4 bits, which no backend can sum; a rank's own part is not rounded.

    Blocks hold elements of one parameter each, so that an absent gradient is decoded as absent. The
    part for each rank is padded to an aligned start.
    """

    quantizer: BlockQuantizer

    def launch(
        self, comm: Communicator, buffers: BufferPool, request: ReduceRequest
    ) -> Completion[PartialSums]:
        parts = request.whole.view(comm.world_size, -1)
        numel = parts.shape[1]
        num_codes, nbytes = self.quantizer.nbytes(numel), self.quantizer.part_nbytes(numel)
        like = torch.empty(0, dtype=torch.uint8, device=parts.device)
        send = buffers.get("send", request.send_buffer, comm.world_size * nbytes, like)
        codes = send.view(comm.world_size, nbytes)[:, :num_codes]
        for values, out in zip(_others(parts, comm.rank), _others(codes, comm.rank), strict=True):
            self.quantizer.encode(values, out, request.factor)
        completion = comm.reduce_scatter(
            send, slot=request.slot, label=request.label, is_summed=False
        )
        into, own, factor = request.into, parts[comm.rank], request.factor

        def decode(received: PartialSums) -> PartialSums:
            total = into
            if total is None:  # one buffer for all buckets: each is used up before the next
                like = torch.empty(0, dtype=torch.float32, device=own.device)
                total = buffers.get("sum", 0, numel, like)
            total.copy_(own)
            if factor is not None:
                total.mul_(factor)
            for part in received[1:]:  # one after another: the order decides the last bits
                self.quantizer.add(part[None, :num_codes], total[None])
            return (total,)

        return completion.then(decode)

    def _message(self, comm: Communicator, bucket: Bucket) -> tuple[int, torch.dtype]:
        return self.quantizer.part_nbytes(bucket.shard_numel) * comm.world_size, torch.uint8


class GradCodecChoice(NamedTuple):
    """Gradients in ``bits``, in ``dtype``, or, if both are None, in their own dtype."""

    dtype: torch.dtype | None = None
    bits: int | None = None

    def of(self, grads: torch.dtype) -> GradCodec:
        """Return the codec of gradients of a dtype."""
        if self.bits is not None:
            return QuantCodec(BlockQuantizer(self.bits))
        # In their own dtype the sum may be in it, too; a dtype that was chosen is for messages.
        return CastCodec(self.dtype or grads, is_summed=self.dtype in (None, torch.float32))


# Parameters


class DifferentParams(RuntimeError):
    """Parameters that were equal on all ranks no longer are; ``bucket`` holds them."""

    def __init__(self, bucket: Bucket) -> None:
        super().__init__(bucket)
        self.bucket = bucket


class ParamCodec:
    """In their own dtype: fp32 parameters in place, fp16 and bf16 ones beside an fp32 master.

    Args:
        params: the parameters of one flat, of all ranks.
        rank: rank in the shard group.
    """

    key: str | None = None
    """State key of ``arena``, if it is part of the state."""

    def __init__(self, params: FlatBuffer, rank: int) -> None:
        self._params, self._rank = params, rank
        shards = {b.index: params.shard(b, rank) for b in params.flat.buckets}
        self._shards = shards  # of this rank, by bucket
        self._buckets = {b.index: params.bucket(b) for b in params.flat.buckets}
        self.arena: ShardArena | None = None
        """fp32 shard kept beside the parameters, from allocate() on: masters, or errors."""
        if params.data.dtype != MASTER_DTYPE:
            self.key = MASTER

    @property
    def keeps_arena(self) -> bool:
        """Whether there is an arena, once allocated."""
        return self.key is not None

    @property
    def nbytes(self) -> int:
        """Bytes of the send buffers, if the parameters are not sent from their own memory."""
        return 0

    def allocate(self) -> None:
        """Make the arena, if there is to be one."""
        if self.keeps_arena and self.arena is None:
            flat = self._params.flat
            self.arena = ShardArena(flat, self._params.data.device, MASTER_DTYPE)
            self._fill(self.arena)

    def _fill(self, arena: ShardArena) -> None:
        for bucket in self._params.flat.buckets:
            arena.view(bucket).copy_(self._shard(bucket))

    def _shard(self, bucket: Bucket) -> Tensor:
        return self._shards[bucket.index]

    def rollback(self) -> None:
        """Bring the arena to a state that can be saved, after an error between the two below."""

    def begin_update(self, bucket: Bucket) -> tuple[Tensor, Tensor | None]:
        """Return (fp32 shard to update, low-precision shard for the result or None)."""
        shard = self._shard(bucket)
        return (shard, None) if self.arena is None else (self.arena.view(bucket), shard)

    def commit(self, bucket: Bucket) -> None:
        """Encode the updated shard of ``bucket`` into this rank's slice of the send buffer."""

    def send_buffer(self, bucket: Bucket) -> Tensor:
        """Return the tensor that an all-gather of ``bucket`` fills, in rank order."""
        return self._buckets[bucket.index]

    def own_slice(self, bucket: Bucket) -> Tensor:
        """Return this rank's slice of send_buffer()."""
        whole = self.send_buffer(bucket)
        numel = whole.numel() * bucket.shard_numel // bucket.numel
        return whole[self._rank * numel : (self._rank + 1) * numel]

    def decode(self, bucket: Bucket) -> None:
        """Write the gathered values into the parameters."""

    def check(self) -> None:
        """Check the messages that decode() has read, up to where the device is; never wait for it.

        Called in every step after decode(), and before the next one.

        Raises:
            DifferentParams: as of DeltaCodec.decode().
        """


class CastParamCodec(ParamCodec):
    """fp32 parameters in another dtype, from masters."""

    key = MASTER

    def __init__(self, params: FlatBuffer, rank: int, dtype: torch.dtype) -> None:
        super().__init__(params, rank)
        data = zeros(params.flat.numel, params.data.device, dtype)
        self._buffer = FlatBuffer(params.flat, data)

    @property
    def nbytes(self) -> int:
        return self._buffer.data.nbytes

    def begin_update(self, bucket: Bucket) -> tuple[Tensor, Tensor | None]:
        """Return (master, None); edits of parameters are in it."""
        if self.arena is None:
            return self._shard(bucket), None
        shard, master = self._shard(bucket), self.arena.view(bucket)
        # commit() rounds, not the kernel: a compiled kernel that writes both takes five times as
        # long. So the expected parameter is computed anew here, to find edits.
        is_on_host = shard.device.type in _HOST
        tile_numel = _TILE_BLOCKS * BLOCK if is_on_host else shard.numel()
        whole = (shard, master, self.own_slice(bucket))
        tiles = [torch.split(tensor, tile_numel) for tensor in whole]
        for own, exact, rounded in zip(*tiles, strict=True):
            expected = rounded.copy_(exact).to(own.dtype)
            if not is_on_host or not _same_bits(expected, own):
                edited = expected.view(torch.int32) != own.view(torch.int32)
                torch.where(edited, own, exact, out=exact)
        return master, None

    def commit(self, bucket: Bucket) -> None:
        if self.arena is not None:
            self.own_slice(bucket).copy_(self.arena.view(bucket))

    def send_buffer(self, bucket: Bucket) -> Tensor:
        return self._buffer.bucket(bucket)

    def decode(self, bucket: Bucket) -> None:
        self._params.bucket(bucket).copy_(self.send_buffer(bucket))


class DeltaCodec(ParamCodec):
    """fp32 parameters as quantized differences to the values that all ranks have.

    Between steps the arena holds the rounding error of each parameter; from begin_update() to
    commit() the exact value. Each slice ends with a checksum of the parameters that the difference
    is to, and padding.

    Args:
        params, rank: as of ParamCodec.
        quantizer: encodes the differences.
        has_feedback: whether the rounding error is added to the next difference.
    """

    def __init__(
        self, params: FlatBuffer, rank: int, quantizer: BlockQuantizer, *, has_feedback: bool
    ) -> None:
        super().__init__(params, rank)
        self._quantizer = quantizer
        self._has_feedback = has_feedback
        self.key = ERROR if has_feedback else None
        self._in_update: set[int] = set()  # buckets whose part of the arena holds exact values
        buckets, device = params.flat.buckets, params.data.device
        indices = [bucket.index for bucket in buckets]
        self._world_size = buckets[0].numel // buckets[0].shard_numel if buckets else 1
        parts = [quantizer.part_nbytes(bucket.shard_numel, CHECK_NBYTES) for bucket in buckets]
        self._data = zeros(self._world_size * sum(parts), device, torch.uint8)
        sends = torch.split(self._data, [self._world_size * nbytes for nbytes in parts])
        self._send_buffers = dict(zip(indices, sends, strict=True))
        self._differs = torch.zeros(len(buckets), dtype=torch.bool, device=device)
        self._differs_in = dict(zip(indices, self._differs.unbind(), strict=True))
        self._is_unread = False  # whether decode() has written to it since the last copy
        self._copy: tuple[Tensor, torch.Event | None] | None = None  # on its way to the host

    def _parts(self, bucket: Bucket) -> tuple[Tensor, Tensor]:
        """Return the codes (world_size, nbytes) and the checksums (world_size, 8) of all ranks."""
        parts = self.send_buffer(bucket).view(self._world_size, -1)
        num_codes = self._quantizer.nbytes(bucket.shard_numel)
        return parts[:, :num_codes], parts[:, num_codes : num_codes + CHECK_NBYTES]

    @property
    def keeps_arena(self) -> bool:
        return True

    @property
    def nbytes(self) -> int:
        return self._data.nbytes

    def _fill(self, arena: ShardArena) -> None:
        """Leave zeros: nothing has been rounded yet."""

    def rollback(self) -> None:
        for bucket in self._params.flat.buckets:
            if bucket.index in self._in_update and self.arena is not None:
                self.arena.view(bucket).sub_(self._shard(bucket))
        self._in_update.clear()

    def begin_update(self, bucket: Bucket) -> tuple[Tensor, Tensor | None]:
        if self.arena is None:
            return self._shard(bucket), None
        value = self.arena.view(bucket)
        if bucket.index not in self._in_update:
            self._in_update.add(bucket.index)
            value.add_(self._shard(bucket))
        return value, None

    def commit(self, bucket: Bucket) -> None:
        """Encode the difference, and set this rank's parameters to the decoded values."""
        if self.arena is None:
            return
        value, shard = self.arena.view(bucket), self._shard(bucket)
        own = slice(self._rank, self._rank + 1)
        codes, checks = (parts[own] for parts in self._parts(bucket))
        checks.copy_(_checksums(shard[None]))
        self._quantizer.encode((value - shard)[None], codes)
        self._quantizer.add(codes, shard[None])
        value.sub_(shard)
        if not self._has_feedback:
            value.zero_()
        self._in_update.discard(bucket.index)

    def send_buffer(self, bucket: Bucket) -> Tensor:
        return self._send_buffers[bucket.index]

    def decode(self, bucket: Bucket) -> None:
        """Add the differences of the other ranks.

        Raises:
            DifferentParams: the parameters here are not those that the differences are to. On an
                accelerator check() raises it, because the host would wait for the answer.
        """
        codes, checks = self._parts(bucket)
        params = self._buckets[bucket.index].view(self._world_size, -1)
        differs = checks != _checksums(params)
        differs[self._rank].fill_(False)  # this rank's have been updated
        if differs.device.type not in _HOST:
            self._differs_in[bucket.index].logical_or_(differs.any())
            self._is_unread = True
        elif differs.any():
            raise DifferentParams(bucket)
        for part, into in zip(_others(codes, self._rank), _others(params, self._rank), strict=True):
            self._quantizer.add(part, into)

    def check(self) -> None:
        if self._copy is not None:
            differs, copied = self._copy
            if copied is not None and not copied.query():
                return
            self._copy = None
            if differs.any():
                self._differs.zero_()
                raise DifferentParams(self._params.flat.buckets[differs.tolist().index(True)])
        if self._is_unread:
            self._copy, self._is_unread = copy_to_host(self._differs), False


def _checksums(values: Tensor) -> Tensor:
    """Return the sums of the bits of ``values`` (k, n), eight bytes a number, as bytes (k, 8)."""
    return values.view(torch.int64).sum(-1, keepdim=True).view(torch.uint8)


def _same_bits(one: Tensor, other: Tensor) -> bool:
    """Return whether fp32 tensors of a shard are the same; a NaN is itself, and -0.0 is not 0.0."""
    return torch.equal(one.view(torch.int64), other.view(torch.int64))


class ParamCodecChoice(NamedTuple):
    """fp32 parameters as differences in ``bits``, in ``dtype``, or in their own dtype."""

    dtype: torch.dtype | None = None
    bits: int | None = None
    has_feedback: bool = True

    def of(self, params: FlatBuffer, rank: int) -> ParamCodec:
        """Return the codec of the parameters of a flat."""
        is_fp32 = params.data.dtype == MASTER_DTYPE
        if is_fp32 and self.bits is not None:
            quantizer = BlockQuantizer(self.bits)
            return DeltaCodec(params, rank, quantizer, has_feedback=self.has_feedback)
        if is_fp32 and self.dtype is not None:
            return CastParamCodec(params, rank, self.dtype)
        return ParamCodec(params, rank)
