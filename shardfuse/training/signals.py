"""What tells one rank to stop: a signal, or the death of the launcher that has started it."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import FrameType
from typing import Any

logger = logging.getLogger("shardfuse")

DEFAULT = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)

_NEVER_CAUGHT = (signal.SIGKILL, signal.SIGSTOP)
_FAULTS = (signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL)
_SET_BY_TORCHRUN = "TORCHELASTIC_RUN_ID"


class Signals:
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
        self._numbers = _checked(numbers)
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
                if not _is_kept_by_nohup(number)
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


def _is_kept_by_nohup(number: int) -> bool:
    """Whoever ignores it wants the run to outlive a terminal."""
    return number == signal.SIGHUP and signal.getsignal(signal.SIGHUP) == signal.SIG_IGN


def _checked(numbers: Sequence[int]) -> tuple[int, ...]:
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
        elif number in _FAULTS:
            why = f"After {signal.Signals(number).name} this process cannot save"
        else:
            continue
        raise ValueError(f"Invalid signal in signals: {number!r}. {why}.")
    return tuple(dict.fromkeys(given))
