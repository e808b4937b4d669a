"""How gradients travel: summed in some dtype, or in 8 bits, to be added up where they arrive."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from shardfuse.comm import Communicator
from shardfuse.comm.base import Parts, PartsHandle
from shardfuse.comm.staging import Staging
from shardfuse.layout import PART_NBYTES, Bucket, round_up
from shardfuse.quantize import BlockQuantizer


@dataclass(frozen=True)
class Departure:
    """A bucket that is to leave.

    Args:
        whole: its gradients (world_size * n,), which stay as they are until they have arrived.
        factor: what they are to be multiplied by; None is 1.
        staged_at: which of the buffers to send from, if what is sent is not ``whole`` itself.
        slot, label: as of Communicator.reduce_scatter().
        into: fp32 (n,) for the sum, or None.
    """

    whole: Tensor
    factor: float | None = None
    staged_at: int = 0
    slot: int = 0
    label: str | None = None
    into: Tensor | None = None


class GradWire(Protocol):
    """How the gradients of one flat travel."""

    def factor_after_sum(self, num_summed: int) -> float | None:
        """Return what turns the sum into the mean; None is 1."""

    def launch(self, comm: Communicator, staging: Staging, bucket: Departure) -> PartsHandle:
        """Launch what brings this rank tensors (n,) that add up to its shard of the sum."""

    def expect(
        self, comm: Communicator, bucket: Bucket, where: Tensor, label: str, slot: int
    ) -> None:
        """Be ready for a bucket of that label, on the device of ``where``."""


@dataclass(frozen=True)
class DtypeWire:
    """In a dtype of torch's.

    Args:
        dtype: in which they travel.
        is_summed: whether a backend may add them up on the way, in this dtype; else they are added
            up in fp32 by who waits for them.
    """

    dtype: torch.dtype
    is_summed: bool = True

    def _factor_before_sum(self, factor: float | None, num_summed: int) -> float | None:
        """In fp16 gradients are divided before the sum, which would overflow at 65504."""
        if self.dtype != torch.float16:
            return factor
        return (1.0 if factor is None else factor) / num_summed

    def factor_after_sum(self, num_summed: int) -> float | None:
        return None if num_summed == 1 or self.dtype == torch.float16 else 1.0 / num_summed

    def launch(self, comm: Communicator, staging: Staging, bucket: Departure) -> PartsHandle:
        send = self._as_sent(
            staging, bucket, self._factor_before_sum(bucket.factor, comm.everyone.world_size)
        )
        into = bucket.into if self.dtype == torch.float32 else None
        return comm.reduce_scatter(
            send, into, slot=bucket.slot, label=bucket.label, is_summed=self.is_summed
        )

    def _as_sent(self, staging: Staging, bucket: Departure, factor: float | None) -> Tensor:
        """Return the bucket times ``factor`` in this dtype; itself, if that is it."""
        whole = bucket.whole
        if factor is None and whole.dtype == self.dtype:
            return whole
        like = torch.empty(0, dtype=self.dtype, device=whole.device)
        staged = staging.take("send", bucket.staged_at, whole.numel(), like)
        if factor is None:
            return staged.copy_(whole)
        if self.dtype.itemsize > whole.dtype.itemsize:
            return staged.copy_(whole).mul_(factor)
        return torch.mul(whole, factor, out=staged)

    def expect(
        self, comm: Communicator, bucket: Bucket, where: Tensor, label: str, slot: int
    ) -> None:
        like = torch.empty(1, dtype=self.dtype, device=where.device).expand(bucket.numel)
        comm.expect("reduce_scatter", like, label=label, slot=slot)


@dataclass(frozen=True)
class QuantizedWire:
    """In few bits, which nobody can add up on the way; a rank's own part keeps all of its digits.

    Blocks hold elements of one parameter each, so that an absent gradient arrives as absent. What
    goes to a rank is padded, so that it begins where devices like to read.
    """

    quantizer: BlockQuantizer

    def _part_nbytes(self, numel: int) -> int:
        return round_up(self.quantizer.nbytes(numel), PART_NBYTES)

    def factor_after_sum(self, num_summed: int) -> float | None:
        return None if num_summed == 1 else 1.0 / num_summed

    def launch(self, comm: Communicator, staging: Staging, bucket: Departure) -> PartsHandle:
        parts = bucket.whole.chunk(comm.world_size)
        numel = parts[0].numel()
        nbytes = self._part_nbytes(numel)
        like = torch.empty(0, dtype=torch.uint8, device=bucket.whole.device)
        send = staging.take("send", bucket.staged_at, comm.world_size * nbytes, like)
        for rank, (part, out) in enumerate(zip(parts, send.chunk(comm.world_size), strict=True)):
            if rank != comm.rank:
                self.quantizer.encode(part, out[: self.quantizer.nbytes(numel)], bucket.factor)
        handle = comm.reduce_scatter(send, slot=bucket.slot, label=bucket.label, is_summed=False)
        total = bucket.into
        if total is None:
            like = torch.empty(0, dtype=torch.float32, device=bucket.whole.device)
            total = staging.take("sum", 0, numel, like)
        return _Decoded(handle, self.quantizer, parts[comm.rank], bucket.factor, total)

    def expect(
        self, comm: Communicator, bucket: Bucket, where: Tensor, label: str, slot: int
    ) -> None:
        nbytes = self._part_nbytes(bucket.shard_numel) * comm.world_size
        like = torch.empty(1, dtype=torch.uint8, device=where.device).expand(nbytes)
        comm.expect("reduce_scatter", like, label=label, slot=slot)


@dataclass
class _Decoded:
    """A handle whose wait() adds up what has arrived; its sum is valid until that of the next."""

    handle: PartsHandle
    quantizer: BlockQuantizer
    own: Tensor
    factor: float | None
    total: Tensor

    def wait(self) -> Parts:
        """Return the sum; anew each time, since others of the same buffer may have come between."""
        arrived = self.handle.wait()[1:]
        self.total.copy_(self.own)
        if self.factor is not None:
            self.total.mul_(self.factor)
        nbytes = self.quantizer.nbytes(len(self.total))
        for part in arrived:
            self.quantizer.add(part[:nbytes], self.total)
        return (self.total,)


class GradWireChoice(NamedTuple):
    """How all gradients travel: in ``bits``, in ``dtype``, or, if both are None, as they are."""

    dtype: torch.dtype | None = None
    bits: int | None = None

    def of(self, grads: torch.dtype) -> GradWire:
        """Return how gradients of a dtype travel."""
        if self.bits is not None:
            return QuantizedWire(BlockQuantizer(self.bits))
        # As their own dtype has it, so does its sum; one that was chosen is for the wire alone.
        return DtypeWire(self.dtype or grads, is_summed=self.dtype in (None, torch.float32))
