"""What programs do to groups and parameters between steps is followed, or refused in words."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from shardfuse import ShardedAdam, ShardedSGD
from shardfuse.training import StepMonitor

pytestmark = pytest.mark.timeout(60)

Groups = list[dict[str, Any]]


def to_the_neighbour(groups: Groups) -> None:
    groups[0]["params"].append(groups[1]["params"].pop(0))


def to_one_group(groups: Groups) -> None:
    groups[0]["params"] += groups.pop()["params"]


def to_a_group_of_their_own(groups: Groups) -> None:
    groups.append({**groups[1], "params": [groups[1]["params"].pop()]})


@pytest.mark.parametrize("move", [to_the_neighbour, to_one_group, to_a_group_of_their_own])
def test_parameters_stay_in_their_groups(move: Callable[[Groups], None]) -> None:
    """One that had moved kept the hyper-parameters of its old group, silently."""
    params = [nn.Parameter(torch.ones(8)) for _ in range(4)]
    optimizer = ShardedSGD([{"params": params[:2], "lr": 0.1}, {"params": params[2:], "lr": 0.2}])
    for param in params:
        param.grad = torch.ones(8)
    optimizer.step()
    before = [param.detach().clone() for param in params]
    move(optimizer.param_groups)
    with pytest.raises(RuntimeError, match="in another group or order"):
        optimizer.step()
    assert all(map(torch.equal, params, before))


def test_a_square_weight_that_was_transposed() -> None:
    """Its shape and address are as before, and its elements elsewhere: refused, until rebind()."""
    weight = nn.Parameter(torch.arange(9.0).view(3, 3))
    optimizer = ShardedSGD([("weight", weight)], lr=1.0)
    weight.data = weight.data.t()
    expected = weight.detach().clone() - torch.arange(9.0).view(3, 3).to(weight.device)
    weight.grad = torch.arange(9.0).view(3, 3).to(weight)
    with pytest.raises(RuntimeError, match=r"weight.*rebind\(\)"):
        optimizer.step()
    optimizer.rebind()
    optimizer.step()
    assert torch.equal(weight, expected)


def test_monitor_of_an_empty_parameter_and_of_a_group_that_comes_later() -> None:
    weight, empty = nn.Parameter(torch.ones(600)), nn.Parameter(torch.ones(0))
    optimizer = ShardedAdam([("weight", weight), ("empty", empty)], lr=0.1)
    monitor = StepMonitor(optimizer, every=1)
    for param in (weight, empty):
        param.grad = torch.ones_like(param)
    optimizer.step()
    optimizer.add_param_group({"params": [("late", nn.Parameter(torch.ones(5)))]})
    (record,) = monitor.close()
    assert record.grad_norm == pytest.approx(math.sqrt(600))
