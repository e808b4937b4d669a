"""Reduce-scatter and all-gather by sends and receives between pairs of ranks.

gloo's own reduce-scatter clones its input and all-reduces it, so it moves twice the bytes that it
has to, and its all-gather passes every part around a ring. Here each rank sends every other rank
the one part that belongs there: (W - 1) / W of the bytes each way, all pairs at once. The sums are
left to the caller, who reads every gradient once more anyway. Measured: launch/bench/results.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from shardfuse.comm.base import Handle
from shardfuse.comm.process_group import ProcessGroupCommunicator

# Messages between two ranks that have one tag arrive in the order in which they were posted. These
# keep ours apart from a user's own sends in the same group, which have tag 0 unless told otherwise.
_EXCHANGE_TAG = 0x5F01
_ALL_GATHER_TAG = 0x5F02


class _Exchange:
    """Sends and receives in flight; keeps their tensors alive."""

    def __init__(self, works: list[Any], *tensors: torch.Tensor) -> None:
        self._works = works
        self._tensors = tensors

    def wait(self) -> None:
        works, self._works = self._works, []
        for work in works:
            work.wait()
        self._tensors = ()


class PairwiseCommunicator(ProcessGroupCommunicator):
    """ProcessGroupCommunicator with exchange(), and an all-gather that goes from rank to rank.

    For tensors that a backend can send, on a device where waiting blocks the host: gloo on CPU.
    """

    def __init__(self, process_group: Any, device: torch.device) -> None:
        super().__init__(process_group, device)
        distances = range(1, self.world_size)
        self._sources = [(self.rank - k) % self.world_size for k in distances]
        self._destinations = [(self.rank + k) % self.world_size for k in distances]

    @property
    def can_exchange(self) -> bool:
        """Whether ``exchange()`` works: yes."""
        return True

    def exchange(self, received: torch.Tensor, input: torch.Tensor) -> Handle:
        """Send each rank its part of ``input``; receive theirs into ``received`` (W - 1, n)."""
        parts = input.chunk(self.world_size)
        works = self._receive(list(received), _EXCHANGE_TAG)
        works += self._send([parts[rank] for rank in self._destinations], _EXCHANGE_TAG)
        return _Exchange(works, received, input)

    def all_gather(self, output: torch.Tensor, input: torch.Tensor) -> Handle:
        """Write every rank's ``input`` (n,) into ``output`` (world_size * n,), in rank order."""
        parts = output.chunk(self.world_size)
        works = self._receive([parts[rank] for rank in self._sources], _ALL_GATHER_TAG)
        works += self._send([input] * len(self._destinations), _ALL_GATHER_TAG)
        if parts[self.rank].data_ptr() != input.data_ptr():
            parts[self.rank].copy_(input)
        return _Exchange(works, output, input)

    def _receive(self, tensors: list[torch.Tensor], tag: int) -> list[Any]:
        """Post a receive from every other rank, nearest first."""
        return [
            dist.irecv(tensor, group=self._group, group_src=rank, tag=tag)
            for tensor, rank in zip(tensors, self._sources, strict=True)
        ]

    def _send(self, tensors: list[torch.Tensor], tag: int) -> list[Any]:
        """Post a send to every other rank, nearest first."""
        return [
            dist.isend(tensor, group=self._group, group_dst=rank, tag=tag)
            for tensor, rank in zip(tensors, self._destinations, strict=True)
        ]
