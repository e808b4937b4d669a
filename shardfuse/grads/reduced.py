"""Gradients that something else has already averaged over the ranks, such as torch's DDP."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from shardfuse.buffers import ShardArena, zeros
from shardfuse.comm.base import Parts
from shardfuse.grads.ownership import GradVersions
from shardfuse.grads.protocol import GradPhase, GradShards
from shardfuse.grads.slots import FlatParams, check_grad, clear_grads, cut
from shardfuse.layout import Bucket, Flat, Fragment, ParamSpec


class _Piece(NamedTuple):
    """Where a parameter's gradient goes, or a fragment of it."""

    param: Tensor
    spec: ParamSpec
    fragment: Fragment | None  # None is the whole
    into: Tensor  # of the parameter's shape; a fragment (numel,)


@dataclass
class _BucketGrads:
    """What this rank's shard of the gradient of one bucket is made of, and where it is put."""

    shard: Tensor  # (shard_numel,)
    pieces: list[_Piece]
    gaps: list[Tensor]  # what no piece covers

    def pack(self) -> Tensor:
        """Copy this rank's fragments of every gradient; return the shard."""
        into, out_of = [], []
        unwritten = list(self.gaps)
        for param, spec, fragment, part in self.pieces:
            grad = param.grad
            if grad is None:
                unwritten.append(part)
                continue
            into.append(part)
            out_of.append(
                grad if fragment is None else cut(grad, spec, fragment.param_start, fragment.numel)
            )
        if unwritten:
            torch._foreach_zero_(unwritten)
        if into:
            torch._foreach_copy_(into, out_of)  # one call: there may be thousands
        return self.shard


@dataclass
class _FlatGrads:
    """The gradients of one flat, and this rank's fragments of them by bucket."""

    flat: Flat
    params: dict[int, Tensor]
    specs: dict[int, ParamSpec]
    fragments: Mapping[int, Sequence[Fragment]]  # by bucket
    room: Tensor
    """One bucket's shard: buckets are packed one after another, so no copy of all is held."""
    buckets: dict[int, _BucketGrads] = field(default_factory=dict)
    missing: set[int] = field(default_factory=set)
    arena: ShardArena | None = None
    """All buckets' shards, where a rule needs them at the same time."""

    def place(self, arena: ShardArena | None) -> None:
        """Have buckets packed into ``arena``; None: each into the same room."""
        self.arena = arena
        for bucket in self.flat.buckets:
            shard = self.room[: bucket.shard_numel] if arena is None else arena.segment(bucket)
            fragments = self.fragments[bucket.index]
            pieces = [
                _piece(self.params[f.param], self.specs[f.param], f, shard) for f in fragments
            ]
            self.buckets[bucket.index] = _BucketGrads(shard, pieces, _gaps(fragments, shard))

    def note(self) -> None:
        """Note which gradients exist."""
        self.missing = {p for p, param in self.params.items() if param.grad is None}
        for number, param in self.params.items():
            if param.grad is not None:
                check_grad(param.grad, self.specs[number])


class PresyncedGrads(GradShards):
    """Takes this rank's fragments out of ``p.grad``; see GradShards.

    Nothing is communicated and ``p.grad`` stays whose it was: one bucket's shard is copied at a
    time. A parameter without a gradient here has none anywhere.
    """

    def __init__(self) -> None:
        super().__init__()
        self._flats: dict[int, _FlatGrads]
        self._kept_from: GradVersions | None = None
        self._rooms: dict[torch.dtype, Tensor] = {}  # that flats share
        self._device = torch.device("cpu")

    @property
    def nbytes(self) -> int:
        rooms = {grads.room.data_ptr(): grads.room.nbytes for grads in self._flats.values()}
        arenas = [grads.arena for grads in self._flats.values() if grads.arena is not None]
        return sum(rooms.values()) + sum(arena.data.nbytes for arena in arenas)

    def attach(self, members: Sequence[FlatParams], device: torch.device) -> None:
        self._device = device
        for flat, params, specs, fragments in members:
            dtype = params[0].dtype
            numel = max((bucket.shard_numel for bucket in flat.buckets), default=0)
            if dtype not in self._rooms or self._rooms[dtype].numel() < numel:
                self._rooms[dtype] = zeros(numel, device, dtype)
            numbers = [slot.param for slot in flat.slots]
            grads = self._flats[flat.index] = _FlatGrads(
                flat,
                dict(zip(numbers, params, strict=True)),
                dict(zip(numbers, specs, strict=True)),
                fragments,
                self._rooms[dtype],
            )
            grads.place(None)

    def idle(self, bucket: Bucket, parts: Parts) -> set[int]:
        return self._flats[bucket.flat].missing

    def mean_factor(self, flat: int) -> float | None:
        return None

    def note(self) -> None:
        if self._kept_from is not None and self._kept_from == GradVersions(self._params()):
            return
        self.phase, self._kept_from = GradPhase.NOTED, None
        for grads in self._flats.values():
            grads.note()

    def multiply(self, factor: Tensor) -> None:
        """Refuse to treat ranks' gradients differently: they are one mean already."""
        raise RuntimeError(
            "The ranks have different loss scales although their gradients are reduced already. "
            "Use one scale on all ranks: shardfuse.ShardedGradScaler."
        )

    def combined(self, *, shared: bool) -> list[Tensor | None]:
        """Return every gradient by itself; there is no tensor that they all lie in.

        Raises:
            RuntimeError: ``shared``, because the caller wants that tensor.
        """
        if shared:
            raise RuntimeError(
                "There are no combined gradients with grads_are_reduced=True: each p.grad belongs "
                "to whatever averages it, such as DistributedDataParallel. Use p.grad, or train "
                "without that wrapper and with grads_are_reduced=False."
            )
        grads = [param.grad for param in self._params() if param.grad is not None]
        return [grad.detach() for grad in grads if grad.layout == torch.strided]

    def zero(self, set_to_none: bool, *, absent: bool = False) -> None:
        """Clear the gradients, to None or to zero.

        ``absent`` is left to their owner, who alone knows what was used: a zero is a gradient.
        """
        self.release()
        for grads in self._flats.values():
            clear_grads(grads.params.values(), set_to_none)

    def retain(self) -> None:
        self.phase, self._kept_from = GradPhase.REDUCED, GradVersions(self._params())

    def retain_at_once(self) -> None:
        self.retain()
        for grads in self._flats.values():
            if grads.arena is None:
                dtype = grads.room.dtype
                grads.place(ShardArena(grads.flat, self._device, dtype))

    def release(self) -> None:
        self.phase, self._kept_from = GradPhase.ACCUMULATING, None

    def _params(self) -> list[Tensor]:
        return [param for grads in self._flats.values() for param in grads.params.values()]

    def reduced(self) -> Iterator[tuple[Bucket, Parts]]:
        for grads in self._flats.values():
            for bucket in grads.flat.buckets:
                yield bucket, (grads.buckets[bucket.index].pack(),)


def _piece(param: Tensor, spec: ParamSpec, fragment: Fragment, segment: Tensor) -> _Piece:
    """Return where ``fragment`` of a gradient goes in ``segment``, its bucket's shard."""
    part = segment[fragment.shard_start : fragment.shard_start + fragment.numel]
    if fragment.numel < spec.numel:
        return _Piece(param, spec, fragment, part)
    return _Piece(
        param, spec, None, part.as_strided(spec.shape, spec.stride, part.storage_offset())
    )


def _gaps(fragments: Sequence[Fragment], shard: Tensor) -> list[Tensor]:
    """Return the parts of ``shard`` outside all fragments: padding, which is zero."""
    gaps, end = [], 0
    for fragment in sorted(fragments, key=lambda fragment: fragment.shard_start):
        if fragment.shard_start > end:
            gaps.append(shard[end : fragment.shard_start])
        end = fragment.shard_start + fragment.numel
    return [*gaps, shard[end:]] if end < shard.numel() else gaps
