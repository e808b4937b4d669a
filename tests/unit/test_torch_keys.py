"""Keys of torch's parameter groups: those that change the math are honoured or refused in words."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardfuse
from shardfuse import (
    ShardedAdadelta,
    ShardedAdam,
    ShardedAdamW,
    ShardedBertAdam,
    ShardedLamb,
    ShardedRMSprop,
    ShardedRMSpropTF,
    ShardedSGD,
)
from shardfuse.optim import npu, paddle
from tests.support.harness import run_threads
from tests.support.upstream import CLASSES
from tests.unit.test_validation import ALL, case_id, one_param

EAGER = {"kernel": "eager"}
# Class, torch's of the same formula, options.
TWINS: list[tuple[Any, Any, dict[str, Any]]] = [
    (ShardedSGD, torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}),
    (ShardedAdam, torch.optim.Adam, {"lr": 0.1, "weight_decay": 0.1}),
    (ShardedAdamW, torch.optim.AdamW, {"lr": 0.1, "amsgrad": True}),
    (ShardedRMSprop, torch.optim.RMSprop, {"lr": 0.1, "momentum": 0.9, "centered": True}),
    (ShardedAdadelta, torch.optim.Adadelta, {"lr": 1.0, "weight_decay": 0.1}),
]
EVERY = [
    *ALL,
    *(getattr(npu, name) for name in CLASSES),
]
SHAPES = [(40, 30), (7,), (3, 5, 2)]


def values(step: int, sign: float = 1.0) -> list[Tensor]:
    """Return gradients of a step, a list in the order of SHAPES."""
    generator = torch.Generator().manual_seed(step)
    return [sign * torch.randn(shape, generator=generator) for shape in SHAPES]


def train(make: Any, steps: int = 4, sign: float = 1.0) -> list[Tensor]:
    """Train parameters of SHAPES on values() times ``sign``; return them."""
    params = [nn.Parameter(value) for value in values(99)]
    optimizer = make(params)
    for step in range(steps):
        for param, grad in zip(params, values(step, sign), strict=True):
            param.grad = grad
        optimizer.step()
    return [param.detach() for param in params]


def assert_same(actual: list[Tensor], expected: list[Tensor]) -> None:
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


# maximize


@pytest.mark.parametrize("place", ["constructor", "group", "later"])
@pytest.mark.parametrize("cls", EVERY, ids=case_id)
def test_maximize_is_the_step_on_the_negative_gradient(cls: Any, place: str) -> None:
    """Bit for bit, decay, clips, norms and rows included, wherever the key is given."""

    def make(params: Any) -> Any:
        options = {"lr": 0.1, "weight_decay": 0.1, "sharding": EAGER}
        if place == "constructor":
            return cls(params, maximize=True, **options)
        group = {"params": params} | ({"maximize": True} if place == "group" else {})
        optimizer = cls([group], **options)
        if place == "later":
            for own in optimizer.param_groups:
                own["maximize"] = True
        return optimizer

    def plain(params: Any) -> Any:
        return cls(params, lr=0.1, weight_decay=0.1, sharding=EAGER)

    assert_same(train(make), train(plain, sign=-1.0))
    assert not torch.equal(train(make)[0], train(plain)[0])


@pytest.mark.parametrize(("cls", "twin", "options"), TWINS, ids=case_id)
def test_maximize_is_torchs(cls: Any, twin: Any, options: dict[str, Any]) -> None:
    """As torch's own class with the same keywords, whose rounding may differ in the last bit."""
    kwargs = {**options, "maximize": True, "foreach": False}
    ours = train(lambda params: cls(params, **kwargs))
    for a, b in zip(ours, train(lambda params: twin(params, **kwargs)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_sgd_maximize_is_torchs_bitwise() -> None:
    """Where the rule rounds as torch does, so does maximize."""
    kwargs: dict[str, Any] = {"lr": 0.5, "momentum": 0.5, "maximize": True}
    ours = train(lambda params: ShardedSGD(params, **kwargs))
    assert_same(ours, train(lambda params: torch.optim.SGD(params, **kwargs)))


def test_maximize_arrives_in_a_state_dict() -> None:
    """The dict of a torch optimizer that maximizes makes ours maximize (hooks_and_maximize.py)."""

    def model() -> nn.Linear:
        torch.manual_seed(0)
        return nn.Linear(8, 1)

    def change(m: nn.Linear, optimizer: Any) -> float:
        optimizer.zero_grad()
        before = m(torch.ones(4, 8)).square().mean()
        before.backward()
        optimizer.step()
        return float((m(torch.ones(4, 8)).square().mean() - before).detach())

    theirs = model()
    reference = torch.optim.AdamW(theirs.parameters(), lr=1e-2, maximize=True)
    assert change(theirs, reference) > 0
    mine = model()
    mine.load_state_dict(theirs.state_dict())
    optimizer = ShardedAdamW(mine.parameters(), lr=1e-2)
    optimizer.load_state_dict(copy.deepcopy(reference.state_dict()))
    assert change(mine, optimizer) == pytest.approx(change(theirs, reference), rel=1e-5)
    # The way back: torch reads the key from our dict.
    back = torch.optim.AdamW(theirs.parameters())
    back.load_state_dict(optimizer.state_dict())
    assert back.param_groups[0]["maximize"] is True


def maximize_on_ranks(options: dict[str, Any], sign: float) -> list[Tensor]:
    """Train LAMB on two groups, one of which maximizes where ``sign`` says so by -1."""
    rank = float(torch.distributed.get_rank())
    params = [nn.Parameter(value) for value in values(99)]
    groups = [{"params": params[:2]}, {"params": params[2:]}]
    if sign > 0:
        groups[0]["maximize"] = True  # type: ignore[assignment]
    optimizer = ShardedLamb(groups, lr=0.1, sharding={"bucket_cap_mb": 0.01}, **options)
    for step in range(3):
        for index, (param, grad) in enumerate(zip(params, values(step), strict=True)):
            param.grad = (grad + rank) * (sign if index < 2 else 1.0)
        optimizer.step()
    return [param.detach().clone() for param in params]


def test_maximize_one_group_of_a_sharded_lamb() -> None:
    """Group by group, under a global clip, on two ranks: norms do not see the sign."""
    options = {"use_global_grad_norm": True, "max_grad_norm": 0.5, "weight_decay": 0.1}
    for actual, expected in zip(
        run_threads(2, maximize_on_ranks, options, 1.0),
        run_threads(2, maximize_on_ranks, options, -1.0),
        strict=True,
    ):
        assert_same(actual, expected)


@pytest.mark.parametrize("maximize", [False, True])
def test_maximize_compiled(maximize: bool) -> None:
    """Compiled kernels take the sign too."""
    sharding = {"kernel": "compile"}
    ours = train(
        lambda params: ShardedAdam(params, lr=0.1, maximize=maximize, sharding=sharding), steps=2
    )
    eager = train(
        lambda params: ShardedAdam(params, lr=0.1, maximize=maximize, sharding=EAGER), steps=2
    )
    for a, b in zip(ours, eager, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_paddle_has_no_maximize() -> None:
    """Its clip by value is of the gradient as it is; Paddle's Lamb has no such key."""
    with pytest.raises(ValueError, match="maximize"):
        paddle.Lamb(parameters=[{"params": one_param(), "maximize": True}])


# Keys that select code elsewhere


@pytest.mark.parametrize("cls", EVERY, ids=case_id)
def test_implementation_keys_are_accepted(cls: Any) -> None:
    """OptimizerClass(params, **torch_kwargs) swaps: these choose how, not what, is computed."""
    kwargs: dict[str, Any] = {"foreach": False, "fused": True, "capturable": True}
    swapped = train(lambda params: cls(params, lr=0.1, differentiable=False, **kwargs))
    assert_same(swapped, train(lambda params: cls(params, lr=0.1)))
    group = cls(one_param(), lr=0.1, maximize=False, **kwargs).param_groups[0]
    assert {key: group[key] for key in kwargs} == kwargs
    with pytest.raises(TypeError, match=r"argument 'fussed'\. Did you mean 'fused'\?"):
        cls(one_param(), lr=0.1, fussed=True)


@pytest.mark.parametrize("cls", EVERY, ids=case_id)
def test_signature_tells_them(cls: Any) -> None:
    """help() and inspect.signature() show torch's keywords, each by itself."""
    arguments = inspect.signature(cls).parameters
    expected = {
        "maximize": False,
        "foreach": None,
        "fused": None,
        "capturable": False,
        "differentiable": False,
    }
    assert {key: arguments[key].default for key in expected} == expected
    assert {arguments[key].kind for key in expected} == {inspect.Parameter.KEYWORD_ONLY}
    assert next(iter(inspect.signature(cls.__init__).parameters)) == "self"


REFUSED: list[tuple[Any, dict[str, Any]]] = [
    *((cls, {"differentiable": True}) for cls in ALL),
    (ShardedLamb, {"amsgrad": True}),
    (ShardedSGD, {"amsgrad": True}),
    (ShardedAdam, {"nesterov": True}),
    (ShardedAdam, {"momentum": 0.9}),
    (ShardedBertAdam, {"dampening": 0.1}),
    (ShardedAdadelta, {"centered": True}),
    (ShardedSGD, {"decoupled_weight_decay": True}),
    (ShardedRMSprop, {"decoupled_weight_decay": True}),
    (ShardedAdamW, {"decoupled_weight_decay": False}),
]


@pytest.mark.parametrize(("cls", "options"), REFUSED, ids=case_id)
@pytest.mark.parametrize("place", ["group", "late group", "state dict"])
def test_refused(cls: Any, options: dict[str, Any], place: str) -> None:
    """A key that would change the result elsewhere and cannot here is an error that names it."""
    (key,) = options
    optimizer = cls(one_param(), lr=0.1)
    state = optimizer.state_dict()
    state["param_groups"][0].update(options)
    give = {
        "group": lambda: cls([{"params": one_param(), **options}], lr=0.1),
        "late group": lambda: optimizer.add_param_group({"params": one_param(), **options}),
        "state dict": lambda: optimizer.load_state_dict(state),
    }
    with pytest.raises(ValueError, match=f"{key}=") as caught:
        give[place]()
    assert cls.__name__.removeprefix("Sharded") in str(caught.value)
    assert key not in optimizer.param_groups[0] or optimizer.param_groups[0][key] != options[key]


def test_differentiable_is_refused_by_the_constructor() -> None:
    """In words, too, for the keyword."""
    with pytest.raises(ValueError, match="differentiable=True"):
        ShardedSGD(one_param(), 0.1, differentiable=True)


def test_adam_honours_decoupled_weight_decay() -> None:
    """torch's AdamW is Adam with this key, and its dict says so."""
    options = {"lr": 0.1, "weight_decay": 0.5}
    kwargs = {**options, "decoupled_weight_decay": True}
    ours = train(lambda params: ShardedAdam([{"params": params, **kwargs}]))
    assert_same(ours, train(lambda params: ShardedAdamW(params, **options)))  # type: ignore[arg-type]
    reference = torch.optim.AdamW(one_param(), **options)  # type: ignore[arg-type]
    params = one_param()
    loaded = ShardedAdam(params)
    loaded.load_state_dict(reference.state_dict())
    params[0].grad = torch.zeros(3)
    loaded.step()
    torch.testing.assert_close(params[0].detach(), torch.full((3,), 0.95))


@pytest.mark.parametrize(("cls", "twin", "options"), TWINS, ids=case_id)
def test_torchs_dicts_are_accepted(cls: Any, twin: Any, options: dict[str, Any]) -> None:
    """All keys that torch's class of the name has, at their defaults, load and step."""
    params, theirs = one_param(), one_param()
    reference = twin(theirs, **options)
    optimizer = cls(params) if cls is not ShardedSGD else cls(params, 0.1)
    for _ in range(2):
        theirs[0].grad = torch.ones(3)
        reference.step()
    with torch.no_grad():
        params[0].copy_(theirs[0])
    optimizer.load_state_dict(copy.deepcopy(reference.state_dict()))
    for param, stepped in ((theirs[0], reference), (params[0], optimizer)):
        param.grad = torch.ones(3)
        stepped.step()
    torch.testing.assert_close(params[0].detach(), theirs[0].detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("cls", ALL, ids=case_id)
def test_unknown_keys_stay(cls: Any) -> None:
    """What schedulers and frameworks keep in groups is kept, saved and loaded."""
    extra = {"initial_lr": 0.1, "swa_lr": 0.05, "lr_scale": 0.9, "name": "head", "mine": [1]}
    optimizer = cls([{"params": one_param(), **extra}], lr=0.1)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5)
    again = cls(one_param(), lr=0.2)
    again.load_state_dict(optimizer.state_dict())
    assert {key: again.param_groups[0][key] for key in extra} == extra


def paddles(params: list[Tensor]) -> Any:
    return paddle.Lamb(parameters=[{"params": params, "weight_decay": 0.1}])


@pytest.mark.parametrize(
    ("saved", "present", "text"),
    [
        (paddles, ShardedLamb, "l2=0.1 .* of Paddle's Lamb"),
        (paddles, ShardedAdam, "l2=0.1 .* of Paddle's Lamb"),
        (
            lambda p: ShardedRMSpropTF(p, momentum=0.9),
            ShardedRMSprop,
            "lr_in_momentum=True .* RMSprop has no",
        ),
        (
            lambda p: ShardedRMSpropTF(p, weight_decay=0.1, decoupled_decay=True),
            ShardedRMSprop,
            "decoupled_decay=True .* RMSprop has no",
        ),
        (
            lambda p: ShardedRMSprop(p, momentum=0.9),
            ShardedRMSpropTF,
            "RMSprop's momentum has no lr",
        ),
        (
            lambda p: torch.optim.RMSprop(p, momentum=0.9),
            ShardedRMSpropTF,
            "RMSprop's momentum has no lr",
        ),
        (
            lambda p: ShardedRMSprop(p, momentum=0.9),
            lambda p: ShardedSGD(p, 0.1),
            "RMSprop's momentum is of steps",
        ),
    ],
)
def test_other_optimizers_dicts_are_refused(saved: Any, present: Any, text: str) -> None:
    """Where the states have the same names, and what made them would be ignored."""
    params = one_param()
    made = saved(params)
    params[0].grad = torch.ones(3)
    made.step()
    optimizer = present(one_param())
    with pytest.raises(ValueError, match=text):
        optimizer.load_state_dict(made.state_dict())
    assert not optimizer.state_dict()["state"]


@pytest.mark.parametrize(
    ("saved", "present"),
    [
        (lambda p: paddle.Lamb(parameters=p), ShardedLamb),
        (ShardedRMSpropTF, ShardedRMSprop),
        (ShardedRMSprop, ShardedRMSpropTF),
        (
            lambda p: ShardedRMSprop(p, momentum=0.9),
            lambda p: ShardedRMSpropTF(p, lr_in_momentum=False),
        ),
    ],
)
def test_other_optimizers_dicts_are_taken(saved: Any, present: Any) -> None:
    """Where nothing that made the states would be ignored."""
    params = one_param()
    made = saved(params)
    params[0].grad = torch.ones(3)
    made.step()
    optimizer = present(one_param())
    optimizer.load_state_dict(made.state_dict())
    states = made.state_dict()["state"][0]
    assert all(
        torch.equal(value, states[name]) if isinstance(value, Tensor) else value == states[name]
        for name, value in optimizer.state_dict()["state"][0].items()
    )


def test_capture_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A captured step would replay one learning rate and one step count for ever."""
    params = one_param()
    optimizer = ShardedAdam(params, capturable=True)
    params[0].grad = torch.ones(3)
    optimizer._device = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match=r"ShardedAdam.*captured"):
        optimizer.step()
    assert torch.equal(params[0].detach(), torch.ones(3))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_capture_on_a_device() -> None:
    """The same where a graph is really being captured."""
    param = nn.Parameter(torch.ones(3, device="cuda"))
    optimizer = ShardedAdam([param])
    param.grad = torch.ones_like(param)
    optimizer.step()
    with pytest.raises(RuntimeError, match="captured"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        optimizer.step()


def test_all_classes_are_covered() -> None:
    """A class that is added is tested here."""
    public = {name for name in shardfuse.__all__ if name.startswith("Sharded")}
    expected = {"ShardedOptimizer", "ShardedGradScaler"}
    assert public - expected == {cls.__name__ for cls in ALL}
