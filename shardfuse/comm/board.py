"""What every rank is doing, told in the process group's store where a rank doubts it.

[Note: calls] A *call* is what all ranks of a process group do together, such as a step(). Each has
a number, counted over all optimizers of the group, a name, and lines of text that the ranks hold in
common (the hyper-parameters, what is trained). A digest of these goes with every message between
pairs of ranks, so that ranks which do different things never take each other's data.

The usual step touches no store. A rank that has waited for a tenth of a second looks there for

* an alarm: a rank that failed in the middle of a call tells the others before it raises;
* what the others are doing: where that is not what this rank does, it raises the alarm itself.

So one rank's fault becomes an error on all of them, and none waits for the group's timeout. Before
the next call all ranks meet in the store, and number their calls and messages anew: a caller may
mend what was wrong, or save what it has. Where a transport had to be closed to end a wait (sockets,
and what a backend does by itself), every later call raises that error again.
"""

from __future__ import annotations

import json
import logging
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from shardfuse.comm.base import PeerError, unreadable
from shardfuse.comm.calls import Call, Sent, calls_in, compare, wait_for_each_other

logger = logging.getLogger("shardfuse")

PATIENCE_S = 0.1
"""How long a rank waits before it looks into the store, and then between two looks."""

RESOLVE_S = 1.5
"""How long ranks that are known to do different things may take to tell what."""

_MEET_S = 30.0
_NUM_REMEMBERED = 4
_MAX_NEIGHBOURS = 8
_MAX_TEXT = 4000


@dataclass
class Board:
    """The calls of one rank in one process group, and its view of the others'.

    Args:
        store: of the process group; keys of this board have a prefix of their own.
        rank, world_size: of the group.
    """

    store: Any
    rank: int
    world_size: int
    _num_communicators: int = 0
    _numbered: Any = field(default_factory=weakref.WeakKeyDictionary)  # each: in which call
    _sent: Sent = field(default_factory=Sent)
    is_store_gone: bool = False
    epoch: int = 0  # how often the ranks have met again after an error
    _error: str | None = None  # what the last call that failed died of
    _closed: str | None = None  # why no call can be made any more
    _calls: deque[Call] = field(default_factory=lambda: deque(maxlen=_NUM_REMEMBERED))
    _depth: int = 0
    _told: str = ""

    def __post_init__(self) -> None:
        self._calls.append(Call(0, "nothing yet"))

    # What this rank does

    @property
    def present(self) -> Call:
        """The call that this rank is in, or was in last."""
        return self._calls[-1]

    @contextmanager
    def call(self, name: str) -> Iterator[None]:
        """Make a call, or a part of one; an error inside it reaches the other ranks.

        Raises:
            PeerError: the ranks are out of step since an earlier error.
        """
        if self._depth:
            yield
            return
        self._begin(name)
        self._depth = 1
        try:
            yield
        except BaseException as error:
            self.present.is_failed = True
            if isinstance(error, PeerError):
                raise
            self.alarm(f"failed in {name}: {type(error).__name__}: {error}")
            raise
        finally:
            self._depth = 0
            self.present.is_over = True

    def begin_sending(self, label: str | None) -> Callable[[], AbstractContextManager[None]]:
        """Count a reduce-scatter; return what is entered while it is launched or waited for."""
        if label is None:
            return nullcontext
        # It may be between two calls here, and in one elsewhere.
        self._sent.begin(self.next_epoch)
        return self._sent.under_way

    @property
    def next_epoch(self) -> int:
        """The epoch of what is sent now: from an error on, that which the next call begins."""
        return self.epoch + int(self.present.is_failed)

    def _begin(self, name: str) -> None:
        last = self.present
        self._calls.append(Call(last.number + 1, name))
        if last.is_failed:
            # A signal may interrupt it: then the ranks have not met yet.
            self.present.is_failed = self.present.is_over = True
            self._meet()
        self.present.declare(())

    def _meet(self) -> None:
        """Number the calls anew, together with all ranks, after one that failed here.

        Raises:
            PeerError: a rank cannot go on, or does not come.
        """
        key = f"again/{self.epoch}"
        deadline = time.monotonic() + _MEET_S
        told: list[str] = []
        try:
            if self._closed is None:
                # Others may have read what this rank told before it was interrupted here.
                mine = json.dumps([self.present.number, self._num_communicators])
                self.store.compare_set(f"{key}/{self.rank}", "", mine)
            for rank in range(self.world_size):
                while not self.store.check([f"{key}/{rank}"]) and self._closed is None:
                    if time.monotonic() > deadline:
                        self._closed = f"rank {rank} has not come back after an error."
                    time.sleep(0.002)
                if self._closed is None:
                    told.append(_text(self.store.get(f"{key}/{rank}")))
            met = [_met_in(text, f"{key}/{rank}") for rank, text in enumerate(told)]
            reason = self._closed or next((found for found in met if isinstance(found, str)), None)
            if reason is not None:
                # To those who come later.
                self.store.set(f"{key}/{self.rank}", json.dumps(reason))
        except RuntimeError as error:
            raise self.explain(error) from error
        if reason is not None:
            self._closed = reason
            self.stop(_out_of_step(reason))
        self.epoch += 1
        self._error = None
        numbers, counts = zip(*[found for found in met if not isinstance(found, str)], strict=True)
        self._calls = deque([Call(max(numbers) + 1, self.present.name)], _NUM_REMEMBERED)
        self._num_communicators = max(counts)
        for communicator, number in list(self._numbered.items()):
            if number >= min(numbers) - 1:  # in a call that has failed somewhere, or after it
                communicator.number = 0

    def number(self, communicator: Any) -> int:
        """Return the number of a communicator that is in its first call, the same on all ranks.

        After an error it may become 0: in the next call the communicator has to ask again.
        """
        self._num_communicators += 1
        self._numbered[communicator] = self.present.number
        return self._num_communicators

    def tell(self, topic: str, text: str) -> None:
        """Leave a text for the other ranks; they can read it from when this returns."""
        if self.is_store_gone:
            return
        try:
            self.store.set(f"told/{topic}/{self.rank}", text)
            self.store.add(f"told/{topic}", 1)  # unlike set(), it waits for an answer
        except RuntimeError:
            self.is_store_gone = True

    def told(self, topic: str) -> list[str | None]:
        """Return what each rank has told of ``topic``; None where nothing.

        While nobody has told anything, that is one question to the store.
        """
        keys = [f"told/{topic}/{rank}" for rank in range(self.world_size)]
        if self.is_store_gone:  # each question to it prints a trace of C++
            return [None] * self.world_size
        try:
            if not self.store.check([f"told/{topic}"]):
                return [None] * self.world_size
            return [_text(self.store.get(k)) if self.store.check([k]) else None for k in keys]
        except RuntimeError:
            self.is_store_gone = True
            return [None] * self.world_size

    # What others do

    def alarm(self, text: str) -> None:
        """Tell all ranks that this one will not go on with the present call, and why."""
        message = f"rank {self.rank} {text}"
        with suppress(RuntimeError):  # the process that keeps the store may have ended
            self.store.compare_set(f"alarm/{self.present.number}", "", message[:_MAX_TEXT])
            self.store.compare_set(f"first alarm/{self.epoch}", "", message[:_MAX_TEXT])

    def look(self, still_waits: Callable[[], bool] = lambda: True) -> None:
        """Look for an alarm, tell the others what this rank does, and compare.

        Args:
            still_waits: whether this rank is where it was when the look began; another thread than
                the one that waits may look.

        Raises:
            PeerError: a rank failed, or does something else than this one.
        """
        try:
            found = self._find_alarm() or self._find_difference(still_waits)
        except RuntimeError:
            return  # the store is gone; whoever waits will learn that from its own transport
        if found is not None:
            self.stop(found)

    def stop(self, text: str) -> None:
        """Raise PeerError."""
        self.present.is_failed = True
        self._error = text
        raise PeerError(f"[rank {self.rank}] {self.present.name}: {text}")

    def explain(
        self,
        error: Exception,
        *,
        patience_s: float = 0.0,
        what: str = "the connection to another rank",
        remedy: str = "",
    ) -> PeerError:
        """Return the error to raise where a transport failed with ``error``.

        Args:
            error: of the transport.
            patience_s: for how long the others may still come to tell what they do.
            what: has failed, if no other rank has told of an error.
            remedy: to name then.
        """
        if self._closed is not None and self.present.is_over:
            # Between two calls: gradients are sent under backward.
            return PeerError(f"[rank {self.rank}] {_out_of_step(self._closed)}")
        text = self._error
        if text is None:
            with suppress(RuntimeError):
                text = _find_reason(self, patience_s)
        if text is None:
            text = f"{what} failed: {error}{remedy}{self._absent()}"
            self.alarm(f"failed in {self.present.name}: {text}")
        self.present.is_failed = True
        self._closed = text
        return PeerError(f"[rank {self.rank}] {self.present.name}: {text}")

    def resolve(self, rank: int) -> None:
        """Raise PeerError: ``rank`` has sent something that does not belong here."""
        deadline = time.monotonic() + RESOLVE_S
        while time.monotonic() < deadline:
            self.look()
            time.sleep(0.01)
        text = (
            f"rank {rank} is in another collective than rank {self.rank}, which is in "
            f"{(self.present.ops or ['none'])[-1]}."
        )
        self.alarm(f"stopped: {text}")
        self.stop(text)

    def confirm(self) -> None:
        """Wait until the neighbours are known to make the present call alike.

        For collectives whose messages carry no mark: a backend may end the process where sizes
        differ.

        Raises:
            PeerError: they do not.
        """
        call = self.present
        if call.is_confirmed:
            return
        mine = str(call.digest)
        call.num_confirmed += 1  # a call may be declared anew after its first collectives
        before = (self.rank - 1) % self.world_size
        try:
            key = f"confirm/{call.number}/{call.num_confirmed}"
            self.store.set(f"{key}/{self.rank}", mine)
            theirs = self._await(f"{key}/{before}")
            self.store.delete_key(f"confirm/{call.number - 2}/1/{self.rank}")
        except PeerError:
            raise
        except RuntimeError as error:
            raise self.explain(error) from error
        if theirs != mine:
            self.resolve(before)
        call.is_confirmed = True

    def _await(self, key: str) -> str:
        """Return the text of ``key`` as soon as it is there.

        Raises:
            RuntimeError: it does not come within the store's timeout.
        """
        deadline = time.monotonic() + self.store.timeout.total_seconds()
        while not self.store.check([key]):
            with suppress(RuntimeError):
                self.store.wait([key], timedelta(seconds=PATIENCE_S))
                break
            self.look()
            if time.monotonic() > deadline:
                raise RuntimeError("it did not come within the timeout of the group's store.")
        return _text(self.store.get(key))

    def _find_alarm(self) -> str | None:
        """Return the text of an alarm in the present call, or the one before or after it."""
        # A call that failed here too is one that all ranks have left.
        numbers = [call.number for call in list(self._calls)[-2:] if not call.is_failed]
        if self.present.is_over:
            # Under backward, or while parameters arrive: others may be in the next call.
            numbers.append(self.present.number + 1)
        texts = (_alarm_at(self.store, f"alarm/{number}") for number in numbers)
        return next((text for text in texts if text is not None), None)

    def _find_difference(self, still_waits: Callable[[], bool]) -> str | None:
        """Tell others what this rank does; return how a neighbour's doings differ from that."""
        sent = self._sent.describe(self.next_epoch)
        mine = [{**call.describe(), **sent} for call in self._calls]
        text = json.dumps(mine)
        if text != self._told:
            self.store.set(f"doing/{self.rank}", text)
            self._told = text
        for distance in range(1, min(self.world_size, _MAX_NEIGHBOURS + 1)):
            rank = (self.rank + distance) % self.world_size
            if not self.store.check([f"doing/{rank}"]):
                continue
            text = _text(self.store.get(f"doing/{rank}"))
            try:
                theirs = calls_in(text)
            except ValueError:
                found = str(unreadable(f"doing/{rank}", text))
                self.alarm(f"stopped: {found}")
                return found
            difference = compare(self.rank, mine, rank, theirs)
            if difference is None and still_waits():
                difference = wait_for_each_other(self.rank, mine[-1], rank, theirs[-1])
                difference = difference if still_waits() else None
            if difference is not None:
                self.alarm(f"stopped: {difference}")
                return difference
        return None

    def _absent(self) -> str:
        """Return, for an error, which ranks have not been seen waiting in the present call."""
        number, missing = self.present.number, []
        try:
            for rank in range(min(self.world_size, 64)):
                key, told = f"doing/{rank}", list[dict[str, Any]]()
                with suppress(ValueError):
                    if self.store.check([key]):
                        told = calls_in(_text(self.store.get(key)))
                if rank != self.rank and all(call["number"] != number for call in told):
                    missing.append(str(rank))
        except RuntimeError:
            return ""
        return f" Not seen in this call: rank {', '.join(missing)}." if missing else ""


def _out_of_step(reason: str) -> str:
    return (
        f"the ranks are out of step since an earlier error: {reason} Start again from the "
        "last checkpoint."
    )


def _find_reason(board: Board, patience_s: float) -> str | None:
    """Return an alarm, or how another rank's doings differ, as soon as there is either."""
    deadline = time.monotonic() + patience_s
    while True:
        found = board._find_alarm() or board._find_difference(lambda: False)
        if found is not None:
            return found
        if time.monotonic() >= deadline:
            # Hosts that run ahead of their devices are in other calls when they hear of it.
            return _alarm_at(board.store, f"first alarm/{board.epoch}")
        time.sleep(0.01)


def _alarm_at(store: Any, key: str) -> str | None:
    if not store.check([key]):
        return None
    text = _text(store.get(key))
    if not text.startswith("rank "):
        return str(unreadable(key, text))
    return text if text.endswith(".") else f"{text}."


def _met_in(text: str, key: str) -> tuple[int, int] | str:
    """Return the numbers of a rank's call and of its communicators, or why it cannot go on.

    Of what no rank has written, the text of the error.
    """
    with suppress(ValueError, RecursionError):
        found = json.loads(text)
        if isinstance(found, str):
            return found
        if isinstance(found, list) and [type(number) for number in found] == [int, int]:
            return found[0], found[1]
    return str(unreadable(key, text))


def _text(value: bytes) -> str:
    return value.decode(errors="replace")
