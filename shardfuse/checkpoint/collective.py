"""Collectives of the ranks that save or load together, which also report errors to all of them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

from shardfuse.agreement import everyones_errors, everyones_words
from shardfuse.checkpoint.index import CheckpointError, DamagedCheckpoint
from shardfuse.comm import Communicator, communicator_for, device_for
from shardfuse.files import describe_os_error
from shardfuse.optim.base import ShardedOptimizer

T = TypeVar("T")


def check_state(state: Any) -> None:
    """Raise TypeError unless this is a dict of what is saved."""
    if not isinstance(state, Mapping):
        raise TypeError(
            'state must be a dict, such as {"model": model, "optimizer": optimizer}, got '
            f"{type(state).__name__}."
        )


class CheckpointGroup:
    """All ranks that share what is saved. Building one cannot fail on one of them alone.

    Args:
        objects: what is saved; the first optimizer's communicator is taken.
        process_group: of the ranks, where there is no optimizer.
        doing: start of the text of errors.
    """

    def __init__(self, objects: Mapping[str, Any], process_group: Any, doing: str) -> None:
        self._doing = doing
        self._lines = [f"keys = {list(objects)}"]
        optimizers = [value for value in objects.values() if isinstance(value, ShardedOptimizer)]
        self.comm: Communicator
        if optimizers:
            self.comm = optimizers[0].communicator.everyone
            self.device = optimizers[0].param_groups[0]["params"][0].device
        else:
            self.device = device_for(process_group)
            self.comm = communicator_for(process_group, self.device).everyone

    @contextmanager
    def region(self, name: str, *lines: str) -> Iterator[None]:
        """Make a call of all ranks, which have the same keys and ``lines``."""
        with self.comm.call(name):
            # Compared now: a save is over before accelerators, which compare late, would tell.
            self.comm.declare([*self._lines, *lines], is_new=True)
            yield

    def gather_numbers(self, word: int) -> list[int]:
        """Return every rank's number, of 24 bits, by one all-reduce."""
        return everyones_words(self.comm, self.device, word)

    def broadcast_number(self, number: int) -> int:
        """Return the first rank's number, of 48 bits, by two all-reduces."""
        high, low = (self.gather_numbers(half)[0] for half in divmod(number, 1 << 24))
        return (high << 24) + low

    def agree(self, error: Exception | None, word: int = 1) -> list[int]:
        """Return every rank's word, by one all-reduce, or raise on all ranks if one has an error.

        Raises:
            DamagedCheckpoint: an error is that.
            CheckpointError: it is of another kind.
        """
        words = self.gather_numbers(word if error is None else 0)
        if all(words):
            return words
        texts = everyones_errors(self.comm, self.device, _as_checkpoint_error(error))
        told: dict[str, list[str]] = {}
        for rank, text in enumerate(texts):
            if text:
                told.setdefault(text.partition(": ")[2], []).append(str(rank))
        message = "; ".join(
            text if len(ranks) == len(texts) else f"{text.rstrip('.')} (rank {', '.join(ranks)})"
            for text, ranks in told.items()
        )
        if any(text.startswith(DamagedCheckpoint.__name__) for text in texts):
            raise DamagedCheckpoint([message]) from error
        raise CheckpointError(f"{self._doing}: {message}") from error


def _as_checkpoint_error(error: Exception | None) -> Exception | None:
    """Return an error whose text can be read without its kind."""
    if error is None or isinstance(error, CheckpointError):
        return error
    if isinstance(error, OSError):
        return CheckpointError(describe_os_error(error))
    return CheckpointError(f"{type(error).__name__}: {error}")


_sequence_numbers: weakref.WeakKeyDictionary[Communicator, tuple[int, int]] = (
    weakref.WeakKeyDictionary()
)


def next_sequence_number(comm: Communicator) -> str:
    """Return a new number that is the same on all ranks: what was told stays in the group's store.

    Ranks that have begun anew after an error count anew: some may have been further than others.
    """
    epoch, last = _sequence_numbers.get(comm, (0, 0))
    _sequence_numbers[comm] = epoch, last = comm.epoch, last + 1 if epoch == comm.epoch else 1
    return f"{epoch}.{last}"


def catch(act: Callable[[], T]) -> tuple[T | None, Exception | None]:
    """Return (what ``act`` returns, None) or (None, what it raises)."""
    try:
        return act(), None
    except Exception as error:
        return None, error
