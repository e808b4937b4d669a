"""The checkpoints of a run: what is in them, and the errors of shardfuse.checkpoint as one line."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from pretraining.config import RunConfig, identity, option
from pretraining.errors import UsageError
from shardfuse import ShardedGradScaler, ShardedOptimizer
from shardfuse import checkpoint as shards
from shardfuse.checkpoint import CheckpointError, DamagedCheckpoint

NUM_KEPT = 2


class Checkpoints:
    """The checkpoints of one run: parameters, optimizer state, loss scale and step."""

    def __init__(
        self,
        config: RunConfig,
        model: nn.Module,
        optimizer: ShardedOptimizer,
        scaler: ShardedGradScaler,
    ) -> None:
        self._run = identity(config)
        self._is_async = config.async_save
        self._objects = {"model": model, "optimizer": optimizer, "scaler": scaler}
        self._shards = shards.Checkpoints(config.run_dir / "checkpoints", keep=NUM_KEPT)

    def save(self, step: int) -> None:
        """Save the state after `step` finished steps, or begin to. Collective."""
        state = {**self._objects, "step": torch.tensor(step)}
        info = {"run": self._run}
        self._shards.save(state, step, info=info, async_save=self._is_async)

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Wait at the end for an asynchronous save. Collective.

        Raises `UsageError` on every rank where any could not write, whenever that is told.
        """
        try:
            yield
            self._shards.wait()
        except CheckpointError as error:
            found = self._shards.steps()
            way_on = "there is no earlier checkpoint"
            if found:
                way_on = f"--resume continues from step-{found[0]}"
            raise UsageError(f"--run-dir: {str(error).rstrip('.')}; {way_on}") from error

    def load_latest(self, say: Callable[[str], None]) -> int:
        """Load the newest intact checkpoint; return its step, or 0 where there is none. Collective.

        `say` is told which was taken where newer ones are damaged. Raises `UsageError` on every
        rank where there are only damaged ones, or ones of another run.
        """
        state = {**self._objects, "step": torch.tensor(0)}
        handler = _Telling(say)
        logger = logging.getLogger("shardfuse")
        logger.addHandler(handler)
        try:
            step = self._shards.load_latest(state, accept=self._check_run)
        except DamagedCheckpoint as error:
            raise UsageError(
                f"--resume: {error} Restore one, or start a new run elsewhere"
            ) from error
        except CheckpointError as error:
            raise UsageError(f"--resume: {error} Restore this run's own checkpoints") from error
        finally:
            logger.removeHandler(handler)
        if step is None:
            say(f"{self._shards.folder} has no checkpoint yet: starting from step 0")
            return 0
        return int(state["step"])

    def _check_run(self, info: Mapping[str, Any]) -> None:
        for name, value in self._run.items():
            found = info["run"].get(name, value)
            if found != value:
                raise CheckpointError(
                    f"it is of a run with {option(name)} {found}, this one has {value}."
                )


class _Telling(logging.Handler):
    """Passes warnings on."""

    def __init__(self, say: Callable[[str], None]) -> None:
        super().__init__(logging.WARNING)
        self._say = say

    def emit(self, record: logging.LogRecord) -> None:
        self._say(record.getMessage())
