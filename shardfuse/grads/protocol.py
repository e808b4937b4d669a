"""GradShards: what the optimizer and the driver need of gradients, wherever they come from."""

from __future__ import annotations

import enum
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

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


@dataclass
class UnderBackward:
    """What others ask of gradients while autograd makes them; nothing comes of it where none leaves
    before step().
    """

    is_paused: bool = False
    """More is to be added to them, as inside no_sync()."""
    accumulates: Callable[[], bool] | None = None
    """Tells the same of a single backward."""
    joins: Callable[[], bool] = lambda: False
    """Tells whether each step() begins by a message that others may await before they send."""
    send: weakref.WeakMethod[Callable[[bool], None]] | None = None
    """What end() calls; of who holds this."""

    @property
    def has_more(self) -> bool:
        """Whether more is to be added to the gradients of this backward."""
        return self.is_paused or (self.accumulates is not None and self.accumulates())

    def end(self, *, is_noted: bool = False) -> None:
        """Send what other ranks may have sent under backward; before any other message.

        ``is_noted``: note() was called since gradients could change last.
        """
        send = None if self.send is None else self.send()
        if send is not None:
            send(is_noted)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Have gradients stay here: more is to be added to them before the next step."""
        before, self.is_paused = self.is_paused, True
        try:
            yield
        finally:
            self.is_paused = before


class GradShards(ABC):
    """Gradients of flats on their way to this rank's shards.

    note() ends the accumulation, retain() keeps what is reduced, release() begins anew.
    """

    phase: GradPhase = GradPhase.ACCUMULATING
    """Where gradients are; set by the methods here alone."""

    def __init__(self) -> None:
        self._flats: dict[int, Any] = {}  # what is held for each flat; has ``missing``
        self.overflowed: dict[int, Tensor] = {}
        """By param, this rank's part of a gradient that unscale() found not to be finite."""
        self.under_backward = UnderBackward()
        self.num_made = 0
        """How many gradients autograd has made, in all."""
        self.before_first: weakref.WeakMethod[Callable[[], bool]] | None = None
        """Called once, under backward, before anything is done with the first gradient; returns
        whether these shards are not used any more."""

    def has(self, flat: Flat) -> bool:
        """Return whether ``flat`` is attached."""
        return flat.index in self._flats

    def missing(self, flat: Flat) -> set[int]:
        """Return the params of ``flat`` that had no gradient on this rank at the last note()."""
        missing: set[int] = self._flats[flat.index].missing
        return missing

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes held for gradients."""

    @abstractmethod
    def attach(self, members: Sequence[FlatParams], device: torch.device) -> None:
        """Take over the gradients of flats."""

    @abstractmethod
    def note(self) -> None:
        """Note which gradients exist, and where they are. Nothing is done if nothing has changed
        since they were reduced.

        Raises:
            RuntimeError: a gradient is sparse.
        """

    @abstractmethod
    def idle(self, bucket: Bucket, parts: Parts) -> set[int]:
        """Return the params in ``bucket``'s shard that no rank has a gradient of.

        ``parts`` are what ``reduced()`` gave for ``bucket``. See [Note: absent gradients].
        """

    @abstractmethod
    def mean_factor(self, flat: int) -> float | None:
        """Return what turns a flat's reduced gradients into their mean over ranks; None is 1."""

    @abstractmethod
    def multiply(self, factor: Tensor) -> None:
        """Multiply this rank's gradients by ``factor`` () on their way; p.grad stays as it is."""

    @abstractmethod
    def reduced(self) -> Iterator[tuple[Bucket, Parts]]:
        """Yield (bucket, its shard of the summed gradient), in launch order.

        Parts are valid until the next are asked for; after retain_at_once(), until release().
        """

    @abstractmethod
    def retain(self) -> None:
        """Reduce what is noted, and keep it: the phase is REDUCED then."""

    def retain_at_once(self) -> None:
        """Retain, and have all buckets' parts stay valid until release()."""
        self.retain()

    @abstractmethod
    def release(self) -> None:
        """Forget what was noted and reduced: the phase is ACCUMULATING then."""

    def written(self) -> list[str]:
        """Return the params whose ``p.grad`` was written to after backward, as far as is known."""
        return []

    def spend(self) -> None:
        """A step has used the gradients, or skipped them: release() what it needed."""
        self.release()

    def unscale(self, inverse: Tensor | None) -> Tensor | None:
        """Multiply this rank's gradients by ``inverse`` (), if given; return 0.0 () if finite.

        What scalers do with p.grad; None where that is what there is. Collective where it is not.
        """
        return None

    @abstractmethod
    def zero(self, set_to_none: bool, *, absent: bool = False) -> None:
        """Clear the gradients, to None or to zero, and release().

        ``absent``: one that is not written until note() counts as none. [Note: absent gradients]
        """

    @abstractmethod
    def combined(self, *, shared: bool) -> list[Tensor | None]:
        """Return tensors that every gradient is a view of, for who edits them all at once.

        ``shared``: the caller may write other than zeros into the padding between them.
        """
