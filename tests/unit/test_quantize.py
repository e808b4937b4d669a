"""Blocks in 8 and 4 bits: how far off, how many bytes, and what must not be lost."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from shardfuse import codecs
from shardfuse.buffers import FlatBuffer
from shardfuse.codecs import (
    BlockQuantizer,
    DeltaCodec,
    DifferentParams,
    QuantCodec,
    ReduceRequest,
)
from shardfuse.comm.transport import BufferPool, Completion, PartialSums, completed
from shardfuse.layout import BLOCK, FlatLayout, ParamSpec
from tests.support import placing

BITS = [8, 4]
STEPS = {8: 127, 4: 7}
# One block, a tile and more, and several tiles.
NUM_BLOCKS = [1, 129, 300]


def there_and_back(values: Tensor, bits: int, factor: float | None = None) -> Tensor:
    quantizer = BlockQuantizer(bits)
    encoded = torch.full((1, quantizer.nbytes(values.numel())), 170, dtype=torch.uint8)
    quantizer.encode(values[None], encoded, factor)
    result = torch.full(values.shape, -0.0)
    quantizer.add(encoded, result[None])
    return result


@pytest.mark.parametrize("num_blocks", NUM_BLOCKS)
@pytest.mark.parametrize("bits", BITS)
def test_error_is_half_a_step_of_its_block(bits: int, num_blocks: int) -> None:
    """Against the definition, in double precision; blocks differ in magnitude by up to 1e30."""
    generator = torch.Generator().manual_seed(bits)
    magnitudes = 10.0 ** torch.linspace(-20, 10, num_blocks)
    values = torch.randn(num_blocks, BLOCK, generator=generator) * magnitudes[:, None]
    found = there_and_back(values.flatten(), bits).view(num_blocks, BLOCK)
    step = values.abs().amax(dim=1, keepdim=True).double() / STEPS[bits]
    assert ((found.double() - values.double()).abs() <= step * (0.5 + 1e-5)).all()
    assert (found.abs().amax(dim=1).double() / step[:, 0] - STEPS[bits]).abs().max() < 1e-5
    assert len(set((found[0].double() / step[0]).round().tolist())) > STEPS[bits]


@pytest.mark.parametrize("bits", BITS)
def test_whole_numbers_of_steps_are_exact(bits: int) -> None:
    """Every code there is, in every place of a byte, and at several powers of two."""
    most = STEPS[bits]
    codes = torch.arange(-most, most + 1).repeat(math.ceil(3 * BLOCK / (2 * most + 1)))
    values = codes[: 3 * BLOCK].view(3, BLOCK) * torch.tensor([[2.0**-9], [1.0], [2.0**40]])
    assert torch.equal(there_and_back(values.flatten(), bits), values.flatten())


@pytest.mark.parametrize("bits", BITS)
def test_bytes(bits: int) -> None:
    """bits / 8 an element, and 4 for each block."""
    assert BlockQuantizer(bits).nbytes(10 * BLOCK) == 10 * (BLOCK * bits // 8 + 4)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("bits", BITS)
def test_what_is_not_finite_shows(bits: int, bad: float) -> None:
    """None of its block is finite when it arrives, so that an overflow is found wherever it is."""
    values = torch.ones(3 * BLOCK)
    values[BLOCK + 77] = bad
    found = there_and_back(values, bits).view(3, BLOCK)
    assert not found[1].isfinite().any()
    assert torch.equal(found[[0, 2]], torch.ones(2, BLOCK))


@pytest.mark.parametrize("bits", BITS)
def test_absent_is_not_zero(bits: int) -> None:
    """-0.0 in all of a block arrives as that; zeros, and what is too small for a scale, do not."""
    values = torch.full((5, BLOCK), -0.0)
    values[1] = 0.0
    values[2, 5] = 0.0
    values[3] = -1e-45
    values[4] = -1e-39
    found = there_and_back(values.flatten(), bits).view(5, BLOCK)
    assert (found == 0).all()
    assert found.signbit().all(dim=1).tolist() == [True, False, False, False, False]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_factor_and_dtype(dtype: torch.dtype) -> None:
    """Products are taken in fp32, whatever the values are in."""
    values = torch.linspace(-60000, 60000, 2 * BLOCK).to(dtype)
    found = there_and_back(values, 8, 4.0)
    assert torch.equal(found, there_and_back(values.float() * 4.0, 8))
    assert found.isfinite().all()


@pytest.mark.parametrize("bits", BITS)
def test_adds_to_what_is_there(bits: int) -> None:
    values = torch.randn(2 * BLOCK, generator=torch.Generator().manual_seed(1))
    quantizer = BlockQuantizer(bits)
    encoded = torch.empty(1, quantizer.nbytes(values.numel()), dtype=torch.uint8)
    quantizer.encode(values[None], encoded)
    total = torch.full((2 * BLOCK,), 3.0)
    quantizer.add(encoded, total[None])
    assert torch.equal(total, 3.0 + there_and_back(values, bits))


# In one tile, as on accelerators


def encode_parts(values: Tensor, bits: int, factor: float | None) -> Tensor:
    """Return the encoded parts of ``values`` (k, n), without the padding between them."""
    quantizer = BlockQuantizer(bits)
    n = values.shape[1]
    padded = torch.zeros(len(values), quantizer.part_nbytes(n), dtype=torch.uint8)
    encoded = padded[:, : quantizer.nbytes(n)]
    quantizer.encode(values, encoded, factor)
    assert not padded[:, quantizer.nbytes(n) :].any()
    return encoded


@pytest.mark.parametrize("factor", [None, 0.37])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bits", BITS)
def test_one_tile_has_the_bits_of_many(
    bits: int, dtype: torch.dtype, factor: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All parts at once are encoded and decoded as each alone and tile by tile."""
    generator = torch.Generator().manual_seed(bits)
    magnitudes = 10.0 ** torch.linspace(-42, 30, 300)
    values = torch.randn(3, 300, BLOCK, generator=generator) * magnitudes[:, None]
    values[0, 0], values[1, 1], values[2, 2] = -0.0, 0.0, -1e-39
    values[0, 3, ::2], values[0, 3, 1::2] = -0.0, 0.0
    values[0, 290, 7], values[1, 290, 7] = float("nan"), float("inf")
    values = values.view(3, -1).to(dtype)
    start = torch.randn(values.shape, generator=generator)
    expected = [encode_parts(part[None], bits, factor)[0] for part in values]
    sums = start.clone()
    for part, into in zip(expected, sums, strict=True):
        BlockQuantizer(bits).add(part[None], into[None])
    monkeypatch.setattr(codecs, "_HOST", ())
    found = encode_parts(values, bits, factor)
    assert torch.equal(found, torch.stack(expected))
    BlockQuantizer(bits).add(found, start)
    assert torch.equal(start.view(torch.int32), sums.view(torch.int32))


class CountKernels(TorchDispatchMode):
    """Counts the operators that are no views: on an accelerator, each is a kernel or more."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        is_empty = func._schema.name.startswith(("aten::empty", "aten::new_empty"))
        self.number += not (func.is_view or is_empty)
        return func(*args, **(kwargs or {}))


class Parts:
    """Rank 1 of ``world_size`` in a reduce-scatter whose peers send the same as this rank."""

    rank = 1

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size

    def reduce_scatter(self, input: Tensor, **_: Any) -> Completion[PartialSums]:
        return completed(tuple(input.chunk(self.world_size)))


def count_grads(world_size: int, num_blocks: int, dtype: torch.dtype) -> tuple[int, int]:
    """Return the kernels that send a bucket of gradients, and that decode and sum its parts."""
    whole = torch.ones(world_size * num_blocks * BLOCK, dtype=dtype)
    comm: Any = Parts(world_size)
    with CountKernels() as sent:
        completion = QuantCodec(BlockQuantizer(8)).launch(comm, BufferPool(), ReduceRequest(whole))
    with CountKernels() as received:
        completion.wait()
    return sent.number, received.number


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("world_size", [2, 3, 8])
def test_kernels_of_gradients(
    world_size: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many for a bucket of 25 MiB as for a small one."""
    monkeypatch.setattr(codecs, "_HOST", ())
    small = count_grads(world_size, 2, dtype)
    assert count_grads(world_size, (25 << 20) // (4 * BLOCK * world_size), dtype) == small
    num_batches = 1 if world_size == 2 else 2  # of the ranks before this one, and after it
    assert small[0] <= 15 * num_batches
    assert small[1] <= 1 + 3 * (world_size - 1)


def delta_codec(bits: int, world_size: int, num_blocks: int) -> tuple[DeltaCodec, FlatBuffer]:
    """Return the codec of rank 1, and its parameters: zeros, in one bucket."""
    spec = ParamSpec("p", (world_size * num_blocks * BLOCK,), (1,), "float32", "cpu", 0)
    layout = FlatLayout.build([spec], world_size=world_size, bucket_nbytes=1 << 30)
    params = FlatBuffer(layout.flats[0], torch.zeros(layout.flats[0].numel))
    codec = DeltaCodec(params, 1, BlockQuantizer(bits), has_feedback=True)
    codec.allocate()
    return codec, params


def count_params(bits: int, world_size: int, num_blocks: int) -> tuple[int, int]:
    """Return the kernels that encode this rank's part of a bucket, and that decode the others."""
    codec, params = delta_codec(bits, world_size, num_blocks)
    (bucket,) = params.flat.buckets
    codec.begin_update(bucket)
    with CountKernels() as sent:
        codec.commit(bucket)
    with CountKernels() as received:
        codec.decode(bucket)
    return sent.number, received.number


@pytest.mark.parametrize("world_size", [2, 3, 8])
@pytest.mark.parametrize("bits", BITS)
def test_kernels_of_params(bits: int, world_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codecs, "_HOST", ())
    small = count_params(bits, world_size, 2)
    assert count_params(bits, world_size, (25 << 20) // (4 * BLOCK * world_size)) == small
    assert small[0] <= 30
    assert small[1] <= 19


def test_different_params_are_found_without_a_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """On an accelerator: by the second check() after decode(), once, and not by an equal step."""
    monkeypatch.setattr(codecs, "_HOST", ())
    codec, params = delta_codec(8, 3, 2)
    (bucket,) = params.flat.buckets
    for value, rank in ((0.0, 0), (1e-7, 1), (1e-7, 2), (1e-7, 0)):
        params.shard(bucket, rank)[77] = value  # its own may differ: it has updated them
        codec.decode(bucket)
        codec.check()
        if placing.on_device():
            torch.accelerator.synchronize()  # a check may come before the device's result
        with pytest.raises(DifferentParams) if value and rank != 1 else nullcontext():
            codec.check()
        params.data.zero_()
    codec.check()
    codec.check()


@pytest.mark.cpu_only("where waits do not block the host, they are found a step later")
def test_different_params_are_found_at_once_on_the_host() -> None:
    codec, params = delta_codec(8, 3, 2)
    (bucket,) = params.flat.buckets
    codec.decode(bucket)
    params.shard(bucket, 2)[77] = 1e-7
    with pytest.raises(DifferentParams):
        codec.decode(bucket)
