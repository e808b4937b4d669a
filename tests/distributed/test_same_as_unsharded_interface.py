"""What sharding must leave as it is in the interface of torch_npu's optimizers."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import lr_scheduler

from shardfuse.optim import npu
from tests.support.harness import run_threads
from tests.support.models import lie_in
from tests.support.npu_scaler import NpuScaler
from tests.support.placing import device_type
from tests.support.runs import TOLERANCE, assert_bitwise, max_relative_error
from tests.support.upstream import (
    CLASSES,
    FAMILY,
    NOT_IN_GROUPS,
    REQUIRED,
    build,
    every_optimizer,
    fresh_params,
    noise,
    reference,
)

pytestmark = pytest.mark.timeout(60)

every_world = pytest.mark.parametrize("world_size", [2, 3])
# The first tensor is cut over ranks, and over buckets.
SHAPES: tuple[tuple[int, ...], ...] = ((5000,), (6, 7), ())
SHARDING = {"bucket_cap_mb": 0.01}


def mean_grads(step: int) -> list[Tensor]:
    """Return what every rank's gradient is in a step; its mean over two ranks is exact."""
    return [noise(shape, 100 * step + i) for i, shape in enumerate(SHAPES)]


def assign(params: list[nn.Parameter], step: int) -> None:
    for param, grad in zip(params, mean_grads(step), strict=True):
        param.grad = grad.to(param.dtype)


def values_of(params: list[nn.Parameter]) -> list[Tensor]:
    return [p.detach().clone() for p in params]


# 7. Constructors


def build_in_every_way(name: str) -> list[str]:
    """Build by position, by keyword, from group dicts and an iterator; return two errors."""
    defaults = dict(CLASSES[name][0])
    defaults = {key: 0.25 if value == REQUIRED else value for key, value in defaults.items()}
    cls: Any = getattr(npu, name)
    by_position = cls(fresh_params(SHAPES), *defaults.values(), sharding=SHARDING)
    by_keyword = cls(params=iter(fresh_params(SHAPES)), **defaults)
    groups = [{"params": fresh_params(SHAPES), "lr": 0.5}, {"params": iter(fresh_params(SHAPES))}]
    in_groups = cls(groups, **defaults)
    in_groups.add_param_group({"params": fresh_params(SHAPES), "lr": 0.125})
    kept = {key: value for key, value in defaults.items() if key not in NOT_IN_GROUPS}
    for optimizer in (by_position, by_keyword, in_groups):
        for group in optimizer.param_groups:
            options = {key: value for key, value in group.items() if key != "params"}
            assert {**options, "lr": kept["lr"]} == kept
    rates = [group["lr"] for group in in_groups.param_groups]
    assert rates == [0.5, kept["lr"], 0.125]
    errors = []
    for options in ({"lr": -1.0}, {} if CLASSES[name][0]["lr"] == REQUIRED else {"lr": -2.0}):
        with pytest.raises(ValueError, match=r"learning rate|lr") as caught:
            cls(fresh_params(SHAPES), **options)
        errors.append(str(caught.value).splitlines()[0])
    return errors


@every_optimizer
def test_constructors(name: str) -> None:
    """Upstream's names, order, defaults and group keys; its error's first line on all ranks."""
    needs_lr = CLASSES[name][0]["lr"] == REQUIRED
    second = (
        "parameter group didn't specify a value of required optimization parameter lr"
        if needs_lr
        else "Invalid learning rate: -2.0"
    )
    for errors in run_threads(2, build_in_every_way, name):
        assert errors == ["Invalid learning rate: -1.0", second]


# 8. Gradients, closures and scalers


def use_like_upstream(name: str) -> list[Tensor]:
    """Train through the methods and attributes that code for torch_npu uses."""
    params = fresh_params(SHAPES)
    optimizer = build(name, params, sharding=SHARDING)
    assert optimizer.is_fused_optimizer
    held: list[Tensor] = []

    def closure(step: int) -> float:
        optimizer.zero_grad()
        torch.autograd.backward(
            [(p * g).sum() for p, g in zip(params, mean_grads(step), strict=True)]
        )
        return float(step)

    for step in range(4):
        assert optimizer.step(lambda step=step: closure(step)) == step
        optimizer._maybe_init_combined_params_and_grads()
        assert optimizer.is_params_grads_combined
        held = held or [p.grad for p in params]
        # The tensors that were there after the first backward are the gradients still.
        assert all(p.grad is grad for p, grad in zip(params, held, strict=True))
        fp32, fp16 = optimizer.get_combined_grads()
        assert fp16 is None
        assert optimizer.grads_all_group_combined[0].data_ptr() == fp32.data_ptr()
        total = sum(float(grad.abs().sum()) for grad in held)
        assert float(fp32.abs().sum()) == pytest.approx(total, rel=1e-5)
    optimizer.zero_grad()
    assert all(not grad.any() for grad in held)
    assert all(p.grad is grad for p, grad in zip(params, held, strict=True))
    fp32, fp16 = optimizer.get_combined_params()
    assert fp16 is None
    assert lie_in(params, [fp32])
    return values_of(params)


@every_optimizer
def test_methods_of_the_fused_base_class(name: str) -> None:
    """zero_grad() keeps the tensors, closures run, combined tensors hold what is trained."""
    start = fresh_params(SHAPES)
    oracle = reference(name, start)
    for step in range(4):
        oracle.step([mean_grads(step)])
    for values in run_threads(2, use_like_upstream, name):
        assert max_relative_error(values, oracle.values(), values_of(start)) < TOLERANCE


def train_scaled(name: str, scaler: Any, overflow_at: int | None) -> Any:
    """Train under a scaler; the last rank's gradients overflow in one step, or that is left out.

    Returns parameters and states before and after that step, and the parameters at the end.
    """
    params = fresh_params(SHAPES)
    optimizer = build(name, params, sharding=SHARDING)
    is_last = dist.get_rank() == dist.get_world_size() - 1
    seen: list[Any] = []

    def look() -> None:
        optimizer.consolidate_state_dict(to=None)
        seen.append((values_of(params), copy.deepcopy(optimizer.state_dict()["state"])))

    for step in range(4):
        if step == 2 and overflow_at is None:
            continue
        if step == 2:
            look()
        optimizer.zero_grad()
        factor = math.inf if step == overflow_at and is_last else 1.0
        losses = [(p * g).sum() for p, g in zip(params, mean_grads(step), strict=True)]
        scaler.scale(sum(losses) * factor).backward()
        scaler.step(optimizer)
        scaler.update()
        if step == 2:
            look()
    return seen, values_of(params)


SCALERS: dict[str, Callable[[], Any]] = {
    "torch": lambda: GradScaler(device_type(), init_scale=64.0),
    "torch_npu": NpuScaler,
}
every_scaler = pytest.mark.parametrize("scaler", SCALERS)


@every_scaler
def test_gradient_scalers(scaler: str) -> None:
    """torch's and torch_npu's unscale gradients, fused or not: the run is the unscaled one."""
    start = fresh_params(SHAPES)
    oracle = reference("NpuFusedSGD", start)
    for step in range(4):
        oracle.step([mean_grads(step)])
    results = run_threads(2, lambda: train_scaled("NpuFusedSGD", SCALERS[scaler](), -1))
    for _, values in results:
        assert max_relative_error(values, oracle.values(), values_of(start)) < TOLERANCE


# 9. State dicts

TORCH: dict[str, type[torch.optim.Optimizer]] = {
    "NpuFusedSGD": torch.optim.SGD,
    "NpuFusedAdam": torch.optim.Adam,
    "NpuFusedAdamW": torch.optim.AdamW,
    "NpuFusedRMSprop": torch.optim.RMSprop,
    "NpuFusedAdadelta": torch.optim.Adadelta,
}


def train_ours(
    name: str, values: list[Tensor], state: dict[str, Any] | None, steps: range
) -> tuple[list[Tensor], dict[str, Any]]:
    params = [nn.Parameter(value.clone()) for value in values]
    optimizer = build(name, params, sharding=SHARDING)
    if state is not None:
        optimizer.load_state_dict(copy.deepcopy(state))
    for step in steps:
        assign(params, step)
        optimizer.step()
    optimizer.consolidate_state_dict(to=None)
    return values_of(params), copy.deepcopy(optimizer.state_dict())


def train_torch(
    name: str, values: list[Tensor], state: dict[str, Any] | None, steps: range
) -> tuple[list[Tensor], dict[str, Any]]:
    params = [nn.Parameter(value.clone()) for value in values]
    optimizer = TORCH[name](params, **FAMILY[name].options, foreach=False)
    if state is not None:
        optimizer.load_state_dict(copy.deepcopy(state))
    for step in steps:
        assign(params, step)
        optimizer.step()
    return values_of(params), optimizer.state_dict()


@pytest.mark.parametrize("name", TORCH)
def test_state_dicts_go_both_ways_with_torch(name: str) -> None:
    """Two steps of torch, two on two ranks, two of torch, two on three ranks: eight of torch."""
    start = values_of(fresh_params(SHAPES))
    values, state = train_torch(name, start, None, range(2))
    values, state = run_threads(2, train_ours, name, values, state, range(2, 4))[0]
    for index, entry in state["state"].items():
        shapes = {v.shape for k, v in entry.items() if isinstance(v, Tensor) and k != "step"}
        assert shapes == {torch.Size(SHAPES[index])}
    values, state = train_torch(name, values, state, range(4, 6))
    values, _ = run_threads(3, train_ours, name, values, state, range(6, 8))[0]
    expected, _ = train_torch(name, start, None, range(8))
    assert max_relative_error(values, expected, start) < 2 * TOLERANCE


@every_optimizer
def test_states_load_at_any_world_size(name: str) -> None:
    """Saved on two ranks and loaded on three, training ends where the reference does."""
    start = values_of(fresh_params(SHAPES))
    values, state = run_threads(2, train_ours, name, start, None, range(3))[1]
    assert [list(entry) for entry in state["state"].values()] == [
        (CLASSES[name][1] or ["momentum_buffer"])
        + (["momentum_buffer"] if name.startswith("NpuFusedRMSprop") else [])
    ] * len(SHAPES)
    # BertAdam's too, which upstream saves as 0.
    steps = [entry["step"] for entry in state["state"].values() if "step" in entry]
    assert steps == [] if name == "NpuFusedSGD" else steps == [3] * len(SHAPES)
    oracle = reference(name, start)
    for step in range(6):
        oracle.step([mean_grads(step)])
    for ends, _ in run_threads(3, train_ours, name, values, state, range(3, 6)):
        assert max_relative_error(ends, oracle.values(), start) < TOLERANCE


# 10. The model's view


def train_with_edits(dtype: torch.dtype) -> list[Tensor]:
    """Edit params in place between steps, under a scheduler and with hooks."""
    params = [nn.Parameter(torch.ones(s, dtype=dtype)) for s in SHAPES]
    objects, shapes = [id(p) for p in params], [p.shape for p in params]
    optimizer = build("NpuFusedSGD", params, lr=0.5, momentum=0.0, weight_decay=0.0)
    scheduler = lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    optimizer.register_step_post_hook(lambda *_: calls.append("post"))
    for step in range(3):
        for param in params:
            param.grad = torch.ones_like(param)
        if step == 1:
            with torch.no_grad():
                params[0].mul_(2.0)
            nn.ParameterList(params).load_state_dict(
                {**nn.ParameterList(params).state_dict(), "1": torch.full((6, 7), 8.0)}
            )
        optimizer.step()
        scheduler.step()
        # Gathered when step() returns: the next forward sees ordinary tensors of every shape.
        assert [p.shape for p in params] == shapes
        assert all(p.is_leaf and p.is_contiguous() and type(p) is nn.Parameter for p in params)
    assert calls == ["pre", "post"] * 3
    assert [id(p) for p in optimizer.param_groups[0]["params"]] == objects
    return values_of(params)


@every_world
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_edits_schedulers_and_hooks(dtype: torch.dtype, world_size: int) -> None:
    """Written values are what the next step starts from, not a stale master; lr is read then."""
    # The steps are 0.5, 0.25 and 0.125: after the first, one tensor is doubled, another set to 8.
    ends = (2 * 0.5 - 0.375, 8.0 - 0.375, 1 - 0.875)
    expected = [torch.full(s, end, dtype=dtype) for s, end in zip(SHAPES, ends, strict=True)]
    for values in run_threads(world_size, train_with_edits, dtype):
        assert_bitwise(values, expected)


# 11. Overflow


def flattened(state: dict[int, dict[str, Any]]) -> list[Tensor]:
    return [torch.as_tensor(v) for entry in state.values() for v in entry.values()]


@every_world
@every_scaler
@pytest.mark.parametrize("name", ["NpuFusedLamb", "NpuFusedBertAdam", "NpuFusedAdam"])
def test_overflow_on_one_rank_skips_on_all(name: str, scaler: str, world_size: int) -> None:
    """No parameter, moment or step count changes anywhere; training goes on as if it were not."""
    results = run_threads(world_size, lambda: train_scaled(name, SCALERS[scaler](), 2))
    without = run_threads(world_size, lambda: train_scaled(name, SCALERS[scaler](), None))
    for (seen, values), (_, expected) in zip(results, without, strict=True):
        (before, state_before), (after, state_after) = seen
        assert_bitwise(after, before)
        assert len(state_before) == len(SHAPES)
        assert_bitwise(flattened(state_after), flattened(state_before))
        assert_bitwise(values, expected)
        assert not torch.equal(values[0], after[0])


# 12. Equal parameters


def start_apart(name: str) -> tuple[list[Tensor], list[Tensor]]:
    """Build from other values on every rank, and make a step of gradients that all share."""
    params = [nn.Parameter(noise(s, 7) + 10 * dist.get_rank()) for s in SHAPES]
    optimizer = build(name, params, sharding=SHARDING)
    start = values_of(params)
    for step in range(2):
        assign(params, step)
        optimizer.step()
    return start, values_of(params)


@every_world
@every_optimizer
def test_parameters_are_equal_from_the_start(name: str, world_size: int) -> None:
    """Construction gives every rank the first one's values, and steps keep them equal."""
    ranks = run_threads(world_size, start_apart, name)
    for start, values in ranks:
        assert_bitwise(start, [noise(s, 7) for s in SHAPES])
        assert_bitwise(values, ranks[0][1])
        assert not torch.equal(values[0], start[0])
