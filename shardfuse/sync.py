"""Gradients into the flat buffers and over the wire; parameters back. One collective per bucket.

[Note: absent gradients] A parameter may have no gradient on this rank while it has one on others,
or on none. torch leaves a parameter without a gradient untouched, moments and step included, so
the owner of a fragment has to know whether any rank had one. Absent gradients are sent as -0.0:
IEEE sums of -0.0 alone are -0.0, and one +0.0 or other value among them shows. The owner looks only
at fragments whose gradient it lacks itself, so the usual step pays nothing and no collective is
added. A gradient that is present but -0.0 in every element of a fragment cannot be told from none.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.profiler import record_function

from shardfuse.buffers import FlatBuffer, ShardArena
from shardfuse.comm import Communicator, Handle
from shardfuse.layout import Bucket, Flat, Fragment, ParamSpec

_IN_FLIGHT = 2
"""Reduce-scatters launched ahead of the bucket being updated."""

Parts = tuple[Tensor, ...]
"""A shard of the summed gradient, as tensors (shard_numel,) that the update adds up in passing."""


@dataclass
class _FlatGrads:
    """The gradients of one flat: buffer, per-parameter views of it, parameters, by position."""

    flat: Flat
    buffer: FlatBuffer
    params: Sequence[Tensor]
    specs: Sequence[ParamSpec]
    fragments: Mapping[int, Sequence[Fragment]]  # this rank's, by bucket
    views: list[Tensor] = field(default_factory=list)
    addresses: list[int] = field(default_factory=list)
    retained: ShardArena | None = None  # reduced shards, when they must outlive one bucket
    missing: set[int] = field(default_factory=set)  # params with no gradient on this rank

    def __post_init__(self) -> None:
        self.views = [self.buffer.view(i, spec) for i, spec in enumerate(self.specs)]
        self.addresses = [view.data_ptr() for view in self.views]

    def holds(self, position: int, grad: Tensor) -> bool:
        """Return whether ``grad`` is the view of its slot (its ``.data`` may be set elsewhere)."""
        return grad is self.views[position] and grad.data_ptr() == self.addresses[position]

    def view(self, position: int) -> Tensor:
        """Return the view of a slot, a new one if the old was pointed elsewhere."""
        if self.views[position].data_ptr() != self.addresses[position]:
            self.views[position] = self.buffer.view(position, self.specs[position])
        return self.views[position]


class _Staging:
    """Persistent 1-D buffers; fresh ones would be page-faulted in every step."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, int, torch.dtype], Tensor] = {}

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in self._buffers.values())

    def take(self, role: str, slot: int, numel: int, like: Tensor) -> Tensor:
        """Return (numel,) of the buffer of a role and slot, of ``like``'s dtype and device."""
        key = (role, slot, like.dtype)
        buffer = self._buffers.get(key)
        if buffer is None or buffer.numel() < numel:
            buffer = self._buffers[key] = like.new_empty(numel)
        return buffer[:numel]


class GradVersions:
    """Which tensors the gradients are, and how often each was written: equal if unchanged."""

    def __init__(self, params: Iterable[Tensor]) -> None:
        self._grads = [param.grad for param in params]
        self._versions = [-1 if grad is None else grad._version for grad in self._grads]

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, GradVersions)
            and self._versions == other._versions
            and all(mine is theirs for mine, theirs in zip(self._grads, other._grads, strict=True))
        )

    __hash__ = None  # type: ignore[assignment]


class GradSync:
    """Packs gradients into flat buffers and reduce-scatters them, one collective per bucket.

    Gradients stay where autograd accumulates: ``p.grad`` is, or is copied into, a view of the flat
    buffer, and reducing leaves it as it is.

    Args:
        comm: the ranks to sum over.
        wire_dtype: dtype of the sum on the wire; None is the gradients' own.
    """

    def __init__(self, comm: Communicator, wire_dtype: torch.dtype | None) -> None:
        self._comm = comm
        self._wire_dtype = wire_dtype
        self._flats: dict[int, _FlatGrads] = {}
        self._staging = _Staging()
        self._is_reduced = False
        self._reduced_from: GradVersions | None = None

    @property
    def nbytes(self) -> int:
        """Bytes held for gradients: flat buffers, retained shards and staging."""
        tensors = [grads.buffer.data for grads in self._flats.values()]
        tensors += [
            grads.retained.data for grads in self._flats.values() if grads.retained is not None
        ]
        return sum(tensor.nbytes for tensor in tensors) + self._staging.nbytes

    @property
    def is_reduced(self) -> bool:
        """Whether reduced shards are being kept for the next ``reduced()``."""
        return self._is_reduced

    def attach(
        self,
        flat: Flat,
        params: Sequence[Tensor],
        specs: Sequence[ParamSpec],
        fragments: Mapping[int, Sequence[Fragment]],
    ) -> None:
        """Take over the gradients of ``flat``; ``params`` and ``specs`` are in slot order.

        ``fragments`` are this rank's, by bucket.
        """
        buffer = FlatBuffer(flat, params[0].device, params[0].dtype)
        grads = _FlatGrads(flat, buffer, params, specs, fragments)
        self._flats[flat.index] = grads
        sync_ref, grads_ref = weakref.ref(self), weakref.ref(grads)
        for position, param in enumerate(params):
            if param.requires_grad:
                hook = _collector(sync_ref, grads_ref, position)
                param.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    def has(self, flat: Flat) -> bool:
        """Return whether ``flat`` is attached."""
        return flat.index in self._flats

    def missing(self, flat: Flat) -> set[int]:
        """Return the params of ``flat`` that had no gradient on this rank at the last pack()."""
        return self._flats[flat.index].missing

    def idle(self, bucket: Bucket, parts: Parts) -> set[int]:
        """Return the params with a fragment in ``bucket``'s shard that no rank has a gradient of.

        ``parts`` are what ``reduced()`` gave for ``bucket``. See [Note: absent gradients].
        """
        grads = self._flats[bucket.flat]
        if self._comm.world_size == 1:
            return grads.missing
        idle = set()
        for fragment in grads.fragments[bucket.index] if grads.missing else ():
            if fragment.param in grads.missing:
                stop = fragment.shard_start + fragment.numel
                present = (part[fragment.shard_start : stop] for part in parts)
                if all(bool((part.signbit() & (part == 0)).all()) for part in present):
                    idle.add(fragment.param)
        return idle

    def scale(self, flat_index: int) -> float | None:
        """Return the factor from a flat's reduced gradients to their mean over ranks; None is 1."""
        world_size = self._comm.world_size
        divided = self._divides_first(self._flats[flat_index])
        return None if world_size == 1 or divided else 1.0 / world_size

    def pack(self) -> None:
        """Bring every gradient into its slot and note the parameters that have none.

        Raises:
            RuntimeError: a gradient is sparse.
        """
        if self._is_reduced and self._reduced_from == GradVersions(self._params()):
            return
        self._is_reduced = False
        for grads in self._flats.values():
            grads.missing.clear()
            for position, param in enumerate(grads.params):
                grad = param.grad
                if grad is not None and grads.holds(position, grad):
                    continue
                if grad is None:
                    grads.view(position).fill_(-0.0)
                    grads.missing.add(grads.flat.slots[position].param)
                elif grad.layout != torch.strided:
                    raise RuntimeError(
                        f"The gradient of {grads.specs[position].name} is sparse; shardfuse needs "
                        "dense gradients (for an embedding: sparse=False)."
                    )
                else:
                    grads.view(position).copy_(grad)

    def multiply(self, factor: Tensor) -> None:
        """Multiply the packed gradients of this rank by ``factor`` (), in place."""
        for grads in self._flats.values():
            grads.buffer.data.mul_(factor)

    def zero(self, set_to_none: bool) -> None:
        """Clear the gradients, to None or to zero, and forget reduced shards."""
        self.release()
        if not set_to_none:
            for grads in self._flats.values():
                grads.buffer.data.zero_()
        for grads in self._flats.values():
            for position, param in enumerate(grads.params):
                if set_to_none:
                    param.grad = None
                elif param.grad is not None and not grads.holds(position, param.grad):
                    param.grad.detach().zero_()

    def retain(self) -> None:
        """Reduce-scatter all buckets now and keep the shards for the next ``reduced()``."""
        if self._is_reduced:
            return
        if self._comm.world_size > 1:
            for grads in self._flats.values():
                if grads.retained is None:
                    dtype = self._wire(grads)
                    grads.retained = ShardArena(grads.flat, grads.buffer.data.device, dtype)
            for bucket, parts in self._pipeline(retain=True):
                arena = self._flats[bucket.flat].retained
                assert arena is not None
                if len(parts) > 1:
                    total = torch.add(parts[0], parts[1], out=arena.segment(bucket))
                    for part in parts[2:]:
                        total.add_(part)
        self._is_reduced = True
        self._reduced_from = GradVersions(self._params())

    def release(self) -> None:
        """Forget shards kept by ``retain()``; the next step reduces anew."""
        self._is_reduced = False
        self._reduced_from = None

    def _params(self) -> list[Tensor]:
        return [param for grads in self._flats.values() for param in grads.params]

    def reduced(self) -> Iterator[tuple[Bucket, Parts]]:
        """Yield (bucket, its shard of the summed gradient), in launch order.

        Parts are in the wire dtype and valid until the next are asked for. After retain() there is
        one, the sum.
        """
        if self._comm.world_size == 1:
            for grads in self._flats.values():
                for bucket in grads.flat.buckets:
                    yield bucket, (grads.buffer.bucket(bucket),)
        elif self._is_reduced:
            for grads in self._flats.values():
                assert grads.retained is not None
                for bucket in grads.flat.buckets:
                    yield bucket, (grads.retained.segment(bucket),)
        else:
            yield from self._pipeline(retain=False)

    def _pipeline(self, *, retain: bool) -> Iterator[tuple[Bucket, Parts]]:
        """Reduce-scatter every bucket, _IN_FLIGHT ahead of the one yielded."""
        queue = [(grads, bucket) for grads in self._flats.values() for bucket in grads.flat.buckets]
        handles: list[tuple[Handle, Parts]] = []
        for index in range(len(queue) + _IN_FLIGHT):
            if index >= _IN_FLIGHT:
                handle, parts = handles[index - _IN_FLIGHT]
                with record_function("shardfuse::wait_reduce_scatter"):
                    handle.wait()
                yield queue[index - _IN_FLIGHT][1], parts
            if index < len(queue):
                handles.append(self._launch(*queue[index], index % _IN_FLIGHT, retain))

    def _launch(
        self, grads: _FlatGrads, bucket: Bucket, slot: int, retain: bool
    ) -> tuple[Handle, Parts]:
        send = grads.buffer.bucket(bucket)
        dtype = self._wire(grads)
        like = torch.empty(0, dtype=dtype, device=send.device)
        if self._divides_first(grads):
            staged = self._staging.take("send", slot, bucket.numel, like)
            send = torch.mul(send, 1.0 / self._comm.world_size, out=staged)
        elif send.dtype != dtype:
            send = self._staging.take("send", slot, bucket.numel, like).copy_(send)
        with record_function(f"shardfuse::reduce_scatter b{bucket.index}"):
            if self._comm.can_exchange:
                others = self._comm.world_size - 1
                received = self._staging.take("receive", slot, others * bucket.shard_numel, like)
                received = received.view(others, bucket.shard_numel)
                own = send.chunk(self._comm.world_size)[self._comm.rank]
                return self._comm.exchange(received, send), (own, *received)
            if retain:
                assert grads.retained is not None
                shard = grads.retained.segment(bucket)
            else:
                shard = self._staging.take("receive", slot, bucket.shard_numel, like)
            return self._comm.reduce_scatter(shard, send), (shard,)

    def _wire(self, grads: _FlatGrads) -> torch.dtype:
        return self._wire_dtype or grads.buffer.data.dtype

    def _divides_first(self, grads: _FlatGrads) -> bool:
        """Return whether to divide before the sum: fp16 would overflow at 65504."""
        return self._wire(grads) == torch.float16

    def _collect(self, grads: _FlatGrads, position: int, param: Tensor) -> None:
        """Move a gradient that autograd has just made into its slot, and free it."""
        grad = param.grad
        if grad is None or grad.layout != torch.strided or grads.holds(position, grad):
            return
        with torch.no_grad():
            view = grads.view(position).copy_(grad)
        param.grad = view


def _collector(
    sync_ref: weakref.ref[GradSync], grads_ref: weakref.ref[_FlatGrads], position: int
) -> Callable[[Tensor], None]:
    """Return a post-accumulate hook; weak, so that a hook never keeps an optimizer alive."""

    def collect(param: Tensor) -> None:
        sync, grads = sync_ref(), grads_ref()
        if sync is not None and grads is not None:
            sync._collect(grads, position, param)

    return collect


class ParamSync:
    """All-gathers updated shards into the flat parameter buffers, one collective per bucket."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._handles: list[Handle] = []

    def start(self, buffer: FlatBuffer, bucket: Bucket) -> None:
        """Launch the all-gather of ``bucket``; its shard must not be written until finish()."""
        with record_function(f"shardfuse::all_gather b{bucket.index}"):
            handle = self._comm.all_gather(
                buffer.bucket(bucket), buffer.shard(bucket, self._comm.rank)
            )
        self._handles.append(handle)

    def broadcast(self, buffer: FlatBuffer) -> None:
        """Launch broadcasts of the first rank's values of the whole buffer, bucket by bucket."""
        for bucket in buffer.flat.buckets:
            self._handles.append(self._comm.broadcast(buffer.bucket(bucket)))

    def finish(self) -> None:
        """Wait for everything launched; after this the parameters may be read."""
        with record_function("shardfuse::wait_all_gather"):
            for handle in self._handles:
                handle.wait()
        self._handles.clear()
