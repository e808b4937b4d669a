"""Saves that run beside training, and hear of it before what they save is changed."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, Protocol

from shardfuse.optim.base import ShardedOptimizer


class Running(Protocol):
    """A save that is not over."""

    def before_step(self) -> bool:
        """Copy what is left; return whether to be told again, or raise what has gone wrong."""

    def before_load(self) -> bool:
        """Copy what is left; return whether to be told again."""


_running: weakref.WeakKeyDictionary[ShardedOptimizer, list[Running]] = weakref.WeakKeyDictionary()


def watch(optimizer: ShardedOptimizer, save: Running) -> None:
    """Have ``save`` told before step() or a load changes ``optimizer``."""
    if optimizer not in _running:
        _running[optimizer] = []
        # For good: torch iterates over these hooks, so that none may remove itself.
        optimizer.register_step_pre_hook(_before_step)
        optimizer.register_load_state_dict_pre_hook(_before_load)
    _running[optimizer].append(save)


def will_load(optimizers: Sequence[ShardedOptimizer]) -> None:
    """Tell the saves of ``optimizers`` that these are to be loaded. Local."""
    for optimizer in optimizers:
        _before_load(optimizer)


def _before_load(optimizer: Any, *_: Any) -> None:
    saves = _running.get(optimizer, [])
    saves[:] = [save for save in saves if save.before_load()]


def _before_step(optimizer: Any, *_: Any) -> None:
    saves = _running[optimizer]
    for save in tuple(saves):
        saves.remove(save)  # before it raises: it does so once
        if save.before_step():
            saves.append(save)
