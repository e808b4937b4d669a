"""GradShards: what the optimizer and the driver need of gradients, wherever they come from."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from shardfuse.comm.base import Parts
from shardfuse.grads.slots import FlatParams
from shardfuse.layout import Bucket, Flat


class GradPhase(enum.Enum):
    """Where gradients are on their way through a step."""

    ACCUMULATING = "autograd and callers write p.grad"
    NOTED = "it is known which gradients exist, and where they are; reduced() gives each once"
    REDUCED = "reduced shards are kept, and reduced() gives them as often as it is asked"


class GradShards(Protocol):
    """Gradients of flats on their way to this rank's shards.

    note() ends the accumulation, retain() keeps what is reduced, release() begins anew.
    """

    @property
    def phase(self) -> GradPhase:
        """Where gradients are."""

    @property
    def nbytes(self) -> int:
        """Bytes held for gradients."""

    def attach(self, members: Sequence[FlatParams], device: torch.device) -> None:
        """Take over the gradients of flats."""

    def has(self, flat: Flat) -> bool:
        """Return whether ``flat`` is attached."""

    def note(self) -> None:
        """Note which gradients exist, and where they are. Nothing is done if nothing has changed
        since they were reduced.

        Raises:
            RuntimeError: a gradient is sparse.
        """

    def missing(self, flat: Flat) -> set[int]:
        """Return the params of ``flat`` that had no gradient on this rank at the last note()."""

    def idle(self, bucket: Bucket, parts: Parts) -> set[int]:
        """Return the params in ``bucket``'s shard that no rank has a gradient of."""

    def mean_factor(self, flat: int) -> float | None:
        """Return what turns a flat's reduced gradients into their mean over ranks; None is 1."""

    def multiply(self, factor: Tensor) -> None:
        """Multiply this rank's gradients by ``factor`` () on their way; p.grad stays as it is."""

    def reduced(self) -> Iterator[tuple[Bucket, Parts]]:
        """Yield (bucket, its shard of the summed gradient), in launch order.

        Parts are valid until the next are asked for; in the phase REDUCED, until release().
        """

    def retain(self) -> None:
        """Reduce what is noted, and keep it: the phase is REDUCED then."""

    def release(self) -> None:
        """Forget what was noted and reduced: the phase is ACCUMULATING then."""

    def zero(self, set_to_none: bool, *, absent: bool = False) -> None:
        """Clear the gradients, and release(). ``absent``: see [Note: absent gradients]."""

    def combined(self, *, shared: bool) -> list[Tensor | None]:
        """Return tensors that every gradient is a view of, for who edits them all at once.

        ``shared``: the caller may write other than zeros into the padding between them.
        """
