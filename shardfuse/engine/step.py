"""The driver: one update over the shards, by whatever rule, pass by pass.

A rule of grain "element" has one pass: each unit is updated as soon as its gradient is there, and
may leave for the other ranks. Any other has two, with one all-reduce of its sums between them.
Clips by a norm come before: gradients are then reduced first, and kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from shardfuse.comm import Communicator
from shardfuse.engine.kernels import Kernels, Pass, Scale, ascending, passes
from shardfuse.engine.norms import StepNorms
from shardfuse.engine.reductions import BlockSums, reduction_for
from shardfuse.engine.units import Cohort, Shards, Unit
from shardfuse.rules import Clip, NormRule, ReducingRule, UpdateRule


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
                    self._pass(passes.only_pass, unit, scales, None)
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
            self._pass(passes.first_pass, unit, scales, room)
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
                self._pass(passes.second_pass, unit, scales, sums.factors(unit))
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
        self._kernels.run(passes.square_sum_pass, None, (), scale, tile, is_tail=unit.is_tail)

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
