"""When each bucket of gradients leaves: under backward where it can, anew where it has changed.

[Note: sent early] A bucket leaves from a hook as soon as autograd has made all its gradients, in
one order on all ranks. Whether that was the last word nobody knows: a second backward may add to a
gradient, and callers may clip, scale or replace it before step(). So each step looks at what has
left: another tensor, another version, another checksum of the bucket (a GradScaler unscales by an
operator that counts as no write, and ``p.grad.data`` has a version of its own). The ranks then
agree, by one small all-reduce, on which buckets any of them has changed, and send those anew. What
arrives is therefore what it would be without overlap, bit for bit; only time is lost. No rank need
know whether others have sent early. Where buckets were sent twice in several steps running, none is
sent early any more, and a warning names the remedy, no_sync().

What arrives of a bucket of the next round lies where that of the bucket before it in this round
did, so that there is room for it, and word of that, before this rank sends parameters.

A backend without labels takes collectives in the order of launches. There the rest leaves at the
end of the backward that has sent the first. A rank that had no backward sends its round before any
other message, as it cannot know whether others have sent theirs. So all ranks launch alike. Where
torch's Join is used, none is sent early: its own message comes before all that a joined rank sends.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.profiler import record_function

from shardfuse.comm import Communicator
from shardfuse.comm.base import Handle, Parts, PartsHandle, Progress
from shardfuse.grads.awaited import Awaited
from shardfuse.grads.order import Sender, in_order_of_backward, is_nested
from shardfuse.grads.ownership import checksum
from shardfuse.grads.protocol import UnderBackward
from shardfuse.grads.slots import FlatGrads, SentGrad
from shardfuse.layout import Bucket
from shardfuse.streams import Streams
from shardfuse.untraced import untraced

logger = logging.getLogger("shardfuse")

IN_FLIGHT = 2
"""Reduce-scatters under way at a time where nothing overlaps."""

_MAX_WASTED = 3
"""Steps running in which buckets were sent twice, after which none is sent early."""

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
"""Why a bucket was sent twice, and what to do, as far as this rank knows."""


class _Sent(NamedTuple):
    """A bucket that has left."""

    handle: PartsHandle
    grads: Sequence[SentGrad] | None = ()  # what it was made of; None: not to be relied on
    checksum: Tensor | None = None
    is_noted: bool = False  # whether it left after note(), in the same call

    def is_changed(self, grads: FlatGrads, bucket: Bucket) -> bool:
        """Return whether ``bucket`` is another one now."""
        if self.is_noted:
            return False
        if self.grads is None or not all(grad.is_unchanged() for grad in self.grads):
            return True
        return self.checksum is not None and not torch.equal(
            self.checksum, checksum(grads.buffer.bucket(bucket))
        )


class Sends:
    """The reduce-scatters of a round, which goes from one step to the next.

    Args:
        comm: the ranks to sum over.
        launch: launches one; a method, held weakly.
        asked: by others, of gradients under backward.
        overlaps: where buckets leave under backward.
        waits: wait for each at once, to find out whether overlap is at fault.
    """

    def __init__(
        self,
        comm: Communicator,
        launch: Callable[..., PartsHandle],
        *,
        asked: UnderBackward,
        overlaps: Collection[Progress],
        waits: bool,
    ) -> None:
        self._comm = comm
        self._launch = weakref.WeakMethod(launch)  # of who holds this
        self._may_overlap = set(overlaps)
        self._waits = waits
        self._asked = asked
        self._order: list[tuple[FlatGrads, Bucket]] = []
        self._awaited = Awaited()
        self._streams = Streams()
        self._overlaps = False
        self._sent: list[_Sent] = []  # the first so many of the order
        self._is_queued = False  # whether the end of the present backward is waited for
        self._round, self._epoch, self._num_wasted = 0, 0, 0
        self._causes: set[str] = set()  # of changes on this rank, in the steps that count as wasted
        self._sender = Sender(comm)

    def add(self, flats: Sequence[FlatGrads]) -> None:
        """Have the buckets of ``flats`` sent, too, in the order in which backward completes them.

        Local, after drain().
        """
        self._round += 1  # what was expected of the last is of the old order
        held = {grads.flat.index: grads for grads, _ in self._order}
        self._order = in_order_of_backward([*held.values(), *flats])
        self._awaited.plan(self._order)
        self._begin_anew()

    def drain(self) -> None:
        """Receive what has left by the present order on any rank, and drop it. Collective."""
        self._check_epoch()
        if not self._overlaps:
            return
        device = self._order[0][0].buffer.data.device
        total = torch.tensor([float(len(self._sent) > 0)], device=device)
        self._comm.everyone.all_reduce(total, "max").wait()
        if total > 0:
            self._send_until(len(self._order), retain=False)
            for sent in self._sent:
                sent.handle.wait()

    def _begin_anew(self) -> None:
        """Begin a round of which nothing is expected yet."""
        self._epoch = self._comm.epoch
        self._begin()
        for place in range(len(self._order)):
            self._expect(place, self._round)

    def _begin(self) -> None:
        """Begin a round."""
        enough = len(self._order) > 1 and len(self._may_overlap) > 0
        self._overlaps = enough and self._comm.progress in self._may_overlap
        self._sent.clear()
        self.await_grads()

    def _expect(self, place: int, number: int) -> None:
        """Be ready for a bucket of round ``number``, the present one or the next."""
        if self._overlaps and self._may_overlap:
            grads, bucket = self._order[place]
            label, slot = self._sender.label(number, place), self._slot(number, place)
            grads.wire.expect(self._comm, bucket, grads.buffer.data, label, slot)

    def _slot(self, number: int, place: int) -> int:
        """Return where the communicator keeps what arrives of a bucket of round ``number``."""
        slot = (place - number) % (len(self._order) + 1) if self._overlaps else place % IN_FLIGHT
        return self._sender.slot(slot)

    def await_grads(self) -> None:
        """Wait for the gradients of what has not left."""
        self._is_queued = False  # also where a backward has failed
        self._awaited.begin()
        self._streams.end()

    def doubt(self) -> None:
        """Take what has left for changed: gradients may be written where it does not show."""
        self._sent = [sent._replace(grads=None, is_noted=False) for sent in self._sent]

    def cleared(self) -> None:
        """Begin to wait for gradients anew: all were cleared, also of what has left."""
        if self._sent:
            self._causes.add("cleared")
        self.doubt()
        self.await_grads()

    def look_again(self) -> None:
        """Have looked at all that has left: gradients may have changed up to now."""
        self._sent = [sent._replace(is_noted=False) for sent in self._sent]

    # Under backward

    def arrived(self, grads: FlatGrads, position: int) -> None:
        """Take note that autograd has made a gradient: send what is complete, in order."""
        if not self._overlaps or self._asked.has_more:
            return
        if self._comm.progress == "in order" and self._asked.joins():
            return
        with self._sender.told():
            self._check_epoch()
        self._streams.note(grads.buffer.data.device)
        if not self._awaited.fired(grads, position):
            if self._sent:
                is_own = "nested" not in self._causes and not is_nested()
                self._causes.add("again" if is_own else "nested")
            return
        if self._awaited.is_over and self._comm.progress == "in any order":
            return  # the step is next, and has a word to send that must not wait behind the last
        if self._comm.progress == "in order" and not self._is_queued:
            self._is_queued = True
            torch.autograd.Variable._execution_engine.queue_callback(self.end)
        with self._sender.told():
            while len(self._sent) < len(self._order) and self._awaited.is_complete(len(self._sent)):
                if not self._send_early():
                    break

    def is_behind(self) -> bool:
        """Return whether the rest must leave before any other message."""
        self._check_epoch()
        is_in_order = self._overlaps and self._comm.progress == "in order"
        return is_in_order and len(self._sent) < len(self._order)

    @untraced
    def end(self, *, is_noted: bool = False) -> None:
        """Send the rest, at the end of a backward or, of gradients that are noted, in a call."""
        self._is_queued = False
        with self._sender.told():
            while len(self._sent) < len(self._order):
                self._send_early(is_forced=True, is_noted=is_noted)

    def _check_epoch(self) -> None:
        """Begin anew, as all ranks do, after an error: of what was under way nothing is used."""
        if self._epoch != self._comm.epoch:
            self._round = 0
            self._begin_anew()

    @torch.no_grad()
    def _send_early(self, *, is_forced: bool = False, is_noted: bool = False) -> bool:
        """Send the next bucket as its gradients are now; return whether that was done."""
        place = len(self._sent)
        grads, bucket = self._order[place]
        self._streams.join()
        made_of = grads.prepare(bucket)
        if made_of is None and not is_forced:
            return False
        handle = self._send(place, retain=False)
        made = checksum(grads.buffer.bucket(bucket))
        self._sent.append(_Sent(handle, made_of, made, is_noted))
        return True

    def _send(self, place: int, *, retain: bool, attempt: int = 0) -> PartsHandle:
        label = self._sender.label(self._round, place, attempt) if self._overlaps else None
        slot = self._sender.slot(-1) if attempt > 0 else self._slot(self._round, place)
        # What is sent may be read until the next is launched, and lies somewhere else, therefore.
        staged_at = place if self._overlaps else place % (IN_FLIGHT + 1)
        grads, bucket = self._order[place]
        launch = self._launch()
        assert launch is not None
        with record_function(f"shardfuse::reduce_scatter b{bucket.index}"):
            handle = launch(
                grads, bucket, staged_at=staged_at, slot=slot, label=label, retain=retain
            )
        if self._waits:
            handle.wait()
        return handle

    # In a step

    def reduced(self, *, retain: bool) -> Iterator[tuple[Bucket, Parts]]:
        """Yield every bucket and what adds up to its sum; ends the round. Collective.

        Parts are valid until the next are asked for. With ``retain`` they may be in the retained
        shard already.
        """
        self._check_epoch()
        try:
            ahead = len(self._order) if self._overlaps else IN_FLIGHT
            # Ahead of what is left to send, where that need not be launched alike on all ranks.
            asked = self._ask() if self._comm.progress == "in any order" else None
            self._send_until(ahead, retain=retain)
            changed = self._agreed(asked or self._ask())
            for place, (_, bucket) in enumerate(self._order):
                self._send_until(place + ahead, retain=retain)
                with record_function("shardfuse::wait_reduce_scatter"):
                    parts = self._sent[place].handle.wait()
                    if place in changed:
                        parts = self._send(place, retain=retain, attempt=1).wait()
                self._expect(place, self._round + 1)
                yield bucket, parts
        finally:
            self._round += 1
            self._awaited.note_quiet(self._order)
            self._begin()

    def _send_until(self, count: int, *, retain: bool) -> None:
        """Send as many buckets of the order, if they have not left."""
        for place in range(len(self._sent), min(count, len(self._order))):
            self._sent.append(_Sent(self._send(place, retain=retain)))

    def _ask(self) -> tuple[Tensor, Handle] | None:
        """Launch what tells which buckets any rank has changed since they left: one float each."""
        if not self._overlaps:
            return None
        flags = torch.zeros(len(self._order))
        for place, sent in enumerate(self._sent):
            flags[place] = float(sent.is_changed(*self._order[place]))
        if flags.any() and not self._causes:
            self._causes.add("written")
        total = flags.to(self._order[0][0].buffer.data.device)
        return total, self._comm.everyone.all_reduce(total, "max")

    def _agreed(self, asked: tuple[Tensor, Handle] | None) -> set[int]:
        """Return which buckets are to be sent anew."""
        if asked is None:
            return set()
        total, handle = asked
        with record_function("shardfuse::wait_agreement"):
            handle.wait()
        changed = {place for place, flag in enumerate(total.tolist()) if flag}
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
