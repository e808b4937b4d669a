"""The stream of a contract group: collectives in the order of launches, on a thread of its own.

See contract.py. What every rank launches is compared before anything moves, because gloo ends the
process where sizes differ. HCCL says EI0005, or hangs; here it always is an error, on all ranks,
and the communicator is of no more use.
"""

from __future__ import annotations

import atexit
import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.support import lateness
from tests.support.contract_device import HostStream, NpuStream, Times
from tests.support.contract_terms import ContractError

_HEADER_NBYTES = 128
_UNBLOCK_TAG = 0x5EFFFFFE
_JOIN_S = 5.0


class ContractWork(dist.Work):
    """A collective in flight."""

    def __init__(self, stream: Stream, times: Times | None = None) -> None:
        super().__init__()
        self._stream = stream
        self._times = times or Times()
        self._over = threading.Event()
        self._error: BaseException | None = None
        self._future: Any = None
        self._result: list[Tensor] = []

    def finish(self, error: BaseException | None, result: Sequence[Tensor] = ()) -> None:
        """Let those go on who wait; only the first call counts."""
        if self._over.is_set():
            return
        self._error, self._result = error, list(result)
        self._over.set()
        self._times.end()
        if self._future is not None:
            self._settle()

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block this thread, as a stream of the CPU would, or the current stream of a device."""
        if not self._over.is_set() and self._times.block():
            return True
        seconds = (timeout or self._stream.timeout).total_seconds() or None
        if not self._over.wait(seconds):
            self._stream.abort("timed out")
        if self._error is not None:
            raise type(self._error)(*self._error.args)
        return True

    @property
    def times(self) -> Times:
        """When it begins and ends on its device."""
        return self._times

    def is_completed(self) -> bool:
        return self._over.is_set()

    def is_success(self) -> bool:
        return self._over.is_set() and self._error is None

    def get_future(self) -> Any:
        """Return a future of the output, for DistributedDataParallel."""
        if self._future is None:
            self._future = torch.futures.Future()
            if self._over.is_set():
                self._settle()
        return self._future

    def _settle(self) -> None:
        with suppress(RuntimeError):  # both threads may come to it
            if self._error is None:
                self._future.set_result(self._result)
            else:
                self._future.set_exception(self._error)


class Stream:
    """Runs what is launched, in order, after all ranks were found to launch the same.

    Args:
        gloo: carries the data; only this thread makes its collectives.
        timeout: of a wait.
        device: of its tensors.
    """

    def __init__(self, gloo: Any, timeout: timedelta, device: str) -> None:
        self.gloo = gloo
        self._device = HostStream() if device == "cpu" else NpuStream()
        self.timeout = timeout
        self._error: BaseException | None = None
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._open: set[ContractWork] = set()
        self.sent: deque[dist.Work] = deque(maxlen=64)
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        streams.add(self)

    def check(self) -> None:
        """Raise what ended this communicator."""
        if self._error is not None:
            raise type(self._error)(*self._error.args)

    def launch(
        self, name: str, body: Callable[[], None], result: Sequence[Tensor] = ()
    ) -> ContractWork:
        """Run ``body`` when all ranks have launched a collective ``name``."""
        self.check()
        work = ContractWork(self, self._device.times())
        with self._lock:
            self._open.add(work)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="hccl-contract", daemon=True)
            self._thread.start()
        self._queue.put((name, body, result, work))
        return work

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            name, body, result, work = item
            error: BaseException | None = self._error
            try:
                if error is None:
                    lateness.pause()
                    self._compare(name)
                    with torch.no_grad(), self._device.after(work.times):
                        body()
                    lateness.pause()
            except RuntimeError as failure:
                error = self._error = self._error or _as_hccl(name, failure)
            with self._lock:
                self._open.discard(work)
            work.finish(error, result)
            del item, body, result, work

    def _compare(self, name: str) -> None:
        names = self.told(name)
        others = {rank: text for rank, text in enumerate(names) if text != name}
        if others:
            rank, text = next(iter(others.items()))
            raise ContractError(
                "EI0005: The arguments for collective communication are inconsistent between "
                f"ranks: rank {self.gloo.rank()} has {name}, rank {rank} has {text}."
            )

    def told(self, text: str) -> list[str]:
        """Return the text of every rank."""
        mine = header(text)
        all_of_them = mine.new_empty(self.gloo.size() * _HEADER_NBYTES)
        self.gloo._allgather_base(all_of_them, mine).wait()
        return [read_header(part) for part in all_of_them.chunk(self.gloo.size())]

    def abort(self, why: str, error: BaseException | None = None) -> None:
        """End all waits in this communicator, here at once and elsewhere by its connections."""
        self._error = error or self._error or ContractError(f"HCCL communicator was aborted: {why}")
        with self._lock:
            works = list(self._open)
            self._open.clear()
        for work in works:
            work.finish(self._error)
        gloo = self.gloo
        if gloo is None or self._thread is None:
            return
        for distance in range(1, gloo.size()):
            # gloo closes its connections where a wait times out, and has no call that does.
            other = (gloo.rank() + distance) % gloo.size()
            with suppress(RuntimeError):
                gloo.recv([torch.empty(1)], other, _UNBLOCK_TAG).wait(timedelta(milliseconds=1))

    def close(self) -> None:
        """End the thread, when it has done what it can."""
        with self._lock:
            is_busy = bool(self._open)
        if is_busy:
            self.abort("the process group was destroyed")
        self._queue.put(None)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_JOIN_S)
        self._error = self._error or ContractError("HCCL communicator was destroyed")
        self.gloo = None
        self.sent.clear()
        streams.discard(self)


def header(text: str) -> Tensor:
    """Return a text as a message of fixed size."""
    data = text.encode()[:_HEADER_NBYTES].ljust(_HEADER_NBYTES)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def read_header(message: Tensor) -> str:
    """Return the text of such a message."""
    return bytes(message.tolist()).decode(errors="replace").rstrip()


def _as_hccl(name: str, error: RuntimeError) -> RuntimeError:
    if isinstance(error, ContractError):
        return error
    return ContractError(f"HCCL function error in {name}: {error}")


streams: set[Stream] = set()
"""All of this process. A rank that is a thread may end without destroying its groups."""


def end_all(error: BaseException) -> None:
    """Have all waits of this process raise ``error``."""
    for stream in list(streams):
        stream.abort("", error)


def _close_all() -> None:
    # A thread that is in C++ when the interpreter ends would end the process by a signal.
    for stream in list(streams):
        stream.close()


atexit.register(_close_all)
