"""shardfuse.optim.npu has the names, signatures and methods of torch_npu.optim."""

from __future__ import annotations

import inspect
import math
import re
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import required

from shardfuse import ShardedMuon
from shardfuse.optim import npu
from tests.support.upstream import CLASSES, NOT_IN_GROUPS, REQUIRED
from tests.unit.test_validation import INVALID, case_id

NAN = math.nan

every_class = pytest.mark.parametrize("name", CLASSES)


def ones(numel: int = 3, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    return nn.Parameter(torch.ones(numel, dtype=dtype))


def build(name: str, params: Any, **options: Any) -> Any:
    return getattr(npu, name)(params, **{"lr": 0.1, **options})


@every_class
def test_signature(name: str) -> None:
    """Positional arguments and defaults are upstream's; what is ours is keyword-only."""
    arguments = list(inspect.signature(getattr(npu, name)).parameters.values())
    positional = [a for a in arguments if a.kind is a.POSITIONAL_OR_KEYWORD]
    assert positional[0].name == "params"
    given = {a.name: REQUIRED if a.default is required else a.default for a in positional[1:]}
    assert list(given.items()) == list(CLASSES[name][0].items())
    extra = [a for a in arguments if a.kind is a.KEYWORD_ONLY]
    assert extra[-1].name == "sharding"
    assert len(positional) + len(extra) == len(arguments)


@every_class
def test_group_and_state_keys(name: str) -> None:
    """Groups and the entries of a state dict have upstream's keys."""
    param = ones()
    optimizer = build(name, [param])
    keys = set(CLASSES[name][0]) - NOT_IN_GROUPS
    assert set(optimizer.param_groups[0]) == {"params", *keys}
    param.grad = torch.ones(3)
    optimizer.step()
    state = optimizer.state_dict()["state"]
    assert list(state.get(0, {})) == CLASSES[name][1]


@pytest.mark.parametrize(
    ("name", "options", "keys"),
    [
        ("NpuFusedSGD", {"momentum": 0.9}, ["momentum_buffer"]),
        ("NpuFusedAdam", {"amsgrad": True}, ["step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"]),
        (
            "NpuFusedRMSprop",
            {"momentum": 0.9, "centered": True},
            ["step", "square_avg", "momentum_buffer", "grad_avg"],
        ),
    ],
)
def test_state_keys_of_options(name: str, options: dict[str, Any], keys: list[str]) -> None:
    """Options that need more state add upstream's keys."""
    param = ones()
    optimizer = build(name, [param], **options)
    param.grad = torch.ones(3)
    optimizer.step()
    assert list(optimizer.state_dict()["state"][0]) == keys


@pytest.mark.parametrize(
    ("cls", "options", "message"),
    [case for case in INVALID if case[0] is not ShardedMuon],  # of which torch_npu has none
    ids=case_id,
)
@pytest.mark.parametrize("in_group", [False, True], ids=["constructor", "group"])
def test_refuses(cls: Any, options: dict[str, Any], message: str, in_group: bool) -> None:
    """What upstream refuses, and NaN, is refused in its words, here and in a group dict."""
    name = cls.__name__.replace("Sharded", "NpuFused")
    params = [{"params": [ones()], **options}] if in_group else [ones()]
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        build(name, params, **({} if in_group else options))
    assert str(caught.value).splitlines()[0] == message


# Clipping


@pytest.mark.parametrize("norm_type", [2, 2.0, 1, 3.0, 0.5, math.inf, "inf"])
def test_clip_grad_norm_fused(norm_type: Any) -> None:
    """Norm and factor are torch's, over groups and dtypes; p.grad stays as it is."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(2000,), (3, 5), (7,)]
    params = [nn.Parameter(torch.zeros(s)) for s in shapes]
    params.append(nn.Parameter(torch.zeros(9, dtype=torch.float16)))
    optimizer = build("NpuFusedSGD", [{"params": params[:2]}, {"params": params[2:]}], lr=1.0)
    for param in params:
        grad = torch.randint(-8, 9, param.shape, generator=generator)
        param.grad = grad.to(param.dtype)
    values = [p.grad.double() for p in params]
    expected = torch.linalg.vector_norm(torch.cat([v.flatten() for v in values]), float(norm_type))
    norm = optimizer.clip_grad_norm_fused_(0.5, norm_type)
    assert (norm.shape, norm.dtype) == ((), torch.float32)
    # Below 1 many small terms are added up in fp32, and the sum is squared.
    rounding = 1e-6 if float(norm_type) >= 1 else 1e-5
    assert float(norm) == pytest.approx(float(expected), rel=rounding)
    assert all(torch.equal(p.grad.double(), v) for p, v in zip(params, values, strict=True))
    optimizer.step()
    for param, value in zip(params, values, strict=True):
        # The smallest positive fp16 number is 6e-8.
        is_half = param.dtype == torch.float16
        torch.testing.assert_close(
            param.double(),
            -value * 0.5 / (expected + 1e-6),
            rtol=1e-3 if is_half else rounding,
            atol=6e-8 if is_half else 0.0,
        )


@pytest.mark.parametrize("norm_type", [2, 1, math.inf])
def test_clip_leaves_small_and_nan_norms(norm_type: float) -> None:
    """A norm below the bound, or NaN, leaves the gradients; the norm is still returned."""
    param = ones(3000)
    optimizer = build("NpuFusedSGD", [param], lr=1.0)
    param.grad = torch.full((3000,), 1e-3)
    assert float(optimizer.clip_grad_norm_fused_(100.0, norm_type)) > 0
    optimizer.step()
    torch.testing.assert_close(param.detach(), torch.full((3000,), 0.999))
    param.grad[7] = NAN
    assert optimizer.clip_grad_norm_fused_(1e-6, norm_type).isnan()
    optimizer.step()
    expected = torch.full((3000,), 0.998)
    expected[7] = NAN
    torch.testing.assert_close(param.detach(), expected, equal_nan=True)


@pytest.mark.parametrize("frozen", [False, True])
@every_class
def test_clip_without_gradients(name: str, frozen: bool) -> None:
    """Without any gradient the norm is 0, and neither it nor a step changes anything."""
    param = ones().requires_grad_(not frozen)
    optimizer = build(name, [param], weight_decay=0.1)
    for norm_type in (2, 1, math.inf):
        assert float(optimizer.clip_grad_norm_fused_(1.0, norm_type)) == 0.0
    optimizer.zero_grad()
    optimizer.step()
    assert torch.equal(param.detach(), torch.ones(3))
    assert optimizer.state_dict()["state"] == {}
    param.requires_grad_(True).sum().backward()
    optimizer.step()
    optimizer.step()
    assert not torch.equal(param.detach(), torch.ones(3))


@pytest.mark.parametrize(
    "arguments", [(-1.0,), (NAN,), (1.0, 0.0), (1.0, -2), (1.0, NAN), (1.0, -math.inf)]
)
def test_clip_refuses(arguments: tuple[float, ...]) -> None:
    """Bounds below 0 and norms of no positive order are refused by name."""
    with pytest.raises(ValueError, match=r"Invalid (max_norm|norm_type)"):
        build("NpuFusedSGD", [ones()]).clip_grad_norm_fused_(*arguments)
