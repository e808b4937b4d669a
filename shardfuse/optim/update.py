"""One step over the shards: clip factors, spans, kernels, and the two small all-reduces of LAMB."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shardfuse.comm import Communicator
from shardfuse.layout import BLOCK, Bucket
from shardfuse.optim.flat_state import FlatState
from shardfuse.optim.kernels import Kernels, Span
from shardfuse.optim.kernels.passes import Scale
from shardfuse.optim.norms import BlockSums
from shardfuse.optim.rules import Clip, ElementwiseRule, NormRule
from shardfuse.presynced import PresyncedGrads
from shardfuse.scaling import agree_on_step
from shardfuse.sync import GradSync, ParamSync

Rule = ElementwiseRule | NormRule
Call = tuple[Any, tuple[float, ...], Span, list[Tensor]]


class Updater:
    """Runs a rule over the flats that have gradients.

    Args:
        rule: the math.
        groups: the optimizer's own ``param_groups``, read at every step.
        flats: all flats, indexed as in the layout; dormant ones are those ``grads`` does not have.
        comm, grads, gather: the ranks, and the two directions of data.
        kernels: how the math is run.
    """

    def __init__(
        self,
        rule: Rule,
        groups: Sequence[Mapping[str, Any]],
        flats: Sequence[FlatState],
        *,
        comm: Communicator,
        grads: GradSync | PresyncedGrads,
        gather: ParamSync,
        kernels: Kernels,
    ) -> None:
        self._rule = rule
        self._groups = groups
        self._flats = flats
        self._awake = [state for state in flats if grads.has(state.flat)]
        self._comm = comm
        self._grads = grads
        self._gather = gather
        self._kernels = kernels
        self._adapted: list[FlatState] = []
        self._sums: BlockSums | None = None
        self.ratio: Tensor | None = None  # (num_params,), of the last step; 1 where none was taken

    def square_norms(self) -> Tensor:
        """Return the squared norm of each flat's mean gradient over all ranks, (num_flats,) fp32.

        Reduces the gradients and keeps them reduced. One all-reduce.
        """
        self._grads.retain()
        device = self._flats[0].device if self._flats else torch.device("cpu")
        squares = torch.zeros(max(len(self._flats), 1), dtype=torch.float32, device=device)
        for bucket, shard in self._grads.reduced():
            blocks = torch.empty(len(shard) // BLOCK, dtype=torch.float32, device=device)
            self._kernels.square_sum(self._grads.scale(bucket.flat), blocks, shard)
            squares[bucket.flat] += blocks.sum()
        self._comm.all_reduce(squares).wait()
        return squares

    def run(
        self, coefficient: Tensor | None, found_inf: Tensor | None, grad_scale: Tensor | None
    ) -> None:
        """Update states and parameters; gathering of the parameters is left in flight.

        Args:
            coefficient: () scales the mean gradient, on top of the rule's own clipping.
            found_inf, grad_scale: see [Note: gradient scalers] in scaling.py; where any rank found
                a non-finite gradient, nothing is changed.
        """
        scaled = agree_on_step(self._comm, found_inf, grad_scale)
        if scaled.skip:
            return
        if scaled.inverse is not None and scaled.is_equal:
            coefficient = scaled.inverse if coefficient is None else coefficient * scaled.inverse
        elif scaled.inverse is not None:
            self._grads.multiply(scaled.inverse)
        scales = self._scales(coefficient)
        if isinstance(self._rule, NormRule):
            self._by_norms(self._rule, scales)
        else:
            self._elementwise(scales)
        for state in self._awake:
            state.advance(self._grads.missing(state.flat))

    def _scales(self, coefficient: Tensor | None) -> dict[int, Scale]:
        """Return for each flat the factor from summed to clipped mean gradient."""
        clips = {state.flat.index: self._rule.clip(self._group(state)) for state in self._awake}
        squares = self.square_norms() if any(clips.values()) else None
        scales: dict[int, Scale] = {}
        for index, clip in clips.items():
            factor = coefficient
            if clip is not None and squares is not None:
                square = squares[self._peers(index, clip)].sum()
                norm = square.sqrt() if coefficient is None else square.sqrt() * coefficient
                own = (clip.max_norm / (norm + clip.eps)).clamp(max=1.0)
                factor = own if coefficient is None else own * coefficient
            mean = self._grads.scale(index)
            if factor is None:
                scales[index] = mean
            else:
                scales[index] = factor if mean is None else factor * mean
        return scales

    def _peers(self, index: int, clip: Clip) -> slice | list[int]:
        """Return the flats whose norm clips flat ``index``."""
        if clip.scope == "global":
            return slice(None)
        key = (self._flats[index].flat.group, self._flats[index].flat.dtype)
        return [s.flat.index for s in self._awake if (s.flat.group, s.flat.dtype) == key]

    def _group(self, state: FlatState) -> Mapping[str, Any]:
        return self._groups[state.flat.group]

    def _spans(self, state: FlatState, bucket: Bucket, shard: Tensor) -> list[Span]:
        idle = self._grads.idle(bucket, shard)
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
        for bucket, shard in self._grads.reduced():
            state = self._flats[bucket.flat]
            master, low = state.tensors(bucket)
            spans = self._spans(state, bucket, shard)
            for flags, h, span, states in self._calls(state, bucket, spans):
                tensors = (master, shard, low, *states)
                self._kernels.elementwise(flags, h, scales[bucket.flat], span, tensors)
            self._gather.start(state.params_buffer, bucket)

    def _by_norms(self, rule: NormRule, scales: dict[int, Scale]) -> None:
        sums = self._block_sums(rule)
        all_spans: dict[int, list[Span]] = {}
        for bucket, shard in self._grads.reduced():
            state = self._flats[bucket.flat]
            master, low = state.tensors(bucket)
            spans = all_spans[bucket.index] = self._spans(state, bucket, shard)
            rows = None if sums is None else sums.rows(bucket)
            for flags, h, span, states in self._calls(state, bucket, spans):
                tensors = (rows, master, shard, low, *states)
                self._kernels.direction(flags, h, scales[bucket.flat], span, tensors)
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

    def _block_sums(self, rule: NormRule) -> BlockSums | None:
        """Return cleared sums for the flats whose ratios are needed now; None if there are none."""
        adapted = [s for s in self._awake if rule.adapts(self._group(s), s.flat.policy)]
        if adapted != self._adapted:
            self._adapted = adapted
            num_params = sum(len(state.params) for state in self._flats)
            self._sums = (
                BlockSums(adapted, num_sums=rule.num_sums, num_params=num_params)
                if adapted
                else None
            )
        if self._sums is not None:
            self._sums.clear()
        return self._sums
