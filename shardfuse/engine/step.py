"""StepDriver: one update over the shards, by any rule, pass by pass.

A rule of grain "element" has one pass: each unit is updated as soon as its gradient is reduced, and
its parameters may be gathered at once. Any other rule has two, with one all-reduce of its sums
between them. Clips by a norm come before: gradients are then reduced first, and kept.

The driver knows neither buffers nor DeepSpeed: it walks over the units of a Shards. A Reduction
sums over tensors or rows that are cut across units and ranks: the first pass writes into its
room(), the second reads its factors(), and the driver all-reduces its totals() between them.

[Note: segment tree] A norm of a parameter adds up the sums of its blocks. ``index_add_`` would add
them one after another in fp32, which loses digits over the 20,000 blocks of an embedding, and
atomically on accelerators, which is not deterministic; fp64 accumulators do not exist on every NPU.
SegmentSum adds up to FAN_IN consecutive values of one parameter at a time, level by level, by a
gather and a row sum: exact to a few fp32 roundings, deterministic, and no Python loop over
parameters at run time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from shardfuse.comm import Communicator
from shardfuse.comm.transport import PartialSums
from shardfuse.engine.kernels import (
    Kernels,
    Pass,
    Scale,
    Tile,
    ascending,
    first_pass,
    only_pass,
    second_pass,
    square_sum_pass,
)
from shardfuse.layout import BLOCK, Fragment, ParamSpec
from shardfuse.rules import Clip, NormRule, ReducingRule, RowRule, Rows, UpdateRule


class StepEngine:
    """Runs a rule over shards.

    Args:
        rule: the math.
        shards: what is updated.
        comm: the ranks that share them.
        comm_device: where its collectives take tensors; None is where the shards are.
        kernels: how the math is run.
    """

    def __init__(
        self,
        rule: UpdateRule,
        shards: Shards,
        *,
        comm: Communicator,
        kernels: Kernels,
        comm_device: torch.device | None = None,
    ) -> None:
        self._rule = rule
        self._shards = shards
        self._comm = comm
        self._comm_device = comm_device
        self._kernels = kernels
        self._reduction = reduction_for(rule, shards) if isinstance(rule, ReducingRule) else None
        self._cohorts: dict[int, Cohort] = {}  # as the present step has them
        self._clipped: list[int] = []
        self._norms: BlockSums | None = None  # spread: the norm of the tensor each block is of
        self._watch: StepNorms | None = None  # of the present step
        self.ratio: Tensor | None = None  # (num_params,), of the last step; 1 where none was taken

    def square_norms(self) -> Tensor:
        """Return the squared norm of each flat's mean gradient over all ranks, (n,) fp32.

        Reduces the gradients and keeps them reduced. One all-reduce.
        """
        self._shards.retain()
        flats = {cohort.number: cohort.flat for cohort in self._shards.cohorts}
        num_flats = 1 + max(flats.values(), default=0)
        squares = torch.zeros(num_flats, dtype=torch.float32, device=self._shards.device)
        for unit in self._shards.gradients():
            blocks = squares.new_empty(1, unit.num_blocks)
            self._square(unit, blocks)
            squares[flats[unit.cohort]] += blocks.sum()
        return self._total(squares)

    def run(
        self, coefficient: Tensor | None, max_norm: float | None, watch: StepNorms | None = None
    ) -> None:
        """Update states and parameters; what ``Shards.close()`` has launched stays in flight.

        Args:
            coefficient: () scales the mean gradient, on top of the rule's own clipping.
            max_norm: bound of the norm of the mean gradient so scaled, before that clipping.
            watch: notes what is done, for one all-reduce more.
        """
        self._watch = watch
        self._cohorts = {cohort.number: cohort for cohort in self._shards.cohorts}
        scales = self._scales(coefficient, max_norm)
        if self._reduction is None:
            for unit in self._shards.gradients():
                self._shards.open(unit)
                self._note_gradient(unit)
                with self._noting(unit):
                    self._pass(only_pass, unit, scales, None)
                self._shards.close(unit)
        else:
            self._two_passes(scales)
        self._shards.advance()
        if watch is not None:
            watch.ratio = self.ratio
            watch.finish(self._total, self._shards.device)
            self._watch = None

    def _note_gradient(self, unit: Unit) -> None:
        if self._watch is not None:
            self._watch.note_gradient(unit, self._shards.mean(unit.cohort))

    def _noting(self, unit: Unit) -> AbstractContextManager[None]:
        return nullcontext() if self._watch is None else self._watch.noting(unit)

    def _two_passes(self, scales: Mapping[int, Scale]) -> None:
        rule, sums = self._rule, self._reduction
        assert isinstance(rule, ReducingRule)
        assert sums is not None
        keeps = {
            index: rule.settings(t.group, t.policy, 1).keeps_gradient
            for index, t in self._cohorts.items()
        }
        if any(keeps.values()):
            self._shards.retain_at_once()
        sums.begin()
        units = []
        for unit in self._shards.gradients():
            self._shards.open(unit)
            self._note_gradient(unit)
            room = sums.room(unit)
            self._pass(first_pass, unit, scales, room)
            sums.collect(unit, room)
            if not keeps[unit.cohort]:
                unit.grad = ()
            units.append(unit)
        totals = sums.totals()
        ratio = None if totals is None else sums.finish(self._total(totals))
        if ratio is None and isinstance(rule, NormRule):  # as under this weight decay
            ratio = torch.ones(self._shards.blocks(()).num_params, device=self._shards.device)
        self.ratio = ratio
        # The last ones hold the first layers, which the next forward wants first.
        for unit in reversed(units):
            with self._noting(unit):
                self._pass(second_pass, unit, scales, sums.factors(unit))
            self._shards.close(unit)

    def _pass(
        self, function: Pass, unit: Unit, scales: Mapping[int, Scale], extra: Tensor | None
    ) -> None:
        """Run one pass over the spans of a unit."""
        cohort = self._cohorts[unit.cohort]
        scale = self._scale(scales, cohort, unit)
        for span in unit.spans:
            settings = self._rule.settings(cohort.group, cohort.policy, span.step)
            self._kernels.run(
                function,
                settings.flags,
                settings.h,
                unit.scale(span, scale),
                unit.tile(span, extra),
                is_tail=unit.is_tail,
            )

    # Clips

    def _scales(self, coefficient: Tensor | None, max_norm: float | None) -> dict[int, Scale]:
        """Return for each cohort the factor from summed to clipped mean gradient; its sign, too.

        Clipping per tensor is left to _scale().
        """
        cohorts = list(self._cohorts.values())
        clips = {t.number: self._clip(t) for t in cohorts}
        shared = [clip for clip in clips.values() if clip is not None and clip.scope != "tensor"]
        known = self._shards.global_square()
        needs = [clip for clip in shared if known is None or clip.scope != "global"]
        squares = self.square_norms() if needs or max_norm is not None else None
        if max_norm is not None and squares is not None:
            coefficient = _factor(Clip(max_norm, "global", eps=1e-6), squares.sum(), coefficient)
        self._sum_tensors(clips, coefficient)
        scales: dict[int, Scale] = {}
        for own in cohorts:
            clip, factor = clips[own.number], coefficient
            if clip is not None and clip.scope != "tensor":
                square = known if known is not None and clip.scope == "global" else None
                if square is None:
                    assert squares is not None
                    square = _sum_over(squares, _peers(cohorts, own, clip))
                factor = _factor(clip, square, coefficient)
            mean: Scale = self._shards.mean(own.number)
            if factor is not None:
                if self._watch is not None:
                    self._watch.note_clip(factor)
                mean = factor if mean is None else factor * mean
            scales[own.number] = ascending(mean, own.group)
        return scales

    def _sum_tensors(self, clips: Mapping[int, Clip | None], coefficient: Tensor | None) -> None:
        """Note the norm of every tensor that is clipped by its own. One all-reduce, if any is."""
        clipped = [i for i, clip in clips.items() if clip is not None and clip.scope == "tensor"]
        if clipped != self._clipped:
            self._clipped = clipped
            self._norms = BlockSums(self._shards, clipped, num_sums=1) if clipped else None
        if self._norms is None:
            return
        self._shards.retain()
        for unit in self._shards.gradients():
            room = self._norms.room(unit)
            if room is not None:
                self._square(unit, room)
        norms = self._total(self._norms.per_param())[0].sqrt()
        self._norms.spread(norms if coefficient is None else norms * coefficient)

    def _scale(self, scales: Mapping[int, Scale], cohort: Cohort, unit: Unit) -> Scale:
        """Return the factor for ``unit``, of each block (blocks, 1) where tensors are clipped."""
        scale = scales[cohort.number]
        norms = None if self._norms is None else self._norms.value(unit)
        clip = None if norms is None else self._clip(cohort)
        if norms is None or clip is None:
            return scale
        factor = (clip.max_norm / (norms[0] + clip.eps)).clamp(max=1.0)[:, None]
        return factor if scale is None else factor * scale

    def _clip(self, cohort: Cohort) -> Clip | None:
        return self._rule.settings(cohort.group, cohort.policy, 1).clip

    def _square(self, unit: Unit, blocks: Tensor) -> None:
        """Write the sum of squares of every block of a mean gradient into ``blocks`` (1, n)."""
        tile = unit.tile_of_blocks(blocks)
        scale = self._shards.mean(unit.cohort)
        self._kernels.run(square_sum_pass, None, (), scale, tile, is_tail=unit.is_tail)

    def _total(self, sums: Tensor) -> Tensor:
        """Return ``sums`` added up over the ranks."""
        total = sums.contiguous().to(self._comm_device or sums.device)
        self._comm.all_reduce(total.view(-1)).wait()
        return total.to(sums.device)


def _sum_over(values: Tensor, places: list[int] | None) -> Tensor:
    """Return the sum of those of ``values``, of all for None; no index goes to the device."""
    if places is None:
        return values.sum()
    return torch.stack([values[place] for place in places]).sum()


def _peers(cohorts: list[Cohort], own: Cohort, clip: Clip) -> list[int] | None:
    """Return the flats whose norm clips ``own``; None for all."""
    if clip.scope == "global":
        return None
    group = [t for t in cohorts if t.group is own.group]
    return sorted({t.flat for t in group if clip.scope == "group" or t.dtype == own.dtype})


def _factor(clip: Clip, square: Tensor, coefficient: Tensor | None) -> Tensor:
    """Return what scales a gradient of squared norm ``square``, by ``coefficient`` and ``clip``."""
    norm = square.sqrt() if coefficient is None else square.sqrt() * coefficient
    own = (clip.max_norm / (norm + clip.eps)).clamp(max=1.0)
    return own if coefficient is None else own * coefficient


# Units, and the providers of them


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


# Sums over tensors and rows that are cut across units and ranks


FAN_IN = 32


class SegmentSum:
    """Adds values that belong to segments.

    Args:
        segments: for every segment present, (segment, start, stop): values [start, stop) belong to
            it. Values in no range are ignored. A segment may occur several times.
        num_values: length of the input.
        num_segments: length of the output; segments that do not occur get 0.
        device: where the tables live.
    """

    def __init__(
        self,
        segments: Sequence[tuple[int, int, int]],
        *,
        num_values: int,
        num_segments: int,
        device: torch.device,
    ) -> None:
        members: dict[int, list[int]] = {}
        for segment, start, stop in segments:
            members.setdefault(segment, []).extend(range(start, stop))
        self._tables: list[Tensor] = []
        width = num_values
        while any(len(values) > 1 for values in members.values()):
            rows: list[list[int]] = []
            grouped: dict[int, list[int]] = {}
            for segment, values in members.items():
                chunks = [values[i : i + FAN_IN] for i in range(0, len(values), FAN_IN)]
                grouped[segment] = list(range(len(rows), len(rows) + len(chunks)))
                rows += chunks
            self._tables.append(_table(rows, FAN_IN, zero=width, device=device))
            members, width = grouped, len(rows)
        last = [members.get(segment, []) for segment in range(num_segments)]
        self._tables.append(_table(last, 1, zero=width, device=device))

    def __call__(self, values: Tensor) -> Tensor:
        """Return (k, num_segments) sums of ``values`` (k, num_values)."""
        for table in self._tables:
            padded = torch.nn.functional.pad(values, (0, 1))
            values = padded[:, table].sum(-1)
        return values


def _table(rows: list[list[int]], width: int, *, zero: int, device: torch.device) -> Tensor:
    """Return (len(rows), width) indices; short rows point at ``zero``, where a 0 is padded."""
    filled = [row + [zero] * (width - len(row)) for row in rows]
    return torch.tensor(filled, dtype=torch.int64, device=device).reshape(len(rows), width)


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


class RowReduction:
    """Sums per row of every tensor of two or more dimensions, for a RowRule; see Reduction.

    A row is selected by one index along dimension 0. Rows do not keep to blocks, so products are
    first written out for one unit, and then added up fragment by fragment.
    """

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


def reduction_for(rule: ReducingRule, shards: Shards) -> Reduction:
    """Return what sums up at the grain of ``rule``."""
    return REDUCTIONS[rule.grain](rule, shards)  # type: ignore[no-any-return]


REDUCTIONS: dict[str, type] = {"block": TensorReduction, "row": RowReduction}
"""{grain of a rule: its Reduction}"""


# Norms of one step


_GRAD, _WEIGHT, _UPDATE, _VANISHED = range(4)


class StepNorms:
    """Norms of every parameter's gradient, weight and update in one step, over all ranks.

    All tensors are (num_params,) fp32 on the optimizer's device, in the order of ``names``. Reading
    them on the host waits for the device; see ``shardfuse.training.StepMonitor``, which does not.

    Args:
        names: of the parameters.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)
        self.ratio: Tensor | None = None
        """Trust ratios; 1 where none was taken. None for a rule without any."""
        self.inverse: Tensor | None = None
        """() of the loss scale by which gradients still had to be divided; None for 1."""
        self._clips: list[Tensor] = []
        self._parts: list[dict[int, list[Tensor]]] = [{} for _ in range(4)]
        self._totals: Tensor | None = None

    @property
    def is_taken(self) -> bool:
        """Whether the step was made; one that a gradient scaler skips leaves it to the next."""
        return self._totals is not None

    @property
    def grad(self) -> Tensor:
        """L2 norms of the mean gradient over ranks, before clips; 0 without a gradient."""
        norms = self._sums()[_GRAD].sqrt()
        return norms if self.inverse is None else norms * self.inverse

    @property
    def weight(self) -> Tensor:
        """L2 norms before the step; 0 for a frozen parameter."""
        return self._sums()[_WEIGHT].sqrt()

    @property
    def update(self) -> Tensor:
        """L2 norms of what the step added, learning rate included."""
        return self._sums()[_UPDATE].sqrt()

    @property
    def vanished(self) -> Tensor:
        """Elements whose fp32 master moved while the parameter, of lower precision, did not."""
        return self._sums()[_VANISHED]

    @property
    def clip(self) -> Tensor | None:
        """Smallest factor () by which a clip of several tensors' norm scaled; None without one."""
        if not self._clips:
            return None
        smallest = torch.stack(self._clips).min()
        return smallest if self.inverse is None else smallest / self.inverse

    def _sums(self) -> Tensor:
        if self._totals is None:
            raise RuntimeError("No step() was made since watch_step(). Read the norms after one.")
        return self._totals

    # What the driver calls

    def note_gradient(self, unit: Unit, mean: float | None) -> None:
        """Note the gradient of ``unit``; ``mean`` times it is the mean over ranks, None is 1."""
        grad = unit.grad[0].float()
        for part in unit.grad[1:]:
            grad = grad + part
        self._note(_GRAD, unit, grad if mean is None else grad * mean)

    def note_clip(self, factor: Tensor) -> None:
        """Note a factor () from the mean gradient to what the rule is given."""
        self._clips.append(factor)

    @contextmanager
    def noting(self, unit: Unit) -> Iterator[None]:
        """Note what is done to an opened unit inside."""
        assert unit.p is not None
        before = unit.p.clone()
        low = None if unit.low is None else unit.low.clone()
        yield
        moved = unit.p - before
        self._note(_WEIGHT, unit, before)
        self._note(_UPDATE, unit, moved)
        if low is not None and unit.low is not None:
            self._note(_VANISHED, unit, ((moved != 0) & (unit.low == low)).float())

    def _note(self, kind: int, unit: Unit, values: Tensor) -> None:
        """Note the sum of squares of the part of each parameter in a unit's ``values``."""
        squares = values.square()
        for fragment in unit.fragments:
            start, stop = fragment.shard_start, fragment.shard_start + fragment.numel
            # By sum(), which adds up as a tree: torch.norm has fewer digits on the CPU.
            self._parts[kind].setdefault(fragment.param, []).append(squares[start:stop].sum())

    def finish(self, total: Callable[[Tensor], Tensor], device: torch.device) -> None:
        """Add up what the ranks have noted, by ``total``."""
        zero = torch.zeros((), device=device)
        rows = [
            [sum(parts.get(param, []), zero) for param in range(len(self.names))]
            for parts in self._parts
        ]
        self._totals = total(torch.stack([torch.stack(row) for row in rows]))
        self._parts.clear()
