"""ShardedMuon with what every optimizer here has: clips, scalers, low precision, Join, monitors."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join

import shardfuse.engine.step
from shardfuse import ShardedGradScaler, ShardedMuon
from shardfuse.training import StepMonitor
from tests.distributed.test_muon import EAGER, SHAPES, backward, grads_of, new_params
from tests.support.harness import run_procs

pytestmark = [pytest.mark.timeout(180), pytest.mark.filterwarnings("ignore:Muon orthogonalises")]

SMALL: list[tuple[int, ...]] = [(24, 40), (40,), (16, 24)]


def step_all(params: list[nn.Parameter], optimizer: Any, step: int) -> None:
    shapes = [tuple(p.shape) for p in params]
    backward(params, grads_of(shapes, step, dist.get_rank(), dist.get_world_size()))
    optimizer.step()
    optimizer.zero_grad()


def copies(params: list[nn.Parameter]) -> list[Tensor]:
    return [p.detach().clone().cpu() for p in params]


def watch() -> list[tuple[float, float]]:
    """Return the monitor's norm of each update, and that of the change that it made."""
    params = new_params(SMALL)
    named = [(f"p{i}", param) for i, param in enumerate(params)]
    optimizer = ShardedMuon(named, lr=0.02, sharding=EAGER)
    monitor = StepMonitor(optimizer, every=1)
    found = []
    for step in range(2):
        before = copies(params)
        step_all(params, optimizer, step)
        optimizer.synchronize()
        moved = [float((p.cpu() - b).norm()) for p, b in zip(params, before, strict=True)]
        (record,) = monitor.take()
        norms = {name: own.update for name, own in record.tensors.items()}
        found += [(norms[name], own) for (name, _), own in zip(named, moved, strict=True)]
    return found


def clipped(max_norm: float | None) -> tuple[list[Tensor], float]:
    params = new_params(SMALL)
    optimizer = ShardedMuon(params, lr=0.02, sharding=EAGER)
    norm = 0.0
    for step in range(3):
        shapes = [tuple(p.shape) for p in params]
        backward(params, grads_of(shapes, step, dist.get_rank(), dist.get_world_size()))
        if max_norm is not None:
            norm = float(optimizer.clip_grad_norm(max_norm))
        optimizer.step()
        optimizer.zero_grad()
    return copies(params), norm


def test_clips() -> None:
    """A bound that is not reached changes nothing; the norm is that of the mean gradient."""
    expected, _ = run_procs(1, clipped, None)[0]
    grads = grads_of(SMALL, 2, 0, 1)
    for found, norm in run_procs(2, clipped, 1e6):
        assert all(map(torch.equal, found, expected))
        assert norm == pytest.approx(float(torch.cat([g.flatten() for g in grads]).norm()))
    first, other = (found for found, _ in run_procs(2, clipped, 1.0))
    assert all(map(torch.equal, first, other))


def scaled(overflows: bool) -> list[Tensor]:
    params = new_params(SMALL)
    optimizer = ShardedMuon(params, lr=0.02, sharding=EAGER)
    scaler = ShardedGradScaler(params[0].device.type, init_scale=8.0, growth_interval=100)
    for step in range(3):
        grads = grads_of(SMALL, step, dist.get_rank(), dist.get_world_size())
        if overflows and step == 2 and dist.get_rank() == 0:
            grads[0][0, 0] = float("inf")
        terms = [(p * g.to(p.device)).sum() for p, g in zip(params, grads, strict=True)]
        scaler.scale(torch.stack(terms).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return copies(params)


def unscaled(steps: int) -> list[Tensor]:
    params = new_params(SMALL)
    optimizer = ShardedMuon(params, lr=0.02, sharding=EAGER)
    for step in range(steps):
        step_all(params, optimizer, step)
    return copies(params)


def test_gradient_scaler() -> None:
    """Scales of powers of two change no bit; an overflow on one rank skips the step on all."""
    for overflows in (False, True):
        expected = run_procs(1, unscaled, 3 - overflows)[0]
        for found in run_procs(2, scaled, overflows):
            assert all(map(torch.equal, found, expected))


def low_precision(sharding: dict[str, Any]) -> list[Tensor]:
    params = [nn.Parameter(p.detach().bfloat16()) for p in new_params(SMALL)]
    optimizer = ShardedMuon(params, lr=0.02, sharding={**EAGER, **sharding})
    for step in range(3):
        shapes = [tuple(p.shape) for p in params]
        # Small integers, which bf16 sums exactly.
        for p, g in zip(params, grads_of(shapes, step, 0, 1), strict=True):
            p.grad = g.to(p)
        optimizer.step()
        optimizer.zero_grad()
    return copies(params)


def test_bf16_params() -> None:
    """fp32 masters, on two ranks as on one."""
    expected = run_procs(1, low_precision, {})[0]
    for found in run_procs(2, low_precision, {"grad_sync_dtype": "float32"}):
        assert all(map(torch.equal, found, expected))


def compiled(kernel: str) -> list[Tensor]:
    params = new_params(SMALL)
    optimizer = ShardedMuon(params, lr=0.02, sharding={**EAGER, "kernel": kernel})
    for step in range(2):
        step_all(params, optimizer, step)
    return copies(params)


@pytest.mark.cpu_only("compiled kernels of the CPU")
def test_compiled_kernels() -> None:
    """Products may be fused with sums there, so within fp32's and bf16's rounding."""
    expected = run_procs(1, compiled, "eager")[0]
    for found in run_procs(2, compiled, "compile"):
        for own, other in zip(found, expected, strict=True):
            assert float((own - other).abs().max()) < 1e-3


def uneven() -> list[Tensor]:
    params = new_params(SMALL)
    optimizer = ShardedMuon(params, lr=0.02, sharding=EAGER)
    with Join([optimizer]):
        for step in range(2 + dist.get_rank()):
            step_all(params, optimizer, step)
    optimizer.synchronize()
    return copies(params)


def test_join() -> None:
    """A rank without inputs takes part in the exchange."""
    first, other = run_procs(2, uneven)
    assert all(map(torch.equal, first, other))


def groups(starts_frozen: bool) -> list[Tensor]:
    params = new_params(SHAPES)
    if starts_frozen:
        params[3].requires_grad_(False)
    optimizer = ShardedMuon(params, lr=0.02, sharding=EAGER)
    added = new_params(SMALL)[::2]
    for step in range(4):
        if step == 1:
            optimizer.add_param_group({"params": added})
        if step == 2:
            params[3].requires_grad_(True)
        own = [p for p in [*params, *(added if step else [])] if p.requires_grad]
        step_all(own, optimizer, step)
    return copies([*params, *added])


@pytest.mark.parametrize("frozen", [False, True])
def test_added_groups_and_frozen_params(frozen: bool) -> None:
    """Owners are chosen anew; bit for bit as on one rank."""
    expected = run_procs(1, groups, frozen)[0]
    for found in run_procs(2, groups, frozen):
        assert all(map(torch.equal, found, expected))


def test_monitor_notes_updates() -> None:
    """Norms of updates, learning rate and decay included."""
    for found in run_procs(2, watch):
        for noted, moved in found:
            assert noted == pytest.approx(moved, rel=1e-4)


def fails_to_build(*, later: bool) -> list[str]:
    """The last rank has no memory for its tables; return what is raised."""
    params = new_params(SMALL)
    optimizer = ShardedMuon(params, lr=0.02, sharding=EAGER) if later else None
    if dist.get_rank() == 1:

        def raise_error(*args: Any) -> None:
            raise MemoryError("no memory for tables of matrices")

        shardfuse.engine.step.MatrixExchange.__init__ = raise_error  # type: ignore[assignment]
    errors = []
    try:
        if optimizer is None:
            optimizer = ShardedMuon(params, lr=0.02, sharding=EAGER)
        else:
            optimizer.add_param_group({"params": new_params(SMALL)[::2]})
        step_all(params, optimizer, 0)
    except Exception as error:
        errors.append(f"{type(error).__name__}: {error}")
    return errors


@pytest.mark.parametrize("later", [False, True])
def test_an_error_of_one_rank_that_builds(later: bool) -> None:
    """It reaches the other at the latest in its next step."""
    (first,), (other,) = run_procs(2, functools.partial(fails_to_build, later=later), timeout=30)
    assert other == "MemoryError: no memory for tables of matrices"
    assert first.startswith("PeerError: ")
    assert "rank 1" in first
    assert "no memory for tables of matrices" in first
