"""Gradients that something else has already averaged over the ranks, such as torch's DDP."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from shardfuse.buffers import ShardArena
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
class _FlatGrads:
    """This rank's shards of the gradients of one flat, and where they come from."""

    flat: Flat
    arena: ShardArena
    params: dict[int, Tensor]
    pieces: list[_Piece]
    missing: set[int] = field(default_factory=set)

    def pack(self) -> None:
        """Copy this rank's fragments of every gradient; see PresyncedGrads."""
        self.missing = {p for p, param in self.params.items() if param.grad is None}
        into, out_of = [], []
        for param, spec, fragment, part in self.pieces:
            grad = param.grad
            if grad is None:
                part.zero_()
                continue
            check_grad(grad, spec)
            into.append(part)
            out_of.append(
                grad if fragment is None else cut(grad, spec, fragment.param_start, fragment.numel)
            )
        if into:
            torch._foreach_copy_(into, out_of)  # one call: there may be thousands


class PresyncedGrads(GradShards):
    """Takes this rank's fragments out of ``p.grad``; see GradShards.

    Nothing is communicated and ``p.grad`` stays whose it was: only a shard is copied. A parameter
    without a gradient here has none anywhere.
    """

    def __init__(self) -> None:
        super().__init__()
        self._flats: dict[int, _FlatGrads]
        self._kept_from: GradVersions | None = None

    @property
    def nbytes(self) -> int:
        return sum(grads.arena.data.nbytes for grads in self._flats.values())

    def attach(self, members: Sequence[FlatParams], device: torch.device) -> None:
        for flat, params, specs, fragments in members:
            arena = ShardArena(flat, device, params[0].dtype)
            of_slots = zip(flat.slots, params, specs, strict=True)
            by_number = {slot.param: (param, spec) for slot, param, spec in of_slots}
            self._flats[flat.index] = _FlatGrads(
                flat,
                arena,
                {number: param for number, (param, _) in by_number.items()},
                [
                    _piece(*by_number[fragment.param], fragment, arena.segment(bucket))
                    for bucket in flat.buckets
                    for fragment in fragments[bucket.index]
                ],
            )

    def idle(self, bucket: Bucket, parts: Parts) -> set[int]:
        return self._flats[bucket.flat].missing

    def mean_factor(self, flat: int) -> float | None:
        return None

    def note(self) -> None:
        if self._kept_from is not None and self._kept_from == GradVersions(self._params()):
            return
        self.phase, self._kept_from = GradPhase.NOTED, None
        for grads in self._flats.values():
            grads.pack()

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

    def release(self) -> None:
        self.phase, self._kept_from = GradPhase.ACCUMULATING, None

    def _params(self) -> list[Tensor]:
        return [param for grads in self._flats.values() for param in grads.params.values()]

    def reduced(self) -> Iterator[tuple[Bucket, Parts]]:
        for grads in self._flats.values():
            for bucket in grads.flat.buckets:
                yield bucket, (grads.arena.segment(bucket),)


def _piece(param: Tensor, spec: ParamSpec, fragment: Fragment, segment: Tensor) -> _Piece:
    """Return where ``fragment`` of a gradient goes in ``segment``, its bucket's shard."""
    part = segment[fragment.shard_start : fragment.shard_start + fragment.numel]
    if fragment.numel < spec.numel:
        return _Piece(param, spec, fragment, part)
    return _Piece(
        param, spec, None, part.as_strided(spec.shape, spec.stride, part.storage_offset())
    )
