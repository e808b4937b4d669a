"""shardfuse's optimizers as benchmark methods."""

from __future__ import annotations

import functools
from typing import Any

import torch

import shardfuse
from launch.bench.drivers import (
    LR,
    AfterBackward,
    ByHand,
    Driver,
    FirstByHand,
    Method,
    WithBackward,
)
from launch.bench.references import BertAdamReference, MakeOptimizer, NpuLamb
from launch.bench.synthetic import Model

RULES: dict[str, tuple[type, dict[str, Any]]] = {
    "sgd": (shardfuse.ShardedSGD, {"lr": LR, "momentum": 0.9}),
    "adam": (shardfuse.ShardedAdam, {"lr": LR}),
    "adamw": (shardfuse.ShardedAdamW, {"lr": LR}),
    "bertadam": (shardfuse.ShardedBertAdam, {"lr": LR}),
    "lamb": (shardfuse.ShardedLamb, {"lr": LR, "weight_decay": 0.01}),
}
"""Class and arguments of each rule; BertAdam clips at 1, its default."""

REFERENCES: dict[str, MakeOptimizer] = {
    "sgd": functools.partial(torch.optim.SGD, lr=LR, momentum=0.9),
    "adam": functools.partial(torch.optim.Adam, lr=LR),
    "adamw": functools.partial(torch.optim.AdamW, lr=LR),
    "bertadam": functools.partial(BertAdamReference, lr=LR),
    "lamb": functools.partial(NpuLamb, lr=LR, weight_decay=0.01),
}


GRADS: dict[str, type[ByHand | WithBackward]] = {
    "set by hand": ByHand,
    "first one first": FirstByHand,
    "real backward": WithBackward,
    "after backward": AfterBackward,
}
"""Where gradients come from, and the driver that has them from there."""


def _build(rule: str, sharding: dict[str, Any], grads: str, model: Model) -> Driver:
    cls, arguments = RULES[rule]
    optimizer = cls(model.named_parameters(), **arguments, sharding=sharding)

    def state_nbytes() -> int:
        return int(optimizer.memory_summary().state_nbytes)

    driver = GRADS[grads]
    if issubclass(driver, ByHand):
        return driver(model, optimizer.step, state_nbytes)
    return driver(model, model, optimizer, state_nbytes)


def method(rule: str, remark: str = "", *, grads: str = "set by hand", **sharding: Any) -> Method:
    """Return the method of a rule.

    Args:
        rule: one of RULES.
        remark: to be told apart by.
        grads: one of GRADS.
        sharding: a ShardConfig's keys.
    """
    build = functools.partial(_build, rule)
    return Method(
        name=f"shardfuse {rule}{remark}" + ("" if grads == "set by hand" else f", {grads}"),
        family=rule,
        build=functools.partial(build, sharding, grads),
        reference=REFERENCES[rule],
        has_backward=grads == "real backward",
        rehearse=functools.partial(build, {**sharding, "kernel": "compile"}, grads),
    )


METHODS = [
    *(method(rule) for rule in RULES),
    method("adam", grads="real backward"),
    method("lamb", grads="real backward"),
    method("adam", ", sockets only", collectives="pairwise"),
    method("lamb", ", sockets only", collectives="pairwise"),
]

FOR_SCALING = [
    method(rule, grads=grads)
    for rule in ("adam", "lamb")
    for grads in ("after backward", "first one first")
]
"""Timed by bench_scaling alone: what thousands of backward functions take would hide a step."""
