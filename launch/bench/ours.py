"""shardfuse's optimizers as benchmark methods."""

from __future__ import annotations

import functools
from typing import Any

import torch

import shardfuse
from launch.bench.drivers import LR, ByHand, Driver, Method, WithBackward
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


def _build(rule: str, sharding: dict[str, Any], with_backward: bool, model: Model) -> Driver:
    cls, arguments = RULES[rule]
    optimizer = cls(model.named_parameters(), **arguments, sharding=sharding)

    def state_nbytes() -> int:
        return int(optimizer.memory_summary().state_nbytes)

    if with_backward:
        return WithBackward(model, model, optimizer, state_nbytes)
    return ByHand(model, optimizer.step, state_nbytes)


def method(rule: str, remark: str = "", *, with_backward: bool = False, **sharding: Any) -> Method:
    """Return the method of a rule; ``sharding`` is a ShardConfig's keys, ``remark`` its name."""
    return Method(
        name=f"shardfuse {rule}{remark}" + (", real backward" if with_backward else ""),
        family=rule,
        build=functools.partial(_build, rule, sharding, with_backward),
        reference=REFERENCES[rule],
        has_backward=with_backward,
        rehearse=functools.partial(_build, rule, {**sharding, "kernel": "compile"}, with_backward),
    )


METHODS = [
    *(method(rule) for rule in RULES),
    method("adam", with_backward=True),
    method("lamb", with_backward=True),
    method("adam", ", sockets only", collectives="pairwise"),
    method("lamb", ", sockets only", collectives="pairwise"),
]
