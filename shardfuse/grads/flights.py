"""Buckets of gradients under way: a few at a time, numbered alike on all ranks."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch.profiler import record_function

from shardfuse.comm import Communicator
from shardfuse.comm.base import Parts, PartsHandle
from shardfuse.grads.flat_shard import FlatShard
from shardfuse.grads.order import Sender
from shardfuse.layout import Bucket

_SHARE = 24
"""What is under way is at most this part of the gradients, if that is two buckets or more."""

_FEWEST, _MOST = 2, 8
"""Buckets under way at a time: enough for a link that is never idle, not more than it needs."""

Launch = Callable[[FlatShard, Bucket, int, str, int], PartsHandle]
"""(flat, bucket, which of the buffers to send from, label, slot to receive in) of a bucket."""

Collect = Callable[[FlatShard, Bucket, Parts], None]
"""Adds what has arrived to the shard."""


def num_in_flight(numels: Sequence[int]) -> int:
    """Return how many of the buckets of ``numels`` elements are under way at a time, at most."""
    enough = sum(numels) // (_SHARE * max(numels, default=1))
    return min(max(enough, _FEWEST), _MOST, max(len(numels), 1))


class _Flight(NamedTuple):
    handle: PartsHandle
    shard: FlatShard
    bucket: Bucket


class Flights:
    """Sends buckets, again and again in one order, and collects what arrives in the same order.

    Args:
        comm: the ranks to sum over.
        sender: tells these messages from others.
        launch, collect: of who holds the gradients; methods, held weakly.
        waits: wait for each at once, to find out whether overlap is at fault.
    """

    def __init__(
        self, comm: Communicator, sender: Sender, launch: Launch, collect: Collect, *, waits: bool
    ) -> None:
        self._comm = comm
        self._sender = sender
        self._launch = weakref.WeakMethod(launch)
        self._collect = weakref.WeakMethod(collect)
        self._waits = waits
        self._flights: deque[_Flight] = deque()
        self._num_extra = 0  # buckets that were sent outside of rounds
        self._generation = 0  # how often the order has changed
        self._epoch = comm.epoch
        self._capacity = _FEWEST
        self.order: list[tuple[FlatShard, Bucket]] = []
        """What a round sends."""
        self.num_sent = 0
        """Buckets since begin_anew()."""

    def plan(self, order: list[tuple[FlatShard, Bucket]]) -> None:
        """Send in this order from now on; begin_anew() follows."""
        self.order = order
        self._generation += 1
        self._capacity = num_in_flight([bucket.numel for _, bucket in order])

    def begin_anew(self) -> None:
        """Count from nothing, alike on all ranks, and be ready for what comes first."""
        if self._epoch != self._comm.epoch:
            # After an error, before which some ranks may have counted further than others.
            self._epoch, self._generation, self._num_extra = self._comm.epoch, 0, 0
        self._flights.clear()
        self.num_sent = 0
        for number in range(self._capacity if self.order else 0):
            self._expect(number)

    @property
    def place(self) -> int:
        """What the open round sends next; 0 where none is open."""
        return self.num_sent % len(self.order) if self.order else 0

    @property
    def num_rounds(self) -> int:
        """Rounds since begin_anew(), without the open one."""
        return self.num_sent // len(self.order) if self.order else 0

    @property
    def _num_buffers(self) -> int:
        """What buckets are sent from; others may read the last one until the next has left."""
        return self._capacity + int(self._comm.progress == "when waited for")

    @property
    def is_empty(self) -> bool:
        """Whether nothing is under way."""
        return not self._flights

    def _label(self, number: int) -> str:
        """Return what tells the ``number``-th bucket from all others."""
        turn, place = divmod(number, len(self.order))
        return f"order {self._generation}, " + self._sender.label(turn, place)

    def _slot(self, number: int) -> int:
        return self._sender.slot(number % self._capacity)

    def _expect(self, number: int) -> None:
        """Be ready for the ``number``-th bucket."""
        if self._comm.progress == "in any order":
            shard, bucket = self.order[number % len(self.order)]
            label, slot = self._label(number), self._slot(number)
            shard.wire.expect(self._comm, bucket, shard.arena.data, label, slot)

    @torch.no_grad()
    def send(self) -> None:
        """Send the next bucket as its gradients are now, as soon as there is room."""
        number, (shard, bucket) = self.num_sent, self.order[self.place]
        while len(self._flights) >= self._capacity:
            self._receive()
        buffer = number % self._num_buffers
        handle = self._depart(shard, bucket, buffer, self._label(number), self._slot(number))
        self._flights.append(_Flight(handle, shard, bucket))
        self.num_sent += 1
        if self._waits:
            self.receive_all()

    def _depart(
        self, shard: FlatShard, bucket: Bucket, buffer: int, label: str, slot: int
    ) -> PartsHandle:
        launch = self._launch()
        assert launch is not None
        with record_function(f"shardfuse::reduce_scatter b{bucket.index}"):
            return launch(shard, bucket, buffer, label, slot)

    @torch.no_grad()
    def send_again(self, places: Sequence[int]) -> None:
        """Send buckets outside of a round, and collect them."""
        self.receive_all()
        for place in places:
            self._num_extra += 1
            shard, bucket = self.order[place]
            label, slot = self._sender.label(0, place, self._num_extra), self._sender.slot(-1)
            buffer = self._num_buffers + self._num_extra % 2
            handle = self._depart(shard, bucket, buffer, label, slot)
            self._flights.append(_Flight(handle, shard, bucket))
            self._land()

    def _land(self) -> None:
        """Wait for the oldest bucket that is under way, and collect it."""
        flight = self._flights.popleft()
        with record_function("shardfuse::wait_reduce_scatter"):
            parts = flight.handle.wait()
        collect = self._collect()
        assert collect is not None
        collect(flight.shard, flight.bucket, parts)

    def _receive(self) -> None:
        """Land the oldest of a round, and be ready for another in its place."""
        self._land()
        self._expect(self.num_sent - len(self._flights) - 1 + self._capacity)

    @torch.no_grad()
    def receive_all(self) -> None:
        """Wait for everything that is under way."""
        while self._flights:
            self._receive()

    def received(self) -> Iterator[tuple[FlatShard, Bucket]]:
        """Yield every bucket of the order once nothing more is under way for it."""
        for shard, bucket in self.order:
            while any(flight.bucket is bucket for flight in self._flights):
                with torch.no_grad():
                    self._receive()
            yield shard, bucket
