"""A MatrixRule in a plan: which parameters are matrices, and their exchange.

Owners and rounds are those of engine/matrices.py. The peak memory of a round is computed from the
allocations of MatrixExchange and shardfuse.rules.muon: the bf16 directions of the shard, the
buffers of a round, and the products of the largest batch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch

from shardfuse.comm.transport import SingleRank
from shardfuse.engine.matrices import MatrixExchange
from shardfuse.engine.units import ShardProvider
from shardfuse.layout import Fragment, ParamSpec, dense_stride
from shardfuse.plan.models import NamedShape
from shardfuse.rules import MatrixRule

Axis = Literal["shard", "replicate", "all"]


@dataclass(frozen=True)
class Collective:
    """All collectives of one kind that a step makes on one axis.

    Attributes:
        payload_nbytes: bytes of the full tensors, with padding.
        sent_nbytes: bytes that one rank sends; it receives as many.
    """

    kind: str
    axis: Axis
    number: int
    payload_nbytes: int
    sent_nbytes: int


@dataclass(frozen=True)
class ExchangeCost:
    """The exchange of a step.

    Attributes:
        number: all-to-alls.
        payload_nbytes: bytes of all matrices, and of all copies, there and back.
        sent_nbytes: bytes that a mean rank sends.
        peak_nbytes: most bytes of one rank, of an average shard and the largest round of any owner.
        flops: floating-point operations of the transformations, of the rank that has most.
        total_flops: of all ranks.
    """

    number: int
    payload_nbytes: int
    sent_nbytes: int
    peak_nbytes: int
    flops: int
    total_flops: int

    def collective(self, axis: Axis = "shard") -> Collective:
        """Return its line among the collectives of a step."""
        kind = "all-to-all of matrices"
        return Collective(kind, axis, self.number, self.payload_nbytes, self.sent_nbytes)


@dataclass(frozen=True)
class _PlannedParamSet:
    number: int
    group: Mapping[str, Any]
    policy: str


class GroupedShapes:
    """Parameters as an optimizer with a MatrixRule groups them.

    Args:
        build: returns the optimizer for a list of (name, parameter).
        shapes: (name, shape) of each parameter.
        dtype, device: of the parameters.
    """

    device = torch.device("cpu")

    def __init__(
        self,
        build: Callable[[Any], Any],
        shapes: Sequence[NamedShape],
        dtype: torch.dtype,
        device: str,
    ) -> None:
        empty = [
            (name, torch.nn.Parameter(_without_memory(shape, dtype))) for name, shape in shapes
        ]
        optimizer = build(empty)
        rule = optimizer._rule
        assert isinstance(rule, MatrixRule)
        self._rule, groups = rule, optimizer.param_groups
        shape_of = dict(shapes)
        self.specs = []
        sets: dict[tuple[int, str], _PlannedParamSet] = {}
        for own in optimizer.layout.specs:
            shape, group = shape_of[own.name], groups[own.group]
            policy = rule.policy(own.name, True, shape, group)
            sets.setdefault((own.group, policy), _PlannedParamSet(len(sets), group, policy))
            stride = dense_stride(shape, torch.empty(shape, device="meta").stride())
            spec = ParamSpec(
                name=own.name,
                shape=shape,
                stride=stride,
                dtype=str(dtype).removeprefix("torch."),
                device=device,
                group=own.group,
                policy=policy,
                math=own.math,
                storage=own.storage,
            )
            self.specs.append(spec)
        self.param_sets, self._kinds = list(sets.values()), list(sets)
        storages = {rule.storage(group) for group in groups if rule.takes_matrices(group)}
        self.storages = frozenset(storages)
        """Names of the states of matrices, as in ParamSpec."""

    @property
    def matrices(self) -> list[str]:
        """Names of the matrices."""
        return [spec.name for spec in self.specs if spec.storage in self.storages]

    # The provider of MatrixExchange

    def params(self, number: int) -> list[tuple[int, ParamSpec]]:
        """Return (number, spec) of the parameters of a set."""
        return [(i, spec) for i, spec in enumerate(self.specs) if spec.kind == self._kinds[number]]

    def parts_of(self, rank: int, params: Collection[int]) -> Sequence[Fragment]:
        """Return none: owners and rounds do not depend on parts."""
        return ()

    def cost(self, world_size: int, shard_numel: int, num_copies: int = 1) -> ExchangeCost | None:
        """Return the cost of the exchange; None without a matrix.

        Args:
            world_size: ranks that share the matrices.
            shard_numel: elements of one rank's shards of matrices, with padding.
            num_copies: ranks that have, send and receive each part of a matrix.
        """
        comm = SingleRank()
        comm.world_size = world_size
        rounds = MatrixExchange(self._rule, cast(ShardProvider, self), comm)._split()
        if not rounds:
            return None
        item = self._rule.wire_dtype.itemsize
        flops, most = [0] * world_size, 0
        for members in rounds:
            whole = sum(matrix.spec.numel for matrix in members)
            by_owner: dict[int, list[Any]] = {}
            for matrix in members:
                by_owner.setdefault(matrix.owner, []).append(matrix)
                steps = self.param_sets[matrix.param_set].group["ns_steps"]
                flops[matrix.owner] += 2 * steps * matrix.cost
            kept = 1 + num_copies  # whole matrices, and the parts that arrive
            of_round = max(kept * _numel(own) + _transform_numel(own) for own in by_owner.values())
            leaving = -(-whole * num_copies // world_size)
            most = max(most, min(leaving, shard_numel) + of_round)
        payload = 2 * item * num_copies * sum(_numel(members) for members in rounds)
        return ExchangeCost(
            number=2 * len(rounds),
            payload_nbytes=payload,
            sent_nbytes=round(payload * (world_size - 1) / world_size**2),
            peak_nbytes=(shard_numel + most) * item,
            flops=max(flops),
            total_flops=sum(flops),
        )


def _without_memory(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor of as many dimensions and rows, without memory."""
    return torch.empty((*shape[:-1], 0) if len(shape) > 1 else (1,), dtype=dtype)


def _numel(matrices: Sequence[Any]) -> int:
    return sum(matrix.spec.numel for matrix in matrices)


def _transform_numel(own: Sequence[Any]) -> int:
    """Return the elements beside whole matrices while the largest batch of one shape is made."""
    batches: dict[Any, list[Any]] = {}
    for matrix in own:
        batches.setdefault((matrix.param_set, matrix.spec.shape), []).append(matrix)
    found = 0
    for members in batches.values():
        small, large = sorted(members[0].shape)
        numel = _numel(members)
        copies = 2 + (len(members) > 1)  # the last and the next iterate, and the joined input
        found = max(found, copies * numel + 2 * numel * small // large)
    return found
