"""Optimizer state in torch's ordinary format: resume, interchange, other world sizes."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from shardfuse import ShardedAdam, ShardedAdamW, ShardedBertAdam, ShardedLamb, ShardedSGD
from tests.support.harness import run_threads
from tests.support.models import MIXED, rank_grads
from tests.support.placing import on_cpu
from tests.support.runs import Case, assert_bitwise

pytestmark = pytest.mark.timeout(60)

# The schedule of BertAdam shows whether the step was restored.
CASES: dict[str, Case] = {
    "sgd": Case(ShardedSGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.5}),
    "sgd-plain": Case(ShardedSGD, {"lr": 0.1}),
    "adam": Case(ShardedAdam, {"lr": 0.1}),
    "amsgrad": Case(ShardedAdamW, {"lr": 0.1, "amsgrad": True}),
    "bert": Case(ShardedBertAdam, {"lr": 0.1, "warmup": 0.3, "t_total": 12, "max_grad_norm": -1}),
    "lamb": Case(ShardedLamb, {"lr": 0.1, "variant": "google"}, named=True),
    "adam-bf16": Case(ShardedAdam, {"lr": 0.1}, dtype=torch.bfloat16),
    "lamb-fp16": Case(ShardedLamb, {"lr": 0.1}, dtype=torch.float16),
}
SHARDING = {"kernel": "eager", "bucket_cap_mb": 0.02}
HALF = 4


def advance(case: Case, params: Any, optimizer: Any, steps: range) -> None:
    """Take steps whose mean gradient does not depend on the world size.

    Rank 0 feeds W times the gradient, the others zero; the mean is exact for integers.
    """
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    rank = dist.get_rank() if dist.is_initialized() else 0
    for step in steps:
        grads = rank_grads("integers", 1, 0, step, case.entries)
        scale = float(world_size) if rank == 0 else 0.0
        params.assign([None if g is None else g * scale for g in grads])
        optimizer.step()


def serialised(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Return the dict after a trip through torch.save, weights only."""
    file = io.BytesIO()
    torch.save(state_dict, file)
    file.seek(0)
    loaded: dict[str, Any] = torch.load(file, weights_only=True)
    return loaded


def straight(case: Case) -> list[Tensor]:
    params = case.param_set()
    advance(case, params, case.build(params, SHARDING), range(2 * HALF))
    return params.values()


def first_half(case: Case) -> tuple[list[Tensor], dict[str, Any]]:
    params = case.param_set()
    optimizer = case.build(params, SHARDING)
    advance(case, params, optimizer, range(HALF))
    optimizer.consolidate_state_dict(to=None)
    return params.values(), serialised(optimizer.state_dict())


def second_half(
    case: Case, values: list[Tensor], state_dict: dict[str, Any], when: str
) -> list[Tensor]:
    params = case.param_set()
    if when == "after a step":
        optimizer = case.build(params, SHARDING)
        advance(case, params, optimizer, range(1))
    else:
        optimizer = case.build(params, SHARDING)
    with torch.no_grad():
        for param, value in zip(params.params, values, strict=True):
            param.copy_(value)
    optimizer.load_state_dict(copy.deepcopy(state_dict))
    advance(case, params, optimizer, range(HALF, 2 * HALF))
    return params.values()


@pytest.mark.parametrize("when", ["before a step", "after a step"])
@pytest.mark.parametrize(("saved_at", "loaded_at"), [(1, 1), (3, 1), (3, 2), (3, 3), (1, 4)])
@pytest.mark.parametrize("name", CASES)
def test_resume(name: str, saved_at: int, loaded_at: int, when: str) -> None:
    """N steps, a saved and loaded state, and N more are 2N steps, bitwise, at any world sizes."""
    case = CASES[name]
    values, state_dict = run_threads(saved_at, first_half, case)[0]
    resumed = run_threads(loaded_at, second_half, case, values, state_dict, when)
    if "lamb" in name and (saved_at, loaded_at) not in ((1, 1), (3, 3)):
        # Another world size sums the norms in another order.
        expected = run_threads(loaded_at, straight, case)[0]
        tolerance = 1e-6 if case.dtype == torch.float32 else 2e-3
        for members in resumed:
            for value, other in zip(members, expected, strict=True):
                torch.testing.assert_close(value, other, rtol=tolerance, atol=tolerance)
        return
    expected = run_threads(loaded_at, straight, case)[0]
    for members in resumed:
        assert_bitwise(members, expected)


def states_of(case: Case) -> dict[str, Any]:
    saved = first_half(case)[1]
    assert all(leaf.device.type == "cpu" for leaf in tree_leaves(saved) if torch.is_tensor(leaf))
    return saved


@pytest.mark.parametrize("name", [name for name in CASES if "lamb" not in name])
def test_consolidated_state_does_not_depend_on_the_world(name: str) -> None:
    """Every rank's consolidated dict is, bit for bit, the dict of an unsharded run."""
    case = CASES[name]
    expected = states_of(case)
    for world_size in (2, 3):
        for state_dict in on_cpu(run_threads(world_size, states_of, case)):
            assert state_dict["param_groups"] == expected["param_groups"]
            assert state_dict["state"].keys() == expected["state"].keys()
            for key, entry in expected["state"].items():
                other = state_dict["state"][key]
                assert other.keys() == entry.keys()
                for field, value in entry.items():
                    if isinstance(value, Tensor):
                        assert torch.equal(other[field], value)
                    else:
                        assert other[field] == value


def partial_steps() -> dict[str, Any]:
    """Feed each rank its own gradients, some parameters having one on the first rank only."""
    case = CASES["adam"]
    params = case.param_set()
    optimizer = case.build(params, SHARDING)
    for step in range(5):
        params.assign(rank_grads("integers", dist.get_world_size(), dist.get_rank(), step))
        optimizer.step()
    optimizer.consolidate_state_dict(to=None)
    state_dict: dict[str, Any] = optimizer.state_dict()
    return state_dict


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_steps_count_updates(world_size: int) -> None:
    """A parameter's step counts its updates, on ranks that fed it and ranks that did not."""
    expected = {"used": 5, "late": 3, "some": 3, "frozen": 0, "unused": 0}
    in_group_order = sorted(MIXED, key=lambda entry: entry.group)
    for state_dict in run_threads(world_size, partial_steps):
        steps = {}
        for index, entry in enumerate(in_group_order):
            steps[entry.name] = state_dict["state"].get(index, {"step": 0})["step"]
        for entry in in_group_order:
            assert steps[entry.name] == expected[entry.role], entry.name


def consolidate(to: int | None) -> bool:
    params = [nn.Parameter(torch.ones(3000))]
    optimizer = ShardedAdam(params)
    params[0].grad = torch.ones(3000)
    optimizer.step()
    with pytest.raises(RuntimeError, match="consolidate_state_dict"):
        optimizer.state_dict()
    optimizer.consolidate_state_dict(to=to)
    mine = to is None or dist.get_rank() == to
    if mine:
        assert optimizer.state_dict()["state"][0]["exp_avg"].shape == (3000,)
    else:
        with pytest.raises(RuntimeError, match="consolidate_state_dict"):
            optimizer.state_dict()
    optimizer.step()
    with pytest.raises(RuntimeError, match="consolidate_state_dict"):
        optimizer.state_dict()
    return mine


@pytest.mark.parametrize(("to", "ranks"), [(0, [0]), (2, [2]), (None, [0, 1, 2])])
def test_consolidating(to: int | None, ranks: list[int]) -> None:
    """state_dict() never communicates: it needs consolidation, to this rank, after the step."""
    assert run_threads(3, consolidate, to) == [rank in ranks for rank in range(3)]


def hand_over_when_fresh(case: Case) -> list[Tensor]:
    """Train as Accelerate prepares it: the model is moved, the optimizer's own state loaded."""
    params = case.param_set()
    optimizer = case.build(params, SHARDING)
    optimizer.param_groups[0]["lr"] = 0.05
    for param in params.params:
        param.data = param.data.clone()
    saved = optimizer.state_dict()
    assert saved["state"] == {}
    assert saved["param_groups"][0]["lr"] == 0.05
    optimizer.load_state_dict(serialised(saved))
    assert optimizer.state_dict() == saved
    advance(case, params, optimizer, range(2 * HALF))
    if optimizer.communicator.world_size > 1:
        with pytest.raises(RuntimeError, match="consolidate_state_dict"):
            optimizer.state_dict()
    return params.values()


def straight_at(case: Case, lr: float) -> list[Tensor]:
    params = case.param_set()
    optimizer = case.build(params, SHARDING)
    optimizer.param_groups[0]["lr"] = lr
    advance(case, params, optimizer, range(2 * HALF))
    return params.values()


@pytest.mark.parametrize("name", CASES)
def test_fresh_state_needs_no_consolidation(name: str) -> None:
    """Before the first step it is the same on every rank; loading it takes moved params back."""
    case = CASES[name]
    for world_size in (1, 3):
        expected = run_threads(world_size, straight_at, case, 0.05)
        for values in run_threads(world_size, hand_over_when_fresh, case):
            assert_bitwise(values, expected[0])


def load_then_ask() -> None:
    """A loaded state is not a fresh one, nor is that of a rank which neither fed nor owns any."""
    params = [nn.Parameter(torch.ones(10))]
    optimizer = ShardedAdam(params)
    if dist.get_rank() == 0:
        params[0].grad = torch.ones(10)
    optimizer.step()
    with pytest.raises(RuntimeError, match="consolidate_state_dict"):
        optimizer.state_dict()
    optimizer.consolidate_state_dict(to=None)
    other = ShardedAdam([nn.Parameter(torch.ones(10))])
    other.load_state_dict(optimizer.state_dict())
    with pytest.raises(RuntimeError, match="consolidate_state_dict"):
        other.state_dict()


def test_other_states_need_consolidation() -> None:
    """Also where a rank cannot tell by its own counts that there was a step."""
    run_threads(3, load_then_ask)


TORCH: dict[str, tuple[Callable[..., Any], Callable[..., Any], dict[str, Any]]] = {
    "sgd": (ShardedSGD, torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "adam": (ShardedAdam, torch.optim.Adam, {"lr": 0.1, "weight_decay": 0.1}),
    "amsgrad": (ShardedAdam, torch.optim.Adam, {"lr": 0.1, "amsgrad": True}),
    "adamw": (ShardedAdamW, torch.optim.AdamW, {"lr": 0.1, "weight_decay": 0.1}),
}
# fp32 rounding of a few updates on both sides.
TOLERANCE = 2e-6


def train_plain(
    cls: Callable[..., Any],
    options: Mapping[str, Any],
    values: list[Tensor],
    state_dict: dict[str, Any] | None,
    steps: range,
) -> tuple[list[Tensor], dict[str, Any]]:
    params = [nn.Parameter(value.clone()) for value in values]
    optimizer = cls(params, **options)
    if state_dict is not None:
        optimizer.load_state_dict(state_dict)
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for param in params:
            param.grad = torch.randn(param.shape, generator=generator)
        optimizer.step()
    return [param.detach().clone() for param in params], serialised(optimizer.state_dict())


@pytest.mark.parametrize("direction", ["from torch", "to torch"])
@pytest.mark.parametrize("name", TORCH)
def test_interchange_with_torch(name: str, direction: str) -> None:
    """State dicts of torch.optim and of ours continue each other's training."""
    ours, theirs, options = TORCH[name]
    torch_options = {**options, "foreach": False}
    start = [torch.ones(1500), torch.full((3, 4), 2.0), torch.tensor(3.0)]
    expected, _ = train_plain(theirs, torch_options, start, None, range(6))
    if direction == "from torch":
        values, state = train_plain(theirs, torch_options, start, None, range(3))
        result, _ = train_plain(ours, options, values, state, range(3, 6))
    else:
        values, state = train_plain(ours, options, start, None, range(3))
        result, _ = train_plain(theirs, torch_options, values, state, range(3, 6))
    for value, other in zip(result, expected, strict=True):
        torch.testing.assert_close(value, other, rtol=TOLERANCE, atol=TOLERANCE)


def test_keys_are_upstreams() -> None:
    """The dict has torch's layout: full shapes per parameter, upstream's names, integer steps."""
    for cls, keys in (
        (ShardedSGD, {"momentum_buffer"}),
        (ShardedAdam, {"step", "exp_avg", "exp_avg_sq"}),
        (ShardedBertAdam, {"step", "exp_avg", "exp_avg_sq"}),
        (ShardedLamb, {"step", "exp_avg", "exp_avg_sq"}),
    ):
        param = nn.Parameter(torch.ones(3, 4))
        options = {"momentum": 0.9} if cls is ShardedSGD else {}
        optimizer: Any = cls([param], lr=0.1, **options)
        assert optimizer.state_dict()["state"] == {}
        param.grad = torch.ones(3, 4)
        for _ in range(3):
            optimizer.step()
        entry = optimizer.state_dict()["state"][0]
        assert set(entry) == keys
        assert entry.get("step", 3) == 3
        assert all(t.shape == (3, 4) for k, t in entry.items() if k != "step")


def test_saved_state_is_a_copy() -> None:
    """A state dict taken before a step is not changed by it."""
    param = nn.Parameter(torch.ones(1500))
    optimizer = ShardedAdam([param])
    param.grad = torch.ones(1500)
    optimizer.step()
    saved = optimizer.state_dict()
    before = saved["state"][0]["exp_avg"].clone()
    optimizer.step()
    assert torch.equal(saved["state"][0]["exp_avg"], before)
    assert saved["state"][0]["step"] == 1


def test_memory_format_of_states() -> None:
    """States of a channels-last parameter are saved and loaded by index, not by address."""
    weight = torch.arange(2.0 * 3 * 4 * 5).reshape(2, 3, 4, 5)
    saved = {}
    for memory_format in (torch.channels_last, torch.contiguous_format):
        param = nn.Parameter(weight.to(memory_format=memory_format))
        optimizer = ShardedSGD([param], 0.1, momentum=0.9)
        param.grad = weight.clone()
        optimizer.step()
        saved[memory_format] = optimizer.state_dict()
        assert torch.equal(saved[memory_format]["state"][0]["momentum_buffer"], weight.cpu())
    param = nn.Parameter(weight.to(memory_format=torch.channels_last))
    optimizer = ShardedSGD([param], 1.0, momentum=1.0)
    optimizer.load_state_dict(saved[torch.contiguous_format])
    optimizer.param_groups[0].update(lr=1.0, momentum=1.0)
    param.grad = torch.zeros_like(weight)
    optimizer.step()
    assert torch.equal(param.detach(), torch.zeros_like(weight))


def bad_dict(kind: str, state_dict: dict[str, Any]) -> dict[str, Any]:
    bad = copy.deepcopy(state_dict)
    if kind == "groups":
        bad["param_groups"].append(copy.deepcopy(bad["param_groups"][0]))
    elif kind == "params":
        bad["param_groups"][0]["params"].append(2)
    elif kind == "shape":
        bad["state"][1]["exp_avg"] = torch.zeros(5)
    elif kind == "lacking":
        del bad["state"][1]["exp_avg_sq"]
    else:
        assert kind == "option"
        bad["param_groups"][0]["lr"] = -1.0
    return bad


@pytest.mark.parametrize("kind", ["groups", "params", "shape", "lacking", "option"])
def test_bad_state_changes_nothing(kind: str) -> None:
    """A dict that does not fit raises ValueError and leaves states and options as they were."""
    params = [nn.Parameter(torch.ones(1500)), nn.Parameter(torch.ones(3, 4))]
    optimizer = ShardedAdam(params, lr=0.1)
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    saved = serialised(optimizer.state_dict())
    optimizer.step()
    before = serialised(optimizer.state_dict())
    bad = bad_dict(kind, saved)
    bad["param_groups"][0].setdefault("lr", 0.1)
    with pytest.raises(ValueError, match=r".+"):
        optimizer.load_state_dict(bad)
    after = serialised(optimizer.state_dict())
    assert after["param_groups"] == before["param_groups"]
    for key, entry in before["state"].items():
        for field, value in entry.items():
            assert torch.equal(torch.as_tensor(after["state"][key][field]), torch.as_tensor(value))
