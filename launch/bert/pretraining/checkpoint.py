"""Sharded checkpoints that appear whole or not at all, and load on any number of ranks.

RUN/checkpoints/
    step-500/    written by all ranks with torch.distributed.checkpoint
    step-1000/
    latest       the name of the newest complete one, written last
"""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from pretraining.ranks import Ranks
from shardfuse import ShardedGradScaler, ShardedOptimizer

NUM_KEPT = 2


class Checkpoints:
    """The checkpoints of one run: parameters, optimizer state, loss scale and step."""

    def __init__(
        self,
        folder: Path,
        ranks: Ranks,
        model: nn.Module,
        optimizer: ShardedOptimizer,
        scaler: ShardedGradScaler,
    ) -> None:
        self._folder = folder
        self._ranks = ranks
        self._model = model
        self._optimizer = optimizer
        self._scaler = scaler

    def save(self, step: int) -> None:
        """Save the state after `step` finished steps. Collective."""
        target = self._folder / f"step-{step}"
        unfinished = self._folder / f".{target.name}.unfinished"
        if self._ranks.launch.is_main:
            self._folder.mkdir(parents=True, exist_ok=True)
            for leftover in self._folder.glob(".step-*"):
                shutil.rmtree(leftover)
        self._ranks.barrier()
        with _quiet():
            dcp.save(self._state(step), checkpoint_id=unfinished)
        self._ranks.barrier()
        if self._ranks.launch.is_main:
            shutil.rmtree(target, ignore_errors=True)
            unfinished.rename(target)
            marker = self._folder / ".latest"
            marker.write_text(target.name)
            marker.replace(self._folder / "latest")
            for _, old in sorted(self._complete())[:-NUM_KEPT]:
                shutil.rmtree(old)

    def load_latest(self) -> int:
        """Load the newest checkpoint; return its step, or 0 where there is none. Collective."""
        marker = self._folder / "latest"
        if not marker.exists():
            return 0
        state = self._state(step=0)
        with _quiet():
            dcp.load(state, checkpoint_id=self._folder / marker.read_text())
        self._optimizer.load_sharded_state_dict(state["optimizer"])
        if self._scaler.is_enabled():
            self._scaler.load_state_dict(state["scaler"])
        return int(state["step"])

    def _complete(self) -> Iterator[tuple[int, Path]]:
        for path in self._folder.glob("step-*"):
            yield int(path.name.removeprefix("step-")), path

    def _state(self, step: int) -> dict[str, Any]:
        # named_parameters() has a tied weight once; loading fills these very tensors.
        model = {name: param.data for name, param in self._model.named_parameters()}
        return {
            "model": model,
            "optimizer": self._optimizer.sharded_state_dict(),
            "scaler": self._scaler.state_dict(),
            "step": torch.tensor(step),
        }


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence what torch.distributed.checkpoint says about a process without a group."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*torch.distributed")
        yield
