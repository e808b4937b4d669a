"""Reduce-scatter and all-gather made of sends and receives between pairs of ranks.

gloo's own reduce-scatter clones its input and all-reduces it, so it moves twice the bytes that it
has to, and its all-gather passes every part around a ring. Here each rank sends every other rank
the one part that belongs there: (W - 1) / W of the bytes each way, all pairs at once. Measured on
gloo over 2 to 24 ranks: launch/bench/results.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from shardfuse.comm.base import Handle
from shardfuse.comm.process_group import ProcessGroupCommunicator

# Messages between two ranks that have one tag arrive in the order in which they were posted. These
# keep ours apart from a user's own sends in the same group, which have tag 0 unless told otherwise.
_REDUCE_SCATTER_TAG = 0x5F01
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


class _ReducingExchange(_Exchange):
    """The exchange of a reduce-scatter, which adds up what came in when it is waited for."""

    def __init__(self, works: list[Any], output: torch.Tensor, received: torch.Tensor) -> None:
        super().__init__(works, output, received)

    def wait(self) -> None:
        if self._works:
            output, received = self._tensors
            super().wait()
            for part in received:
                output.add_(part)


class PairwiseCommunicator(ProcessGroupCommunicator):
    """ProcessGroupCommunicator whose reduce-scatter and all-gather go from rank to rank.

    For tensors that a backend can send, on a device where waiting blocks the host: gloo on CPU.
    Sums are made on the receiving rank, in the tensors' dtype.
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

    def reduce_scatter(self, output: torch.Tensor, input: torch.Tensor) -> Handle:
        """Sum ``input`` (world_size * n,) over ranks; write part ``rank`` into ``output`` (n,)."""
        received = output.new_empty(self.world_size - 1, output.numel())
        works = self._exchange(received, input)
        output.copy_(input.chunk(self.world_size)[self.rank])
        return _ReducingExchange(works, output, received)

    def exchange(self, received: torch.Tensor, input: torch.Tensor) -> Handle:
        """Send each rank its part of ``input``; receive theirs into ``received`` (W - 1, n)."""
        return _Exchange(self._exchange(received, input), received, input)

    def _exchange(self, received: torch.Tensor, input: torch.Tensor) -> list[Any]:
        parts = input.chunk(self.world_size)
        works = self._receive(list(received), _REDUCE_SCATTER_TAG)
        return works + self._send([parts[rank] for rank in self._destinations], _REDUCE_SCATTER_TAG)

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
