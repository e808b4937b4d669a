"""Gradients of which each rank keeps its shard alone (ZeRO stage 2)."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from shardfuse.buffers import ShardArena
from shardfuse.comm import Communicator
from shardfuse.comm.base import Parts, PartsHandle
from shardfuse.comm.staging import Staging
from shardfuse.grads.flat_shard import FlatShard
from shardfuse.grads.protocol import GradPhase, GradShards
from shardfuse.grads.rounds import Rounds
from shardfuse.grads.slots import FlatParams
from shardfuse.grads.taken import Taken
from shardfuse.grads.wires import Departure, GradWireChoice
from shardfuse.layout import Bucket
from shardfuse.streams import Streams


class PartitionedGrads(GradShards):
    """Sums gradients over ranks under backward, and keeps this rank's shard, in fp32.

    ``p.grad`` is None once it has left; see [Note: taken] in rounds.py. step() uses the gradients
    up: what comes after it begins a new sum, as after zero_grad().

    Args:
        comm: the ranks to sum over.
        wire: how they travel.
        waits: as of Rounds.
    """

    def __init__(self, comm: Communicator, wire: GradWireChoice, *, waits: bool = False) -> None:
        super().__init__()
        self._comm = comm
        self._wire = wire
        self._flats: dict[int, FlatShard]
        self._staging = Staging()
        self._taken = Taken()
        self._streams = Streams()
        self._rounds = Rounds(
            comm,
            self._launch,
            self._collect,
            asked=self.under_backward,
            streams=self._streams,
            waits=waits,
        )
        self.under_backward.send = weakref.WeakMethod(self._send)

    @property
    def nbytes(self) -> int:
        """Bytes held for gradients: shards, and buffers to send from and to receive into."""
        shards = sum(shard.arena.data.nbytes for shard in self._flats.values())
        return shards + self._staging.nbytes + self._comm.staging_nbytes

    def attach(self, members: Sequence[FlatParams], device: torch.device) -> None:
        self._rounds.drain()  # before anything changes here: another rank may fail meanwhile
        added = []
        for flat, params, specs, fragments in members:
            wire = self._wire.of(params[0].dtype)
            arena = ShardArena(flat, device, torch.float32)
            shard = FlatShard(
                flat, params, specs, fragments, wire, arena, self._taken, self._streams
            )
            shard.watch(weakref.WeakMethod(self._arrived))
            added.append(shard)
        self._rounds.add(added)
        self._flats.update({shard.flat.index: shard for shard in added})
        if self.phase is GradPhase.REDUCED:  # of a clip or unscale_(): of these there is nothing
            for shard in added:
                shard.settle()

    def _arrived(self, shard: FlatShard, position: int) -> None:
        self.num_made += 1
        self.phase = GradPhase.ACCUMULATING
        self._rounds.arrived(shard, position)

    def _launch(
        self, shard: FlatShard, bucket: Bucket, buffer: int, label: str, slot: int
    ) -> PartsHandle:
        """Take the gradients of a bucket, and launch its reduce-scatter."""
        like = torch.empty(0, dtype=shard.params[0].dtype, device=shard.arena.data.device)
        whole = self._staging.take("bucket", buffer, bucket.numel, like)
        shard.take(bucket, whole)
        departure = Departure(whole, staged_at=buffer, slot=slot, label=label)
        return shard.wire.launch(self._comm, self._staging, departure)

    def _collect(self, shard: FlatShard, bucket: Bucket, parts: Parts) -> None:
        shard.collect(bucket, parts)

    def idle(self, bucket: Bucket, parts: Parts) -> set[int]:
        return self._flats[bucket.flat].idle(bucket)

    def mean_factor(self, flat: int) -> float | None:
        return self._flats[flat].wire.factor_after_sum(self._comm.everyone.world_size)

    def note(self) -> None:
        if self.phase is GradPhase.REDUCED and not self._has_more():
            return
        self.phase = GradPhase.NOTED

    def _send(self, is_noted: bool) -> None:
        self._rounds.end()

    def _has_more(self) -> bool:
        """Return whether there are gradients that have not left."""
        flats = self._flats.values()
        return any(s.has_gradients(bucket) for s in flats for bucket in s.flat.buckets)

    def reduced(self) -> Iterator[tuple[Bucket, Parts]]:
        """Yield (bucket, this rank's shard of the sum), in the order in which buckets left."""
        assert self.phase is not GradPhase.ACCUMULATING, "note() comes before reduced()"
        if self.phase is GradPhase.NOTED:
            self._complete()
        for shard, bucket in self._rounds.flights.received():
            yield bucket, (shard.arena.segment(bucket),)

    def _complete(self) -> None:
        """Have all gradients of all ranks leave, and what is known of them noted."""
        self._rounds.complete()
        for shard in self._flats.values():
            shard.settle()
        self.phase = GradPhase.REDUCED

    def retain(self) -> None:
        assert self.phase is not GradPhase.ACCUMULATING, "note() comes before retain()"
        if self.phase is GradPhase.NOTED:
            self._complete()
        self._rounds.flights.receive_all()

    def release(self) -> None:
        """Let more be added; what has arrived stays, for there is no other copy."""
        self.phase = GradPhase.ACCUMULATING

    def spend(self) -> None:
        self._rounds.clear()
        for shard in self._flats.values():
            shard.clear()
        self._taken.restore()
        self.overflowed.clear()
        self.release()

    def zero(self, set_to_none: bool, *, absent: bool = False) -> None:
        """Clear the gradients to None, or to zero; one that is set counts as zero then."""
        self.spend()
        for shard in self._flats.values():
            shard.zero(set_to_none or absent)

    def multiply(self, factor: Tensor) -> None:
        """Refuse to treat ranks' gradients differently: they are added up already."""
        raise RuntimeError(
            "The ranks have different loss scales although their gradients are summed during "
            "backward (stage=2). Use one scale on all ranks: shardfuse.ShardedGradScaler."
        )

    def unscale(self, inverse: Tensor | None) -> Tensor | None:
        self.note()
        self.retain()
        found = torch.zeros((), dtype=torch.float32)
        for shard in self._flats.values():
            self.overflowed.update(shard.overflowed())
            if inverse is not None:
                shard.arena.data.mul_(inverse.to(shard.arena.data.device))
        return found + float(len(self.overflowed) > 0)

    def combined(self, *, shared: bool) -> list[Tensor | None]:
        """Refuse: there is no tensor that they all lie in, nor any of them."""
        raise RuntimeError(
            "There are no combined gradients with stage=2: they are sent during backward, and each "
            "rank keeps only its shard of their sum. Use stage=1."
        )
