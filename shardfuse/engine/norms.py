"""Per-parameter sums over the blocks of all shards of a rank, and their way back to blocks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shardfuse.engine.flat_state import FlatState
from shardfuse.engine.kernels import SegmentSum
from shardfuse.layout import BLOCK, Bucket, round_up


class BlockSums:
    """One fp32 number per block and sum, for the shards of ``flats`` one after another.

    Args:
        flats: the flats whose blocks take part, in layout order.
        num_sums: sums per block.
        num_params: parameters of the optimizer, in any flat.
    """

    def __init__(self, flats: Sequence[FlatState], *, num_sums: int, num_params: int) -> None:
        segments: list[tuple[int, int, int]] = []
        self._starts: dict[int, tuple[int, int]] = {}
        num_blocks = 0
        for state in flats:
            assert state.flat.align == BLOCK, "a block holds several parameters"
            for bucket in state.flat.buckets:
                stop = num_blocks + bucket.shard_numel // BLOCK
                self._starts[bucket.index] = (num_blocks, stop)
                for fragment in state.fragments[bucket.index]:
                    start = num_blocks + fragment.shard_start // BLOCK
                    length = round_up(fragment.numel, BLOCK) // BLOCK
                    segments.append((fragment.param, start, start + length))
                num_blocks = stop
        device = flats[0].device
        self._sums = torch.zeros(num_sums, num_blocks, device=device)
        self._ratio = torch.ones(num_blocks, device=device)
        self._tree = SegmentSum(
            segments, num_values=num_blocks, num_segments=num_params, device=device
        )
        # Tail padding belongs to no parameter; it takes the ratio appended after the last one.
        owner = [num_params] * num_blocks
        for param, start, stop in segments:
            owner[start:stop] = [param] * (stop - start)
        self._owner = torch.tensor(owner, dtype=torch.int64, device=device)

    def clear(self) -> None:
        """Set all sums to zero; blocks that are not updated in a step must add nothing."""
        self._sums.zero_()

    def rows(self, bucket: Bucket) -> Tensor | None:
        """Return the sums (num_sums, blocks) of ``bucket``'s shard; None if it takes no part."""
        extent = self._starts.get(bucket.index)
        return None if extent is None else self._sums[:, extent[0] : extent[1]]

    def per_param(self) -> Tensor:
        """Return this rank's part of the sums of each parameter, (num_sums, num_params)."""
        return self._tree(self._sums)

    def spread(self, ratio: Tensor) -> None:
        """Give every block the ratio of its parameter; ``ratio`` is (num_params,)."""
        padded = torch.nn.functional.pad(ratio, (0, 1), value=1.0)
        torch.index_select(padded, 0, self._owner, out=self._ratio)

    def ratio(self, bucket: Bucket) -> Tensor | None:
        """Return the ratios (blocks,) of ``bucket``'s shard; None where they are 1."""
        extent = self._starts.get(bucket.index)
        return None if extent is None else self._ratio[extent[0] : extent[1]]
