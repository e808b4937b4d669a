"""Processes joined by gloo that run many programs one after another, and what to make of it.

A world of one rank is a process without a group, so that a hang there ends too. After an error a
world is ended and another started: its ranks may wait for each other.
"""

from __future__ import annotations

import gc
import multiprocessing
import multiprocessing.connection
import pickle
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from tests.fuzz.program import Program
from tests.support import contract

# Of the process group: longer than any rank may be late on a busy machine.
GROUP_TIMEOUT_S = 30.0
# A program takes milliseconds; this is a hang.
PROGRAM_TIMEOUT_S = 60.0
# How long others may go on after one rank had an error where none may have one.
GRACE_S = 3.0
# How long a rank may take to raise, and how much later than the first the last one may, where
# ranks do different things.
ERROR_BOUND_S = 10.0
_PRELOADED = ["torch.distributed", "shardfuse", "tests.fuzz.actor", "torch.distributed.checkpoint"]
_PRELOADED += ["torch._dynamo", "torch.optim"]
_PROGRAMS_PER_WORLD = 300
_COLLECT_EVERY = 25


class Verdict(NamedTuple):
    """What a program showed."""

    status: str  # "passed", "refused" (an error on all ranks, where one is right) or "failed"
    text: str = ""


@dataclass
class _World:
    folder: tempfile.TemporaryDirectory[str]
    processes: list[Any] = field(default_factory=list)
    pipes: list[multiprocessing.connection.Connection] = field(default_factory=list)
    num_programs: int = 0

    def end(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()
        for pipe in self.pipes:
            pipe.close()
        self.folder.cleanup()


class Worlds:
    """Starts worlds as programs ask for them, and keeps them."""

    def __init__(self) -> None:
        self._worlds: dict[int, _World] = {}

    def __enter__(self) -> Worlds:
        return self

    def __exit__(self, *_: object) -> None:
        for size in list(self._worlds):
            self._end(size)

    def run(self, program: Program) -> Verdict:
        """Run a program on all of its ranks."""
        world = self._world(program.world)
        world.num_programs += 1
        folder = Path(world.folder.name) / f"program-{world.num_programs}"
        folder.mkdir()
        for pipe in world.pipes:
            pipe.send_bytes(pickle.dumps((program, folder)))
        outcomes, late = _collect(world.pipes, patient=program.first_fault is not None)
        verdict = judge(program, outcomes, late)
        in_step = all(o is not None and o.status != "error" for o in outcomes)
        if not in_step or world.num_programs == _PROGRAMS_PER_WORLD:
            self._end(program.world)
        return verdict

    def _end(self, size: int) -> None:
        self._worlds.pop(size).end()

    def _world(self, size: int) -> _World:
        if size not in self._worlds:
            # Forked from a server that has done the slow imports and nothing else.
            context = multiprocessing.get_context("forkserver")
            context.set_forkserver_preload(_PRELOADED)
            world = _World(tempfile.TemporaryDirectory())
            store = str(Path(world.folder.name) / "store")
            for rank in range(size):
                here, there = context.Pipe()
                process = context.Process(
                    target=_serve, args=(rank, size, store, there), daemon=True
                )
                process.start()
                there.close()
                world.processes.append(process)
                world.pipes.append(here)
            self._worlds[size] = world
        return self._worlds[size]


def _serve(
    rank: int, size: int, store_file: str, pipe: multiprocessing.connection.Connection
) -> None:
    """Run the programs that come through ``pipe``, until it is closed."""
    from tests.fuzz.actor import run_program
    from tests.fuzz.fsdp import run_fsdp_program

    torch.set_num_threads(1)
    if size > 1:
        dist.init_process_group(
            contract.ready(),
            rank=rank,
            world_size=size,
            store=dist.FileStore(store_file, size),
            timeout=timedelta(seconds=GROUP_TIMEOUT_S),
        )
    count = 0
    while True:
        try:
            program, folder = pickle.loads(pipe.recv_bytes())
        except EOFError:
            return
        run = run_fsdp_program if program.model.startswith("FSDP2") else run_program
        outcome = run(program, rank, folder)
        pipe.send_bytes(pickle.dumps(outcome))
        count += 1
        if count % _COLLECT_EVERY == 0:
            gc.collect()


def _collect(
    pipes: Sequence[multiprocessing.connection.Connection], patient: bool
) -> tuple[list[Any], float]:
    """Return the ranks' outcomes, None for none, and how long after the first the last came."""
    outcomes: list[Any] = [None] * len(pipes)
    waiting = {pipe: rank for rank, pipe in enumerate(pipes)}
    deadline = time.monotonic() + PROGRAM_TIMEOUT_S
    first = None
    while waiting:
        patience = max(0.0, deadline - time.monotonic())
        ready = multiprocessing.connection.wait(list(waiting), patience)
        if not ready:
            break
        for pipe in ready:
            assert isinstance(pipe, multiprocessing.connection.Connection)
            rank = waiting.pop(pipe)
            try:
                outcomes[rank] = pickle.loads(pipe.recv_bytes())
            except (EOFError, ConnectionError):
                continue
            if outcomes[rank].status == "error":
                first = first or time.monotonic()
                grace = ERROR_BOUND_S if patient else GRACE_S
                deadline = min(deadline, time.monotonic() + grace)
    return outcomes, 0.0 if first is None else time.monotonic() - first


def judge(program: Program, outcomes: Sequence[Any], late: float) -> Verdict:
    """Return whether all ranks did what they must."""
    texts = [f"rank {rank}: {_describe(program, outcome)}" for rank, outcome in enumerate(outcomes)]
    everything = "\n".join(texts)
    statuses = {None if outcome is None else outcome.status for outcome in outcomes}
    if statuses == {"ok"}:
        differ = _first_digest(outcomes)
        if differ is None:
            return Verdict("passed")
        return Verdict("failed", f"ranks hold other values after operation {differ}")
    fault = program.first_fault
    if statuses == {"error"} and fault is not None:
        slowest = max(outcome.seconds for outcome in outcomes)
        if all(outcome.op >= fault for outcome in outcomes) and slowest < ERROR_BOUND_S:
            return Verdict("refused", everything)
    return Verdict("failed", everything + (f"\nafter {late:.1f} s" if None in statuses else ""))


def _first_digest(outcomes: Sequence[Any]) -> int | None:
    columns = zip(*(outcome.digests for outcome in outcomes), strict=True)
    return next((column[0][0] for column in columns if len(set(column)) > 1), None)


def _describe(program: Program, outcome: Any) -> str:
    if outcome is None:
        return "no answer: it hangs, or has died"
    where = "building the optimizer"
    if 0 <= outcome.op < len(program.ops):
        where = f"operation {outcome.op}, {program.ops[outcome.op].name}"
    return f"{outcome.status} at {where} {outcome.text}"
