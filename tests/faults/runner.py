"""Run one fault in real processes and see how every rank ends."""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import pickle
import re
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from tests.faults.programs import GROUP_TIMEOUT_S, OPTIMIZERS, Job
from tests.faults.table import FAULTS, Fault
from tests.support import contract
from tests.support.harness import PRELOADED

_LIMIT_S = 40.0
_LIMIT_OF_A_RANK_S = 2.0  # of its start, where cores are few


@dataclass(frozen=True)
class Setting:
    """Where a fault happens."""

    collectives: str
    optimizer: str
    world_size: int


@dataclass
class Ending:
    """How one rank ended."""

    rank: int
    message: str | None  # of its error; None where it had none
    seconds: float | None  # from the fault to the error
    exit_code: int | None

    def verdict(self, fault: Fault, *, bad: int, bound_s: float) -> str:
        """Return "ok", or what is wrong with it; ``bad`` is the rank that has the fault."""
        is_bad = self.rank == bad
        if is_bad and fault.ended != "error":
            return "ok"
        if self.message is None:
            return "silent" if self.exit_code is not None else "hangs"
        if is_bad:
            return "ok"
        if self.seconds is None or self.seconds > bound_s:
            return "late"
        missing = [text for text in fault.names if text not in self.message]
        if fault.blames is not None:
            return self._blame(fault.blames, bad)
        return f"does not name {missing[0]}" if missing else "ok"

    def _blame(self, verdict: str, bad: int) -> str:
        """Return "ok" if the message names, after its own rank, the bad rank and no other."""
        assert self.message is not None
        own = f"[rank {self.rank}] "
        text = self.message.partition(own)[2]
        numbers = {int(number) for number in re.findall(r"ranks? (\d+)", text, re.IGNORECASE)}
        if verdict not in text:
            return f"does not say {verdict!r}"
        if numbers != {bad} or "ranks " in text:
            return f"names ranks {sorted(numbers)}"
        return "ok"


def run(name: str, setting: Setting) -> list[Ending]:
    """Return how the ranks end when the fault ``name`` happens to the last one."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*PRELOADED, "tests.faults.runner"])
    # Of this process, as torchrun's agent holds it: it outlives every rank.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks = range(setting.world_size)
    pipes, processes = [], []
    for rank in ranks:
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(
            target=_rank_main, args=(rank, name, setting, store.port, sender), daemon=True
        )
        process.start()
        sender.close()
        pipes.append(receiver)
        processes.append(process)
    try:
        records = _collect(pipes, processes)
    finally:
        for process in processes:
            process.kill()
    marks = [when for kind, when, _ in records[-1] if kind == "mark"]
    endings = []
    for rank in ranks:
        errors = [(when, text) for kind, when, text in records[rank] if kind == "error"]
        message = errors[0][1] if errors else None
        seconds = errors[0][0] - marks[0] if errors and marks else None
        endings.append(Ending(rank, message, seconds, processes[rank].exitcode))
    return endings


Record = tuple[str, float, str]


def _collect(pipes: list[Any], processes: list[Any]) -> list[list[Record]]:
    """Read what ranks report until all survivors have ended, or the limit is over."""
    records: list[list[Record]] = [[] for _ in pipes]
    open_pipes = {pipe: rank for rank, pipe in enumerate(pipes)}
    deadline = time.monotonic() + _LIMIT_S + _LIMIT_OF_A_RANK_S * len(pipes)
    while set(open_pipes.values()) - {len(pipes) - 1} and time.monotonic() < deadline:
        for pipe in multiprocessing.connection.wait(list(open_pipes), timeout=1.0):
            assert isinstance(pipe, multiprocessing.connection.Connection)
            try:
                records[open_pipes[pipe]].append(pickle.loads(pipe.recv_bytes()))
            except EOFError:
                processes[open_pipes.pop(pipe)].join(timeout=5.0)
    for pipe, rank in open_pipes.items():
        processes[rank].join(timeout=2.0)
        while pipe.poll():
            try:
                records[rank].append(pickle.loads(pipe.recv_bytes()))
            except EOFError:
                break
    return records


def _rank_main(rank: int, name: str, setting: Setting, port: int, pipe: Any) -> None:
    torch.set_num_threads(1)

    def report(kind: str, text: str = "") -> None:
        pipe.send_bytes(pickle.dumps((kind, time.monotonic(), text)))

    code = 0
    try:
        dist.init_process_group(
            contract.ready(),
            rank=rank,
            world_size=setting.world_size,
            store=dist.TCPStore("127.0.0.1", port),
            # Dozens of ranks on few cores take longer to meet.
            timeout=timedelta(seconds=max(GROUP_TIMEOUT_S, setting.world_size - 16)),
        )
        sharding = {"collectives": setting.collectives, "kernel": "eager", "bucket_cap_mb": 0.01}
        job = Job(OPTIMIZERS[setting.optimizer], sharding, lambda: report("mark"))
        FAULTS[name].program(job)
    except SystemExit:
        pass
    except BaseException as error:
        report("error", f"{type(error).__name__}: {error}")
        code = 1
    pipe.close()
    # At once, as a script that failed: others may still need what this process held.
    os._exit(code)
