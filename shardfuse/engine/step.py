"""StepDriver: one update over the shards, by any rule, pass by pass.

A rule of granularity "element" has one pass: each unit is updated as soon as its gradient is
reduced, and its parameters may be gathered at once. Any other rule has two, with one all-reduce of
its sums between them. Clips by a norm come before: gradients are then reduced first, and kept.

The driver knows neither buffers nor DeepSpeed: it walks over the units of a ShardProvider. A
Reduction sums over tensors or rows that are cut across units and ranks: the first pass writes into
its out(), the second reads its factors(), and the driver all-reduces its totals() between them.

[Note: segment tree] A norm of a parameter adds up the sums of its blocks. ``index_add_`` would add
them one after another in fp32, which loses digits over the 20,000 blocks of an embedding, and
atomically on accelerators, which is not deterministic; fp64 accumulators do not exist on every NPU.
SegmentSum adds up to FAN_IN consecutive values of one parameter at a time, level by level, by a
gather and a row sum: exact to a few fp32 roundings, deterministic, and no Python loop over
parameters at run time.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from shardfuse.comm import Communicator
from shardfuse.comm.transport import ReduceOp
from shardfuse.engine.kernels import (
    CPU_TILE,
    FUSED_WIDTH,
    MOST_CONSTANTS,
    Kernels,
    Pass,
    Scale,
    Tile,
    ascending,
    first_pass,
    matrix_first_pass,
    matrix_second_pass,
    mean_into,
    only_pass,
    second_pass,
    square_sum_pass,
)
from shardfuse.engine.matrices import MatrixExchange
from shardfuse.engine.step_norms import StepNorms
from shardfuse.engine.units import (
    ParamRows,
    ParamSet,
    ShardProvider,
    UnitTiles,
    UpdateRange,
    UpdateUnit,
    should_batch,
)
from shardfuse.layout import BLOCK
from shardfuse.rules import (
    Clip,
    MatrixRule,
    NormRule,
    ReducingRule,
    RowRule,
    Rows,
    Settings,
    UpdateRule,
)


class StepDriver:
    """Runs a rule over shards.

    Args:
        rule: the math.
        shards: the units to update.
        comm: the ranks that share them.
        comm_device: where its collectives take tensors; None is where the shards are.
        kernels: how the math is run.
    """

    def __init__(
        self,
        rule: UpdateRule,
        shards: ShardProvider,
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
        self._matrices: MatrixExchange | None = None
        if isinstance(rule, MatrixRule):
            self._matrices = MatrixExchange(rule, shards, comm, comm_device)
        self._param_sets: dict[int, ParamSet] = {}  # as the present step has them
        self._settings: dict[
            tuple[int, int], Settings
        ] = {}  # by param_set and step, as it has them
        self._calls: dict[tuple[int, int], _KernelArgs] = {}  # the same
        self._equal: dict[Any, _KernelArgs] = {}  # by value
        self._row_owners: dict[tuple[int, ...], Tensor] = {}  # kept, by rows of each part of a run
        self._num_owners = 0  # of all rows that are kept
        self._batches_all_sets = False  # as Kernels.batches_all_sets, in the present step
        self._clipped: list[int] = []
        self._norms: BlockSums | None = None  # broadcast: the norm of the tensor each block is of
        self._watch: StepNorms | None = None  # of the present step
        self.ratio: Tensor | None = None  # (num_params,), of the last step; 1 where none was taken

    def square_norms(self) -> Tensor:
        """Return squared norms of the mean gradient over all ranks, whose sum is the whole's; fp32.

        They are those of each param_set, by number, where the rule clips by sets; else (1,) of all.
        So step() and clip_grad_norm() add up in one order. Reduces the gradients and keeps them
        reduced. One all-reduce.
        """
        by_set = any(
            map(_clips_by_group, (self._rule.clip(s.group) for s in self._shards.param_sets))
        )
        counted = self._shards.counted("sets")
        self._shards.keep_reduced()
        in_parts = by_set or counted is not None
        num_sets = len(self._shards.param_sets) if in_parts else 1
        squares = torch.zeros(num_sets, dtype=torch.float32, device=self._shards.device)
        for unit in self._shards.gradients():
            for part in unit.ranges if in_parts else [UpdateRange(0, unit.numel, 0)]:
                squares[part.param_set] += self._square(unit, part).sum()
        squares = _only(counted, squares)
        return self._total(squares if by_set else squares.sum(0, keepdim=True))

    def p_norm(self, norm_type: float) -> Tensor:
        """Return the p-norm of the mean gradient over all ranks, () fp32.

        Reduces the gradients and keeps them reduced. One all-reduce.
        """
        self._shards.keep_reduced()
        largest = norm_type == math.inf
        num_sets = max(1, len(self._shards.param_sets))  # without any, a norm of 0
        total = torch.zeros(num_sets, 2, dtype=torch.float32, device=self._shards.device)
        for unit in self._shards.gradients():
            (grad,) = unit.grad
            for part in unit.ranges:
                # By blocks: a long sum in fp32 would lose digits.
                blocks = grad[part.start : part.stop].view(-1, unit.row)
                norms = torch.linalg.vector_norm(blocks, norm_type, dim=1, dtype=torch.float32)
                norms = norms * (unit.mean or 1.0)
                own = total[part.param_set]
                if largest:
                    # A maximum over ranks may drop a NaN, so a second number records it.
                    found = [norms.nan_to_num(nan=0.0, posinf=math.inf), norms.isnan().float()]
                    own.copy_(torch.maximum(own, torch.stack(found).amax(dim=1)))
                else:
                    own[0] += norms.pow(norm_type).sum()
        if largest:
            values = self._total(total.amax(0), "max")
            return torch.where(values[1] > 0, math.nan, values[0])
        counted = self._shards.counted("sets")
        return self._total(_only(counted, total[:, 0]).sum(0, keepdim=True))[0].pow(1 / norm_type)

    def run(
        self, coefficient: Tensor | None, max_norm: float | None, watch: StepNorms | None = None
    ) -> None:
        """Update states and parameters; all-gathers that commit() has launched stay in flight.

        Args:
            coefficient: () scales the mean gradient, on top of the rule's own clipping.
            max_norm: bound of the norm of the mean gradient so scaled, before that clipping.
            watch: records norms, at one more all-reduce.
        """
        self._watch = watch
        self._param_sets = {param_set.number: param_set for param_set in self._shards.param_sets}
        self._batches_all_sets = self._kernels.batches_all_sets and should_batch(
            len(self._param_sets)
        )
        self._settings.clear()
        self._calls.clear()
        self._equal.clear()
        # Of all sets, on this rank or not: where a rule raises an error, every rank raises it, and
        # before anything is updated.
        settings, rule = self._settings, self._rule
        for own in self._param_sets.values():
            settings[own.number, own.step] = rule.settings(own.group, own.policy, own.step)
        scales = self._scales(coefficient, max_norm)
        if self._reduction is not None:
            self._two_passes(scales, self._reduction)
        elif self._matrices is not None:
            self._matrix_passes(scales, self._matrices)
        else:
            for unit in self._shards.gradients():
                self._shards.checkout(unit)
                self._record_gradient(unit)
                self._only_pass(unit, scales)
        self._shards.increment_step()
        if watch is not None:
            watch.ratio = self.ratio
            counted = self._shards.counted("params")
            watch.finish(lambda sums: self._total(_only(counted, sums)), self._shards.device)
            self._watch = None

    def _record_gradient(self, unit: UpdateUnit) -> None:
        if self._watch is not None:
            self._watch.record_gradient(unit)

    def _recording_update(self, unit: UpdateUnit) -> AbstractContextManager[None]:
        return nullcontext() if self._watch is None else self._watch.recording_update(unit)

    def _only_pass(self, unit: UpdateUnit, scales: Mapping[int, Scale]) -> None:
        with self._recording_update(unit):
            self._pass(only_pass, unit, scales)
        self._shards.commit(unit)

    def _matrix_passes(self, scales: Mapping[int, Scale], matrices: MatrixExchange) -> None:
        units = []
        for unit in self._shards.gradients():
            self._shards.checkout(unit)
            self._record_gradient(unit)
            out = matrices.out(unit)
            if out is None:
                self._only_pass(unit, scales)
                continue
            self._pass(matrix_first_pass, unit, scales, out)
            unit.grad = ()
            units.append(unit)
        matrices.run()
        for unit in reversed(units):
            with self._recording_update(unit):
                self._pass(matrix_second_pass, unit, scales, matrices.value(unit))
            self._shards.commit(unit)

    def _two_passes(self, scales: Mapping[int, Scale], sums: Reduction) -> None:
        keeps = {number for (number, _), own in self._settings.items() if own.keeps_gradient}
        if keeps:
            self._shards.keep_all_reduced()
        sums.begin()
        units = []
        for unit in self._shards.gradients():
            self._shards.checkout(unit)
            self._record_gradient(unit)
            out = sums.out(unit)
            self._pass(first_pass, unit, scales, out)
            sums.collect(unit, out)
            if keeps.isdisjoint(part.param_set for part in unit.ranges):
                unit.grad = ()
            units.append(unit)
        totals = sums.totals()
        ratio = None if totals is None else sums.finish(self._total(totals))
        if ratio is None and isinstance(self._rule, NormRule):  # as under this weight decay
            ratio = torch.ones(self._shards.blocks(()).num_params, device=self._shards.device)
        self.ratio = ratio
        # The last ones hold the first layers, which the next forward wants first.
        for unit in reversed(units):
            with self._recording_update(unit):
                self._pass(second_pass, unit, scales, sums.factors(unit))
            self._shards.commit(unit)

    def _pass(
        self,
        function: Pass,
        unit: UpdateUnit,
        scales: Mapping[int, Scale],
        aux: Tensor | None = None,
    ) -> None:
        """Run one pass over a unit: one call for neighbours whose numbers are equal, or are few."""
        runs = self._runs(unit, scales)
        if function is not only_pass or not self._shares_mean(unit, runs):
            self._call_kernels(function, unit, runs, aux)
            return
        assert unit.p is not None
        mean = torch.empty(min(unit.numel, CPU_TILE), dtype=unit.p.dtype, device=unit.p.device)
        for near in _by_tile(runs):
            start, stop = near[0].whole.start, near[-1].whole.stop
            if stop - start > CPU_TILE:
                self._call_kernels(function, unit, near, None)
                continue
            call = near[0].parts[0][1]
            tile = unit.narrow(start, stop, call.states)
            grad = tile.grad
            if len(grad) > 1 or call.scale is not None or grad[0].dtype != mean.dtype:
                grad = (mean[: stop - start],)
                mean_into(grad[0], tile.grad, call.scale)
            found = [run.parts[0][1].settings.fused for run in near]
            operators = [fused for fused in found if fused is not None]
            sizes = [run.whole.stop - run.whole.start for run in near]
            self._kernels.run_operators(operators, sizes, tile._replace(grad=grad))

    def _call_kernels(
        self, function: Pass, unit: UpdateUnit, runs: Sequence[_Run], aux: Tensor | None
    ) -> None:
        tiles = UnitTiles(unit, [whole for whole, _ in runs])
        for index, (whole, parts) in enumerate(runs):
            call = parts[0][1]
            row, settings = unit.row, call.settings
            if call.batch is not None:
                row, h = self._numbers_by_row(unit, parts)
                settings = settings._replace(h=h, fused=None)
            is_first = function not in (second_pass, matrix_second_pass)
            has_grad = is_first or call.settings.keeps_gradient
            own_aux = aux if call.sums else None
            self._kernels.run(
                function,
                settings,
                self._scale(call, unit, whole),
                tiles.tile(index, call.states, own_aux, row=row, has_grad=has_grad),
                is_tail=unit.is_tail,
                by_operator=call.by_operator,
            )

    def _shares_mean(self, unit: UpdateUnit, runs: Sequence[_Run]) -> bool:
        """Return whether the gradients of several operators are made means of by one call.

        Layer-wise decay has hundreds of operators, and a sum before each took as long as it.
        """
        calls = [run.parts[0][1] for run in runs]
        if len(calls) < 2 or unit.row % FUSED_WIDTH or self._norms is not None or unit.p is None:
            return False
        scale = calls[0].scale
        return all(call.by_operator and call.scale is scale for call in calls)

    def _runs(self, unit: UpdateUnit, scales: Mapping[int, Scale]) -> list[_Run]:
        """Return the ranges of ``unit``, those joined that one call can update."""
        runs: list[_Run] = []
        for part in unit.ranges:
            call = self._call(part, scales)
            if runs and runs[-1].whole.stop == part.start:
                whole, parts = runs[-1]
                is_alike = call.batch is not None and call.batch == parts[0][1].batch
                if parts[0][1] is call or is_alike:
                    runs[-1] = _Run(whole._replace(stop=part.stop), [*parts, (part, call)])
                    continue
            runs.append(_Run(part, [(part, call)]))
        return runs

    def _numbers_by_row(
        self, unit: UpdateUnit, parts: Sequence[tuple[UpdateRange, _KernelArgs]]
    ) -> tuple[int, Any]:
        """Return the elements of a row, and ``h`` with a tensor (rows, 1) for each number.

        A rule may round otherwise by tensors than by numbers. So this is the form of all numbers of
        sets that share calls, however the ranks cut them.
        """
        assert unit.p is not None
        ends = [end for part, _ in parts for end in (part.start, part.stop)]
        row = BLOCK if all(end % BLOCK == 0 for end in ends) else unit.row
        counts = tuple((part.stop - part.start) // row for part, _ in parts)
        if counts not in self._row_owners:
            # Absent gradients make ever new runs.
            if len(self._row_owners) >= MOST_CONSTANTS or self._num_owners >= _MOST_OWNERS:
                self._row_owners.clear()
                self._num_owners = 0
            self._num_owners += sum(counts)
            owners = torch.repeat_interleave(torch.tensor(counts))
            self._row_owners[counts] = owners.to(unit.p.device, non_blocking=True)
        h = parts[0][1].settings.h
        table = torch.tensor([call.settings.h for _, call in parts], dtype=unit.p.dtype)
        # Not awaited: else the host would wait for the device.
        rows = table.to(unit.p.device, non_blocking=True)[self._row_owners[counts]]
        return row, type(h)(*rows[:, :, None].unbind(1))

    def _call(self, part: UpdateRange, scales: Mapping[int, Scale]) -> _KernelArgs:
        """Return the numbers that update ``part``: one object for all whose numbers are equal."""
        key = (part.param_set, part.step)
        if key not in self._calls:
            settings, own = self._settings_of(*key), self._param_sets[part.param_set]
            between = self._reduction or self._matrices
            sums = between is not None and between.takes(part.param_set)
            scale, states = scales[part.param_set], self._rule.state_names(own.group)
            mark = id(scale) if isinstance(scale, Tensor) else scale
            clip = self._rule.clip(own.group)
            batch = (settings.flags, clip, settings.keeps_gradient, states, sums, mark)
            # A learning rate that is a tensor on a device has no place in a table of numbers.
            is_known = _NUMBERS.issuperset(map(type, settings.h))
            shares = is_known and (own.shares_calls or self._batches_all_sets)
            by_operator = self._kernels.takes_operator(settings)
            call = _KernelArgs(
                settings,
                clip,
                scale,
                states,
                sums,
                batch if shares and not by_operator else None,
                by_operator,
            )
            if is_known:
                call = self._equal.setdefault((part.step, settings.h, batch, shares), call)
            self._calls[key] = call
        return self._calls[key]

    def _settings_of(self, param_set: int, step: int) -> Settings:
        """Return the settings of a param_set, made once a step."""
        key = (param_set, step)
        if key not in self._settings:  # of a set whose parameters have steps of their own
            own = self._param_sets[param_set]
            self._settings[key] = self._rule.settings(own.group, own.policy, step)
        return self._settings[key]

    # Clips

    def _scales(self, coefficient: Tensor | None, max_norm: float | None) -> dict[int, Scale]:
        """Return for each param_set the factor from summed to clipped mean gradient; its sign, too.

        Clipping per tensor is left to _scale().
        """
        param_sets = list(self._param_sets.values())
        clips = {own.number: self._rule.clip(own.group) for own in param_sets}
        shared = [clip for clip in clips.values() if clip is not None and clip.scope != "tensor"]
        known = self._shards.global_square()
        needs = any(map(_clips_by_group, shared)) or (known is None and len(shared) > 0)
        squares = self.square_norms() if needs or max_norm is not None else None
        if max_norm is not None and squares is not None:
            coefficient = _factor(Clip(max_norm, "global", eps=1e-6), squares.sum(), coefficient)
        self._sum_tensors(clips, coefficient)
        scales: dict[int, Scale] = {}
        made: dict[
            Any, Scale
        ] = {}  # by all that a scale depends on: few sets have one of their own
        sets_by_norm = _sets_by_norm(param_sets) if shared else {}
        for own in param_sets:
            clip = clips[own.number]
            peers = None  # all
            if clip is not None and clip.scope in ("group", "flat"):
                peers = sets_by_norm[id(own.group), own.dtype if clip.scope == "flat" else None]
            key = (clip, peers, own.mean, bool(own.group.get("maximize")))
            if key not in made:
                factor = coefficient
                if clip is not None and clip.scope != "tensor":
                    square = known if clip.scope == "global" else None
                    if square is None:
                        assert squares is not None
                        square = _sum_over(squares, peers)
                    factor = _factor(clip, square, coefficient)
                if factor is not None and self._watch is not None:
                    self._watch.record_clip(factor)
                mean: Scale = own.mean
                if factor is not None:
                    mean = factor if mean is None else factor * mean
                made[key] = ascending(mean, own.group)
            scales[own.number] = made[key]
        return scales

    def _sum_tensors(self, clips: Mapping[int, Clip | None], coefficient: Tensor | None) -> None:
        """Note the norm of every tensor that is clipped by its own. One all-reduce, if any is."""
        clipped = [i for i, clip in clips.items() if clip is not None and clip.scope == "tensor"]
        if clipped != self._clipped:
            self._clipped = clipped
            self._norms = BlockSums(self._shards, clipped, num_sums=1) if clipped else None
        if self._norms is None:
            return
        self._shards.keep_reduced()
        for unit in self._shards.gradients():
            out = self._norms.out(unit)
            if out is not None:
                self._square(unit, UpdateRange(0, unit.numel, 0), out)
        sums = _only(self._shards.counted("params"), self._norms.per_param())
        norms = self._total(sums)[0].sqrt()
        self._norms.broadcast(norms if coefficient is None else norms * coefficient)

    def _scale(self, call: _KernelArgs, unit: UpdateUnit, part: UpdateRange) -> Scale:
        """Return the factor for ``part``, of each block (blocks, 1) where tensors are clipped."""
        clip, scale = call.clip, call.scale
        if self._norms is None or clip is None or clip.scope != "tensor":
            return scale
        norms = self._norms.value(unit)
        assert norms is not None
        own = norms[0, unit.blocks(part)]
        factor = (clip.max_norm / (own + clip.eps)).clamp(max=1.0)[:, None]
        return factor if scale is None else factor * scale

    def _square(self, unit: UpdateUnit, part: UpdateRange, out: Tensor | None = None) -> Tensor:
        """Return the sums of squares (1, n) of the rows of a mean gradient's ``part``.

        Rows are blocks where these divide it, as they do a unit; ``out`` is where to write them.
        """
        numel = part.stop - part.start
        row = BLOCK if numel % BLOCK == 0 else unit.row
        grad = tuple(g[part.start : part.stop].view(-1, row) for g in unit.grad)
        if out is None:
            out = torch.empty(1, numel // row, dtype=torch.float32, device=grad[0].device)
        tile = Tile(grad, aux=out)
        self._kernels.run(
            square_sum_pass, Settings(None, ()), unit.mean, tile, is_tail=unit.is_tail
        )
        return out

    def _total(self, sums: Tensor, op: ReduceOp = "sum") -> Tensor:
        """Return ``sums`` added up over the ranks, or their maximum."""
        total = sums.contiguous().to(self._comm_device or sums.device)
        self._comm.all_reduce(total.view(-1), op).wait()
        return total.to(sums.device)


def _only(counted: Tensor | None, sums: Tensor) -> Tensor:
    """Return ``sums`` (..., n), zero in columns that are not ``counted`` (n,)."""
    return sums if counted is None else torch.where(counted, sums, 0.0)


def _clips_by_group(clip: Clip | None) -> bool:
    """Return whether a clip is by the norm of some param_sets."""
    return clip is not None and clip.scope in ("group", "flat")


def _sum_over(values: Tensor, places: tuple[int, ...] | None) -> Tensor:
    """Return the sum of those of ``values``, of all for None; no index goes to the device."""
    if places is None:
        return values.sum()
    return torch.stack([values[place] for place in places]).sum()


def _sets_by_norm(param_sets: Sequence[ParamSet]) -> dict[tuple[int, str | None], tuple[int, ...]]:
    """Return the param_sets under one norm, by (id() of the group, dtype); dtype None is all."""
    found: dict[tuple[int, str | None], list[int]] = {}
    for own in param_sets:
        for dtype in (None, own.dtype):
            found.setdefault((id(own.group), dtype), []).append(own.number)
    return {key: tuple(numbers) for key, numbers in found.items()}


def _factor(clip: Clip, square: Tensor, coefficient: Tensor | None) -> Tensor:
    """Return the factor for a gradient of squared norm ``square``, by both arguments."""
    norm = square.sqrt() if coefficient is None else square.sqrt() * coefficient
    own = (clip.max_norm / (norm + clip.eps)).clamp(max=1.0)
    return own if coefficient is None else own * coefficient


# Calls of kernels


class _KernelArgs(NamedTuple):
    """The arguments of a kernel beside its tensors, in one step."""

    settings: Settings
    clip: Clip | None
    scale: Scale
    states: tuple[str, ...]
    sums: bool  # whether a Reduction takes part
    batch: Hashable  # equal for all parts that share calls; None: it shares none
    by_operator: bool  # as Kernels.takes_operator()


_NUMBERS = frozenset({bool, int, float})

_MOST_OWNERS = 4 << 20
"""Rows of which it is kept to which set each belongs: the rows of a shard of 2 Gi elements."""


class _Run(NamedTuple):
    """Neighbours of a unit under one kernel call."""

    whole: UpdateRange
    parts: list[tuple[UpdateRange, _KernelArgs]]


def _by_tile(runs: Sequence[_Run]) -> Iterator[list[_Run]]:
    """Yield adjacent runs with the same states, in lists of at most CPU_TILE elements or of one."""
    near: list[_Run] = []
    for run in runs:
        if near and not (
            run.whole.start == near[-1].whole.stop
            and run.whole.stop - near[0].whole.start <= CPU_TILE
            and run.parts[0][1].states == near[0].parts[0][1].states
        ):
            yield near
            near = []
        near.append(run)
    yield near


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
    """The step between the passes, for the rules of one granularity."""

    def takes(self, param_set: int) -> bool:
        """Return whether the parameters of a param_set have sums and factors."""

    def begin(self) -> None:
        """Start a step: clear the sums."""

    def out(self, unit: UpdateUnit) -> Tensor | None:
        """Return where the first pass writes for ``unit``; None where nothing is summed."""

    def collect(self, unit: UpdateUnit, out: Tensor | None) -> None:
        """Take note that the first pass over ``unit`` has written its out."""

    def totals(self) -> Tensor | None:
        """Return this rank's sums (k, n), contiguous, to be added up in place; None for none."""

    def finish(self, totals: Tensor) -> Tensor | None:
        """Make factors of the sums over all ranks; return the ratio per parameter."""

    def factors(self, unit: UpdateUnit) -> Tensor | None:
        """Return the factors of ``unit``, as its out was; None where there are none."""


class BlockSums:
    """One fp32 number per block and sum, for all units of some param_sets.

    Args:
        shards: the provider of the blocks.
        param_sets: those that take part, by index.
        num_sums: sums per block.
    """

    def __init__(self, shards: ShardProvider, param_sets: Sequence[int], *, num_sums: int) -> None:
        table = shards.blocks(param_sets)
        num_blocks, num_params = table.num_blocks, table.num_params
        self._extents = table.extents
        self._sums = torch.zeros(num_sums, num_blocks, device=shards.device)
        self._per_block = torch.ones(1, num_blocks, device=shards.device)
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

    def out(self, unit: UpdateUnit) -> Tensor | None:
        """Return the sums (num_sums, blocks) of ``unit``; None if it takes no part."""
        extent = self._extents.get(unit.index)
        return None if extent is None else self._sums[:, extent[0] : extent[1]]

    def per_param(self) -> Tensor:
        """Return this rank's part of the sums of each parameter, (num_sums, num_params)."""
        return self._tree(self._sums)

    def broadcast(self, values: Tensor) -> None:
        """Give every block the value of its parameter; ``values`` is (num_params,)."""
        padded = torch.nn.functional.pad(values, (0, 1), value=1.0)
        torch.index_select(padded, 0, self._owner, out=self._per_block[0])

    def value(self, unit: UpdateUnit) -> Tensor | None:
        """Return the values (1, blocks) of ``unit``; None if it takes no part."""
        extent = self._extents.get(unit.index)
        return None if extent is None else self._per_block[:, extent[0] : extent[1]]


class TensorReduction:
    """Sums per tensor, for a NormRule: those of its blocks.

    The sets whose ratios are needed may change from step to step, with the weight decay.
    """

    def __init__(self, rule: NormRule, shards: ShardProvider) -> None:
        self._rule = rule
        self._shards = shards
        self._adapted: list[int] = []
        self._sums: BlockSums | None = None

    def begin(self) -> None:
        param_sets = self._shards.param_sets
        adapted = [t.number for t in param_sets if self._rule.adapts(t.group, t.policy)]
        if adapted != self._adapted:
            self._adapted, self._sums = adapted, None
        if adapted and self._sums is None:
            self._sums = BlockSums(self._shards, adapted, num_sums=self._rule.num_sums)
        if self._sums is not None:
            self._sums.clear()

    def out(self, unit: UpdateUnit) -> Tensor | None:
        """Return (num_sums, blocks)."""
        return None if self._sums is None else self._sums.out(unit)

    def takes(self, param_set: int) -> bool:
        return param_set in self._adapted

    def collect(self, unit: UpdateUnit, out: Tensor | None) -> None:
        """Do nothing: blocks have rooms of their own."""

    def totals(self) -> Tensor | None:
        """Return the sums per parameter (num_sums, num_params)."""
        if self._sums is None:
            return None
        return _only(self._shards.counted("params"), self._sums.per_param())

    def finish(self, totals: Tensor) -> Tensor | None:
        """Take the ratio of every parameter (num_params,), and give it to its blocks."""
        assert self._sums is not None
        ratio = self._rule.ratio(totals)
        self._sums.broadcast(ratio)
        return ratio

    def factors(self, unit: UpdateUnit) -> Tensor | None:
        """Return the ratios (1, blocks)."""
        return None if self._sums is None else self._sums.value(unit)


class RowReduction:
    """Sums per row of every tensor of two or more dimensions, for a RowRule; see Reduction.

    A row is selected by one index along dimension 0. Rows do not keep to blocks, so products are
    first written out for one unit, and then added up fragment by fragment.
    """

    def __init__(self, rule: RowRule, shards: ShardProvider) -> None:
        self._rule = rule
        self._shards = shards
        self._rows_of: dict[int, ParamRows] = {}  # of the parameters that have rows
        self._starts: dict[int, int] = {}  # param: its first row
        self._set_of: dict[int, int] = {}  # param: number of its param_set
        self._rows: dict[int, tuple[slice, Rows]] = {}  # number of a param_set: its rows
        self._factors: dict[int, Tensor] = {}  # number of a param_set: those of its rows
        num_rows, device = 0, shards.device
        for param_set in shards.param_sets:
            pairs = shards.params(param_set.number)
            specs = {param: spec for param, spec in pairs if spec.numel and len(spec.shape) > 1}
            own = {param: shards.rows(param) for param in specs}
            if not own:
                continue
            self._rows_of |= own
            self._set_of |= dict.fromkeys(own, param_set.number)
            start, counts = num_rows, [rows.num_rows for rows in own.values()]
            for param, count in zip(own, counts, strict=True):
                self._starts[param] = num_rows
                num_rows += count
            numels = torch.tensor([float(rows.numel) for rows in own.values()])
            owner = torch.repeat_interleave(torch.tensor(counts))
            rows = Rows(
                counts,
                owner.to(device),
                (numels / torch.tensor(counts)).to(device),
                numels.to(device),
            )
            self._rows[param_set.number] = (slice(start, num_rows), rows)
        self._totals = torch.zeros(rule.num_sums, num_rows, device=device)
        self._counted = shards.counted("params")  # by row
        if self._counted is not None:
            numbers = [n for n, rows in self._rows_of.items() for _ in range(rows.num_rows)]
            self._counted = self._counted[torch.tensor(numbers, dtype=torch.int64, device=device)]

    def begin(self) -> None:
        self._totals.zero_()

    def takes(self, param_set: int) -> bool:
        return param_set in self._rows

    def out(self, unit: UpdateUnit) -> Tensor | None:
        """Return zeros (num_sums, numel)."""
        if not any(map(self.takes, (part.param_set for part in unit.ranges))):
            return None
        return self._totals.new_zeros(len(self._totals), unit.numel)

    def collect(self, unit: UpdateUnit, out: Tensor | None) -> None:
        """Add the products up by rows."""
        if out is None:
            return
        for f in unit.fragments:
            if f.param in self._starts:
                rows, start = self._rows_of[f.param], self._starts[f.param]
                start += rows.first
                sums = self._totals[:, start : start + rows.num_own]
                part = out[:, f.shard_start : f.shard_start + f.numel]
                _add_rows(sums, part, f.param_start, rows.stride)

    def totals(self) -> Tensor | None:
        """Return the sums per row (num_sums, rows)."""
        return _only(self._counted, self._totals) if self._totals.numel() else None

    def finish(self, totals: Tensor) -> Tensor | None:
        """Take the factors of every row."""
        self._totals = totals
        for param_set in self._shards.param_sets:
            if param_set.number in self._rows:
                extent, rows = self._rows[param_set.number]
                factors = self._rule.factors(param_set.group, totals[:, extent], rows)
                self._factors[param_set.number] = factors
        return None

    def factors(self, unit: UpdateUnit) -> Tensor | None:
        """Return (num_factors, numel): to every element its row's, or those of none."""
        if not any(map(self.takes, (part.param_set for part in unit.ranges))):
            return None
        broadcast = self._totals.new_empty(len(self._rule.neutral), unit.numel)
        for row, value in zip(broadcast, self._rule.neutral, strict=True):
            row.fill_(value)  # a tensor of the values would be a copy that the host waits for
        for f in unit.fragments:
            if f.param in self._starts:
                rows, number = self._rows_of[f.param], self._set_of[f.param]
                stop = f.param_start + f.numel
                index = torch.arange(f.param_start, stop, device=broadcast.device)
                index = index // rows.stride % rows.num_own
                index += self._starts[f.param] - self._rows[number][0].start + rows.first
                own = broadcast[:, f.shard_start : f.shard_start + f.numel]
                own.copy_(self._factors[number][:, index])
        return broadcast


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


def reduction_for(rule: ReducingRule, shards: ShardProvider) -> Reduction:
    """Return the reduction at the granularity of ``rule``."""
    return REDUCTIONS[rule.granularity](rule, shards)  # type: ignore[no-any-return]


REDUCTIONS: dict[str, type] = {"block": TensorReduction, "row": RowReduction}
"""{granularity of a rule: its Reduction}"""
