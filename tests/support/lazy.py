"""A communicator whose collectives arrive late and in any order, at the latest when waited for.

Ranks are threads of one process. What is read too early is wrong for certain, not by chance, and
so is what is written after its launch and not sent anew, and what is still used where something
else was expected.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shardfuse.comm.session import LocalSession
from shardfuse.comm.transport import AsyncModel, Completion, Label, PartialSums
from tests.support import placing

TIMEOUT_S = 30.0


class Post:
    """What the ranks of one world have sent to each other; made before their threads."""

    def __init__(self) -> None:
        self._letters: dict[tuple[str, int], Tensor] = {}
        self._arrival = threading.Condition()

    def put(self, key: str, rank: int, value: Tensor) -> None:
        """Leave a copy of ``value`` under a name that no rank uses twice."""
        copy = value.detach().clone()
        if placing.on_device():  # the peer's copy waits for this rank's usual stream alone
            torch.accelerator.current_stream().synchronize()
        with self._arrival:
            assert (key, rank) not in self._letters, f"{key} was sent twice"
            self._letters[key, rank] = copy
            self._arrival.notify_all()

    def has(self, key: str, world_size: int) -> bool:
        """Return whether all ranks have left theirs."""
        with self._arrival:
            return all((key, rank) in self._letters for rank in range(world_size))

    def fetch(self, key: str, rank: int) -> Any:
        """Return what ``rank`` has left, as soon as it has."""
        with self._arrival:
            found = self._arrival.wait_for(lambda: (key, rank) in self._letters, TIMEOUT_S)
            assert found, f"rank {rank} has not sent {key}"
            return placing.here(self._letters[key, rank])


def _spoil(tensor: Tensor) -> None:
    """Overwrite what nobody is to read."""
    tensor.fill_(float("nan") if tensor.is_floating_point() else 255)


class _Session(LocalSession):
    """Compares nothing, and reads that no rank has published anything."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size

    def read(self, topic: str) -> list[str | None]:
        return [None] * self._world_size


class LazyCommunicator:
    """A Communicator over a Post.

    Args:
        post: of the world.
        rank, world_size: of this thread.
        seed: of a schedule that now and then delivers what is not waited for, on every rank its
            own; None never does.
    """

    def __init__(self, post: Post, rank: int, world_size: int, seed: int | None = None) -> None:
        self._post = post
        self.rank, self.world_size = rank, world_size
        self.async_model = AsyncModel.UNORDERED
        self.session = _Session(world_size)
        self.staging_nbytes = 0
        self.log: list[str] = []
        self._number = 0
        self._rng = None if seed is None else random.Random(f"{seed} {rank}")
        self._pending: list[tuple[Completion[PartialSums], str]] = []
        self._slots: dict[int, list[Tensor]] = {}  # what was received there last

    @property
    def world(self) -> LazyCommunicator:
        """All ranks: these."""
        return self

    def reduce_scatter(
        self,
        input: Tensor,
        into: Tensor | None = None,
        *,
        slot: int = 0,
        label: Label | None = None,
        is_summed: bool = True,
    ) -> Any:
        """Give the parts of all ranks, until the next in ``slot``."""
        key = self._send("reduce_scatter", input, label)
        room = self._clear(slot)

        def deliver() -> PartialSums:
            order = [(self.rank - k) % self.world_size for k in range(self.world_size)]
            wholes = [self._post.fetch(key, rank) for rank in order]
            room.extend(whole.chunk(self.world_size)[self.rank].clone() for whole in wholes)
            return tuple(room)

        return self._late(deliver, key)

    def post_receive(self, kind: str, tensor: Tensor, *, label: Label, slot: int = 0) -> None:
        """Overwrite what was received in ``slot``, or others' parts of what is gathered."""
        if kind == "reduce_scatter":
            self._clear(slot)
        if kind != "all_gather":
            return
        for rank, part in enumerate(tensor.detach().chunk(self.world_size)):
            if rank != self.rank:
                _spoil(part)

    def forget_posted(self, sender: str) -> None:
        """Do nothing: what was posted is not kept."""

    def _clear(self, slot: int) -> list[Tensor]:
        """Return the place for what is received in ``slot`` next; what was there is NaN."""
        for part in self._slots.get(slot, ()):
            _spoil(part)
        self._slots[slot] = []
        return self._slots[slot]

    def all_gather(self, output: Tensor, input: Tensor, *, label: Label | None = None) -> Any:
        """Write what others sent, not before it is delivered; until then it is NaN."""
        key = self._send("all_gather", input, None)
        own = input.clone()
        _spoil(output.detach())
        parts = output.detach().chunk(self.world_size)
        parts[self.rank].copy_(own)

        def deliver() -> PartialSums:
            for rank, part in enumerate(parts):
                part.copy_(self._post.fetch(key, rank))
            return ()

        return self._late(deliver, key)

    def all_reduce(self, tensor: Tensor, op: str = "sum", *, label: Label | None = None) -> Any:
        """Reduce in the order of ranks."""
        key = self._send(f"all_reduce by {op}", tensor, label)

        def deliver() -> PartialSums:
            stacked = torch.stack([self._post.fetch(key, r) for r in range(self.world_size)])
            tensor.copy_(stacked.sum(0) if op == "sum" else stacked.amax(0))
            return ()

        return self._late(deliver, key)

    def all_to_all(self, output: Tensor, input: Tensor, *numels: Any) -> Any:
        """Write what others sent, not before it is delivered; until then it is NaN."""
        own = list(numels[1])
        key = self._send("all_to_all", input, None)
        self._post.put(f"{key}, sizes", self.rank, torch.tensor(own))
        _spoil(output.detach())
        parts = torch.split(output.detach(), list(numels[0]))

        def deliver() -> PartialSums:
            for rank, part in enumerate(parts):
                sizes = self._post.fetch(f"{key}, sizes", rank).tolist()
                part.copy_(torch.split(self._post.fetch(key, rank), sizes)[self.rank])
            return ()

        return self._late(deliver, key)

    def broadcast(self, tensor: Tensor, src: int = 0) -> Any:
        """Overwrite by the values of ``src``."""
        key = self._send("broadcast", tensor, None)
        return self._late(lambda: (tensor.copy_(self._post.fetch(key, src)),), key)

    def _send(self, kind: str, tensor: Tensor, label: Label | None) -> str:
        text = "" if label is None else label.text
        if label is None:
            self._number += 1
            text = f"number {self._number}"
        size = "" if kind == "all_to_all" else f" of {tensor.numel()}"  # which differs by rank
        self.log.append(f"{kind}{size}, {text}")
        self._post.put(f"{kind}, {text}", self.rank, tensor)
        return f"{kind}, {text}"

    def _late(self, deliver: Callable[[], PartialSums], key: str) -> Any:
        handle = Completion(deliver)
        if self._rng is not None:
            # One that all have sent: a launch waits for nobody.
            if self._pending and self._rng.random() < 0.5:
                place = self._rng.randrange(len(self._pending))
                if self._post.has(self._pending[place][1], self.world_size):
                    self._pending.pop(place)[0].wait()
            self._pending.append((handle, key))
        return handle
