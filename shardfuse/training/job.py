"""A training loop that saves, stops on request, and resumes when it is started again.

[Note: one step to save after] Ranks get the request to stop at different moments, some never. They
agree on the last step without a collective. A rank that gets the request after step s publishes
"stop after step s + 2" before it begins the next step. Every rank reads the published requests
after each step, and reads this one in time: a rank that has finished step s + 2 has used gradients
of this rank's step s + 1 or later, which were sent after the request was published. On
accelerators the host runs ahead of its device; there each step waits for the step before the last.

[Note: without a store] A request is published in the process group's store, which is faster to
read than a file system, and as a file in the job's folder. torchrun's agent holds the store. Ranks
that outlive the agent read the folder from then on. If a request were only in the
store, a rank could not be sure that all ranks have read it before the agent died.

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
from shardfuse.comm.session import unreadable
from shardfuse.optim.stateful import StatefulOptimizer
from shardfuse.training.lock import FolderInUse, FolderLock

logger = logging.getLogger("shardfuse")

DEFAULT_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)

_LOCK_TIMEOUT_S = 20.0
"""How long the previous job in the folder may take to end."""

_RANDOM_KEY = "random"


class Job:
    """A training run that resumes, however it ended, when the same command starts it again.

    A context manager. Entering it locks the folder and loads the newest intact checkpoint, if there
    is one, saved with any number of ranks. Both are collective.

    * It saves every ``save_every`` steps, after the last step, and when it stops on request.
    * A signal of ``signals`` to any rank stops all ranks two steps later, after the same step.
    * If torchrun is killed, the ranks that it has started stop in the same way.
    * Each rank's random state is restored. With another number of ranks the generators start
      afresh, with a warning.
    * Leaving waits for an asynchronous save, on all ranks.
    * If one rank leaves with an error, the others do not wait for it: each raises PeerError, which
      quotes that error.

    Args:
        folder: folder for this run's checkpoints only, in a file system that all ranks see.
        state: {key: ShardedOptimizer, module, object with state_dict(), PerRank, or value}, as for
            shardfuse.checkpoint.save(). Loading replaces values in this dict.
        save_every: finished steps between two saves.
        keep: number of intact checkpoints that remain after a save.
        async_save: write while training continues, as shardfuse.checkpoint.async_save() does.
        signals: signals that stop the run; SIGTERM, SIGINT, SIGUSR1 and SIGHUP if left out. Slurm's
            ``--signal`` sends one. The main thread handles them. SIGHUP stays ignored if it is, as
            under nohup.
        process_group: the ranks, if ``state`` has no ShardedOptimizer.
        trusted: whether values may be more than plain data, such as arrays of numpy. Unpickling
            them runs code from the file.

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
        async_save: bool = False,
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
                value._refuse_if_external("Job")  # now, not at the first save hours later
        self._lock, self._signals = FolderLock(), StopSignals(signals)
        self.step, self.is_stopped = 0, False
        self.checkpoints = Checkpoints(folder, keep=keep, process_group=process_group)
        self._state, self._save_every, self._async_save = state, save_every, async_save
        self._group, self._trusted = process_group, trusted
        self._comm: Communicator
        self._generation = 0
        self._step_events: list[
            torch.Event
        ] = []  # ends of steps that the device may not have reached

    def __enter__(self) -> Job:
        folder = self.checkpoints.folder
        ranks = CheckpointGroup(self._state, self._group, f"{folder} is not used")
        with ranks.region("entering a Job"):
            error = catch(self._lock_folder)[1] if ranks.comm.rank == 0 else None
            ranks.agree(error)
            number = ranks.broadcast_number(secrets.randbits(48))
        self._stop = CoordinatedStop(ranks, folder, number)
        self._comm = ranks.comm
        try:
            self._load()
        except BaseException:
            self._lock.release()
            raise
        self._signals.install()
        self._generation = self._comm.session.generation
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
                self.checkpoints.wait()  # the loop may have been left by break
        finally:
            self._signals.restore()
            self._lock.release()  # after wait(): a second job must not find a save in progress
        if error is not None and self._comm.session.generation == self._generation:
            # Reports the error to the peers, which may wait for this rank in their next step().
            with suppress(type(error)):
                self._comm.session.fail("the loop of a Job", error)

    def steps(self, num_steps: int) -> Iterator[int]:
        """Yield the number of each remaining step of ``num_steps``, counted from 0. Collective.

        The body of the loop must call the optimizer's step() once. Saves, and the end of the run,
        follow it.

        Args:
            num_steps: number of steps of the whole run, including those before it resumed.

        Raises:
            CheckpointError: on all ranks, if any rank cannot write.
        """
        saved_at = self.step
        while self.step < num_steps and not self.is_stopped:
            self._generation = (
                self._comm.session.generation
            )  # changes once all ranks know of an error
            yield self.step
            self.step += 1
            self._wait_for_step_before_last()
            is_stop = self._stop.should_stop_after(self.step, self._signals.is_requested)
            self.is_stopped = is_stop and self.step < num_steps
            if self.step % self._save_every == 0 and self.step < num_steps and not is_stop:
                self._save(async_save=self._async_save)
                saved_at = self.step
        if self.step != saved_at:
            self._save(async_save=False)
        self.checkpoints.wait()
        self._stop.remove_request()

    def _lock_folder(self) -> None:
        folder = self.checkpoints.folder
        folder.mkdir(parents=True, exist_ok=True)
        try:
            self._lock.take(folder, _LOCK_TIMEOUT_S)
        except FolderInUse as error:
            text = f"{error}; wait for that job to end, or name another folder."
            raise CheckpointError(text) from error
        remove_stale_requests(folder)  # under the lock: no running job can have published them

    def _load(self) -> None:
        state = self._state_with_generators()
        self.step = self.checkpoints.load_latest(state, trusted=self._trusted) or 0
        for key in self._state:
            self._state[key] = state[key]

    def _state_with_generators(self) -> dict[str, Any]:
        """Return the entries of a checkpoint: the state and the random generators."""
        generators = PerRank(RandomState(), on_resize=_warn_of_fresh_generators)
        return {_RANDOM_KEY: generators, **self._state}

    def _save(self, *, async_save: bool) -> None:
        self.checkpoints.save(self._state_with_generators(), self.step, async_save=async_save)

    def _wait_for_step_before_last(self) -> None:
        """Wait until an accelerator has finished the step before the last. Not run on hardware."""
        if _accelerator() is None:
            return
        end = torch.Event()
        end.record()
        self._step_events.append(end)
        if len(self._step_events) > 1:
            self._step_events.pop(0).synchronize()


def _warn_of_fresh_generators(saved: int, present: int) -> None:
    logger.warning(
        "The checkpoint was saved by %d ranks, this run has %d: random generators start afresh.",
        saved,
        present,
    )


_LEAD_STEPS = 2
_STOP_PREFIX = ".stop-"


class CoordinatedStop:
    """Agreement on the step after which all ranks stop; see [Note: one step to save after].

    Args:
        ranks: the ranks that stop.
        folder: a folder that all ranks see; None: requests are only in the store.
        number: a 48-bit number, the same on all ranks, and different for each job in the folder.
    """

    def __init__(self, ranks: CheckpointGroup, folder: Path | None = None, number: int = 0) -> None:
        self._comm = ranks.comm
        self._topic = f"stop/{next_sequence_number(ranks.comm)}"
        self._folder = folder if ranks.comm.world_size > 1 else None
        self._prefix = f"{_STOP_PREFIX}{number:012x}-"
        self._own_step: int | None = None

    def should_stop_after(self, step: int, is_requested: bool) -> bool:
        """Return whether ``step`` is the last; ``is_requested``: this rank has a request. Local.

        Raises:
            PeerError: the store or the folder has a request that no rank can have published.
        """
        if is_requested and self._own_step is None:
            self._own_step = step + _LEAD_STEPS
            self._publish(self._own_step)
        stops = (
            self._published_steps()
            if self._own_step is None
            else [*self._published_steps(), self._own_step]
        )
        return any(stop <= step for stop in stops)

    def remove_request(self) -> None:
        """Remove this rank's request from the folder, after all ranks have stopped."""
        if self._folder is not None and self._own_step is not None:
            with suppress(OSError):
                (self._folder / f"{self._prefix}{self._own_step}").unlink(missing_ok=True)

    def _publish(self, step: int) -> None:
        # The folder first: it still has the request if the store is lost in between.
        if self._folder is not None:
            with suppress(OSError):  # the store still has the request; a save reports a full disk
                (self._folder / f"{self._prefix}{step}").touch()
        self._comm.session.publish(self._topic, str(step))

    def _published_steps(self) -> list[int]:
        texts = self._comm.session.read(self._topic)
        steps = [_parse_step(text, self._topic) for text in texts if text is not None]
        if self._folder is not None and self._comm.session.is_store_gone:
            steps += [_parse_step(text, str(self._folder)) for text in self._requests_in_folder()]
        return steps

    def _requests_in_folder(self) -> list[str]:
        assert self._folder is not None
        with suppress(OSError):
            names = os.listdir(self._folder)
            return [n.removeprefix(self._prefix) for n in names if n.startswith(self._prefix)]
        return []


def remove_stale_requests(folder: Path) -> None:
    """Remove requests of jobs that were killed. Only the job that has locked the folder."""
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
    """Records signals while installed, and the death of torchrun's agent; see [Note: orphans].

    Args:
        numbers: the signals.

    Raises:
        ValueError: a signal cannot be caught, is not a signal's number, or reports a fault of this
            process, after which it cannot continue.
    """

    def __init__(self, numbers: Sequence[int]) -> None:
        self._numbers = _check_signals(numbers)
        self._previous: Mapping[int, Any] = {}
        self._has_signal = False
        self._parent: int | None = None

    @property
    def is_requested(self) -> bool:
        """Whether a signal was received, or the agent has died."""
        if self._parent is not None and os.getppid() != self._parent:
            logger.warning(
                "torchrun's agent, process %d, has ended: this rank is told to stop. A step that "
                "all ranks stop after, and a save, follow.",
                self._parent,
            )
            self._parent, self._has_signal = None, True
        return self._has_signal

    def install(self) -> None:
        """Install the handlers. Python allows that in the main thread only; others do nothing."""
        if _SET_BY_TORCHRUN in os.environ:
            self._parent = os.getppid()
        if threading.current_thread() is threading.main_thread():
            self._previous = {
                number: signal.signal(number, self._on_signal)
                for number in self._numbers
                if not _is_ignored_hangup(number)
            }

    def restore(self) -> None:
        """Restore the previous handlers."""
        self._parent = None
        for number, handler in self._previous.items():
            with suppress(ValueError, TypeError):  # not the main thread; no handler of Python's
                signal.signal(number, handler)
        self._previous = {}

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._has_signal = True


def _is_ignored_hangup(number: int) -> bool:
    """Return whether SIGHUP is ignored, as under nohup: the run shall outlive its terminal."""
    return number == signal.SIGHUP and signal.getsignal(signal.SIGHUP) == signal.SIG_IGN


def _check_signals(numbers: Sequence[int]) -> tuple[int, ...]:
    """Return each number once; raise ValueError, see StopSignals."""
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
    """Global generators of torch (CPU and the current accelerator), Python, and numpy if loaded.

    Each rank has its own generators: save a RandomState inside ``PerRank``.
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
