"""What is held of the gradients of one flat at stage 2: this rank's shard, in fp32."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from shardfuse.buffers import ShardArena
from shardfuse.comm.base import Parts
from shardfuse.comm.staging import add_up
from shardfuse.grads.slots import check_grad, clear_grads, cut, is_absent
from shardfuse.grads.taken import Taken
from shardfuse.grads.wires import GradWire
from shardfuse.layout import Bucket, Flat, Fragment, ParamSpec, slots_in
from shardfuse.streams import Streams
from shardfuse.untraced import untraced


class _Piece(NamedTuple):
    """A slot intersected with a bucket."""

    position: int  # of the slot
    start: int  # in elements of the bucket
    param_start: int  # in elements of the parameter
    numel: int
    is_last: bool  # of its parameter


@dataclass
class FlatShard:
    """The gradients of one flat, of which nothing stays here but this rank's shard of their sum."""

    flat: Flat
    params: Sequence[Tensor]
    specs: Sequence[ParamSpec]
    fragments: Mapping[int, Sequence[Fragment]]  # this rank's, by bucket
    wire: GradWire
    arena: ShardArena  # fp32
    taken: Taken
    streams: Streams  # that gradients are made on
    missing: set[int] = field(default_factory=set)  # params with no gradient on this rank
    _pieces: dict[int, list[_Piece]] = field(default_factory=dict)  # by bucket
    _had: set[int] = field(default_factory=set)  # params that had one since clear()
    _partly: dict[int, Tensor | None] = field(default_factory=dict)  # of which pieces have left
    _used: set[int] = field(default_factory=set)  # params that had one before clear()
    _zeroed: set[int] = field(default_factory=set)  # params whose gradient is 0 unless one comes
    _written: set[int] = field(default_factory=set)  # buckets of which anything has arrived

    def __post_init__(self) -> None:
        # In order of buckets, which are ranges: the last of a parameter is in the last of its own.
        for bucket in self.flat.buckets:
            self._pieces[bucket.index] = [
                self._piece(bucket, position) for position in slots_in(self.flat, bucket)
            ]

    def _piece(self, bucket: Bucket, position: int) -> _Piece:
        slot, end = self.flat.slots[position], bucket.start + bucket.numel
        start, stop = max(slot.start, bucket.start), min(slot.start + slot.numel, end)
        is_last = stop == slot.start + slot.numel
        return _Piece(position, start - bucket.start, start - slot.start, stop - start, is_last)

    def watch(self, arrived: weakref.WeakMethod[Callable[[FlatShard, int], None]]) -> None:
        """Have ``arrived`` called with every gradient that autograd has made."""
        for position, param in enumerate(self.params):
            if param.requires_grad:
                hook = _announcer(weakref.ref(self), arrived, position)
                param.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    # On the way out

    def take(self, bucket: Bucket, into: Tensor) -> None:
        """Write the gradients of ``bucket`` ``into`` (bucket.numel,), and free them.

        Raises:
            RuntimeError: a gradient is sparse, or has another size than its parameter.
        """
        parts, end = [], 0
        for piece in self._pieces[bucket.index]:
            if piece.start > end:
                parts.append(into.new_full((piece.start - end,), -0.0))  # padding
            parts.append(self._cut(piece, into))
            end = piece.start + piece.numel
        parts.append(into.new_full((bucket.numel - end,), -0.0))
        torch.cat(parts, out=into)
        for piece in self._pieces[bucket.index]:
            self._free(piece)

    def _cut(self, piece: _Piece, like: Tensor) -> Tensor:
        """Return (piece.numel,) of a gradient, in the order of its slot; -0.0 if there is none."""
        spec, grad = self.specs[piece.position], self._grad(piece.position)
        if grad is None:
            is_zero = self.flat.slots[piece.position].param in self._zeroed
            return like.new_full((piece.numel,), 0.0 if is_zero else -0.0)
        check_grad(grad, spec)
        return cut(grad.detach(), spec, piece.param_start, piece.numel)

    def _grad(self, position: int) -> Tensor | None:
        """Return a gradient as it was when its first piece left, if one has in this round."""
        if position in self._partly:
            return self._partly[position]
        return self.params[position].grad

    def _free(self, piece: _Piece) -> None:
        """Let go of a gradient, or keep it aside for its other pieces: a new one may come."""
        position, grad = piece.position, self._grad(piece.position)
        if grad is not None:
            self.streams.hold(grad)
        if grad is not None and position not in self._partly:
            self._had.add(self.flat.slots[position].param)
            self.taken.add(self.params[position], self.specs[position].name)
        self._partly.pop(position, None)
        if not piece.is_last:
            self._partly[position] = grad

    def end_round(self) -> None:
        """Every bucket that was to leave has left."""
        self._partly.clear()

    def has_gradients(self, bucket: Bucket) -> bool:
        """Return whether any parameter in ``bucket`` has a gradient that has not left."""
        pieces = self._pieces[bucket.index]
        return any(self.params[piece.position].grad is not None for piece in pieces)

    # What has arrived

    def collect(self, bucket: Bucket, parts: Parts) -> None:
        """Add ``parts`` of the sum of a bucket to the shard."""
        total = self.arena.segment(bucket)
        if bucket.index not in self._written:
            self._written.add(bucket.index)
            add_up(parts, total)
            return
        for part in parts:
            total.add_(part)

    def settle(self) -> None:
        """Note which parameters had no gradient; where nothing has arrived there is none."""
        for position, slot in enumerate(self.flat.slots):
            # Of no elements: it is in no bucket, and leaves with none.
            if not slot.numel and self.params[position].grad is not None:
                self._had.add(slot.param)
                self.taken.add(self.params[position], self.specs[position].name)
        self.missing = {slot.param for slot in self.flat.slots} - self._had - self._zeroed
        for bucket in self.flat.buckets:
            if bucket.index not in self._written:
                self.arena.segment(bucket).fill_(-0.0)

    def idle(self, bucket: Bucket) -> set[int]:
        """Return the params in ``bucket``'s shard that no rank has a gradient of."""
        if not self.missing:
            return set()
        parts = self._parts(bucket)
        return {f.param for f, part in parts if f.param in self.missing and is_absent(part)}

    def clear(self) -> None:
        """Forget all that has arrived."""
        self._used |= self._had
        self._written.clear()
        self._had.clear()
        self._partly.clear()

    def overflowed(self) -> dict[int, Tensor]:
        """Return this rank's parts of gradients that are not finite, by parameter."""
        return {
            fragment.param: part
            for bucket in self.flat.buckets
            for fragment, part in self._parts(bucket)
            if not part.isfinite().all()
        }

    def _parts(self, bucket: Bucket) -> list[tuple[Fragment, Tensor]]:
        """Return this rank's fragments in ``bucket``, and what has arrived of each."""
        segment = self.arena.segment(bucket)
        return [
            (fragment, segment[fragment.shard_start : fragment.shard_start + fragment.numel])
            for fragment in self.fragments[bucket.index]
        ]

    def zero(self, set_to_none: bool) -> None:
        """Clear what has not left; have what has left count as none, or as zero."""
        clear_grads(self.params, set_to_none)
        self._zeroed = set() if set_to_none else self._zeroed | self._used
        self._used.clear()


def _announcer(
    shard_ref: weakref.ref[FlatShard],
    arrived_ref: weakref.WeakMethod[Callable[[FlatShard, int], None]],
    position: int,
) -> Callable[[Tensor], None]:
    """Return a post-accumulate hook; weak, so that a hook never keeps an optimizer alive."""

    @untraced
    def announce(param: Tensor) -> None:
        shard, arrived = shard_ref(), arrived_ref()
        if shard is not None and arrived is not None:
            arrived(shard, position)

    return announce
