"""The gradients of one flat: where they lie, and which of them exist."""

from __future__ import annotations

import itertools
import operator
import weakref
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from shardfuse.buffers import FlatBuffer, ShardArena, lie_at
from shardfuse.grads.ownership import is_held, is_unseen, move_out
from shardfuse.grads.wires import GradWire
from shardfuse.layout import Bucket, Flat, Fragment, ParamSpec, slots_in
from shardfuse.untraced import untraced

_SHORT_NUMEL = 64 << 10
"""A 1-D gradient of at most so many elements is copied together with its neighbours."""

_get_grad = operator.attrgetter("grad")
_get_nbytes = operator.attrgetter("nbytes")


class FlatParams(NamedTuple):
    """What gradients are taken of: the parameters of one flat, in slot order."""

    flat: Flat
    params: Sequence[Tensor]
    specs: Sequence[ParamSpec]
    fragments: Mapping[int, Sequence[Fragment]]  # this rank's, by bucket


def is_absent(grad: Tensor) -> bool:
    """Return whether every element is -0.0; [Note: absent gradients] in grads/full.py."""
    return bool((grad.signbit() & (grad == 0)).all())


def check_grad(grad: Tensor, spec: ParamSpec) -> None:
    """Raise RuntimeError if ``grad`` is sparse, or has another size than its parameter."""
    if grad.layout != torch.strided:
        raise RuntimeError(
            f"The gradient of {spec.name} is sparse; shardfuse needs dense gradients (for an "
            "embedding: sparse=False)."
        )
    if grad.numel() != spec.numel:
        raise RuntimeError(
            f"The gradient of {spec.name} has {grad.numel()} elements, the parameter {spec.numel}. "
            "Set p.grad to a tensor of the parameter's shape."
        )


def cut(grad: Tensor, spec: ParamSpec, start: int, numel: int) -> Tensor:
    """Return (numel,) of ``grad`` from ``start`` on, in the order of the parameter's slot."""
    if tuple(grad.stride()) != spec.stride:
        ordered = torch.empty_strided(spec.shape, spec.stride, dtype=grad.dtype, device=grad.device)
        grad = ordered.copy_(grad)
    return grad.as_strided((numel,), (1,), grad.storage_offset() + start)


class SentGrad(NamedTuple):
    """A gradient as it was sent."""

    param: Tensor
    grad: Tensor | None
    version: int
    address: int

    @classmethod
    def of(cls, param: Tensor, grad: Tensor | None) -> SentGrad:
        """Return ``grad``, that of ``param``, as it is now."""
        return cls(param, grad, *((0, 0) if grad is None else (grad._version, grad.data_ptr())))

    def is_unchanged(self) -> bool:
        """Return whether the parameter has the same gradient, and nobody has written to it."""
        now = SentGrad.of(self.param, self.param.grad)
        return now.grad is self.grad and now[2:] == self[2:]


@dataclass
class FlatGrads:
    """The gradients of one flat: buffer, per-parameter views of it, parameters, by position."""

    buffer: FlatBuffer
    params: Sequence[Tensor]
    specs: Sequence[ParamSpec]
    fragments: Mapping[int, Sequence[Fragment]]  # this rank's, by bucket
    wire: GradWire
    starts: list[int] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)  # in bytes
    views: list[Tensor] = field(default_factory=list)
    addresses: list[int] = field(default_factory=list)
    retained: ShardArena | None = None  # reduced shards, when they must outlive one bucket
    missing: set[int] = field(default_factory=set)  # params with no gradient on this rank
    outside: list[int] = field(default_factory=list)  # positions whose slots pack() is to fill
    arrived: list[Tensor] = field(default_factory=list)  # with these gradients
    absent: list[int] = field(default_factory=list)  # positions that have none
    cleared: dict[int, Tensor] = field(default_factory=dict)  # -0.0 since zero(), by position
    is_joined: bool = False  # whether neighbours are copied together
    is_lent: bool = False  # whether anybody may hold a view, or a view of one
    on_arrival: weakref.WeakMethod[Callable[[FlatGrads, int], None]] | None = None
    """What collect() calls at its end; of who holds this."""
    before_first: weakref.WeakMethod[Callable[[], bool]] | None = None
    """Called before the first gradient is collected; returns whether others collect them now."""
    made: dict[int, int] = field(default_factory=dict)
    """By position, the version of a view after autograd has written to it in this step."""

    def __post_init__(self) -> None:
        self.buffer.padding = -0.0  # what is padded may be absent
        self.buffer.clear_padding()
        # As .data each has a version of its own, which counts what is done through it.
        self.views = [self.buffer.view(i, spec).data for i, spec in enumerate(self.specs)]
        self.addresses = [view.data_ptr() for view in self.views]
        self.starts = [slot.start for slot in self.flat.slots]
        self.sizes = [view.nbytes for view in self.views]
        self.is_joined = self.buffer.data.device.type == "cpu" and all(
            spec.stride == (1,) and spec.numel <= _SHORT_NUMEL for spec in self.specs
        )

    @property
    def flat(self) -> Flat:
        """Geometry of the buffer."""
        return self.buffer.flat

    def holds(self, position: int, grad: Tensor) -> bool:
        """Return whether ``grad`` is the view of its slot (its ``.data`` may be set elsewhere)."""
        return grad is self.views[position] and grad.data_ptr() == self.addresses[position]

    def view(self, position: int) -> Tensor:
        """Return the view of a slot, a new one if the old was pointed elsewhere."""
        if self.views[position].data_ptr() != self.addresses[position]:
            self.views[position] = self.buffer.view(position, self.specs[position]).data
        return self.views[position]

    def watch(self) -> None:
        """Collect every gradient as soon as autograd has made it."""
        for position, param in enumerate(self.params):
            if param.requires_grad:
                hook = _collector(weakref.ref(self), position)
                param.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    def collect(self, position: int) -> None:
        """Move a gradient that autograd has just made into its slot, and free it.

        One that the caller sees elsewhere too, or that has a graph, stays: pack() will copy it.
        """
        if self.before_first is not None:
            before_first = self.before_first()
            if before_first is not None and before_first():
                return
        self._collect(position)
        arrived = None if self.on_arrival is None else self.on_arrival()
        if arrived is not None:
            arrived(self, position)

    def _collect(self, position: int) -> None:
        self.cleared.pop(position, None)
        param = self.params[position]
        grad = param.grad
        if grad is None or grad.layout != torch.strided:
            return
        if self.holds(position, grad):
            self.made[position] = grad._version
            return
        if not self._fits(position, grad):  # cast or moved since; step() says so on every rank
            return
        # What was never written in place is new: only another hook can have seen it.
        is_new = grad._version == 0 and len(param._post_accumulate_grad_hooks) == 1
        if grad.requires_grad or not (is_new or is_unseen(param)):
            return
        with torch.no_grad():
            if is_held(self.views, position):
                move_out(self.views[position])
            view = self.view(position).copy_(grad)
        param.grad = view
        self.made[position] = view._version
        self.is_lent = True

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

    def prepare(self, bucket: Bucket) -> list[SentGrad] | None:
        """Fill the slots in ``bucket`` before note(), and return what with; None if it must wait.

        It must where a gradient is not in its slot: edits of it could not all be seen.
        """
        positions = list(slots_in(self.flat, bucket))
        grads = [self.params[position].grad for position in positions]
        for position, grad in zip(positions, grads, strict=True):
            if grad is not None and not self.holds(position, grad):
                return None
        for position, grad in zip(positions, grads, strict=True):
            if grad is None:
                if self.is_lent and is_held(self.views, position):
                    move_out(self.views[position])
                self.buffer.clear(position)
        return [
            SentGrad.of(self.params[position], grad)
            for position, grad in zip(positions, grads, strict=True)
        ]

    def note(self) -> None:
        """Note which gradients are not in their slots, for pack(), and which do not exist.

        Raises:
            RuntimeError: a gradient is sparse.
        """
        self.missing.clear()
        self.forget()
        if self._is_in_place():
            return
        grads = list(map(_get_grad, self.params))
        if self._are_new(grads):
            self.outside, self.arrived = list(range(len(grads))), grads
        else:
            self.absent = self._sort(grads)

    def clear_absent(self) -> None:
        """Fill the slots of gradients that do not exist with -0.0, after keep()."""
        for position in self.absent:
            self.buffer.clear(position)
            self.missing.add(self.flat.slots[position].param)
        for position, grad in self.cleared.items():
            if self.params[position].grad is grad and is_absent(grad):
                self.missing.add(self.flat.slots[position].param)

    def _is_in_place(self) -> bool:
        """Return whether every gradient is in its slot, as it is after a backward.

        No list is made: what backward has freed, thousands of pieces, malloc puts in order at the
        next request of 1 KiB or more, which takes milliseconds.
        """
        grads = map(_get_grad, self.params)
        return all(map(operator.is_, grads, self.views)) and lie_at(self.views, self.addresses)

    def _are_new(self, grads: Sequence[Tensor | None]) -> bool:
        """Return whether ``grads`` are all there, of their slots' sizes, and none is a view of one.

        As they are where the caller sets them. There may be thousands, so no loop in Python.
        """
        if any(map(operator.is_, grads, self.views)):
            return False
        try:
            return all(map(operator.eq, map(_get_nbytes, grads), self.sizes))
        except (AttributeError, RuntimeError):  # of None; of a sparse one
            return False

    def _sort(self, grads: Sequence[Tensor | None]) -> list[int]:
        """Note which of ``grads`` are outside their slots; return the positions of those absent."""
        views, addresses, sizes, strided = self.views, self.addresses, self.sizes, torch.strided
        absent = []
        # No calls that need not be: there may be thousands.
        for position, grad in enumerate(grads):
            if grad is None:
                absent.append(position)
            # As holds() has it.
            elif grad is not views[position] or grad.data_ptr() != addresses[position]:
                if grad.layout is not strided or grad.nbytes != sizes[position]:
                    check_grad(grad, self.specs[position])
                self.outside.append(position)
                self.arrived.append(grad)
        return absent

    def keep(self, extents: Sequence[tuple[int, int]]) -> None:
        """Give memory of its own to what lies in a slot that is to be written, and is to be kept.

        That is, to gradients outside their slots, and to views of slots that somebody has.

        Args:
            extents: first and last address of the memory that slots of any flat lie in.
        """
        addresses = list(map(Tensor.data_ptr, self.arrived))
        for first, last in extents:
            pairs = zip(self.arrived, addresses, strict=True)
            for grad in [grad for grad, address in pairs if first <= address <= last]:
                move_out(grad)
        for position in itertools.chain(self.absent, self.outside) if self.is_lent else ():
            if is_held(self.views, position):
                move_out(self.views[position])

    def pack(self, end: int | None = None) -> None:
        """Copy gradients into the slots that start before ``end``, all without.

        By and by, because what has just been copied is sent out of the cache.
        """
        position = len(self.params) if end is None else bisect_left(self.starts, end)
        count = bisect_left(self.outside, position)
        if count == 0:
            return
        now, grads = self.outside[:count], self.arrived[:count]
        del self.outside[:count], self.arrived[:count]
        start, stop = now[0], now[-1] + 1
        if self.is_joined and stop - start == count:
            self.buffer.join(start, grads)
            return
        views = [self.views[position] for position in now]
        if not lie_at(views, [self.addresses[position] for position in now]):
            views = [self.view(position) for position in now]
        torch._foreach_copy_(views, grads)  # one call: there may be thousands

    def forget(self) -> None:
        """Drop what note() noted, so that gradients are not kept alive."""
        self.outside, self.arrived, self.absent = [], [], []

    def adopt(self) -> None:
        """Make every gradient a view of the buffer, where pack() has brought its values."""
        self.is_lent = True
        for position, param in enumerate(self.params):
            grad = param.grad
            if grad is not None and not self.holds(position, grad):
                param.grad = self.view(position)
                if self.cleared.get(position) is grad:
                    self.cleared[position] = param.grad

    def drop(self) -> None:
        """Set every gradient to None."""
        self.cleared.clear()
        for param in self.params:
            param.grad = None

    def zero(self, *, absent: bool) -> None:
        """Set every gradient to zero; with ``absent`` to -0.0, noting which they are.

        Nothing else is written: a slot whose gradient was moved, or let go, may be in use.
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


def clear_grads(params: Iterable[Tensor], set_to_none: bool) -> None:
    """Clear gradients that lie in no buffer, to None or to zero."""
    for param in params:
        if set_to_none:
            param.grad = None
        elif param.grad is not None:
            clear_grad(param.grad)


def clear_grad(grad: Tensor, value: float = 0.0) -> None:
    """Fill a gradient in place, out of its graph if it has one, as torch's zero_grad() does."""
    if grad.grad_fn is not None:
        grad.detach_()
    elif grad.requires_grad:
        grad.requires_grad_(False)
    if grad.layout == torch.strided:
        grad.fill_(value)
    else:
        grad.zero_()


def _collector(grads_ref: weakref.ref[FlatGrads], position: int) -> Callable[[Tensor], None]:
    """Return a post-accumulate hook; weak, so that a hook never keeps an optimizer alive."""

    @untraced
    def collect(param: Tensor) -> None:
        grads = grads_ref()
        if grads is not None:
            grads.collect(position)

    return collect
