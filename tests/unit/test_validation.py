"""Wrong hyper-parameters, parameters and options are refused at once, in torch_npu's words."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import shardfuse
from shardfuse import (
    ShardConfig,
    ShardedAdadelta,
    ShardedAdam,
    ShardedAdamP,
    ShardedAdamW,
    ShardedBertAdam,
    ShardedLamb,
    ShardedMuon,
    ShardedRMSprop,
    ShardedRMSpropTF,
    ShardedSGD,
)
from shardfuse.buffers import internal_format
from shardfuse.optim import paddle
from tests.support.upstream import CLASSES, NOT_IN_GROUPS

OptimizerClass = Callable[..., torch.optim.Optimizer]

ADAMS: list[OptimizerClass] = [ShardedAdam, ShardedAdamW]
RMSPROPS: list[OptimizerClass] = [ShardedRMSprop, ShardedRMSpropTF]
WITH_L2: list[OptimizerClass] = [ShardedSGD, *ADAMS, *RMSPROPS, ShardedAdadelta]
ALL: list[OptimizerClass] = [*WITH_L2, ShardedBertAdam, ShardedLamb, ShardedAdamP, ShardedMuon]
WITH_BETAS: list[OptimizerClass] = [*ADAMS, ShardedLamb, ShardedAdamP]

NAN = math.nan


def one_param() -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.ones(3))]


def cases(
    classes: list[OptimizerClass], values: list[Any], key: str, message: str
) -> list[tuple[OptimizerClass, dict[str, Any], str]]:
    return [(cls, {key: value}, message.format(value)) for cls in classes for value in values]


INVALID: list[tuple[OptimizerClass, dict[str, Any], str]] = [
    *cases(ALL, [-1e-3, NAN, -math.inf], "lr", "Invalid learning rate: {}"),
    *cases(
        [*WITH_BETAS, *RMSPROPS, ShardedAdadelta], [-1e-8, NAN], "eps", "Invalid epsilon value: {}"
    ),
    *cases(WITH_L2, [-0.1, NAN], "weight_decay", "Invalid weight_decay value: {}"),
    *cases([ShardedSGD, *RMSPROPS], [-0.9, NAN], "momentum", "Invalid momentum value: {}"),
    *cases(RMSPROPS, [-0.1, NAN], "alpha", "Invalid alpha value: {}"),
    *cases([ShardedAdadelta], [-0.1, 1.1, NAN], "rho", "Invalid rho value: {}"),
    *cases([ShardedBertAdam], [-0.5, 1.0, 2, NAN], "warmup", "Invalid warmup: {}"),
    *cases([ShardedBertAdam], ["linear", None], "schedule", "Invalid schedule parameter: {}"),
    *cases([ShardedBertAdam], [-0.1, 1.0, NAN], "b1", "Invalid b1 parameter: {}"),
    *cases([ShardedBertAdam], [-0.1, 1.0, NAN], "b2", "Invalid b2 parameter: {}"),
    *cases([ShardedBertAdam], [-1e-6, NAN], "e", "Invalid epsilon value: {}"),
]
for _cls in WITH_BETAS:
    for _bad in (-0.1, 1.0, 1.5, NAN):
        INVALID += [
            (_cls, {"betas": (_bad, 0.9)}, f"Invalid beta parameter at index 0: {_bad}"),
            (_cls, {"betas": (0.9, _bad)}, f"Invalid beta parameter at index 1: {_bad}"),
        ]
_NESTEROV = "Nesterov momentum requires a momentum and zero dampening"
INVALID += [
    (ShardedSGD, {"nesterov": True}, _NESTEROV),
    (ShardedSGD, {"nesterov": True, "momentum": 0.9, "dampening": 0.1}, _NESTEROV),
]


def case_id(value: Any) -> str:
    return value.__name__ if isinstance(value, type) else str(value)


@pytest.mark.parametrize(("cls", "options", "message"), INVALID, ids=case_id)
@pytest.mark.parametrize("place", ["constructor", "group", "late group"])
def test_first_line_is_upstreams(
    cls: OptimizerClass, options: dict[str, Any], message: str, place: str
) -> None:
    """A value out of range, NaN included, raises upstream's first line wherever it is given."""

    def build() -> None:
        if place == "constructor":
            cls(one_param(), **{"lr": 0.1, **options})
        elif place == "group":
            cls([{"params": one_param(), **options}], lr=0.1)
        else:
            optimizer = cls(one_param(), lr=0.1)
            optimizer.add_param_group({"params": one_param(), **options})

    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        build()
    assert str(caught.value).splitlines()[0] == message


@pytest.mark.parametrize("cls", [ShardedSGD, ShardedBertAdam], ids=case_id)
def test_lr_is_required(cls: OptimizerClass) -> None:
    """SGD and BertAdam have no default learning rate, but one in every group is enough."""
    with pytest.raises((TypeError, ValueError), match="lr"):
        cls(one_param())
    assert cls(one_param(), 0.5).param_groups[0]["lr"] == 0.5


UPSTREAM_DEFAULTS: list[tuple[OptimizerClass, dict[str, Any]]] = [
    (
        getattr(shardfuse, name.replace("NpuFused", "Sharded")),
        {key: value for key, value in arguments.items() if key not in NOT_IN_GROUPS} | {"lr": 0.5},
    )
    for name, (arguments, _) in CLASSES.items()
]


@pytest.mark.parametrize(("cls", "defaults"), UPSTREAM_DEFAULTS, ids=case_id)
def test_positional_signature_and_defaults(cls: OptimizerClass, defaults: dict[str, Any]) -> None:
    """Hyper-parameters have upstream's names, order and defaults, and live in the group."""
    for optimizer in (cls(one_param(), 0.5), cls(one_param(), *defaults.values())):
        group = optimizer.param_groups[0]
        assert {key: group[key] for key in defaults} == defaults


@pytest.mark.parametrize(
    ("cls", "lr"),
    [
        *((cls, 1e-3) for cls in WITH_BETAS),
        *((cls, 1e-2) for cls in RMSPROPS),
        (ShardedAdadelta, 1.0),
    ],
    ids=case_id,
)
def test_default_lr(cls: OptimizerClass, lr: float) -> None:
    """All but SGD and BertAdam can be made from parameters alone."""
    assert cls(one_param()).param_groups[0]["lr"] == lr


@pytest.mark.parametrize("cls", ALL, ids=case_id)
def test_zero_is_valid(cls: OptimizerClass) -> None:
    """A learning rate and a decay of exactly 0 are legal and leave the parameters as they are."""
    params = one_param()
    optimizer = cls(params, lr=0.0, weight_decay=0.0)
    params[0].grad = torch.ones(3)
    optimizer.step()
    assert torch.equal(params[0].detach(), torch.ones(3))


@pytest.mark.parametrize("cls", ALL, ids=case_id)
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64, torch.int32])
def test_unsupported_dtypes(cls: OptimizerClass, dtype: torch.dtype) -> None:
    """A dtype that no flat buffer can hold is a TypeError naming it, at construction."""
    bad = torch.nn.Parameter(torch.ones(3, dtype=dtype), requires_grad=dtype.is_floating_point)
    with pytest.raises(TypeError, match=str(dtype).removeprefix("torch.")):
        cls([*one_param(), bad], lr=0.1)


@pytest.mark.parametrize("cls", ALL, ids=case_id)
def test_not_parameters(cls: OptimizerClass) -> None:
    """No parameter, a bare tensor, a number, a non-leaf, a duplicate: refused as torch does."""
    with pytest.raises(ValueError, match="empty parameter list"):
        cls([], lr=0.1)
    with pytest.raises(TypeError):
        cls(torch.ones(3), lr=0.1)
    with pytest.raises(TypeError):
        cls([1.0], lr=0.1)
    with pytest.raises(ValueError, match="non-leaf"):
        cls([one_param()[0] * 2], lr=0.1)
    params = one_param()
    with pytest.raises(ValueError, match="more than one parameter group"):
        cls([{"params": params}, {"params": params}], lr=0.1)


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        (lambda model: nn.Tanh(), ValueError, r"The model \(Tanh\) has no parameters"),
        (lambda model: model.weight, TypeError, "is one Tensor. Pass model.named_param"),
        (lambda model: model.state_dict(), TypeError, "params is a OrderedDict. Pass model.named"),
        (lambda model: {"params": []}, TypeError, "params is a dict. Pass .* a list of dicts"),
        (lambda model: iter([]), ValueError, "A generator such as model.parameters.. can be read"),
        (lambda model: [{"param": [model.weight]}], ValueError, r"group 0 has no \"params\""),
    ],
)
def test_what_else_is_taken_for_parameters(
    given: Callable[[nn.Linear], Any], error: type[Exception], words: str
) -> None:
    """A slip of the hand is told what to pass."""
    with pytest.raises(error, match=words):
        ShardedAdamW(given(nn.Linear(3, 2)), lr=0.1)


@pytest.mark.parametrize("kind", [set, frozenset])
def test_parameters_without_an_order(kind: type) -> None:
    """Each rank would have another order, and no error where the shapes are the same."""
    words = "ordered collections, but are a set: each rank would take others for the same"
    pair = [torch.nn.Parameter(torch.ones(3, 2)) for _ in range(2)]
    for build in (
        lambda: ShardedAdamW(kind(pair), lr=0.1),
        lambda: ShardedAdamW([{"params": kind(pair)}], lr=0.1),
        lambda: ShardedAdamW(pair[:1], lr=0.1).add_param_group({"params": kind(pair[1:])}),
        lambda: paddle.Lamb(parameters=[{"params": kind(pair)}]),
        lambda: paddle.Lamb(parameters=kind(pair)),
    ):
        with pytest.raises(TypeError, match=words):
            build()
    with pytest.raises(TypeError, match="must be a dict"):
        ShardedAdamW(pair[:1], lr=0.1).add_param_group(pair[1:])  # type: ignore[arg-type]


def test_duplicate_names() -> None:
    """Two parameters of one name are refused: checkpoints would write one over the other."""
    pairs = [("w", one_param()[0]), ("w", one_param()[0])]
    with pytest.raises(ValueError, match="name w"):
        ShardedAdam(pairs)
    with pytest.raises(ValueError, match="name w"):
        ShardedAdam([{"params": pairs[:1]}, {"params": pairs[1:]}])


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
def test_sparse_parameter(layout: torch.layout) -> None:
    """A sparse parameter is refused at construction."""
    dense = torch.eye(3)
    sparse = dense.to_sparse() if layout == torch.sparse_coo else dense.to_sparse_csr()
    with pytest.raises((TypeError, ValueError), match="sparse"):
        ShardedAdam([torch.nn.Parameter(sparse)])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"variant": "lars"}, "Invalid variant: 'lars'"),
        ({"bias_correction": "inside"}, "Invalid bias_correction: 'inside'"),
        ({"min_coeff": 2.0, "max_coeff": 1.0}, "Invalid min_coeff, max_coeff: 2.0, 1.0"),
        ({"min_coeff": math.nan}, "Invalid min_coeff, max_coeff: nan, inf"),
        ({"max_coeff": -1.0}, "Invalid min_coeff, max_coeff: 0.0, -1.0"),
        ({"clamp_value": 0.0}, "Invalid clamp_value: 0.0"),
        ({"clamp_value": NAN}, "Invalid clamp_value: nan"),
        ({"use_global_grad_norm": True, "max_grad_norm": 0.0}, "Invalid max_grad_norm: 0.0"),
        ({"use_global_grad_norm": True, "max_grad_norm": NAN}, "Invalid max_grad_norm: nan"),
        ({"exclude_from_weight_decay": ["("]}, "exclude_from_weight_decay"),
    ],
)
def test_lamb_switches(options: dict[str, Any], message: str) -> None:
    """LAMB's own switches are validated when it is built."""
    named = [("w", one_param()[0])]
    with pytest.raises(ValueError, match=re.escape(message)):
        ShardedLamb(named, **options)


def test_lamb_patterns_are_a_list() -> None:
    """A pattern given as a bare string is refused: it would be read letter by letter."""
    with pytest.raises(TypeError, match="exclude_from_layer_adaptation"):
        ShardedLamb([("w", one_param()[0])], exclude_from_layer_adaptation="bias")


@pytest.mark.parametrize(
    ("sharding", "error", "message"),
    [
        ({"bucket_cap_mb": 0}, ValueError, "bucket_cap_mb"),
        ({"bucket_cap_mb": -1.0}, ValueError, "bucket_cap_mb"),
        ({"bucket_cap_mb": NAN}, ValueError, "bucket_cap_mb"),
        ({"bucket_cap_mb": math.inf}, ValueError, "bucket_cap_mb"),
        ({"bucket_cap_mb": "25"}, TypeError, "bucket_cap_mb"),
        ({"bucket_cap_mb": True}, TypeError, "bucket_cap_mb"),
        ({"kernel": "triton"}, ValueError, "kernel"),
        ({"grad_sync_dtype": torch.float64}, ValueError, "grad_sync_dtype"),
        ({"grad_sync_dtype": "float8"}, ValueError, "grad_sync_dtype"),
        ({"param_sync_dtype": torch.float32}, ValueError, "param_sync_dtype"),
        ({"param_sync_dtype": "bf16"}, ValueError, "param_sync_dtype"),
        ({"grad_sync_bits": 4}, ValueError, "grad_sync_bits: 4. Use 8, or None"),
        ({"grad_sync_bits": True}, ValueError, "grad_sync_bits"),
        ({"param_sync_bits": 2}, ValueError, "param_sync_bits: 2. Use 8 or 4"),
        ({"param_sync_bits": "8"}, ValueError, "param_sync_bits"),
        ({"param_sync_bits": 8, "param_sync_dtype": torch.bfloat16}, ValueError, "one of the two"),
        ({"grad_sync_bits": 8, "grad_sync_dtype": torch.bfloat16}, ValueError, "one of the two"),
        ({"grad_sync_bits": 8, "grads_are_reduced": True}, ValueError, "another wrapper"),
        ({"error_feedback": 1}, TypeError, "error_feedback"),
        ({"broadcast_params": 1}, TypeError, "broadcast_params"),
        ({"bucket_mb": 25}, TypeError, "bucket_mb"),
        ([("bucket_cap_mb", 25)], TypeError, "ShardConfig"),
    ],
)
def test_sharding_options(sharding: Any, error: type[Exception], message: str) -> None:
    """An unknown sharding option, or one out of range, is refused by name."""
    with pytest.raises(error, match=message):
        ShardedSGD(one_param(), 0.1, sharding=sharding)


def test_sharding_as_dict() -> None:
    """A plain dict, dtypes written as strings, is the same as a ShardConfig, which is frozen."""
    config = ShardConfig.of({"bucket_cap_mb": 5, "grad_sync_dtype": "bfloat16"})
    assert config == ShardConfig(bucket_cap_mb=5, grad_sync_dtype=torch.bfloat16)
    assert ShardConfig.of(None) == ShardConfig()
    with pytest.raises(AttributeError):
        config.bucket_cap_mb = 7  # type: ignore[misc]
    assert "bucket_cap_mb=5" in repr(config)


class OnNpu(torch.nn.Parameter):
    """A parameter that says of itself that an NPU holds it."""

    device = property(lambda self: SimpleNamespace(type="npu"))  # type: ignore[assignment]


def with_format(number: int) -> Any:
    return SimpleNamespace(get_npu_format=lambda tensor: number)


def test_internal_formats(monkeypatch: pytest.MonkeyPatch) -> None:
    """A parameter that an NPU holds as 16 x 16 tiles is refused in words that name the fix."""
    named = [("head.weight", OnNpu(torch.ones(16, 16)))]
    monkeypatch.setitem(sys.modules, "torch_npu", with_format(29))
    with pytest.raises(TypeError, match=r"head\.weight.* format 29.*allow_internal_format = False"):
        ShardedSGD(named, 0.1)


def test_formats_that_are_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """ND, what gives others their names on an NPU, and whatever is elsewhere are taken."""
    for number, format in ((2, None), (0, None), (29, 29), (3, 3), (51, 51)):
        monkeypatch.setitem(sys.modules, "torch_npu", with_format(number))
        assert internal_format(OnNpu(torch.ones(3))) == format
        assert internal_format(torch.ones(3, device="cpu")) is None
    monkeypatch.delitem(sys.modules, "torch_npu")
    assert internal_format(OnNpu(torch.ones(3))) is None
