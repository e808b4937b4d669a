"""Numbers that are equal on all ranks, although no rank asks another: Counter and Channels.

[Note: message tags] A backend matches a message with a receive by its tag alone: if two messages in
flight had the same, one would land in the memory of the other. torch leaves 31 bits to a tag, too
few for a hash. So a tag holds numbers that tell it from all others in flight, and the rest of it is
a hash, by which ranks that are out of step do not meet:

* Messages without a label are launched in one order on all ranks, and messages of one tag between
  two ranks arrive in the order in which they were sent. Receives that an error has left behind are
  never matched, because a tag has the generation.
* A message with a label has a channel. Those of one channel are in one order. A range of channels
  is reserved for each source of messages, in a region, and never used again: receives that were
  posted for a source that is gone stay. In every second generation, all channels move on by as many
  as there were.
* A process group may serve optimizers of its own, and be a row of another optimizer's mesh, whose
  channels and generations are counted by all ranks of that. One bit tells these apart.
"""

from __future__ import annotations

from typing import Protocol

_NUM_BITS = 18
"""Of a channel in a tag. Channels that differ by a multiple of 2 ** 18 share it."""


class _HasGeneration(Protocol):
    @property
    def generation(self) -> int: ...


class Counter:
    """A number that is equal on all ranks: it restarts from 0 in every generation.

    Before an error, some ranks may have counted further than others.
    """

    def __init__(self, session: _HasGeneration) -> None:
        self._session = session
        self._generation, self._value = session.generation, 0

    @property
    def value(self) -> int:
        """The number."""
        if self._generation != self._session.generation:
            self.reset()
        return self._value

    def increment(self) -> int:
        """Add 1 and return the number."""
        self._value = self.value + 1
        return self._value

    def reset(self) -> None:
        """Set the number to 0."""
        self._generation, self._value = self._session.generation, 0


class Channels:
    """Which channels of a process group are reserved; see [Note: message tags]."""

    def __init__(self) -> None:
        self.num_reserved = 0
        # Of even generations and of odd ones: the number of channel 0. That of the next generation
        # is needed before the ranks have met in it.
        self._first = [0, 0]

    def reserve(self, count: int) -> int:
        """Return the first of ``count`` channels. To be called by all ranks, in a region."""
        first = self.num_reserved
        self.num_reserved += count
        return first

    def restart(self, generation: int, num_reserved: int) -> None:
        """End a ``generation``, in which a rank had reserved ``num_reserved`` and none had more."""
        self._first[generation % 2] += num_reserved
        self.num_reserved = num_reserved

    def tag(self, channel: int, generation: int, digest: int) -> int:
        """Return the last 28 bits of the tag of a message with a label."""
        number = (self._first[generation % 2] + channel) % (1 << _NUM_BITS)
        return generation % 2 << 27 | number << 9 | digest % (1 << 9)


def unlabelled_tag(generation: int, digest: int) -> int:
    """Return the last 28 bits of the tag of a message without a label."""
    return generation % (1 << 9) << 19 | digest % (1 << 19)
