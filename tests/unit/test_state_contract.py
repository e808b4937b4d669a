"""What torch's ecosystem relies on: optimizer.state, state-dict hooks, saving on the first rank."""

from __future__ import annotations

import copy
import logging
import math
import pickle
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardfuse import ShardConfig, ShardedAdam, ShardedSGD
from shardfuse.fragments import FragmentTensor
from shardfuse.integrations import consolidate_on_save, trainer_callback
from shardfuse.optim import stateful
from tests.support.harness import run_threads

pytestmark = pytest.mark.timeout(60)


def trained(steps: int, **sharding: Any) -> tuple[list[nn.Parameter], Any]:
    """Return parameters, one of them frozen, and their optimizer after some steps."""
    params = [nn.Parameter(torch.ones(40, 50)), nn.Parameter(torch.ones(3), requires_grad=False)]
    optimizer = ShardedAdam(params, lr=0.1, sharding=sharding)
    for _ in range(steps):
        params[0].grad = torch.ones(40, 50)
        optimizer.step()
    return params, optimizer


# optimizer.state


@pytest.mark.parametrize("steps", [0, 2])
def test_state_with_one_rank(steps: int) -> None:
    """A tensor of the parameter's shape per state, which is the optimizer's own."""
    (param, frozen), optimizer = trained(steps)
    assert optimizer.state
    assert list(optimizer.state) == [param]
    assert optimizer.state[frozen] == {}
    entry = optimizer.state[param]
    assert entry["step"] == steps
    assert entry["exp_avg"].shape == param.shape
    assert bool(entry["exp_avg"].any()) == (steps > 0)
    entry["exp_avg"].fill_(3.0)
    param.grad = torch.ones(40, 50)
    optimizer.step()
    saved = optimizer.state_dict()["state"][0]["exp_avg"]
    torch.testing.assert_close(saved, torch.full((40, 50), 3.0 * 0.9 + 0.1).cpu())
    assert torch.equal(saved, entry["exp_avg"].cpu())


def test_state_of_a_parameter_that_is_not_ours() -> None:
    """KeyError, as for a mapping; get() gives None."""
    _, optimizer = trained(1)
    with pytest.raises(KeyError, match="not a parameter"):
        optimizer.state[torch.ones(3)]
    assert optimizer.state.get(torch.ones(3)) is None


def parts() -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    (param, _), optimizer = trained(2)
    entry = optimizer.state[param]
    value = entry["exp_avg"]
    assert isinstance(value, FragmentTensor)
    assert value.shape == param.shape
    assert entry["step"] == 2
    with pytest.raises(NotImplementedError, match="only this rank's part"):
        value + 1
    for piece in value.pieces:
        assert piece.data.any()
    return [(piece.offsets, tuple(piece.data.shape)) for piece in value.pieces]


def test_state_with_several_ranks() -> None:
    """Pieces of the parameter's shape, which together are the parameter once."""
    covered = torch.zeros(40, 50)
    for pieces in run_threads(3, parts):
        for offsets, sizes in pieces:
            covered[tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))] += 1
    assert torch.equal(covered, torch.ones(40, 50))


def replace() -> None:
    (param, _), optimizer = trained(1)
    for key, value in optimizer.state[param].items():  # as Lightning moves states
        if key != "step":
            entry = optimizer.state[param]
            entry[key] = entry[key].to(param.device)
            assert type(value) is type(entry[key])
    for attempt in (
        lambda: optimizer.state[param].update(exp_avg=torch.zeros(40, 50)),
        lambda: optimizer.state[param].__setitem__("exp_avg", torch.zeros(40, 50)),
        lambda: optimizer.state.__setitem__(param, {}),
        lambda: optimizer.state.clear(),
        lambda: setattr(optimizer, "state", defaultdict(dict)),
    ):
        with pytest.raises(RuntimeError, match="load_state_dict"):
            attempt()
    assert type(copy.deepcopy(optimizer.state[param])) is dict


def test_replacing_states_is_refused_in_words() -> None:
    """It would have no effect; putting back what is there is allowed."""
    trained_alone = trained(1)[1]
    assert trained_alone.state
    with pytest.raises(RuntimeError, match="load_state_dict"):
        trained_alone.state = {}
    run_threads(2, replace)


def test_fragments_are_copied_and_not_pickled() -> None:
    """A copy is one of its own; a file of one rank's part is refused."""
    data = torch.arange(6.0)
    tensor = FragmentTensor((10,), data.dtype, data.device, [((2,), data)])  # type: ignore[list-item]
    with pytest.raises(TypeError, match="consolidate_state_dict"):
        pickle.dumps(tensor)


# Hooks


def record(optimizer: torch.optim.Optimizer, calls: list[Any]) -> None:
    """Register two hooks of each kind; the second of those that may replaces the dict."""

    def renamed(name: str) -> Any:
        def hook(own: Any, state_dict: Any) -> Any:
            calls.append((name, own is optimizer, sorted(state_dict)))
            return {**state_dict, name: 1}

        return hook

    def noted(name: str) -> Any:
        return lambda *args: calls.append((name, args[0] is optimizer, len(args)))

    optimizer.register_state_dict_pre_hook(noted("save pre 2"))
    optimizer.register_state_dict_pre_hook(noted("save pre 1"), prepend=True)
    optimizer.register_state_dict_post_hook(noted("save post 1"))
    optimizer.register_state_dict_post_hook(renamed("save post 2"))
    optimizer.register_load_state_dict_pre_hook(renamed("load pre 1"))
    optimizer.register_load_state_dict_pre_hook(renamed("load pre 2"))
    optimizer.register_load_state_dict_post_hook(noted("load post 1"))
    optimizer.register_load_state_dict_post_hook(noted("load post 2"))


def test_hooks_are_called_as_by_torch() -> None:
    """The same calls, in the same order, with the same arguments; what they return counts."""
    seen = []
    for cls in (torch.optim.SGD, ShardedSGD):
        optimizer = cls([nn.Parameter(torch.ones(3))], lr=0.1)
        calls: list[Any] = []
        record(optimizer, calls)
        state_dict = optimizer.state_dict()
        assert state_dict["save post 2"] == 1
        before = dict(state_dict)
        optimizer.load_state_dict(state_dict)
        assert state_dict == before
        seen.append(calls)
    assert len(seen[0]) == 8
    assert seen[0] == seen[1]


def test_a_hook_changes_what_is_loaded() -> None:
    """And a removed one does not."""
    _, optimizer = trained(1)

    def slower(own: Any, state_dict: Any) -> Any:
        groups = [{**group, "lr": 0.01} for group in state_dict["param_groups"]]
        return {**state_dict, "param_groups": groups}

    handle = optimizer.register_load_state_dict_pre_hook(slower)
    saved = optimizer.state_dict()
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["lr"] == 0.01
    handle.remove()
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["lr"] == 0.1


def gather_in_a_hook() -> None:
    _, optimizer = trained(1)
    optimizer.register_state_dict_pre_hook(lambda own: own.consolidate_state_dict(to=None))
    optimizer.register_state_dict_post_hook(lambda own, saved: saved["state"].clear())
    assert optimizer.state_dict()["state"] == {}
    optimizer._optimizer_state_dict_post_hooks.clear()
    assert optimizer.state_dict()["state"][0]["step"] == 1


def test_hooks_with_several_ranks() -> None:
    """One may consolidate; what one changes in place is not changed for the next caller."""
    run_threads(2, gather_in_a_hook)


# Saving on the first rank


def save_on_first_rank() -> list[int]:
    params, optimizer = trained(0, consolidate_every=2)
    saved = []
    for call in range(1, 6):
        params[0].grad = torch.ones(40, 50)
        optimizer.step()
        if dist.get_rank() == 0 and call % 2 == 0:
            saved.append(optimizer.state_dict()["state"][0]["step"])
    with pytest.raises(RuntimeError, match=r"consolidate_every=2 .* 5"):
        optimizer.state_dict()
    return saved


def test_consolidate_every() -> None:
    """There state_dict() on the first rank alone works, with no call on the others."""
    assert run_threads(3, save_on_first_rank) == [[2, 4], [], []]


def save_after_a_scheduler() -> tuple[float, int]:
    params, optimizer = trained(0, consolidate_every=1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)
    params[0].grad = torch.ones(40, 50)
    optimizer.step()
    scheduler.step()
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(5))]})
    if dist.get_rank() > 0:
        return 0.0, 0
    saved = optimizer.state_dict()
    return saved["param_groups"][0]["lr"], len(saved["param_groups"])


def test_groups_are_saved_as_they_are() -> None:
    """Schedulers step after step(), which consolidates: their lr was lost, and so were groups."""
    assert run_threads(2, save_after_a_scheduler) == [(0.05, 2), (0.0, 0)]


def test_a_tensor_of_a_loaded_group_is_not_the_callers() -> None:
    """As torch's own: a scheduler that fills it in place leaves what was loaded from as it is."""
    _, optimizer = trained(1)
    saved = optimizer.state_dict()
    saved["param_groups"][0]["lr"] = lr = torch.tensor(0.25)
    optimizer.load_state_dict(saved)
    optimizer.param_groups[0]["lr"].fill_(0.5)
    assert float(lr) == 0.25


@pytest.mark.parametrize("value", [-1, 1.5, True, "2"])
def test_consolidate_every_is_checked(value: Any) -> None:
    """A number of steps that is not one is refused when the optimizer is built."""
    with pytest.raises((ValueError, TypeError), match="consolidate_every"):
        ShardConfig(consolidate_every=value)


@pytest.mark.parametrize(
    ("world_size", "sharding", "number"),
    [(1, {}, 0), (3, {}, 1), (3, {"consolidate_every": 0}, 0), (3, {"consolidate_every": 2}, 0)],
)
def test_first_step_says_that_saving_on_one_rank_fails(
    world_size: int,
    sharding: dict[str, Any],
    number: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """One line, once, on the first rank, and only where that was not decided."""
    monkeypatch.setattr(stateful, "_logged", set())
    # These tests name such methods themselves.
    monkeypatch.setattr(stateful, "may_save_on_one_rank", lambda: True)
    with caplog.at_level(logging.WARNING, "shardfuse"):
        run_threads(world_size, lambda: trained(3, **sharding) and None)
    lines = [text for text in caplog.messages if "state_dict() on rank 0" in text]
    assert len(lines) == number
    assert all("Call consolidate_state_dict() on all ranks before it" in text for text in lines)


def test_nothing_is_said_to_those_who_save_otherwise(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A program that resumes by sharded_state_dict() knows."""
    monkeypatch.setattr(stateful, "_logged", set())
    monkeypatch.setattr(stateful, "may_save_on_one_rank", lambda: True)

    def body() -> None:
        params, optimizer = trained(0)
        optimizer.sharded_state_dict()
        params[0].grad = torch.ones(40, 50)
        optimizer.step()

    run_threads(2, body)
    assert not caplog.messages


def test_nothing_is_said_where_accelerate_gathers_states(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Also where consolidate_on_save() comes before prepare(), which brings the optimizer."""
    monkeypatch.setattr(stateful, "_logged", set())
    monkeypatch.setattr(stateful, "may_save_on_one_rank", lambda: True)
    accelerator = SimpleNamespace(_optimizers=[], register_save_state_pre_hook=lambda hook: hook)
    consolidate_on_save(accelerator)
    run_threads(2, lambda: trained(2) and None)
    assert not caplog.messages


@pytest.mark.parametrize("how", ["accelerate", "trainer"])
def test_accelerate_knows_of_skipped_steps(how: str) -> None:
    """Its schedules, and Trainer's, go by that; the scaler calls step(), which skips by itself."""
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True)
    param = nn.Parameter(torch.ones(3))
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    wrapper = accelerate.optimizer.AcceleratedOptimizer(ShardedAdam([param]), scaler=scaler)
    if how == "accelerate":
        accelerator._optimizers.append(wrapper)
        consolidate_on_save(accelerator)
    else:
        pytest.importorskip("transformers")
        trainer_callback().on_train_begin(None, None, None, optimizer=wrapper)
    told = []
    for factor in (1.0, math.inf, 1.0):
        scaler.scale(param.sum() * factor).backward()
        wrapper.step()
        wrapper.zero_grad()
        told.append(wrapper.step_was_skipped)
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    assert told == [False, True, False]
