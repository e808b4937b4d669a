"""Gradients into the flat buffers and over the wire, one collective per bucket.

[Note: absent gradients] A parameter may have no gradient on this rank while it has one on others,
or on none. torch leaves a parameter without a gradient untouched, moments and step included, so
the owner of a fragment has to know whether any rank had one. Absent gradients are sent as -0.0:
IEEE sums of -0.0 alone are -0.0, and one +0.0 or other value among them shows. The owner looks only
at fragments whose gradient it lacks itself, so the usual step pays nothing and no collective is
added. A gradient that is present but -0.0 in every element of a fragment cannot be told from none.

Where the caller wants gradients that zero() cleared and backward did not reach to be absent too,
zero() fills with -0.0 and remembers the tensors; a post-accumulate hook forgets one again. note()
looks only at those still remembered: absent if every element is -0.0. Any edit shows.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterator, Sequence

import torch
from torch import Tensor

from shardfuse.buffers import CombinedBuffers, ShardArena
from shardfuse.comm import Communicator
from shardfuse.comm.base import Parts, PartsHandle, Progress
from shardfuse.comm.staging import Staging, add_up
from shardfuse.grads.ownership import GradVersions
from shardfuse.grads.protocol import GradPhase, GradShards
from shardfuse.grads.sends import Sends
from shardfuse.grads.slots import FlatGrads, FlatParams, is_absent
from shardfuse.grads.wires import Departure, GradWireChoice
from shardfuse.layout import Bucket


class GradSync(GradShards):
    """Packs gradients into flat buffers and reduce-scatters them, one collective per bucket.

    Gradients stay where autograd accumulates: ``p.grad`` is, or is copied into, a view of the flat
    buffer, and reducing leaves it as it is.

    Args:
        comm: the ranks to sum over.
        wire: how they travel.
        overlaps, waits: as of Sends.
    """

    def __init__(
        self,
        comm: Communicator,
        wire: GradWireChoice,
        *,
        overlaps: Collection[Progress] = (),
        waits: bool = False,
    ) -> None:
        super().__init__()
        self._comm = comm
        self._wire = wire
        self._flats: dict[int, FlatGrads]
        self._buffers = CombinedBuffers()
        self._is_shared = False  # whether others may write to the padding
        self._staging = Staging()
        self._sends = Sends(
            comm, self._launch, asked=self.under_backward, overlaps=overlaps, waits=waits
        )
        self.under_backward.send = weakref.WeakMethod(self._send)
        self._factor: float | None = None  # what multiply() asked for
        self._reduced_from: GradVersions | None = None

    @property
    def nbytes(self) -> int:
        """Bytes held for gradients: flat buffers, retained shards and staging."""
        tensors = [grads.buffer.data for grads in self._flats.values()]
        tensors += [
            grads.retained.data for grads in self._flats.values() if grads.retained is not None
        ]
        staged = self._staging.nbytes + self._comm.staging_nbytes
        return sum(tensor.nbytes for tensor in tensors) + staged

    def attach(self, members: Sequence[FlatParams], device: torch.device) -> None:
        """Take over the gradients of flats; their buffers lie together in one tensor per dtype."""
        self._sends.drain()  # before anything changes here: another rank may fail meanwhile
        buffers = self._buffers.add([member.flat for member in members], device)
        added = []
        for member, buffer in zip(members, buffers, strict=True):
            wire = self._wire.of(buffer.data.dtype)
            grads = FlatGrads(buffer, member.params, member.specs, member.fragments, wire)
            grads.on_arrival = weakref.WeakMethod(self._arrived)
            if self.before_first is not None:
                grads.before_first = weakref.WeakMethod(self._before_first)
            grads.watch()
            added.append(grads)
        self._sends.add(added)
        self._flats.update({grads.flat.index: grads for grads in added})

    def _before_first(self) -> bool:
        before_first = None if self.before_first is None else self.before_first()
        self.before_first = None
        for grads in self._flats.values():
            grads.before_first = None
        return before_first is not None and before_first()

    def _arrived(self, grads: FlatGrads, position: int) -> None:
        self.num_made += 1
        if self._comm.world_size > 1:
            self._sends.arrived(grads, position)

    def idle(self, bucket: Bucket, parts: Parts) -> set[int]:
        grads = self._flats[bucket.flat]
        if self._comm.world_size == 1:
            return grads.missing
        idle = set()
        for fragment in grads.fragments[bucket.index] if grads.missing else ():
            if fragment.param in grads.missing:
                stop = fragment.shard_start + fragment.numel
                if all(is_absent(part[fragment.shard_start : stop]) for part in parts):
                    idle.add(fragment.param)
        return idle

    def mean_factor(self, flat: int) -> float | None:
        return self._flats[flat].wire.factor_after_sum(self._comm.everyone.world_size)

    def note(self) -> None:
        if self._reduced_from is not None and self._reduced_from == GradVersions(self._params()):
            return
        self.phase, self._factor, self._reduced_from = GradPhase.NOTED, None, None
        self._sends.look_again()
        flats = self._flats.values()
        for grads in flats:
            grads.note()
        if any(grads.is_lent for grads in flats):
            # Before any slot is written: a gradient may lie in that of another flat.
            extents = self._buffers.extents()
            for grads in flats:
                grads.keep(extents)
        for grads in flats:
            grads.clear_absent()
            if self._is_shared:
                grads.buffer.clear_padding()

    @torch.no_grad()
    def _send(self, is_noted: bool) -> None:
        if not self._sends.is_behind():
            return
        if not is_noted:
            self.note()
        if self.phase is GradPhase.NOTED:  # else step() uses what was reduced before
            self._sends.end(is_noted=True)

    def multiply(self, factor: Tensor) -> None:
        if self.phase is GradPhase.REDUCED:
            raise RuntimeError(
                "The ranks have different loss scales, and clip_grad_norm() has summed gradients "
                "that are still scaled by them. Call scaler.unscale_(optimizer) before it, or use "
                "shardfuse.ShardedGradScaler, which keeps one scale."
            )
        self._factor = float(factor)
        self._sends.doubt()

    def combined(self, *, shared: bool) -> list[Tensor | None]:
        self.note()
        for grads in self._flats.values():
            grads.pack()
            grads.adopt()
        self._sends.doubt()
        self.under_backward.is_paused = True  # for good: edits of all at once leave no trace on one
        if self.phase is GradPhase.REDUCED:
            # What is kept for step() stays valid: being moved does not change a gradient.
            self._reduced_from = GradVersions(self._params())
        self._is_shared |= shared
        return list(self._buffers.combined)

    def written(self) -> list[str]:
        return [name for grads in self._flats.values() for name in grads.written()]

    def spend(self) -> None:
        self.release()
        for grads in self._flats.values():
            grads.made.clear()

    def zero(self, set_to_none: bool, *, absent: bool = False) -> None:
        self.spend()
        self._sends.cleared()
        for grads in self._flats.values():
            if set_to_none:
                grads.drop()
            else:
                grads.zero(absent=absent)

    def retain(self) -> None:
        """Reduce-scatter all buckets now and keep the shards for the next ``reduced()``."""
        if self.phase is GradPhase.REDUCED:
            return
        assert self.phase is GradPhase.NOTED, "note() comes before retain()"
        if self._comm.world_size == 1:
            for grads in self._flats.values():
                grads.pack()
        else:
            self._reduce_all()
        self.phase = GradPhase.REDUCED
        self._reduced_from = GradVersions(self._params())

    def _reduce_all(self) -> None:
        """Reduce-scatter every bucket into the retained shards."""
        for grads in self._flats.values():
            if grads.retained is None:
                # What was summed up in fp32 is not rounded again, as little as what is not kept.
                grads.retained = ShardArena(grads.flat, grads.buffer.data.device, torch.float32)
        for bucket, parts in self._sends.reduced(retain=True):
            arena = self._flats[bucket.flat].retained
            assert arena is not None
            add_up(parts, arena.segment(bucket))

    def release(self) -> None:
        """Forget shards kept by ``retain()``, and what note() noted; the next step begins anew."""
        self.phase, self._factor, self._reduced_from = GradPhase.ACCUMULATING, None, None
        for grads in self._flats.values():
            grads.forget()

    def _params(self) -> list[Tensor]:
        return [param for grads in self._flats.values() for param in grads.params]

    def reduced(self) -> Iterator[tuple[Bucket, Parts]]:
        """Yield (bucket, its shard of the summed gradient), in launch order.

        Parts are in the wire dtype and valid until the next are asked for. After retain() there is
        one, the sum.
        """
        assert self.phase is not GradPhase.ACCUMULATING, "note() comes before reduced()"
        if self._comm.world_size == 1:
            for grads in self._flats.values():
                for bucket in grads.flat.buckets:
                    grads.pack(bucket.start + bucket.numel)
                    yield bucket, (grads.buffer.bucket(bucket),)
        elif self.phase is GradPhase.REDUCED:
            for grads in self._flats.values():
                assert grads.retained is not None
                for bucket in grads.flat.buckets:
                    yield bucket, (grads.retained.segment(bucket),)
        else:
            yield from self._sends.reduced(retain=False)

    def _launch(
        self,
        grads: FlatGrads,
        bucket: Bucket,
        *,
        staged_at: int,
        slot: int,
        label: str | None,
        retain: bool,
    ) -> PartsHandle:
        """Launch the reduce-scatter of a bucket; what is sent lies ``staged_at`` if it is cast."""
        grads.pack(bucket.start + bucket.numel)
        into = None if grads.retained is None or not retain else grads.retained.segment(bucket)
        whole = grads.buffer.bucket(bucket)
        departure = Departure(whole, self._factor, staged_at, slot, label, into)
        return grads.wire.launch(self._comm, self._staging, departure)
