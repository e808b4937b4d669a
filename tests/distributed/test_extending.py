"""Room for what later stages will need, without touching a file of the package.

Each is a double, as small as it can be: a communicator of two axes, a rule over whole matrices.
Shards that are no flat buffers are those of DeepSpeed's partitions and of compare_lamb_variants(),
which have tests of their own; so have buckets that leave under backward.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardfuse import ShardedAdam, ShardedOptimizer
from shardfuse.comm import Communicator, communicator_for
from shardfuse.comm.base import Done, PartsHandle, Progress
from shardfuse.engine import reductions
from shardfuse.engine.units import Shards, Unit
from shardfuse.rules.base import (
    Group,
    ReducingRule,
    Settings,
    check_at_least_zero,
)
from tests.support.harness import run_procs, run_threads
from tests.support.models import MIXED, ParamSet, rank_grads
from tests.support.runs import assert_bitwise

CPU = torch.device("cpu")


class TwoAxes:
    """Shards over one group, adds up over that and another."""

    def __init__(self, shard: Communicator, replicate: Communicator) -> None:
        self._shard = shard
        self._replicate = replicate
        self.rank, self.world_size = shard.rank, shard.world_size
        self.num_summed = shard.world_size * replicate.world_size
        self.staging_nbytes = 0
        self.progress: Progress = "when waited for"
        self.epoch = 0

    def call(self, name: str) -> AbstractContextManager[None]:
        return self._shard.call(name)

    def declare(self, lines: Sequence[str], *, is_new: bool = False) -> None:
        self._shard.declare(lines, is_new=is_new)

    def tell(self, topic: str, text: str) -> None:
        self._shard.tell(topic, text)

    def told(self, topic: str) -> list[str | None]:
        return self._shard.told(topic)

    def reduce_scatter(
        self,
        input: Tensor,
        into: Tensor | None = None,
        *,
        slot: int = 0,
        label: str | None = None,
    ) -> PartsHandle:
        parts = self._shard.reduce_scatter(input).wait()
        total = functools.reduce(torch.add, parts).clone()  # -0.0 stays -0.0, not so in sum()
        self._replicate.all_reduce(total).wait()
        return Done((total if into is None else into.copy_(total),))

    def all_gather(self, output: Tensor, input: Tensor, *, label: str | None = None) -> Any:
        return self._shard.all_gather(output, input, label=label)

    def expect(self, kind: Any, tensor: Tensor, *, label: str, slot: int = 0) -> None:
        pass

    def all_reduce(self, tensor: Tensor, op: Any = "sum") -> Any:
        return self._shard.all_reduce(tensor, op)

    def broadcast(self, tensor: Tensor, src: int = 0) -> Any:
        self._shard.broadcast(tensor, src).wait()
        return self._replicate.broadcast(tensor, src)


def train_on_axes(has_two: bool) -> tuple[list[Tensor], int]:
    """Train on four ranks that shard over two of them, or over all."""
    process_group: Any = None
    if has_two:
        groups = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3], [0, 2], [1, 3])]
        rank = dist.get_rank()
        process_group = TwoAxes(
            communicator_for(groups[rank // 2], CPU, "pairwise"),
            communicator_for(groups[2 + rank % 2], CPU, "pairwise"),
        )
    params = ParamSet(MIXED, overrides=({}, {"weight_decay": 0.25}))
    options = {"sharding": {"kernel": "eager", "process_group": process_group}}
    optimizer = ShardedAdam(params.groups(), lr=0.1, **options)
    for step in range(3):
        params.assign(rank_grads("integers", 4, dist.get_rank(), step, MIXED))
        optimizer.step()
    return params.values(), optimizer.communicator.world_size


def test_a_communicator_of_two_axes() -> None:
    """The world that shards need not be the world that averages."""
    expected = run_procs(4, train_on_axes, False)[0][0]
    for values, world_size in run_procs(4, train_on_axes, True):
        assert world_size == 2
        assert_bitwise(values, expected)


class Rate(NamedTuple):
    """What MatrixRule's math takes."""

    lr: float


class MatrixRule(ReducingRule):
    """p -= lr * (the orthogonal factor of m), m += g: whole matrices are needed."""

    grain = "tensor"
    num_sums = 1

    def check_values(self, group: Group) -> None:
        check_at_least_zero(group, "lr", "Invalid learning rate: {}")

    def state_names(self, group: Group) -> tuple[str, ...]:
        return ("momentum",)

    def settings(self, group: Group, policy: str, step: int) -> Settings:
        return Settings(None, Rate(float(group["lr"])))

    def moments(self, flags: Any, h: Rate, p: Tensor, g: Tensor, *state: Tensor) -> None:
        state[0].add_(g)

    def direction(self, flags: Any, h: Rate, p: Tensor, g: Any, *state: Tensor) -> Tensor:
        return state[0]

    def products(self, p: Tensor, g: Tensor, u: Tensor) -> tuple[Tensor, ...]:
        return (u,)

    def apply(self, flags: Any, h: Rate, p: Tensor, u: Tensor, factors: Any) -> None:
        p.sub_(factors[0] * h.lr)


class WholeMatrices:
    """Brings every matrix to every rank, as the sum of parts that do not overlap."""

    def __init__(self, rule: MatrixRule, shards: Shards) -> None:
        self._specs = {n: spec for t in shards.cohorts for n, spec in shards.params(t.number)}
        self._whole = {n: torch.zeros(spec.numel) for n, spec in self._specs.items()}

    def begin(self) -> None:
        for whole in self._whole.values():
            whole.zero_()

    def room(self, unit: Unit) -> Tensor:
        return torch.zeros(1, unit.numel)

    def collect(self, unit: Unit, room: Tensor | None) -> None:
        assert room is not None
        for f in unit.fragments:
            part = room[0, f.shard_start : f.shard_start + f.numel]
            self._whole[f.param][f.param_start : f.param_start + f.numel] = part

    def totals(self) -> Tensor:
        return torch.cat(list(self._whole.values()))

    def finish(self, totals: Tensor) -> None:
        parts = totals.split([whole.numel() for whole in self._whole.values()])
        for number, part in zip(self._whole, parts, strict=True):
            self._whole[number] = orthogonal(part.view(self._specs[number].shape)).flatten()

    def factors(self, unit: Unit) -> Tensor:
        spread = torch.zeros(1, unit.numel)
        for f in unit.fragments:
            part = self._whole[f.param][f.param_start : f.param_start + f.numel]
            spread[0, f.shard_start : f.shard_start + f.numel] = part
        return spread


def orthogonal(matrix: Tensor) -> Tensor:
    """Return U V^T of the singular value decomposition."""
    u, _, v = torch.linalg.svd(matrix.double(), full_matrices=False)
    return (u @ v).float()


class MatrixOptimizer(ShardedOptimizer):
    """MatrixRule, sharded."""

    def __init__(self, params: Any, lr: float, sharding: Any = None) -> None:
        super().__init__(params, {"lr": lr}, MatrixRule, sharding)


def matrices() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(40, 30), (25, 60), (7, 7)]
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]


def train_matrices() -> list[Tensor]:
    params = matrices()
    optimizer = MatrixOptimizer(params, 0.1, {"bucket_cap_mb": 0.004, "kernel": "eager"})
    for step in range(3):
        for param in params:
            value = torch.arange(param.numel()).reshape(param.shape) * (step + 3) % 11
            param.grad = value.float() + dist.get_rank()
        optimizer.step()
    return [param.detach().clone() for param in params]


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_rule_over_whole_matrices(world_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A grain is a rule class and an entry of REDUCTIONS; the driver stays as it is."""
    monkeypatch.setitem(reductions.REDUCTIONS, "tensor", WholeMatrices)
    expected = matrices()
    momenta = [torch.zeros_like(param) for param in expected]
    for step in range(3):
        for param, momentum in zip(expected, momenta, strict=True):
            value = torch.arange(param.numel()).reshape(param.shape) * (step + 3) % 11
            momentum += value.float() + (world_size - 1) / 2
            param.data -= 0.1 * orthogonal(momentum)
    for values in run_threads(world_size, train_matrices):
        for value, param in zip(values, expected, strict=True):
            torch.testing.assert_close(value, param.detach(), rtol=1e-4, atol=1e-5)
