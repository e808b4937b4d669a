"""Which gradients autograd has yet to make before a bucket is complete."""

from __future__ import annotations

from collections.abc import Sequence

from shardfuse.grads.order import OfFlat
from shardfuse.layout import Bucket, slots_in


class Awaited:
    """Counts, for every bucket of an order, the gradients that it waits for."""

    def __init__(self) -> None:
        self._places: dict[tuple[int, int], list[int]] = {}  # of a slot: the buckets it lies in
        self._counts: list[int] = []  # for each bucket: slots in it
        self._quiet: set[tuple[int, int]] = set()  # slots without a gradient in the last step
        self._fired: set[tuple[int, int]] = set()  # slots whose gradients autograd has made
        self._waiting: list[int] = []  # for each bucket: gradients that it waits for
        self._num_left = 0  # gradients that any bucket waits for

    def plan(self, order: Sequence[tuple[OfFlat, Bucket]]) -> None:
        """Count for these buckets from now on."""
        self._counts = [0] * len(order)
        self._places.clear()
        for place, (own, bucket) in enumerate(order):
            for position in slots_in(own.flat, bucket):
                self._places.setdefault((own.flat.index, position), []).append(place)
                self._counts[place] += 1

    def begin(self) -> None:
        """Wait for all gradients, but for those that the last step lacked."""
        self._fired.clear()
        self._waiting = list(self._counts)
        self._num_left = len(self._places)
        for key in self._quiet:
            self._num_left -= key in self._places
            for place in self._places.get(key, ()):
                self._waiting[place] -= 1

    def fired(self, grads: OfFlat, position: int) -> bool:
        """Take note that autograd has made a gradient; return whether it was waited for."""
        key = (grads.flat.index, position)
        if key in self._fired or key not in self._places:  # of no elements: in no bucket
            return False
        self._fired.add(key)
        self._num_left -= key not in self._quiet
        for place in self._places[key]:
            self._waiting[place] -= 1
        return True

    def is_complete(self, place: int) -> bool:
        """Return whether a bucket waits for nothing more."""
        return self._waiting[place] <= 0

    @property
    def is_over(self) -> bool:
        """Whether no bucket waits for anything more."""
        return self._num_left <= 0

    def note_quiet(self, order: Sequence[tuple[OfFlat, Bucket]]) -> None:
        """Note which slots had no gradient on this rank in the step that ends."""
        quiet = {
            (grads.flat.index, position)
            for grads in {id(grads): grads for grads, _ in order}.values()
            if grads.missing
            for position, slot in enumerate(grads.flat.slots)
            if slot.param in grads.missing and (grads.flat.index, position) in self._places
        }
        if len(quiet) < len(self._places):  # else it was a step without a backward
            self._quiet = quiet
