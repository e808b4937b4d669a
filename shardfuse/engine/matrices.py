"""MatrixExchange: parts of matrices go to the ranks that own these for a step, and results return.

Shards cut matrices anywhere, and a MatrixRule needs them whole. Every rank knows from the layout
which rank has which part, so no rank asks: an all-to-all takes the parts of each matrix to its
owner, and one more takes the transformed parts back. Owners are balanced by the cost of the
transformation, (m, n) taking about 2 max(m, n) min(m, n)^2 multiplications a step.

Matrices move in rounds, so that a rank holds at most ROUND_NBYTES of whole matrices, or one
parameter if that is larger, in each of three buffers.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from shardfuse.comm import Communicator
from shardfuse.engine.units import ShardProvider, UpdateUnit
from shardfuse.layout import Fragment, ParamSpec
from shardfuse.rules import MatrixRule

ROUND_NBYTES = 256 << 20
"""Bytes of whole matrices that a rank transforms at a time."""


@dataclass
class _Matrix:
    """A parameter that consists of one matrix or of several of one shape."""

    param: int
    spec: ParamSpec
    shape: tuple[int, int]  # of one of its matrices
    param_set: int
    owner: int = 0

    @property
    def cost(self) -> int:
        """Multiplications of one step of its transformation."""
        small, large = sorted(self.shape)
        return self.spec.numel // (small * large) * small * small * (2 * large + small)


@dataclass
class _Round:
    """Matrices that move together, and the parts of them by rank, in the order of messages."""

    own: list[_Matrix] = field(default_factory=list)
    outgoing: list[list[Fragment]] = field(default_factory=list)  # of this rank, by owner
    incoming: list[list[Fragment]] = field(default_factory=list)  # of own matrices, by rank


class MatrixExchange:
    """Between the passes of a MatrixRule: whole matrices, each transformed on one rank.

    Args:
        rule: transforms the matrices.
        shards: has the parts.
        comm: the ranks that have them.
        device: where messages and whole matrices lie; None is where the shards are.
    """

    def __init__(
        self,
        rule: MatrixRule,
        shards: ShardProvider,
        comm: Communicator,
        device: torch.device | None = None,
    ) -> None:
        self._rule = rule
        self._shards = shards
        self._comm = comm
        self._device = device or shards.device
        self._matrices: dict[int, _Matrix] = {}
        for param_set in shards.param_sets:
            if not rule.takes_matrices(param_set.group):
                continue
            shape = rule.matrix_shape(param_set.policy)
            for param, spec in shards.params(param_set.number):
                if spec.numel:
                    self._matrices[param] = _Matrix(param, spec, shape, param_set.number)
        self._sets = {matrix.param_set for matrix in self._matrices.values()}
        _balance(list(self._matrices.values()), comm.world_size)
        parts = [shards.parts_of(rank, self._matrices.keys()) for rank in range(comm.world_size)]
        self._rounds = [self._round(members, parts) for members in self._split()]
        # Those of which only other ranks have elements, too: all ranks commit units in one order.
        self._units = {fragment.bucket for own in parts for fragment in own}
        self._directions: dict[int, Tensor] = {}  # by unit, in this step

    @property
    def num_rounds(self) -> int:
        """Rounds of a step, of two all-to-alls each."""
        return len(self._rounds)

    def cost_of(self, rank: int) -> int:
        """Return the multiplications of a rank in one step of the transformation."""
        return sum(matrix.cost for matrix in self._matrices.values() if matrix.owner == rank)

    def takes(self, param_set: int) -> bool:
        """Return whether the parameters of a param_set are matrices."""
        return param_set in self._sets

    def out(self, unit: UpdateUnit) -> Tensor | None:
        """Return where the first pass writes the direction of ``unit``, (1, numel); or None."""
        if unit.index not in self._units:
            return None
        direction = torch.empty(
            1, unit.numel, dtype=self._rule.wire_dtype, device=self._shards.device
        )
        # The first pass writes the ranges alone. A parameter without a gradient here is in none,
        # and another rank may have a part of it with a gradient.
        starts = [part.start for part in unit.ranges]
        for fragment in unit.fragments:
            start = fragment.shard_start
            last = bisect.bisect_right(starts, start) - 1
            if last < 0 or start >= unit.ranges[last].stop:
                direction[:, start : start + fragment.numel].zero_()
        self._directions[unit.index] = direction
        return direction

    def value(self, unit: UpdateUnit) -> Tensor | None:
        """Return the transformed direction of ``unit``, (1, numel); call it once."""
        return self._directions.pop(unit.index, None)

    def run(self) -> None:
        """Move the parts of all matrices, transform these, and move the results. Collective."""
        groups = {param_set.number: param_set.group for param_set in self._shards.param_sets}
        for one in self._rounds:
            self._run_round(one, groups)

    def _run_round(self, one: _Round, groups: Mapping[int, Mapping[str, Any]]) -> None:
        dtype, device = self._rule.wire_dtype, self._device
        outgoing = [[self._part(fragment) for fragment in parts] for parts in one.outgoing]
        sent = [sum(part.numel() for part in parts) for parts in outgoing]
        received = [sum(fragment.numel for fragment in parts) for parts in one.incoming]
        send, receive = (
            torch.empty(sum(numels), dtype=dtype, device=device) for numels in (sent, received)
        )
        pieces = [part for parts in outgoing for part in parts]
        _copy(_split(send, [piece.numel() for piece in pieces]), pieces)
        self._comm.all_to_all(receive, send, received, sent).wait()
        whole = {m.param: torch.empty(m.spec.numel, dtype=dtype, device=device) for m in one.own}
        places = [f for parts in one.incoming for f in parts]
        slices = _split(receive, [f.numel for f in places])
        _copy([whole[f.param][f.param_start :][: f.numel] for f in places], slices)
        self._transform(one.own, whole, groups)
        _copy(slices, [whole[f.param][f.param_start :][: f.numel] for f in places])
        self._comm.all_to_all(send, receive, sent, received).wait()
        _copy(pieces, _split(send, [piece.numel() for piece in pieces]))

    def _part(self, fragment: Fragment) -> Tensor:
        """Return this rank's elements of a fragment; of a unit without a gradient, zeros."""
        direction = self._directions.get(fragment.bucket)
        if direction is None:
            return torch.zeros(
                fragment.numel, dtype=self._rule.wire_dtype, device=self._shards.device
            )
        return direction[0, fragment.shard_start :][: fragment.numel]

    def _transform(
        self,
        own: Sequence[_Matrix],
        whole: Mapping[int, Tensor],
        groups: Mapping[int, Mapping[str, Any]],
    ) -> None:
        """Transform parameters in place, those of one shape and group together."""
        alike: dict[Any, list[_Matrix]] = {}
        for matrix in own:
            # A product may round otherwise where the other dimension is adjacent in memory.
            own_layout = matrix.param if matrix.spec.stride[-1] != 1 else None
            key = (matrix.param_set, matrix.spec.shape, own_layout)
            alike.setdefault(key, []).append(matrix)
        for members in alike.values():
            spec, shape = members[0].spec, members[0].shape
            views = [whole[m.param].as_strided(spec.shape, spec.stride) for m in members]
            stacked = [view.reshape(-1, *shape) for view in views]
            batch = stacked[0] if len(stacked) == 1 else torch.cat(stacked)
            done = self._rule.transform(groups[members[0].param_set], batch)
            parts = _split(done, [len(part) for part in stacked])
            for view, part in zip(views, parts, strict=True):
                view.copy_(part.reshape(spec.shape))

    def _split(self) -> list[list[_Matrix]]:
        """Return the matrices of each round, on all ranks alike."""
        rounds: list[list[_Matrix]] = []
        at = [0] * self._comm.world_size  # the present round of each owner
        used = [0] * self._comm.world_size  # bytes of each owner in it
        for matrix in self._matrices.values():
            nbytes = matrix.spec.numel * self._rule.wire_dtype.itemsize
            owner = matrix.owner
            if used[owner] and used[owner] + nbytes > ROUND_NBYTES:
                at[owner], used[owner] = at[owner] + 1, 0
            used[owner] += nbytes
            while len(rounds) <= at[owner]:
                rounds.append([])
            rounds[at[owner]].append(matrix)
        return rounds

    def _round(self, members: Sequence[_Matrix], parts: Sequence[Sequence[Fragment]]) -> _Round:
        owner = {matrix.param: matrix.owner for matrix in members}
        world, rank = range(self._comm.world_size), self._comm.rank
        return _Round(
            own=[matrix for matrix in members if matrix.owner == rank],
            outgoing=[[f for f in parts[rank] if owner.get(f.param) == to] for to in world],
            incoming=[[f for f in parts[source] if owner.get(f.param) == rank] for source in world],
        )


def _balance(matrices: Sequence[_Matrix], world_size: int) -> None:
    """Give each matrix an owner: the costliest first, to the rank that has least."""
    loads = [0] * world_size
    for matrix in sorted(matrices, key=lambda matrix: (-matrix.cost, matrix.param)):
        matrix.owner = loads.index(min(loads))
        loads[matrix.owner] += matrix.cost


def _split(whole: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    return list(torch.split(whole, list(sizes))) if sizes else []


def _copy(into: Sequence[Tensor], out_of: Sequence[Tensor]) -> None:
    if into:
        torch._foreach_copy_(list(into), list(out_of))
