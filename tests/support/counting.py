"""A communicator that counts what passes through it."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardfuse.comm import communicator_for
from tests.support.placing import device_type


class Call(NamedTuple):
    """One collective: its name, and the elements and dtype of the larger of its tensors."""

    op: str
    numel: int
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of that tensor."""
        return self.numel * self.dtype.itemsize


class CountingCommunicator:
    """A Communicator that passes every call on to `inner` and remembers it in `calls`."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.calls: list[Call] = []

    @property
    def rank(self) -> int:
        """This process's rank in the group."""
        return int(self.inner.rank)

    @property
    def world_size(self) -> int:
        """Number of ranks in the group."""
        return int(self.inner.world_size)

    @property
    def session(self) -> Any:
        """The inner one's regions."""
        return self.inner.session

    @property
    def world(self) -> Any:
        """All ranks: these."""
        return self

    @property
    def staging_nbytes(self) -> int:
        """Bytes of the inner one's buffers."""
        return int(self.inner.staging_nbytes)

    @property
    def async_model(self) -> Any:
        """How the inner one's collectives progress."""
        return self.inner.async_model

    def reduce_scatter(self, input: Tensor, into: Tensor | None = None, **options: Any) -> Any:
        """Record and pass on."""
        self.calls.append(Call("reduce_scatter", input.numel(), input.dtype))
        return self.inner.reduce_scatter(input, into, **options)

    def all_gather(self, output: Tensor, input: Tensor, **options: Any) -> Any:
        """Record and pass on."""
        self.calls.append(Call("all_gather", output.numel(), output.dtype))
        return self.inner.all_gather(output, input, **options)

    def post_receive(self, kind: Any, tensor: Tensor, **options: Any) -> None:
        """Pass on: it is no collective."""
        self.inner.post_receive(kind, tensor, **options)

    def forget_posted(self, sender: str) -> None:
        """Pass on: it is no collective."""
        self.inner.forget_posted(sender)

    def all_reduce(self, tensor: Tensor, op: str = "sum", **options: Any) -> Any:
        """Record and pass on."""
        self.calls.append(Call("all_reduce", tensor.numel(), tensor.dtype))
        return self.inner.all_reduce(tensor, op, **options)

    def all_to_all(self, output: Tensor, input: Tensor, *numels: Any) -> Any:
        """Record and pass on."""
        self.calls.append(Call("all_to_all", input.numel(), input.dtype))
        return self.inner.all_to_all(output, input, *numels)

    def broadcast(self, tensor: Tensor, src: int = 0) -> Any:
        """Record and pass on."""
        self.calls.append(Call("broadcast", tensor.numel(), tensor.dtype))
        return self.inner.broadcast(tensor, src)


def counted(collectives: str = "auto") -> CountingCommunicator:
    """Return a communicator of the default group that counts, for `ShardConfig.process_group`."""
    return CountingCommunicator(communicator_for(None, torch.device(device_type()), collectives))
