"""PartitionShards: a shard provider over one flat partition with an external layout.

DeepSpeed, say, cuts tensors at any element, so the partition has no blocks of shardfuse's layout. A
slice is the part of one tensor in the partition. The driver runs it as rows of BLOCK elements and
one shorter row, its tail.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardfuse.engine.units import (
    BlockMap,
    ParamRows,
    ParamSet,
    ShardProvider,
    UpdateRange,
    UpdateUnit,
)
from shardfuse.layout import BLOCK, Fragment, ParamSpec, dense_stride
from shardfuse.rules import MatrixRule, UpdateRule


@dataclass(frozen=True, slots=True)
class PartitionSlice:
    """Elements [start, start + numel) of a partition, all of one parameter."""

    param: int  # position among the parameters of the group
    start: int
    numel: int
    policy: str
    param_start: int = 0  # elements of the parameter before it

    @property
    def elements(self) -> slice:
        """Their range in the partition."""
        return slice(self.start, self.start + self.numel)


class GroupLayout(NamedTuple):
    """Which rank has which elements of a group, for rules that need whole parameters."""

    specs: Sequence[ParamSpec]
    """Of every parameter of the group."""
    rank: int
    slices_of: Callable[[int], Sequence[PartitionSlice]]
    """Returns the slices of a rank's partition, in order."""


class PartitionShards(ShardProvider):
    """Units are the slices' blocks and tails. The group and step are set per step.

    Args:
        rule: names the states.
        flat: the partition, (numel,) fp32 or fp64; its ``grad`` is the mean gradient.
        slices: the tensors in it, in order; padding is in none.
        policies: the policy of every parameter of the group, on this rank or not.
        group: hyper-parameters until set_step().
        layout: all ranks' parts, for a MatrixRule.
        global_square: returns the current squared norm () of the gradients of all groups.
    """

    def __init__(
        self,
        rule: UpdateRule,
        flat: Tensor,
        slices: Sequence[PartitionSlice],
        *,
        policies: Sequence[str],
        group: Mapping[str, Any] = MappingProxyType({}),
        layout: GroupLayout | None = None,
        global_square: Callable[[], Tensor] | None = None,
    ) -> None:
        self._rule = rule
        self._flat = flat
        self._layout = layout
        self._global_square = global_square
        self._num_params = len(policies)
        self._policies = sorted(set(policies))
        is_by_element = rule.granularity == "element"
        if isinstance(rule, MatrixRule):
            is_by_element = not rule.takes_matrices(group)
        if is_by_element and len(self._policies) == 1:
            # Nothing depends on where tensors begin.
            slices = [PartitionSlice(0, 0, flat.numel(), policies[0])]
        self._cuts = [cut for whole in slices for cut in _cut(whole)]
        self._group = group
        self._states: Sequence[Tensor] = ()
        self._step = 0

    def set_step(self, group: Mapping[str, Any], states: Sequence[Tensor], step: int) -> None:
        """Set the inputs of the next update.

        Args:
            group: hyper-parameters.
            states: the rule's states, each (numel,), in the order of its names.
            step: number of the update, from 1.
        """
        self._group, self._states, self._step = group, states, step

    @property
    def device(self) -> torch.device:
        return self._flat.device

    @property
    def param_sets(self) -> Sequence[ParamSet]:
        """The group, once for each policy in it."""
        dtype = str(self._flat.dtype)
        policies = enumerate(self._policies)
        return [
            ParamSet(number, self._group, policy, dtype, step=self._step)
            for number, policy in policies
        ]

    def gradients(self) -> Iterator[UpdateUnit]:
        assert self._flat.grad is not None
        for index, cut in enumerate(self._cuts):
            row = BLOCK if cut.numel % BLOCK == 0 else cut.numel
            whole = UpdateRange(0, cut.numel, self._policies.index(cut.policy), self._step)
            grad = (self._flat.grad[cut.elements],)
            yield UpdateUnit(index, cut.numel, row, grad, [whole])

    def checkout(self, unit: UpdateUnit) -> None:
        elements = self._cuts[unit.index].elements
        unit.p = self._flat.detach()[elements]
        names = self._rule.state_names(self._group)
        pairs = zip(names, self._states, strict=True)
        unit.states = {name: state[elements] for name, state in pairs}

    def commit(self, unit: UpdateUnit) -> None:
        """Do nothing: the external backend gathers the partition."""

    def increment_step(self) -> None:
        """Do nothing: the external backend counts the steps."""

    def keep_reduced(self) -> None:
        """Do nothing: the gradients stay in ``flat.grad``."""

    def keep_all_reduced(self) -> None:
        """Do nothing: the gradients stay in ``flat.grad``."""

    def parts_of(self, rank: int, params: Collection[int]) -> Sequence[Fragment]:
        assert self._layout is not None
        is_own = rank == self._layout.rank
        cuts = [cut for whole in self._layout.slices_of(rank) for cut in _cut(whole)]
        return [
            Fragment(cut.param, index if is_own else -1, cut.param_start, 0, cut.numel)
            for index, cut in enumerate(cuts)
            if cut.param in params
        ]

    def global_square(self) -> Tensor | None:
        """Return the squared norm () of all groups' gradients: more than this partition has."""
        clip = self._rule.clip(self._group)
        if self._global_square is None or clip is None or clip.scope != "global":
            return None
        return self._global_square().to(self._flat.device)

    def blocks(self, param_sets: Sequence[int]) -> BlockMap:
        """Return the blocks of the cuts, a tail being one."""
        owners: list[tuple[int, int, int]] = []
        extents: dict[int, tuple[int, int]] = {}
        num_blocks = 0
        for index, cut in enumerate(self._cuts):
            if self._policies.index(cut.policy) in param_sets:
                stop = num_blocks + -(-cut.numel // BLOCK)
                extents[index] = (num_blocks, stop)
                owners.append((cut.param, num_blocks, stop))
                num_blocks = stop
        return BlockMap(owners, extents, num_blocks, self._num_params)

    def counted(self, columns: str) -> Tensor | None:
        return None

    def params(self, param_set: int) -> Sequence[tuple[int, ParamSpec]]:
        assert self._layout is not None
        policy = self._policies[param_set]
        return [
            (number, replace(spec, stride=_row_major(spec.shape)))
            for number, spec in enumerate(self._layout.specs)
            if spec.policy == policy
        ]

    def rows(self, param: int) -> ParamRows:
        """Raise NotImplementedError: the rows of a slice are not known."""
        raise NotImplementedError("Sums over rows are not supported over foreign partitions.")


def _row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the stride by which a flat partition holds a parameter, whatever its own was."""
    return dense_stride(shape, torch.empty(tuple(shape), device="meta").stride())


def _cut(whole: PartitionSlice) -> Iterator[PartitionSlice]:
    """Yield the full blocks of a slice, and its tail."""
    tail = whole.numel % BLOCK
    if whole.numel > tail:
        yield replace(whole, numel=whole.numel - tail)
    if tail:
        before = whole.numel - tail
        start, param_start = whole.start + before, whole.param_start + before
        yield replace(whole, start=start, numel=tail, param_start=param_start)
