"""Registers optimizers by name for DeepSpeed, and wraps one method of its engine."""

from __future__ import annotations

import functools
from typing import Any

import torch

from shardfuse.deepspeed import drive, peer
from shardfuse.optim import (
    ShardedAdadelta,
    ShardedAdam,
    ShardedAdamP,
    ShardedAdamW,
    ShardedBertAdam,
    ShardedLamb,
    ShardedMuon,
    ShardedOptimizer,
    ShardedRMSprop,
    ShardedRMSpropTF,
    ShardedSGD,
    npu,
)

_active: drive.Registration | None = None


def classes() -> dict[str, type[ShardedOptimizer]]:
    """Return {name in the JSON: class}."""
    ours: list[type[ShardedOptimizer]] = [
        ShardedSGD,
        ShardedAdam,
        ShardedAdamW,
        ShardedBertAdam,
        ShardedLamb,
        ShardedRMSprop,
        ShardedRMSpropTF,
        ShardedAdadelta,
        ShardedAdamP,
        ShardedMuon,
        npu.NpuFusedSGD,
        npu.NpuFusedAdam,
        npu.NpuFusedAdamW,
        npu.NpuFusedBertAdam,
        npu.NpuFusedLamb,
        npu.NpuFusedRMSprop,
        npu.NpuFusedRMSpropTF,
        npu.NpuFusedAdadelta,
        npu.NpuFusedAdamP,
    ]
    return {cls.__name__: cls for cls in ours}


def register(*, replace_lamb: bool | None = None, replace_muon: bool | None = None) -> bool:
    """Let DeepSpeed find shardfuse's optimizers by name. Called by importing shardfuse.deepspeed.

    A second call changes only the arguments that are given. DeepSpeed looks for names in
    torch.optim, so the classes become attributes there.

    Args:
        replace_lamb: also replace ``{"type": "Lamb"}`` and instances of DeepSpeed's FusedLamb by
            ShardedLamb with ``variant="deepspeed"``: the same formula with exact trust ratios.
            None: keep the present setting, which is False at first.
        replace_muon: also replace ``{"type": "Muon"}`` by ShardedMuon, with DeepSpeed's keys and
            defaults. None as above.

    Returns:
        Whether DeepSpeed is installed; if not, nothing is done.

    Raises:
        RuntimeError: the internals of DeepSpeed differ from those the plug-in was written for, or
            torch.optim has another optimizer with one of the names.
    """
    global _active
    if _active is not None:
        if replace_lamb is not None:
            _active.replace_lamb = replace_lamb
        if replace_muon is not None:
            _active.replace_muon = replace_muon
        return True
    if peer.version() is None:
        return False
    engine = peer.engine_class()
    original = engine._configure_optimizer
    active = drive.Registration(engine, original, classes(), bool(replace_lamb), bool(replace_muon))
    for name, cls in active.classes.items():
        if getattr(torch.optim, name, cls) is not cls:
            raise RuntimeError(
                f"torch.optim.{name} is not shardfuse's: something else has taken the name. Import "
                "shardfuse.deepspeed first, or remove the other optimizer."
            )

    @functools.wraps(active.original)
    def configure(engine: Any, client_optimizer: Any, model_parameters: Any) -> None:
        drive.configure(active, engine, client_optimizer, model_parameters)

    for name, cls in active.classes.items():
        setattr(torch.optim, name, cls)
    active.engine._configure_optimizer = configure
    _active = active
    return True


def unregister() -> None:
    """Undo register(). Existing engines keep running."""
    global _active
    if _active is None:
        return
    _active.engine._configure_optimizer = _active.original
    for name, cls in _active.classes.items():
        if getattr(torch.optim, name, None) is cls:
            delattr(torch.optim, name)
    _active = None


def is_registered() -> bool:
    """Return whether DeepSpeed finds shardfuse's optimizers."""
    return _active is not None
