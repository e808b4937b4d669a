"""FullGrads: every gradient in p.grad, reduce-scattered bucket by bucket (ZeRO stage 1).

[Note: absent gradients] A parameter may have no gradient on this rank while it has one on others,
or on none. torch does not touch a parameter without a gradient, its moments and step included, so
the owner of a fragment has to know whether any rank had one. Absent gradients are sent as -0.0: an
IEEE sum of -0.0 alone is -0.0, and one +0.0 or other value among them shows. The owner looks only
at fragments whose gradient it lacks itself, so the usual step pays nothing and no collective is
added. A gradient that is present but -0.0 in every element of a fragment counts as absent. Where
the ranks agree on buckets that were sent early, they also tell each other which gradients they
lack, and the owner need not look: on a device the host would wait.

If the caller wants gradients that zero() cleared and backward did not reach to be absent too,
zero() fills with -0.0 and remembers the tensors; a post-accumulate hook forgets one again. freeze()
looks only at those still remembered: absent if every element is -0.0. Any edit shows.

[Note: sent early] A bucket is sent from a hook as soon as autograd has made all its gradients, in
one order on all ranks. These may not be the final values: a second backward may add to a gradient,
and callers may clip, scale or replace it before step(). So each step compares the gradients with a
snapshot of the bucket. On a device a snapshot has no checksums, so that the host waits for nothing
under backward: writes by ``grad.data``, or by kernels of extensions, are not seen there. A gradient
scaler unscales in such a way. ShardedGradScaler tells it. torch's shows it in step(), so nothing is
sent early in the first step, and nothing any more after a step in which p.grad was unscaled. The
ranks then agree, by one small all-reduce, on which buckets any of them has changed, and send those
again. The result is therefore that of a step without overlap, bit for bit; only time is lost. A
rank need not know whether its peers have sent early. If buckets were sent twice in several steps in
a row, none is sent early any more, and a warning names the remedy.

Receive buffers form a ring of B + 1: bucket i of the next iteration reuses the buffer of bucket
i + 1 of this one, and its receive is posted when step() has used the sum of that one.

A backend without labels (NCCL, HCCL) runs collectives in the order of launches. There, buckets go
through a process group that no other code uses (group_copy()). Each iteration launches all buckets
there in one order, then those that are sent again, and nothing else. So all ranks keep the order,
whatever else they communicate. The rest is sent at the end of the backward that has sent the first
bucket. A rank that had no backward sends all buckets at the start of the next collective method. A
mesh has no such group: nothing else may communicate between its ranks' backwards and that method.
If torch's Join is used, no bucket is sent early: a rank that has joined expects Join's own message
first.

Between hosts gloo sends the messages of one connection one after the other. There the agreement has
a group_copy(), and so connections of its own: at the end of backward several buckets may be in
flight, and the agreement does not wait for them.
"""

from __future__ import annotations

import enum
import itertools
import logging
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.profiler import record_function

from shardfuse.buffers import CombinedBuffers, ShardArena
from shardfuse.codecs import GradCodecChoice, ReduceRequest
from shardfuse.comm import Communicator, Completion
from shardfuse.comm.numbers import Counter
from shardfuse.comm.transport import AsyncModel, BufferPool, PartialSums, add_up
from shardfuse.grads.buffer import GradBuffer
from shardfuse.grads.source import (
    FlatParams,
    GradPhase,
    GradSnapshot,
    GradSource,
    HostAllReduceMax,
    MessageNames,
    PendingGrads,
    in_backward_order,
    is_absent,
    is_nested_backward,
    memory_of,
    overlap_communicators,
    register_hooks,
)
from shardfuse.layout import Bucket
from shardfuse.runtime import Streams, untraced

logger = logging.getLogger("shardfuse")

IN_FLIGHT = 2
"""Reduce-scatters in flight at a time without overlap."""

_MAX_WASTED = 3
"""Steps in a row in which buckets were sent twice, after which none is sent early."""

_CAUSES = {
    "again": "a second backward() added to them (run all but the last backward() of a step inside "
    "optimizer.no_sync())",
    "nested": "params are used in several reentrant checkpoints, and each runs a backward of its "
    "own (use checkpoint(..., use_reentrant=False), whose gradients come once)",
    "cleared": "zero_grad() cleared them between backward and step(), as where a GAN's generator "
    "loss reaches the discriminator (run that backward inside no_sync() of this optimizer, or with "
    "requires_grad_(False) on its params)",
    "written": "p.grad was written after backward, as by a clip, a scaler or a mask, or under "
    "no_sync() (clip by optimizer.clip_grad_norm(), or edit gradients in p.register_hook())",
}
"""Why a bucket was sent twice, and the remedy, as far as this rank knows."""


class BucketStatus(enum.Enum):
    """Where the gradients of one bucket are in an iteration."""

    FILLING = "autograd or the caller still writes them"
    SENT_EARLY = "in flight, from a hook: they may change before step()"
    SENT = "in flight, after freeze(): they cannot change"


@dataclass
class BucketState:
    """One bucket of the backward order, in the current iteration."""

    grads: GradBuffer
    bucket: Bucket
    status: BucketStatus = BucketStatus.FILLING
    completion: Completion[PartialSums] | None = None
    snapshot: GradSnapshot | None = None
    """Of the gradients as sent early; None: changes of them could not all be seen."""

    def reset(self) -> None:
        """Begin an iteration."""
        self.status, self.completion, self.snapshot = BucketStatus.FILLING, None, None

    def is_stale(self) -> bool:
        """Return whether gradients have changed since the bucket was sent."""
        if self.status is not BucketStatus.SENT_EARLY:
            return False
        return self.snapshot is None or not self.snapshot.is_current()


class FullGrads(GradSource):
    """Packs gradients into flat buffers and reduce-scatters them, one collective per bucket.

    Gradients stay where autograd accumulates: ``p.grad`` is, or is copied into, a view of the flat
    buffer, and reducing does not change it.

    Args:
        comm: the ranks to sum over.
        codec: how gradients are encoded.
        overlaps: models of communication under which buckets are sent during backward.
        waits: wait for each reduce-scatter at once, to find out whether overlap causes a fault.
        in_forward_order: yield buckets that were all sent before in the order in which forward
            reads the parameters, so that these can be gathered while others are updated.
    """

    def __init__(
        self,
        comm: Communicator,
        codec: GradCodecChoice,
        *,
        overlaps: Collection[AsyncModel] = (),
        waits: bool = False,
        in_forward_order: bool = False,
    ) -> None:
        super().__init__()
        self._comm = comm
        self._in_forward_order = in_forward_order
        self._sender = comm  # of buckets that may be sent early
        self._codec = codec
        self._flats: dict[int, GradBuffer]
        self._combined = CombinedBuffers()
        self._is_shared = False  # whether callers may write to the padding
        self._buffers = BufferPool()
        self._factor: float | None = None  # set by scale_before_sum()
        self._snapshot: GradSnapshot | None = None  # of the gradients that were reduced and kept
        # The schedule
        self._states: list[BucketState] = []  # in backward order
        self._num_sent = 0  # the first so many of them
        self._pending = PendingGrads()
        self._iteration = Counter(comm.session)
        self._names = MessageNames(comm)
        self._streams: Streams | None = None  # on which gradients are made; None on the CPU
        self._may_overlap = set(overlaps)
        self._overlaps = False
        self._model = AsyncModel.BLOCKING  # of the communicator, in this iteration
        self._number = 0  # of this iteration
        self._waits = waits
        self._is_queued = False  # whether autograd calls _send_all() at the end of this backward
        self._num_wasted = 0
        self._causes: set[str] = set()  # of changes on this rank, in the steps that are wasted
        self._has_stepped = False
        self._agreement: HostAllReduceMax | None = None
        self._are_reduced_early = False  # the shards that are kept, from buckets sent early
        comm.session.on_restart(self._restart_after_error)

    @property
    def nbytes(self) -> int:
        """Bytes held for gradients: flat buffers, retained shards and staging."""
        tensors = [grads.buffer.data for grads in self._flats.values()]
        tensors += [
            grads.retained.data for grads in self._flats.values() if grads.retained is not None
        ]
        staged = self._buffers.nbytes + self._comm.staging_nbytes
        staged += self._sender.staging_nbytes if self._sender is not self._comm else 0
        return sum(tensor.nbytes for tensor in tensors) + staged

    def attach(self, members: Sequence[FlatParams], device: torch.device) -> None:
        """Take over the gradients of flats; their buffers are slices of one tensor per dtype."""
        self._drain()  # before anything changes here: another rank may fail meanwhile
        if device.type != "cpu" and self._streams is None:
            self._streams = Streams()
        buffers = self._combined.add([member.flat for member in members], device)
        added = []
        for member, buffer in zip(members, buffers, strict=True):
            codec = self._codec.of(buffer.data.dtype)
            grads = GradBuffer(buffer, member.params, member.specs, member.fragments, codec)
            register_hooks(self, grads.flat, grads.params)
            added.append(grads)
        self._iteration.increment()  # receives were posted in the old order
        self._sender.forget_posted(self._names.sender)
        if self._agreement is not None:
            self._agreement.forget_posted(self._names.sender)
        order = in_backward_order([*self._flats.values(), *added])
        self._states = [BucketState(grads, bucket) for grads, bucket in order]
        self._pending = PendingGrads(order)
        self._names.begin_order(len(order))
        self._restart()
        if self._overlaps and self._agreement is None:
            self._sender, comm = overlap_communicators(self._comm, self)
            self._agreement = HostAllReduceMax(comm, device)
        self._flats.update({grads.flat.index: grads for grads in added})
        self._post_agreement()

    def _drain(self) -> None:
        """Receive and drop all buckets that any rank has sent in the present order. Collective."""
        if not self._overlaps:
            return
        device = self._states[0].grads.buffer.data.device
        total = torch.tensor([float(self._num_sent > 0)], device=device)
        self._comm.world.all_reduce(total, "max").wait()
        if total > 0:
            self._send_until(len(self._states), keep=False)
            for state in self._states:
                assert state.completion is not None
                state.completion.wait()

    def _restart_after_error(self) -> None:
        # A rank that the error reached inside _reduce() has counted its iteration, and others not.
        self._iteration.reset()
        self._restart()
        self._post_agreement()

    def _restart(self) -> None:
        """Begin an iteration for which no receive was posted."""
        self._begin_iteration()
        for index in range(len(self._states)):
            self._post_receive(index, self._number)

    def _begin_iteration(self) -> None:
        self._number = self._iteration.value
        if len(self._states) > 1 and len(self._may_overlap) > 0:
            self._model = self._comm.async_model
        self._overlaps = self._model in self._may_overlap
        self._num_sent = 0
        for state in self._states:
            state.reset()
        self._await_grads()

    def _await_grads(self) -> None:
        """Wait for the gradients of buckets that were not sent."""
        self._is_queued = False  # also if a backward has failed
        self._pending.restart()
        if self._streams is not None:
            self._streams.end()

    def _post_receive(self, index: int, iteration: int) -> None:
        """Post the receive of a bucket of the current iteration, or of the next one."""
        if self._overlaps and self._may_overlap:
            grads, bucket = self._states[index].grads, self._states[index].bucket
            label, slot = self._names.label(iteration, index), self._slot(index, iteration)
            grads.codec.post_receive(self._sender, bucket, grads.buffer.data, label, slot)

    def _post_agreement(self) -> None:
        """Post the receive of this iteration's agreement, or it would wait behind buckets."""
        if self._overlaps and self._agreement is not None:
            num_slots = sum(len(grads.flat.slots) for grads in self._flats.values())
            label = self._names.agreement(self._number)
            self._agreement.post_receive(len(self._states) + num_slots, label)

    def _slot(self, index: int, iteration: int) -> int:
        first = self._names.first_slot
        if self._overlaps:
            return first + (index + iteration) % (len(self._states) + 1)
        return first + index % IN_FLIGHT

    # During backward

    def on_grad(self, flat: int, position: int) -> None:
        """Take the gradient that autograd has just made; send the buckets that are complete."""
        if self.before_first is not None and self._is_replaced():
            return
        grads = self._flats[flat]
        grads.collect(position)
        self.num_made += 1
        if not self._overlaps or not (self._has_stepped or self._sees_all_writes):
            return
        model = self._model
        if not self.control.may_send(is_ordered=model is AsyncModel.ORDERED):
            return
        if self._streams is not None:
            self._streams.note(grads.buffer.data.device)
        if not self._pending.mark_ready(flat, position):
            if self._num_sent:
                is_own = "nested" not in self._causes and not is_nested_backward()
                self._causes.add("again" if is_own else "nested")
            return
        if model is AsyncModel.UNORDERED and self._pending.all_ready:
            return  # step() follows, and its first message must not wait behind the last bucket
        if model is AsyncModel.ORDERED and not self._is_queued:
            self._is_queued = True
            torch.autograd.Variable._execution_engine.queue_callback(self._send_all)
        if not self._next_is_ready:
            return
        with self._comm.session.reports_errors("backward()"):
            while self._next_is_ready:
                if not self._send_early():
                    break

    @property
    def _next_is_ready(self) -> bool:
        """Whether autograd has made all gradients of the bucket that is sent next."""
        return self._num_sent < len(self._states) and self._pending.is_ready(self._num_sent)

    @property
    def _sees_all_writes(self) -> bool:
        """Whether no write to a gradient goes unnoticed; see [Note: sent early]."""
        return self._streams is None

    def _is_replaced(self) -> bool:
        before_first = None if self.before_first is None else self.before_first()
        self.before_first = None
        return before_first is not None and before_first()

    @torch.no_grad()
    def _send_early(self, *, is_forced: bool = False, is_frozen: bool = False) -> bool:
        """Send the next bucket as its gradients are now; return whether that was possible."""
        state = self._states[self._num_sent]
        if self._streams is not None:
            # Hooks run on the stream of their node's forward: this one waits for the others.
            self._streams.join()
        snapshot = state.grads.fill(state.bucket)
        if snapshot is None and not is_forced:
            return False
        state.completion = self._launch(self._num_sent, keep=False)
        state.snapshot = snapshot
        state.status = BucketStatus.SENT if is_frozen else BucketStatus.SENT_EARLY
        self._num_sent += 1
        return True

    @untraced
    def _send_all(self, *, is_frozen: bool = False) -> None:
        """Send the rest, at the end of a backward or, of frozen gradients, in a region."""
        self._is_queued = False
        with self._comm.session.reports_errors("backward()"):
            while self._num_sent < len(self._states):
                self._send_early(is_forced=True, is_frozen=is_frozen)

    @torch.no_grad()
    def flush(self, *, is_frozen: bool = False) -> None:
        """Send the rest before any other message, where messages have an order."""
        is_ordered = self._overlaps and self._model is AsyncModel.ORDERED
        if not is_ordered or self._num_sent == len(self._states):
            return
        if not is_frozen:
            self.freeze()
        if self.phase is GradPhase.FROZEN:  # else step() uses shards that were reduced before
            self._send_all(is_frozen=True)

    def _launch(self, index: int, *, keep: bool, resend: int = 0) -> Completion[PartialSums]:
        """Launch the reduce-scatter of a bucket as its gradients are now."""
        grads, bucket = self._states[index].grads, self._states[index].bucket
        label = self._names.label(self._number, index, resend) if self._overlaps else None
        slot = self._names.first_slot - 1 if resend > 0 else self._slot(index, self._number)
        # Peers may read a bucket until the next one is launched, so that has another buffer.
        send_buffer = index if self._overlaps else index % (IN_FLIGHT + 1)
        with record_function(f"shardfuse::reduce_scatter b{bucket.index}"):
            grads.pack(bucket.start + bucket.numel)
            into = grads.retained.view(bucket) if keep and grads.retained is not None else None
            whole = grads.bucket_views[bucket.index]
            request = ReduceRequest(whole, self._factor, send_buffer, slot, label, into)
            comm = self._sender if self._overlaps else self._comm
            completion = grads.codec.launch(comm, self._buffers, request)
        if self._waits:
            completion.arrive()
        return completion

    # In a step

    def unused(self, bucket: Bucket, parts: PartialSums) -> set[int]:
        grads = self._flats[bucket.flat]
        if self._comm.world_size == 1 or not grads.no_local_grad:
            return grads.no_local_grad
        if grads.unused is not None:
            return grads.unused
        lacked = [f for f in grads.fragments[bucket.index] if f.param in grads.no_local_grad]
        if not lacked:
            return set()
        pieces = [[part[f.shard_start :][: f.numel] for f in lacked] for part in parts]
        answers = torch.stack([torch.stack(list(map(is_absent, piece))) for piece in pieces])
        are_absent = answers.all(dim=0).tolist()  # the host waits once for all
        return {f.param for f, absent in zip(lacked, are_absent, strict=True) if absent}

    def mean_factor(self, flat: int) -> float | None:
        return self._flats[flat].codec.factor_after_sum(self._comm.world.world_size)

    def freeze(self) -> None:
        if self._snapshot is not None and self._snapshot.is_current():
            return
        self.phase, self._factor, self._snapshot = GradPhase.FROZEN, None, None
        for state in self._states:
            if state.status is BucketStatus.SENT:  # by an earlier region: they may have changed
                state.status = BucketStatus.SENT_EARLY
        flats = self._flats.values()
        for grads in flats:
            grads.freeze()
        if any(grads.may_be_aliased for grads in flats):
            # Before any slot is written: a gradient may lie in a slot of another flat.
            extents = self._combined.extents()
            for grads in flats:
                grads.protect_aliases(extents)
        for grads in flats:
            grads.clear_absent()
            if self._is_shared:
                grads.buffer.clear_padding()

    def note_unscaled(self, *, is_told: bool) -> None:
        if self._sees_all_writes or not self._overlaps:
            return
        if self.phase is GradPhase.REDUCED and self._are_reduced_early and not is_told:
            raise RuntimeError(
                "A gradient scaler has unscaled p.grad after backward, and clip_grad_norm() has "
                "used gradients that were sent before, which torch's scaler does not tell on a "
                "device. Use shardfuse.ShardedGradScaler, or "
                'sharding={"overlap_grad_sync": False}.'
            )
        self._invalidate()
        if not is_told and not self.control.must_wait:
            self.control.must_wait = True
            logger.info(
                "A gradient scaler unscales p.grad after backward: gradients are sent in step() "
                "from now on. With shardfuse.ShardedGradScaler and clip_grad_norm= in sharding, "
                "without unscale_(), they are sent during backward."
            )

    def scale_before_sum(self, factor: Tensor) -> None:
        if self.phase is GradPhase.REDUCED:
            raise RuntimeError(
                "The ranks have different loss scales, and clip_grad_norm() has summed gradients "
                "that are still scaled by them. Call scaler.unscale_(optimizer) before it, or use "
                "shardfuse.ShardedGradScaler, which keeps one scale."
            )
        self._factor = float(factor)
        self._invalidate()

    def _invalidate(self) -> None:
        """Take all buckets in flight as changed: gradients are written where it does not show."""
        for state in self._states:
            state.snapshot = None
            if state.status is BucketStatus.SENT:
                state.status = BucketStatus.SENT_EARLY

    def combined(self, *, shared: bool) -> list[Tensor | None]:
        self.freeze()
        for grads in self._flats.values():
            grads.pack()
            grads.rebind_grads()
        self._invalidate()
        # An edit of all at once leaves no trace on any single gradient.
        self.control.must_wait = True
        if self.phase is GradPhase.REDUCED:
            # The shards kept for step() stay valid: being moved does not change a gradient.
            self._snapshot = self._take_snapshot()
        self._is_shared |= shared
        return list(self._combined.combined)

    def written(self) -> list[str]:
        return [name for grads in self._flats.values() for name in grads.written()]

    def consume(self) -> None:
        self._has_stepped = True
        self._forget()

    def _forget(self) -> None:
        self.release()
        for grads in self._flats.values():
            grads.made.clear()

    def zero(self, set_to_none: bool, *, absent: bool = False) -> None:
        self._forget()
        if self._num_sent:
            self._causes.add("cleared")
        self._invalidate()
        self._await_grads()
        for grads in self._flats.values():
            if set_to_none:
                grads.set_none()
            else:
                grads.zero(absent=absent)

    def keep_reduced(self) -> None:
        """Reduce-scatter all buckets now and keep the shards for the next ``reduced()``."""
        if self.phase is GradPhase.REDUCED:
            return
        assert self.phase is GradPhase.FROZEN, "freeze() comes before keep_reduced()"
        if self._comm.world_size == 1:
            for grads in self._flats.values():
                grads.pack()
        else:
            for grads in self._flats.values():
                if grads.retained is None:
                    # fp32, so that sums in fp32 are not rounded again.
                    device = grads.buffer.data.device
                    grads.retained = ShardArena(grads.flat, device, torch.float32)
            for bucket, parts in self._reduce(keep=True):
                arena = self._flats[bucket.flat].retained
                assert arena is not None
                add_up(parts, arena.view(bucket))
        self.phase = GradPhase.REDUCED
        self._snapshot = self._take_snapshot()

    def _take_snapshot(self) -> GradSnapshot:
        # On the CPU with checksums. On a device the host would have to wait: there, scalers report
        # that they have unscaled, and writes by ``grad.data`` are not seen.
        params = [param for grads in self._flats.values() for param in grads.params]
        return GradSnapshot(params, memory_of(param.grad for param in params))

    def release(self) -> None:
        """Forget shards kept by keep_reduced(), and frozen gradients."""
        self.phase, self._factor, self._snapshot = GradPhase.ACCUMULATING, None, None
        for grads in self._flats.values():
            grads.forget()

    def reduced(self) -> Iterator[tuple[Bucket, PartialSums]]:
        """Yield (bucket, its shard of the summed gradient).

        In the order of launches, or the reverse (in_forward_order). Parts are in the dtype of the
        message and valid until the next are asked for. After keep_reduced() there is one, the sum.
        """
        assert self.phase is not GradPhase.ACCUMULATING, "freeze() comes before reduced()"
        if self._comm.world_size == 1:
            for grads in self._flats.values():
                for bucket in grads.flat.buckets:
                    grads.pack(bucket.start + bucket.numel)
                    yield bucket, (grads.bucket_views[bucket.index],)
        elif self.phase is GradPhase.REDUCED:
            states = reversed(self._states) if self._in_forward_order else self._states
            for state in states:
                assert state.grads.retained is not None
                yield state.bucket, (state.grads.retained.view(state.bucket),)
        else:
            yield from self._reduce(keep=False)

    def _reduce(self, *, keep: bool) -> Iterator[tuple[Bucket, PartialSums]]:
        """Yield every bucket and tensors that add up to its sum; ends the iteration. Collective.

        Parts are valid until the next are asked for. With ``keep`` they may be in the retained
        shard already.
        """
        try:
            ahead = len(self._states) if self._overlaps else IN_FLIGHT
            early = [state for state in self._states if state.status is BucketStatus.SENT_EARLY]
            self._are_reduced_early = len(early) > 0
            num_early = self._num_sent
            # The agreement goes ahead of the buckets that are left. Where messages have an order,
            # flush() has sent them.
            self._ask_changed()
            self._send_until(ahead, keep=keep)
            changed = self._agree_changed()
            order = list(range(len(self._states)))
            if self._overlaps and self._in_forward_order and not changed:
                order = self._forward_order(num_early)
            self._post_receive(len(self._states) - 1, self._number + 1)
            for index in order:
                state = self._states[index]
                self._send_until(index + ahead, keep=keep)
                with record_function("shardfuse::wait_reduce_scatter"):
                    if index in changed:
                        assert state.completion is not None
                        state.completion.wait()
                        state.completion = self._launch(index, keep=keep, resend=1)
                    assert state.completion is not None
                    parts = state.completion.wait()
                yield state.bucket, parts
                if index > 0:  # the buffer of this bucket is free now
                    self._post_receive(index - 1, self._number + 1)
        finally:
            self._iteration.increment()
            self._pending.learn_unused()
            self._begin_iteration()
            self._post_agreement()

    def _forward_order(self, num_early: int) -> list[int]:
        """Return the indices of buckets, those first whose parameters forward reads first.

        On the CPU the first half of the ``num_early`` that were sent early comes before: their sums
        have arrived, and are used while the last ones travel. On a device, sums that forward needs
        last would delay the kernels of those that it needs first.
        """
        indices = list(range(len(self._states)))
        arrived = num_early // 2 if self._model is AsyncModel.UNORDERED else 0
        return indices[:arrived] + indices[arrived:][::-1]

    def _send_until(self, count: int, *, keep: bool) -> None:
        """Send the first ``count`` buckets, unless they were sent early."""
        for index in range(self._num_sent, min(count, len(self._states))):
            state = self._states[index]
            state.completion = self._launch(index, keep=keep)
            state.status = BucketStatus.SENT
            self._num_sent += 1

    def _ask_changed(self) -> None:
        """Launch the all-reduce of the facts that hosts must know: one float for each bucket, if
        it has changed since it was sent, and one for each parameter, if it has a gradient.
        """
        if not self._overlaps:
            return
        assert self._agreement is not None
        flags = [float(state.is_stale()) for state in self._states]
        if any(flags) and not self._causes:
            self._causes.add("written")
        for grads in self._flats.values():
            flags += [-float(s.param in grads.no_local_grad) for s in grads.flat.slots]
        self._agreement.launch(flags, self._names.agreement(self._number))

    def _agree_changed(self) -> set[int]:
        """Return which buckets have changed on any rank, and are to be sent again."""
        if not self._overlaps:
            return set()
        assert self._agreement is not None
        with record_function("shardfuse::wait_agreement"):
            answer = iter(self._agreement.wait())
        changed = {i for i, flag in enumerate(itertools.islice(answer, len(self._states))) if flag}
        for grads in self._flats.values():
            slots = grads.flat.slots
            grads.unused = {s.param for s, flag in zip(slots, answer, strict=False) if flag < 0}
        self._num_wasted = self._num_wasted + 1 if changed else 0
        if self._num_wasted == _MAX_WASTED:
            self._may_overlap.clear()  # on all ranks alike
            known = [text for cause, text in _CAUSES.items() if cause in self._causes]
            logger.warning(
                "Gradients changed in %d steps in a row after they had been sent, and were sent "
                "twice: %s. From now on they are sent in step(), which changes no result; "
                "sharding={'overlap_grad_sync': False} does so from the start.",
                _MAX_WASTED,
                "; ".join(known) or "another rank changed its own, and says why",
            )
        if not changed or self._num_wasted == _MAX_WASTED:
            self._causes.clear()
        return changed
