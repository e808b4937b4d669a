"""Parameters stay ordinary tensors: edits are honoured, re-allocation is noticed, groups change."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardfuse import ShardedAdam, ShardedAdamW, ShardedBertAdam, ShardedLamb, ShardedSGD
from tests.support.harness import run_procs, run_threads
from tests.support.models import TiedModel
from tests.support.runs import assert_bitwise

pytestmark = pytest.mark.timeout(60)

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
ALL = [ShardedSGD, ShardedAdam, ShardedAdamW, ShardedBertAdam, ShardedLamb]


def everywhere(body: Callable[..., None], *args: Any) -> None:
    """Run `body` alone and on two ranks."""
    body(*args)
    run_threads(2, body, *args)


def snapshot(module: nn.Module) -> list[Tensor]:
    return [param.detach().clone() for param in module.parameters()]


def build_and_compare(cls: Callable[..., torch.optim.Optimizer]) -> None:
    model = TiedModel()
    before, objects = snapshot(model), list(model.parameters())
    x = TiedModel.batch(0, 2)
    loss = model(x).item()
    optimizer = cls(model.parameters(), lr=0.1)
    assert all(p is q for p, q in zip(objects, model.parameters(), strict=True))
    assert_bitwise(snapshot(model), before)
    assert model(x).item() == loss
    assert model.decoder.weight is model.embedding.weight
    assert all(p.is_leaf and p.is_contiguous() for p in model.parameters())
    assert [p.requires_grad for p in model.parameters()].count(False) == 1
    held = [p for group in optimizer.param_groups for p in group["params"]]
    assert all(p is q for p, q in zip(held, objects, strict=True))


@pytest.mark.parametrize("cls", ALL)
def test_building_changes_nothing(cls: Callable[..., torch.optim.Optimizer]) -> None:
    """Construction keeps every Parameter object, value, tie and flag."""
    everywhere(build_and_compare, cls)


# With these every step on a gradient of 1 is exactly lr.
UNIT_STEPS: list[tuple[Callable[..., torch.optim.Optimizer], dict[str, Any]]] = [
    (ShardedSGD, {}),
    (ShardedAdam, {"betas": (0.0, 0.0), "eps": 0.0}),
    (ShardedLamb, {"betas": (0.0, 0.0), "eps": 0.0, "adam": True}),
]


def edit_in_place(
    cls: Callable[..., torch.optim.Optimizer], options: dict[str, Any], dtype: torch.dtype
) -> None:
    params = [nn.Parameter(torch.full((s,), 1.0, dtype=dtype)) for s in (3000, 5)]
    optimizer = cls(params, lr=2.0**-12, **options)
    for _ in range(2):
        for param in params:
            param.grad = torch.ones_like(param)
        optimizer.step()
    with torch.no_grad():
        params[0].fill_(4.0)
        params[1][1:3] = 8.0
        params[1].data[4] = -16.0
    optimizer.step()
    step = 2.0**-12
    expected = torch.full((5,), 1.0 - 3 * step)
    expected[1:3] = 8.0 - step
    expected[4] = -16.0 - step
    assert torch.equal(params[0].detach(), torch.full((3000,), 4.0 - step).to(dtype))
    assert torch.equal(params[1].detach(), expected.to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("cls", "options"), UNIT_STEPS)
def test_edits_in_place_are_honoured(
    cls: Callable[..., torch.optim.Optimizer], options: dict[str, Any], dtype: torch.dtype
) -> None:
    """A parameter written between steps is updated from its new value, the rest from its master."""
    everywhere(edit_in_place, cls, options, dtype)


def load_model(dtype: torch.dtype) -> None:
    model, other = nn.Linear(70, 60).to(dtype), nn.Linear(70, 60).to(dtype)
    with torch.no_grad():
        for value, param in enumerate([*model.parameters(), *other.parameters()]):
            param.fill_(1.0 + value)
    optimizer = ShardedSGD(model.parameters(), 0.5)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    model.load_state_dict(other.state_dict())
    optimizer.step()
    for param, loaded in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(param.detach(), loaded.detach() - 0.5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_loading_a_model(dtype: torch.dtype) -> None:
    """model.load_state_dict() after construction is what the next step starts from."""
    everywhere(load_model, dtype)


def reallocate(how: str) -> None:
    model = nn.Sequential(nn.Linear(60, 50), nn.Linear(50, 40))
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(1.0)
    optimizer = ShardedSGD(model.named_parameters(), 0.5)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    if how == "data":
        model[1].weight.data = torch.full((40, 50), 3.0)
    elif how == "clone":
        model[1].weight.data = model[1].weight.data.clone()
    else:
        assert how == "dtype"
        model[1].to(torch.bfloat16)
        for param in model[1].parameters():
            param.grad = torch.ones_like(param)
    with pytest.raises(RuntimeError, match=r"1\.weight"):
        optimizer.step()
    assert torch.equal(model[0].weight.detach(), torch.ones(50, 60))
    if how == "dtype":
        with pytest.raises(TypeError, match=r"1\.(weight|bias)"):
            optimizer.rebind()
        return
    start = 3.0 if how == "data" else 1.0
    optimizer.rebind()
    assert torch.equal(model[1].weight.detach(), torch.full((40, 50), start))
    optimizer.step()
    assert torch.equal(model[0].weight.detach(), torch.full((50, 60), 0.5))
    assert torch.equal(model[1].weight.detach(), torch.full((40, 50), start - 0.5))


@pytest.mark.parametrize("how", ["data", "clone", "dtype"])
def test_reallocation_is_an_error_by_name(how: str) -> None:
    """A parameter moved out of the buffer is named before any update; rebind() takes it back."""
    everywhere(reallocate, how)


def transpose(first: nn.Parameter, _: nn.Parameter) -> None:
    first.data = first.data.t()


def swap(first: nn.Parameter, second: nn.Parameter) -> None:
    first.data, second.data = second.data, first.data


def rebind_in_place(change: Callable[..., None], num_groups: int) -> None:
    values = torch.arange(900.0).view(30, 30)
    params = [nn.Parameter(values.clone()), nn.Parameter(values + 1000.0)]
    groups = [{"params": params[i::num_groups]} for i in range(num_groups)]
    optimizer = ShardedSGD(groups[:1], lr=1.0)
    for group in groups[1:]:
        optimizer.add_param_group(group)
    change(*params)
    expected = [param.detach().clone() for param in params]
    grads = [values * 2.0, values + 3.0]
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad.clone()
    with pytest.raises(RuntimeError, match=r"re-allocated or transposed.*rebind"):
        optimizer.step()
    optimizer.rebind()
    assert_bitwise([param.detach() for param in params], expected)
    optimizer.step()
    results = [value - grad for value, grad in zip(expected, grads, strict=True)]
    assert_bitwise([param.detach() for param in params], results)


@pytest.mark.parametrize("num_groups", [1, 2])
@pytest.mark.parametrize("change", [transpose, swap])
def test_data_that_lies_in_the_buffer(change: Callable[..., None], num_groups: int) -> None:
    """The address may be the old one, and rebind() may not write over what it has yet to read."""
    everywhere(rebind_in_place, change, num_groups)


def test_two_optimizers_on_one_model() -> None:
    """A second optimizer takes the parameters over; the first one notices."""
    params = [nn.Parameter(torch.ones(3000))]
    first = ShardedSGD(params, 0.5)
    second = ShardedSGD(params, 0.25)
    params[0].grad = torch.ones(3000)
    with pytest.raises(
        RuntimeError, match=r"belong to another optimizer(.|\n)*Keep one of the two"
    ):
        first.step()
    second.step()
    assert torch.equal(params[0].detach(), torch.full((3000,), 0.75))


def train_by_the_second(stage: int, overlaps: bool) -> list[Tensor]:
    """Train by the later one of two optimizers on the same parameters, with the first alive."""
    sharding = {"stage": stage, "kernel": "eager"}
    if stage == 1:
        sharding |= {"overlap_grad_sync": overlaps}
    params = [nn.Parameter(torch.ones(3000)), nn.Parameter(torch.ones(5))]
    first = ShardedSGD(params, 0.5, sharding=sharding)
    second = ShardedSGD(params, 0.25, sharding=sharding)
    for _ in range(2):
        sum(param.sum() for param in params).backward()  # type: ignore[union-attr]
        second.step()
        second.zero_grad()
    second.synchronize()
    with pytest.raises(RuntimeError, match="belong to another optimizer"):
        first.step()
    return [param.detach().clone() for param in params]


@pytest.mark.parametrize(("stage", "overlaps"), [(1, False), (1, True), (2, True)])
def test_the_later_one_of_two_optimizers_trains(stage: int, overlaps: bool) -> None:
    """Hooks of the first one do not take its gradients, as they did at stage 2."""
    for own in run_procs(2, train_by_the_second, stage, overlaps):
        for param in own:
            assert torch.equal(param, torch.full_like(param, 0.5))


def test_replaced_parameters() -> None:
    """A param_groups entry swapped for another tensor is an error, not a silent stop."""
    optimizer = ShardedSGD([nn.Parameter(torch.ones(10))], 0.5)
    optimizer.param_groups[0]["params"][0] = nn.Parameter(torch.ones(10))
    with pytest.raises(RuntimeError, match="add_param_group"):
        optimizer.step()


def assign_groups(does_clip: bool) -> None:
    param = nn.Parameter(torch.zeros(700))
    optimizer = ShardedSGD([param], lr=1.0)
    optimizer.param_groups = [{**optimizer.param_groups[0], "lr": 0.5}]
    param.grad = torch.ones(700)
    if does_clip:
        optimizer.clip_grad_norm(1e6)
    optimizer.step()
    assert torch.equal(param.detach(), torch.full((700,), -0.5))
    optimizer.param_groups = []
    with pytest.raises(RuntimeError, match="param_groups hold other parameters"):
        optimizer.step()


@pytest.mark.parametrize("does_clip", [False, True])
def test_another_list_of_groups_is_read(does_clip: bool) -> None:
    """As by torch's own: schedulers and wrappers may set ``param_groups`` as a whole."""
    everywhere(assign_groups, does_clip)


def move_over(groups: list[dict[str, Any]]) -> None:
    groups[0]["params"].append(groups[1]["params"].pop(0))


def merge(groups: list[dict[str, Any]]) -> None:
    groups[0]["params"] += groups.pop()["params"]


def split(groups: list[dict[str, Any]]) -> None:
    groups.append({**groups[1], "params": [groups[1]["params"].pop()]})


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (move_over, "second is in group 0 of param_groups now, and was given in group 1"),
        (merge, "second is in group 0 of param_groups now, and was given in group 1"),
        (split, "third is in group 2 of param_groups now, and was given in group 1"),
    ],
)
def test_groups_keep_their_parameters(change: Callable[[Any], None], match: str) -> None:
    """A parameter's lr is that of the group that it was given in; another would be ignored."""

    def body() -> None:
        named = {name: nn.Parameter(torch.zeros(5)) for name in ("first", "second", "third")}
        first, *others = named.items()
        optimizer = ShardedSGD([{"params": [first]}, {"params": others, "lr": 0.1}], lr=1.0)
        change(optimizer.param_groups)
        for param in named.values():
            param.grad = torch.ones(5)
        with pytest.raises(RuntimeError, match=match):
            optimizer.step()
        assert not any(param.any() for param in named.values())

    everywhere(body)


def test_late_group_trains_from_its_own_step() -> None:
    """A group added after some steps has its own options and starts counting at 1."""
    first, second = nn.Parameter(torch.ones(2000)), nn.Parameter(torch.ones(2000))
    optimizer = ShardedAdam([first], lr=0.1)
    for step in range(4):
        if step == 2:
            optimizer.add_param_group({"params": [second], "lr": 0.2, "betas": (0.5, 0.9)})
        for param in (first, second):
            param.grad = torch.full((2000,), 1.0 + step)
        optimizer.step()
    expected = [nn.Parameter(torch.ones(2000)) for _ in range(2)]
    alone = [
        ShardedAdam([expected[0]], lr=0.1),
        ShardedAdam([expected[1]], lr=0.2, betas=(0.5, 0.9)),
    ]
    for step in range(4):
        for param, other in zip(expected, alone, strict=True):
            param.grad = torch.full((2000,), 1.0 + step)
            if step >= 2 or param is expected[0]:
                other.step()
    assert_bitwise([first.detach(), second.detach()], [param.detach() for param in expected])


@pytest.mark.parametrize("cls", ALL)
def test_deleting_leaves_a_healthy_model(cls: Callable[..., torch.optim.Optimizer]) -> None:
    """Without its optimizer the model computes and trains on; the states are freed."""
    model = TiedModel()
    optimizer: Any = cls(model.parameters(), lr=0.1)
    model(TiedModel.batch(0, 2)).backward()
    optimizer.step()
    values = snapshot(model)
    dead = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert dead() is None
    assert_bitwise(snapshot(model), values)
    model.zero_grad()
    model(TiedModel.batch(1, 2)).backward()
    torch.optim.SGD(model.parameters(), 0.1).step()
    assert not torch.equal(model.scale.detach(), values[-1])
    assert all(torch.isfinite(p).all() for p in model.parameters())
    again = cls(model.parameters(), lr=0.1)
    model(TiedModel.batch(2, 2)).backward()
    again.step()


def test_copies_are_refused() -> None:
    """deepcopy and pickle raise: a copy would own buffers that no model uses."""
    optimizer = ShardedAdam([nn.Parameter(torch.ones(3))])
    with pytest.raises(TypeError, match="state_dict"):
        copy.deepcopy(optimizer)
    with pytest.raises(TypeError, match="state_dict"):
        pickle.dumps(optimizer)


def test_copied_model_is_independent() -> None:
    """A deep copy or a pickle of the model after construction does not share its memory."""
    model = TiedModel()
    optimizer = ShardedSGD(model.parameters(), 0.5)
    copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    before = snapshot(model)
    model(TiedModel.batch(0, 2)).backward()
    optimizer.step()
    for other in copies:
        assert_bitwise(snapshot(other), before)
        other(TiedModel.batch(0, 2)).backward()


def test_step_hooks() -> None:
    """torch's step hooks run around every step, with the optimizer as first argument."""
    optimizer = ShardedSGD([nn.Parameter(torch.ones(3))], 0.5)
    seen: list[tuple[str, bool]] = []
    optimizer.register_step_pre_hook(lambda opt, *_: seen.append(("pre", opt is optimizer)))
    optimizer.register_step_post_hook(lambda opt, *_: seen.append(("post", opt is optimizer)))
    optimizer.step()
    assert seen == [("pre", True), ("post", True)]
