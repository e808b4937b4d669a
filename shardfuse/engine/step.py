"""One step over the shards: clip factors, spans, kernels, and the two small all-reduces of LAMB."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shardfuse.comm import Communicator
from shardfuse.engine.flat_state import FlatState
from shardfuse.engine.gather import ParamSync
from shardfuse.engine.kernels import Kernels, Span
from shardfuse.engine.kernels.passes import Scale, ascending
from shardfuse.engine.norms import BlockSums
from shardfuse.engine.rows import RowSums
from shardfuse.grads.full import GradSync
from shardfuse.grads.reduced import PresyncedGrads
from shardfuse.grads.slots import Parts
from shardfuse.layout import BLOCK, Bucket
from shardfuse.rules import Clip, ElementwiseRule, NormRule, RowRule
from shardfuse.scaling import OverflowReport, agree_on_step

Rule = ElementwiseRule | NormRule | RowRule
Call = tuple[Any, tuple[float, ...], Span, list[Tensor]]


class Updater:
    """Runs a rule over the flats that have gradients.

    Args:
        rule: the math.
        groups: the optimizer's own ``param_groups``, read at every step.
        flats: all flats, indexed as in the layout; dormant ones are those ``grads`` does not have.
        comm, grads, gather: the ranks, and the two directions of data.
        kernels: how the math is run.
        overflows: told of skipped steps.
    """

    def __init__(
        self,
        rule: Rule,
        groups: Sequence[dict[str, Any]],
        flats: Sequence[FlatState],
        *,
        comm: Communicator,
        grads: GradSync | PresyncedGrads,
        gather: ParamSync,
        kernels: Kernels,
        overflows: OverflowReport,
    ) -> None:
        self._rule = rule
        self._groups = groups
        self._flats = flats
        self._awake = [state for state in flats if grads.has(state.flat)]
        self._comm = comm
        self._grads = grads
        self._gather = gather
        self._kernels = kernels
        self._overflows = overflows
        self._adapted: list[FlatState] = []
        self._sums: BlockSums | None = None
        self._row_sums: RowSums | None = None
        self._clipped: list[FlatState] = []
        self._norms: BlockSums | None = None  # spread: the norm of the tensor each block is of
        self.ratio: Tensor | None = None  # (num_params,), of the last step; 1 where none was taken

    def square_norms(self) -> Tensor:
        """Return the squared norm of each flat's mean gradient over all ranks, (num_flats,) fp32.

        Reduces the gradients and keeps them reduced. One all-reduce.
        """
        self._grads.retain()
        device = self._flats[0].device if self._flats else torch.device("cpu")
        squares = torch.zeros(max(len(self._flats), 1), dtype=torch.float32, device=device)
        for bucket, parts in self._grads.reduced():
            blocks = torch.empty(bucket.shard_numel // BLOCK, dtype=torch.float32, device=device)
            self._kernels.square_sum(self._grads.scale(bucket.flat), blocks, parts)
            squares[bucket.flat] += blocks.sum()
        self._comm.all_reduce(squares).wait()
        return squares

    def run(
        self,
        coefficient: Tensor | None,
        max_norm: float | None,
        found_inf: Tensor | None,
        grad_scale: Tensor | None,
    ) -> None:
        """Update states and parameters; gathering of the parameters is left in flight.

        Args:
            coefficient: () scales the mean gradient, on top of the rule's own clipping.
            max_norm: bound of the norm of the mean gradient so scaled, before that clipping.
            found_inf, grad_scale: see [Note: gradient scalers] in scaling.py; where any rank found
                a non-finite gradient, nothing is changed.

        Raises:
            RuntimeError: on all ranks, where their loss scales differ and gradients were clipped
                without being unscaled.
        """
        scaled = agree_on_step(self._comm, found_inf, grad_scale)
        if scaled.skip:
            self._overflows.note(self.named_grads(), self._flats[0].device)
            return
        if scaled.inverse is not None and scaled.is_equal:
            coefficient = scaled.inverse if coefficient is None else coefficient * scaled.inverse
        elif scaled.inverse is not None:
            if self._grads.is_reduced:
                raise RuntimeError(
                    "The ranks have different loss scales, and clip_grad_norm() has added up "
                    "gradients that are still scaled by them. Call scaler.unscale_(optimizer) "
                    "before it, or use shardfuse.ShardedGradScaler, which keeps one scale."
                )
            self._grads.multiply(scaled.inverse)
        scales = self._scales(coefficient, max_norm)
        if isinstance(self._rule, NormRule):
            self._by_norms(self._rule, scales)
        elif isinstance(self._rule, RowRule):
            self._by_rows(self._rule, scales)
        else:
            self._elementwise(scales)
        for state in self._awake:
            state.advance(self._grads.missing(state.flat))
        if self._rule.counts_in_groups:
            for group in self._groups:
                group["step"] = group.get("step", 0) + 1

    def named_grads(self) -> list[tuple[str, Tensor | None]]:
        """Return (name, gradient on this rank) of every parameter, in order of registration."""
        members = [
            (slot.param, spec.name, param.grad)
            for state in self._flats
            for slot, spec, param in zip(state.flat.slots, state.specs, state.params, strict=True)
        ]
        return [(name, grad) for _, name, grad in sorted(members, key=lambda member: member[0])]

    def _scales(self, coefficient: Tensor | None, max_norm: float | None) -> dict[int, Scale]:
        """Return for each flat the factor from summed to clipped mean gradient; its sign, too.

        Clipping per tensor is left to _scale().
        """
        clips = {state.flat.index: self._rule.clip(self._group(state)) for state in self._awake}
        shared = [clip for clip in clips.values() if clip is not None and clip.scope != "tensor"]
        squares = self.square_norms() if shared or max_norm is not None else None
        if max_norm is not None and squares is not None:
            coefficient = _factor(Clip(max_norm, "global", eps=1e-6), squares.sum(), coefficient)
        self._sum_tensors(clips, coefficient)
        scales: dict[int, Scale] = {}
        for index, clip in clips.items():
            factor = coefficient
            if clip is not None and squares is not None and clip.scope != "tensor":
                factor = _factor(clip, squares[self._peers(index, clip)].sum(), coefficient)
            mean: Scale = self._grads.scale(index)
            if factor is not None:
                mean = factor if mean is None else factor * mean
            scales[index] = ascending(mean, self._group(self._flats[index]))
        return scales

    def _peers(self, index: int, clip: Clip) -> slice | list[int]:
        """Return the flats whose norm clips flat ``index``."""
        if clip.scope == "global":
            return slice(None)
        if clip.scope == "group":
            group = self._flats[index].flat.group
            return [s.flat.index for s in self._awake if s.flat.group == group]
        key = (self._flats[index].flat.group, self._flats[index].flat.dtype)
        return [s.flat.index for s in self._awake if (s.flat.group, s.flat.dtype) == key]

    def _sum_tensors(self, clips: Mapping[int, Clip | None], coefficient: Tensor | None) -> None:
        """Note the norm of every tensor that is clipped by its own. One all-reduce, if any is."""
        clipped = [s for s in self._awake if (c := clips[s.flat.index]) and c.scope == "tensor"]
        if clipped != self._clipped:
            self._clipped = clipped
            self._norms = self._new_sums(clipped, num_sums=1)
        if self._norms is None:
            return
        self._grads.retain()
        for bucket, parts in self._grads.reduced():
            rows = self._norms.rows(bucket)
            if rows is not None:
                self._kernels.square_sum(self._grads.scale(bucket.flat), rows[0], parts)
        squares = self._norms.per_param()
        self._comm.all_reduce(squares.view(-1)).wait()
        norms = squares[0].sqrt()
        self._norms.spread(norms if coefficient is None else norms * coefficient)

    def _scale(self, scales: Mapping[int, Scale], bucket: Bucket) -> Scale:
        """Return the factor for ``bucket``'s shard, of each block where tensors are clipped."""
        scale = scales[bucket.flat]
        norms = None if self._norms is None else self._norms.ratio(bucket)
        clip = None if norms is None else self._rule.clip(self._group(self._flats[bucket.flat]))
        if norms is None or clip is None:
            return scale
        factor = (clip.max_norm / (norms + clip.eps)).clamp(max=1.0)[:, None]
        return factor if scale is None else factor * scale

    def _new_sums(self, flats: Sequence[FlatState], num_sums: int) -> BlockSums | None:
        num_params = sum(len(state.params) for state in self._flats)
        return BlockSums(flats, num_sums=num_sums, num_params=num_params) if flats else None

    def _group(self, state: FlatState) -> Mapping[str, Any]:
        return self._groups[state.flat.group]

    def _spans(self, state: FlatState, bucket: Bucket, parts: Parts) -> list[Span]:
        idle = self._grads.idle(bucket, parts)
        return state.spans(bucket, self._grads.missing(state.flat), idle)

    def _calls(self, state: FlatState, bucket: Bucket, spans: list[Span]) -> Iterator[Call]:
        """Yield (flags, scalars, span, states) of each kernel call on ``bucket``."""
        group, policy = self._group(state), state.flat.policy
        names = self._rule.state_names(group)
        tensors = [state.states[name].segment(bucket) for name in names]
        flags = self._rule.flags(group, policy)
        for span in spans:
            yield flags, self._rule.scalars(group, policy, span.step), span, tensors

    def _elementwise(self, scales: dict[int, Scale]) -> None:
        for bucket, parts in self._grads.reduced():
            state = self._flats[bucket.flat]
            master, low = state.tensors(bucket)
            spans = self._spans(state, bucket, parts)
            scale = scales[bucket.flat]
            for flags, h, span, states in self._calls(state, bucket, spans):
                tensors = (master, low, *states)
                self._kernels.elementwise(flags, h, scale, span, parts, tensors)
            self._gather.start(state.params_buffer, bucket)

    def _by_norms(self, rule: NormRule, scales: dict[int, Scale]) -> None:
        sums = self._block_sums(rule)
        all_spans: dict[int, list[Span]] = {}
        for bucket, parts in self._grads.reduced():
            state = self._flats[bucket.flat]
            master, low = state.tensors(bucket)
            spans = all_spans[bucket.index] = self._spans(state, bucket, parts)
            rows = None if sums is None else sums.rows(bucket)
            scale = self._scale(scales, bucket)
            for flags, h, span, states in self._calls(state, bucket, spans):
                tensors = (rows, master, low, *states)
                self._kernels.direction(flags, h, scale, span, parts, tensors)
        if sums is not None:
            totals = sums.per_param()
            self._comm.all_reduce(totals.view(-1)).wait()
            self.ratio = rule.ratio(totals)
            sums.spread(self.ratio)
        for state in self._awake:
            for bucket in state.flat.buckets:
                master, low = state.tensors(bucket)
                ratio = None if sums is None else sums.ratio(bucket)
                for flags, h, span, states in self._calls(state, bucket, all_spans[bucket.index]):
                    self._kernels.apply(flags, h, span, (ratio, master, low, *states))
                self._gather.start(state.params_buffer, bucket)

    def _by_rows(self, rule: RowRule, scales: dict[int, Scale]) -> None:
        if any(rule.keeps_gradient(self._group(state)) for state in self._awake):
            self._grads.retain()
        sums = self._cleared_row_sums(rule)
        all_spans: dict[int, list[Span]] = {}
        kept: dict[int, Parts] = {}
        for bucket, parts in self._grads.reduced():
            state = self._flats[bucket.flat]
            master, low = state.tensors(bucket)
            spans = all_spans[bucket.index] = self._spans(state, bucket, parts)
            if rule.keeps_gradient(self._group(state)):
                kept[bucket.index] = parts
            products = sums.products(bucket)
            for flags, h, span, states in self._calls(state, bucket, spans):
                tensors = (products, master, low, *states)
                self._kernels.row_direction(flags, h, scales[bucket.flat], span, parts, tensors)
            if products is not None:
                sums.add(state.fragments[bucket.index], products)
        if sums.totals.numel():
            self._comm.all_reduce(sums.totals.view(-1)).wait()
        for state in self._awake:
            own = sums.of_flat(state.flat.index)
            factors = None if own is None else rule.factors(self._group(state), *own)
            scale = scales[state.flat.index]
            for bucket in state.flat.buckets:
                master, low = state.tensors(bucket)
                fragments, spread = state.fragments[bucket.index], None
                if factors is not None:
                    spread = sums.spread(bucket, fragments, factors, rule.neutral)
                for flags, h, span, states in self._calls(state, bucket, all_spans[bucket.index]):
                    tensors, grad = (spread, master, low, *states), kept.get(bucket.index, ())
                    self._kernels.row_apply(flags, h, scale, span, grad, tensors)
                self._gather.start(state.params_buffer, bucket)

    def _cleared_row_sums(self, rule: RowRule) -> RowSums:
        if self._row_sums is None:
            self._row_sums = RowSums(self._awake, num_sums=rule.num_sums)
        self._row_sums.clear()
        return self._row_sums

    def _block_sums(self, rule: NormRule) -> BlockSums | None:
        """Return cleared sums for the flats whose ratios are needed now; None if there are none."""
        adapted = [s for s in self._awake if rule.adapts(self._group(s), s.flat.policy)]
        if adapted != self._adapted:
            self._adapted = adapted
            self._sums = self._new_sums(adapted, rule.num_sums)
        if self._sums is not None:
            self._sums.clear()
        return self._sums


def _factor(clip: Clip, square: Tensor, coefficient: Tensor | None) -> Tensor:
    """Return what scales a gradient of squared norm ``square``, by ``coefficient`` and ``clip``."""
    norm = square.sqrt() if coefficient is None else square.sqrt() * coefficient
    own = (clip.max_norm / (norm + clip.eps)).clamp(max=1.0)
    return own if coefficient is None else own * coefficient
