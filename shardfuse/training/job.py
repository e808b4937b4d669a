"""A training loop that saves, stops on request, and resumes when it is started again.

[Note: one step to save after] Ranks get the request to stop at different moments, some never. They
agree on the last step without a collective. A rank that gets the request after step s publishes
"stop after step s + 2" before it begins the next step. Every rank reads the published requests
after each step, and reads this one in time: a rank that has finished step s + 2 has used gradients
of the first rank's step s + 1 or later, which were sent after the request was published. On
accelerators the host runs ahead of its device; there each step waits for the step before the last.

[Note: without a store] A request is published in the process group's store, which is faster to
read than a file system, and as a file in the job's folder. torchrun's agent holds the store. Ranks
that outlive the agent read the folder from then on. A rank whose request was only in the store
could not be sure that all ranks have read it before the agent died.

[Note: orphans] If torchrun's agent is killed, another process adopts its ranks, which would train
on unnoticed. So a rank that torchrun has started treats a change of its parent process as a request
to stop. PR_SET_PDEATHSIG does not work for this: it fires when the thread that started the rank
ends, and does nothing if the rank sets it too late. Without torchrun the parent is often a shell,
which may end.
"""

from __future__ import annotations

import logging
import os
import random
import secrets
import signal
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import torch

from shardfuse.checkpoint import CheckpointError, Checkpoints, PerRank
from shardfuse.checkpoint.collective import (
    CheckpointGroup,
    catch,
    check_state,
    next_sequence_number,
)
from shardfuse.comm import Communicator
from shardfuse.comm.base import unreadable
from shardfuse.optim.stateful import StatefulOptimizer
from shardfuse.training.lock import FolderInUse, FolderLock

logger = logging.getLogger("shardfuse")

DEFAULT_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)

_LOCK_TIMEOUT_S = 20.0
"""How long a job before this one has to end."""

_RANDOM_KEY = "random"


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
        signals: Sequence[int] = DEFAULT_SIGNALS,
        process_group: Any = None,
        trusted: bool = False,
    ) -> None:
        check_state(state)
        if _RANDOM_KEY in state:
            raise ValueError(
                f"The key {_RANDOM_KEY!r} is the Job's own, of random states. Rename it."
            )
        is_number = isinstance(save_every, int) and not isinstance(save_every, bool)
        if not is_number or save_every < 1:
            raise ValueError(f"Invalid save_every: {save_every!r}. Must be a number of steps >= 1.")
        for value in state.values():
            if isinstance(value, StatefulOptimizer):
                value._refuse_if_foreign("Job")  # and not at the first save, hours later
        self._lock, self._signals = FolderLock(), StopSignals(signals)
        self.step, self.is_stopped = 0, False
        self.checkpoints = Checkpoints(folder, keep=keep, process_group=process_group)
        self._state, self._save_every, self._beside_training = state, save_every, beside_training
        self._group, self._trusted = process_group, trusted
        self._comm: Communicator
        self._epoch = 0
        self._ends: list[torch.Event] = []  # of steps that the device may not have finished

    def __enter__(self) -> Job:
        folder = self.checkpoints.folder
        ranks = CheckpointGroup(self._state, self._group, f"{folder} is not used")
        with ranks.region("entering a Job"):
            error = catch(self._take_folder)[1] if ranks.comm.rank == 0 else None
            ranks.agree(error)
            number = ranks.broadcast_number(secrets.randbits(48))
        self._stop = CoordinatedStop(ranks, folder, number)
        self._comm = ranks.comm
        try:
            self._load()
        except BaseException:
            self._lock.release()
            raise
        self._signals.take()
        self._epoch = self._comm.epoch
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
        if error is not None and self._comm.epoch == self._epoch:
            # The others may wait in a step() that this rank will not make.
            with suppress(type(error)), self._comm.call("the loop of a Job"):
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
            self._epoch = self._comm.epoch  # it changes where all have heard of an error
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
            self._lock.take(folder, _LOCK_TIMEOUT_S)
        except FolderInUse as error:
            text = f"{error}; wait for that job to end, or name another folder."
            raise CheckpointError(text) from error
        remove_stale_requests(folder)

    def _load(self) -> None:
        saved = self._saved()
        self.step = self.checkpoints.load_latest(saved, trusted=self._trusted) or 0
        for key in self._state:
            self._state[key] = saved[key]

    def _saved(self) -> dict[str, Any]:
        """Return what a checkpoint has: the state, and the random numbers."""
        random = PerRank(RandomState(), on_resize=_warn_of_fresh_generators)
        return {_RANDOM_KEY: random, **self._state}

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


def _warn_of_fresh_generators(saved: int, present: int) -> None:
    logger.warning(
        "The checkpoint is of %d ranks, and there are %d now: random generators start afresh.",
        saved,
        present,
    )


_LEAD_STEPS = 2
_STOP_PREFIX = ".stop-"


class CoordinatedStop:
    """After which step all ranks stop; see [Note: one step to save after].

    Args:
        ranks: who stops.
        folder: that all see; None: word is only in the store.
        number: of 48 bits, the same on all ranks and of no other job in the folder.
    """

    def __init__(self, ranks: CheckpointGroup, folder: Path | None = None, number: int = 0) -> None:
        self._comm = ranks.comm
        self._topic = f"stop/{next_sequence_number(ranks.comm)}"
        self._folder = folder if ranks.comm.world_size > 1 else None
        self._prefix = f"{_STOP_PREFIX}{number:012x}-"
        self._own: int | None = None

    def is_after(self, step: int, is_asked: bool) -> bool:
        """Return whether ``step`` is the last; ``is_asked``: this rank was told to stop. Local.

        Raises:
            PeerError: what is found is no word of a rank.
        """
        if is_asked and self._own is None:
            self._own = step + _LEAD_STEPS
            self._leave_word(self._own)
        ends = self._told() if self._own is None else [*self._told(), self._own]
        return any(end <= step for end in ends)

    def clear(self) -> None:
        """Remove this rank's word from the folder, once all have stopped."""
        if self._folder is not None and self._own is not None:
            with suppress(OSError):
                (self._folder / f"{self._prefix}{self._own}").unlink(missing_ok=True)

    def _leave_word(self, end: int) -> None:
        if self._folder is not None:
            with suppress(OSError):  # the store may be there, and a save tells of a full disk
                (self._folder / f"{self._prefix}{end}").touch()
        self._comm.tell(self._topic, str(end))

    def _told(self) -> list[int]:
        texts = self._comm.told(self._topic)
        told = [_parse_step(text, self._topic) for text in texts if text is not None]
        if self._folder is not None and self._comm.is_store_gone:
            told += [_parse_step(text, str(self._folder)) for text in self._words_in_folder()]
        return told

    def _words_in_folder(self) -> list[str]:
        assert self._folder is not None
        with suppress(OSError):
            names = os.listdir(self._folder)
            return [n.removeprefix(self._prefix) for n in names if n.startswith(self._prefix)]
        return []


def remove_stale_requests(folder: Path) -> None:
    """Remove the words of jobs that were killed before they could. For whoever has the folder."""
    for path in folder.glob(f"{_STOP_PREFIX}*"):
        with suppress(OSError):
            path.unlink()


def _parse_step(text: str, key: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 20):
        raise unreadable(key, text)
    return int(text)


_NEVER_CAUGHT = (signal.SIGKILL, signal.SIGSTOP)
_FAULT_SIGNALS = (signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL)
_SET_BY_TORCHRUN = "TORCHELASTIC_RUN_ID"


class StopSignals:
    """Notes signals while they are taken, and the death of torchrun's agent.

    [Note: orphans] If the agent is killed, its ranks are adopted by another process and would train
    on, unseen by whoever has started them. So a rank that torchrun has started is told to stop when
    it has another parent than it had. PR_SET_PDEATHSIG would not do: it fires when the thread that
    has started the rank ends, and says nothing to a rank that sets it too late. Without torchrun a
    parent is often a shell, which may end.

    Args:
        numbers: of the signals.

    Raises:
        ValueError: one cannot be caught, is no number of a signal, or says that this process has
            made a fault, after which it cannot go on.
    """

    def __init__(self, numbers: Sequence[int]) -> None:
        self._numbers = _check_signals(numbers)
        self._previous: Mapping[int, Any] = {}
        self._is_told = False
        self._parent: int | None = None

    @property
    def is_noted(self) -> bool:
        """Whether a signal came, or the agent has ended."""
        if self._parent is not None and os.getppid() != self._parent:
            logger.warning(
                "torchrun's agent, process %d, has ended: this rank is told to stop. A step that "
                "all ranks stop after, and a save, follow.",
                self._parent,
            )
            self._parent, self._is_told = None, True
        return self._is_told

    def take(self) -> None:
        """Have the signals noted, if this is the main thread: Python allows it nowhere else."""
        if _SET_BY_TORCHRUN in os.environ:
            self._parent = os.getppid()
        if threading.current_thread() is threading.main_thread():
            self._previous = {
                number: signal.signal(number, self._note)
                for number in self._numbers
                if not _is_ignored_hangup(number)
            }

    def give_back(self) -> None:
        """Put the earlier handlers back."""
        self._parent = None
        for number, handler in self._previous.items():
            with suppress(ValueError, TypeError):  # another thread; a handler that is not Python's
                signal.signal(number, handler)
        self._previous = {}

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._is_told = True


def _is_ignored_hangup(number: int) -> bool:
    """Whoever ignores it wants the run to outlive a terminal."""
    return number == signal.SIGHUP and signal.getsignal(signal.SIGHUP) == signal.SIG_IGN


def _check_signals(numbers: Sequence[int]) -> tuple[int, ...]:
    """Return each number once; raise ValueError, see Signals."""
    try:
        given = tuple(numbers)
    except TypeError:
        text = f"Invalid signals: {numbers!r}. Must be numbers, such as (signal.SIGTERM,)."
        raise ValueError(text) from None
    for number in given:
        if isinstance(number, bool) or not isinstance(number, int):
            why = "Must be a number, such as signal.SIGTERM"
        elif number not in signal.valid_signals():
            why = "This system has no signal of that number"
        elif number in _NEVER_CAUGHT:
            why = f"No process can catch {signal.Signals(number).name}"
        elif number in _FAULT_SIGNALS:
            why = f"After {signal.Signals(number).name} this process cannot save"
        else:
            continue
        raise ValueError(f"Invalid signal in signals: {number!r}. {why}.")
    return tuple(dict.fromkeys(given))


class RandomState:
    """The global generators of torch (CPU and the current accelerator), Python, and numpy if used.

    Every rank has its own generators: save a RandomState inside ``PerRank``.
    """

    def state_dict(self) -> dict[str, Any]:
        """Return the generators' states as plain data."""
        state: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
        device = _accelerator()
        if device is not None:  # not run on hardware
            state["accelerator"] = torch.get_device_module(device).get_rng_state()
        if "numpy" in sys.modules:
            name, keys, position, has_gauss, cached = sys.modules["numpy"].random.get_state()
            numbers = (keys.tolist(), int(position), int(has_gauss), float(cached))
            state["numpy"] = (str(name), *numbers)
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the generators.

        Args:
            state: the result of state_dict().
        """
        torch.set_rng_state(state["torch"])
        random.setstate(state["python"])
        device = _accelerator()
        if device is not None and "accelerator" in state:  # not run on hardware
            torch.get_device_module(device).set_rng_state(state["accelerator"])
        if "numpy" in state:
            import numpy

            numpy.random.set_state(state["numpy"])


def _accelerator() -> torch.device | None:
    return torch.accelerator.current_accelerator(check_available=True)
