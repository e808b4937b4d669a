"""Jobs of which one rank's process ends, is killed, or hangs; as programs.py otherwise."""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

from tests.faults.programs import GROUP_TIMEOUT_S, Job


def killed(job: Job) -> None:
    """One rank is killed between steps (out of memory)."""
    job.mark()
    if job.is_bad:
        os.kill(os.getpid(), signal.SIGKILL)
    job.steps()


def killed_in_step(job: Job) -> None:
    """One rank is killed when its first bucket has been told of."""
    if job.is_bad:
        comm, launched = job.optimizer.communicator, []
        original = comm.reduce_scatter

        def launch(*args: Any, **options: Any) -> Any:
            launched.append(original(*args, **options))
            job.mark()
            os.kill(os.getpid(), signal.SIGKILL)

        comm.reduce_scatter = launch
    job.steps()


def leaves_early(job: Job) -> None:
    """One rank has fewer batches and ends, exit code 0."""
    job.mark()
    if job.is_bad:
        sys.exit(0)
    job.steps()


def fails_in_forward(job: Job) -> None:
    """One rank fails outside of the optimizer, and its script ends."""
    job.mark()
    if job.is_bad:
        raise MemoryError("no memory for a batch")
    job.steps()


def saves_early(job: Job) -> None:
    """One rank has fewer batches and goes on to the final checkpoint."""
    job.mark()
    job.steps(1 if job.is_bad else 2)
    job.optimizer.consolidate_state_dict()


def hangs(job: Job) -> None:
    """One rank hangs outside of the optimizer: only the group's timeout can tell."""
    job.mark()
    if job.is_bad:
        time.sleep(GROUP_TIMEOUT_S + 8)
    job.steps()


def stopped(job: Job) -> None:
    """One rank's process is stopped by a signal: only the group's timeout can tell."""
    job.mark()
    if job.is_bad:
        os.kill(os.getpid(), signal.SIGSTOP)
    job.steps()
