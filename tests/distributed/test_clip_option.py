"""Clipping for loops that are not ours: by an option, and by torch's own function under DDP."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp import GradScaler

from shardfuse import (
    ShardConfig,
    ShardedAdam,
    ShardedAdamP,
    ShardedAdamW,
    ShardedBertAdam,
    ShardedGradScaler,
    ShardedLamb,
    ShardedSGD,
)
from tests.support.counting import counted
from tests.support.harness import run_procs, run_threads
from tests.support.models import rank_grads
from tests.support.placing import device_type
from tests.support.runs import Case, assert_bitwise

pytestmark = pytest.mark.timeout(120)

BOUND = 0.5
CASES: dict[str, Case] = {
    "sgd": Case(ShardedSGD, {"lr": 0.1, "momentum": 0.9}),
    "adam-bf16": Case(ShardedAdam, {"lr": 0.05}, dtype=torch.bfloat16),
    "bert": Case(ShardedBertAdam, {"lr": 0.05, "e": 1.0, "max_grad_norm": 0.1}),
    "lamb": Case(
        ShardedLamb, {"lr": 0.05, "use_global_grad_norm": True, "max_grad_norm": 0.1, "eps": 1.0}
    ),
    "adamp": Case(ShardedAdamP, {"lr": 0.05}),
    "maximize": Case(ShardedSGD, {"lr": 0.1, "maximize": True}),
}


def train(case: Case, by_option: bool) -> tuple[list[Tensor], Counter[str]]:
    """Clip by the option or by the method; return values and the last step's collectives."""
    params = case.param_set()
    sharding: dict[str, Any] = {"kernel": "eager", "bucket_cap_mb": 0.04}
    sharding["process_group"] = counted()
    optimizer = case.build(params, sharding | ({"clip_grad_norm": BOUND} if by_option else {}))
    calls: list[Any] = optimizer.communicator.calls
    for step in range(4):
        params.assign(rank_grads("floats", dist.get_world_size(), dist.get_rank(), step))
        calls.clear()
        if not by_option:
            optimizer.clip_grad_norm(BOUND)
        optimizer.step()
    return params.values(), Counter(call.op for call in calls)


@pytest.mark.parametrize("name", CASES)
def test_option_is_the_method_in_every_step(name: str) -> None:
    """Bit for bit, before the rule's own clip; never more collectives."""
    case = CASES[name]
    unclipped = case.param_set().values()
    for (values, counts), (expected, allowed) in zip(
        run_threads(2, train, case, True), run_threads(2, train, case, False), strict=True
    ):
        assert_bitwise(values, expected)
        assert not torch.equal(values[0], unclipped[0])
        assert counts["reduce_scatter"] == allowed["reduce_scatter"]
        assert counts["all_reduce"] <= allowed["all_reduce"]
        assert counts["all_reduce"] >= 1


def net() -> nn.Module:
    """Return a model of the same values on every call, also of several threads at once."""
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    generator = torch.Generator().manual_seed(0)
    for param in model.parameters():
        nn.init.normal_(param, std=0.3, generator=generator)
    return model


def loss_of(model: nn.Module, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    inputs = torch.randn(4, 8, generator=generator) * (1 + 9 * dist.get_rank())
    loss: Tensor = model(inputs).square().mean()
    return loss


def train_ddp(mode: str, bucket_view: bool = False) -> list[Tensor]:
    """Train under DDP and torch's clip ("torch", "reduced"), or by the option alone."""
    model = net()
    wrapped: Any = model
    if mode != "option":
        ddp = nn.parallel.DistributedDataParallel
        wrapped = ddp(model, gradient_as_bucket_view=bucket_view)
    sharding: dict[str, Any] = (
        {"clip_grad_norm": 0.05} if mode == "option" else {"grads_are_reduced": True}
    )
    options: dict[str, Any] = {"lr": 0.1, "momentum": 0.9}
    optimizer: Any = (
        torch.optim.SGD(model.parameters(), **options)
        if mode == "torch"
        else ShardedSGD(model.parameters(), **options, sharding=sharding)
    )
    for step in range(4):
        optimizer.zero_grad()
        loss_of(wrapped, step).backward()
        if mode != "option":
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            assert norm > 0.05
        optimizer.step()
    return [param.detach().clone() for param in model.parameters()]


@pytest.mark.parametrize("bucket_view", [False, True])
def test_torchs_clip_is_right_under_ddp(bucket_view: bool) -> None:
    """There p.grad is the mean: clip_grad_norm_ sees the true norm, and step() its result."""
    expected = run_procs(2, train_ddp, "torch", bucket_view)
    actual = run_procs(2, train_ddp, "reduced", bucket_view)
    for values in actual:
        for a, b in zip(values, expected[0], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


def test_option_is_ddp_and_torchs_clip() -> None:
    """One line of configuration does what the usual loop under DDP does."""
    expected = run_procs(2, train_ddp, "torch")
    for values in run_procs(2, train_ddp, "option"):
        for a, b in zip(values, expected[0], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def train_scaled(scaler_class: Any, unscale: bool) -> list[Tensor]:
    """Train with the option under a scaler (none: unscaled); the second step overflows."""
    model = net()
    optimizer = ShardedAdamW(model.parameters(), lr=0.1, sharding={"clip_grad_norm": 0.05})
    scaler = None if scaler_class is None else scaler_class(device_type(), init_scale=8.0)
    for step in range(4):
        optimizer.zero_grad()
        loss = loss_of(model, step)
        if scaler is None:
            if step != 1:
                loss.backward()
                optimizer.step()
            continue
        scaler.scale(loss * (math.inf if step == dist.get_rank() == 1 else 1.0)).backward()
        if unscale:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    return [param.detach().clone() for param in model.parameters()]


@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.parametrize("scaler_class", [GradScaler, ShardedGradScaler])
def test_option_under_a_scaler(scaler_class: Any, unscale: bool) -> None:
    """The norm is that of the gradients without their scale; a skipped step is skipped by all."""
    expected = run_threads(2, train_scaled, None, False)
    for values in run_threads(2, train_scaled, scaler_class, unscale):
        for a, b in zip(values, expected[0], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("bound", "error"),
    [(0, ValueError), (-1.0, ValueError), (math.nan, ValueError), ("1", TypeError)],
)
def test_bound_is_validated(bound: Any, error: type[Exception]) -> None:
    """A bound out of range or of another type is refused by name."""
    with pytest.raises(error, match="clip_grad_norm"):
        ShardConfig(clip_grad_norm=bound)


def test_ranks_agree_on_the_bound() -> None:
    """A bound that one rank lacks would leave the others in its all-reduce."""

    def build() -> None:
        bound = None if dist.get_rank() else 1.0
        with pytest.raises(ValueError, match=r"clip_grad_norm=1\.0"):
            ShardedSGD(net().parameters(), 0.1, sharding={"clip_grad_norm": bound})

    run_threads(2, build)


# Who undoes a loss scale


def asks(optimizer: Any) -> bool:
    """Ask as Lightning does: lightning.fabric.plugins.precision.amp."""
    return getattr(optimizer, "_step_supports_amp_scaling", False)


def test_frameworks_may_clip_the_mean_only() -> None:
    """Where p.grad is the mean over ranks, and nowhere else; a scaler leaves overflows to us."""
    local = ShardedSGD(net().parameters(), 0.1)
    reduced = ShardedSGD(net().parameters(), 0.1, sharding={"grads_are_reduced": True})
    assert asks(local)
    assert not asks(reduced)
    assert asks(ShardedSGD)

    class Asking(GradScaler):
        def ask(self, optimizer: Any) -> bool:
            return getattr(optimizer, "_step_supports_amp_scaling", False)

    assert Asking(device_type()).ask(reduced)
    reduced._step_supports_amp_scaling = True
    assert asks(reduced)


def skip_on_one_rank(unscale: bool) -> tuple[Any, bool]:
    """Let one rank alone spoil its copy of reduced gradients, under torch's plain scaler."""
    param = nn.Parameter(torch.ones(3000))
    sharding = {"grads_are_reduced": True, "report_overflow": True}
    optimizer = ShardedSGD([("w", param)], 0.1, sharding=sharding)
    scaler = GradScaler(device_type(), init_scale=8.0)
    scaler.scale(param.sum()).backward()
    if dist.get_rank() == 1:
        assert param.grad is not None
        param.grad[5] = math.inf
    if unscale:
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_([param], 1.0)
    scaler.step(optimizer)
    return optimizer.last_overflow, torch.equal(param.detach(), torch.ones(3000))


@pytest.mark.parametrize("unscale", [False, True])
def test_no_rank_skips_alone(unscale: bool) -> None:
    """As Lightning drives it, with unscale_() and a clip, too: one overflow is everyone's."""
    for overflow, unchanged in run_procs(2, skip_on_one_rank, unscale):
        assert unchanged
        assert overflow == ("w", 1)


def clipped_over_groups(by_option: bool) -> list[Tensor]:
    """Clip a square of 2**24 amid squares of 1, of which fp32 loses each that comes alone after."""
    params = [nn.Parameter(torch.zeros(512)) for _ in range(81)]
    groups = [{"params": params[:40]}, {"params": params[40:41]}, {"params": params[41:]}]
    sharding: dict[str, Any] = {"kernel": "eager", "bucket_cap_mb": 1024 * 4 / 2**20}
    sharding |= {"clip_grad_norm": BOUND} if by_option else {}
    optimizer = ShardedBertAdam(groups, lr=0.05, e=1.0, max_grad_norm=1.0, sharding=sharding)
    assert len(optimizer.layout.buckets) == 41
    for param in params:
        param.grad = torch.zeros(512)
        param.grad[0] = 4096.0 if param is params[40] else 1.0
    if not by_option:
        optimizer.clip_grad_norm(BOUND)
    optimizer.step()
    return [param.detach().cpu() for param in params]


def test_option_and_method_add_up_in_one_order() -> None:
    """Also where the rule clips by the norms of its groups, which are then added up first."""
    by_option, by_method = (run_threads(2, clipped_over_groups, x) for x in (True, False))
    assert_bitwise(by_option[0], by_method[0])
