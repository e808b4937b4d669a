"""What a load brings back: all that was saved, or an error; never a part of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardfuse import ShardedAdam, checkpoint
from tests.support.harness import run_procs
from tests.support.runs import assert_bitwise

pytestmark = pytest.mark.timeout(100)


class Beside:
    """Keeps what it is given, on the device where it is, as averages of weights do."""

    def __init__(self, **kept: Any) -> None:
        self.kept = kept

    def state_dict(self) -> dict[str, Any]:
        """Return all of it."""
        return self.kept

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take it over."""
        self.kept = state


def make(device: str) -> dict[str, Any]:
    """Return a loop's objects before its first step; an optimizer of torch's is among them."""
    torch.manual_seed(0)
    model, extra = nn.Linear(30, 20), nn.Linear(4, 3).to(device)
    plain = torch.optim.Adam(extra.parameters(), lr=0.1)
    return {
        "model": model,
        "optimizer": ShardedAdam(model.named_parameters(), lr=0.1),
        "extra": extra,
        "plain": plain,
        "schedule": torch.optim.lr_scheduler.MultiStepLR(plain, [7]),
        "average": Beside(of=torch.zeros(3, device=device)),
        "seen": {"files": {1: 0}, "last": [{"at": 0}]},
        "none": None,
    }


def take_steps(state: dict[str, Any], num_steps: int) -> None:
    for _ in range(num_steps):
        for key in ("model", "extra"):
            module = state[key]
            width = module.in_features
            module(torch.ones(2, width, device=module.weight.device)).sum().backward()
        for key in ("optimizer", "plain", "schedule"):
            state[key].step()
        for key in ("optimizer", "plain"):
            state[key].zero_grad()


def resume(folder: Path) -> tuple[list[Tensor], list[Tensor], list[Any]]:
    """Return the weights of a run, of one that resumes it, and what else that one has then."""
    device = str(nn.Parameter(torch.zeros(())).device)
    state = make(device)
    state["schedule"] = torch.optim.lr_scheduler.MultiStepLR(state["plain"], [3, 3, 5])
    take_steps(state, 2)
    state["average"] = Beside(of=torch.ones(3, device=device), steps=[1, 2])
    state["seen"] = {"files": {1: 10, 2: 5}, "last": [{"at": 1}, {"at": 2}], "new": True}
    checkpoint.save(state, folder)
    take_steps(state, 2)
    other = make(device)
    checkpoint.load(other, folder)
    found = [other["seen"], other["schedule"].milestones, other["average"].kept]
    assert other["average"].kept["of"].device.type == torch.device(device).type
    take_steps(other, 2)
    weights = [
        [*each["model"].parameters(), *each["extra"].parameters()] for each in (state, other)
    ]
    return [*map(Tensor.detach, weights[0])], [*map(Tensor.detach, weights[1])], found


@pytest.mark.parametrize("world_size", [1, 2])
def test_what_has_grown_since(world_size: int, tmp_path: Path) -> None:
    """States of a plain optimizer, keys of dicts that are numbers, longer lists: all come back."""
    for went_on, resumed, (seen, milestones, average) in run_procs(
        world_size, resume, tmp_path / "a"
    ):
        assert_bitwise(resumed, went_on)
        assert seen == {"files": {1: 10, 2: 5}, "last": [{"at": 1}, {"at": 2}], "new": True}
        assert milestones == Counter({3: 2, 5: 1})
        assert average["steps"] == [1, 2]
        assert average["of"].tolist() == [1.0] * 3


def convolution(memory_format: torch.memory_format) -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Conv2d(3, 4, 5).to(memory_format=memory_format)
    optimizer = ShardedAdam(model.named_parameters(), lr=0.1)
    model(torch.arange(300.0).view(1, 3, 10, 10)).square().mean().backward()
    optimizer.step()
    return {"model": model, "optimizer": optimizer}


FORMATS = torch.contiguous_format, torch.channels_last


@pytest.mark.parametrize("saved", FORMATS)
@pytest.mark.parametrize("present", FORMATS)
def test_memory_formats(
    saved: torch.memory_format, present: torch.memory_format, tmp_path: Path
) -> None:
    """States lie as their parameter does; loaded into another order they would be mixed up."""
    checkpoint.save(convolution(saved), tmp_path / "a")
    state = convolution(present)
    if saved == present:
        checkpoint.load(state, tmp_path / "a")
        return
    before = {name: value.clone() for name, value in state["model"].state_dict().items()}
    with pytest.raises(checkpoint.CheckpointError, match=r"weight had the strides.*channels_last"):
        checkpoint.load(state, tmp_path / "a")
    after = state["model"].state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())


class Copying(nn.Module):
    """Its state_dict() gives copies of what ``is_copied`` says, and a tensor as extra state."""

    def __init__(self, is_copied: Callable[[str], bool]) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 2)
        self.register_buffer("mean", torch.zeros(3))
        self.noted = torch.zeros(2)
        self.is_copied = is_copied

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return copies, as some do to leave a device or a wrapper."""
        whole = super().state_dict(*args, **kwargs)
        return {key: v.clone() if self.is_copied(key) else v for key, v in whole.items()}

    def get_extra_state(self) -> Tensor:
        """Return a copy, too."""
        return self.noted.clone()

    def set_extra_state(self, state: Tensor) -> None:
        """Take it over."""
        self.noted = state.clone()


def of_copies(is_copied: Callable[[str], bool]) -> dict[str, Any]:
    model = Copying(is_copied)
    return {"model": model, "optimizer": ShardedAdam(model.named_parameters(), lr=0.1)}


def test_a_state_dict_of_copies(tmp_path: Path) -> None:
    """What is read goes to the module, not into copies; a parameter's parts cannot."""
    state, other = (of_copies(lambda key: key == "mean") for _ in range(2))
    state["model"].mean.fill_(3.0)
    state["model"].noted.fill_(4.0)
    checkpoint.save(state, tmp_path / "a")
    checkpoint.load(other, tmp_path / "a")
    assert other["model"].mean.tolist() == [3.0] * 3
    assert other["model"].noted.tolist() == [4.0] * 2
    assert torch.equal(other["model"].inner.weight, state["model"].inner.weight)
    copies = of_copies(lambda key: key != "_extra_state")
    match = r"state_dict\(\) of 'model' has a copy of inner.weight"
    with pytest.raises(checkpoint.CheckpointError, match=match):
        checkpoint.save(copies, tmp_path / "b")
    with pytest.raises(checkpoint.CheckpointError, match=match):
        checkpoint.load(copies, tmp_path / "a")


def values_replaced(folder: Path) -> list[Any]:
    """Return values as they are loaded, where others were before."""
    optimizer = ShardedAdam(nn.Linear(4, 2).named_parameters())
    saved = {"best": torch.tensor(0.75), "history": torch.arange(3), "first": torch.tensor(7)}
    objects = {"optimizer": optimizer}
    checkpoint.save({**objects, **saved, "count": 5}, folder / "values")
    loaded: dict[str, Any] = {"best": torch.tensor(0), "history": torch.zeros(0), "first": None}
    loaded |= {**objects, "count": torch.tensor(0)}
    checkpoint.load(loaded, folder / "values")
    return [loaded[key] for key in (*saved, "count")]


def test_values_are_replaced_whatever_was_there(tmp_path: Path) -> None:
    """A tensor has the dtype and shape that it was saved with, not those of the first one."""
    found = [values_replaced(tmp_path / "alone"), *run_procs(2, values_replaced, tmp_path / "two")]
    for best, history, first, count in found:
        assert best.item() == 0.75
        assert history.tolist() == [0, 1, 2]
        assert (history.dtype, first.item(), count) == (torch.int64, 7, 5)
