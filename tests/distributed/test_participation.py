"""Which ranks have a gradient for which parameter may be anything, and change with every step."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardfuse import ShardedAdam, ShardedLamb, ShardedSGD
from tests.support.harness import run_threads
from tests.support.runs import assert_bitwise, max_relative_error

pytestmark = pytest.mark.timeout(60)

NUM_STEPS = 6
SIZES = [(1,), (1024,), (3500,), (17, 40), (), (9000,), (0,), (1025,)]


def make_params(seed: int, dtype: torch.dtype) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(s, generator=generator).to(dtype)) for s in SIZES]


def grads_of(seed: int, step: int, rank: int, world_size: int) -> list[Tensor | None]:
    """Return integer gradients, multiples of the world size, zeros among them; half are None."""
    chance = random.Random(1000 * seed + 10 * step + rank)
    generator = torch.Generator().manual_seed(1000 * seed + 10 * step + rank)
    grads: list[Tensor | None] = []
    for size in SIZES:
        grad = torch.randint(-1, 2, size, generator=generator) * float(world_size)
        grads.append(grad if chance.random() < 0.5 else None)
    return grads


def mean_of(seed: int, step: int, world_size: int) -> list[Tensor | None]:
    columns = zip(*(grads_of(seed, step, r, world_size) for r in range(world_size)), strict=True)
    means: list[Tensor | None] = []
    for column in columns:
        present = [grad for grad in column if grad is not None]
        means.append(torch.stack(present).sum(0) / world_size if present else None)
    return means


def train(
    cls: Any, options: dict[str, Any], seed: int, world_size: int, dtype: torch.dtype
) -> list[Tensor]:
    """Train on this rank, or unsharded on the mean where there is no process group."""
    params = make_params(seed, dtype)
    sharding = {"kernel": "eager", "bucket_cap_mb": random.Random(seed).choice([0.01, 0.03, 25])}
    optimizer = cls(params, **options, sharding=sharding)
    for step in range(NUM_STEPS):
        if dist.is_initialized():
            grads = grads_of(seed, step, dist.get_rank(), world_size)
        else:
            grads = mean_of(seed, step, world_size)
        for param, grad in zip(params, grads, strict=True):
            param.grad = None if grad is None else grad.to(dtype)
        optimizer.step()
    return [param.detach().clone() for param in params]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("seed", range(8))
def test_any_rank_may_lack_any_gradient(seed: int, world_size: int, dtype: torch.dtype) -> None:
    """Steps, moments and values follow the unsharded run on the mean, bit for bit."""
    for cls, options in (
        (ShardedAdam, {"lr": 0.1, "weight_decay": 0.1}),
        (ShardedSGD, {"lr": 0.1, "momentum": 0.5, "dampening": 0.5}),
    ):
        expected = train(cls, options, seed, world_size, dtype)
        for values in run_threads(world_size, train, cls, options, seed, world_size, dtype):
            assert_bitwise(values, expected)


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("seed", range(6))
def test_lamb_too(seed: int, world_size: int) -> None:
    """LAMB's norms and its step-dependent bias correction see the same parameters as unsharded."""
    options = {"lr": 0.1, "variant": "apex", "weight_decay": 0.1, "use_global_grad_norm": True}
    expected = train(ShardedLamb, options, seed, world_size, torch.float32)
    start = [param.detach() for param in make_params(seed, torch.float32)]
    ranks = run_threads(world_size, train, ShardedLamb, options, seed, world_size, torch.float32)
    for values in ranks:
        # Another order of summation in the norms.
        assert max_relative_error(values, expected, start) < 1e-6
        assert_bitwise(values, ranks[0])


def go_back_after_a_step(sharding: dict[str, Any]) -> None:
    """Of three factors the first two have gradients when a step is made; on rank 1, the first."""
    used, partly, unused = (nn.Parameter(torch.ones(1000)) for _ in range(3))
    optimizer = ShardedAdam([used, partly, unused], lr=0.1, sharding=sharding)
    stale, fresh = (used * used).sum(), (unused * unused).sum()
    (used.sum() + (partly.sum() if dist.get_rank() == 0 else 0.0)).backward()
    optimizer.step()
    assert torch.equal(used.detach(), partly.detach())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        stale.backward()
    fresh.backward()


@pytest.mark.parametrize("sharding", [{}, {"stage": 2}, {"param_sync_dtype": torch.bfloat16}])
def test_graphs_of_before_a_step_are_refused_as_by_torch(sharding: dict[str, Any]) -> None:
    """Backward took the new values of parameters for those that forward had used."""
    run_threads(2, go_back_after_a_step, sharding)


def lack_after_zeros(sharding: dict[str, Any]) -> list[float]:
    """Set gradients to zero, then to None, and have no more of one of them."""
    params = [nn.Parameter(torch.ones(numel)) for numel in (3000, 7, 700)]
    options = {"kernel": "eager", "bucket_cap_mb": 0.004, **sharding}
    optimizer = ShardedSGD(params, lr=0.5, momentum=0.5, sharding=options)
    found = []
    for step in range(3):
        for param in params if step == 0 else (params[0], params[2]):
            param.sum().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        for param in params:
            param.grad = None
        found.append(params[1].detach()[0].item())
    return found


@pytest.mark.parametrize("sharding", [{}, {"overlap_grad_sync": True}])
def test_8_bits_of_none_after_zeros(sharding: dict[str, Any]) -> None:
    """Zeros in the padding of its block made it a gradient: its momentum went on."""
    for found in run_threads(2, lack_after_zeros, {"grad_sync_bits": 8, **sharding}):
        assert found == [0.5, 0.5, 0.5]
