"""Jobs of which one rank's process ends, is killed, or hangs; as programs.py otherwise."""

from __future__ import annotations

import dataclasses
import errno
import os
import signal
import sys
import tempfile
import time
from typing import Any

import torch.distributed as dist

from shardfuse.checkpoint import Checkpoints, folder, save
from shardfuse.checkpoint.storage import ShardWriter
from shardfuse.comm import native
from shardfuse.grads.source import HostAllReduceMax
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


def killed_in_all_gather(job: Job) -> None:
    """One rank is killed when it has launched the all-gather of updated parameters."""
    _die_in(job, job.optimizer.communicator, "all_gather")
    job.steps()


def killed_in_agreement(job: Job) -> None:
    """One rank is killed when hosts agree on what was sent during backward."""
    job.optimizer = job.build(sharding={**job.sharding, "stage": 2})
    job.steps(2)
    _die_in(job, HostAllReduceMax, "launch")
    job.steps()


def killed_while_building(job: Job) -> None:
    """One rank is killed as it builds a second optimizer."""
    if job.is_bad:
        job.mark()
        os.kill(os.getpid(), signal.SIGKILL)
    job.optimizer = job.build()
    job.steps()


def killed_before_a_group(job: Job) -> None:
    """One rank is killed where ranks make a process group for the optimizer alone."""
    _die_in(job, dist, "new_group")
    _make_a_group(job)


def fails_before_a_group(job: Job) -> None:
    """One rank cannot make a process group for the optimizer alone."""
    if job.is_bad:

        def new_group(*args: Any, **options: Any) -> Any:
            job.mark()
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

        dist.new_group = new_group
    _make_a_group(job)


def _make_a_group(job: Job) -> None:
    communicator = job.optimizer.communicator
    communicator._traits = dataclasses.replace(communicator._traits, overlaps=True)
    for shared in native._shared.values():
        shared.copies.clear()
    with communicator.session.region("building an optimizer"):
        native.group_copy(communicator, job)
    job.steps()


def killed_in_save(job: Job) -> None:
    """One rank is killed when it has begun to save."""
    with tempfile.TemporaryDirectory() as own:
        folders = [own]
        dist.broadcast_object_list(folders)
        _die_in(job, ShardWriter, "write")
        save({"optimizer": job.optimizer}, f"{folders[0]}/saved")


def killed_in_load_latest(job: Job) -> None:
    """One rank is killed as the ranks list a folder again, whose listing has missed the newest."""
    with tempfile.TemporaryDirectory() as own:
        folders = [own]
        dist.broadcast_object_list(folders)
        Checkpoints(folders[0]).save({"optimizer": job.optimizer}, 3)
        listings, broadcast_steps = [0], folder.broadcast_steps

        def listed(*args: Any) -> list[int]:
            listings[0] += 1
            if listings[0] == 1:
                return []
            job.mark()
            if job.is_bad:
                os.kill(os.getpid(), signal.SIGKILL)
            return broadcast_steps(*args)

        folder.broadcast_steps = listed
        Checkpoints(folders[0]).load_latest({"optimizer": job.optimizer})


def _die_in(job: Job, owner: Any, name: str) -> None:
    """Have the bad rank killed when it has called a method."""
    original = getattr(owner, name)

    def call(*args: Any, **options: Any) -> Any:
        kept.append(original(*args, **options) if name == "all_gather" else None)
        job.mark()
        os.kill(os.getpid(), signal.SIGKILL)

    kept: list[Any] = []
    if job.is_bad:
        setattr(owner, name, call)


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
