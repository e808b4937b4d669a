"""A thread that looks at the board while this rank waits where Python cannot.

A wait for gloo, NCCL or HCCL ends only when the transport does. The thread looks at the board in
its place and, where the ranks are out of step, ends the transport: the wait then raises, and the
board has the reason.
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

from shardfuse.comm.base import PeerError
from shardfuse.comm.board import PATIENCE_S, RESOLVE_S, Board

logger = logging.getLogger("shardfuse")

_IDLE_S = 5.0
_PERIOD_S = 1.0
"""Between two looks where waits do not block the host and it is not known when they last."""

_REMEDY = (
    " Every rank has to make the same calls in the same order, and as many backward() before each."
)


class Watch:
    """Looks at ``board`` whenever a wait lasts.

    Args:
        board: what is looked at.
        unblock: ends the transport, so that waits in it raise.
        blocks: whether wait() blocks the host, as on the CPU. On accelerators it does not, and the
            thread looks once a second from the first collective on. (Not run on hardware.)
        mismatch_code: what is in an error of the transport where ranks launch different
            collectives; None if it does not compare them.
    """

    def __init__(
        self,
        board: Board,
        unblock: Callable[[], None],
        *,
        blocks: bool,
        mismatch_code: str | None = None,
    ) -> None:
        self._board = board
        self._unblock = unblock
        self._blocks = blocks
        self._mismatch_code = mismatch_code
        self._waits: dict[int, float] = {}  # of each thread that waits: since when
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
            raise self.explain(error) from error
        finally:
            if self._blocks:
                self._waits.pop(thread, None)

    @property
    def _since(self) -> float | None:
        """When the oldest wait began; a thread that reads parameters may wait beside another."""
        return min(list(self._waits.values()), default=None)

    def explain(
        self, error: RuntimeError, *, what: str = "the connection to another rank"
    ) -> PeerError:
        """Return the error to raise where ``what``, of the transport, failed with ``error``.

        A transport that compares is faster than the ranks are in telling each other what they do:
        this waits for that. Where nobody has more to tell, as of hosts that ran ahead of their
        devices, the remedy is named all the same.
        """
        if self._mismatch_code is None:
            return self._board.explain(error, what=what)
        remedy = _REMEDY if self._mismatch_code in str(error) else ""
        return self._board.explain(error, patience_s=RESOLVE_S, what=what, remedy=remedy)

    def compare(self, differences: torch.Tensor, before: int) -> None:
        """Take note of what is all zeros where the ranks make the same calls.

        Where waits do not block the host it adds up on the device, and the thread reads it.

        Raises:
            PeerError: this rank and ``before``, or others, do not.
        """
        self._before = before
        if self._blocks:
            if differences.any():
                self._board.resolve(before)
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
                _watches.add(self)

    def stop(self) -> None:
        """End the thread."""
        self._stop.set()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout=2.0)

    def _tick(self, idle_since: float) -> bool:
        """Look if there is reason to; return whether there is nothing more to do."""
        now, since = time.monotonic(), self._since
        if since is None:
            if now - idle_since < _IDLE_S:
                return False
            with self._lock:
                if self._since is None:
                    self._thread = None
                    return True
            return False
        if self._blocks and now - since < PATIENCE_S:
            return False
        try:
            # Where waits do not block the host, nobody knows whether this rank still waits.
            self._board.look(lambda: self._blocks and self._since == since)
            if self._differences is not None and bool(self._differences.any()):
                self._board.resolve(self._before)
        except PeerError as error:
            if not self._blocks:
                logger.error("%s", error)
                self._board.explain(error)  # why no later call can be made
            self._unblock()
            with self._lock:
                self._thread = None
            return True
        return False


_watches: weakref.WeakSet[Watch] = weakref.WeakSet()


def _run(watch_ref: weakref.ref[Watch]) -> None:
    idle_since = time.monotonic()
    while True:
        watch = watch_ref()
        if watch is None:
            return
        period = PATIENCE_S if watch._blocks else _PERIOD_S
        stop = watch._stop
        if watch._since is not None:
            idle_since = time.monotonic()
        if watch._tick(idle_since):
            return
        del watch
        if stop.wait(period):
            return


def _stop_all() -> None:
    # A thread that is in C++ when the interpreter ends would end the process by a signal.
    for watch in list(_watches):
        watch.stop()


atexit.register(_stop_all)
