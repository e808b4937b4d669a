"""GradBuffer: the gradients of one flat as FullGrads keeps them, in slots of a flat buffer.

See [Note: absent gradients] in full.py for gradients that are -0.0.
"""

from __future__ import annotations

import itertools
import operator
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor

from shardfuse.buffers import (
    FlatBuffer,
    ShardArena,
    are_at,
    detach_copy,
    has_external_refs,
    is_sole_owner,
)
from shardfuse.codecs import GradCodec
from shardfuse.grads.source import GradSnapshot, check_grad, clear_grad, is_absent
from shardfuse.layout import Bucket, Flat, Fragment, ParamSpec, slots_in

_SHORT_NUMEL = 64 << 10
"""A 1-D gradient of at most so many elements is copied together with its neighbours."""

_NOTHING = nullcontext()

_get_grad = operator.attrgetter("grad")
_get_nbytes = operator.attrgetter("nbytes")


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
        self.buffer.set_padding(-0.0)  # a gradient beside padding may be absent
        # As .data each has a version of its own, which counts the writes through it.
        self.views = [view.data for view in self.buffer.views(self.specs)]
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
        # With create_graph=True alone: entering the context takes longer than a short copy.
        with torch.no_grad() if torch.is_grad_enabled() else _NOTHING:
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
