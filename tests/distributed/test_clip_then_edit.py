"""Gradients that scalers or callers change after clip_grad_norm(): step() must not use old ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.amp import GradScaler

from shardfuse import ShardedGradScaler, ShardedSGD
from shardfuse.optim.npu import NpuFusedSGD
from tests.support import placing
from tests.support.harness import run_threads
from tests.support.placing import device_type

pytestmark = pytest.mark.timeout(60)

CHANGED = "changed between clip_grad_norm.*and any unscale_"
SCALED = r"still scaled by the loss scale. Call scaler.unscale_\(optimizer\) before it"
ALONE_AND_TWO = pytest.mark.parametrize("world_size", [1, 2])
SHARDINGS: dict[str, dict[str, Any]] = {
    "stage 1": {},
    "reduced": {"grads_are_reduced": True},
    "stage 2": {"stage": 2},
}


def on_ranks(world_size: int, body: Callable[..., None], *args: Any) -> None:
    """Run ``body`` on so many ranks; one has no process group."""
    if world_size == 1:
        body(*args)
    else:
        run_threads(world_size, body, *args)


def build(sharding: dict[str, Any]) -> tuple[nn.Parameter, ShardedSGD]:
    """Return a parameter of ones, with an odd number of them, and its optimizer."""
    param = nn.Parameter(torch.ones(3001))
    return param, ShardedSGD([param], 1.0, sharding=sharding)


def assert_refused(param: nn.Parameter, call: Callable[[], Any], match: str) -> None:
    """Fail unless ``call`` raises, and the parameter is what it was."""
    with pytest.raises(RuntimeError, match=match):
        call()
    assert torch.equal(param.detach(), torch.ones(3001))
    if dist.is_initialized():
        dist.barrier()


def unscale_after_clip(sharding: dict[str, Any], scaler_class: Any) -> None:
    """Our scaler knows it at once; torch's tells nobody, so step() finds out."""
    param, optimizer = build(sharding)
    scaler = scaler_class(device_type(), init_scale=64.0)
    scaler.scale(param.sum()).backward()
    optimizer.clip_grad_norm(1.0)
    if scaler_class is ShardedGradScaler:
        assert_refused(param, lambda: scaler.unscale_(optimizer), SCALED)
        return
    scaler.unscale_(optimizer)
    assert_refused(param, lambda: scaler.step(optimizer), CHANGED)


@ALONE_AND_TWO
@pytest.mark.parametrize("name", SHARDINGS)
def test_unscaling_after_a_clip_is_refused(name: str, world_size: int) -> None:
    """The norm was that of scaled gradients; the step was too large by the scale."""
    on_ranks(world_size, unscale_after_clip, SHARDINGS[name], ShardedGradScaler)


@pytest.mark.skipif(placing.on_device(), reason="the host would have to wait to see it")
@ALONE_AND_TWO
@pytest.mark.parametrize("name", ["stage 1", "reduced"])
def test_torch_unscaling_after_a_clip_is_refused(name: str, world_size: int) -> None:
    on_ranks(world_size, unscale_after_clip, SHARDINGS[name], GradScaler)


def edit_data_after_clip(sharding: dict[str, Any]) -> None:
    param, optimizer = build(sharding)
    param.sum().backward()
    optimizer.clip_grad_norm(100.0)
    assert param.grad is not None
    param.grad.data[7] = 3.0
    assert_refused(param, optimizer.step, CHANGED)


@pytest.mark.skipif(placing.on_device(), reason="the host would have to wait to see it")
@ALONE_AND_TWO
@pytest.mark.parametrize("name", ["stage 1", "reduced"])
def test_edits_by_data_after_a_clip_are_refused(name: str, world_size: int) -> None:
    on_ranks(world_size, edit_data_after_clip, SHARDINGS[name])


def clip_in_order(sharding: dict[str, Any], scaler_class: Any) -> None:
    param, optimizer = build(sharding)
    scaler = scaler_class(device_type(), init_scale=64.0)
    scaler.scale(param.sum()).backward()
    scaler.unscale_(optimizer)
    norm = optimizer.clip_grad_norm(1.0)
    scaler.step(optimizer)
    assert float(norm) == pytest.approx(3001**0.5)
    assert param.tolist() == pytest.approx([1 - 3001**-0.5] * 3001)


@ALONE_AND_TWO
@pytest.mark.parametrize("name", SHARDINGS)
def test_unscaling_before_a_clip_is_right(name: str, world_size: int) -> None:
    on_ranks(world_size, clip_in_order, SHARDINGS[name], ShardedGradScaler)


def leave_out_a_step(sharding: dict[str, Any], optimizer_clears: bool) -> None:
    """The first gradient is infinite, and its clip makes 0 of all others."""
    param, optimizer = build(sharding)
    model = nn.ParameterList([param])
    (param.sum() * float("inf")).backward()
    assert float(optimizer.clip_grad_norm(1.0)) == float("inf")
    if optimizer_clears:
        optimizer.zero_grad()
    else:
        model.zero_grad()
    param.sum().backward()
    if not optimizer_clears:
        assert_refused(param, lambda: optimizer.clip_grad_norm(1.0), "changed between .*another")
        optimizer.zero_grad()
        param.sum().backward()
    assert float(optimizer.clip_grad_norm(1.0)) == pytest.approx(3001**0.5)
    optimizer.step()
    assert param.tolist() == pytest.approx([1 - 3001**-0.5] * 3001)


@ALONE_AND_TWO
@pytest.mark.parametrize(
    ("name", "optimizer_clears"),
    [("stage 1", True), ("stage 1", False), ("reduced", False), ("stage 2", True)],
)
def test_a_step_that_was_clipped_and_left_out(
    name: str, optimizer_clears: bool, world_size: int
) -> None:
    """model.zero_grad() tells the optimizer nothing: the old factor scaled all later gradients."""
    on_ranks(world_size, leave_out_a_step, SHARDINGS[name], optimizer_clears)


def go_on_after_a_failed_step(cls: Any) -> None:
    """A step under a scaler fails; those after it are as if it had not been."""
    param = nn.Parameter(torch.ones(3001))
    optimizer = cls([param], 1.0)
    scaler = GradScaler(device_type(), init_scale=64.0)
    scaler.scale(param.sum()).backward()
    optimizer.clip_grad_norm(1.0)
    assert param.grad is not None
    param.grad.mul_(2.0)
    assert_refused(param, lambda: scaler.step(optimizer), CHANGED)
    scaler.update()
    for number, unscales in enumerate((False, True), start=1):
        optimizer.zero_grad()
        scaler.scale(0.25 * param.sum()).backward()
        if unscales:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        assert param.tolist() == [1 - 0.25 * number] * 3001
    optimizer.zero_grad()
    (0.25 * param.sum()).backward()
    optimizer.step()
    assert param.tolist() == [0.25] * 3001


@ALONE_AND_TWO
@pytest.mark.parametrize("cls", [ShardedSGD, NpuFusedSGD])
def test_training_goes_on_after_a_failed_step_under_a_scaler(cls: Any, world_size: int) -> None:
    """The scaler's attributes stayed: the next step divided by the scale once more."""
    on_ranks(world_size, go_on_after_a_failed_step, cls)
