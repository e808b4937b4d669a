"""Geometry: every element has one owner, shards are whole blocks, ranks can compare digests."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch

from shardfuse.layout import BLOCK, ITEMSIZE, FlatLayout, ParamSpec, dense_stride, round_up

DTYPES = ["float32", "bfloat16", "float16"]


def make_spec(name: str, shape: tuple[int, ...], **changes: Any) -> ParamSpec:
    stride = dense_stride(shape, torch.empty(shape, device="meta").stride())
    spec = ParamSpec(name, shape, stride, dtype="float32", device="cpu", group=0)
    return replace(spec, **changes)


def random_specs(rng: random.Random, num_params: int, device: str | None = None) -> list[ParamSpec]:
    numels = [0, 1, 3, BLOCK - 1, BLOCK, BLOCK + 1, 5 * BLOCK + 7, 12_345]
    device = device or rng.choice(["cpu", "npu:0"])
    return [
        make_spec(
            f"p{index}",
            (rng.choice(numels),),
            dtype=rng.choice(DTYPES),
            device=device,
            group=rng.randrange(3),
            frozen=rng.random() < 0.1,
            policy=rng.choice(["", "no_decay"]),
        )
        for index in range(num_params)
    ]


def random_layout(seed: int, device: str | None = None) -> FlatLayout:
    rng = random.Random(seed)
    return FlatLayout.build(
        random_specs(rng, rng.randrange(1, 12), device),
        world_size=rng.choice([1, 2, 3, 4, 7, 8, 16]),
        bucket_nbytes=rng.choice([1, 1 << 14, 1 << 16, 25 << 20]),
        granularity="block" if rng.random() < 0.5 else "element",
    )


SEEDS = range(200)


def owners(layout: FlatLayout) -> list[list[int]]:
    """Count, for every element of every parameter, how many fragments hold it."""
    counts = [[0] * spec.numel for spec in layout.specs]
    for flat in layout.flats:
        for rank in range(layout.world_size):
            for fragment in layout.fragments(flat, rank):
                for i in range(fragment.numel):
                    counts[fragment.param][fragment.param_start + i] += 1
    return counts


@pytest.mark.parametrize("seed", range(30))
def test_every_element_has_one_owner(seed: int) -> None:
    """Over all ranks the fragments hold every element of every parameter exactly once."""
    for counts in owners(random_layout(seed)):
        assert all(count == 1 for count in counts)


def test_shards_are_whole_blocks_of_one_parameter() -> None:
    """Shards are whole blocks; so are slots where asked for, and then no block holds two."""
    for seed in SEEDS:
        layout = random_layout(seed)
        for flat in layout.flats:
            taken: dict[int, int] = {}
            for slot in flat.slots if layout.granularity == "block" else ():
                assert slot.start % BLOCK == 0
                for block in range(slot.start // BLOCK, slot.stop // BLOCK):
                    assert taken.setdefault(block, slot.param) == slot.param
            for bucket in flat.buckets:
                assert bucket.shard_numel % BLOCK == 0
                assert bucket.shard_numel > 0
                assert bucket.numel == bucket.shard_numel * layout.world_size


def test_slots_follow_one_another() -> None:
    """Each starts where the one before ends: on a block, or at the next 512 bytes (CPU: 64)."""
    for seed in SEEDS:
        layout = random_layout(seed)
        for flat in layout.flats:
            nbytes = 64 if flat.device == "cpu" else 512
            align = BLOCK if layout.granularity == "block" else nbytes // ITEMSIZE[flat.dtype]
            assert flat.align == align
            start = 0
            kind = None
            for slot in flat.slots:
                if layout.specs[slot.param].kind != kind:
                    kind, start = layout.specs[slot.param].kind, round_up(start, BLOCK)
                assert slot.start == start
                start = slot.start + round_up(slot.numel, align)
                assert slot.stop == start
        assert layout.align == min(flat.align for flat in layout.flats)


@pytest.mark.parametrize("device", ["npu:0", "cuda:0", "a new one"])
def test_accelerators_get_multiples_of_512_bytes(device: str) -> None:
    """Slots, buckets and shards begin at them, in the param's dtype and in fp32 as states are."""
    for seed in SEEDS:
        layout = random_layout(seed, device)
        for flat in layout.flats:
            for itemsize in (ITEMSIZE[flat.dtype], ITEMSIZE["float32"]):
                starts = [slot.start for slot in flat.slots]
                for bucket in flat.buckets:
                    starts += range(bucket.start, bucket.start + bucket.numel, bucket.shard_numel)
                assert all(start * itemsize % 512 == 0 for start in starts)


def test_buckets_tile_the_flats() -> None:
    """Buckets follow one another without gap to the flat's end, within the cap, equal in size."""
    for seed in SEEDS:
        layout = random_layout(seed)
        assert [bucket.index for bucket in layout.buckets] == list(range(len(layout.buckets)))
        unit = layout.world_size * BLOCK
        for flat in layout.flats:
            stop = 0
            for bucket in flat.buckets:
                assert bucket.start == stop
                stop += bucket.numel
                nbytes = bucket.numel * ITEMSIZE[flat.dtype]
                assert nbytes <= layout.bucket_nbytes or bucket.numel == unit
            assert stop == flat.numel
            used = max((slot.stop for slot in flat.slots), default=0)
            assert used <= flat.numel < used + unit
            sizes = [bucket.numel for bucket in flat.buckets]
            assert not sizes or max(sizes) - min(sizes) <= unit


def test_flats_hold_one_dtype_and_groups_in_reverse() -> None:
    """A flat has one dtype and frozenness, its groups in order, each in reverse registration.

    A group, and what another math updates, begins at a whole block.
    """
    for seed in SEEDS:
        layout = random_layout(seed)
        seen: list[int] = []
        for flat in layout.flats:
            members = [slot.param for slot in flat.slots]
            kinds = list(dict.fromkeys(layout.specs[param].kind for param in sorted(members)))
            maths = list(dict.fromkeys(layout.specs[param].math for param in sorted(members)))
            places = [
                (maths.index(spec.math), kinds.index(spec.kind), -param)
                for param, spec in ((param, layout.specs[param]) for param in members)
            ]
            assert places == sorted(places)
            for (one, other), slot in zip(pairwise(places), flat.slots[1:], strict=True):
                assert one[:2] == other[:2] or slot.start % BLOCK == 0
            seen += members
            for param in members:
                spec = layout.specs[param]
                assert (spec.dtype, spec.device) == (flat.dtype, flat.device)
                assert spec.frozen == flat.frozen
                assert flat.slots[members.index(param)].numel == spec.numel
        assert sorted(seen) == list(range(len(layout.specs)))


def test_fragments_are_in_buffer_order() -> None:
    """A rank's fragments follow one another in its shards, inside slot and shard."""
    for seed in SEEDS:
        layout = random_layout(seed)
        for flat in layout.flats:
            slots = {slot.param: slot for slot in flat.slots}
            for rank in range(layout.world_size):
                last = (-1, 0)
                for fragment in layout.fragments(flat, rank):
                    bucket = layout.buckets[fragment.bucket]
                    here = (fragment.bucket, fragment.shard_start)
                    assert here >= last
                    last = (fragment.bucket, fragment.shard_start + fragment.numel)
                    assert last[1] <= bucket.shard_numel
                    start = bucket.shard_start(rank) + fragment.shard_start
                    assert start == slots[fragment.param].start + fragment.param_start


def test_membership_does_not_depend_on_the_world_size() -> None:
    """Only padding changes with the world size: parameters keep their place in the flat."""
    specs = random_specs(random.Random(5), 9)
    slots = [
        [flat.slots for flat in FlatLayout.build(specs, world_size=world_size).flats]
        for world_size in (1, 2, 3, 64)
    ]
    assert all(other == slots[0] for other in slots)


def test_extending_moves_nothing() -> None:
    """Flats that exist stay as they are when parameters are added."""
    rng = random.Random(6)
    first, second = random_specs(rng, 5), random_specs(rng, 4)
    layout = FlatLayout.build(first, world_size=3, bucket_nbytes=1 << 14)
    extended = layout.extended(second)
    assert extended.flats[: len(layout.flats)] == layout.flats
    assert extended.specs == (*first, *second)
    for counts in owners(extended):
        assert all(count == 1 for count in counts)


@pytest.mark.timeout(20)
def test_thousands_of_ranks() -> None:
    """BERT-large's sizes over 4,096 ranks lay out within the timeout, every element owned once."""
    numels = [31_254_528, 524_288, 2_048, 1_024, 1_024]
    for _ in range(24):
        numels += [1_048_576, 1_024] * 4 + [4_194_304, 4_096, 4_194_304, 1_024] + [1_024] * 4
    specs = [make_spec(f"p{i}", (numel,)) for i, numel in enumerate(numels)]
    layout = FlatLayout.build(specs, world_size=4096, bucket_nbytes=100 << 20)
    owned = 0
    for flat in layout.flats:
        for rank in (0, 1, 2047, 4095):
            assert all(f.numel > 0 for f in layout.fragments(flat, rank))
        owned += sum(slot.numel for slot in flat.slots)
    assert owned == sum(numels)
    assert len(layout.digest()) == 32


CHANGES: list[dict[str, Any]] = [
    {"shape": (40, 30), "stride": (30, 1)},
    {"stride": (1, 30)},
    {"dtype": "bfloat16"},
    {"group": 1},
    {"policy": "no_decay"},
    {"frozen": True},
    {"device": "cuda:0"},
    {"name": "other"},
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: "-".join(change))
def test_digest_sees_what_matters(change: dict[str, Any]) -> None:
    """The digest changes with anything about a parameter that ranks have to agree on."""
    specs = [make_spec("a", (30, 40)), make_spec("b", (7,))]
    changed = [replace(specs[0], **change), specs[1]]
    assert build_digest(changed) != build_digest(specs)


def build_digest(
    specs: list[ParamSpec], world_size: int = 2, bucket_nbytes: int = 1 << 20
) -> bytes:
    layout = FlatLayout.build(specs, world_size=world_size, bucket_nbytes=bucket_nbytes)
    return layout.digest()


def test_digest_of_equal_input() -> None:
    """Equal input gives equal layouts and digests; the index of a device does not count."""
    specs = [make_spec("a", (30, 40)), make_spec("b", (7,))]
    copies = [make_spec("a", (30, 40)), make_spec("b", (7,))]
    first = FlatLayout.build(specs, world_size=2)
    second = FlatLayout.build(copies, world_size=2)
    assert first == second
    assert first.digest() == second.digest()
    on_devices = [[replace(s, device=f"cuda:{i}") for s in specs] for i in range(2)]
    assert build_digest(on_devices[0]) == build_digest(on_devices[1])


def test_digest_of_other_worlds() -> None:
    """Order, number of parameters, world size and bucket size change the digest."""
    specs = [make_spec("a", (30, 40)), make_spec("b", (7,))]
    digests = {
        build_digest(specs),
        build_digest(specs[::-1]),
        build_digest(specs[:1]),
        build_digest(specs, world_size=3),
        build_digest(specs, bucket_nbytes=1 << 19),
    }
    assert len(digests) == 5


def test_refuses_what_it_cannot_lay_out() -> None:
    """A dtype without a size, a world of no ranks and an empty bucket are refused by name."""
    with pytest.raises(TypeError, match=r"wide.*float64"):
        FlatLayout.build([make_spec("wide", (3,), dtype="float64")], world_size=1)
    with pytest.raises(ValueError, match="world_size: 0"):
        FlatLayout.build([], world_size=0)
    with pytest.raises(ValueError, match="bucket_nbytes: 0"):
        FlatLayout.build([], world_size=1, bucket_nbytes=0)


def damaged() -> dict[str, Callable[[FlatLayout], object]]:
    """Return ways to make a layout that contradicts itself, of one of two flats."""
    return {
        "an end": lambda layout: replace(layout.flats[0], numel=layout.flats[0].numel + BLOCK),
        "slots": lambda layout: replace(layout.flats[0], slots=layout.flats[0].slots[::-1]),
        "a gap": lambda layout: replace(layout.flats[0], buckets=layout.flats[0].buckets[1:]),
        "another flat's": lambda layout: replace(layout.flats[1], buckets=layout.flats[0].buckets),
        "the world": lambda layout: replace(layout, world_size=3),
        "missing": lambda layout: replace(layout, flats=layout.flats[:1]),
        "twice": lambda layout: replace(layout, flats=layout.flats * 2),
        "a size": lambda layout: replace(layout, specs=layout.specs[::-1]),
    }


@pytest.mark.parametrize("name", damaged())
def test_a_layout_that_contradicts_itself(name: str) -> None:
    """What does not fit together is refused on construction, not met in a step."""
    specs = [make_spec(f"p{i}", (500 + i,), dtype=DTYPES[i % 2]) for i in range(6)]
    layout = FlatLayout.build(specs, world_size=2, bucket_nbytes=1 << 11)
    with pytest.raises(ValueError, match=r"of its place|elements, its|-th, of|is in no flat"):
        damaged()[name](layout)


@pytest.mark.parametrize(
    ("shape", "stride", "expected"),
    [
        ((3, 4), (4, 1), (4, 1)),
        ((3, 4), (1, 3), (1, 3)),
        ((2, 3, 4, 5), (60, 1, 15, 3), (60, 1, 15, 3)),
        ((3, 4), (8, 1), (4, 1)),
        ((3, 4), (0, 1), (4, 1)),
        ((1, 4), (99, 1), (99, 1)),
        ((), (), ()),
    ],
)
def test_dense_stride(
    shape: tuple[int, ...], stride: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    """Strides that fill the shape (also channels_last) are kept, others become contiguous."""
    assert dense_stride(shape, stride) == expected


def test_dense_stride_addresses_every_element_once() -> None:
    """Whatever stride comes in, the one that comes out reaches each of numel addresses once."""
    rng = random.Random(7)
    for _ in range(300):
        shape = tuple(rng.randrange(1, 5) for _ in range(rng.randrange(4)))
        stride = tuple(rng.choice([0, 1, 2, 3, 4, 6, 8, 12]) for _ in shape)
        addresses = {0}
        for size, step in zip(shape, dense_stride(shape, stride), strict=True):
            addresses = {a + i * step for a in addresses for i in range(size)}
        numel = torch.Size(shape).numel()
        assert addresses == set(range(numel))
