"""Room for what later stages will need, without touching a file of the package.

A double, as small as it can be: a rule over whole matrices. Shards in other memory than flat
buffers are those of DeepSpeed's partitions and of compare_lamb_variants(), which have tests of
their own; so have buckets that leave under backward, and meshes.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardfuse import ShardedOptimizer
from shardfuse.engine import step as driver
from shardfuse.engine.units import ShardProvider, UpdateUnit
from shardfuse.rules.base import (
    Group,
    ReducingRule,
    Settings,
    check_at_least_zero,
)
from tests.support.harness import run_threads
from tests.support.placing import device_type

CPU = torch.device(device_type())


class Rate(NamedTuple):
    """What MatrixRule's math takes."""

    lr: float


class MatrixRule(ReducingRule):
    """p -= lr * (the orthogonal factor of m), m += g: whole matrices are needed."""

    granularity = "tensor"
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

    def __init__(self, rule: MatrixRule, shards: ShardProvider) -> None:
        self._specs = {n: spec for t in shards.param_sets for n, spec in shards.params(t.number)}
        self._whole = {n: torch.zeros(spec.numel) for n, spec in self._specs.items()}

    def begin(self) -> None:
        for whole in self._whole.values():
            whole.zero_()

    def takes(self, param_set: int) -> bool:
        return True

    def out(self, unit: UpdateUnit) -> Tensor:
        return torch.zeros(1, unit.numel)

    def collect(self, unit: UpdateUnit, out: Tensor | None) -> None:
        assert out is not None
        for f in unit.fragments:
            part = out[0, f.shard_start : f.shard_start + f.numel]
            self._whole[f.param][f.param_start : f.param_start + f.numel] = part

    def totals(self) -> Tensor:
        return torch.cat(list(self._whole.values()))

    def finish(self, totals: Tensor) -> None:
        parts = totals.split([whole.numel() for whole in self._whole.values()])
        for number, part in zip(self._whole, parts, strict=True):
            self._whole[number] = orthogonal(part.view(self._specs[number].shape)).flatten()

    def factors(self, unit: UpdateUnit) -> Tensor:
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
    """A granularity is a rule class and an entry of REDUCTIONS; the driver stays as it is."""
    monkeypatch.setitem(driver.REDUCTIONS, "tensor", WholeMatrices)
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
