"""ShardedGrads: each rank keeps only its shard of the summed gradients (ZeRO stage 2).

[Note: sums during backward] At stage 2 a bucket of gradients is copied into a buffer as soon as
autograd has made all of it, sent at once, and its gradients are freed. The received parts are added
to this rank's fp32 shard. All backwards of a step add to the same shard, so only the shard stays. A
few buckets are in flight at a time: if the link is slower than backward, backward waits for it.

Waiting during backward needs an order that all ranks keep, or two ranks could wait for each other.
So every backward sends one iteration to its end: a bucket that it has not completed is sent as it
is. If the end of the backward cannot be seen (reentrant checkpoints run backwards inside of one),
the clip, norm or step that follows sends the rest, before any other message. A rank that runs no
backward in a step sends one iteration all the same, of absent gradients.

A gradient that comes after its bucket was sent stays in p.grad: of a layer that is used now and
then, or twice under reentrant checkpoints. In step() the ranks agree, by one small all-reduce, on
the number of iterations and on which of these buckets to send again. The same all-reduce shows
whether all ranks have cleared their gradients alike, and which parameters have no gradient on any.

A backend without labels (NCCL, HCCL) sends through a process group that no other code uses, as in
[Note: sent early] of grads/full.py. So the model may communicate under forward and backward, and a
rank need not run backward where others do. There is one exception: if ranks use different layers in
a backward with collectives of the model's own, one rank may wait for a bucket that another rank
sends after such a collective. They wait for each other, until the group's timeout. Use stage 1
there, which waits for nothing under backward.
"""

from __future__ import annotations

import itertools
import logging
import sys
import warnings
import weakref
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.profiler import record_function

from shardfuse.buffers import ShardArena
from shardfuse.codecs import GradCodec, GradCodecChoice, ReduceRequest
from shardfuse.comm import Communicator, Completion
from shardfuse.comm.numbers import Counter
from shardfuse.comm.transport import AsyncModel, BufferPool, Label, PartialSums, add_up
from shardfuse.grads.source import (
    FlatParams,
    GradPhase,
    GradSource,
    HostAllReduceMax,
    MessageNames,
    PendingGrads,
    check_grad,
    clear_grads,
    in_backward_order,
    is_nested_backward,
    overlap_communicators,
    register_hooks,
    slot_range,
)
from shardfuse.layout import Bucket, Flat, Fragment, ParamSpec, slots_in
from shardfuse.runtime import Streams, before_tracing, untraced

logger = logging.getLogger("shardfuse")

_SHARE = 24
"""At most this part of the gradients is in flight, if that is two buckets or more."""

_FEWEST, _MOST = 2, 8
"""Buckets in flight at a time: enough for a link that is never idle, not more than it needs."""

NUM_COUNTS = 3
"""Numbers that ranks compare when they step, beside one for each bucket."""


def num_in_flight(numels: Sequence[int]) -> int:
    """Return how many of the buckets of ``numels`` elements are in flight at a time, at most."""
    enough = sum(numels) // (_SHARE * max(numels, default=1))
    return min(max(enough, _FEWEST), _MOST, max(len(numels), 1))


class _SlotRange(NamedTuple):
    """A slot intersected with a bucket."""

    position: int  # of the slot
    start: int  # in elements of the bucket
    param_start: int  # in elements of the parameter
    numel: int


@dataclass
class BucketState:
    """One bucket of the backward order."""

    shard: GradShardBuffer
    bucket: Bucket
    num_in_flight: int = 0
    """Reduce-scatters launched and not yet added to the shard."""


class ShardedGrads(GradSource):
    """Sums gradients over ranks during backward, and keeps this rank's shard, in fp32.

    ``p.grad`` is None once it was sent; see [Note: sums during backward]. step() consumes the
    gradients: after it a new sum begins, as after zero_grad().

    Args:
        comm: the ranks to sum over.
        codec: how gradients are encoded.
        waits: wait for each reduce-scatter at once, to find out whether overlap causes a fault.
        in_forward_order: yield buckets in the order in which forward reads the parameters.
    """

    how_summed = "summed during backward (stage=2)"

    def __init__(
        self,
        comm: Communicator,
        codec: GradCodecChoice,
        *,
        waits: bool = False,
        in_forward_order: bool = False,
    ) -> None:
        super().__init__()
        self._comm = comm
        self._in_forward_order = in_forward_order
        self._sender = comm  # of buckets
        self._agreement: HostAllReduceMax | None = None
        self._codec = codec
        self._flats: dict[int, GradShardBuffer]
        self._buffers = BufferPool()
        self._consumed = ConsumedGradGuard()
        self._streams = Streams()
        # The schedule
        self._states: list[BucketState] = []  # in backward order
        self._pending = PendingGrads()
        self._in_flight: deque[tuple[Completion[PartialSums], BucketState]] = deque()
        self._capacity = _FEWEST
        self._names = MessageNames(comm)
        self._num_orders = Counter(comm.session)  # how often the order has changed
        self._num_resent = Counter(comm.session)  # buckets sent outside of iterations
        self._num_sent = 0  # buckets, since the last restart
        self._num_iterations = 0  # begun since the gradients were cleared last
        self._has_ready = False  # autograd has made a gradient for the open iteration
        self._is_done = False  # the current backward has sent its iteration
        self._is_queued = False  # autograd calls _end_backward() at the end of this backward
        self._is_lost = False  # an error has ended an exchange since the gradients were cleared
        self._waits = waits
        comm.session.on_restart(self._restart)

    @property
    def nbytes(self) -> int:
        """Bytes held for gradients: shards, and buffers to send from and to receive into."""
        shards = sum(shard.arena.data.nbytes for shard in self._flats.values())
        staged = self._buffers.nbytes + self._comm.staging_nbytes
        staged += self._sender.staging_nbytes if self._sender is not self._comm else 0
        return shards + staged

    def attach(self, members: Sequence[FlatParams], device: torch.device) -> None:
        self._drain()  # before anything changes here: another rank may fail meanwhile
        if self._agreement is None:
            self._sender, comm = overlap_communicators(self._comm, self)
            self._agreement = HostAllReduceMax(comm, device)
        added = []
        for flat, params, specs, fragments in members:
            codec = self._codec.of(params[0].dtype)
            arena = ShardArena(flat, device, torch.float32)
            shard = GradShardBuffer(
                flat, params, specs, fragments, codec, arena, self._consumed, self._streams
            )
            register_hooks(self, flat, params)
            added.append(shard)
        order = in_backward_order([*self._flats.values(), *added])
        self._states = [BucketState(shard, bucket) for shard, bucket in order]
        self._pending = PendingGrads(order)
        self._capacity = num_in_flight([bucket.numel for _, bucket in order])
        self._num_orders.increment()
        self._names.begin_order(len(order))
        self._sender.forget_posted(self._names.sender)  # what was posted in the old order
        self._begin_order()
        self._flats.update({shard.flat.index: shard for shard in added})
        if self.phase is GradPhase.REDUCED:  # by a clip or unscale_(): the new flats have no sums
            for shard in added:
                shard.finish_sum()
                shard.unused = set(shard.no_local_grad)

    def _drain(self) -> None:
        """Receive everything in flight on any rank, before the order changes. Collective."""
        self._end_iteration()
        self._agree()
        self._receive_all()

    def _restart(self) -> None:
        """Begin anew after an error: everything that was in flight is lost."""
        self._is_lost |= len(self._in_flight) > 0 or self._index > 0
        self._begin_order()

    def _begin_order(self) -> None:
        """Number buckets from 0, equal on all ranks, and post the first receives."""
        self._in_flight.clear()
        for state in self._states:
            state.num_in_flight = 0
        self._num_sent = 0
        for number in range(self._capacity if self._states else 0):
            self._post_receive(number)
        self._begin_iteration(is_done=False)

    def _begin_iteration(self, *, is_done: bool) -> None:
        self._has_ready, self._is_done = False, is_done
        self._pending.restart()
        for shard in self._flats.values():
            shard.forget_partly_sent()

    @property
    def _index(self) -> int:
        """The bucket of the order that the open iteration sends next; 0 if none is open."""
        return self._num_sent % len(self._states) if self._states else 0

    def _label(self, number: int) -> Label:
        """Return the label of the ``number``-th bucket that is sent."""
        iteration, index = divmod(number, len(self._states))
        label = self._names.label(iteration, index)
        return label._replace(text=f"order {self._num_orders.value}, {label.text}")

    def _slot(self, number: int) -> int:
        return self._names.first_slot + number % self._capacity

    def _post_receive(self, number: int) -> None:
        """Post the receive of the ``number``-th bucket."""
        if self._comm.async_model is AsyncModel.UNORDERED:
            state = self._states[number % len(self._states)]
            label, slot = self._label(number), self._slot(number)
            where = state.shard.arena.data
            state.shard.codec.post_receive(self._sender, state.bucket, where, label, slot)

    # During backward

    def on_grad(self, flat: int, position: int) -> None:
        """Take note that autograd has made a gradient; send the buckets that are complete."""
        self.num_made += 1
        self.phase = GradPhase.ACCUMULATING
        if not self.control.may_send(is_ordered=False):  # Join is refused at stage 2
            return
        shard = self._flats[flat]
        with self._comm.session.reports_errors("backward()"):
            self._streams.note(shard.arena.data.device)
            if self._is_done or not self._states:
                return
            self._pending.mark_ready(flat, position)
            self._has_ready = True  # also by a parameter without elements: its backward counts
            if not self._is_queued and not is_nested_backward():
                self._is_queued = True
                engine = torch.autograd.Variable._execution_engine
                engine.queue_callback(self._end_backward)
            while not self._is_done and self._pending.is_ready(self._index):
                self._send_next()

    @untraced
    def _end_backward(self) -> None:
        self._is_queued = False
        with self._comm.session.reports_errors("backward()"):
            self._end_iteration()
            self._is_done = False
            self._streams.end()

    @torch.no_grad()
    def _send_next(self) -> None:
        """Send the next bucket as its gradients are now; after the last, the iteration ends."""
        self.control.before_send()
        number, state = self._num_sent, self._states[self._index]
        self._num_iterations += number % len(self._states) == 0
        # Hooks run on the stream of their node's forward: this one waits for the others.
        self._streams.join()
        while len(self._in_flight) >= self._capacity:
            self._receive()
        send_buffer = number % self._num_send_buffers
        self._launch(state, send_buffer, self._label(number), self._slot(number))
        self._num_sent += 1
        if self._waits:
            self._receive_all()
        if self._index == 0:
            self._begin_iteration(is_done=True)

    @property
    def _num_send_buffers(self) -> int:
        """Peers may read the last buffer until the next bucket is launched, if they read memory."""
        return self._capacity + int(self._comm.async_model is AsyncModel.BLOCKING)

    def _launch(self, state: BucketState, send_buffer: int, label: Label, slot: int) -> None:
        """Move the gradients of a bucket into a buffer, and launch its reduce-scatter."""
        shard, bucket = state.shard, state.bucket
        with record_function(f"shardfuse::reduce_scatter b{bucket.index}"):
            like = torch.empty(0, dtype=shard.params[0].dtype, device=shard.arena.data.device)
            whole = self._buffers.get("bucket", send_buffer, bucket.numel, like)
            shard.move(bucket, whole)
            request = ReduceRequest(whole, send_buffer=send_buffer, slot=slot, label=label)
            completion = shard.codec.launch(self._sender, self._buffers, request)
        self._in_flight.append((completion, state))
        state.num_in_flight += 1

    def _end_iteration(self) -> None:
        """Send the rest of the open iteration; one is open if backward has made a gradient."""
        if self._has_ready and self._index == 0 and self._states:
            self._send_next()
        while self._index > 0:
            self._send_next()

    def _add_oldest(self) -> None:
        """Wait for the oldest bucket in flight, and add it to the shard."""
        completion, state = self._in_flight.popleft()
        state.num_in_flight -= 1
        try:
            with record_function("shardfuse::wait_reduce_scatter"):
                parts = completion.wait()
            state.shard.add(state.bucket, parts)
        except BaseException:  # an interrupt, too: the sum lacks this bucket until zero_grad()
            self._is_lost = True
            raise

    def _receive(self) -> None:
        """Add the oldest bucket of an iteration, and post the receive that reuses its buffer."""
        self._add_oldest()
        self._post_receive(self._num_sent - len(self._in_flight) - 1 + self._capacity)

    @torch.no_grad()
    def _receive_all(self) -> None:
        """Wait for everything in flight."""
        while self._in_flight:
            self._receive()

    # In a region

    def flush(self, *, is_frozen: bool = False) -> None:
        """Send the rest of the open iteration, and at least one iteration in every step."""
        if self._num_iterations == 0:
            self._has_ready = True
        self._end_iteration()

    def unused(self, bucket: Bucket, parts: PartialSums) -> set[int]:
        return self._flats[bucket.flat].unused

    def mean_factor(self, flat: int) -> float | None:
        return self._flats[flat].codec.factor_after_sum(self._comm.world.world_size)

    def freeze(self) -> None:
        if self.phase is GradPhase.REDUCED and not self._has_unsent():
            return
        self.phase = GradPhase.FROZEN

    def _has_unsent(self) -> bool:
        """Return whether there are gradients that were not sent."""
        return any(state.shard.has_gradients(state.bucket) for state in self._states)

    def reduced(self) -> Iterator[tuple[Bucket, PartialSums]]:
        """Yield (bucket, this rank's shard of the sum).

        In the order in which buckets were sent, or the reverse (in_forward_order).
        """
        assert self.phase is not GradPhase.ACCUMULATING, "freeze() comes before reduced()"
        if self.phase is GradPhase.FROZEN:
            self._complete()
        for state in reversed(self._states) if self._in_forward_order else self._states:
            while state.num_in_flight:
                with torch.no_grad():
                    self._receive()
            yield state.bucket, (state.shard.arena.view(state.bucket),)

    def _complete(self) -> None:
        """Send all gradients of all ranks; some may be in flight still.

        Raises:
            RuntimeError: gradients were lost, or ranks have cleared theirs at different times.
        """
        if self._is_lost:
            raise RuntimeError(
                "An error has ended the exchange of gradients, and what was sent is lost. Call "
                "zero_grad() and run forward and backward again."
            )
        self.flush(is_frozen=True)
        self._agree()
        self._is_done = False
        self._pending.learn_unused()
        for shard in self._flats.values():
            shard.finish_sum()
        self.phase = GradPhase.REDUCED

    def _agree(self) -> None:
        """Send as many iterations as the rank with most, and buckets with late gradients again."""
        if not self._states:
            return
        late = [float(state.shard.has_gradients(state.bucket)) for state in self._states]
        # The number of iterations when gradients were cleared last, which must be equal.
        before = self._num_sent // len(self._states) - self._num_iterations
        mine = [self._num_iterations, before, -before, *late]
        for shard in self._flats.values():
            lacked = shard.lacked()
            mine += [-float(slot.param in lacked) for slot in shard.flat.slots]
        assert self._agreement is not None
        self._agreement.launch(mine)
        answer = iter(self._agreement.wait())
        num_iterations, most, least = itertools.islice(answer, NUM_COUNTS)
        late = list(itertools.islice(answer, len(late)))
        for shard in self._flats.values():
            slots = shard.flat.slots
            shard.unused = {s.param for s, flag in zip(slots, answer, strict=False) if flag < 0}
        if most != -least:
            raise RuntimeError(
                "Ranks have cleared gradients in flight at different times, so gradients of two "
                "batches are mixed. Call zero_grad() at the same place on all ranks, and run the "
                "same number of backward() on each (stage=2)."
            )
        while self._num_iterations < num_iterations:
            self._has_ready = True
            self._end_iteration()
        self._resend([index for index, is_late in enumerate(late) if is_late])
        for shard in self._flats.values():
            shard.forget_partly_sent()

    @torch.no_grad()
    def _resend(self, indices: Sequence[int]) -> None:
        """Send buckets outside of an iteration, and add them to the shard."""
        if indices:
            self._receive_all()
        for index in indices:
            resend = self._num_resent.increment()
            label, slot = self._names.label(0, index, resend), self._names.first_slot - 1
            send_buffer = self._num_send_buffers + resend % 2
            self._launch(self._states[index], send_buffer, label, slot)
            self._add_oldest()

    def keep_reduced(self) -> None:
        assert self.phase is not GradPhase.ACCUMULATING, "freeze() comes before keep_reduced()"
        if self.phase is GradPhase.FROZEN:
            self._complete()
        self._receive_all()

    def release(self) -> None:
        """Let more be added. The sums stay, because there is no other copy of the gradients."""
        self.phase = GradPhase.ACCUMULATING

    def consume(self) -> None:
        with self._comm.session.reports_errors("backward()"):
            self._end_iteration()
            self._receive_all()
        self._is_queued, self._is_done = False, False  # also if a backward has failed
        self._streams.end()
        self._num_iterations, self._is_lost = 0, False
        for shard in self._flats.values():
            shard.clear()
        self._consumed.restore()
        self.overflowed.clear()
        self.release()

    def zero(self, set_to_none: bool, *, absent: bool = False) -> None:
        """Clear the gradients to None, or to zero; a parameter that had one has a zero then."""
        self.consume()
        for shard in self._flats.values():
            shard.zero(set_to_none or absent)

    def unscale(self, inverse: Tensor | None) -> Tensor | None:
        self.freeze()
        self.keep_reduced()
        parts = [part for shard in self._flats.values() for part in shard.parts()]
        answers = [part.isfinite().all() for _, part in parts]
        are_finite = torch.stack(answers).tolist() if parts else []  # the host waits once for all
        pairs = zip(parts, are_finite, strict=True)
        self.overflowed.update({param: part for (param, part), finite in pairs if not finite})
        device = parts[0][1].device if parts else torch.device("cpu")
        found = torch.full((), float(len(self.overflowed) > 0), device=device)
        for shard in self._flats.values():
            if inverse is not None:
                shard.arena.data.mul_(inverse.to(shard.arena.data.device))
        return found

    def combined(self, *, shared: bool) -> list[Tensor | None]:
        """Refuse: no tensor contains all gradients, nor any of them whole."""
        raise RuntimeError(
            "There are no combined gradients with stage=2: they are sent during backward, and each "
            "rank keeps only its shard of their sum. Use stage=1."
        )


@dataclass
class GradShardBuffer:
    """The gradients of one flat, of which only this rank's shard of their sum is kept."""

    flat: Flat
    params: Sequence[Tensor]
    specs: Sequence[ParamSpec]
    fragments: Mapping[int, Sequence[Fragment]]  # this rank's, by bucket
    codec: GradCodec
    arena: ShardArena  # fp32
    consumed: ConsumedGradGuard
    streams: Streams  # on which gradients are made
    no_local_grad: set[int] = field(default_factory=set)  # params without one on this rank
    unused: set[int] = field(default_factory=set)  # those without one on any rank
    _ranges: dict[int, list[_SlotRange]] = field(default_factory=dict)  # by bucket
    _had: set[int] = field(default_factory=set)  # params that had a gradient since clear()
    _num_ranges: dict[int, int] = field(default_factory=dict)  # by slot position
    _partly_sent: dict[int, tuple[Tensor | None, int]] = field(default_factory=dict)
    """By slot position, a gradient of which so many ranges were not sent in this iteration."""
    _used: set[int] = field(default_factory=set)  # params that had a gradient before clear()
    _zeroed: set[int] = field(default_factory=set)  # params whose gradient is 0 unless one comes
    _has_sum: set[int] = field(default_factory=set)  # buckets to which a sum was added

    def __post_init__(self) -> None:
        for bucket in self.flat.buckets:
            self._ranges[bucket.index] = [
                self._range(bucket, position) for position in slots_in(self.flat, bucket)
            ]
            for own in self._ranges[bucket.index]:
                self._num_ranges[own.position] = self._num_ranges.get(own.position, 0) + 1

    def _range(self, bucket: Bucket, position: int) -> _SlotRange:
        slot, end = self.flat.slots[position], bucket.start + bucket.numel
        start, stop = max(slot.start, bucket.start), min(slot.start + slot.numel, end)
        return _SlotRange(position, start - bucket.start, start - slot.start, stop - start)

    def move(self, bucket: Bucket, into: Tensor) -> None:
        """Write the gradients of ``bucket`` ``into`` (bucket.numel,), and free them.

        Raises:
            RuntimeError: a gradient is sparse, or has another size than its parameter.
        """
        parts, end = [], 0
        for own in self._ranges[bucket.index]:
            if own.start > end:
                parts.append(into.new_full((own.start - end,), -0.0))  # padding
            parts.append(self._part(own, into))
            end = own.start + own.numel
        parts.append(into.new_full((bucket.numel - end,), -0.0))
        torch.cat(parts, out=into)
        for own in self._ranges[bucket.index]:
            self._free(own)

    def _part(self, own: _SlotRange, like: Tensor) -> Tensor:
        """Return (own.numel,) of a gradient, in the order of its slot; -0.0 if there is none."""
        spec, grad = self.specs[own.position], self._grad(own.position)
        if grad is None:
            is_zero = self.flat.slots[own.position].param in self._zeroed
            return like.new_full((own.numel,), 0.0 if is_zero else -0.0)
        check_grad(grad, spec)
        return slot_range(grad.detach(), spec, own.param_start, own.numel)

    def _grad(self, position: int) -> Tensor | None:
        """Return a gradient as it was when its first range was sent in this iteration."""
        if position in self._partly_sent:
            return self._partly_sent[position][0]
        return self.params[position].grad

    def _free(self, own: _SlotRange) -> None:
        """Free a gradient, or keep it for its ranges in later buckets: p.grad may get a new one.

        Buckets are sent in the order of backward, so the last range need not be sent last.
        """
        position, grad = own.position, self._grad(own.position)
        if grad is not None:
            self.streams.hold(grad)
        if grad is not None and position not in self._partly_sent:
            self._had.add(self.flat.slots[position].param)
            self.consumed.consume(self.params[position], self.specs[position].name)
        _, num_left = self._partly_sent.pop(position, (None, self._num_ranges[position]))
        if num_left > 1:
            self._partly_sent[position] = grad, num_left - 1

    def forget_partly_sent(self) -> None:
        """Take note that every bucket of the iteration was sent."""
        self._partly_sent.clear()

    def has_gradients(self, bucket: Bucket) -> bool:
        """Return whether any parameter in ``bucket`` has a gradient that was not sent."""
        return any(self.params[own.position].grad is not None for own in self._ranges[bucket.index])

    def add(self, bucket: Bucket, parts: PartialSums) -> None:
        """Add ``parts`` of the sum of a bucket to the shard."""
        total = self.arena.view(bucket)
        if bucket.index not in self._has_sum:
            self._has_sum.add(bucket.index)
            add_up(parts, total)
            return
        for part in parts:
            total.add_(part)

    def lacked(self) -> set[int]:
        """Return the params that have no gradient on this rank, in p.grad or sent."""
        pairs = zip(self.flat.slots, self.params, strict=True)
        return {
            slot.param
            for slot, param in pairs
            if slot.param not in self._had and slot.param not in self._zeroed and param.grad is None
        }

    def finish_sum(self) -> None:
        """Find out which parameters had no gradient; fill buckets without any sum with -0.0."""
        for position, slot in enumerate(self.flat.slots):
            # A parameter without elements is in no bucket, so no bucket has consumed its gradient.
            if not slot.numel and self.params[position].grad is not None:
                self._had.add(slot.param)
                self.consumed.consume(self.params[position], self.specs[position].name)
        self.no_local_grad = {slot.param for slot in self.flat.slots} - self._had - self._zeroed
        for bucket in self.flat.buckets:
            if bucket.index not in self._has_sum:
                self.arena.view(bucket).fill_(-0.0)

    def clear(self) -> None:
        """Forget all sums."""
        self._used |= self._had
        self._has_sum.clear()
        self._had.clear()
        self._partly_sent.clear()

    def parts(self) -> Iterator[tuple[int, Tensor]]:
        """Yield (param, this rank's part of its sum), fragment by fragment."""
        for bucket in self.flat.buckets:
            total = self.arena.view(bucket)
            for fragment in self.fragments[bucket.index]:
                yield fragment.param, total[fragment.shard_start :][: fragment.numel]

    def zero(self, set_to_none: bool) -> None:
        """Clear gradients that were not sent; those that were count as none, or as zero."""
        clear_grads(self.params, set_to_none)
        self._zeroed = set() if set_to_none else self._zeroed | self._used
        self._used.clear()


# p.grad after it was sent
#
# It is None, and reading it explains why. From then on until the gradient is used or cleared, or
# until a module runs forward again, the parameter's class is ConsumedGradParam. Code that looks at
# classes there (torch.compile) does not see it. A compiled function looks before any module in it
# runs: if one is compiled again while gradients were sent, no parameter gets that class any more.


_GRAD: Any = Tensor.grad

_SILENT = ("shardfuse.", "torch.amp.grad_scaler")
"""Modules that may read it: they know the reason."""

_REFUSED = ("torch.nn.utils.clip_grad", "torch.nn.modules.module")
"""Modules that would clip or clear nothing, without an error."""


class ConsumedGradParam(nn.Parameter):
    """A parameter whose gradient was sent to the ranks' shards."""

    @property
    def grad(self) -> Tensor | None:
        """None, or the gradient that autograd has made since.

        Raises:
            RuntimeError: for torch's clip_grad_norm_() and zero_grad() of a module.
        """
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if caller in _REFUSED:
            raise RuntimeError(_message(self))
        if not caller.startswith(_SILENT):
            warnings.warn(_message(self), UserWarning, stacklevel=2)
        found: Tensor | None = _GRAD.__get__(self)
        return found

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if not caller.startswith(_SILENT):
            raise RuntimeError(f"p.grad cannot be set now. {_message(self)}")
        _GRAD.__set__(self, value)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        """Return a parameter of the usual class."""
        if id(self) not in memo:
            memo[id(self)] = nn.Parameter(self.detach().clone(), self.requires_grad)
        copied: nn.Parameter = memo[id(self)]
        return copied


def _message(param: Tensor) -> str:
    return (
        f"The gradient of {param.__dict__.get('_shardfuse_name')} was sent to the ranks' shards "
        "(stage=2), so p.grad is None. Use optimizer.clip_grad_norm() or grad_norm(), "
        "optimizer.zero_grad() to clear it, or no_sync() around a backward whose gradients shall "
        "stay in p.grad. To see or edit each gradient before it is sent, use p.register_hook(), "
        "whose function gets it and may return another; or p.register_post_accumulate_grad_hook() "
        "before the optimizer is built. Or use stage=1, which keeps all gradients."
    )


class ConsumedGradGuard:
    """The parameters of one optimizer whose gradients were sent."""

    def __init__(self) -> None:
        self._params: list[Tensor] = []

    def consume(self, param: Tensor, name: str) -> None:
        """Free the gradient of ``param``."""
        param.grad = None
        if type(param) is nn.Parameter and not _is_silent:  # a subclass stays as it is
            param.__dict__["_shardfuse_name"] = name
            cast(Any, param).__class__ = ConsumedGradParam
            self._params.append(param)
            _restore_before_forward(self)

    @property
    def is_active(self) -> bool:
        """Whether there are any."""
        return any(type(param) is ConsumedGradParam for param in self._params)

    def restore(self) -> None:
        """Restore their usual class."""
        for param in self._params:
            if type(param) is ConsumedGradParam:
                cast(Any, param).__class__ = nn.Parameter
                param.__dict__.pop("_shardfuse_name", None)
        self._params.clear()


_guards = set[weakref.ref["ConsumedGradGuard"]]()
_hooks: list[Any] = []
_is_silent = False  # whether a compiled function would see the class


def _restore_before_forward(guard: ConsumedGradGuard) -> None:
    """Have ``guard`` restored before any module runs forward."""
    _guards.add(weakref.ref(guard, _guards.discard))
    before_tracing(_before_compiling)
    if not _hooks:
        _hooks.append(nn.modules.module.register_module_forward_pre_hook(_before_forward))


def _before_compiling(is_again: bool) -> None:
    """Restore all: a function that sees another class is compiled again at each call."""
    global _is_silent
    if not any(guard.is_active for guard in _live_guards()):
        return
    if is_again and not _is_silent:
        _is_silent = True
        logger.warning(
            "torch.compile has compiled a function again after a backward whose gradients were "
            "sent (stage=2). From now on p.grad is None without a word about it, because compiled "
            "functions look at classes of parameters. Clip by optimizer.clip_grad_norm()."
        )
    _restore_all()


@untraced
def _before_forward(module: nn.Module, _: Any) -> None:
    _restore_all()


def _live_guards() -> list[ConsumedGradGuard]:
    # A tuple, because another thread may add one.
    return [guard for ref in tuple(_guards) if (guard := ref()) is not None]


def _restore_all() -> None:
    for guard in _live_guards():
        guard.restore()
    _guards.clear()
    while _hooks:
        _hooks.pop().remove()
