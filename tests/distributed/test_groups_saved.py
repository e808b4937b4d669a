"""What groups have, through checkpoints of shardfuse and of torch: numbers, tensors and steps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException

from shardfuse import ShardedAdam, ShardedLamb, checkpoint
from tests.support.harness import run_procs

pytestmark = [
    pytest.mark.timeout(100),
    pytest.mark.filterwarnings("ignore:.*torch.distributed is disabled:UserWarning"),
]


def by_torch(saved: Any, into: Any, folder: Path) -> None:
    dcp.save(saved.sharded_state_dict(), checkpoint_id=folder)
    state = into.sharded_state_dict()
    dcp.load(state, checkpoint_id=folder)
    into.load_sharded_state_dict(state)


def by_shardfuse(saved: Any, into: Any, folder: Path) -> None:
    checkpoint.save({"optimizer": saved}, folder)
    checkpoint.load({"optimizer": into}, folder)


WAYS = pytest.mark.parametrize("way", [by_torch, by_shardfuse])


def other_lr(way: Callable[..., None], folder: Path) -> list[Any]:
    """Return the lr after a load, for each kind of the saved and of the present one."""
    found = []
    for index, (saved, present) in enumerate(
        [(torch.tensor(0.5), 1.0), (0.5, torch.tensor(1.0)), (torch.tensor(0.5), torch.tensor(1.0))]
    ):
        optimizers = [
            ShardedAdam([nn.Parameter(torch.ones(3000))], lr=lr) for lr in (saved, present)
        ]
        way(*optimizers, folder / str(index))
        found.append(optimizers[1].param_groups[0]["lr"])
    return found


@WAYS
def test_lr_may_be_a_tensor_on_either_side(way: Callable[..., None], tmp_path: Path) -> None:
    """It has the saved value, and stays a tensor, or a number, where it is one."""
    for values in [
        other_lr(way, tmp_path / "alone"),
        *run_procs(2, other_lr, way, tmp_path / "ranks"),
    ]:
        assert [float(value) for value in values] == [0.5] * 3
        assert [isinstance(value, Tensor) for value in values] == [False, True, True]


def build_lamb() -> tuple[list[nn.Parameter], ShardedLamb]:
    params = [nn.Parameter(torch.ones(3000)) for _ in range(3)]
    optimizer = ShardedLamb([{"params": [("early", params[0])]}], lr=0.1)
    return params, optimizer


def add_groups(params: list[nn.Parameter], optimizer: ShardedLamb) -> None:
    optimizer.add_param_group({"params": [("late", params[1])]})
    optimizer.add_param_group({"params": [("idle", params[2])]})


def steps_of_groups(way: Callable[..., None], folder: Path) -> list[Any]:
    """Return the steps of groups after a load, of which two were added late."""
    params, optimizer = build_lamb()
    for _ in range(2):
        params[0].grad = torch.ones(3000)
        optimizer.step()
    add_groups(params, optimizer)
    for _ in range(3):
        params[0].grad = params[1].grad = torch.ones(3000)
        optimizer.step()
    other_params, other = build_lamb()
    add_groups(other_params, other)
    way(optimizer, other, folder)
    return [group["step"] for group in other.param_groups]


@WAYS
def test_each_group_has_its_own_step(way: Callable[..., None], tmp_path: Path) -> None:
    """Also where it was added late, or has params without any update."""
    results = [
        steps_of_groups(way, tmp_path / "alone"),
        *run_procs(2, steps_of_groups, way, tmp_path / "ranks"),
    ]
    assert results == [[5, 3, 3]] * 3


def build_adam(is_frozen: bool) -> tuple[nn.Parameter, ShardedAdam]:
    head, body = nn.Parameter(torch.ones(3000)), nn.Parameter(torch.ones(900))
    body.requires_grad_(not is_frozen)
    optimizer = ShardedAdam([("head", head), ("body.0", body)], lr=0.1)
    head.grad = torch.ones(3000)
    optimizer.step()
    return body, optimizer


def unfreeze(way: Callable[..., None], folder: Path) -> tuple[str, float]:
    """Return how a load is refused, and what the first update after the remedy is."""
    saved = build_adam(is_frozen=True)[1]
    refusals = CheckpointException, checkpoint.CheckpointError
    with pytest.raises(refusals, match=r"Missing key.*state\.body\.0\.exp_avg") as caught:
        way(saved, build_adam(is_frozen=False)[1], folder / "refused")
    body, optimizer = build_adam(is_frozen=True)
    way(saved, optimizer, folder / "loaded")
    body.requires_grad_(True)
    body.grad = torch.ones(900)
    optimizer.step()
    return str(caught.value), float(body.detach().mean())


@WAYS
def test_unfrozen_since_it_was_saved(way: Callable[..., None], tmp_path: Path) -> None:
    """There is nothing to load for it; the error says how to go on, and that works."""
    results = [unfreeze(way, tmp_path / "alone"), *run_procs(2, unfreeze, way, tmp_path / "ranks")]
    for text, value in results:
        assert value == pytest.approx(0.9)
        if way is by_shardfuse:
            assert "When body.0 was saved it had no states: it was frozen" in text


@WAYS
def test_params_of_other_groups(way: Callable[..., None], tmp_path: Path) -> None:
    """Groups are saved by number: the decay of weights would become that of biases."""

    def build(order: str) -> ShardedAdam:
        torch.manual_seed(0)
        layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        groups: dict[str, Any] = {"weight": [], "bias": []}
        for name, param in layers.named_parameters():
            groups[name[2:]].append((name, param))
        decays = {"weight": 0.1, "bias": 0.0}
        found = [{"params": groups[n], "weight_decay": decays[n]} for n in order.split()]
        return ShardedAdam(found, lr=1.0)

    way(build("weight bias"), into := build("weight bias"), tmp_path / "same")
    assert [group["weight_decay"] for group in into.param_groups] == [0.1, 0.0]
    other = build("bias weight")
    with pytest.raises((ValueError, checkpoint.CheckpointError), match=r"0\.weight was in group 0"):
        way(build("weight bias"), other, tmp_path / "other")
    assert [group["weight_decay"] for group in other.param_groups] == [0.0, 0.1]


def test_whole_states_of_params_in_another_order() -> None:
    """They are numbered; names tell of an order that shapes alone do not. Renamed params load."""

    def build(cls: Any, prefix: str = "", *, is_reversed: bool = False) -> Any:
        layers = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(3)))
        named = [(f"{prefix}{name}", param) for name, param in layers.named_parameters()]
        return cls(named[::-1] if is_reversed else named, lr=0.1)

    saved = build(torch.optim.Adam)
    for number, param in enumerate(saved.param_groups[0]["params"]):
        param.grad = torch.full_like(param, number)
    saved.step()
    other = build(ShardedAdam, is_reversed=True)
    with pytest.raises(ValueError, match=r"states of 0\.weight where the optimizer has 2\.weight"):
        other.load_state_dict(saved.state_dict())
    assert not other.state_dict()["state"]
    for into in (build(ShardedAdam), build(ShardedAdam, "module.")):
        into.load_state_dict(saved.state_dict())
        assert len(into.state_dict()["state"]) == 3
