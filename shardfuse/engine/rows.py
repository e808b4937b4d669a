"""Sums over rows of parameters, cut across ranks anywhere, and factors on their way back.

A row is what one index along dimension 0 selects. Rows do not keep to blocks, so products are first
written out for one unit, and then added up fragment by fragment.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shardfuse.engine.units import Shards, Unit
from shardfuse.layout import ParamSpec
from shardfuse.rules import RowRule, Rows


class RowReduction:
    """Sums per row of every tensor of two or more dimensions, for a RowRule; see Reduction."""

    def __init__(self, rule: RowRule, shards: Shards) -> None:
        self._rule = rule
        self._shards = shards
        self._specs: dict[int, ParamSpec] = {}  # of the parameters that have rows
        self._starts: dict[int, int] = {}  # param: its first row
        self._rows: dict[int, tuple[slice, Rows]] = {}  # number of a cohort: its rows
        self._factors: dict[int, Tensor] = {}  # number of a cohort: those of its rows
        num_rows, device = 0, shards.device
        for cohort in shards.cohorts:
            pairs = shards.params(cohort.number)
            specs = {param: spec for param, spec in pairs if spec.numel and len(spec.shape) > 1}
            if not specs:
                continue
            self._specs |= specs
            start, counts = num_rows, [spec.shape[0] for spec in specs.values()]
            for param, count in zip(specs, counts, strict=True):
                self._starts[param] = num_rows
                num_rows += count
            numels = torch.tensor([float(spec.numel) for spec in specs.values()])
            owner = torch.repeat_interleave(torch.tensor(counts))
            rows = Rows(
                counts,
                owner.to(device),
                (numels / torch.tensor(counts)).to(device),
                numels.to(device),
            )
            self._rows[cohort.number] = (slice(start, num_rows), rows)
        self._totals = torch.zeros(rule.num_sums, num_rows, device=device)

    def begin(self) -> None:
        self._totals.zero_()

    def room(self, unit: Unit) -> Tensor | None:
        """Return zeros (num_sums, numel)."""
        if unit.cohort not in self._rows:
            return None
        return self._totals.new_zeros(len(self._totals), unit.numel)

    def collect(self, unit: Unit, room: Tensor | None) -> None:
        """Add the products up by rows."""
        if room is None:
            return
        for f in unit.fragments:
            if f.param in self._starts:
                spec, start = self._specs[f.param], self._starts[f.param]
                sums = self._totals[:, start : start + spec.shape[0]]
                part = room[:, f.shard_start : f.shard_start + f.numel]
                _add_rows(sums, part, f.param_start, _row_stride(spec))

    def totals(self) -> Tensor | None:
        """Return the sums per row (num_sums, rows)."""
        return self._totals if self._totals.numel() else None

    def finish(self, totals: Tensor) -> Tensor | None:
        """Take the factors of every row."""
        self._totals = totals
        for cohort in self._shards.cohorts:
            if cohort.number in self._rows:
                extent, rows = self._rows[cohort.number]
                factors = self._rule.factors(cohort.group, totals[:, extent], rows)
                self._factors[cohort.number] = factors
        return None

    def factors(self, unit: Unit) -> Tensor | None:
        """Return (num_factors, numel): to every element its row's, or those of none."""
        factors = self._factors.get(unit.cohort)
        if factors is None:
            return None
        start = self._rows[unit.cohort][0].start
        spread = factors.new_empty(len(self._rule.neutral), unit.numel)
        for row, value in zip(spread, self._rule.neutral, strict=True):
            row.fill_(value)  # a tensor of the values would be a copy that the host waits for
        for f in unit.fragments:
            if f.param in self._starts:
                spec = self._specs[f.param]
                index = torch.arange(f.param_start, f.param_start + f.numel, device=factors.device)
                index = index // _row_stride(spec) % spec.shape[0]
                index += self._starts[f.param] - start
                spread[:, f.shard_start : f.shard_start + f.numel] = factors[:, index]
        return spread


def _row_stride(spec: ParamSpec) -> int:
    """Return how many elements of one row are adjacent in the parameter's storage."""
    return spec.numel if spec.shape[0] == 1 else spec.stride[0]


def _add_rows(sums: Tensor, part: Tensor, start: int, stride: int) -> None:
    """Add elements [start, start + n) of a parameter, ``part`` (k, n), to its rows' ``sums``.

    ``sums`` is (k, rows); in storage, ``stride`` elements of a row are followed by as many of the
    next, and after the last row by more of the first where dimension 0 is not outermost.
    """
    k, num_rows = sums.shape
    stop, period = start + part.shape[1], num_rows * stride
    first, last = start // stride, (stop - 1) // stride
    if first == last:
        sums[:, first % num_rows] += part.sum(1)
    elif stop > period:
        low, high = start // period * period, -(-stop // period) * period
        padded = torch.nn.functional.pad(part, (start - low, high - stop))
        sums += padded.view(k, -1, num_rows, stride).sum((1, 3))
    else:
        head, tail = (first + 1) * stride - start, stop - last * stride
        sums[:, first] += part[:, :head].sum(1)
        sums[:, last] += part[:, part.shape[1] - tail :].sum(1)
        whole = part[:, head : part.shape[1] - tail]
        sums[:, first + 1 : last] += whole.reshape(k, last - first - 1, stride).sum(2)
