"""Collectives of the ranks that save or load together, which also report errors to all of them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from shardfuse.agreement import (
    broadcast_numbers,
    gather_checksums,
    gather_errors,
    group_by_text,
    name_spans,
)
from shardfuse.checkpoint.index import CheckpointError, DamagedCheckpoint
from shardfuse.comm import Communicator, communicator_for, device_for
from shardfuse.comm.numbers import Counter
from shardfuse.files import describe_os_error
from shardfuse.optim.base import ShardedOptimizer

T = TypeVar("T")


def check_state(state: Any) -> None:
    """Raise TypeError unless ``state`` is a dict, as save() and load() take it."""
    if not isinstance(state, Mapping):
        raise TypeError(
            'state must be a dict, such as {"model": model, "optimizer": optimizer}, got '
            f"{type(state).__name__}."
        )


class CheckpointGroup:
    """The ranks that save or load together. Construction cannot fail on a single rank.

    Args:
        objects: the state; the group is that of its first optimizer.
        process_group: the ranks, if the state has no optimizer.
        doing: prefix of error messages.
    """

    def __init__(self, objects: Mapping[str, Any], process_group: Any, doing: str) -> None:
        self._doing = doing
        self._lines = [f"keys = {list(objects)}"]
        optimizers = [value for value in objects.values() if isinstance(value, ShardedOptimizer)]
        self.comm: Communicator
        if optimizers:
            self.comm = optimizers[0].communicator.world
            self.device = optimizers[0].param_groups[0]["params"][0].device
        else:
            self.device = device_for(process_group)
            self.comm = communicator_for(process_group, self.device).world

    @contextmanager
    def region(self, name: str, *lines: str) -> Iterator[None]:
        """Enter a region of all ranks, which must have the same keys and ``lines``."""
        with self.comm.session.region(name):
            # On accelerators the comparison is asynchronous otherwise, and a save would be complete
            # before it fails.
            self.comm.session.declare([*self._lines, *lines], must_verify=True)
            yield

    def gather_numbers(self, number: int) -> list[int]:
        """Return the 24-bit number of each rank, by one all-reduce. Collective."""
        return gather_checksums(self.comm, self.device, number)

    def broadcast_number(self, number: int) -> int:
        """Return the first rank's 48-bit number, by one all-reduce. Collective."""
        return broadcast_numbers(self.comm, self.device, [number], 1)[0]

    def broadcast_list(self, numbers: Sequence[int]) -> list[int]:
        """Return the first rank's 48-bit numbers, by two all-reduces. Collective."""
        count = self.gather_numbers(len(numbers))[0]
        return broadcast_numbers(self.comm, self.device, numbers, count)

    def agree(self, error: Exception | None, checksum: int = 1) -> list[int]:
        """Return each rank's checksum, or raise on all ranks if one passes an error. Collective.

        Without errors this is one all-reduce. A checksum is never 0, which stands for an error.

        Raises:
            DamagedCheckpoint: at least one error is of this class.
            CheckpointError: otherwise.
        """
        checksums = self.gather_numbers(checksum if error is None else 0)
        if all(checksums):
            return checksums
        texts = gather_errors(self.comm, self.device, _as_checkpoint_error(error))
        message = "; ".join(
            text if len(ranks) == len(texts) else f"{text.rstrip('.')} ({name_spans(ranks)})"
            for text, ranks in group_by_text([text.partition(": ")[2] for text in texts])
            if text
        )
        if any(text.startswith(DamagedCheckpoint.__name__) for text in texts):
            raise DamagedCheckpoint([message]) from error
        raise CheckpointError(f"{self._doing}: {message}") from error


def _as_checkpoint_error(error: Exception | None) -> Exception | None:
    """Return ``error`` as a CheckpointError, with a text that is complete without a class name."""
    if error is None or isinstance(error, CheckpointError):
        return error
    if isinstance(error, OSError):
        return CheckpointError(describe_os_error(error))
    return CheckpointError(f"{type(error).__name__}: {error}")


_counters: weakref.WeakKeyDictionary[Communicator, Counter] = weakref.WeakKeyDictionary()


def next_sequence_number(comm: Communicator) -> str:
    """Return a new number, the same on all ranks, for a key in the process group's store.

    Keys stay in the store, so no number may be used twice: it contains the generation, because the
    counter restarts with it.
    """
    counter = _counters.get(comm) or _counters.setdefault(comm, Counter(comm.session))
    return f"{comm.session.generation}.{counter.increment()}"


def catch(act: Callable[[], T]) -> tuple[T | None, Exception | None]:
    """Return (result, None) of ``act``, or (None, exception)."""
    try:
        return act(), None
    except Exception as error:
        return None, error
