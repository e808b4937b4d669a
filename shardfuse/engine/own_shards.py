"""OwnShards: the flat buffers of ShardedOptimizer, as the driver sees them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from shardfuse.engine.flat_state import FlatState
from shardfuse.engine.gather import ParamGatherer
from shardfuse.engine.units import BlockTable, Cohort, Shards, Unit
from shardfuse.grads.source import GradSource
from shardfuse.layout import BLOCK, Bucket, ParamSpec, round_up
from shardfuse.rules import UpdateRule
from shardfuse.scaling import ScaledStep


class OwnShards(Shards):
    """Units are buckets' shards; see Shards. A flat that ``grads`` does not have is dormant.

    Args:
        rule: names the states.
        groups: the optimizer's own ``param_groups``, read at every step; may be set anew.
        flats: all flats, indexed as in the layout; may grow.
        grads, gather: the two directions of data.
        row: elements of a tile's row, which every slot has a multiple of.
    """

    def __init__(
        self,
        rule: UpdateRule,
        groups: Sequence[dict[str, Any]],
        flats: Sequence[FlatState],
        *,
        grads: GradSource,
        gather: ParamGatherer,
        row: int,
    ) -> None:
        self.has_updated = False  # any parameter in the last step, as far as this rank knows
        self._rule = rule
        self.groups = groups
        self._flats = flats
        self._grads = grads
        self._gather = gather
        self._row = row
        self._awake = [state for state in flats if grads.has(state.flat)]
        gather.plan(self._awake)
        self._buckets: dict[int, Bucket] = {
            bucket.index: bucket for state in self._awake for bucket in state.flat.buckets
        }

    @property
    def device(self) -> torch.device:
        return self._flats[0].device if self._flats else torch.device("cpu")

    @property
    def cohorts(self) -> Sequence[Cohort]:
        """The flats that are awake."""
        return [
            Cohort(flat.index, flat.index, self.groups[flat.group], flat.policy, flat.dtype)
            for flat in (state.flat for state in self._awake)
        ]

    def gradients(self) -> Iterator[Unit]:
        for bucket, parts in self._grads.reduced():
            fragments = self._flats[bucket.flat].fragments[bucket.index]
            row = self._row
            yield Unit(bucket.index, bucket.flat, bucket.shard_numel, row, parts, fragments)

    def open(self, unit: Unit) -> None:
        state, bucket = self._flats[unit.cohort], self._buckets[unit.index]
        unit.p, unit.low = state.codec.begin_update(bucket)
        names = self._rule.state_names(self.groups[state.flat.group])
        unit.states = tuple(state.states[name].view(bucket) for name in names)
        idle = self._grads.unused(bucket, unit.grad)
        unit.spans = state.spans(bucket, self._grads.no_local_grad(state.flat), idle)

    def close(self, unit: Unit) -> None:
        """Launch the all-gather of the bucket."""
        state = self._flats[unit.cohort]
        bucket = self._buckets[unit.index]
        state.codec.commit(bucket)
        self._gather.launch(bucket, state.params)

    def advance(self) -> None:
        """Count an update of every parameter that had one, and the step where groups have one."""
        updated = [state.advance(self._grads.no_local_grad(state.flat)) for state in self._awake]
        self.has_updated = any(updated)
        for group in self.groups if self._rule.counts_in_groups else ():
            group["step"] = group.get("step", 0) + 1

    def retain(self) -> None:
        self._grads.keep_reduced()

    def retain_at_once(self) -> None:
        self._grads.keep_all_reduced()

    def mean(self, cohort: int) -> float | None:
        return self._grads.mean_factor(cohort)

    def global_square(self) -> Tensor | None:
        return None

    def unscale(self, scaled: ScaledStep, coefficient: Tensor | None) -> Tensor | None:
        """Return ``coefficient`` with what undoes the loss scale; see [Note: gradient scalers].

        Raises:
            RuntimeError: on all ranks, where their loss scales differ and gradients were clipped
                without being unscaled.
        """
        if scaled.inverse is None:
            return coefficient
        if scaled.is_equal:
            return scaled.inverse if coefficient is None else coefficient * scaled.inverse
        self._grads.scale_before_sum(scaled.inverse)
        return coefficient

    def named_grads(self) -> list[tuple[str, Tensor | None]]:
        """Return (name, gradient on this rank) of every parameter, in order of registration."""
        shards = self._grads.overflowed
        members = [
            (slot.param, spec.name, shards.get(slot.param, param.grad))
            for state in self._flats
            for slot, spec, param in zip(state.flat.slots, state.specs, state.params, strict=True)
        ]
        return [(name, grad) for _, name, grad in sorted(members, key=lambda member: member[0])]

    def blocks(self, cohorts: Sequence[int]) -> BlockTable:
        """Return the blocks of flats, which have slots of whole ones."""
        owners: list[tuple[int, int, int]] = []
        extents: dict[int, tuple[int, int]] = {}
        num_blocks = 0
        for state in (self._flats[index] for index in cohorts):
            assert state.flat.align == BLOCK, "a block holds several parameters"
            for bucket in state.flat.buckets:
                stop = num_blocks + bucket.shard_numel // BLOCK
                extents[bucket.index] = (num_blocks, stop)
                for fragment in state.fragments[bucket.index]:
                    start = num_blocks + fragment.shard_start // BLOCK
                    length = round_up(fragment.numel, BLOCK) // BLOCK
                    owners.append((fragment.param, start, start + length))
                num_blocks = stop
        num_params = sum(len(state.params) for state in self._flats)
        return BlockTable(owners, extents, num_blocks, num_params)

    def params(self, cohort: int) -> Sequence[tuple[int, ParamSpec]]:
        state = self._flats[cohort]
        return [
            (slot.param, spec) for slot, spec in zip(state.flat.slots, state.specs, strict=True)
        ]
