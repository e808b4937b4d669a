"""Every hyper-parameter of every class, as what it cannot be, wherever it is given."""

from __future__ import annotations

import copy
import re
from decimal import Decimal
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from shardfuse import ShardConfig, ShardedAdamW, ShardedLamb, ShardedSGD
from shardfuse.engine import consistency
from shardfuse.engine.consistency import HyperParams
from shardfuse.engine.params import FlatState
from shardfuse.optim import base as optim_base
from shardfuse.optim import paddle
from tests.support.edited_dicts import KINDS, Kind, bits, build, train

NAN, INF = float("nan"), float("inf")
HUGE = 10**400

VALUES: dict[str, Any] = {
    "nan": NAN,
    "inf": INF,
    "-inf": -INF,
    "-1": -1,
    "text": "0.1",
    "None": None,
    "True": True,
    "huge": HUGE,
    "1e300": 1e300,
    "two": torch.ones(2),
    "complex": 1j,
    "list": [0.5],
    "dict": {},
}

SWITCHES = {
    "amsgrad", "nesterov", "centered", "decoupled_decay", "lr_in_momentum", "maximize",
}  # fmt: skip
OF_TORCH = {"foreach", "fused", "capturable", "differentiable"}  # the last one: test_torch_keys.py
SIGNED = {"dampening"}  # torch.optim.SGD takes any
DECAYS_OF_ANY_SIGN = ("BertAdam", "Lamb")  # torch_npu and Paddle take any


def takes(kind: Kind, key: str, value: str) -> bool:
    """Return whether upstream gives this value a meaning: see the table in optim/README.md."""
    if key in SWITCHES:
        # Nesterov's needs a momentum and no dampening, which KINDS has; Paddle has no maximize.
        may_be = kind.cls is not paddle.Lamb and kind is not KINDS["ShardedSGD plain"]
        return value == "None" or (value == "True" and may_be)
    if value == "True":  # the number 1
        return key not in ("b1", "b2", "beta1", "beta2", "betas", "warmup", "schedule", "grad_clip")
    if value == "-1":
        is_decay = key in ("weight_decay", "lamb_weight_decay", "l2")
        any_sign = is_decay and kind.cls.__name__.endswith(DECAYS_OF_ANY_SIGN)
        return key in {*SIGNED, "warmup", "t_total", "max_grad_norm"} or any_sign
    if key == "grad_clip":
        return value == "None"
    if value in ("inf", "1e300"):
        return key in ("max_grad_norm", "delta")
    # BertAdam's bound is none where it is not above 0.
    return value == "-inf" and key == "max_grad_norm"


def keys_of(kind: Kind) -> list[str]:
    own = {"params", "param_names", "step", *OF_TORCH}
    return [key for key in build(kind, 0).param_groups[0] if key not in own]


def refusal(act: Any) -> str:
    try:
        act()
    except (TypeError, ValueError) as error:
        return str(error)
    return ""


def of_paddle(key: str) -> str | None:
    """Return the key in a group dict of Paddle's for one of the rule's."""
    names = {"eps": "epsilon", "weight_decay": "lamb_weight_decay", "lr_scale": "learning_rate"}
    names |= {"l2": "weight_decay", "lr": "", "betas": "", "grad_clip": ""}
    return names.get(key, key) or None


def one() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(2))]


@pytest.mark.parametrize("place", ["constructor", "late group", "edit", "state dict"])
@pytest.mark.parametrize("name", KINDS)
def test_every_value_of_every_key(name: str, place: str) -> None:
    """It is refused at once, by name, and nothing changes; or upstream gives it a meaning."""
    kind = KINDS[name]
    optimizer = build(kind, 1)
    saved = copy.deepcopy(optimizer.state_dict())
    wrong = []
    for key in keys_of(kind):
        for text, value in VALUES.items():
            before = bits(optimizer)
            given = of_paddle(key) if kind.cls is paddle.Lamb else key
            own = optimizer.param_groups[0][key]
            if place == "constructor":
                options = {**kind.options, "lr": 0.1, given: value}
                if kind.cls is paddle.Lamb or given is None:
                    continue
                said = refusal(lambda: kind.cls(one(), **options))  # noqa: B023
            elif place == "late group":
                if given is None or (given == "learning_rate" and value is None):
                    continue
                group = {"params": [("late", one()[0])], given: value}
                adding = build(kind, 0)
                said = refusal(lambda: adding.add_param_group(group))  # noqa: B023
                assert not said or len(adding.param_groups) == 2
            elif place == "edit":
                optimizer.param_groups[0][key] = value
                changed = bits(optimizer)
                said = refusal(lambda: train(optimizer, 1))
                if said and bits(optimizer) != changed:
                    wrong.append(f"{key} = {text} has changed something: {said}")
                optimizer.param_groups[0][key] = own
            else:
                told = copy.deepcopy(saved)
                told["param_groups"][0][key] = value
                said = refusal(lambda: optimizer.load_state_dict(told))  # noqa: B023
                if said and bits(optimizer) != before:
                    wrong.append(f"{key} = {text} has changed something: {said}")
                optimizer.load_state_dict(copy.deepcopy(saved))
            paddles = kind.cls is paddle.Lamb and place == "late group"
            if paddles and text in ("True", "None"):  # Paddle takes no bool; None may be left out
                continue
            if "loaded state dict has no" in said:  # a state that the switch needs
                continue
            if bool(said) is takes(kind, key, text):
                wrong.append(f"{key} = {text}: {said or 'taken'}")
            elif said and not _names(said, key):
                wrong.append(f"{key} = {text} is not named: {said}")
    assert wrong == []


WORDS = {"lr": "learning rate", "eps": "epsilon", "e": "epsilon", "l2": "weight_decay"}
WORDS |= {"betas": "beta", "lr_scale": "learning_rate", "nesterov": "Nesterov|nesterov"}


def _names(said: str, key: str) -> bool:
    """Return whether an error has the name of a key, or upstream's words for it."""
    return re.search(rf"{WORDS.get(key, key)}|\b{key}\b", said) is not None


@pytest.mark.parametrize(
    "options",
    [
        {"variant": []},
        {"adam": "no"},
        {"use_global_grad_norm": NAN},
        {"max_grad_norm": NAN},
        {"max_grad_norm": "1"},
        {"clamp_value": "10"},
        {"clamp_value": -HUGE},
        {"min_coeff": INF},
        {"max_coeff": 1j},
        {"bias_correction": 1},
        {"always_adapt": "False"},
    ],
    ids=str,
)
def test_what_lamb_has_beside_groups(options: dict[str, Any]) -> None:
    """Its switches and bounds, which the constructor alone takes, are named, too."""
    with pytest.raises((TypeError, ValueError), match=next(iter(options))):
        ShardedLamb([("w", one()[0])], **options)


@pytest.mark.parametrize("value", [NAN, -INF, -1, "0.1", None, torch.ones(2), 1j, -HUGE], ids=str)
def test_bounds_of_clips(value: Any) -> None:
    """A bound that is no number above 0 is refused where it is given."""
    for make in (paddle.ClipGradByNorm, paddle.ClipGradByGlobalNorm, paddle.ClipGradByValue):
        with pytest.raises((TypeError, ValueError), match=r"clip_norm|max|bounds"):
            make(value)
    with pytest.raises((TypeError, ValueError), match="max_norm"):
        ShardedAdamW(one(), lr=0.1).clip_grad_norm(value)
    if value is not None:
        with pytest.raises((TypeError, ValueError), match="clip_grad_norm"):
            ShardConfig(clip_grad_norm=value)


@pytest.mark.parametrize(
    "value", [NAN, INF, -1, "0.1", None, True, HUGE, torch.ones(2), 1j], ids=lambda v: str(v)[:9]
)
def test_rates_of_paddle(value: Any) -> None:
    """Its constructor and set_lr() take no bool, as Paddle's own."""
    words = r"learning.rate"
    optimizer = paddle.Lamb(parameters=one())
    with pytest.raises((TypeError, ValueError), match=words):
        paddle.Lamb(learning_rate=value, parameters=one())
    with pytest.raises((TypeError, ValueError), match=words):
        optimizer.set_lr(value)
    assert optimizer.get_lr() == 0.001
    for name in ("beta1", "beta2"):
        with pytest.raises((TypeError, ValueError), match="beta"):
            paddle.Lamb(parameters=one(), **{name: value})


def test_a_schedule_may_end_below_zero_by_rounding() -> None:
    """torch's LinearLR does: the last steps of a run, and its checkpoint, go on."""
    optimizer = ShardedAdamW(one(), lr=1 / 3)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1 / 3, 0.0, total_iters=97)
    for _ in range(97):
        train(optimizer, 1)
        schedule.step()
    assert -1e-12 < optimizer.param_groups[0]["lr"] < 0
    train(optimizer, 1)
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


@pytest.mark.cpu_only("an lr on a device is not read when it changes in place")
def test_checked_when_they_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not in every step: a check of an lr on a device makes the host wait for it."""
    (param,) = one()
    lr = torch.tensor(0.1)
    optimizer = ShardedAdamW([param], lr=lr)
    checked: list[Any] = []
    check = optim_base.check_group

    def counted(rule: Any, group: Any, *options: Any) -> None:
        checked.append(float(group["lr"]))
        check(rule, group, *options)

    monkeypatch.setattr(optim_base, "check_group", counted)

    def step() -> None:
        param.grad = torch.ones_like(param)
        optimizer.step()

    for _ in range(3):
        step()
    assert checked == pytest.approx([0.1])
    lr.mul_(0.5)  # as a scheduler of torch does in place
    for _ in range(2):
        step()
    assert checked == pytest.approx([0.1, 0.05])
    lr.fill_(-1.0)
    for _ in range(2):  # each time, until it is mended
        assert "lr" in refusal(step) or "learning rate" in refusal(step)
    lr.fill_(0.2)
    step()
    assert checked[-1] == pytest.approx(0.2)


class WithoutMomentum:
    """An SGD over one parameter, whose momentum is set in the middle of training."""

    def __init__(self) -> None:
        (self.param,) = one()
        self.optimizer = ShardedSGD([self.param], lr=0.1, momentum=0.0)

    def step(self) -> bool:
        """Update; return whether the state has a momentum buffer."""
        self.param.grad = torch.ones_like(self.param)
        self.optimizer.step()
        return "momentum_buffer" in self.optimizer.state_dict()["state"].get(0, {})


@pytest.mark.parametrize("kind", [float, Decimal, np.array, torch.tensor])
def test_a_state_is_allocated_when_it_is_needed(kind: Any) -> None:
    """Whatever kind of number says so."""
    run = WithoutMomentum()
    run.optimizer.param_groups[0]["momentum"] = kind(0.0)
    assert not run.step()
    run.optimizer.param_groups[0]["momentum"] = kind(0.9)
    assert run.step()


def test_a_number_that_changes_in_place() -> None:
    """As an array of no dimension does."""
    run = WithoutMomentum()
    lr = np.array(0.1)
    run.optimizer.param_groups[0]["lr"] = lr
    run.step()
    lr[...] = -1.0
    assert "learning rate" in refusal(run.step)


def test_a_loaded_state_without_what_the_settings_need() -> None:
    """The settings of the run win over the loaded ones, and are those of before the load."""
    run, other = WithoutMomentum(), WithoutMomentum()
    run.optimizer.param_groups[0]["momentum"] = 0.9
    assert run.step()
    other.step()
    run.optimizer.load_state_dict(other.optimizer.state_dict())
    run.optimizer.param_groups[0]["momentum"] = 0.9
    assert run.step()


def test_memory_that_does_not_suffice_at_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next step allocates the state."""
    run = WithoutMomentum()
    run.step()
    run.optimizer.param_groups[0]["momentum"] = 0.9

    def fail(*_: Any) -> bool:
        raise MemoryError

    with monkeypatch.context() as patched:
        patched.setattr(FlatState, "allocate", fail)
        with pytest.raises(MemoryError):
            run.step()
    assert run.step()


def accepted(group: dict[str, Any]) -> HyperParams:
    """Return what keeps the values of ``group``."""
    found = HyperParams()
    found.accept(0, group, found.changes([group])[0])
    return found


@pytest.mark.cpu_only("an lr on a device is not read when it changes in place")
def test_changes_are_of_values() -> None:
    """Changed, new and gone keys are found, also in objects that change themselves; others not."""
    betas, lr = [0.9, 0.99], torch.tensor(0.5)
    group: dict[str, Any] = {"params": [], "lr": lr, "betas": betas, "eps": None}
    known = accepted(group)
    assert known.changes([group]) == {}
    assert known.changes([{**group, "params": [1], "lr": 0.5, "betas": (0.9, 0.99)}]) == {}
    assert known.changes([dict(reversed(group.items()))]) == {}
    lr.fill_(0.25)
    betas[1] = 0.999
    assert known.changes([group]) == {0: {"lr": 0.25, "betas": (0.9, 0.999)}}
    known.accept(0, group, known.changes([group])[0])
    assert known.changes([group]) == {}
    less = {key: value for key, value in group.items() if key != "eps"}
    assert [*known.changes([less])[0]] == ["eps"]
    assert known.changes([{**group, "step": None}]) == {0: {"step": None}}
    known.accept(0, less, known.changes([less])[0])
    assert known.changes([less]) == {}
    assert known.changes([group]) == {0: {"eps": None}}
    assert known.entries(1) == ["lr = 0.25 in group 0", "betas = (0.9, 0.999) in group 0"]


def test_entries_do_not_depend_on_the_order_of_changes() -> None:
    """Ranks that took over the same values one by one, or together, declare the same."""
    old = {"params": [], "lr": 1.0, "eps": 1e-8, "betas": (0.9, 0.99)}
    new = {**old, "lr": 2.0, "eps": 1e-6, "nesterov": True}
    together, one_by_one = accepted(old), accepted(old)
    together.accept(0, new, together.changes([new])[0])
    for key in ("nesterov", "eps", "lr"):
        old[key] = new[key]
        one_by_one.accept(0, old, one_by_one.changes([old])[0])
    assert together.entries(1) == one_by_one.entries(1)
    assert together.entries(1)[:2] == ["lr = 2 in group 0", "eps = 1e-06 in group 0"]


def test_a_schedule_costs_one_value_of_each_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every step of a schedule has other rates: the other values are not read again."""
    params = [nn.Parameter(torch.ones(3)) for _ in range(20)]
    optimizer = ShardedAdamW([{"params": [p], "lr": 0.1} for p in params])
    read: list[Any] = []
    comparable = consistency._comparable
    monkeypatch.setattr(consistency, "_comparable", lambda v: read.append(v) or comparable(v))
    for step in range(3):
        read.clear()
        for param, group in zip(params, optimizer.param_groups, strict=True):
            param.grad = torch.ones(3)
            group["lr"] = 0.1 / (step + 2)
        optimizer.step()
        if step > 0:
            assert read == [0.1 / (step + 2)] * len(params)
