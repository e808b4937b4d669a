"""Floating-point values in 8 or 4 bits: whole numbers, and an fp32 scale for each block of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from shardfuse.layout import BLOCK

_TILE = 128 * BLOCK
"""Elements at a time, so that what lies between stays in the cache."""

_TINY = torch.finfo(torch.float32).tiny
"""Smaller scales have no reciprocal in fp32; they count as zero."""


class BlockQuantizer(NamedTuple):
    """``bits`` (8 or 4) an element, and 4 bytes for each block of 512.

    A block's largest magnitude becomes 127, or 7; others are rounded to the nearest of as many
    steps, halves to even, so that the error of an element is at most half of its block's scale.
    Where an element is not finite, none of its block is when it arrives. A block of -0.0 alone
    arrives as that; see [Note: absent gradients] in grads/full.py.
    """

    bits: int

    @property
    def _most(self) -> int:
        return (1 << (self.bits - 1)) - 1

    def nbytes(self, numel: int) -> int:
        """Return the bytes that ``numel`` elements, whole blocks, take."""
        return numel * self.bits // 8 + numel // BLOCK * 4

    def encode(self, values: Tensor, out: Tensor, factor: float | None = None) -> None:
        """Write ``values`` (n,) times ``factor`` as bytes into ``out`` (nbytes(n),)."""
        for part, scales, codes in self._tiles(values, out):
            rows = part.view(-1, BLOCK).float()
            rows = rows if factor is None else rows * factor
            torch.amax(rows.abs(), dim=1, out=scales)
            is_zero = scales == 0
            scales.div_(self._most).masked_fill_(scales < _TINY, 0.0)
            steps = (rows * torch.where(scales > 0, scales.reciprocal(), 0.0)[:, None]).round_()
            # An accelerator does it always: the host would wait for the answer.
            if scales.device.type != "cpu" or is_zero.any():
                scales.masked_fill_(is_zero & rows.signbit().all(dim=1), -0.0)
            whole = steps.to(torch.int8)
            if self.bits == 8:
                codes.view(torch.int8).view(-1, BLOCK).copy_(whole)
            else:
                low, high = whole.add_(8).view(torch.uint8).chunk(2, dim=1)
                torch.bitwise_or(low, high << 4, out=codes.view(-1, BLOCK // 2))

    def add(self, encoded: Tensor, into: Tensor) -> None:
        """Add what ``encoded`` (nbytes(n),) stands for to fp32 ``into`` (n,), alike everywhere."""
        for part, scales, codes in self._tiles(into, encoded):
            if self.bits == 8:
                steps = codes.view(torch.int8).view(-1, BLOCK).float()
            else:
                pairs = codes.view(-1, BLOCK // 2)
                steps = torch.cat([pairs & 15, pairs >> 4], dim=1).float().sub_(8.0)
            part.view(-1, BLOCK).add_(steps.mul_(scales[:, None]))

    def _tiles(self, values: Tensor, encoded: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield (elements, their scales, their codes); all scales come first in ``encoded``."""
        num_blocks = values.numel() // BLOCK
        scales = encoded[: 4 * num_blocks].view(torch.float32)
        codes = encoded[4 * num_blocks :]
        for start in range(0, values.numel(), _TILE):
            stop = min(start + _TILE, values.numel())
            of_blocks = slice(start // BLOCK, stop // BLOCK)
            of_codes = slice(start * self.bits // 8, stop * self.bits // 8)
            yield values[start:stop], scales[of_blocks], codes[of_codes]
