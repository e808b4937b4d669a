"""Watchdog: a thread that polls the peers while a wait in the transport takes long.

A wait for gloo, NCCL or HCCL ends only when the transport does. If the ranks are out of step, the
watchdog aborts the transport: the wait then raises, and the state of the group has the cause.
"""

from __future__ import annotations

import atexit
import logging
import math
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from concurrent import futures
from contextlib import suppress
from typing import Any

import torch

from shardfuse.comm.regions import digest
from shardfuse.comm.session import LATE_S, PATIENCE_S, GroupState, PeerError
from shardfuse.comm.transport import wait_in_order

logger = logging.getLogger("shardfuse")

_IDLE_S = 5.0
_PERIOD_S = 1.0
"""Between two polls where waits do not block the host."""

_MAX_PROBES = 10
"""Of connections, once the store is gone."""

_FIRST_PROBE_S = 0.5
_MAX_PROBE_PERIOD_S = 30.0
"""Of connections, while a process group is made: each sends a message to every rank."""

_REMEDY = (
    " Every rank has to make the same calls in the same order, and as many backward() before each."
)


class Watchdog:
    """Polls the peers whenever a wait takes long.

    [Note: the watchdog's thread] On accelerators the thread calls nothing of the device, not even
    query() of an event. The device may wait for a collective that no peer joins, and while any
    thread captures a CUDA graph, a query of another thread invalidates the capture (pytorch
    #104555). Instead, each region copies a result into pinned memory, and the thread reads that.
    The numbers there only grow, so the thread may read at any time. Only the abort uses the device.
    (Not run on hardware.)

    Args:
        state: of the process group.
        abort: aborts the transport, so that waits in it raise.
        find_lost: returns the ranks to which this rank has lost its connection; None where the
            transport cannot tell.
        device: of the tensors. On the CPU wait() blocks the host. On accelerators it does not, and
            the thread polls once a second from the first collective on.
        mismatch_code: the part of the transport's error that reports different collectives on
            ranks; None if it does not compare them.
        ranks: of the transport, as the state numbers them; None is all.
    """

    def __init__(
        self,
        state: GroupState,
        abort: Callable[[], None],
        *,
        device: torch.device,
        find_lost: Callable[[], Sequence[int] | None] = lambda: None,
        mismatch_code: str | None = None,
        ranks: Sequence[int] | None = None,
    ) -> None:
        self._state = state
        self._ranks = range(state.world_size) if ranks is None else ranks
        state.num_watchdogs += 1
        # Equal on these ranks, which build their communicators in one order.
        self._name = f"{state.num_watchdogs} of {digest(str(list(self._ranks)))}"
        self._abort = abort
        self._find_lost = find_lost
        self._device = device
        self._host_waits = device.type == "cpu"
        self._mismatch_code = mismatch_code
        self._waits: dict[int, float] = {}  # of each waiting thread: since when
        self._result: torch.Tensor | None = (
            None  # on the device: two differences, a region's number
        )
        self._seen: torch.Tensor | None = None  # in pinned memory
        self._last_work: Callable[[], Any] = _nothing  # which ends after all before it
        self._num_failures = 0  # of regions
        # Of these, how many the device is past: a tensor of its own, and a copy in pinned memory.
        self._num_passed: tuple[torch.Tensor, torch.Tensor] | None = None
        self._failure = "", 0.0  # the last one, and since when
        self._num_launched = 0  # collectives of the transport so far
        self._counted = ""  # the store's key for all ranks that had launched as many by then
        state.watchdogs.add(self)
        self._compared_region = 0  # the number of the region that was compared last
        self._progress = 0, 0.0  # the number last seen, and since when
        self._before = 0
        self._has_logged_error = False
        self._num_probes = 0
        self._lost_with_store: Sequence[int] | None = None  # ranks
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._stop = threading.Event()

    def wait(self, works: deque[Any]) -> None:
        """Take out the works one after the other, and call ``wait()`` of each.

        Raises:
            PeerError: a rank failed, does something else, or cannot be reached.
        """
        thread = threading.get_ident()
        if self._thread is None or not self._thread.is_alive():
            self._start()

        def note() -> None:
            self._waits[thread] = time.monotonic()

        try:
            wait_in_order(works, note)
        except RuntimeError as error:
            raise self.attribute_error(error) from error
        finally:
            if self._host_waits:
                self._waits.pop(thread, None)

    def run_while_polling(self, function: Callable[[], Any]) -> Any:
        """Return ``function()``, in which this rank waits for its peers in torch's store.

        By another connection than the state's, which would serve no request meanwhile.
        Nothing can end such a wait. So it runs in a thread of its own, which is left to its timeout
        if a peer fails meanwhile or ends.

        Raises:
            PeerError: a rank failed, does something else, or has ended.
        """
        outcome = futures.Future[Any]()
        device = torch.empty(0, device=self._device).device  # with the index of this thread's

        def run() -> None:
            try:
                if device.type != "cpu":
                    torch.get_device_module(device).set_device(device.index)
                outcome.set_result(function())
            except BaseException as error:
                outcome.set_exception(error)

        # Not of an executor, for the interpreter would wait for it at its end.
        threading.Thread(target=run, name="shardfuse-new-group", daemon=True).start()
        begin_s = time.monotonic()
        probe_s = begin_s + _FIRST_PROBE_S
        while not futures.wait([outcome], PATIENCE_S).done:
            self._state.poll_peers()
            now = time.monotonic()
            if now >= probe_s:
                probe_s = now + min(now - begin_s, _MAX_PROBE_PERIOD_S)
                if lost := self._find_lost():
                    closed = RuntimeError("connection closed")
                    raise self._state.attribute_error(closed, suspects=lost)
        return outcome.result()

    def note_launch(self, work: Any) -> None:
        """Note the last ``work`` of a transport that runs them in the order of their launches.

        Weakly: it holds its tensors. Where it is gone, a stream of this device has waited for it.
        """
        self._num_launched += 1
        self._state.launch_counts[self._name] = self._num_launched
        if not self._host_waits:
            self._last_work = weakref.ref(work)

    def note_failure(self, text: str) -> None:
        """Have the thread abort the transport if the device stays in what is in flight.

        A region has failed. A peer may never launch its part of a collective that this rank has
        launched, and the next call that waits for the device would hang. Where all ranks had
        launched the same, the device is only behind its host, and nothing is aborted.
        """
        if self._num_passed is None:
            return
        module = torch.get_device_module(self._device)
        if getattr(module, "is_current_stream_capturing", bool)():
            return
        self._failure = text, time.monotonic()
        self._num_failures += 1
        self._counted = f"launched/{self._state.generation}/{self._name}/{self._num_launched}"
        with suppress(RuntimeError):  # the process that holds the store may have ended
            self._state.store.add(self._counted, 1)
        counter, seen = self._num_passed
        # A transport that has failed already raises here, and the error at hand goes on.
        with suppress(RuntimeError):
            stream = module.Stream(self._device)
            stream.wait_stream(module.current_stream(self._device))
            with module.stream(stream):
                work = self._last_work()
                if work is not None:
                    work.wait()
                seen.copy_(counter.add_(1), non_blocking=True)

    @property
    def _since(self) -> float | None:
        """When the oldest wait began; a thread that reads parameters may wait beside another."""
        return min(list(self._waits.values()), default=None)

    def attribute_error(
        self, error: RuntimeError, *, failed: str = "the connection to another rank"
    ) -> PeerError:
        """Return the PeerError for an ``error`` of the transport, of which ``failed`` has failed.

        Ranks have time to publish their calls: a transport that compares collectives raises before
        they have. If no peer publishes anything, because hosts ran ahead of their devices, the
        error names the remedy all the same.
        """
        code = self._mismatch_code
        remedy = _REMEDY if code is not None and code in str(error) else ""
        # Later, peers that have raised have closed their connections, too.
        suspects = self._lost_with_store or self._find_lost()
        return self._state.attribute_error(error, suspects=suspects, failed=failed, remedy=remedy)

    def compare(self, result: torch.Tensor, before: int) -> None:
        """Take the result of the comparison: (3,), two zeros if ranks agree, and a region's number.

        Where waits do not block the host it adds up on the device, and the thread reads it.

        Raises:
            PeerError: this rank and ``before``, or others, differ.
        """
        self._before = before
        if self._host_waits:
            if result[:2].any():
                self._state.raise_mismatch(before)
            return
        if self._seen is None or self._result is None:
            self._seen = torch.zeros(3, dtype=result.dtype, pin_memory=True)
            self._result = result
        else:
            torch.maximum(self._result, result, out=self._result)
        self._compared_region = self._state.current.number
        self._seen.copy_(self._result, non_blocking=True)

    def _start(self) -> None:
        with self._lock:
            if self._thread is None or not self._thread.is_alive():
                device = torch.empty(0, device=self._device).device  # with the index of this one
                if not self._host_waits and self._num_passed is None:
                    counter = torch.zeros(1, dtype=torch.int32, device=device)
                    self._num_passed = counter, torch.zeros(1, dtype=torch.int32, pin_memory=True)
                self._thread = threading.Thread(
                    target=_run,
                    args=(weakref.ref(self), device),
                    name="shardfuse-watch",
                    daemon=True,
                )
                self._thread.start()
                _watchdogs.add(weakref.ref(self, _watchdogs.discard))

    def stop(self) -> None:
        """End the thread."""
        self._stop.set()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout=2.0)

    def _tick(self, idle_since: float) -> bool:
        """Poll if a wait takes long; return whether the thread can end."""
        now, since = time.monotonic(), self._since
        if since is None:
            if now - idle_since < _IDLE_S:
                return False
            with self._lock:
                if self._since is None:
                    self._thread = None
                    return True
            return False
        if self._host_waits and now - since < PATIENCE_S:
            return False
        if self._state.closed is not None and not self._host_waits:
            # By the watchdog of another transport, which has aborted that one alone.
            return self._end()
        try:
            # Where waits do not block the host, it is not known whether this rank still waits.
            self._state.poll_peers(lambda: self._host_waits and self._since == since)
            self._read_result()
            self._check_after_failure()
            if self._state.has_lost_store:
                self._name_store_host()
        except PeerError as error:
            if not self._host_waits:
                logger.error("%s", error)
                self._state.attribute_error(error)  # closes the state: why no region can follow
            return self._end()
        return False

    def _end(self) -> bool:
        """Abort the transport, so that its waits raise; return True: the thread can end."""
        self._abort()
        with self._lock:
            self._thread = None
        return True

    def _name_store_host(self) -> None:
        """Raise PeerError if a rank has ended, and with it the store: no peer can report it."""
        self._num_probes += 1
        if self._num_probes <= _MAX_PROBES:
            self._lost_with_store = self._find_lost()
        if self._lost_with_store:
            raise self.attribute_error(RuntimeError("the process group's store is gone"))

    def _read_result(self) -> None:
        """Raise PeerError if the device has found a difference; log if it waits for a late rank."""
        if self._seen is None:
            return
        *differences, number = self._seen.tolist()
        if any(differences):
            self._state.raise_mismatch(self._before)
        now = time.monotonic()
        if number != self._progress[0] or number >= self._compared_region:
            self._progress = number, now
        elif now - self._progress[1] >= LATE_S:
            self._state.log_late_rank(now - self._progress[1])

    def _check_after_failure(self) -> None:
        """Raise PeerError if the device has not come past what was in flight at a failure."""
        text, since = self._failure
        if self._num_passed is None or int(self._num_passed[1]) >= self._num_failures:
            return
        if time.monotonic() - since < LATE_S:
            return
        if not self._launch_counts_match():
            raise self.attribute_error(
                RuntimeError(f"the device waits for a peer since an earlier error: {text}"),
                failed="a collective in flight",
            )
        self._failure = text, math.inf  # one request to the store is enough

    def _launch_counts_match(self) -> bool:
        """Return whether each rank had launched as many collectives at its last failure."""
        with suppress(RuntimeError):  # the process that holds the store may have ended
            return int(self._state.store.add(self._counted, 0)) == len(self._ranks)
        return False

    def _note_error(self) -> None:
        """Log, once, the exception that a tick has raised."""
        if not self._has_logged_error:
            self._has_logged_error = True
            logger.exception("[rank %d] The watchdog goes on after an error.", self._state.rank)


def _nothing() -> None:
    """Return no work."""


_watchdogs = set[weakref.ref["Watchdog"]]()


def _run(watchdog_ref: weakref.ref[Watchdog], device: torch.device) -> None:
    if device.type != "cpu":
        # A new thread has device 0, where an abort would create a context.
        torch.get_device_module(device).set_device(device.index)
    idle_since = time.monotonic()
    while True:
        watchdog = watchdog_ref()
        if watchdog is None:
            return
        period = PATIENCE_S if watchdog._host_waits else _PERIOD_S
        stop = watchdog._stop
        try:
            if watchdog._since is not None:
                idle_since = time.monotonic()
            if watchdog._tick(idle_since):
                return
        except Exception:
            watchdog._note_error()
        del watchdog
        if stop.wait(period):
            return


def _stop_all() -> None:
    # A thread that is in C++ when the interpreter ends would end the process by a signal.
    for ref in tuple(_watchdogs):  # other threads may add some
        watchdog = ref()
        if watchdog is not None:
            watchdog.stop()


atexit.register(_stop_all)
