"""Blocks in 8 and 4 bits: how far off, how many bytes, and what must not be lost."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from shardfuse.codecs import BlockQuantizer
from shardfuse.layout import BLOCK

BITS = [8, 4]
STEPS = {8: 127, 4: 7}
# One block, a tile and more, and several tiles.
NUM_BLOCKS = [1, 129, 300]


def there_and_back(values: Tensor, bits: int, factor: float | None = None) -> Tensor:
    quantizer = BlockQuantizer(bits)
    encoded = torch.full((quantizer.nbytes(values.numel()),), 170, dtype=torch.uint8)
    quantizer.encode(values, encoded, factor)
    result = torch.full(values.shape, -0.0)
    quantizer.add(encoded, result)
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
    encoded = torch.empty(quantizer.nbytes(values.numel()), dtype=torch.uint8)
    quantizer.encode(values, encoded)
    total = torch.full((2 * BLOCK,), 3.0)
    quantizer.add(encoded, total)
    assert torch.equal(total, 3.0 + there_and_back(values, bits))
