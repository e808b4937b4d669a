"""Gradients that are averaged already: sharded updates under DistributedDataParallel."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardfuse import ShardedAdam, ShardedBertAdam, ShardedLamb, ShardedSGD
from tests.support.counting import counted
from tests.support.harness import run_procs, run_threads
from tests.support.models import mean_grads
from tests.support.runs import Case, assert_bitwise, max_relative_error, train_unsharded

pytestmark = pytest.mark.timeout(120)

NUM_STEPS = 5

CASES: dict[str, Case] = {
    "sgd": Case(ShardedSGD, {"lr": 0.1, "momentum": 0.9}),
    "adam": Case(ShardedAdam, {"lr": 0.05, "weight_decay": 0.1}),
    "adam-bf16": Case(ShardedAdam, {"lr": 0.05}, dtype=torch.bfloat16),
    "bert": Case(ShardedBertAdam, {"lr": 0.05}),
    "lamb": Case(ShardedLamb, {"lr": 0.05, "use_global_grad_norm": True}),
}
# name: (bitwise equal to unsharded, all-reduces per step); norms are summed in another order.
EXPECTED = {
    "sgd": (True, 0),
    "adam": (True, 0),
    "adam-bf16": (True, 0),
    "bert": (False, 1),
    "lamb": (False, 2),
}


def train_presynced(case: Case) -> tuple[list[Tensor], Counter[str], int]:
    """Give every rank the mean gradient; return values, collectives of the last step, buckets."""
    params = case.param_set()
    sharding: dict[str, Any] = {"kernel": "eager", "bucket_cap_mb": 0.04}
    sharding |= {"grads_are_reduced": True, "process_group": counted()}
    optimizer = case.build(params, sharding)
    calls: list[Any] = optimizer.communicator.calls
    for step in range(NUM_STEPS):
        params.assign(mean_grads("integers", dist.get_world_size(), step, case.entries))
        before = [None if p.grad is None else p.grad.clone() for p in params.params]
        calls.clear()
        optimizer.step()
        for param, grad in zip(params.params, before, strict=True):
            assert (param.grad is None) == (grad is None)
            assert grad is None or torch.equal(param.grad, grad)
    num_buckets = sum(len(flat.buckets) for flat in optimizer.layout.flats if not flat.frozen)
    return params.values(), Counter(call.op for call in calls), num_buckets


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("name", CASES)
def test_equals_unsharded_without_reducing(
    name: str, world_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mean gradient is used as it is: no reduce-scatter, and p.grad stays untouched."""
    case = CASES[name]
    is_bitwise, num_all_reduces = EXPECTED[name]
    expected = train_unsharded(case, "integers", NUM_STEPS, world_size)
    for values, counts, num_buckets in run_threads(world_size, train_presynced, case):
        assert counts == Counter(all_gather=num_buckets, all_reduce=num_all_reduces)
        if is_bitwise:
            assert_bitwise(values, expected)
        else:
            start = case.param_set().values()
            assert max_relative_error(values, expected, start) < 1e-6


def train_under_ddp(under_ddp: bool, bucket_view: bool) -> dict[str, Tensor]:
    """Train three steps of two micro-batches, one of them under no_sync()."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(60, 90), nn.LayerNorm(90), nn.Linear(90, 40))
    wrapped: Any = model
    if under_ddp:
        wrapped = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=bucket_view)
    optimizer = ShardedLamb(
        model.named_parameters(),
        lr=0.05,
        weight_decay=0.1,
        variant="apex",
        use_global_grad_norm=True,
        sharding={"grads_are_reduced": under_ddp, "bucket_cap_mb": 0.02},
    )
    owner = wrapped if under_ddp else optimizer
    for step in range(3):
        inputs = torch.randn(2, 4, 60, generator=torch.Generator().manual_seed(step))
        inputs = inputs + dist.get_rank()
        with owner.no_sync():
            wrapped(inputs[0]).square().mean().backward()
        wrapped(inputs[1]).square().mean().backward()
        optimizer.clip_grad_norm(0.5)
        optimizer.step()
        optimizer.zero_grad()
    return {name: param.detach().clone() for name, param in model.named_parameters()}


@pytest.mark.parametrize("bucket_view", [False, True])
def test_lamb_under_ddp_equals_lamb_alone(bucket_view: bool) -> None:
    """Two gloo ranks: DDP averages and we shard, or we do both; only the sum's scaling differs."""
    alone = run_procs(2, train_under_ddp, False, False)
    under = run_procs(2, train_under_ddp, True, bucket_view)
    for name, value in alone[0].items():
        assert torch.equal(under[0][name], under[1][name])
        torch.testing.assert_close(under[0][name], value, rtol=1e-6, atol=1e-7, msg=name)


def clip_then_change() -> None:
    """Change the gradients between clipping and stepping."""
    param = nn.Parameter(torch.zeros(3000))
    optimizer = ShardedSGD([param], 1.0, sharding={"grads_are_reduced": True})
    param.grad = torch.ones(3000)
    optimizer.clip_grad_norm(1.0)
    param.grad.mul_(2)
    with pytest.raises(RuntimeError, match="Gradients changed between clip_grad_norm"):
        optimizer.step()
    optimizer.step()
    assert torch.equal(param.detach(), torch.full((3000,), -2.0))


def test_change_after_clipping_is_refused() -> None:
    """A norm of other gradients is not applied; nothing is lost by the error."""
    run_threads(2, clip_then_change)
