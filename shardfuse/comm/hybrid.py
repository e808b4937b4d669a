"""Ranks along two axes: sharded over one, replicated over the other (HSDP).

[Note: two axes] A reduce-scatter over the shard axis leaves every rank with its part of a sum over
its own row. Ranks with the same part, one in each row, form a column, and sum those parts: each
receives a piece of the others' parts, adds the pieces up in fp32, and returns the result to the
others, so that all hold the same bits. Over R rows that is 2 (R - 1) / R of a shard in and out of
each rank; a flat group of all ranks would send most of the gradients. All-gathers and norms stay
within a row.

The reduction over the replica axis of a bucket is launched after two more buckets were sent on the
shard axis, or when its result is needed. All ranks launch it in the same order, that of the first
reduction. A rank may therefore wait for peers under backward, and must send all buckets before its
backward ends: otherwise its peers block between backward and step().
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

import torch

from shardfuse.comm.native import ProcessGroupCommunicator
from shardfuse.comm.session import Session
from shardfuse.comm.transport import (
    AsyncModel,
    BufferPool,
    Communicator,
    Completion,
    Label,
    Labelled,
    PartialSums,
    ReduceOp,
    add_up,
)
from shardfuse.layout import round_up

_LAG = 2
"""Buckets that are sent on the shard axis before the sum of one continues on the replica axis."""


class HybridCommunicator:
    """A Communicator that shards over one axis, and sums over both; see [Note: two axes].

    Args:
        world: all ranks; their regions are those of both axes.
        shard, replicate: this rank's row and column, whose ``parent`` is ``world``.
    """

    def __init__(
        self,
        world: ProcessGroupCommunicator,
        shard: ProcessGroupCommunicator,
        replicate: ProcessGroupCommunicator,
    ) -> None:
        self.world: Communicator = world
        self.session: Session = world.session
        self.rank, self.world_size = shard.rank, shard.world_size
        self._world, self._shard, self.replicate = world, shard, replicate
        self._buffers = BufferPool()
        self._open: deque[_ReplicaSum] = deque()
        self.session.on_restart(self._restart, is_transport=True)

    def _restart(self) -> None:
        self._open.clear()
        self._buffers = BufferPool()

    @property
    def staging_nbytes(self) -> int:
        """Bytes of buffers for both axes."""
        both = self._shard.staging_nbytes + self.replicate.staging_nbytes
        return self._buffers.nbytes + both

    @property
    def async_model(self) -> AsyncModel:
        """ORDERED: see [Note: two axes]. BLOCKING, if that is so along either axis."""
        both = self._shard.async_model, self.replicate.async_model
        return AsyncModel.BLOCKING if AsyncModel.BLOCKING in both else AsyncModel.ORDERED

    def reduce_scatter(
        self,
        input: torch.Tensor,
        into: torch.Tensor | None = None,
        *,
        slot: int = 0,
        label: Label | None = None,
        is_summed: bool = True,
    ) -> Completion[PartialSums]:
        if not (is_summed or input.is_floating_point()):
            raise NotImplementedError("over two axes, only what can be added up is sent")
        of_row = self._shard.reduce_scatter(input, slot=slot, label=label, is_summed=is_summed)
        numel = input.numel() // self.world_size
        replica_sum = _ReplicaSum(numel, into, slot, label, is_summed)
        replica_sum.start(of_row, self.replicate, self._buffers)
        self._open.append(replica_sum)
        for earlier in list(self._open)[:-_LAG]:
            earlier.advance()
        while self._open[0].is_over:
            self._open.popleft()
        return Completion(replica_sum.result, [replica_sum], are_of_torch=False)

    def post_receive(
        self, kind: Labelled, tensor: torch.Tensor, *, label: Label, slot: int = 0
    ) -> None:
        self._shard.post_receive(kind, tensor, label=label, slot=slot)

    def forget_posted(self, sender: str) -> None:
        self._shard.forget_posted(sender)

    def all_gather(
        self, output: torch.Tensor, input: torch.Tensor, *, label: Label | None = None
    ) -> Completion[None]:
        return self._shard.all_gather(output, input, label=label)

    def all_reduce(
        self, tensor: torch.Tensor, op: ReduceOp = "sum", *, label: Label | None = None
    ) -> Completion[None]:
        return self._shard.all_reduce(tensor, op, label=label)

    def all_to_all(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_numels: Sequence[int],
        input_numels: Sequence[int],
    ) -> Completion[None]:
        return self._shard.all_to_all(output, input, output_numels, input_numels)

    def broadcast(self, tensor: torch.Tensor, src: int = 0) -> Completion[None]:
        """Overwrite ``tensor`` (n,) on all ranks by that of rank ``src`` of them."""
        return self._world.broadcast(tensor, src)


class _ReplicaSum:
    """A rank's part of a sum over its row, on its way to the sum over all rows."""

    def __init__(
        self, numel: int, into: torch.Tensor | None, slot: int, label: Label | None, is_summed: bool
    ) -> None:
        self._numel, self._into, self._slot, self._label = numel, into, slot, label
        self._is_summed = is_summed
        self._parts: PartialSums = ()
        self._steps: Iterator[None] = iter(())

    def start(
        self,
        of_row: Completion[PartialSums],
        replicate: ProcessGroupCommunicator,
        buffers: BufferPool,
    ) -> None:
        """Continue from the reduction over the row. Communicates from the first advance() on."""
        self._steps = self._run(of_row, replicate, buffers)

    @property
    def is_over(self) -> bool:
        """Whether the result is there."""
        return len(self._parts) > 0

    def advance(self) -> None:
        """Wait for the message launched last, and launch the next one."""
        next(self._steps, None)

    def wait(self) -> None:
        """Run to the end, as a work of torch would."""
        for _ in self._steps:
            pass

    def result(self) -> PartialSums:
        """Return the sum, one tensor."""
        return self._parts

    def _run(
        self,
        of_row: Completion[PartialSums],
        replicate: ProcessGroupCommunicator,
        buffers: BufferPool,
    ) -> Iterator[None]:
        num_rows, slot = replicate.world_size, self._slot
        parts = of_row.wait()
        padded = round_up(self._numel, num_rows)
        mine = buffers.get("part", slot, padded, parts[0])
        self._add_up(parts, mine[: self._numel], buffers)
        mine[self._numel :].zero_()
        completion = replicate.reduce_scatter(
            mine, slot=slot, label=self._labelled("sum"), is_summed=self._is_summed
        )
        yield
        copies = buffers.get("copies", slot, padded, mine)
        pieces = copies.chunk(num_rows)
        self._add_up(completion.wait(), pieces[0], buffers)
        for piece in pieces[1:]:
            piece.copy_(pieces[0])
        # Every peer of the column gets a copy of this rank's piece: an all-gather by an all-to-all,
        # because an all-gather has no label that tells it from others between regions.
        completion = replicate.reduce_scatter(
            copies, slot=slot, label=self._labelled("copies"), is_summed=False
        )
        yield
        # No peer reads `mine` any more: the pieces that came back were computed from it.
        whole = mine.chunk(num_rows)
        whole[replicate.rank].copy_(pieces[0])
        for distance, piece in enumerate(completion.wait()[1:], start=1):
            whole[(replicate.rank - distance) % num_rows].copy_(piece)
        total = mine[: self._numel]
        self._parts = (total if self._into is None else self._into.copy_(total),)

    def _add_up(self, parts: PartialSums, into: torch.Tensor, buffers: BufferPool) -> None:
        """Add up in fp32, and round once."""
        like = torch.empty(0, dtype=torch.float32, device=into.device)
        total = into if into.dtype == torch.float32 else buffers.get("sum", 0, len(into), like)
        add_up(parts, total)
        if total is not into:
            into.copy_(total)

    def _labelled(self, part: str) -> Label | None:
        if self._label is None:
            return None
        return self._label._replace(text=f"{self._label.text}, {part}")
