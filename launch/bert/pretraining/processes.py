"""Processes that work for this one, and end with it."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from typing import Any, TypeVar

MOST_PROCESSES = 8
"""One process reads for all of them, and keeps no more busy."""

FEWEST_ITEMS = 4
"""It takes longer to start processes than to do fewer."""

T = TypeVar("T")
R = TypeVar("R")


def num_processes() -> int:
    """Return how many processes work at once: one for each core that this one may use."""
    return min(MOST_PROCESSES, len(os.sched_getaffinity(0)))


def in_order(
    act: Callable[[T], R], items: Iterable[T], prepare: Callable[..., object], arguments: Any
) -> Iterator[R]:
    """Yield act(item) for all items, in order; only a few are in memory at once.

    Each process calls prepare(*arguments) first. A few items are not worth one: this one does them.
    Raises `BrokenExecutor` where a process is killed.
    """
    rest = iter(items)
    head = list(itertools.islice(rest, FEWEST_ITEMS))
    if len(head) < FEWEST_ITEMS:
        prepare(*arguments)
        yield from map(act, head)
        return
    with new_pool(prepare, arguments) as pool:
        waiting: deque[Future[R]] = deque(pool.submit(act, item) for item in head)
        del head
        try:
            for item in rest:
                waiting.append(pool.submit(act, item))
                if len(waiting) > num_processes() + 1:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def new_pool(
    prepare: Callable[..., object] | None = None, arguments: Any = ()
) -> ProcessPoolExecutor:
    """Return a pool of processes that end when this one does, however it does."""
    # Spawned: a fork would copy the threads' locks of whatever this process has imported.
    context = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(
        num_processes(), context, initializer=_begin, initargs=(prepare, arguments)
    )


def _begin(prepare: Callable[..., object] | None, arguments: Any) -> None:
    # A terminal's Ctrl-C is for the parent.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    if prepare is not None:
        prepare(*arguments)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
