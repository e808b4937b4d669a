"""Build the optimizer of a run with BERT's exclusions; what a phase leaves to the next."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from pretraining.config import RunConfig
from pretraining.phases import Carry
from shardfuse import (
    ShardConfig,
    ShardedAdam,
    ShardedAdamW,
    ShardedBertAdam,
    ShardedLamb,
    ShardedMuon,
    ShardedOptimizer,
    ShardedSGD,
)

EXCLUDED = ("bias", "LayerNorm")
"""Regular expressions: parameters with no weight decay and, in LAMB, no layer adaptation."""

HIDDEN = r"encoder\.layer\."
"""Regular expression: parameters of which Muon updates the matrices, and AdamW all others."""


NamedParams = Iterable[tuple[str, nn.Parameter]]


def build_optimizer(
    config: RunConfig, named: NamedParams, sharding: ShardConfig
) -> ShardedOptimizer:
    """Build the sharded optimizer on a model's named parameters. Collective."""
    lr, betas = config.phases[0].lr, config.betas
    eps = {} if config.eps is None else {"eps": config.eps}
    if config.optimizer == "lamb":
        return ShardedLamb(
            named,
            lr=lr,
            betas=betas,
            weight_decay=config.weight_decay,
            variant=config.lamb_variant,
            use_global_grad_norm=config.max_grad_norm > 0,
            max_grad_norm=config.max_grad_norm or 1.0,
            exclude_from_weight_decay=EXCLUDED,
            exclude_from_layer_adaptation=EXCLUDED,
            sharding=sharding,
            **eps,
        )
    if config.optimizer == "muon":
        # Updates as large as AdamW's, so that one learning rate serves all groups.
        return ShardedMuon(
            muon_groups(named, config.weight_decay),
            lr=lr,
            weight_decay=config.weight_decay,
            adjust_lr_fn="match_rms_adamw",
            adamw={"betas": betas, **eps},
            sharding=sharding,
        )
    groups = decay_groups(named, config.weight_decay)
    if config.optimizer == "adamw":
        return ShardedAdamW(groups, lr=lr, betas=betas, sharding=sharding, **eps)
    if config.optimizer == "adam":
        return ShardedAdam(groups, lr=lr, betas=betas, sharding=sharding, **eps)
    if config.optimizer == "bertadam":
        return ShardedBertAdam(
            groups,
            lr=lr,
            b1=betas[0],
            b2=betas[1],
            e=1e-6 if config.eps is None else config.eps,
            max_grad_norm=config.max_grad_norm,
            sharding=sharding,
        )
    return ShardedSGD(groups, lr=lr, momentum=betas[0], sharding=sharding)


def clips_itself(config: RunConfig) -> bool:
    """Return whether the rule bounds the gradient norm inside its own step."""
    return config.optimizer in ("lamb", "bertadam")


def decay_groups(named: NamedParams, weight_decay: float) -> list[dict[str, Any]]:
    """Split the named parameters into those with weight decay and the excluded ones."""
    decayed: list[tuple[str, nn.Parameter]] = []
    excluded: list[tuple[str, nn.Parameter]] = []
    for name, param in named:
        is_excluded = any(re.search(pattern, name) for pattern in EXCLUDED)
        (excluded if is_excluded else decayed).append((name, param))
    return [
        {"params": decayed, "weight_decay": weight_decay},
        {"params": excluded, "weight_decay": 0.0},
    ]


def muon_groups(named: NamedParams, weight_decay: float) -> list[dict[str, Any]]:
    """Return a group of the hidden layers' matrices, and decay_groups() of all others for AdamW."""
    members = list(named)
    matrices = [(n, p) for n, p in members if p.dim() == 2 and re.search(HIDDEN, n)]
    hidden = {name for name, _ in matrices}
    others = decay_groups([pair for pair in members if pair[0] not in hidden], weight_decay)
    return [
        {"params": matrices, "use_muon": True},
        *({**group, "use_muon": False} for group in others),
    ]


def attach_backend(optimizer: ShardedOptimizer, carry: Carry) -> None:
    """Keep of the optimizer's state what the next phase is to have of it. Collective."""
    if carry == "all":
        return
    own = optimizer.parts()
    # LAMB counts in groups, too: without a step there, it is that of the parameters.
    groups = [{k: v for k, v in group.items() if k != "step"} for group in own.groups()]
    if carry == "weights":
        optimizer.load_state_dict({"state": {}, "param_groups": groups})
        return
    state = {**dict.fromkeys(own.step_keys(), 0), "param_groups": groups}
    own.load(state, own.check(state), own.rule)


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Give every group the learning rate of its next step."""
    for group in optimizer.param_groups:
        group["lr"] = lr
