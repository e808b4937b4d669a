"""Run a function on every rank of a small world: as threads, or as real processes.

`pytest --backend` says what joins them: gloo (threads: torch's threaded group), or contract.py;
`pytest --device` where their tensors lie (placing.py).

The only place in the tests that uses private torch API (the threaded process group).

    run_threads(world_size, fn, *args)   milliseconds; `fn` may be a closure
    run_procs(world_size, fn, *args)     about 0.3 s; `fn` is a module-level function
    run_scripts(source, world_size, ...) about 4 s; ranks that may end as they like
    count_c10d_calls()                   counts what reaches the threaded process group

`fn` is called with no rank argument: it asks `torch.distributed`. Both runners return the per-rank
results in rank order and raise `RanksFailedError` when a rank raised or did not finish.
"""

from __future__ import annotations

import gc
import logging
import multiprocessing
import multiprocessing.connection
import os
import pickle
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed import multi_threaded_pg

from shardfuse.comm.watchdog import Watchdog
from shardfuse.engine import gather
from tests.support import contract, contract_stream, lateness, placing

_ROOT = Path(__file__).parents[2]

# How long the other ranks may go on after one failed, so that their own errors are reported too.
# They need less than a second alone, and several beside another test.
GRACE_S = 8.0

# torch.optim.Optimizer imports torch._dynamo at its first use, which takes two seconds.
PRELOADED = ["torch.distributed", "torch._dynamo", "shardfuse", "pytest", "tests.support.harness"]


STAYING: list[BaseException] = []
"""Errors whose frames a rank of run_procs() keeps, and so its connections, until all have ended."""


class RanksFailedError(AssertionError):
    """At least one rank raised or did not finish; the message holds every traceback."""

    def __init__(self, failures: dict[int, str]) -> None:
        self.failures = failures
        super().__init__("\n".join(f"[rank {r}] {text}" for r, text in sorted(failures.items())))


def run_threads(
    world_size: int,
    fn: Callable[..., Any],
    *args: Any,
    timeout: float = 60.0,
    backend: str | None = None,
) -> list[Any]:
    """Call `fn(*args)` on `world_size` threads, each a rank of its own threaded process group.

    Under `pytest --backend hccl`, or with a `backend` of its choices, it is a contract group as in
    processes, whose data goes over gloo from thread to thread.
    """
    results: list[Any] = [None] * world_size
    failures: dict[int, str] = {}
    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    multi_threaded_pg._install_threaded_pg()
    store = dist.HashStore()
    args_of = [placing.of_rank(rank, args) for rank in range(world_size)]
    name = contract.ready(backend)
    name = "threaded" if name == "gloo" else name
    run_while_polling = Watchdog.run_while_polling
    # Another thread is no rank: it would have no default group.
    Watchdog.run_while_polling = lambda self, function: function()

    def rank_main(rank: int) -> None:
        torch.set_num_threads(1)
        try:
            dist.init_process_group(name, rank=rank, world_size=world_size, store=store)
            try:
                # Hooks of a backward run on the rank's own thread, the only one in its group.
                with placing.placed(rank), torch.autograd.set_multithreading_enabled(False):
                    results[rank] = fn(*args_of[rank])
            finally:
                if name == "threaded":  # a contract group would end under the others' waits
                    dist.destroy_process_group()
        except SystemExit:
            # Raised by the threaded group in ranks woken up because another rank failed.
            pass
        except BaseException as error:
            failures[rank] = traceback.format_exc()
            _wake_all(error)

    threads = [
        threading.Thread(target=rank_main, args=(r,), daemon=True) for r in range(world_size)
    ]
    try:
        for thread in threads:
            thread.start()
        _join(threads, timeout, failures)
    finally:
        Watchdog.run_while_polling = run_while_polling
        contract.close_all()
        _forget_in_flight()
        multi_threaded_pg.ProcessLocalGroup.reset()
        multi_threaded_pg._uninstall_threaded_pg()
        torch._C._distributed_c10d._set_thread_isolation_mode(False)
    if failures:
        raise RanksFailedError(failures)
    return list(map(placing.here, results))


def _forget_in_flight() -> None:
    """Have no later world wait for parameters of this one, whose optimizers may still be alive."""
    with gather.LOCK:
        for gatherer in list(gather.REGISTRY._gatherers):
            gather.REGISTRY.discard(gatherer)


def everywhere(body: Callable[..., None], *args: Any) -> None:
    """Run `body` alone and on two ranks that feed equal gradients, whose mean is what each has."""
    body(*args)
    run_threads(2, body, *args)


def _wake_all(error: BaseException) -> None:
    group = multi_threaded_pg.ProcessLocalGroup
    with group._coll_lock:
        group.exception_handle(error)
    contract_stream.end_all(SystemExit("another rank failed"))


def _join(threads: list[threading.Thread], timeout: float, failures: dict[int, str]) -> None:
    deadline = time.monotonic() + timeout
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    for rank, thread in enumerate(threads):
        if thread.is_alive():
            failures[rank] = f"did not finish within {timeout} s"
    if any(thread.is_alive() for thread in threads):
        _wake_all(TimeoutError())
        for thread in threads:
            thread.join(GRACE_S)


def run_procs(
    world_size: int,
    fn: Callable[..., Any],
    *args: Any,
    timeout: float = 60.0,
    backend: str | None = None,
) -> list[Any]:
    """Call `fn(*args)` in `world_size` processes joined by gloo; results come back pickled.

    Under `pytest --backend hccl`, or with a `backend` of its choices, a contract group joins them.
    """
    # Forked from a server that has done the slow imports and nothing else: no thread of this
    # process is inherited.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    carried = placing.on_cpu(args)
    with tempfile.TemporaryDirectory() as folder:
        store_file = str(Path(folder) / "store")
        procs, pipes = [], []
        for rank in range(world_size):
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(
                target=_process_main,
                args=(rank, world_size, store_file, timeout, backend, sender, fn, carried),
                daemon=True,
            )
            process.start()
            sender.close()
            procs.append(process)
            pipes.append(receiver)
        try:
            results, failures = _collect(pipes, timeout)
        finally:
            for process in procs:
                process.kill()
                process.join()
    if failures:
        raise RanksFailedError(failures)
    return list(map(placing.here, results))


def run_scripts(
    source: str, world_size: int, *args: object, timeout: float = 60.0
) -> list[tuple[int, str]]:
    """Run `python -c source RANK ARGS` on every rank; return each one's exit code and stderr.

    For ranks that end, are killed, or leave in a way of their own; see `join_world`.
    """
    path = os.pathsep.join(filter(None, [str(_ROOT), os.getenv("PYTHONPATH")]))
    command = [sys.executable, "-W", "ignore", "-c", source]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), *map(str, args)],
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world_size)
    ]
    try:
        errors = [rank.communicate(timeout=timeout)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    return [(rank.returncode, text) for rank, text in zip(ranks, errors, strict=True)]


def join_world(rank: int, world_size: int, folder: str, timeout_s: float = 60.0) -> None:
    """Join the group of a script's ranks, which meet in a file of `folder`.

    What the script makes from then on lies on the rank's device.
    """
    torch.set_num_threads(1)
    dist.init_process_group(
        contract.ready(),
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout_s),
    )
    _of_script.enter_context(placing.placed(rank))


_of_script = ExitStack()  # never left: the process ends


def _process_main(
    rank: int,
    world_size: int,
    store_file: str,
    timeout: float,
    backend: str | None,
    pipe: multiprocessing.connection.Connection,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    torch.set_num_threads(1)
    gc.freeze()  # what was imported: no look through all objects takes time for it
    lateness.begin()
    try:
        store = dist.FileStore(store_file, world_size)
        dist.init_process_group(
            contract.ready(backend),
            rank=rank,
            world_size=world_size,
            store=store,
            timeout=timedelta(seconds=timeout),
        )
        with placing.placed(rank):
            payload = pickle.dumps((True, fn(*placing.here(args))))
    except BaseException:
        payload = pickle.dumps((False, traceback.format_exc()))
    pipe.send_bytes(payload)
    pipe.close()
    # A peer that leaves closes its gloo connections under the others' last collective, so every
    # rank stays until the parent, which has all results by then, ends it.
    threading.Event().wait()


def _collect(
    pipes: list[multiprocessing.connection.Connection], timeout: float
) -> tuple[list[Any], dict[int, str]]:
    results: list[Any] = [None] * len(pipes)
    failures: dict[int, str] = {}
    rank_of = {pipe: rank for rank, pipe in enumerate(pipes)}
    deadline = time.monotonic() + timeout
    while rank_of:
        ready = multiprocessing.connection.wait(
            list(rank_of), max(0.0, deadline - time.monotonic())
        )
        if not ready:
            break
        for pipe in ready:
            assert isinstance(pipe, multiprocessing.connection.Connection)
            rank = rank_of.pop(pipe)
            try:
                succeeded, value = pickle.loads(pipe.recv_bytes())
            except EOFError:
                succeeded, value = False, "died without a result"
            if succeeded:
                results[rank] = value
            else:
                failures[rank] = value
                deadline = min(deadline, time.monotonic() + GRACE_S)
    for rank in rank_of.values():
        failures[rank] = "did not finish" + (" after another rank failed" if failures else "")
    return results, failures


@contextmanager
def count_c10d_calls() -> Iterator[Counter[str]]:
    """Count the collectives of all threaded ranks together, by name, inside the block.

    torch's CommDebugMode does not see them: a threaded group does not pass the dispatcher.
    """
    is_threaded = contract.chosen() == "gloo"
    group: Any = multi_threaded_pg.ProcessLocalGroup if is_threaded else contract.Collectives
    counts: Counter[str] = Counter()
    lock = threading.Lock()
    inside = threading.local()
    names = ("allgather", "all_gather_single", "allreduce", "broadcast", "barrier")
    names += ("reduce_scatter", "reduce_scatter_single", "alltoall", "all_to_all_single")
    older = {
        "_allgather_base": "all_gather_single",
        "_reduce_scatter_base": "reduce_scatter_single",
    }
    originals = {name: getattr(group, name) for name in (*names, *older) if hasattr(group, name)}

    def wrap(name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            # Some of these are made of others: count the outermost.
            outermost = not getattr(inside, "call", False)
            inside.call = True
            try:
                if outermost:
                    with lock:
                        counts[older.get(name, name)] += 1
                return originals[name](*args, **kwargs)
            finally:
                inside.call = not outermost

        return call

    for name in originals:
        setattr(group, name, wrap(name))
    try:
        yield counts
    finally:
        for name, original in originals.items():
            setattr(group, name, original)


def log_of_shardfuse(level: int = logging.WARNING) -> list[str]:
    """Return a list of what the library logs in this process from now on."""
    told: list[str] = []
    handler = logging.Handler(level)
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("shardfuse").addHandler(handler)
    return told
