"""Optimizers with their options, and sharding options, drawn at random."""

from __future__ import annotations

from random import Random
from typing import Any, NamedTuple


class Kind(NamedTuple):
    """An update rule: which reference it has, in torch.optim or among the oracles."""

    torch: str = ""
    oracle: str = ""
    exact: str = ""  # the rule in exact.py; none where sums over a tensor are part of the step


KINDS: dict[str, Kind] = {
    "SGD": Kind(torch="SGD", exact="sgd"),
    "Adam": Kind(torch="Adam", exact="adam"),
    "AdamW": Kind(torch="AdamW", exact="adamw"),
    "RMSprop": Kind(torch="RMSprop", exact="rmsprop"),
    "Adadelta": Kind(torch="Adadelta", exact="adadelta"),
    "RMSpropTF": Kind(oracle="RMSpropTFOracle", exact="rmsprop_tf"),
    "BertAdam": Kind(oracle="BertAdamOracle", exact="bert_adam"),
    "AdamP": Kind(oracle="AdamPOracle"),
    "Lamb": Kind(oracle="LambOracle"),
    "Muon": Kind(exact="muon"),
}
_WEIGHTS = {"SGD": 4, "Adam": 4, "AdamW": 4, "Lamb": 6}
VARIANTS = ("npu", "apex", "nvlamb", "google", "paddle", "deepspeed")


def kind_of(optimizer: str) -> Kind:
    """Return the rule of a class of shardfuse's, by its name."""
    return KINDS[optimizer.removeprefix("Sharded").removeprefix("NpuFused")]


def optimizer(chance: Random) -> str:
    """Return the name of a class, other than ShardedMuon, whose programs are of their own kind."""
    names = [name for name in KINDS if name != "Muon"]
    name = chance.choices(names, [_WEIGHTS.get(name, 2) for name in names])[0]
    return chance.choice(["Sharded", "Sharded", "NpuFused"]) + name


def options(chance: Random, name: str) -> dict[str, Any]:
    """Return arguments for the class ``name``."""
    kind = name.removeprefix("Sharded").removeprefix("NpuFused")
    drawn: dict[str, Any] = {
        "lr": chance.choice([0.02, 0.05, 0.1]),
        "weight_decay": chance.choice([0.0, 0.1, 0.3]),
    }
    return {**drawn, **_OWN.get(kind, lambda _: {})(chance)}


def _sgd(chance: Random) -> dict[str, Any]:
    momentum = chance.choice([0.0, 0.5, 0.9])
    nesterov = momentum > 0 and chance.random() < 0.3
    dampening = 0.3 if momentum and not nesterov and chance.random() < 0.4 else 0.0
    return {"momentum": momentum, "nesterov": nesterov, "dampening": dampening}


def _betas(chance: Random) -> dict[str, Any]:
    return {
        "betas": chance.choice([(0.9, 0.999), (0.8, 0.9)]),
        "eps": chance.choice([1e-8, 1e-6, 1e-3]),
    }


def _adam(chance: Random) -> dict[str, Any]:
    return {**_betas(chance), "amsgrad": chance.random() < 0.3}


def _adamp(chance: Random) -> dict[str, Any]:
    return {
        **_betas(chance),
        "delta": chance.choice([0.1, 1.5]),
        "wd_ratio": chance.choice([0.1, 0.5]),
        "nesterov": chance.random() < 0.4,
    }


def _rmsprop(chance: Random) -> dict[str, Any]:
    return {
        "alpha": chance.choice([0.9, 0.99]),
        "eps": chance.choice([1e-8, 1e-3]),
        "momentum": chance.choice([0.0, 0.5]),
        "centered": chance.random() < 0.3,
    }


def _rmsprop_tf(chance: Random) -> dict[str, Any]:
    return {
        **_rmsprop(chance),
        "decoupled_decay": chance.random() < 0.3,
        "lr_in_momentum": chance.random() < 0.5,
    }


def _adadelta(chance: Random) -> dict[str, Any]:
    return {"lr": 1.0, "rho": chance.choice([0.9, 0.5]), "eps": chance.choice([1e-6, 1e-3])}


def _bert_adam(chance: Random) -> dict[str, Any]:
    total = chance.choice([-1, 6, 30])
    schedules = ["warmup_linear", "warmup_constant", "warmup_cosine", "warmup_poly"]
    return {
        "t_total": total,
        "warmup": chance.choice([0.1, 0.3]) if total > 0 else -1,
        "schedule": chance.choice(schedules),
        "e": chance.choice([1e-6, 1e-3]),
        "max_grad_norm": chance.choice([0.0, 1.0, 100.0]),
    }


def _lamb(chance: Random) -> dict[str, Any]:
    drawn = {**_betas(chance), "variant": chance.choice(VARIANTS)}
    if chance.random() < 0.3:
        drawn["use_global_grad_norm"] = True
        drawn["max_grad_norm"] = chance.choice([0.5, 5.0])
    if chance.random() < 0.15:
        drawn["adam"] = True
    for key, values in (
        ("bias_correction", [True, False, "outside"]),
        ("clamp_value", [1.0, 10.0]),
        ("always_adapt", [True, False]),
    ):
        if chance.random() < 0.15:
            drawn[key] = chance.choice(values)
    return drawn


def _muon(chance: Random) -> dict[str, Any]:
    drawn: dict[str, Any] = {
        "momentum": chance.choice([0.5, 0.9]),
        "nesterov": chance.random() < 0.6,
        "adjust_lr_fn": chance.choice([None, "original", "match_rms_adamw"]),
        "ns_steps": chance.choice([5, 5, 2]),
    }
    if chance.random() < 0.5:
        drawn["adamw"] = {"lr": chance.choice([0.02, 0.1]), **_adam(chance)}
    return drawn


_OWN = {
    "SGD": _sgd,
    "Adam": _adam,
    "AdamW": _adam,
    "AdamP": _adamp,
    "RMSprop": _rmsprop,
    "RMSpropTF": _rmsprop_tf,
    "Adadelta": _adadelta,
    "BertAdam": _bert_adam,
    "Lamb": _lamb,
    "Muon": _muon,
}


def sharding(chance: Random) -> dict[str, Any]:
    """Return sharding options that any program can have."""
    return {
        "bucket_cap_mb": chance.choice([0.004, 0.01, 0.03, 25.0]),
        "collectives": chance.choice(["auto", "auto", "pairwise", "native"]),
        "kernel": chance.choice(["eager", "auto"]),
        "report_overflow": chance.random() < 0.3,
    }
