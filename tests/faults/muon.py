"""What goes wrong on one rank of a job with ShardedMuon; as programs.py otherwise."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

from shardfuse import ShardedMuon
from tests.faults.programs import Job


def _muon(program: Callable[[Job], None]) -> Callable[[Job], None]:
    """Return a program of the job's own layers under ShardedMuon, of the same name."""

    def run(job: Job) -> None:
        job.make = ShardedMuon
        job.optimizer = job.build()
        job.steps(2)
        program(job)

    run.__name__, run.__doc__ = f"muon_{program.__name__}", program.__doc__
    return run


def _between(job: Job, act: Callable[[], None]) -> None:
    """Have the bad rank act in place of the second all-to-all of a step."""
    comm, calls = job.optimizer.communicator, []
    original = comm.all_to_all

    def all_to_all(*args: Any) -> Any:
        calls.append(args)
        if len(calls) == 2:
            job.mark()
            act()
        return original(*args)

    if job.is_bad:
        comm.all_to_all = all_to_all
    job.steps()


@_muon
def fails_between(job: Job) -> None:
    """One rank lacks memory for its matrices, between the two all-to-alls."""

    def act() -> None:
        raise MemoryError("no memory for 1 matrix")

    _between(job, act)


@_muon
def killed_between(job: Job) -> None:
    """One rank is killed between the two all-to-alls."""
    _between(job, lambda: os.kill(os.getpid(), signal.SIGKILL))


@_muon
def ns_steps_differ(job: Job) -> None:
    """One rank iterates less often."""
    job.mark()
    if job.is_bad:
        job.optimizer.param_groups[0]["ns_steps"] = 3
    job.steps()


@_muon
def split_changes(job: Job) -> None:
    """One rank takes its matrices for stacked ones."""
    job.mark()
    if job.is_bad:
        job.optimizer.param_groups[0]["split"] = 2
    job.steps()
