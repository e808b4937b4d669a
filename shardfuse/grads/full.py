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
i - 1 of this one. So its receive can be posted before this rank starts to send parameters.

A backend without labels (NCCL, HCCL) runs collectives in the order of launches. There, buckets go
through a process group that no other code uses (group_copy()). Each iteration launches all buckets
there in one order, then those that are sent again, and nothing else. So all ranks keep the order,
whatever else they communicate. The rest is sent at the end of the backward that has sent the first
bucket. A rank that had no backward sends all buckets at the start of the next collective method. A
mesh has no such group: nothing else may communicate between its ranks' backwards and that method.
If torch's Join is used, no bucket is sent early: a rank that has joined expects Join's own message
first.
"""

from __future__ import annotations

import enum
import itertools
import logging
import operator
from bisect import bisect_left
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.profiler import record_function

from shardfuse.buffers import (
    CombinedBuffers,
    FlatBuffer,
    ShardArena,
    are_at,
    detach_copy,
    has_external_refs,
    is_sole_owner,
)
from shardfuse.codecs import GradCodec, GradCodecChoice, ReduceRequest
from shardfuse.comm import Communicator, Completion
from shardfuse.comm.native import group_copy
from shardfuse.comm.session import Counter
from shardfuse.comm.transport import AsyncModel, BufferPool, PartialSums, add_up
from shardfuse.grads.source import (
    FlatParams,
    GradPhase,
    GradSnapshot,
    GradSource,
    HostAllReduceMax,
    MessageNames,
    PendingGrads,
    check_grad,
    clear_grad,
    in_backward_order,
    is_absent,
    is_nested_backward,
    memory_of,
    register_hooks,
)
from shardfuse.layout import Bucket, Flat, Fragment, ParamSpec, slots_in
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

_SHORT_NUMEL = 64 << 10
"""A 1-D gradient of at most so many elements is copied together with its neighbours."""

_get_grad = operator.attrgetter("grad")
_get_nbytes = operator.attrgetter("nbytes")


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
    """

    def __init__(
        self,
        comm: Communicator,
        codec: GradCodecChoice,
        *,
        overlaps: Collection[AsyncModel] = (),
        waits: bool = False,
    ) -> None:
        super().__init__()
        self._comm = comm
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
        order = in_backward_order([*self._flats.values(), *added])
        self._states = [BucketState(grads, bucket) for grads, bucket in order]
        self._pending = PendingGrads(order)
        self._restart()
        if self._overlaps and self._agreement is None:
            self._sender = group_copy(self._comm, self)
            self._agreement = HostAllReduceMax(self._comm.world, device)
        self._flats.update({grads.flat.index: grads for grads in added})

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

    def _slot(self, index: int, iteration: int) -> int:
        first = self._names.first_slot
        if self._overlaps:
            return first + (index - iteration) % (len(self._states) + 1)
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
        with self._comm.session.reports_errors("backward()"):
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
            while self._num_sent < len(self._states) and self._pending.is_ready(self._num_sent):
                if not self._send_early():
                    break

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
        return GradSnapshot(params, memory_of(map(_get_grad, params)))

    def release(self) -> None:
        """Forget shards kept by keep_reduced(), and frozen gradients."""
        self.phase, self._factor, self._snapshot = GradPhase.ACCUMULATING, None, None
        for grads in self._flats.values():
            grads.forget()

    def reduced(self) -> Iterator[tuple[Bucket, PartialSums]]:
        """Yield (bucket, its shard of the summed gradient), in launch order.

        Parts are in the dtype of the message and valid until the next are asked for. After
        keep_reduced() there is one, the sum.
        """
        assert self.phase is not GradPhase.ACCUMULATING, "freeze() comes before reduced()"
        if self._comm.world_size == 1:
            for grads in self._flats.values():
                for bucket in grads.flat.buckets:
                    grads.pack(bucket.start + bucket.numel)
                    yield bucket, (grads.bucket_views[bucket.index],)
        elif self.phase is GradPhase.REDUCED:
            for grads in self._flats.values():
                assert grads.retained is not None
                for bucket in grads.flat.buckets:
                    yield bucket, (grads.retained.view(bucket),)
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
            # The agreement goes ahead of the buckets that are left. Where messages have an order,
            # flush() has sent them.
            self._ask_changed()
            self._send_until(ahead, keep=keep)
            changed = self._agree_changed()
            for index, state in enumerate(self._states):
                self._send_until(index + ahead, keep=keep)
                with record_function("shardfuse::wait_reduce_scatter"):
                    if index in changed:
                        assert state.completion is not None
                        state.completion.wait()
                        state.completion = self._launch(index, keep=keep, resend=1)
                    assert state.completion is not None
                    parts = state.completion.wait()
                self._post_receive(index, self._number + 1)
                yield state.bucket, parts
        finally:
            self._iteration.increment()
            self._pending.learn_unused()
            self._begin_iteration()

    def _send_until(self, count: int, *, keep: bool) -> None:
        """Send the first ``count`` buckets, unless they were sent early."""
        for index in range(self._num_sent, min(count, len(self._states))):
            state = self._states[index]
            state.completion = self._launch(index, keep=keep)
            state.status = BucketStatus.SENT
            self._num_sent += 1

    def _ask_changed(self) -> None:
        """Launch the all-reduce over what hosts must know: one float for each bucket, whether it
        has changed since it was sent, and one for each parameter, whether it has a gradient.
        """
        if not self._overlaps:
            return
        assert self._agreement is not None
        flags = [float(state.is_stale()) for state in self._states]
        if any(flags) and not self._causes:
            self._causes.add("written")
        for grads in self._flats.values():
            flags += [-float(s.param in grads.no_local_grad) for s in grads.flat.slots]
        self._agreement.launch(flags)

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


@dataclass
class GradBuffer:
    """The gradients of one flat: buffer, per-parameter views of it, parameters, by position."""

    buffer: FlatBuffer
    params: Sequence[Tensor]
    specs: Sequence[ParamSpec]
    fragments: Mapping[int, Sequence[Fragment]]  # this rank's, by bucket
    codec: GradCodec
    starts: list[int] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)  # in bytes
    views: list[Tensor] = field(default_factory=list)
    addresses: list[int] = field(default_factory=list)
    positions: dict[int, list[int]] = field(default_factory=dict)  # of slots, by bucket
    bucket_views: dict[int, Tensor] = field(default_factory=dict)  # of the buffer, by bucket
    retained: ShardArena | None = None  # reduced shards, when they must outlive one bucket
    no_local_grad: set[int] = field(default_factory=set)  # params without one on this rank
    unused: set[int] | None = None  # those without one on any rank, if the ranks have told
    outside: list[int] = field(default_factory=list)  # positions whose slots pack() is to fill
    outside_grads: list[Tensor] = field(default_factory=list)  # with these gradients
    absent: list[int] = field(default_factory=list)  # positions that have none
    cleared: dict[int, Tensor] = field(default_factory=dict)  # -0.0 since zero(), by position
    is_joined: bool = False  # whether neighbours are copied together
    may_be_aliased: bool = False  # whether other code may hold a view, or a view of one
    made: dict[int, int] = field(default_factory=dict)
    """By position, the version of a view after autograd has written to it in this step."""

    def __post_init__(self) -> None:
        self.buffer.padding = -0.0  # what is padded may be absent
        self.buffer.clear_padding()
        # As .data each has a version of its own, which counts what is done through it.
        self.views = [self.buffer.view(i, spec).data for i, spec in enumerate(self.specs)]
        self.addresses = [view.data_ptr() for view in self.views]
        self.starts = [slot.start for slot in self.flat.slots]
        self.positions = {b.index: list(slots_in(self.flat, b)) for b in self.flat.buckets}
        self.bucket_views = {b.index: self.buffer.bucket(b) for b in self.flat.buckets}
        self.sizes = [view.nbytes for view in self.views]
        self.is_joined = self.buffer.data.device.type == "cpu" and all(
            spec.stride == (1,) and spec.numel <= _SHORT_NUMEL for spec in self.specs
        )

    @property
    def flat(self) -> Flat:
        """Geometry of the buffer."""
        return self.buffer.flat

    def holds(self, position: int, grad: Tensor) -> bool:
        """Return whether ``grad`` is the view of its slot, and was not pointed elsewhere."""
        return grad is self.views[position] and grad.data_ptr() == self.addresses[position]

    def view(self, position: int) -> Tensor:
        """Return the view of a slot, a new one if the old was pointed elsewhere."""
        if self.views[position].data_ptr() != self.addresses[position]:
            self.views[position] = self.buffer.view(position, self.specs[position]).data
        return self.views[position]

    def collect(self, position: int) -> None:
        """Move a gradient that autograd has just made into its slot, and free it.

        A gradient that the caller holds too, or that has a graph, stays: pack() will copy it.
        """
        self.cleared.pop(position, None)
        param = self.params[position]
        grad = param.grad
        if grad is None or grad.layout != torch.strided:
            return
        if self.holds(position, grad):
            self.made[position] = grad._version
            return
        if not self._fits(position, grad):  # cast or moved since: step() reports it on every rank
            return
        # A gradient that was never written in place is new: only another hook can have seen it.
        is_new = grad._version == 0 and len(param._post_accumulate_grad_hooks) == 1
        if grad.requires_grad or not (is_new or is_sole_owner(param)):
            return
        with torch.no_grad():
            if has_external_refs(self.views, position):
                detach_copy(self.views[position])
            view = self.view(position).copy_(grad)
        param.grad = view
        self.made[position] = view._version
        self.may_be_aliased = True

    def written(self) -> list[str]:
        """Return the params whose gradients were written to after autograd had made them.

        Those with other post-accumulate hooks are left out: such a hook may be the writer, and runs
        for each gradient on every rank alike.
        """
        return [
            self.specs[position].name
            for position, version in self.made.items()
            if self.views[position]._version != version
            and self.params[position].grad is self.views[position]
            and len(self.params[position]._post_accumulate_grad_hooks) == 1
        ]

    def _fits(self, position: int, grad: Tensor) -> bool:
        """Return whether ``grad`` is of the dtype, device and shape that its slot was laid out for.

        Another one cannot be replaced by a view of the slot, and raising under backward would reach
        this rank alone.
        """
        data = self.buffer.data
        is_alike = grad.dtype is data.dtype and grad.device == data.device
        return is_alike and grad.shape == self.specs[position].shape

    def fill(self, bucket: Bucket) -> GradSnapshot | None:
        """Fill the slots of ``bucket`` before freeze(), and return a snapshot of its gradients.

        None, and nothing is done, if a gradient is not in its slot: edits of it could not all be
        seen.
        """
        positions = self.positions[bucket.index]
        params = [self.params[position] for position in positions]
        grads = [param.grad for param in params]
        for position, grad in zip(positions, grads, strict=True):
            if grad is not None and not self.holds(position, grad):
                return None
        for position, grad in zip(positions, grads, strict=True):
            if grad is None:
                if self.may_be_aliased and has_external_refs(self.views, position):
                    detach_copy(self.views[position])
                self.buffer.clear(position)
        view = self.bucket_views[bucket.index]
        return GradSnapshot(params, [view] if view.device.type == "cpu" else [], grads)

    def freeze(self) -> None:
        """Find out which gradients are not in their slots, for pack(), and which do not exist.

        Raises:
            RuntimeError: a gradient is sparse.
        """
        self.no_local_grad.clear()
        self.unused = None
        self.forget()
        if self._is_in_place():
            return
        grads = list(map(_get_grad, self.params))
        if self._are_new(grads):
            self.outside, self.outside_grads = list(range(len(grads))), grads
        else:
            self.absent = self._sort(grads)

    def clear_absent(self) -> None:
        """Fill the slots of gradients that do not exist with -0.0, after protect_aliases()."""
        for position in self.absent:
            self.buffer.clear(position)
            self.no_local_grad.add(self.flat.slots[position].param)
        for position, grad in self.cleared.items():
            if self.params[position].grad is grad and is_absent(grad):
                self.no_local_grad.add(self.flat.slots[position].param)

    def _is_in_place(self) -> bool:
        """Return whether every gradient is in its slot, as it is after a backward.

        No list is made: malloc sorts the thousands of pieces that backward has freed at the next
        request of 1 KiB or more, which takes milliseconds.
        """
        grads = map(_get_grad, self.params)
        return all(map(operator.is_, grads, self.views)) and are_at(self.views, self.addresses)

    def _are_new(self, grads: Sequence[Tensor | None]) -> bool:
        """Return whether ``grads`` are all there, of their slots' sizes, and none is a view of one.

        So it is if the caller sets them. There may be thousands, so no loop in Python.
        """
        if any(map(operator.is_, grads, self.views)):
            return False
        try:
            return all(map(operator.eq, map(_get_nbytes, grads), self.sizes))
        except (AttributeError, RuntimeError):  # of None; of a sparse one
            return False

    def _sort(self, grads: Sequence[Tensor | None]) -> list[int]:
        """List which of ``grads`` are outside their slots; return the positions of absent ones."""
        views, addresses, sizes, strided = self.views, self.addresses, self.sizes, torch.strided
        absent = []
        # As few calls as possible: there may be thousands.
        for position, grad in enumerate(grads):
            if grad is None:
                absent.append(position)
            # holds(), inlined.
            elif grad is not views[position] or grad.data_ptr() != addresses[position]:
                if grad.layout is not strided or grad.nbytes != sizes[position]:
                    check_grad(grad, self.specs[position])
                self.outside.append(position)
                self.outside_grads.append(grad)
        return absent

    def protect_aliases(self, extents: Sequence[tuple[int, int]]) -> None:
        """Copy out tensors that alias a slot which is about to be written, and are still in use.

        These are gradients in the slots of other parameters, and views that other code holds.

        Args:
            extents: first and last address of the memory that slots of any flat lie in.
        """
        addresses = list(map(Tensor.data_ptr, self.outside_grads))
        for first, last in extents:
            pairs = zip(self.outside_grads, addresses, strict=True)
            for grad in [grad for grad, address in pairs if first <= address <= last]:
                detach_copy(grad)
        for position in itertools.chain(self.absent, self.outside) if self.may_be_aliased else ():
            if has_external_refs(self.views, position):
                detach_copy(self.views[position])

    def pack(self, end: int | None = None) -> None:
        """Copy gradients into the slots that start before ``end``, all without.

        Bucket by bucket, so that a bucket is sent while it is in the cache.
        """
        position = len(self.params) if end is None else bisect_left(self.starts, end)
        count = bisect_left(self.outside, position)
        if count == 0:
            return
        now, grads = self.outside[:count], self.outside_grads[:count]
        del self.outside[:count], self.outside_grads[:count]
        start, stop = now[0], now[-1] + 1
        if self.is_joined and stop - start == count:
            self.buffer.join(start, grads)
            return
        views = [self.views[position] for position in now]
        if not are_at(views, [self.addresses[position] for position in now]):
            views = [self.view(position) for position in now]
        torch._foreach_copy_(views, grads)  # one call: there may be thousands

    def forget(self) -> None:
        """Drop the lists of freeze(), so that gradients are not kept alive."""
        self.outside, self.outside_grads, self.absent = [], [], []

    def rebind_grads(self) -> None:
        """Make every gradient a view of the buffer, to which pack() has copied its values."""
        self.may_be_aliased = True
        for position, param in enumerate(self.params):
            grad = param.grad
            if grad is not None and not self.holds(position, grad):
                param.grad = self.view(position)
                if self.cleared.get(position) is grad:
                    self.cleared[position] = param.grad

    def set_none(self) -> None:
        """Set every gradient to None."""
        self.cleared.clear()
        for param in self.params:
            param.grad = None

    def zero(self, *, absent: bool) -> None:
        """Set every gradient to zero; with ``absent`` to -0.0, and remember which they are.

        Nothing else is written: a slot whose gradient was moved, or dropped, may be in use.
        """
        value = -0.0 if absent else 0.0
        self.cleared.clear()
        if self._is_in_place():
            self.buffer.data.fill_(value)  # -0.0 does in the padding too
            if absent:
                self.cleared.update(enumerate(self.views))
            return
        run: list[int] = []  # neighbours in their slots, which are filled together
        for position, grad in enumerate(map(_get_grad, self.params)):
            if grad is not None and self.holds(position, grad):
                run.append(position)
            else:
                self._fill(run, value)
                run = []
                if grad is not None:
                    clear_grad(grad, value)
            if absent and grad is not None and grad.layout == torch.strided:
                self.cleared[position] = grad
        self._fill(run, value)

    def _fill(self, run: Sequence[int], value: float) -> None:
        """Fill the slots of neighbours, and the padding between them, with ``value``."""
        if run:
            last = self.flat.slots[run[-1]]
            self.buffer.data[self.starts[run[0]] : last.start + last.numel].fill_(value)
