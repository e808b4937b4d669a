"""Storage: flat buffers and their views. Nothing here communicates."""

from __future__ import annotations

import torch

from shardfuse.layout import Bucket, Flat, ParamSpec


class FlatBuffer:
    """One 1-D tensor of ``flat.numel`` elements; everything it returns is an alias of it.

    Padding is zero at construction and stays outside every view.
    """

    data: torch.Tensor  # (flat.numel,), dtype and device of the flat

    def __init__(self, flat: Flat, device: torch.device, dtype: torch.dtype) -> None:
        self.flat = flat
        self.data = torch.zeros(flat.numel, dtype=dtype, device=device)

    def view(self, position: int, spec: ParamSpec) -> torch.Tensor:
        """Return slot ``position`` shaped and strided like its parameter."""
        start = self.flat.slots[position].start
        return self.data.as_strided(spec.shape, spec.stride, start)

    def bucket(self, bucket: Bucket) -> torch.Tensor:
        """Return ``bucket`` as a (bucket.numel,) tensor."""
        return self.data[bucket.start : bucket.start + bucket.numel]

    def shard(self, bucket: Bucket, rank: int) -> torch.Tensor:
        """Return ``rank``'s part of ``bucket`` as a (bucket.shard_numel,) tensor."""
        start = bucket.shard_start(rank)
        return self.data[start : start + bucket.shard_numel]


class ShardArena:
    """This rank's part of one state of a flat: a segment of (shard_numel,) per bucket.

    Segments are contiguous in bucket order and hold the dtype the math is done in.
    """

    data: torch.Tensor  # (flat.numel / world_size,)

    def __init__(self, flat: Flat, device: torch.device, dtype: torch.dtype) -> None:
        numel = sum(bucket.shard_numel for bucket in flat.buckets)
        self.data = torch.zeros(numel, dtype=dtype, device=device)
        self._segments: dict[int, torch.Tensor] = {}
        start = 0
        for bucket in flat.buckets:
            self._segments[bucket.index] = self.data[start : start + bucket.shard_numel]
            start += bucket.shard_numel

    def segment(self, bucket: Bucket) -> torch.Tensor:
        """Return the segment of ``bucket``, (bucket.shard_numel,)."""
        return self._segments[bucket.index]
