"""Wrong types, idle options and cast models are told in words; repr() tells the switches."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from shardfuse import ShardedAdam, ShardedAdamP, ShardedBertAdam, ShardedLamb, ShardedSGD
from shardfuse.optim import npu, paddle
from tests.unit.test_validation import ALL, case_id, one_param

# Values of the wrong type


@pytest.mark.parametrize(
    ("cls", "options", "error", "message"),
    [
        *((cls, {"lr": "1e-3"}, TypeError, "lr must be a number") for cls in ALL),
        *((cls, {"lr": None}, TypeError, "lr must be a number.*None") for cls in ALL),
        (ShardedAdam, {"betas": 0.9}, TypeError, "betas must be two numbers"),
        (ShardedAdamP, {"betas": "ab"}, TypeError, "betas must be two numbers"),
        (ShardedLamb, {"betas": (0.9,)}, ValueError, "Invalid betas"),
        (ShardedLamb, {"eps": "1e-6"}, TypeError, "eps must be a number"),
        (ShardedBertAdam, {"e": "1e-6"}, TypeError, "e must be a number"),
        (ShardedSGD, {"momentum": None}, TypeError, "momentum must be a number"),
        (ShardedAdam, {"lr": torch.ones(2)}, ValueError, "Tensor lr must be 1-element"),
        (ShardedAdam, {"weight_decay": [0.1]}, TypeError, "weight_decay must be a number"),
    ],
    ids=case_id,
)
def test_wrong_types(
    cls: Any, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    """The argument and what it should be are named, here and in a group dict."""
    with pytest.raises(error, match=message):
        cls(one_param(), **{"lr": 0.1, **options})
    with pytest.raises(error, match=message):
        cls([{"params": one_param(), **options}], lr=0.1)


def test_numbers_of_other_kinds() -> None:
    """One-element tensors, NumPy's numbers and ints are numbers."""
    numpy = pytest.importorskip("numpy")
    for lr in (torch.tensor(0.5), torch.tensor([0.5]), numpy.float32(0.5), numpy.array(0.5)):
        params = one_param()
        optimizer = ShardedSGD(params, lr)
        params[0].grad = torch.ones(3)
        optimizer.step()
        assert torch.equal(params[0].detach(), torch.full((3,), 0.5))


# What an optimizer says of itself


def test_repr_shows_variant_and_switches() -> None:
    """repr() tells what the groups do not: the rule's switches, the sharding, the ranks."""
    optimizer = ShardedLamb(
        one_param(), weight_decay=0.1, variant="apex", clamp_value=5.0, use_global_grad_norm=True
    )
    text = repr(optimizer)
    assert text.startswith("ShardedLamb (")
    for part in (
        "variant='apex'",
        "clamp_value=5.0",
        "use_global_grad_norm=True",
        "max_grad_norm=1.0",
        "Parameter Group 0",
        "lr: 0.001",
        "world_size=1",
        "grads_are_reduced='auto'",
    ):
        assert part in text
    assert "variant" not in repr(ShardedSGD(one_param(), 0.1))
    assert "always_adapt=True" in repr(paddle.Lamb(parameters=one_param(), always_adapt=True))


@pytest.mark.parametrize("cls", [ShardedLamb, npu.NpuFusedLamb])
@pytest.mark.parametrize("bound", [1.0, 65536.0])
def test_max_grad_norm_without_clipping_is_told(cls: Any, bound: float) -> None:
    """A bound that nothing reads gets one warning; the default none."""
    with pytest.warns(UserWarning, match="max_grad_norm.*use_global_grad_norm"):
        cls(one_param(), max_grad_norm=bound)
    cls(one_param())
    cls(one_param(), max_grad_norm=bound, use_global_grad_norm=True)


@pytest.mark.parametrize("convert", ["half", "double", "bfloat16"])
@pytest.mark.parametrize("cls", [ShardedAdam, npu.NpuFusedLamb])
def test_cast_model(cls: Any, convert: str) -> None:
    """A model cast after building is an error that names both, and that rebind() is no remedy."""
    model = nn.Linear(3, 2)
    optimizer = cls(model.named_parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    getattr(model, convert)()
    dtype = str(model.weight.dtype)
    for step in (optimizer.step, optimizer.rebind):
        with pytest.raises((RuntimeError, TypeError)) as caught:
            step()
        message = str(caught.value)
        assert dtype in message
        assert "torch.float32" in message
        assert "bias is now" in message
        assert "before building the optimizer" in message
        assert "Call opt.rebind()" not in message
    with pytest.raises(RuntimeError, match=cls.__name__):
        optimizer.step()
    model.float()
    optimizer.rebind()
    optimizer.zero_grad()
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()


def test_hyper_parameter_nan_in_a_loaded_dict() -> None:
    """A dict with a value out of range is refused whole."""
    optimizer = ShardedAdam(one_param())
    state = optimizer.state_dict()
    state["param_groups"][0]["lr"] = math.nan
    with pytest.raises(ValueError, match="Invalid learning rate: nan"):
        optimizer.load_state_dict(state)
    assert optimizer.param_groups[0]["lr"] == 1e-3
