"""Ranks along two axes: shards over one, and sums over that and another, which has copies (HSDP).

[Note: two axes] A reduce-scatter over the shard axis leaves every rank with its part of a sum over
its own row. Ranks with the same part, one in each row, add those up: each gets a piece of the
others' parts, adds the pieces up in fp32, and gives the others what came of it, so that all hold
the same bits. Over R rows that is 2 (R - 1) / R of a shard in and out of each rank, where a flat
group of all ranks would send most of the gradients. Gathers and norms stay within a row.

What comes second is launched when two more buckets have left, or when the sum is waited for: in one
order on all ranks, that of the first. So a rank may wait for others under backward, and all have to
send everything before it ends: one that kept a bucket back until step() would keep the others from
what their program does between the two.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from shardfuse.comm.base import (
    Communicator,
    Handle,
    Labelled,
    Parts,
    PartsHandle,
    Progress,
    ReduceOp,
)
from shardfuse.comm.process_group import ProcessGroupCommunicator
from shardfuse.comm.staging import Staging, add_up
from shardfuse.layout import round_up

_LAG = 2
"""Buckets that leave before the sum of one goes on."""


class MeshCommunicator:
    """A Communicator that shards over one axis, and adds up over both; see [Note: two axes].

    Args:
        everyone: all ranks; their calls are those of both axes.
        shard, replicate: this rank's row and column, built ``within`` everyone.
    """

    def __init__(
        self,
        everyone: ProcessGroupCommunicator,
        shard: ProcessGroupCommunicator,
        replicate: ProcessGroupCommunicator,
    ) -> None:
        self.everyone: Communicator = everyone
        self.rank, self.world_size = shard.rank, shard.world_size
        self._everyone, self._shard, self.replicate = everyone, shard, replicate
        self.staging = Staging()
        self._epoch = everyone.epoch
        self._open: deque[_Sum] = deque()

    @property
    def staging_nbytes(self) -> int:
        """Bytes of buffers for both axes."""
        both = self._shard.staging_nbytes + self.replicate.staging_nbytes
        return self.staging.nbytes + both

    @property
    def progress(self) -> Progress:
        """In order: see [Note: two axes]. When waited for, if that is so along either axis."""
        both = self._shard.progress, self.replicate.progress
        return "when waited for" if "when waited for" in both else "in order"

    @property
    def epoch(self) -> int:
        """That of all ranks."""
        return self._everyone.epoch

    @contextmanager
    def call(self, name: str) -> Iterator[None]:
        with self._everyone.call(name):
            self._shard.number = self.replicate.number = self._everyone.number
            with self._shard.call(name), self.replicate.call(name):
                yield

    def declare(self, lines: Sequence[str], *, is_new: bool = False) -> None:
        self._everyone.declare(lines, is_new=is_new)

    def tell(self, topic: str, text: str) -> None:
        self._everyone.tell(topic, text)

    def told(self, topic: str) -> list[str | None]:
        return self._everyone.told(topic)

    @property
    def is_store_gone(self) -> bool:
        """Whether the store of all ranks is."""
        return self._everyone.is_store_gone

    def reduce_scatter(
        self,
        input: torch.Tensor,
        into: torch.Tensor | None = None,
        *,
        slot: int = 0,
        label: str | None = None,
        is_summed: bool = True,
    ) -> PartsHandle:
        if not (is_summed or input.is_floating_point()):
            raise NotImplementedError("over two axes, only what can be added up is sent")
        if self._epoch != self.epoch:
            self._epoch = self.epoch
            self._open.clear()
            self.staging = Staging()
        handle = self._shard.reduce_scatter(input, slot=slot, label=label, is_summed=is_summed)
        numel = input.numel() // self.world_size
        self._open.append(_Sum(self, handle, numel, into, slot, label, is_summed))
        for earlier in list(self._open)[:-_LAG]:
            earlier.advance()
        while self._open[0].is_over:
            self._open.popleft()
        return self._open[-1]

    def expect(self, kind: Labelled, tensor: torch.Tensor, *, label: str, slot: int = 0) -> None:
        self._shard.expect(kind, tensor, label=label, slot=slot)

    def all_gather(
        self, output: torch.Tensor, input: torch.Tensor, *, label: str | None = None
    ) -> Handle:
        return self._shard.all_gather(output, input, label=label)

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> Handle:
        return self._shard.all_reduce(tensor, op)

    def broadcast(self, tensor: torch.Tensor, src: int = 0) -> Handle:
        """Overwrite ``tensor`` (n,) on all ranks by that of rank ``src`` of them."""
        return self._everyone.broadcast(tensor, src)


class _Sum:
    """A rank's part of a sum over one axis, on its way to that over both."""

    def __init__(
        self,
        comm: MeshCommunicator,
        handle: PartsHandle,
        numel: int,
        into: torch.Tensor | None,
        slot: int,
        label: str | None,
        is_summed: bool,
    ) -> None:
        self._handle = handle
        self._numel, self._into, self._slot, self._label = numel, into, slot, label
        self._is_summed = is_summed
        self._parts: Parts = ()
        self._course = self._run(comm.replicate, comm.staging)

    @property
    def is_over(self) -> bool:
        """Whether the sum is there."""
        return len(self._parts) > 0

    def advance(self) -> None:
        """Wait for what was launched last, and launch what comes next."""
        next(self._course, None)

    def wait(self) -> Parts:
        """Return the sum, one tensor."""
        for _ in self._course:
            pass
        return self._parts

    def _run(self, replicate: ProcessGroupCommunicator, staging: Staging) -> Iterator[None]:
        rows, slot = replicate.world_size, self._slot
        parts = self._handle.wait()
        padded = round_up(self._numel, rows)
        mine = staging.take("part", slot, padded, parts[0])
        self._add_up(parts, mine[: self._numel], staging)
        mine[self._numel :].zero_()
        label = self._named("sum")
        handle = replicate.reduce_scatter(mine, slot=slot, label=label, is_summed=self._is_summed)
        yield
        copies = staging.take("copies", slot, padded, mine)
        pieces = copies.chunk(rows)
        self._add_up(handle.wait(), pieces[0], staging)
        for piece in pieces[1:]:
            piece.copy_(pieces[0])
        label = self._named("copies")
        handle = replicate.reduce_scatter(copies, slot=slot, label=label, is_summed=False)
        yield
        whole = mine.chunk(rows)  # which nobody reads any more: all copies of it have come back
        whole[replicate.rank].copy_(pieces[0])
        for distance, piece in enumerate(handle.wait()[1:], start=1):
            whole[(replicate.rank - distance) % rows].copy_(piece)
        total = mine[: self._numel]
        self._parts = (total if self._into is None else self._into.copy_(total),)

    def _add_up(self, parts: Parts, into: torch.Tensor, staging: Staging) -> None:
        """Add up in fp32, and round once."""
        like = torch.empty(0, dtype=torch.float32, device=into.device)
        total = into if into.dtype == torch.float32 else staging.take("sum", 0, len(into), like)
        add_up(parts, total)
        if total is not into:
            into.copy_(total)

    def _named(self, what: str) -> str | None:
        return None if self._label is None else f"{self._label}, {what}"
