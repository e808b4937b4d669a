"""Integer geometry of the flat buffers: blocks, buckets, shards, fragments.

Nothing here has a tensor or communicates. A layout can be printed, hashed, compared, and
built for thousands of ranks on a laptop.

    flat      | p0 ....pad| p1 pad| p2 ..............pad|   tail pad  |
    blocks    |b0|b1|b2|b3|b4|b5  |b6|b7|b8|b9|b10 |b11 |             |   BLOCK elements each
    buckets   |<------- bucket 0 ------->|<------- bucket 1 --------->|   one collective each
    shards    |<- rank 0 ->|<- rank 1 -->|<- rank 0 ->|<-- rank 1 --->|   whole blocks

* A flat holds the parameters of one (dtype, device), whatever their groups, so that the number of
  collectives depends on bytes alone. Parameters of one (group, policy) are updated alike: they are
  neighbours, and begin at a whole block. Next to them are those of others under the same math, with
  other numbers. Among them the order is the reverse of registration, because gradients become ready
  in that order; it is the same on every rank by construction. Frozen parameters have a flat for
  each (group, policy): these begin to train one by one.
* A shard is whole blocks. So is a slot under rules of granularity "block", which take norms of
  tensors: every block then belongs to exactly one parameter (or to the tail padding) and to one
  rank. Under other rules slots start at aligned addresses (SLOT_NBYTES): small tensors pad less.
* A bucket is a range of a flat, not a set of parameters: buckets are equal in size, a large tensor
  is cut, and only the last one carries tail padding.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import operator
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

BLOCK = 512
"""Elements per block; at 2 bytes or more this keeps every shard 512-byte aligned (Ascend)."""

SLOT_NBYTES = {"cpu": 64, "cuda": 512, "npu": 512}
"""Slots that need not be whole blocks start at multiples of so many bytes, by type of device.

On the CPU it is a cache line. All are the alignments of torch's allocators. Other types have 512.
"""

PART_NBYTES = 512
"""Messages that are no part of a flat are padded to multiples of so many bytes per rank."""

ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes per element of the parameter dtypes that a flat may have."""


def round_up(value: int, multiple: int) -> int:
    """Return the smallest multiple of ``multiple`` that is >= ``value``."""
    return -(-value // multiple) * multiple


def dense_stride(shape: Sequence[int], stride: Sequence[int]) -> tuple[int, ...]:
    """Return ``stride`` if it fills ``shape`` without gaps or overlap, else the contiguous one."""
    contiguous = [1] * len(shape)
    for dim in range(len(shape) - 2, -1, -1):
        contiguous[dim] = contiguous[dim + 1] * max(shape[dim + 1], 1)
    if tuple(stride) == tuple(contiguous):  # of most: without sorting
        return tuple(stride)
    expected = 1
    for size, step in sorted(zip(shape, stride, strict=True), key=lambda pair: (pair[1], pair[0])):
        if size == 1:
            continue
        if step != expected:
            break
        expected *= size
    else:
        return tuple(stride)
    return tuple(contiguous)


@dataclass(frozen=True, slots=True)
class ParamSpec:
    """The properties of a parameter that the layout depends on."""

    name: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str
    device: str
    group: int
    policy: str = ""
    frozen: bool = False
    math: str = ""
    """Names the code that updates it: parameters of equal ones are neighbours in a flat."""
    storage: str = ""
    """Names its states: only parameters of equal ones share a flat, whose states all have."""

    @property
    def numel(self) -> int:
        """Elements of the parameter."""
        return math.prod(self.shape)

    @property
    def device_type(self) -> str:
        """Type of the device, such as "npu"."""
        return self.device.partition(":")[0]

    @property
    def key(self) -> tuple[str, str, str, tuple[int, str] | None]:
        """Parameters with equal keys share a flat."""
        return (self.dtype, self.device, self.storage, self.kind if self.frozen else None)

    @property
    def kind(self) -> tuple[int, str]:
        """(group, policy): parameters of one kind are updated alike; in a flat, neighbours."""
        return (self.group, self.policy)

    def describe(self) -> str:
        """Return one line that identifies this parameter, the same on all ranks."""
        text = f"{self.name} {self.shape} {self.dtype} on {self.device_type} in group {self.group}"
        if self.policy:
            text += f" policy {self.policy}"
        if self.frozen:
            text += " requires_grad=False"
        return f"{text} stride {self.stride}"


class Slot(NamedTuple):
    """A parameter's place in a flat: elements [start, start + numel), padding up to ``stop``."""

    param: int
    start: int
    numel: int
    stop: int


@dataclass(frozen=True, slots=True)
class Bucket:
    """One collective's range of a flat: elements [start, start + numel), numel a multiple of W."""

    index: int
    flat: int
    start: int
    numel: int
    shard_numel: int

    def shard_start(self, rank: int) -> int:
        """Start of ``rank``'s shard, in elements of the flat."""
        return self.start + rank * self.shard_numel


class Fragment(NamedTuple):
    """Slot intersected with shard: the unit of checkpoints and of per-tensor norms.

    ``param_start`` counts elements of the parameter in its storage order and does not depend on the
    world size; ``shard_start`` counts elements of the bucket's shard.
    """

    param: int
    bucket: int
    param_start: int
    shard_start: int
    numel: int


@dataclass(frozen=True, slots=True)
class Flat:
    """One contiguous 1-D buffer of ``numel`` elements, padding included."""

    index: int
    dtype: str
    device: str
    frozen: bool
    align: int  # slots start at multiples of so many elements
    numel: int
    slots: tuple[Slot, ...]
    buckets: tuple[Bucket, ...]

    def __post_init__(self) -> None:
        ends = [0, *(slot.stop for slot in self.slots)]
        for slot, end in zip(self.slots, ends, strict=False):
            is_next = slot.start in (end, round_up(end, BLOCK))
            if not is_next or slot.stop != slot.start + round_up(slot.numel, self.align):
                raise ValueError(f"Flat {self.index} has a slot out of its place: {slot}.")
        start = 0
        for bucket in self.buckets:
            whole = bucket.shard_numel % BLOCK == 0 and bucket.numel % bucket.shard_numel == 0
            if bucket.start != start or bucket.flat != self.index or not whole:
                raise ValueError(f"Flat {self.index} has a bucket out of its place: {bucket}.")
            start += bucket.numel
        if start != self.numel or ends[-1] > self.numel:
            raise ValueError(f"Flat {self.index} has {self.numel} elements, its buckets {start}.")


def slots_in(flat: Flat, bucket: Bucket) -> Iterator[int]:
    """Yield the positions of the slots that have elements in ``bucket``."""
    stop = bucket.start + bucket.numel
    first = bisect_right(flat.slots, bucket.start, key=operator.attrgetter("stop"))
    for position in range(first, len(flat.slots)):
        slot = flat.slots[position]
        if slot.start >= stop:
            break
        if slot.start + slot.numel > bucket.start and slot.numel:
            yield position


@dataclass(frozen=True)
class FlatLayout:
    """All flats of one optimizer over ``world_size`` ranks, for a rule of some ``granularity``.

    There are no flats under an external layout (optim/backend.py).

    Raises:
        ValueError: a number out of range, slots that overlap, buckets that do not cover their flat
            or are not of ``world_size`` shards, a parameter in no flat or in two.
    """

    world_size: int
    bucket_nbytes: int
    granularity: str
    specs: tuple[ParamSpec, ...] = ()
    flats: tuple[Flat, ...] = ()

    def __post_init__(self) -> None:
        if self.world_size < 1:
            raise ValueError(f"Invalid world_size: {self.world_size}. Must be >= 1.")
        if self.bucket_nbytes < 1:
            raise ValueError(f"Invalid bucket_nbytes: {self.bucket_nbytes}. Must be >= 1 byte.")
        for index, bucket in enumerate(self.buckets):
            if bucket.index != index or bucket.numel != bucket.shard_numel * self.world_size:
                raise ValueError(f"{bucket} is not the {index}-th, of {self.world_size} shards.")
        held = sorted((slot.param, slot.numel) for flat in self.flats for slot in flat.slots)
        if self.flats and held != [(index, spec.numel) for index, spec in enumerate(self.specs)]:
            raise ValueError("A parameter is in no flat, in two, or in a slot of another size.")

    @classmethod
    def build(
        cls,
        specs: Sequence[ParamSpec],
        *,
        world_size: int,
        bucket_nbytes: int = 25 << 20,
        granularity: str = "block",
    ) -> FlatLayout:
        """Lay out ``specs`` in buckets of at most ``bucket_nbytes`` (at least a block per rank)."""
        return cls(world_size, bucket_nbytes, granularity).extended(specs)

    def extended(self, specs: Sequence[ParamSpec]) -> FlatLayout:
        """Return this layout with flats for ``specs`` appended; existing flats do not move."""
        by_key: dict[tuple[Any, ...], list[int]] = {}
        for index, spec in enumerate(specs, start=len(self.specs)):
            if spec.dtype not in ITEMSIZE:
                raise TypeError(
                    f"Parameter {spec.name} has dtype {spec.dtype}; use {list(ITEMSIZE)}."
                )
            by_key.setdefault(spec.key, []).append(index)
        all_specs = (*self.specs, *specs)
        flats = list(self.flats)
        num_buckets = len(self.buckets)
        for members in by_key.values():
            flat = self._lay_flat(all_specs, members, len(flats), num_buckets)
            num_buckets += len(flat.buckets)
            flats.append(flat)
        return replace(self, specs=all_specs, flats=tuple(flats))

    def _lay_flat(
        self, specs: Sequence[ParamSpec], members: list[int], index: int, first_bucket: int
    ) -> Flat:
        spec = specs[members[0]]
        slot_nbytes = SLOT_NBYTES.get(spec.device_type, 512)
        align = BLOCK if self.granularity == "block" else slot_nbytes // ITEMSIZE[spec.dtype]
        by_kind: dict[str, dict[tuple[int, str], list[int]]] = {}
        for param in members:
            own = specs[param]
            alike = by_kind.setdefault(own.math, {})
            alike.setdefault((own.group, own.policy), []).append(param)
        slots = []
        used = 0
        for alikes in itertools.chain.from_iterable(kind.values() for kind in by_kind.values()):
            used = round_up(used, BLOCK)
            for param in reversed(alikes):
                start, numel = used, specs[param].numel
                used += round_up(numel, align)
                slots.append(Slot(param, start, numel, used))
        unit = self.world_size * BLOCK
        num_units = -(-used // unit)
        cap_units = max(1, self.bucket_nbytes // (unit * ITEMSIZE[spec.dtype]))
        num_buckets = -(-num_units // cap_units)
        buckets = []
        for i in range(num_buckets):
            start = num_units * i // num_buckets * unit
            numel = num_units * (i + 1) // num_buckets * unit - start
            buckets.append(Bucket(first_bucket + i, index, start, numel, numel // self.world_size))
        return Flat(
            index=index,
            dtype=spec.dtype,
            device=spec.device,
            frozen=spec.frozen,
            align=align,
            numel=num_units * unit,
            slots=tuple(slots),
            buckets=tuple(buckets),
        )

    @cached_property
    def buckets(self) -> tuple[Bucket, ...]:
        """All buckets in the order in which their collectives are launched."""
        return tuple(bucket for flat in self.flats for bucket in flat.buckets)

    @property
    def align(self) -> int:
        """All slots start at multiples of so many elements, a power of two."""
        return min((flat.align for flat in self.flats), default=BLOCK)

    @staticmethod
    def fragments(flat: Flat, rank: int) -> Iterator[Fragment]:
        """Yield ``rank``'s fragments of ``flat`` in buffer order; empty parameters have none."""
        first = 0
        for bucket in flat.buckets:
            shard_start = bucket.shard_start(rank)
            shard_stop = shard_start + bucket.shard_numel
            while first < len(flat.slots) and flat.slots[first].stop <= shard_start:
                first += 1
            for position in range(first, len(flat.slots)):
                slot = flat.slots[position]
                if slot.start >= shard_stop:
                    break
                start = max(slot.start, shard_start)
                stop = min(slot.start + slot.numel, shard_stop)
                if stop > start:
                    yield Fragment(
                        param=slot.param,
                        bucket=bucket.index,
                        param_start=start - slot.start,
                        shard_start=start - shard_start,
                        numel=stop - start,
                    )

    def digest(self) -> bytes:
        """Return 32 bytes that differ wherever two ranks could not communicate."""
        blocks = f"block {BLOCK} whole {self.granularity == 'block'}"
        text = [f"{blocks} world {self.world_size} bucket {self.bucket_nbytes}"]
        text += [spec.describe() for spec in self.specs]
        return hashlib.sha256("\n".join(text).encode()).digest()

    def describe(self) -> str:
        """Return a printable table: one line per flat, sizes in elements."""
        lines = [f"{len(self.specs)} params over {self.world_size} ranks, block {BLOCK}"]
        for flat in self.flats:
            numel = sum(slot.numel for slot in flat.slots)
            frozen = " frozen" if flat.frozen else ""
            kinds = {self.specs[slot.param].kind for slot in flat.slots}
            lines.append(
                f"flat {flat.index}: {flat.dtype} {flat.device}{frozen}, {len(flat.slots)} params "
                f"of {len(kinds)} (group, policy), {numel} elements "
                f"+ {flat.numel - numel} padding, {len(flat.buckets)} buckets"
            )
        return "\n".join(lines)
