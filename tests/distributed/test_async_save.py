"""dcp.async_save() of a sharded_state_dict(): training goes on while files are written."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.staging import BlockingAsyncStager

from shardfuse.fragments import FragmentTensor
from tests.distributed.test_torch_state_dict import build, train, values
from tests.support.harness import run_procs, run_threads
from tests.support.runs import assert_bitwise

pytestmark = [
    pytest.mark.timeout(180),
    # torch.distributed.checkpoint's own, on torch 2.13.
    pytest.mark.filterwarnings("ignore::FutureWarning:torch"),
    pytest.mark.filterwarnings("ignore::UserWarning:torch"),
]


class SlowWriter(dcp.FileSystemWriter):
    """Writes only once training has gone on."""

    may_write: Any = None

    def write_data(self, *args: Any, **kwargs: Any) -> Any:
        """Wait, then write."""
        assert self.may_write.wait(60)
        return super().write_data(*args, **kwargs)


def save_while_training(name: str, folder: str) -> tuple[list[Tensor], list[Tensor]]:
    """Save after 3 steps; return the params there and after 3 more, taken while it is written."""
    import threading

    model, optimizer = build(name)
    group = dist.new_group()
    train(model, optimizer, range(3))
    saved = values(model)
    writer = SlowWriter(folder)
    writer.may_write = threading.Event()
    future: Any = dcp.async_save(
        {"optimizer": optimizer.sharded_state_dict()}, storage_writer=writer, process_group=group
    )
    train(model, optimizer, range(3, 6))
    assert not future.done()
    writer.may_write.set()
    future.result()
    return saved, values(model)


def load(name: str, folder: str, saved: list[Tensor]) -> list[Tensor]:
    model, optimizer = build(name)
    with torch.no_grad():
        for param, value in zip(model.parameters(), saved, strict=True):
            param.copy_(value)
    state = {"optimizer": optimizer.sharded_state_dict()}
    dcp.load(state, checkpoint_id=folder)
    optimizer.load_sharded_state_dict(state["optimizer"])
    train(model, optimizer, range(3, 6))
    return values(model)


_NEEDS_A_STAGER = pytest.mark.skipif(
    torch.__version__ < "2.8",
    reason="torch.distributed.checkpoint.async_save() of 2.7 makes plain tensors of everything",
)


@_NEEDS_A_STAGER
@pytest.mark.cpu_only("torch's async_save() needs gloo beside another backend")
def test_training_goes_on_while_it_saves(tmp_path: Path) -> None:
    """The files hold the state of the call, bitwise, also at another number of ranks."""
    name = "adamw-bf16"
    ((saved, expected), _) = run_procs(2, save_while_training, name, str(tmp_path))
    for world_size in (2, 3):
        for result in run_procs(world_size, load, name, str(tmp_path), saved):
            assert_bitwise(result, expected)


def stage() -> None:
    model, optimizer = build("adamw")
    train(model, optimizer, range(2))
    state = optimizer.sharded_state_dict()
    key = "state.body.0.weight.exp_avg"
    own = state[key]
    before = [piece.data.clone() for piece in own.pieces]
    copies = [copy.deepcopy(state)[key], own.clone(), own.to("cpu", copy=True)]
    copies.append(BlockingAsyncStager().stage({key: own})[key])
    train(model, optimizer, range(2, 4))
    for copied in copies:
        assert isinstance(copied, FragmentTensor)
        assert copied.has_same_chunks(own)
        for piece, live, value in zip(copied.pieces, own.pieces, before, strict=True):
            assert torch.equal(piece.data.cpu(), value.cpu())
            assert not torch.equal(piece.data.cpu(), live.data.cpu())
    with pytest.raises(NotImplementedError, match="only this rank's part"):
        torch.zeros(own.shape).copy_(own)


@_NEEDS_A_STAGER
def test_copies_are_of_the_moment() -> None:
    """By whatever the stagers of torch call; into a whole tensor, with garbage, never."""
    run_threads(2, stage)


def load_a_copy() -> None:
    """What was loaded into a copy is taken over, and not left aside."""
    model, optimizer = build("adamw")
    train(model, optimizer, range(2))
    state = copy.deepcopy(optimizer.sharded_state_dict())
    kept = values(model)
    train(model, optimizer, range(2, 4))
    expected = values(model)
    with torch.no_grad():
        for param, value in zip(model.parameters(), kept, strict=True):
            param.copy_(value)
    optimizer.load_sharded_state_dict(state)
    train(model, optimizer, range(2, 4))
    assert_bitwise(values(model), expected)
    del state["state.scale.exp_avg"]
    with pytest.raises(ValueError, match=r"state\.scale\.exp_avg is missing"):
        optimizer.load_sharded_state_dict(state)


def test_loading_from_a_copy() -> None:
    """Pieces are copied where the dict does not alias the state; none may be missing."""
    run_threads(2, load_a_copy)
