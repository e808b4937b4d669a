"""Session: ranks enter the same regions with the same options, and an error of one reaches all.

[Note: regions] A *region* is a method that all ranks of a process group execute together, such as
step(). Each region has a number, counted over all optimizers of the group, a name, and entries:
lines of text that must be equal on all ranks (the hyper-parameters, which parameters train). Every
message between a pair of ranks carries a digest of these, so that ranks in different regions never
take each other's data.

A usual step does not use the process group's store. A rank that has waited for a tenth of a second
reads there

* failures: a rank that fails inside a region reports it before it raises;
* the regions of its peers: where these differ from its own, it reports the mismatch itself.

So the error of one rank is raised on all ranks, and none waits for the timeout of the group. Before
the next region, all ranks meet in the store and restart the numbers of regions and messages: the
*generation* is one higher then. If a transport had to be closed to end a wait (sockets; any backend
that closes by itself), every later region raises the same error again.

A number that the ranks must share restarts with the generation. Session.counter() and
Session.on_restart() are the only two ways to keep one.
"""

from __future__ import annotations

import hashlib
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

import torch

logger = logging.getLogger("shardfuse")

PATIENCE_S = 0.1
"""Seconds that a rank waits before it reads the store, and between two reads."""

RESOLVE_S = 1.5
"""Seconds that ranks in different regions have to publish which."""

_REJOIN_S = 30.0
_NUM_REMEMBERED = 4
_MAX_NEIGHBOURS = 8
_MAX_TEXT = 4000
_MAX_OPS = 100
"""Collectives of a region, the last ones, that peers can read."""


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

    def refresh(self) -> None:
        """Run the methods of on_restart(), if the ranks have restarted since. Local."""

    def on_restart(self, method: Callable[[], None]) -> None:
        """Have a bound ``method`` called once in every new generation, before its first message.

        The method is held weakly.
        """

    def at_region_end(self, method: Callable[[], None]) -> None:
        """Have a bound ``method`` called at the end of every region without an error; weakly."""


class Counter:
    """A number that is equal on all ranks: it restarts from 0 in every generation.

    Before an error, some ranks may have counted further than others.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._generation, self._value = session.generation, 0

    @property
    def value(self) -> int:
        """The number."""
        if self._generation != self._session.generation:
            self.reset()
        return self._value

    def increment(self) -> int:
        """Add 1 and return the number."""
        self._value = self.value + 1
        return self._value

    def reset(self) -> None:
        """Set the number to 0."""
        self._generation, self._value = self._session.generation, 0


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

    def refresh(self) -> None:
        """Do nothing: a single rank never restarts."""

    def on_restart(self, method: Callable[[], None]) -> None:
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

    def refresh(self) -> None:
        self.group.refresh()

    def on_restart(self, method: Callable[[], None]) -> None:
        self.group.on_restart(method)

    def at_region_end(self, method: Callable[[], None]) -> None:
        self._at_region_end.append(weakref.WeakMethod(method))


# One region, and what differs between those of two ranks


@dataclass
class Region:
    """One region, as this rank runs it."""

    number: int
    name: str
    declared: tuple[tuple[str, ...], ...] = ()
    """The entries of each declare(): a region may be made of several parts."""
    digest: int = 0  # of the last part
    ops: list[str] = field(default_factory=list)
    is_verified: bool = False
    num_verified: int = 0
    is_over: bool = False
    is_failed: bool = False

    def describe(self) -> dict[str, Any]:
        """Return the description that peers can read."""
        return {
            "number": self.number,
            "name": self.name,
            "declared": [list(entries) for entries in self.declared],
            "ops": self.ops[-_MAX_OPS:],
            "num_ops": len(self.ops),
            "num_confirmed": self.num_verified,
            "is_over": self.is_over,
        }

    def declare(self, entries: Sequence[str]) -> None:
        """Add entries that must be equal on all ranks from here on."""
        if entries:
            self.declared = (*self.declared, tuple(entries))
        self.digest = digest("\n".join((str(self.number), self.name, *entries)))
        self.is_verified = False

    def note(self, kind: str, numel: int, dtype: torch.dtype) -> int:
        """Count a collective; return the digest of its messages.

        Two ranks have the same one only if region, entries, number of the collective, kind, size
        and dtype are the same.
        """
        name = f"{kind} of {numel} {str(dtype).removeprefix('torch.')}"
        self.ops.append(name)
        return digest(f"{self.digest} {len(self.ops)} {name}")


class _LabelledSends:
    """Counts the labelled reduce-scatters that this rank has launched, inside regions or not."""

    def __init__(self) -> None:
        self._last = 0, 0  # generation, and number in it
        self._num_in_flight = 0

    def _count(self, generation: int) -> int:
        # In the generation before an error, some ranks may have launched more than others.
        return self._last[1] if self._last[0] == generation else 0

    def begin(self, generation: int) -> None:
        """Count one more."""
        self._last = generation, self._count(generation) + 1

    @contextmanager
    def in_flight(self) -> Iterator[None]:
        """Hold while one is being launched or waited for."""
        self._num_in_flight += 1
        try:
            yield
        finally:
            self._num_in_flight -= 1

    def describe(self, generation: int) -> dict[str, Any]:
        """Return the description that peers can read."""
        return {"num_between": self._count(generation), "is_sending": self._num_in_flight > 0}


_KINDS = {
    "number": int,
    "name": str,
    "num_ops": int,
    "num_confirmed": int,
    "is_over": bool,
    "num_between": int,
    "is_sending": bool,
}


def parse_regions(text: str) -> list[dict[str, Any]]:
    """Return the regions that a peer has published.

    Raises:
        ValueError: no rank writes such a text.
    """
    try:
        regions = json.loads(text)
    except RecursionError as error:
        raise ValueError(str(error)) from error
    if not isinstance(regions, list) or not regions or not all(map(_is_region, regions)):
        raise ValueError("no regions")
    return regions


def _is_region(region: Any) -> bool:
    if not isinstance(region, dict):
        return False
    lists = region.get("declared"), region.get("ops")
    are_texts = all(isinstance(found, list) for found in lists) and all(
        isinstance(text, str) for found in (*(lists[0] or ()), lists[1]) for text in found or ()
    )
    return are_texts and all(isinstance(region.get(key), kind) for key, kind in _KINDS.items())


def digest(text: str) -> int:
    """Return a hash of 56 bits, the same in every process."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "little")


def compare(
    rank: int, mine: list[dict[str, Any]], peer: int, theirs: list[dict[str, Any]]
) -> str | None:
    """Return the first difference between the regions of two ranks; None if none shows yet."""
    by_number = {region["number"]: region for region in theirs}
    for region in mine:
        match = by_number.get(region["number"])
        if match is None or region["number"] == 0:
            continue
        if region["name"] != match["name"]:
            return (
                f"rank {rank} is in {region['name']}, rank {peer} in {match['name']}. Every rank "
                "has to make the same calls in the same order."
            )
        # One of them may be in a later part, about which the other shows nothing.
        for entries, others in zip(region["declared"], match["declared"], strict=False):
            if entries != others:
                return _first_different_entry(region["name"], rank, entries, peer, others)
        difference = _first_different_op(region, match)
        if difference is not None:
            number, op, other_op = difference
            return (
                f"in {region['name']}, collective {number} of rank {rank} is {op}, that of rank "
                f"{peer} is {other_op}. Every rank has to make the same calls in the same order."
            )
    return None


def find_extra_backward(
    rank: int, mine: dict[str, Any], peer: int, theirs: dict[str, Any]
) -> str | None:
    """Return that the peer sends gradients that this rank, in a region by now, will not send.

    Only the rank inside the region can tell, while it waits there: its own state is current, while
    ``theirs`` may be stale. In a step() that sends gradients itself, because this rank had no
    backward, it may launch each bucket later than a peer under backward, and more will follow. A
    rank that waits in a collective of the region has sent everything that it had to send before.
    """
    is_inside = not mine["is_over"] and len(mine["declared"]) > 0 and not mine["is_sending"]
    if not is_inside or theirs["num_between"] <= mine["num_between"]:
        return None
    if theirs["is_over"] and theirs["number"] == mine["number"] - 1:
        return (
            f"rank {rank} is in {mine['name']} while rank {peer} is under backward and has "
            "sent more gradients. Run as many backward() on every rank before each call."
        )
    done, others = (region["num_ops"] + region["num_confirmed"] for region in (mine, theirs))
    is_before = theirs["number"] == mine["number"] and others == 0 < done
    if is_before and not theirs["is_over"] and theirs["is_sending"]:
        return (
            f"rank {rank} is in {mine['name']} while rank {peer} sends more gradients in it. Run "
            "as many backward() on every rank before each call, and zero_grad() at the same place."
        )
    return None


def _first_different_op(
    mine: dict[str, Any], theirs: dict[str, Any]
) -> tuple[int, str, str] | None:
    """Return (number, mine, theirs) of the first collective of a region that is not the same."""
    ops, others = (
        dict(enumerate(region["ops"], region["num_ops"] - len(region["ops"]) + 1))
        for region in (mine, theirs)
    )
    is_over = mine["is_over"] and theirs["is_over"]
    for number in sorted(ops.keys() | others.keys() if is_over else ops.keys() & others.keys()):
        op, other = ops.get(number, "none"), others.get(number, "none")
        if op != other:
            return number, op, other
    return None


def _first_different_entry(
    name: str, rank: int, mine: Sequence[str], peer: int, theirs: Sequence[str]
) -> str:
    """Return an error text with the first entry that two ranks do not have in common."""
    only_mine = next((entry for entry in mine if entry not in theirs), "nothing of the kind")
    only_theirs = next((entry for entry in theirs if entry not in mine), "nothing of the kind")
    first, second = sorted([(rank, only_mine), (peer, only_theirs)])
    return (
        f"the ranks disagree in {name}: rank {first[0]} has {first[1]}; rank {second[0]} has "
        f"{second[1]}. Set it alike on every rank."
    )


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
    generation: int = 0  # how often the ranks have met again after an error
    _num_sessions: int = 0
    _numbered: Any = field(default_factory=weakref.WeakKeyDictionary)  # each: in which region
    _sends: _LabelledSends = field(default_factory=_LabelledSends)
    _restarts: list[weakref.WeakMethod[Callable[[], None]]] = field(default_factory=list)
    _refreshed: int = 0  # the generation for which these were called
    _error: str | None = None  # of the last region that failed
    _closed: str | None = None  # why no region can be entered any more
    _regions: deque[Region] = field(default_factory=lambda: deque(maxlen=_NUM_REMEMBERED))
    _depth: int = 0
    _published: str = ""

    def __post_init__(self) -> None:
        self._regions.append(Region(0, "nothing yet"))

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
            if isinstance(error, PeerError):
                raise
            self.report_failure(f"failed in {name}: {type(error).__name__}: {error}")
            raise
        finally:
            self._depth = 0
            self.current.is_over = True

    def begin_send(self, label: str | None) -> Callable[[], AbstractContextManager[None]]:
        """Count a reduce-scatter; return the context in which it is launched or waited for."""
        if label is None:
            return nullcontext
        # This rank may be between two regions, and a peer inside one.
        self._sends.begin(self.next_generation)
        return self._sends.in_flight

    @property
    def next_generation(self) -> int:
        """The generation of messages sent now: from an error on, that of the next region."""
        return self.generation + int(self.current.is_failed)

    def on_restart(self, method: Callable[[], None]) -> None:
        """Have ``method``, held weakly, called once in every new generation."""
        self.refresh()
        self._restarts = [reference for reference in self._restarts if reference() is not None]
        self._restarts.append(weakref.WeakMethod(method))

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
        key = f"again/{self.generation}"
        deadline = time.monotonic() + _REJOIN_S
        texts: list[str] = []
        try:
            if self._closed is None:
                # Not set(): peers may have read what this rank wrote before an interrupt.
                mine = json.dumps([self.current.number, self._num_sessions])
                self.store.compare_set(f"{key}/{self.rank}", "", mine)
            for rank in range(self.world_size):
                while not self.store.check([f"{key}/{rank}"]) and self._closed is None:
                    if time.monotonic() > deadline:
                        self._closed = f"rank {rank} has not come back after an error."
                    time.sleep(0.002)
                if self._closed is None:
                    texts.append(_text(self.store.get(f"{key}/{rank}")))
            met = [_parse_numbers(text, f"{key}/{rank}") for rank, text in enumerate(texts)]
            reason = self._closed or next((found for found in met if isinstance(found, str)), None)
            if reason is not None:
                # For ranks that come later.
                self.store.set(f"{key}/{self.rank}", json.dumps(reason))
        except RuntimeError as error:
            raise self.attribute_error(error) from error
        if reason is not None:
            self._closed = reason
            self.raise_peer_error(_out_of_step(reason))
        self.generation += 1
        self._error = None
        numbers, counts = zip(*[found for found in met if not isinstance(found, str)], strict=True)
        self._regions = deque([Region(max(numbers) + 1, self.current.name)], _NUM_REMEMBERED)
        self._num_sessions = max(counts)
        for session, number in list(self._numbered.items()):
            if number >= min(numbers) - 1:  # in a region that has failed somewhere, or after it
                session.number = 0

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

        While no rank has published anything, that is one request to the store.
        """
        keys = [f"told/{topic}/{rank}" for rank in range(self.world_size)]
        if self.is_store_gone:  # each request to it would print a C++ trace
            return [None] * self.world_size
        try:
            if not self.store.check([f"told/{topic}"]):
                return [None] * self.world_size
            return [_text(self.store.get(k)) if self.store.check([k]) else None for k in keys]
        except RuntimeError:
            self.is_store_gone = True
            return [None] * self.world_size

    # Its peers

    def report_failure(self, text: str) -> None:
        """Tell all ranks that this one will not go on with the current region, and why."""
        message = f"rank {self.rank} {text}"
        with suppress(RuntimeError):  # the process that holds the store may have ended
            self.store.compare_set(f"alarm/{self.current.number}", "", message[:_MAX_TEXT])
            self.store.compare_set(f"first alarm/{self.generation}", "", message[:_MAX_TEXT])

    def poll_peers(self, still_waits: Callable[[], bool] = lambda: True) -> None:
        """Look for a reported failure, publish this rank's regions, and compare them.

        Args:
            still_waits: whether this rank is where it was when the poll began; another thread than
                the one that waits may poll.

        Raises:
            PeerError: a rank failed, or does something else than this one.
        """
        try:
            found = self._find_failure() or self._find_mismatch(still_waits)
        except RuntimeError:
            return  # the store is gone; the wait itself will fail by its own transport
        if found is not None:
            self.raise_peer_error(found)

    def raise_peer_error(self, text: str) -> NoReturn:
        """Raise PeerError."""
        self.current.is_failed = True
        self._error = text
        raise PeerError(f"[rank {self.rank}] {self.current.name}: {text}")

    def attribute_error(
        self,
        error: Exception,
        *,
        patience_s: float = 0.0,
        failed: str = "the connection to another rank",
        remedy: str = "",
    ) -> PeerError:
        """Return the PeerError for an ``error`` of a transport: its cause, if a peer has told it.

        Args:
            error: of the transport.
            patience_s: seconds that the peers have to report a failure.
            failed: the part that has failed, if no peer reports anything.
            remedy: to name then.
        """
        if self._closed is not None and self.current.is_over:
            # Between two regions: gradients are sent under backward.
            return PeerError(f"[rank {self.rank}] {_out_of_step(self._closed)}")
        text = self._error
        if text is None:
            with suppress(RuntimeError):
                text = _find_cause(self, patience_s)
        if text is None:
            text = f"{failed} failed: {error}{remedy}{self._unseen_ranks()}"
            self.report_failure(f"failed in {self.current.name}: {text}")
        self.current.is_failed = True
        self._closed = text
        return PeerError(f"[rank {self.rank}] {self.current.name}: {text}")

    def raise_mismatch(self, rank: int) -> NoReturn:
        """Raise PeerError: ``rank`` has sent a message of another collective."""
        deadline = time.monotonic() + RESOLVE_S
        while time.monotonic() < deadline:
            self.poll_peers()
            time.sleep(0.01)
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
            theirs = self._wait_for(f"{key}/{before}")
            self.store.delete_key(f"confirm/{region.number - 2}/1/{self.rank}")
        except PeerError:
            raise
        except RuntimeError as error:
            raise self.attribute_error(error) from error
        if theirs != mine:
            self.raise_mismatch(before)
        region.is_verified = True

    def _wait_for(self, key: str) -> str:
        """Return the text of ``key`` as soon as it is there.

        Raises:
            RuntimeError: it does not come within the store's timeout.
        """
        deadline = time.monotonic() + self.store.timeout.total_seconds()
        while not self.store.check([key]):
            with suppress(RuntimeError):
                self.store.wait([key], timedelta(seconds=PATIENCE_S))
                break
            self.poll_peers()
            if time.monotonic() > deadline:
                raise RuntimeError("it did not come within the timeout of the group's store.")
        return _text(self.store.get(key))

    def _find_failure(self) -> str | None:
        """Return the text of a failure in the current region, or the one before or after it."""
        # If a region failed here too, all ranks have left it.
        numbers = [region.number for region in list(self._regions)[-2:] if not region.is_failed]
        if self.current.is_over:
            # Under backward, or while parameters are in flight: peers may be in the next region.
            numbers.append(self.current.number + 1)
        texts = (_failure_at(self.store, f"alarm/{number}") for number in numbers)
        return next((text for text in texts if text is not None), None)

    def _find_mismatch(self, still_waits: Callable[[], bool]) -> str | None:
        """Publish this rank's regions; return how those of a neighbour differ from them."""
        sends = self._sends.describe(self.next_generation)
        mine = [{**region.describe(), **sends} for region in self._regions]
        text = json.dumps(mine)
        if text != self._published:
            self.store.set(f"doing/{self.rank}", text)
            self._published = text
        for distance in range(1, min(self.world_size, _MAX_NEIGHBOURS + 1)):
            rank = (self.rank + distance) % self.world_size
            if not self.store.check([f"doing/{rank}"]):
                continue
            text = _text(self.store.get(f"doing/{rank}"))
            try:
                theirs = parse_regions(text)
            except ValueError:
                found = str(unreadable(f"doing/{rank}", text))
                self.report_failure(f"stopped: {found}")
                return found
            difference = compare(self.rank, mine, rank, theirs)
            if difference is None and still_waits():
                difference = find_extra_backward(self.rank, mine[-1], rank, theirs[-1])
                difference = difference if still_waits() else None
            if difference is not None:
                self.report_failure(f"stopped: {difference}")
                return difference
        return None

    def _unseen_ranks(self) -> str:
        """Return, for an error, which ranks have not been seen waiting in the current region."""
        number, missing = self.current.number, []
        try:
            for rank in range(min(self.world_size, 64)):
                key, regions = f"doing/{rank}", list[dict[str, Any]]()
                with suppress(ValueError):
                    if self.store.check([key]):
                        regions = parse_regions(_text(self.store.get(key)))
                if rank != self.rank and all(region["number"] != number for region in regions):
                    missing.append(str(rank))
        except RuntimeError:
            return ""
        return f" Not seen in this call: rank {', '.join(missing)}." if missing else ""


def _out_of_step(reason: str) -> str:
    return (
        f"the ranks are out of step since an earlier error: {reason} Start again from the "
        "last checkpoint."
    )


def _find_cause(group: GroupState, patience_s: float) -> str | None:
    """Return a reported failure, or how a peer's regions differ, as soon as there is either."""
    deadline = time.monotonic() + patience_s
    while True:
        found = group._find_failure() or group._find_mismatch(lambda: False)
        if found is not None:
            return found
        if time.monotonic() >= deadline:
            # Hosts that run ahead of their devices are in other regions when they learn of it.
            return _failure_at(group.store, f"first alarm/{group.generation}")
        time.sleep(0.01)


def _failure_at(store: Any, key: str) -> str | None:
    if not store.check([key]):
        return None
    text = _text(store.get(key))
    if not text.startswith("rank "):
        return str(unreadable(key, text))
    return text if text.endswith(".") else f"{text}."


def _parse_numbers(text: str, key: str) -> tuple[int, int] | str:
    """Return the numbers of a rank's region and sessions, or why it cannot go on.

    For a text that no rank writes, that is the text of the error.
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
