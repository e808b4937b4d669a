"""A loop over steps that saves, stops when told to, and goes on where it was when started again."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from shardfuse.checkpoint import CheckpointError, Checkpoints, PerRank
from shardfuse.checkpoint.ranks import Ranks, check_state, tried
from shardfuse.comm import Communicator
from shardfuse.optim.stateful import StatefulOptimizer
from shardfuse.training.lock import FolderInUse, FolderLock
from shardfuse.training.random_state import RandomState
from shardfuse.training.signals import DEFAULT, Signals
from shardfuse.training.stop import StopTogether, remove_old_words

logger = logging.getLogger("shardfuse")

_PATIENCE_S = 20.0
"""How long a job before this one has to end."""

_RANDOM = "random"


class Job:
    """A training run that resumes, however it ended, when the same command starts it again.

    A context manager. Entering it locks the folder and loads the newest whole checkpoint, if there
    is one, saved with any number of ranks. Both are collective.

    * It saves every ``save_every`` steps, after the last step, and when it is told to stop.
    * A signal of ``signals`` to any rank stops all ranks two steps later, after the same step.
    * If torchrun is killed, the ranks that it has started stop in the same way.
    * Every rank's random state is restored. With another number of ranks the generators start
      afresh, and a warning says so.
    * Leaving waits for a save beside training, on all ranks.
    * If one rank leaves with an error, the others do not wait for it: each raises PeerError, which
      quotes that error.

    Args:
        folder: folder for this run's checkpoints only, in a file system that all ranks see.
        state: {key: ShardedOptimizer, module, object with state_dict(), PerRank, or value}, as for
            shardfuse.checkpoint.save(). Loading replaces values in this dict.
        save_every: finished steps between two saves.
        keep: number of whole checkpoints that remain after a save.
        beside_training: write while training continues, as async_save() does.
        signals: signals that stop the run; SIGTERM, SIGINT, SIGUSR1 and SIGHUP if left out. Slurm's
            ``--signal`` sends one. The main thread handles them. SIGHUP stays ignored where it is,
            as under nohup.
        process_group: the ranks, if ``state`` has no ShardedOptimizer.
        trusted: whether values may be more than plain data, such as arrays of numpy. Loading them
            runs code from the file.

    Raises:
        ValueError: ``save_every`` or ``keep`` is less than 1; a signal cannot be caught; or a key
            of ``state`` is "random", under which the random state is saved.
        RuntimeError: DeepSpeed shards an optimizer of ``state``; its engine saves.
    """

    step: int
    """Number of finished steps."""

    is_stopped: bool
    """Whether the run was told to stop before all steps were done. Everything is then saved."""

    def __init__(
        self,
        folder: str | Path,
        state: dict[str, Any],
        *,
        save_every: int,
        keep: int = 2,
        beside_training: bool = False,
        signals: Sequence[int] = DEFAULT,
        process_group: Any = None,
        trusted: bool = False,
    ) -> None:
        check_state(state)
        if _RANDOM in state:
            raise ValueError(f"The key {_RANDOM!r} is the Job's own, of random states. Rename it.")
        is_number = isinstance(save_every, int) and not isinstance(save_every, bool)
        if not is_number or save_every < 1:
            raise ValueError(f"Invalid save_every: {save_every!r}. Must be a number of steps >= 1.")
        for value in state.values():
            if isinstance(value, StatefulOptimizer):
                value._refuse_if_foreign("Job")  # and not at the first save, hours later
        self._lock, self._signals = FolderLock(), Signals(signals)
        self.step, self.is_stopped = 0, False
        self.checkpoints = Checkpoints(folder, keep=keep, process_group=process_group)
        self._state, self._save_every, self._beside_training = state, save_every, beside_training
        self._group, self._trusted = process_group, trusted
        self._comm: Communicator
        self._epoch = 0
        self._ends: list[torch.Event] = []  # of steps that the device may not have finished

    def __enter__(self) -> Job:
        folder = self.checkpoints.folder
        ranks = Ranks(self._state, self._group, f"{folder} is not used")
        with ranks.call("entering a Job"):
            error = tried(self._take_folder)[1] if ranks.comm.rank == 0 else None
            ranks.agree(error)
            number = ranks.number_of_first(secrets.randbits(48))
        self._stop = StopTogether(ranks, folder, number)
        self._comm = ranks.comm
        try:
            self._load()
        except BaseException:
            self._lock.release()
            raise
        self._signals.take()
        self._epoch = self._comm.session.generation
        for value in self._state.values():
            if isinstance(value, StatefulOptimizer):
                value.saves_are_arranged()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if error is None:
                self.checkpoints.wait()  # where the loop was left by break
        finally:
            self._signals.give_back()
            self._lock.release()
        if error is not None and self._comm.session.generation == self._epoch:
            # The others may wait in a step() that this rank will not make.
            with suppress(type(error)), self._comm.session.region("the loop of a Job"):
                raise error

    def steps(self, num_steps: int) -> Iterator[int]:
        """Yield the number of each remaining step of ``num_steps``, counted from 0. Collective.

        The body of the loop must call the optimizer's step() once. Saves, and the end of the run,
        come after it.

        Args:
            num_steps: number of steps of the whole run, with those made before it resumed.

        Raises:
            CheckpointError: on all ranks, if one cannot write.
        """
        saved_at = self.step
        while self.step < num_steps and not self.is_stopped:
            self._epoch = (
                self._comm.session.generation
            )  # it changes where all have heard of an error
            yield self.step
            self.step += 1
            self._keep_step_with_device()
            is_stop = self._stop.is_after(self.step, self._signals.is_noted)
            self.is_stopped = is_stop and self.step < num_steps
            if self.step % self._save_every == 0 and self.step < num_steps and not is_stop:
                self._save(beside_training=self._beside_training)
                saved_at = self.step
        if self.step != saved_at:
            self._save(beside_training=False)
        self.checkpoints.wait()
        self._stop.clear()

    def _take_folder(self) -> None:
        folder = self.checkpoints.folder
        folder.mkdir(parents=True, exist_ok=True)
        try:
            self._lock.take(folder, _PATIENCE_S)
        except FolderInUse as error:
            text = f"{error}; wait for that job to end, or name another folder."
            raise CheckpointError(text) from error
        remove_old_words(folder)

    def _load(self) -> None:
        saved = self._saved()
        self.step = self.checkpoints.load_latest(saved, trusted=self._trusted) or 0
        for key in self._state:
            self._state[key] = saved[key]

    def _saved(self) -> dict[str, Any]:
        """Return what a checkpoint has: the state, and the random numbers."""
        random = PerRank(RandomState(), on_resize=_tell_new_numbers)
        return {_RANDOM: random, **self._state}

    def _save(self, *, beside_training: bool) -> None:
        self.checkpoints.save(self._saved(), self.step, beside_training=beside_training)

    def _keep_step_with_device(self) -> None:
        """Wait until an accelerator has finished the step before the last. Not run on hardware."""
        if torch.accelerator.current_accelerator(check_available=True) is None:
            return
        end = torch.Event()
        end.record()
        self._ends.append(end)
        if len(self._ends) > 1:
            self._ends.pop(0).synchronize()


def _tell_new_numbers(saved: int, present: int) -> None:
    logger.warning(
        "The checkpoint is of %d ranks, and there are %d now: random generators start afresh.",
        saved,
        present,
    )
