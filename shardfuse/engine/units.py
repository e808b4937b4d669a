"""What the driver walks over: units, and the interface of whoever has them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from shardfuse.comm.transport import PartialSums
from shardfuse.engine.kernels import Scale, Tile
from shardfuse.layout import BLOCK, Fragment, ParamSpec


class Span(NamedTuple):
    """Elements [start, stop) of a unit, all at the same step; whole rows of a tile."""

    start: int
    stop: int
    step: int


class Cohort(NamedTuple):
    """Parameters that are updated alike: a flat, or those of one policy in a foreign partition."""

    number: int
    flat: int  # number of the buffer that it is, or is a part of
    group: Mapping[str, Any]
    policy: str
    dtype: str


@dataclass(slots=True)
class Unit:
    """Elements of this rank that are updated together: a bucket's shard, or a tensor's part.

    All tensors are 1-D, (numel,). Those beyond ``grad`` are there once the unit was opened.
    """

    index: int
    cohort: int  # number of a cohort
    numel: int
    row: int  # elements of a tile's row; numel is a multiple of it
    grad: PartialSums  # they add up to the summed gradient; valid until the next unit is asked for
    fragments: Sequence[Fragment] = ()
    p: Tensor | None = None  # fp32 master
    low: Tensor | None = None  # the parameter, where it is of lower precision
    states: tuple[Tensor, ...] = ()
    spans: Sequence[Span] = ()

    @property
    def num_blocks(self) -> int:
        """Values that sums over blocks have of it; a shorter row counts as a block."""
        return -(-self.numel // BLOCK)

    @property
    def is_tail(self) -> bool:
        """Whether it is one row, of a length of its own."""
        return self.row % BLOCK != 0 and self.row == self.numel

    def tile(self, span: Span, extra: Tensor | None) -> Tile:
        """Return the rows of ``span``; ``extra`` is (k, blocks) or (k, numel) of the unit."""

        def rows(tensor: Tensor) -> Tensor:
            return tensor[span.start : span.stop].view(-1, self.row)

        if extra is not None and extra.shape[1] == self.num_blocks:
            extra = extra[:, self.blocks(span)]
        elif extra is not None:
            extra = extra[:, span.start : span.stop].view(len(extra), -1, self.row)
        return Tile(
            tuple(map(rows, self.grad)),
            None if self.p is None else rows(self.p),
            None if self.low is None else rows(self.low),
            tuple(map(rows, self.states)),
            extra,
        )

    def tile_of_blocks(self, extra: Tensor) -> Tile:
        """Return the gradient alone, as rows of a block each; ``extra`` is (k, blocks)."""
        row = self.row if self.is_tail else BLOCK
        return Tile(tuple(part.view(-1, row) for part in self.grad), extra=extra)

    def blocks(self, span: Span) -> slice:
        """Return which of the unit's blocks are in ``span``."""
        return slice(span.start // self.row, span.stop // self.row)

    def scale(self, span: Span, scale: Scale) -> Scale:
        """Return the part of ``scale`` for ``span``: itself, unless it has a factor per block."""
        if isinstance(scale, Tensor) and scale.dim() > 0:
            return scale[self.blocks(span)]
        return scale


class BlockTable(NamedTuple):
    """Which blocks of this rank belong to which parameter."""

    owners: list[tuple[int, int, int]]
    """(param, start, stop): blocks [start, stop) are of one parameter. Padding is in none."""
    extents: dict[int, tuple[int, int]]
    """{index of a unit: its blocks}, one unit after another."""
    num_blocks: int
    num_params: int


class Shards(Protocol):
    """This rank's part of what is trained, whoever has laid it out."""

    @property
    def device(self) -> torch.device:
        """Where the parts are."""

    @property
    def cohorts(self) -> Sequence[Cohort]:
        """What is updated alike, on this rank or not; every rank has the same."""

    def gradients(self) -> Iterator[Unit]:
        """Yield every unit, with its part of the summed gradient, as soon as that is there."""

    def open(self, unit: Unit) -> None:
        """Fill in what ``unit`` has beside its gradient, to be updated in place."""

    def close(self, unit: Unit) -> None:
        """Take note that ``unit`` is updated: its parameters may leave for the other ranks."""

    def advance(self) -> None:
        """Take note that all units are updated: count the step."""

    def retain(self) -> None:
        """Have gradients be given as often as they are asked for, until the end of the step."""

    def retain_at_once(self) -> None:
        """Retain, and have the gradients of all units stay valid until the end of the step."""

    def mean(self, cohort: int) -> float | None:
        """Return the factor from summed gradients to their mean; None is 1."""

    def global_square(self) -> Tensor | None:
        """Return the squared norm () of all gradients, if it is known; else it is summed up."""

    def blocks(self, cohorts: Sequence[int]) -> BlockTable:
        """Return the blocks of all units of some cohorts."""

    def params(self, cohort: int) -> Sequence[tuple[int, ParamSpec]]:
        """Return (number, spec) of the parameters of a cohort, as fragments number them."""
