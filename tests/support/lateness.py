"""Random pauses: ranks that are late, collectives that come late or are read late, slow kernels.

    pytest --late 7 tests/distributed                       with gloo
    pytest --late 7 --device npu tests/distributed          also on the streams of the stand-in

A busy machine does this by chance, and so has found faults that no quiet run did: a rank that was
late by half a second was taken for one that had stopped, and one that read another's memory late
found something else there. Most pauses are of milliseconds, and a few
are longer than what the library takes for normal (0.1 s) and for worth a question (0.5 s).

The number is a seed of what each thread draws, by the names of its process and its own. The same
tests then draw the same again, but not at the same moments: a failure may need several runs to come
again.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import threading
import time
from contextlib import AbstractContextManager
from functools import wraps
from typing import Any

from shardfuse.comm.gloo import MessageRing
from shardfuse.comm.native import ProcessGroupCommunicator
from shardfuse.comm.session import GroupSession

VARIABLE = "SHARDFUSE_TEST_LATE"
"""What `pytest --late` hands to the ranks, and to the stand-in's streams (npu/streams.h)."""

_OFTEN, _SHORT_S = 0.1, 0.01
_SELDOM, _LONG_S = 0.004, 0.7

_of_thread = threading.local()
_is_begun: list[bool] = []


def pause() -> None:
    """Sleep, if the time has come; nothing unless `pytest --late`."""
    seed = os.environ.get(VARIABLE, "0")
    if seed == "0":
        return
    if not hasattr(_of_thread, "numbers"):
        names = multiprocessing.current_process().name, threading.current_thread().name
        _of_thread.numbers = random.Random(f"{seed} {names}")
    numbers = _of_thread.numbers
    if numbers.random() < _SELDOM:
        time.sleep(_LONG_S * numbers.random())
    elif numbers.random() < _OFTEN:
        time.sleep(_SHORT_S * numbers.random())


def begin() -> None:
    """Have this process's ranks be late, if `pytest --late`: to calls, collectives and reading."""
    if os.environ.get(VARIABLE, "0") == "0" or _is_begun:
        return
    _is_begun.append(True)
    call, launch = GroupSession.region, ProcessGroupCommunicator._launch
    fetch = MessageRing.read_part

    @wraps(call)
    def late_call(self: Any, name: str) -> AbstractContextManager[None]:
        pause()
        return call(self, name)

    @wraps(launch)
    def late_launch(self: Any, *args: Any, **options: Any) -> Any:
        pause()
        return launch(self, *args, **options)

    @wraps(fetch)
    def late_fetch(self: Any, *args: Any) -> None:
        pause()
        fetch(self, *args)

    GroupSession.region = late_call  # type: ignore[method-assign]
    ProcessGroupCommunicator._launch = late_launch  # type: ignore[method-assign]
    MessageRing.read_part = late_fetch  # type: ignore[method-assign]
