"""Sums over tensors that are cut across units and ranks, and what is made of them on the way back.

A rule's first pass writes what is to be summed into the ``room()`` of each unit, its second pass
reads the ``factors()``. Between them the driver adds up ``totals()`` over the ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from shardfuse.engine.kernels import SegmentSum
from shardfuse.engine.rows import RowReduction
from shardfuse.engine.units import Shards, Unit
from shardfuse.rules import NormRule, ReducingRule


class Reduction(Protocol):
    """What a grain of rules needs between the passes."""

    def begin(self) -> None:
        """Start a step: clear the sums."""

    def room(self, unit: Unit) -> Tensor | None:
        """Return where the first pass writes for ``unit``; None where nothing is summed."""

    def collect(self, unit: Unit, room: Tensor | None) -> None:
        """Take note that the first pass over ``unit`` has written its room."""

    def totals(self) -> Tensor | None:
        """Return this rank's sums (k, n), contiguous, to be added up in place; None for none."""

    def finish(self, totals: Tensor) -> Tensor | None:
        """Make factors of what all ranks' sums add up to; return the ratio per parameter."""

    def factors(self, unit: Unit) -> Tensor | None:
        """Return the factors of ``unit``, as its room was; None where there are none."""


class BlockSums:
    """One fp32 number per block and sum, for all units of some cohorts.

    Args:
        shards: whose blocks.
        cohorts: those that take part, by index.
        num_sums: sums per block.
    """

    def __init__(self, shards: Shards, cohorts: Sequence[int], *, num_sums: int) -> None:
        table = shards.blocks(cohorts)
        num_blocks, num_params = table.num_blocks, table.num_params
        self._extents = table.extents
        self._sums = torch.zeros(num_sums, num_blocks, device=shards.device)
        self._spread = torch.ones(1, num_blocks, device=shards.device)
        self._tree = SegmentSum(
            table.owners, num_values=num_blocks, num_segments=num_params, device=shards.device
        )
        # Padding belongs to no parameter; it takes the value appended after the last one's.
        owner = [num_params] * num_blocks
        for param, start, stop in table.owners:
            owner[start:stop] = [param] * (stop - start)
        self._owner = torch.tensor(owner, dtype=torch.int64, device=shards.device)

    def clear(self) -> None:
        """Set all sums to zero; blocks that are not updated in a step must add nothing."""
        self._sums.zero_()

    def room(self, unit: Unit) -> Tensor | None:
        """Return the sums (num_sums, blocks) of ``unit``; None if it takes no part."""
        extent = self._extents.get(unit.index)
        return None if extent is None else self._sums[:, extent[0] : extent[1]]

    def per_param(self) -> Tensor:
        """Return this rank's part of the sums of each parameter, (num_sums, num_params)."""
        return self._tree(self._sums)

    def spread(self, values: Tensor) -> None:
        """Give every block the value of its parameter; ``values`` is (num_params,)."""
        padded = torch.nn.functional.pad(values, (0, 1), value=1.0)
        torch.index_select(padded, 0, self._owner, out=self._spread[0])

    def value(self, unit: Unit) -> Tensor | None:
        """Return the values (1, blocks) of ``unit``; None if it takes no part."""
        extent = self._extents.get(unit.index)
        return None if extent is None else self._spread[:, extent[0] : extent[1]]


class TensorReduction:
    """Sums per tensor, for a NormRule: those of its blocks.

    The cohorts whose ratios are needed may change from step to step, with the weight decay.
    """

    def __init__(self, rule: NormRule, shards: Shards) -> None:
        self._rule = rule
        self._shards = shards
        self._adapted: list[int] = []
        self._sums: BlockSums | None = None

    def begin(self) -> None:
        cohorts = self._shards.cohorts
        adapted = [t.number for t in cohorts if self._rule.settings(t.group, t.policy, 1).adapts]
        if adapted != self._adapted:
            self._adapted, self._sums = adapted, None
        if adapted and self._sums is None:
            self._sums = BlockSums(self._shards, adapted, num_sums=self._rule.num_sums)
        if self._sums is not None:
            self._sums.clear()

    def room(self, unit: Unit) -> Tensor | None:
        """Return (num_sums, blocks)."""
        return None if self._sums is None else self._sums.room(unit)

    def collect(self, unit: Unit, room: Tensor | None) -> None:
        """Do nothing: blocks have rooms of their own."""

    def totals(self) -> Tensor | None:
        """Return the sums per parameter (num_sums, num_params)."""
        return None if self._sums is None else self._sums.per_param()

    def finish(self, totals: Tensor) -> Tensor | None:
        """Take the ratio of every parameter (num_params,), and give it to its blocks."""
        assert self._sums is not None
        ratio = self._rule.ratio(totals)
        self._sums.spread(ratio)
        return ratio

    def factors(self, unit: Unit) -> Tensor | None:
        """Return the ratios (1, blocks)."""
        return None if self._sums is None else self._sums.value(unit)


def reduction_for(rule: ReducingRule, shards: Shards) -> Reduction:
    """Return what sums up at the grain of ``rule``."""
    return REDUCTIONS[rule.grain](rule, shards)  # type: ignore[no-any-return]


REDUCTIONS: dict[str, type] = {"block": TensorReduction, "row": RowReduction}
"""{grain of a rule: its Reduction}"""
