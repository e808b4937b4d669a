"""Rounds of reduce-scatters: each sends every bucket once, in one order on all ranks.

[Note: taken] At stage 2 a bucket of gradients is copied into a buffer as soon as autograd has made
all of it, leaves at once, and its gradients are freed. What arrives is added to this rank's fp32
shard. All backwards of a step add to the same shard, so that only the shard stays. Few buckets are
under way at a time: where the ranks' links are slower than backward, backward waits for them.

Waiting under backward needs an order that no rank departs from, or two ranks could wait for each
other. So every backward sends one round, to its end: what it has not completed by then goes as it
is. Where the end cannot be seen (reentrant checkpoints run backwards inside of one), that is done
in the clip, norm or step that follows, before any other message. A rank that runs no backward in a
step sends one round all the same, of gradients that are absent.

A gradient that comes after its bucket has left stays in p.grad: of a layer that is used now and
then, or twice under reentrant checkpoints. In step() the ranks agree, by one small all-reduce, on
the number of rounds and on what such buckets are to be sent once more. They also see whether all
have cleared their gradients alike.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shardfuse.comm import Communicator
from shardfuse.grads.awaited import Awaited
from shardfuse.grads.flat_shard import FlatShard
from shardfuse.grads.flights import Collect, Flights, Launch
from shardfuse.grads.order import Sender, in_order_of_backward, is_nested
from shardfuse.grads.protocol import UnderBackward
from shardfuse.streams import Streams
from shardfuse.untraced import untraced

NUM_COUNTS = 3
"""What ranks compare when they step, beside a number for each bucket."""


class Rounds:
    """Decides when buckets leave; see [Note: taken].

    Args:
        comm, launch, collect, waits: as of Flights.
        asked: by others, of gradients under backward.
        streams: that these are made on.
    """

    def __init__(
        self,
        comm: Communicator,
        launch: Launch,
        collect: Collect,
        *,
        asked: UnderBackward,
        streams: Streams,
        waits: bool,
    ) -> None:
        self._comm = comm
        self._sender = Sender(comm)
        self._asked = asked
        self._streams = streams
        self._awaited = Awaited()
        self._has_fired = False  # whether autograd has made a gradient for the present round
        self._is_done = False  # whether the present backward has sent its round
        self._is_queued = False  # whether the end of the present backward is waited for
        self._num_rounds = 0  # begun since the gradients were cleared last
        self._is_lost = False  # whether an error has ended what was under way since then
        self._epoch = comm.epoch
        self.flights = Flights(comm, self._sender, launch, collect, waits=waits)
        """What is under way."""

    def drain(self) -> None:
        """Receive what is under way on any rank, before add(). Collective."""
        self._check_epoch()
        self._end_round()
        self._agree()
        self.flights.receive_all()

    def add(self, flats: Sequence[FlatShard]) -> None:
        """Have the buckets of ``flats`` sent, too. Local, after drain()."""
        self.flights.plan(in_order_of_backward([*self._flats(), *flats]))
        self._awaited.plan(self.flights.order)
        self._begin_anew()

    def _flats(self) -> list[FlatShard]:
        return list({shard.flat.index: shard for shard, _ in self.flights.order}.values())

    def _begin_anew(self) -> None:
        self._epoch = self._comm.epoch
        self.flights.begin_anew()
        self._begin_round(is_done=False)

    def _begin_round(self, *, is_done: bool) -> None:
        self._has_fired, self._is_done = False, is_done
        self._awaited.begin()
        for shard in self._flats():
            shard.end_round()

    def _check_epoch(self) -> None:
        """Begin anew, as all ranks do, after an error: what was under way is lost."""
        if self._epoch != self._comm.epoch:
            self._is_lost |= not self.flights.is_empty or self.flights.place > 0
            self._begin_anew()

    # Under backward

    def arrived(self, shard: FlatShard, position: int) -> None:
        """Take note that autograd has made a gradient: send what is complete, in order."""
        if self._asked.has_more:
            return
        with self._sender.told():
            self._check_epoch()
            self._streams.note(shard.arena.data.device)
            if self._is_done or not self._awaited.fired(shard, position):
                return
            self._has_fired = True
            if not self._is_queued and not is_nested():
                self._is_queued = True
                engine = torch.autograd.Variable._execution_engine
                engine.queue_callback(self._backward_ends)
            while not self._is_done and self._awaited.is_complete(self.flights.place):
                self._send()

    @untraced
    def _backward_ends(self) -> None:
        self._is_queued = False
        with self._sender.told():
            self._check_epoch()
            self._end_round()
            self._is_done = False
            self._streams.end()

    def _send(self) -> None:
        """Send the next bucket; after the last, the round is done."""
        if self.flights.place == 0:
            self._num_rounds += 1
        self._streams.join()
        self.flights.send()
        if self.flights.place == 0:
            self._begin_round(is_done=True)

    def _end_round(self) -> None:
        """Send what the open round lacks; one is open where backward has made a gradient."""
        if self._has_fired and self.flights.place == 0 and self.flights.order:
            self._send()
        while self.flights.place > 0:
            self._send()

    # In a call

    def end(self) -> None:
        """Send what the open round lacks, and one round at least in every step."""
        self._check_epoch()
        if self._num_rounds == 0:
            self._has_fired = True
        self._end_round()

    def complete(self) -> None:
        """Send what is left on any rank; some of it may be under way still.

        Raises:
            RuntimeError: gradients were lost, or ranks have cleared theirs at different times.
        """
        self._check_epoch()
        if self._is_lost:
            raise RuntimeError(
                "An error has ended the exchange of gradients, and what was sent is lost. Call "
                "zero_grad() and run forward and backward again."
            )
        self.end()
        self._agree()
        self._is_done = False
        self._awaited.note_quiet(self.flights.order)

    def _agree(self) -> None:
        """Send as many rounds as the rank that has most to send, and what came late on any rank."""
        if not self.flights.order:
            return
        late = [float(shard.has_gradients(bucket)) for shard, bucket in self.flights.order]
        before = self.flights.num_rounds - self._num_rounds  # when gradients were cleared last
        mine = [self._num_rounds, before, -before, *late]
        device = self._flats()[0].arena.data.device
        total = torch.tensor(mine, dtype=torch.float32, device=device)
        self._comm.everyone.all_reduce(total, "max").wait()
        (num_rounds, most, least), late = (told := total.tolist())[:NUM_COUNTS], told[NUM_COUNTS:]
        if most != -least:
            raise RuntimeError(
                "Ranks have cleared gradients in flight at different times, so gradients of two "
                "batches are mixed. Call zero_grad() at the same place on all ranks, and run the "
                "same number of backward() on each (stage=2)."
            )
        while self._num_rounds < num_rounds:
            self._has_fired = True
            self._end_round()
        places = [place for place, is_late in enumerate(late) if is_late]
        if places:
            self.flights.send_again(places)
        for shard in self._flats():
            shard.end_round()

    def clear(self) -> None:
        """Receive what is under way, which its holder is to drop; the next round is the first."""
        with self._sender.told():
            self._check_epoch()
            self._end_round()
            self.flights.receive_all()
        self._is_queued, self._is_done = False, False  # also where a backward has failed
        self._streams.end()
        self._num_rounds, self._is_lost = 0, False
