"""Sums of block values per parameter, alike on every device.

[Note: segment tree] A parameter's norm adds up the sums of its blocks. ``index_add_`` would add
them one after another in fp32, which loses digits over the 20,000 blocks of an embedding, and
atomically on accelerators, which is not deterministic; fp64 accumulators do not exist on every NPU.
Here up to FAN_IN consecutive values of one parameter are added at a time, level by level, by a
gather and a row sum: exact to a few fp32 roundings, deterministic, and no Python loop over
parameters at run time.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

FAN_IN = 32


class SegmentSum:
    """Adds values that belong to segments.

    Args:
        segments: for every segment present, (segment, start, stop): values [start, stop) belong to
            it. Values in no range are ignored. A segment may occur several times.
        num_values: length of the input.
        num_segments: length of the output; segments that do not occur get 0.
        device: where the tables live.
    """

    def __init__(
        self,
        segments: Sequence[tuple[int, int, int]],
        *,
        num_values: int,
        num_segments: int,
        device: torch.device,
    ) -> None:
        members: dict[int, list[int]] = {}
        for segment, start, stop in segments:
            members.setdefault(segment, []).extend(range(start, stop))
        self._tables: list[Tensor] = []
        width = num_values
        while any(len(values) > 1 for values in members.values()):
            rows: list[list[int]] = []
            grouped: dict[int, list[int]] = {}
            for segment, values in members.items():
                chunks = [values[i : i + FAN_IN] for i in range(0, len(values), FAN_IN)]
                grouped[segment] = list(range(len(rows), len(rows) + len(chunks)))
                rows += chunks
            self._tables.append(_table(rows, FAN_IN, zero=width, device=device))
            members, width = grouped, len(rows)
        last = [members.get(segment, []) for segment in range(num_segments)]
        self._tables.append(_table(last, 1, zero=width, device=device))

    def __call__(self, values: Tensor) -> Tensor:
        """Return (k, num_segments) sums of ``values`` (k, num_values)."""
        for table in self._tables:
            padded = torch.nn.functional.pad(values, (0, 1))
            values = padded[:, table].sum(-1)
        return values


def _table(rows: list[list[int]], width: int, *, zero: int, device: torch.device) -> Tensor:
    """Return (len(rows), width) indices; short rows point at ``zero``, where a 0 is padded."""
    filled = [row + [zero] * (width - len(row)) for row in rows]
    return torch.tensor(filled, dtype=torch.int64, device=device).reshape(len(rows), width)
