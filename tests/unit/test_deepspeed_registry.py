"""Registering with DeepSpeed: where it is not installed, idempotent, undone, and probed."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import shardfuse
from shardfuse.deepspeed import lamb, muon, peer, registry

KINDS = ("SGD", "Adam", "AdamW", "BertAdam", "Lamb", "RMSprop", "RMSpropTF", "Adadelta", "AdamP")
NAMES = (*(f"Sharded{kind}" for kind in KINDS), "ShardedMuon")


class FakeEngine:
    """Has every method of DeepSpeedEngine that is looked for."""


for method in peer.ENGINE_METHODS:
    setattr(FakeEngine, method, lambda self, *args: None)


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Stand in for an installed DeepSpeed."""
    registry.unregister()
    fake = type("DeepSpeedEngine", (), dict(vars(FakeEngine)))
    monkeypatch.setattr(peer, "version", lambda: "0.0.1")
    monkeypatch.setattr(peer, "engine_class", lambda: fake)
    yield fake
    registry.unregister()


def test_without_deepspeed_nothing_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """The import works where DeepSpeed is not installed, and loads nothing of it."""
    registry.unregister()
    loaded = "deepspeed" in sys.modules
    monkeypatch.setattr(peer, "version", lambda: None)
    assert importlib.reload(sys.modules["shardfuse.deepspeed"]) is not None
    assert registry.register() is False
    assert not registry.is_registered()
    assert not hasattr(torch.optim, "ShardedLamb")
    assert ("deepspeed" in sys.modules) == loaded


def test_registering_twice_is_registering_once(engine: Any) -> None:
    """Names are found by DeepSpeed's own way, and undoing leaves nothing behind."""
    original = engine._configure_optimizer
    before = set(vars(torch.optim))
    assert registry.register()
    wrapped = engine._configure_optimizer
    assert wrapped is not original
    assert registry.register(replace_lamb=True)
    assert registry.register()
    assert registry._active is not None
    assert registry._active.replace_lamb
    assert engine._configure_optimizer is wrapped
    for name in NAMES:
        assert getattr(torch.optim, name) is getattr(shardfuse, name)
    registry.unregister()
    registry.unregister()
    assert engine._configure_optimizer is original
    assert set(vars(torch.optim)) == before


def test_torch_npu_names_are_registered_where_there_are_any(engine: Any) -> None:
    """NpuFused* come with shardfuse.optim.npu."""
    npu = pytest.importorskip("shardfuse.optim.npu")
    registry.register()
    for kind in KINDS:
        name = f"NpuFused{kind}"
        assert getattr(torch.optim, name) is getattr(npu, name)


def test_a_taken_name_is_an_error(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Someone else's optimizer of the same name is not replaced, and nothing is registered."""
    monkeypatch.setattr(torch.optim, "ShardedLamb", object(), raising=False)
    original = engine._configure_optimizer
    with pytest.raises(RuntimeError, match=r"torch\.optim\.ShardedLamb is not shardfuse's"):
        registry.register()
    assert engine._configure_optimizer is original
    assert not hasattr(torch.optim, "ShardedSGD")


@pytest.mark.parametrize("method", peer.ENGINE_METHODS)
def test_missing_insides_are_named(method: str) -> None:
    """A DeepSpeed that lacks a part that is leaned on is told apart, with the version to take."""
    fake = type("Engine", (), {name: None for name in peer.ENGINE_METHODS if name != method})
    with pytest.raises(RuntimeError, match=rf"no DeepSpeedEngine\.{method}, .* 0\.19\.8"):
        peer.probe(fake, "DeepSpeedEngine", peer.ENGINE_METHODS)


def test_old_versions_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before DeepSpeed itself is imported, with the version to install."""
    monkeypatch.setattr(peer, "version", lambda: "0.19.7")
    with pytest.raises(RuntimeError, match=r"0\.19\.7 is older .* deepspeed>=0\.19\.8"):
        peer.engine_class()


def test_options_of_deepspeeds_lamb() -> None:
    """FusedLamb's arguments are ShardedLamb's, or refused where there is no counterpart."""
    given = {"lr": 0.1, "betas": [0.9, 0.99], "bias_correction": True, "max_coeff": 5.0}
    assert lamb.from_lamb_options(given) == {
        "lr": 0.1,
        "betas": [0.9, 0.99],
        "max_coeff": 5.0,
        "eps": 1e-8,
        "variant": "deepspeed",
    }
    assert lamb.from_lamb_options({"bias_correction": False})["bias_correction"] is False
    for option in ("eps_inside_sqrt", "amsgrad", "max_grad_norm"):
        with pytest.raises(ValueError, match="Lamb"):
            lamb.from_lamb_options({option: 1})


def test_groups_of_a_fused_lamb() -> None:
    """Groups keep their own rates; what ShardedLamb has once must be alike in all groups."""
    common = {"bias_correction": True, "max_coeff": 10.0, "min_coeff": 0.01, "max_grad_norm": 0.0}
    one = {"params": [1], "lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.0}
    groups = [{**one, **common}, {**one, **common, "lr": 0.2}]
    fake = SimpleNamespace(state={}, eps_mode=1, param_groups=groups)
    found, options = lamb.from_fused_lamb(fake)
    assert [group["lr"] for group in found] == [0.1, 0.2]
    assert options["variant"] == "deepspeed"
    groups[1]["max_coeff"] = 3.0
    with pytest.raises(ValueError, match="max_coeff differs"):
        lamb.from_fused_lamb(fake)
    fake.state = {1: 2}
    with pytest.raises(ValueError, match="stepped already"):
        lamb.from_fused_lamb(fake)


def marked(shape: tuple[int, ...], use_muon: bool, heads: int | None = None) -> nn.Parameter:
    param = nn.Parameter(torch.zeros(shape))
    param.use_muon, param.muon_num_heads = use_muon, heads  # type: ignore[attr-defined]
    return param


def test_groups_of_deepspeeds_muon() -> None:
    """Divided by marks; a group's own options count more than rates, and these than shared ones."""
    hidden, heads, stack = marked((4, 4), True), marked((8, 4), True, 2), marked((3, 4, 4), True)
    bias = marked((4,), False)
    options = {"lr": 0.1, "adam_lr": 0.2, "momentum": 0.8, "eps": 1e-6, "ns_method": "gram"}
    options |= {"per_head_muon": True, "torch_adam": True, "sharding": {"kernel": "eager"}}
    groups, arguments = muon.from_muon_options(
        [{"params": [hidden, heads, bias]}, {"params": [stack, bias], "lr": 0.3, "name": "last"}],
        options,
    )
    assert arguments == {"sharding": {"kernel": "eager"}}
    own = {"lr": 0.1, "weight_decay": 0.0, "momentum": 0.8, "use_muon": True}
    adamw = {"lr": 0.2, "weight_decay": 0.0, "betas": (0.9, 0.95), "eps": 1e-6, "use_muon": False}
    assert groups == [
        {**own, "split": 2, "params": [heads]},
        {**own, "split": 1, "params": [hidden]},
        {**adamw, "params": [bias]},
        {**own, "lr": 0.3, "split": 3, "params": [stack]},
        {**adamw, "lr": 0.3, "params": [bias]},
    ]


@pytest.mark.parametrize(
    ("params", "options", "text"),
    [
        ([marked((2, 2), True)], {"adam_w_mode": False}, '"adam_w_mode": false'),
        ([marked((2, 2), True)], {"fp32_optimizer_states": False}, "are fp32"),
        ([marked((2, 2), True)], {"ns_method": "polar"}, "Invalid \"ns_method\": 'polar'"),
        ([marked((2, 2), True)], {"ns_steps": 3}, '"ns_steps" .* no key'),
        ([marked((2, 2, 2, 2), True)], {}, "flattens a parameter"),
        ([nn.Parameter(torch.zeros(2))], {}, "has no use_muon"),
    ],
)
def test_what_deepspeeds_muon_has_alone(params: Any, options: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        muon.from_muon_options(params, options)
