"""A thread that polls the peers while this rank waits inside a backend.

A wait for gloo, NCCL or HCCL ends only when the transport does. The thread polls the peers
meanwhile and, if the ranks are out of step, aborts the transport: the wait then raises, and the
group's state has the cause.
"""

from __future__ import annotations

import atexit
import logging
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import torch

from shardfuse.comm.session import PATIENCE_S, RESOLVE_S, GroupState, PeerError

logger = logging.getLogger("shardfuse")

_IDLE_S = 5.0
_PERIOD_S = 1.0
"""Between two polls where waits do not block the host, so nothing shows when they end."""

_REMEDY = (
    " Every rank has to make the same calls in the same order, and as many backward() before each."
)


class Watchdog:
    """Polls the peers whenever a wait takes long.

    Args:
        state: of the process group.
        abort: aborts the transport, so that waits in it raise.
        host_waits: whether wait() blocks the host, as on the CPU. On accelerators it does not, and
            the thread polls once a second from the first collective on. (Not run on hardware.)
        mismatch_code: the part of the transport's error that reports different collectives on
            ranks; None if it does not compare them.
    """

    def __init__(
        self,
        state: GroupState,
        abort: Callable[[], None],
        *,
        host_waits: bool,
        mismatch_code: str | None = None,
    ) -> None:
        self._state = state
        self._abort = abort
        self._host_waits = host_waits
        self._mismatch_code = mismatch_code
        self._waits: dict[int, float] = {}  # of each waiting thread: since when
        self._differences: torch.Tensor | None = None
        self._before = 0
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._stop = threading.Event()

    def wait(self, work: Any) -> None:
        """Call ``work.wait()``.

        Raises:
            PeerError: a rank failed, does something else, or cannot be reached.
        """
        thread = threading.get_ident()
        self._waits[thread] = time.monotonic()
        if self._thread is None:
            self._start()
        try:
            work.wait()
        except RuntimeError as error:
            raise self.attribute_error(error) from error
        finally:
            if self._host_waits:
                self._waits.pop(thread, None)

    @property
    def _since(self) -> float | None:
        """When the oldest wait began; a thread that reads parameters may wait beside another."""
        return min(list(self._waits.values()), default=None)

    def attribute_error(
        self, error: RuntimeError, *, failed: str = "the connection to another rank"
    ) -> PeerError:
        """Return the PeerError for an ``error`` of the transport, of which ``failed`` has failed.

        A transport that compares collectives raises before the peers have published their regions,
        so this waits for them. If no peer publishes anything, because hosts ran ahead of their
        devices, the error names the remedy all the same.
        """
        if self._mismatch_code is None:
            return self._state.attribute_error(error, failed=failed)
        remedy = _REMEDY if self._mismatch_code in str(error) else ""
        return self._state.attribute_error(
            error, patience_s=RESOLVE_S, failed=failed, remedy=remedy
        )

    def compare(self, differences: torch.Tensor, before: int) -> None:
        """Take a tensor that is all zeros if the ranks run the same regions.

        Where waits do not block the host it adds up on the device, and the thread reads it.

        Raises:
            PeerError: this rank and ``before``, or others, differ.
        """
        self._before = before
        if self._host_waits:
            if differences.any():
                self._state.raise_mismatch(before)
        elif self._differences is None:
            self._differences = differences.abs()
        else:
            self._differences.add_(differences.abs()).clamp_(max=1)

    def _start(self) -> None:
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(
                    target=_run, args=(weakref.ref(self),), name="shardfuse-watch", daemon=True
                )
                self._thread.start()
                _watchdogs.add(self)

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
        try:
            # Where waits do not block the host, it is not known whether this rank still waits.
            self._state.poll_peers(lambda: self._host_waits and self._since == since)
            if self._differences is not None and bool(self._differences.any()):
                self._state.raise_mismatch(self._before)
        except PeerError as error:
            if not self._host_waits:
                logger.error("%s", error)
                self._state.attribute_error(error)  # closes the state: why no region can follow
            self._abort()
            with self._lock:
                self._thread = None
            return True
        return False


_watchdogs: weakref.WeakSet[Watchdog] = weakref.WeakSet()


def _run(watchdog_ref: weakref.ref[Watchdog]) -> None:
    idle_since = time.monotonic()
    while True:
        watchdog = watchdog_ref()
        if watchdog is None:
            return
        period = PATIENCE_S if watchdog._host_waits else _PERIOD_S
        stop = watchdog._stop
        if watchdog._since is not None:
            idle_since = time.monotonic()
        if watchdog._tick(idle_since):
            return
        del watchdog
        if stop.wait(period):
            return


def _stop_all() -> None:
    # A thread that is in C++ when the interpreter ends would end the process by a signal.
    for watchdog in list(_watchdogs):
        watchdog.stop()


atexit.register(_stop_all)
