"""What groups have, through checkpoints of shardfuse and of torch: numbers, tensors and steps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

from shardfuse import ShardedAdam, checkpoint
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
    for values in [other_lr(way, tmp_path / "alone"), *run_procs(2, other_lr, way, tmp_path)]:
        assert [float(value) for value in values] == [0.5] * 3
        assert [isinstance(value, Tensor) for value in values] == [False, True, True]
