"""Units of an update: ranges of units, of sets of parameters, from a provider of shards."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from shardfuse.comm.transport import PartialSums
from shardfuse.engine.kernels import Tile
from shardfuse.layout import BLOCK, Fragment, ParamSpec


class UpdateRange(NamedTuple):
    """Elements [start, stop) of a unit, of one param_set and step; whole rows of a tile."""

    start: int
    stop: int
    param_set: int
    step: int = 0


class ParamSet(NamedTuple):
    """Parameters that are updated alike: of one group, policy and dtype."""

    number: int  # from 0 on
    group: Mapping[str, Any]
    policy: str
    dtype: str
    mean: float | None = None
    """The factor from summed gradients to their mean; None is 1."""
    shares_calls: bool = False
    """Whether it is one of many small ones, which are updated together in one call."""
    step: int = 1
    """The step of its next update, or 1; no setting but ``h`` depends on it."""


@dataclass(slots=True)
class UpdateUnit:
    """Elements of this rank that are updated together: a bucket's shard, or a tensor's part.

    All tensors are 1-D, (numel,). checkout() sets those beyond ``grad``.
    """

    index: int
    numel: int
    row: int  # elements of a tile's row; numel is a multiple of it
    grad: PartialSums  # they add up to the summed gradient; valid until the next unit is asked for
    ranges: Sequence[UpdateRange]  # from checkout() on, those to update, at their steps
    mean: float | None = None  # as of its param_sets
    fragments: Sequence[Fragment] = ()
    p: Tensor | None = None  # fp32 master
    low: Tensor | None = None  # the parameter, where it is of lower precision
    states: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def num_blocks(self) -> int:
        """Number of blocks; a shorter row counts as one."""
        return -(-self.numel // BLOCK)

    @property
    def is_tail(self) -> bool:
        """Whether it is one row, of a length of its own."""
        return self.row % BLOCK != 0 and self.row == self.numel

    def narrow(self, start: int, stop: int, states: Sequence[str]) -> Tile:
        """Return elements [start, stop), as (n,) tensors, with these states; after checkout()."""
        own = slice(start, stop)
        return Tile(
            tuple([part[own] for part in self.grad]),
            None if self.p is None else self.p[own],
            None if self.low is None else self.low[own],
            tuple([self.states[name][own] for name in states]),
        )

    def blocks(self, part: UpdateRange) -> slice:
        """Return which of the unit's blocks are in ``part``."""
        return slice(part.start // self.row, part.stop // self.row)


class UnitTiles:
    """The tiles of several ranges of a unit; a tensor is cut into all of them in one call.

    Layer-wise decay has hundreds of ranges, and a call for each view took most of their time.

    Args:
        unit: after checkout().
        parts: ranges of it, in order, without overlap.
    """

    def __init__(self, unit: UpdateUnit, parts: Sequence[UpdateRange]) -> None:
        self._unit = unit
        self._parts = parts
        self._sizes: list[int] = []  # in rows; gaps between parts have theirs
        self._positions: list[int] = []  # of each part in _sizes
        end = 0
        for part in parts:
            if part.start > end:
                self._sizes.append((part.start - end) // unit.row)
            self._positions.append(len(self._sizes))
            self._sizes.append((part.stop - part.start) // unit.row)
            end = part.stop
        if end < unit.numel:
            self._sizes.append((unit.numel - end) // unit.row)
        self._cuts: dict[tuple[str, ...], _Cuts] = {}  # by names of states

    def tile(
        self, index: int, states: tuple[str, ...], aux: Tensor | None, *, row: int, has_grad: bool
    ) -> Tile:
        """Return the rows of part ``index``, with the states of these names.

        ``aux`` is (k, blocks) or (k, numel) of the unit.
        """
        unit = self._unit
        if aux is not None:
            part = self._parts[index]
            if aux.shape[1] == unit.num_blocks:
                aux = aux[:, unit.blocks(part)]
            else:
                aux = aux[:, part.start : part.stop].view(len(aux), -1, row)
        if states not in self._cuts:
            self._cuts[states] = _Cuts(
                [self._cut(grad) for grad in unit.grad],
                None if unit.p is None else self._cut(unit.p),
                None if unit.low is None else self._cut(unit.low),
                [self._cut(unit.states[name]) for name in states],
            )
        grad, p, low, own_states = self._cuts[states]
        position = self._positions[index]
        tile = Tile(
            tuple([part[position] for part in grad]) if has_grad else (),
            None if p is None else p[position],
            None if low is None else low[position],
            tuple([state[position] for state in own_states]),
            aux,
        )
        return tile if row == unit.row else tile.in_rows(row)

    def _cut(self, tensor: Tensor) -> Sequence[Tensor]:
        """Return a tensor (numel,) of the unit in parts (rows, row), in the order of _sizes."""
        rows = tensor.view(-1, self._unit.row)
        return (rows,) if len(self._sizes) == 1 else rows.split_with_sizes(self._sizes)


class _Cuts(NamedTuple):
    """The tensors of a tile, in the parts of all tiles."""

    grad: list[Sequence[Tensor]]
    p: Sequence[Tensor] | None
    low: Sequence[Tensor] | None
    states: list[Sequence[Tensor]]


def narrowed(tensor: Tensor, start: int, numel: int) -> Tensor:
    """Return elements of a tensor (n,); the tensor itself for all, as a view takes time."""
    return tensor if numel == tensor.numel() else tensor.narrow(0, start, numel)


class BlockMap(NamedTuple):
    """Which blocks of this rank belong to which parameter."""

    owners: list[tuple[int, int, int]]
    """(param, start, stop): blocks [start, stop) are of one parameter. Padding is in none."""
    extents: dict[int, tuple[int, int]]
    """{index of a unit: its blocks}, one unit after another."""
    num_blocks: int
    num_params: int


class ParamRows(NamedTuple):
    """The rows of a parameter, along dimension 0, and those of which this rank has elements."""

    num_rows: int
    numel: int  # of the whole parameter
    first: int  # this rank's first row
    num_own: int  # this rank's rows
    stride: int
    """Elements of one row that are adjacent on this rank, in the order of ``param_start``."""

    @classmethod
    def whole(cls, spec: ParamSpec) -> ParamRows:
        """Return the rows where fragments count elements of the whole parameter."""
        stride = spec.numel if spec.shape[0] == 1 else spec.stride[0]
        return cls(spec.shape[0], spec.numel, 0, spec.shape[0], stride)


class ShardProvider(Protocol):
    """This rank's part of the trained parameters: in our flat buffers, DeepSpeed's, or DTensors."""

    @property
    def device(self) -> torch.device:
        """Of the parts."""

    @property
    def param_sets(self) -> Sequence[ParamSet]:
        """The sets of parameters, on this rank or not; every rank has the same."""

    def gradients(self) -> Iterator[UpdateUnit]:
        """Yield every unit, with its part of the summed gradient, as soon as that is there."""

    def checkout(self, unit: UpdateUnit) -> None:
        """Fill in the master and the states of ``unit``, to be updated in place."""

    def commit(self, unit: UpdateUnit) -> None:
        """Take note that ``unit`` is updated: its parameters may be gathered."""

    def increment_step(self) -> None:
        """Take note that all units are updated, and count the step."""

    def keep_reduced(self) -> None:
        """Keep reduced gradients: gradients() may be called again, until the end of the step."""

    def keep_all_reduced(self) -> None:
        """keep_reduced(), and keep the gradients of all units valid until the end of the step."""

    def global_square(self) -> Tensor | None:
        """Return the squared norm () of all gradients if it is known; else the driver sums up."""

    def blocks(self, param_sets: Sequence[int]) -> BlockMap:
        """Return the blocks of all units of some param_sets."""

    def params(self, param_set: int) -> Sequence[tuple[int, ParamSpec]]:
        """Return (number, spec) of the parameters of a param_set, as fragments number them."""

    def rows(self, param: int) -> ParamRows:
        """Return the rows of a parameter that has elements and a dimension."""

    def parts_of(self, rank: int, params: Collection[int]) -> Sequence[Fragment]:
        """Return the parts of trained parameters of these numbers that ``rank`` has.

        ``param_start`` counts elements of the whole parameter, and ``bucket`` is the index of a
        unit, or -1 for units of that rank alone. Every rank has them in one order.
        """

    def counted(self, columns: Literal["sets", "params"]) -> Tensor | None:
        """Return whether sums over ranks count this rank's part, by param_set or param; (n,) bool.

        They do not where another rank has a copy of it that they count. None: they count all.
        """


_SMALL_NUMEL, _MANY_SETS = 64 << 10, 8
"""Param_sets of at most so many elements share kernel calls, if there are so many of them."""


def small_sets(numels: Sequence[int]) -> set[int]:
    """Return the numbers of the param_sets that share kernel calls.

    ``numels`` are over all ranks, so that every cut of the shards computes alike.
    """
    small = {number for number, numel in enumerate(numels) if numel <= _SMALL_NUMEL}
    return small if should_batch(len(small)) else set()


def should_batch(num_sets: int) -> bool:
    """Return whether so many param_sets share kernel calls: then a table of their numbers pays."""
    return num_sets >= _MANY_SETS
