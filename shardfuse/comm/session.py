"""Session: ranks enter the same regions with the same options, and an error of one reaches all.

[Note: regions] A *region* is a method that all ranks of a process group execute together, such as
step(). Each region has a number, counted over all optimizers of the group, a name, and entries:
lines of text that must be equal on all ranks (the hyper-parameters, which parameters train). Every
message between a pair of ranks carries a digest of these, so that ranks in different regions never
take each other's data.

A usual step does not use the process group's store. A rank that has waited for a tenth of a second
reads there

* failures: a rank that fails inside a region reports it before it raises;
* a digest of the regions of a neighbour, and these themselves if the digest is another than its
  own: where the regions differ, it reports the mismatch itself.

How often it reads is limited: [Note: store traffic] in polls.py. A rank that ends reports nothing;
its peers find out which one it was: [Note: absent ranks] in roll_call.py.

So the error of one rank is raised on all ranks, and none waits for the timeout of the group. Before
the next region, all ranks meet in the store and restart the numbers of regions and messages: the
*generation* is one higher then. If a transport has failed, or had to be closed to end a wait
(sockets; any backend that closes by itself), every later region raises the same error again.

A number that the ranks must share restarts with the generation: numbers.Counter and
Session.on_restart() are the only two ways to keep one.
"""

from __future__ import annotations

import json
import logging
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NoReturn, Protocol

from shardfuse.comm.numbers import Channels
from shardfuse.comm.polls import PollRateLimit, backoff_delays
from shardfuse.comm.regions import (
    LabelledSends,
    Region,
    compare,
    find_extra_backward,
    number_in,
    parse_regions,
    summary_of,
)
from shardfuse.comm.roll_call import CALL, RollCall, name_ranks
from shardfuse.comm.store import as_text, peek, read_all, write_all

logger = logging.getLogger("shardfuse")

PATIENCE_S = 0.1
"""Seconds that a rank waits before it polls its peers, and between two polls."""

RESOLVE_S = 1.5
"""Seconds that ranks have to publish in which region they are, and to answer a roll call."""

_SUSPECTS_S = 0.3
"""Seconds to answer of a rank whose connection to this one has failed: it has seen it, too."""

_LEADER_S = 1.0
"""More seconds, in which the rank that has called the roll first reports the result."""

_MAX_SUSPECTS = 8

LATE_S = 5.0
"""Seconds of a wait after which a rank logs that the next rank was not seen in this region."""

_REJOIN_S = 30.0
_NUM_REMEMBERED = 4
_MAX_NEIGHBOURS = 8
_MAX_TEXT = 4000


class PeerError(RuntimeError):
    """Another rank failed, or does something else than this one; raised on all of them."""


def unreadable(key: str, text: str) -> PeerError:
    """Return the error for a ``key`` of the group's store with a ``text`` that no rank writes."""
    return PeerError(
        f"The process group's store has {text[:80]!r} under {key!r}, which is nothing that a rank "
        "of this version of shardfuse writes. Is another program using the store (MASTER_ADDR and "
        "MASTER_PORT), or do ranks have different versions?"
    )


# Sessions


class Session(Protocol):
    """The regions of one communicator; see [Note: regions]."""

    @property
    def generation(self) -> int:
        """How often the ranks have restarted after an error; work in flight then is lost.

        It is one higher from the error on, before the region that restarts.
        """

    @property
    def is_store_gone(self) -> bool:
        """Whether publish() or read() found the group's store gone, which then stays so. Local.

        The process that holds it, such as torchrun's agent, may end before the ranks.
        """

    def region(self, name: str) -> AbstractContextManager[None]:
        """Enter a region of all ranks: an error inside it is raised on every rank.

        A region inside another one is a part of it.

        Raises:
            PeerError: on entry, where the ranks are out of step since an earlier error.
        """

    def fail(self, name: str, error: BaseException) -> NoReturn:
        """Raise ``error`` on this rank, and have the peers raise it too, as of region ``name``."""

    def reports_errors(self, name: str) -> AbstractContextManager[None]:
        """Have an error of this rank outside of regions raised on the peers, too, as by fail()."""

    def declare(self, entries: Sequence[str], *, must_verify: bool = False) -> None:
        """State the entries that must be equal on all ranks in this region, before it communicates.

        If it is not, the collectives that follow raise PeerError on every rank, naming the first
        entry that differs. ``must_verify``: the entries decide which collectives follow, so they
        are verified at once where messages carry no digest.
        """

    def publish(self, topic: str, text: str) -> None:
        """Write a text for the peers. They can read it from when this returns.

        Local, and slow: through the group's store.
        """

    def read(self, topic: str) -> list[str | None]:
        """Return the text of each rank for ``topic`` so far; None where there is none. Local."""

    def reserve_channels(self, count: int) -> int:
        """Return the first of ``count`` channels of labels, equal on all ranks. In a region."""

    def refresh(self) -> None:
        """Run the methods of on_restart(), if the ranks have restarted since. Local."""

    def on_restart(self, method: Callable[[], None], *, is_transport: bool = False) -> None:
        """Have a bound ``method`` called once in every new generation, before its first message.

        The method is held weakly. Those of transports come before those of all others, which may
        post receives: an optimizer makes communicators later, too.
        """

    def at_region_end(self, method: Callable[[], None]) -> None:
        """Have a bound ``method`` called at the end of every region without an error; weakly."""


class LocalSession:
    """The session of a single rank: nothing to compare, nobody to tell."""

    generation = 0
    is_store_gone = False

    def region(self, name: str) -> AbstractContextManager[None]:
        return nullcontext()

    def fail(self, name: str, error: BaseException) -> NoReturn:
        raise error

    def reports_errors(self, name: str) -> AbstractContextManager[None]:
        return nullcontext()

    def declare(self, entries: Sequence[str], *, must_verify: bool = False) -> None:
        """Do nothing: there is no peer."""

    def publish(self, topic: str, text: str) -> None:
        """Do nothing: there is no peer."""

    def read(self, topic: str) -> list[str | None]:
        return [None]

    def reserve_channels(self, count: int) -> int:
        return 0

    def refresh(self) -> None:
        """Do nothing: a single rank never restarts."""

    def on_restart(self, method: Callable[[], None], *, is_transport: bool = False) -> None:
        """Do nothing: a single rank never restarts."""

    def at_region_end(self, method: Callable[[], None]) -> None:
        """Do nothing: no peer reads this rank's memory."""


class GroupSession:
    """The regions of one communicator over several ranks.

    Args:
        group: shared by all sessions of the process group.
        check_alive: raises if the process group was destroyed; a bound method, held weakly.
        verify: verifies the entries, where messages carry no digest; likewise.
    """

    def __init__(
        self,
        group: GroupState,
        *,
        check_alive: Callable[[], object],
        verify: Callable[[], None],
    ) -> None:
        self.group = group
        self.number = 0
        """Of this session in its group, equal on all ranks; 0 before the first region."""
        self._check_alive = weakref.WeakMethod(check_alive)
        self._verify = weakref.WeakMethod(verify)
        self._at_region_end: list[weakref.WeakMethod[Callable[[], None]]] = []

    @property
    def generation(self) -> int:
        return self.group.next_generation

    @property
    def is_store_gone(self) -> bool:
        return self.group.is_store_gone

    @contextmanager
    def region(self, name: str) -> Iterator[None]:
        check_alive = self._check_alive()
        if check_alive is not None:
            check_alive()
        with self.group.region(name):
            if self.number == 0:
                self.number = self.group.assign_number(self)
            yield
            for reference in self._at_region_end:
                method = reference()
                if method is not None:
                    method()

    def fail(self, name: str, error: BaseException) -> NoReturn:
        with self.region(name):
            raise error

    @contextmanager
    def reports_errors(self, name: str) -> Iterator[None]:
        # The peers wait for this rank in the region that follows.
        try:
            self.refresh()
            yield
        except PeerError:
            raise
        except Exception as error:
            self.fail(name, error)

    def declare(self, entries: Sequence[str], *, must_verify: bool = False) -> None:
        first = f"optimizer {self.number} of its process group"
        self.group.current.declare([first, *entries])
        verify = self._verify() if must_verify else None
        if verify is not None:
            verify()

    def publish(self, topic: str, text: str) -> None:
        self.group.publish(f"{self.number}/{topic}", text)

    def read(self, topic: str) -> list[str | None]:
        return self.group.read(f"{self.number}/{topic}")

    def reserve_channels(self, count: int) -> int:
        return self.group.channels.reserve(count)

    def refresh(self) -> None:
        self.group.refresh()

    def on_restart(self, method: Callable[[], None], *, is_transport: bool = False) -> None:
        self.group.on_restart(method, is_transport=is_transport)

    def at_region_end(self, method: Callable[[], None]) -> None:
        self._at_region_end.append(weakref.WeakMethod(method))


# The process group


@dataclass
class GroupState:
    """The regions of this rank in one process group, and its view of the peers' regions.

    Args:
        store: of the process group; the keys of this object have a prefix of their own.
        rank, world_size: of the group.
    """

    store: Any
    rank: int
    world_size: int
    is_store_gone: bool = False
    has_lost_store: bool = False  # found by polls
    generation: int = 0  # how often the ranks have met again after an error
    _num_sessions: int = 0
    _numbered: Any = field(default_factory=weakref.WeakKeyDictionary)  # each: in which region
    _sends: LabelledSends = field(default_factory=LabelledSends)
    channels: Channels = field(default_factory=Channels)
    _restarts: list[weakref.WeakMethod[Callable[[], None]]] = field(default_factory=list)
    _refreshed: int = 0  # the generation for which these were called
    _error: str | None = None  # of the last region that failed
    closed: str | None = None  # why no region can be entered any more
    _regions: deque[Region] = field(default_factory=lambda: deque(maxlen=_NUM_REMEMBERED))
    _depth: int = 0
    _published: str = ""
    _num_looks: int = 0
    _peers: dict[int, tuple[str, list[dict[str, Any]]]] = field(default_factory=dict)
    """The digest and the regions of a peer, as last read."""
    _next_rank: tuple[float, int] = (0.0, 0)  # when this one has read its region, and which
    _read: tuple[tuple[str, int], list[str | None]] = ("", 0), []
    """The topic that read() has read last, how often ranks had published in it, and the texts."""
    exchanges: dict[Any, tuple[int, Any]] = field(default_factory=dict)
    """The exchange that communicators of the same ranks share, and its generation."""
    _late_in: int = 0  # the region in which a late rank was last logged
    watchdogs: Any = field(default_factory=weakref.WeakSet)  # of its transports
    num_watchdogs: int = 0  # that were made
    launch_counts: dict[str, int] = field(default_factory=dict)
    """Collectives so far, of each transport that runs them in one order."""
    _counts_at_failure: dict[str, int] = field(default_factory=dict)  # when the last region failed

    def __post_init__(self) -> None:
        self._regions.append(Region(0, "nothing yet"))
        self._schedule = PollRateLimit(self.rank, self.world_size)
        self._roll_call = RollCall(self.store, self.rank)
        steps = [sign * step for step in range(1, _MAX_NEIGHBOURS // 2 + 1) for sign in (1, -1)]
        around = [(self.rank + step) % self.world_size for step in steps]
        self._neighbours = [rank for rank in dict.fromkeys(around) if rank != self.rank]

    # This rank

    @property
    def current(self) -> Region:
        """The region that this rank is in, or was in last."""
        return self._regions[-1]

    @contextmanager
    def region(self, name: str) -> Iterator[None]:
        """Enter a region, or a part of one; an error inside it reaches the peers.

        Raises:
            PeerError: the ranks are out of step since an earlier error.
        """
        if self._depth:
            yield
            return
        self._enter(name)
        self._depth = 1
        try:
            self.refresh()
            yield
        except BaseException as error:
            self.current.is_failed = True
            if not isinstance(error, PeerError):
                self.report_failure(f"failed in {name}: {type(error).__name__}: {error}")
            self._counts_at_failure = dict(self.launch_counts)
            for watchdog in list(self.watchdogs):
                watchdog.note_failure(str(error))
            raise
        finally:
            self._depth = 0
            self.current.is_over = True

    def use_connection(self, store: Any) -> None:
        """Take another connection to the same ``store``: a thread is about to wait in this one."""
        self.store = store
        self._roll_call = RollCall(store, self.rank)

    def begin_send(self, *, is_labelled: bool) -> Callable[[], AbstractContextManager[None]]:
        """Count a reduce-scatter; return the context in which it is launched or waited for."""
        if not is_labelled:
            return nullcontext
        # This rank may be between two regions, and a peer inside one.
        self._sends.begin(self.next_generation)
        return self._sends.in_flight

    @property
    def next_generation(self) -> int:
        """The generation of messages sent now: from an error on, that of the next region."""
        return self.generation + int(self.current.is_failed)

    def on_restart(self, method: Callable[[], None], *, is_transport: bool) -> None:
        """Have ``method``, held weakly, called once in every new generation."""
        self.refresh()
        self._restarts = [reference for reference in self._restarts if reference() is not None]
        self._restarts.insert(
            0 if is_transport else len(self._restarts), weakref.WeakMethod(method)
        )

    def refresh(self) -> None:
        """Run the methods of on_restart() if an error has ended the generation of the last run."""
        if self._refreshed == self.next_generation:
            return
        self._refreshed = self.next_generation
        for reference in list(self._restarts):
            method = reference()
            if method is not None:
                method()

    def _enter(self, name: str) -> None:
        last = self.current
        self._regions.append(Region(last.number + 1, name))
        if last.is_failed:
            # A signal may interrupt _rejoin(): then the ranks have not met yet.
            self.current.is_failed = self.current.is_over = True
            self._rejoin()
        self.current.declare(())

    def _rejoin(self) -> None:
        """Restart the numbers of regions, together with all ranks, after one that failed here.

        Raises:
            PeerError: a rank cannot go on, or does not come.
        """
        try:
            outcome = self._exchange_numbers(f"again/{self.generation}")
        except RuntimeError as error:
            raise self.attribute_error(error) from error
        if isinstance(outcome, str):
            self.closed = self.closed or outcome
            self.raise_peer_error(_out_of_step(self.closed))
        first, last, self._num_sessions, num_channels = outcome
        self.channels.restart(self.generation, num_channels)
        self.generation += 1
        self._error = None
        self._peers.clear()
        self._regions = deque([Region(last + 1, self.current.name)], _NUM_REMEMBERED)
        for session, number in list(self._numbered.items()):
            if number >= first - 1:  # in a region that has failed somewhere, or after it
                session.number = 0

    def _exchange_numbers(self, key: str) -> tuple[int, ...] | str:
        """Return the least and the largest number of a region, of sessions and channels; or an
        error.

        Rank 0 waits for all and writes the outcome. The others wait for it: four requests a rank.
        The first outcome that is written stands, so that all ranks have the same.

        Raises:
            RuntimeError: the store is gone.
        """
        keys = [f"{key}/{rank}" for rank in range(self.world_size)]
        if self.closed is None:
            # Not set(): peers may have read the text of this rank before an interrupt.
            numbers = [self.current.number, self._num_sessions, self.channels.num_reserved]
            mine = json.dumps([*numbers, self._counts_at_failure])
            self.store.compare_set(keys[self.rank], "", mine)
            wanted = keys if self.rank == 0 else [f"{key}/outcome"]
            has_met = self._wait_for(wanted, _REJOIN_S, lambda: self.closed is not None, 1.0)
            if has_met and self.rank > 0:
                return _parse_numbers(as_text(self.store.get(wanted[0])), wanted[0], int)
            outcome: tuple[int, ...] | str
            if has_met:
                texts = read_all(self.store, keys)
                outcome = _merge_numbers(
                    [_parse_numbers(text, k, dict) for k, text in zip(keys, texts, strict=True)]
                )
            elif self.closed is None:
                absent = next((r for r, k in enumerate(keys) if not self.store.check([k])), 0)
                outcome = f"rank {absent} has not come back after an error."
        if self.closed is not None:
            outcome = self.closed
            self.store.set(keys[self.rank], json.dumps(outcome))  # rank 0 waits for it
        text = as_text(self.store.compare_set(f"{key}/outcome", "", json.dumps(outcome)))
        return _parse_numbers(text, f"{key}/outcome", int)

    def assign_number(self, session: Any) -> int:
        """Return the number of a session that is in its first region, the same on all ranks.

        After an error ``session.number`` may become 0: then it asks again in the next region.
        """
        self._num_sessions += 1
        self._numbered[session] = self.current.number
        return self._num_sessions

    def publish(self, topic: str, text: str) -> None:
        """Write a text for the peers; they can read it from when this returns."""
        if self.is_store_gone:
            return
        try:
            self.store.set(f"told/{topic}/{self.rank}", text)
            self.store.add(f"told/{topic}", 1)  # unlike set(), it waits for an answer
        except RuntimeError:
            self.is_store_gone = True

    def read(self, topic: str) -> list[str | None]:
        """Return the text of each rank for ``topic``; None where there is none.

        While no rank publishes anything, that is one request to the store.
        """
        keys = [f"told/{topic}/{rank}" for rank in range(self.world_size)]
        if self.is_store_gone:  # each request to it would print a C++ trace
            return [None] * self.world_size
        try:
            version = topic, self.store.add(f"told/{topic}", 0)
            if version != self._read[0]:
                texts = [peek(self.store, key) for key in keys] if version[1] else []
                self._read = version, texts or [None] * self.world_size
            return list(self._read[1])
        except RuntimeError:
            self.is_store_gone = True
            return [None] * self.world_size

    # Its peers

    def report_failure(self, text: str) -> None:
        """Tell all ranks that this one will not go on with the current region, and why."""
        self._report(f"rank {self.rank} {text}")

    def _report(self, message: str) -> None:
        message, first = message[:_MAX_TEXT], self._first_alarm
        with suppress(RuntimeError):  # the process that holds the store may have ended
            self.store.compare_set(f"alarm/{self.current.number}", "", message)
            found = as_text(self.store.compare_set(first, "", message))
            if found.endswith(CALL):
                self.store.compare_set(first, found, message)

    @property
    def _first_alarm(self) -> str:
        """The key of the first failure since the ranks have last met."""
        return f"first alarm/{self.generation}"

    def poll_peers(self, still_waits: Callable[[], bool] = lambda: True) -> None:
        """Look for a reported failure, publish this rank's regions, and compare them with a peer's.

        How often it does is limited: [Note: store traffic] in polls.py.

        Args:
            still_waits: whether this rank is where it was when the poll began; another thread than
                the one that waits may poll.

        Raises:
            PeerError: a rank failed, or does something else than this one.
        """
        if self.closed is not None and self._error is not None and self.current.is_failed:
            self.raise_peer_error(self._error)  # another thread has found it
        is_waiting = still_waits()
        is_fresh = self._schedule.is_fresh(self._position(), is_waiting=is_waiting)
        found = None
        try:
            if self._schedule.failures.acquire() or is_fresh:
                found = self._find_failure()
            if found is None and (self._schedule.mismatches.acquire() or is_fresh):
                found = self._find_mismatch(still_waits, is_fresh=is_fresh)
        except RuntimeError:
            self.has_lost_store = True
        if found is not None:
            self.raise_peer_error(found)
        if is_waiting and not self.current.is_over:
            self.log_late_rank(time.monotonic() - self._schedule.since_s)

    def _position(self) -> object:
        """Return a value that changes whenever this rank goes on."""
        region = self.current
        sends = tuple(self._sends.describe(self.next_generation).values())
        return region.number, len(region.declared), len(region.ops), region.is_over, sends

    def log_late_rank(self, waited_s: float) -> None:
        """Log, once a region, if the next rank was not seen in the region that this one waits in.

        The rank before it does: one of the group, without a request of its own.
        """
        number, late = self.current.number, (self.rank + 1) % self.world_size
        # By then a rank that waits has published where, and this one has read it.
        patience_s = max(LATE_S, 2 * self._schedule.mismatches.period_s - 2)
        read_s, seen = self._next_rank
        is_read = read_s >= time.monotonic() - waited_s + patience_s / 2
        if waited_s >= patience_s and is_read and seen < number != self._late_in:
            self._late_in = number
            logger.warning(
                "[rank %d] %s: has waited for %.0f s. Not seen in this call: rank %d.",
                self.rank,
                self.current.name,
                waited_s,
                late,
            )

    def raise_peer_error(self, text: str) -> NoReturn:
        """Raise PeerError."""
        self.current.is_failed = True
        self._error = text
        raise PeerError(f"[rank {self.rank}] {self.current.name}: {text}")

    def attribute_error(
        self,
        error: Exception,
        *,
        suspects: Sequence[int] | None = (),
        failed: str = "the connection to another rank",
        verdict: str | None = None,
        remedy: str = "",
        have_ended: bool | None = False,
    ) -> PeerError:
        """Return the PeerError for an ``error`` of a transport.

        Its text is the report of a peer; else it names the ranks that are absent, if there are
        any ([Note: absent ranks] in roll_call.py); else it is the error.

        Args:
            error: of the transport.
            suspects: ranks that may have ended, as the transport says; None: any rank.
            failed: the part that has failed, if no rank is absent.
            verdict: the text about absent ranks, after their names.
            remedy: to add to the error.
            have_ended: the suspects have ended for certain; None: they are late, and learn of the
                roll call by their next poll, as no connection has failed.
        """
        if self.closed is not None and self.current.is_over:
            # Between two regions: gradients are sent under backward.
            return PeerError(f"[rank {self.rank}] {_out_of_step(self.closed)}")
        text, absent = (
            (self._error, ())
            if self._error is not None
            else self._find_cause_or_absent(suspects, have_ended)
        )
        if text is None and absent:
            said = f"ended or did not answer: {str(error).rstrip('.')}.{remedy} See its output."
            text = f"{name_ranks(absent)} {verdict or said}"
            self._report(text)
        if text is None:
            if suspects is not None and len(suspects) == 1:
                failed = f"the connection to {name_ranks(suspects)}"
            text = f"{failed} failed: {error}{remedy}"
            self.report_failure(f"failed in {self.current.name}: {text}")
        self.current.is_failed = True
        self.closed = self._error = text
        return PeerError(f"[rank {self.rank}] {self.current.name}: {text}")

    def _find_cause_or_absent(
        self, suspects: Sequence[int] | None, have_ended: bool | None
    ) -> tuple[str | None, Sequence[int]]:
        """Return the report of a peer, or else which ranks do not answer a roll call."""
        for ranks, patience_s in self._roll_call_rounds(suspects, have_ended):
            try:
                is_first = self._roll_call.begin(self._first_alarm, self.generation)
                waits_for_leader = len(ranks) > _MAX_SUSPECTS and not is_first
                cause = self._find_cause(patience_s, _LEADER_S if waits_for_leader else 0.0)
                if cause is None and not have_ended:
                    ranks = self._roll_call.find_absent(ranks, self.generation)
            except RuntimeError:  # the store is gone
                # A peer would take this rank, which ends next, for the one that ended first.
                time.sleep(RESOLVE_S)
                return None, ranks if len(ranks) == 1 else ()
            if cause is not None or ranks:
                return cause, ranks
        return None, ()

    def _roll_call_rounds(
        self, suspects: Sequence[int] | None, have_ended: bool | None
    ) -> list[tuple[Sequence[int], float]]:
        """Return which ranks have to answer, in order, and in how many seconds."""
        others = [rank for rank in range(self.world_size) if rank != self.rank]
        # By the next poll of each.
        all_others = others, max(RESOLVE_S, 1.5 * self._schedule.failures.period_s)
        if suspects is not None and (have_ended or not suspects):
            return [(suspects, 0.0)]
        # A rank of which a wait has timed out has lost all connections.
        has_lost_all = suspects is not None and 1 < len(others) == len(suspects)
        if suspects is None or len(suspects) > _MAX_SUSPECTS or has_lost_all:
            return [all_others]
        return [(suspects, all_others[1] if have_ended is None else _SUSPECTS_S), all_others]

    def _find_cause(self, patience_s: float, leader_s: float) -> str | None:
        """Return a reported failure, or how a peer's regions differ, as soon as there is either.

        Args:
            patience_s: seconds in which there may be one.
            leader_s: more seconds, in which the first rank reports the result of a roll call.
        """
        begin_s = time.monotonic()
        longest_s = 0.1 * self._schedule.failures.period_s  # which grows with the number of ranks
        for pause_s in (*backoff_delays(patience_s), *backoff_delays(leader_s, longest_s), 0.0):
            found = self._find_failure() or self._find_mismatch(lambda: False)
            if found is None and (pause_s == 0.0 or time.monotonic() - begin_s >= _SUSPECTS_S):
                # A peer in another region has reported it: one whose host runs ahead, or is late.
                found = _failure_at(self.store, self._first_alarm)
                if found is not None:
                    self._report(found)
            if found is not None:
                return found
            time.sleep(pause_s)
        return None

    def raise_mismatch(self, rank: int) -> NoReturn:
        """Raise PeerError: ``rank`` has sent a message of another collective."""
        found = None
        with suppress(RuntimeError):  # the store is gone
            for pause_s in (*backoff_delays(RESOLVE_S), 0.0):
                found = self._find_failure() or self._find_mismatch(lambda: True, rank)
                if found is not None:
                    break
                time.sleep(pause_s)
        if found is not None:
            self.raise_peer_error(found)
        text = (
            f"rank {rank} is in another collective than rank {self.rank}, which is in "
            f"{(self.current.ops or ['none'])[-1]}."
        )
        self.report_failure(f"stopped: {text}")
        self.raise_peer_error(text)

    def verify_digest(self) -> None:
        """Wait until the neighbour is known to run the current region alike, through the store.

        For collectives whose messages carry no digest: a backend may end the process where sizes
        differ.

        Raises:
            PeerError: it does not.
        """
        region = self.current
        if region.is_verified:
            return
        mine = str(region.digest)
        region.num_verified += 1  # a region may be declared anew after its first collectives
        before = (self.rank - 1) % self.world_size
        try:
            key = f"confirm/{region.number}/{region.num_verified}"
            self.store.set(f"{key}/{self.rank}", mine)
            timeout_s = self.store.timeout.total_seconds()
            if not self._wait_for([f"{key}/{before}"], timeout_s, self.poll_peers, PATIENCE_S):
                late = TimeoutError("it did not come within the timeout of the group's store.")
                raise self.attribute_error(late, suspects=[before], have_ended=None)
            theirs = as_text(self.store.get(f"{key}/{before}"))
            self.store.delete_key(f"confirm/{region.number - 2}/1/{self.rank}")
        except PeerError:
            raise
        except RuntimeError as error:
            raise self.attribute_error(error) from error
        if theirs != mine:
            self.raise_mismatch(before)
        region.is_verified = True

    def _wait_for(
        self,
        keys: list[str],
        timeout_s: float,
        between: Callable[[], bool | None],
        first_s: float,
    ) -> bool:
        """Return whether all ``keys`` came within ``timeout_s``.

        Args:
            between: called after ``first_s``, and then as often as polls are due, with few ranks
                every two seconds; if it returns True, this does not wait any longer.

        Raises:
            RuntimeError: the store is gone.
        """
        start_s = time.monotonic()
        while True:
            waited_s = time.monotonic() - start_s
            wait_s = min(self._schedule.wait_s(max(first_s, waited_s)), timeout_s - waited_s)
            wait_s = max(wait_s, 0.001)
            with suppress(RuntimeError):
                self.store.wait(keys, timedelta(seconds=wait_s))
                return True
            if self.store.check(keys):  # an error here is not that of a timeout
                return True
            if between() or time.monotonic() - start_s >= timeout_s:
                return False

    def _find_failure(self) -> str | None:
        """Return the text of a failure in the current region, or the one before or after it.

        While no rank has failed, that is one request.
        """
        if not self.store.check([self._first_alarm]):
            return None
        # If a region failed here too, all ranks have left it.
        numbers = [region.number for region in list(self._regions)[-2:] if not region.is_failed]
        if self.current.is_over:
            # Under backward, or while parameters are in flight: peers may be in the next region.
            numbers.append(self.current.number + 1)
        texts = (_failure_at(self.store, f"alarm/{number}") for number in numbers)
        found = next((text for text in texts if text is not None), None)
        if found is None:
            self._roll_call.answer(self.generation)
        return found

    def _find_mismatch(
        self, still_waits: Callable[[], bool], rank: int | None = None, *, is_fresh: bool = True
    ) -> str | None:
        """Publish this rank's regions; return how those of another one differ from them.

        Args:
            still_waits: as of poll_peers().
            rank: the other one; None: a neighbour, another one each time.
            is_fresh: otherwise this makes one request, of either kind.
        """
        mine = self._describe()
        if (self._publish_regions(mine) and not is_fresh) or not self._neighbours:
            return None
        if rank is None:
            self._num_looks += 1
            rank = self._neighbours[self._num_looks % len(self._neighbours)]
        return self._compare_with(rank, mine, still_waits)

    def _describe(self) -> list[dict[str, Any]]:
        sends = self._sends.describe(self.next_generation)
        return [{**region.describe(), **sends} for region in list(self._regions)]

    def _publish_regions(self, mine: list[dict[str, Any]]) -> bool:
        """Write this rank's regions, and their digest; return whether they are other ones."""
        text = json.dumps(mine)
        if text == self._published:
            return False
        # The digest last: a peer that reads it may read the text.
        keys = [f"doing/{self.rank}", f"at/{self.rank}"]
        write_all(self.store, keys, [text, summary_of(mine, text)])
        self._published = text
        return True

    def _compare_with(
        self, rank: int, mine: list[dict[str, Any]], still_waits: Callable[[], bool]
    ) -> str | None:
        """Return how the regions of ``rank`` differ, and report it; None if they do not."""
        summary = peek(self.store, f"at/{rank}")
        if rank == (self.rank + 1) % self.world_size:
            self._next_rank = time.monotonic(), number_in(summary)
        if summary is None:
            return None
        theirs = mine
        if summary != summary_of(mine, self._published):
            known, theirs = self._peers.get(rank, (None, mine))
            if summary != known:
                text = as_text(self.store.get(f"doing/{rank}"))
                try:
                    theirs = parse_regions(text)
                except ValueError:
                    found = str(unreadable(f"doing/{rank}", text))
                    self.report_failure(f"stopped: {found}")
                    return found
        self._peers[rank] = summary, theirs
        difference = compare(self.rank, mine, rank, theirs)
        if difference is None and still_waits():
            difference = find_extra_backward(self.rank, mine[-1], rank, theirs[-1])
            difference = difference if still_waits() else None
        if difference is not None:
            self.report_failure(f"stopped: {difference}")
        return difference


def _out_of_step(reason: str) -> str:
    return (
        f"the ranks are out of step since an earlier error: {reason} Start again from the "
        "last checkpoint."
    )


# Values in the store


def _failure_at(store: Any, key: str) -> str | None:
    text = peek(store, key)
    if text is None or text.endswith(CALL):
        return None
    if not text.startswith(("rank ", "ranks ")):
        return str(unreadable(key, text))
    return text if text.endswith(".") else f"{text}."


def _parse_numbers(text: str, key: str, last: type) -> tuple[Any, ...] | str:
    """Return three numbers and a ``last`` one that a rank has written, or why it cannot go on.

    For a text that no rank writes, that is the text of the error.
    """
    with suppress(ValueError, RecursionError):
        found = json.loads(text)
        if isinstance(found, str):
            return found
        if isinstance(found, list) and [type(one) for one in found] == [int, int, int, last]:
            return tuple(found)
    return str(unreadable(key, text))


def _merge_numbers(met: list[tuple[Any, ...] | str]) -> tuple[int, ...] | str:
    """Return as GroupState._exchange_numbers()."""
    reason = next((found for found in met if isinstance(found, str)), None)
    if reason is not None:
        return reason
    numbers, sessions, channels, launched = zip(*met, strict=True)
    expected: dict[str, int] = {}
    for transport, number in (pair for own in launched for pair in own.items()):
        # Else the next collective of one rank would meet an older one of another.
        if expected.setdefault(transport, number) != number:
            return "ranks had launched different numbers of collectives when they failed."
    return min(numbers), max(numbers), max(sessions), max(channels)
