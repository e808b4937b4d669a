"""What goes wrong on one rank of a job over FSDP2's DTensors; as programs.py otherwise.

Every step clips: that of a rule by elements communicates nothing, and an error reaches the others
in the next call that does.
"""

from __future__ import annotations

import errno
import os
import signal
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from shardfuse.checkpoint import load, save
from shardfuse.checkpoint.storage import ShardReader, ShardWriter
from tests.faults.programs import OPTIMIZERS, Job


class FsdpJob:
    """One rank of a job whose layers FSDP2 has sharded, after two steps."""

    def __init__(self, job: Job) -> None:
        self.job, self.is_bad, self.mark = job, job.is_bad, job.mark
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        self.model: Any = torch.nn.Sequential(*(torch.nn.Linear(40, 40) for _ in range(3)))
        for layer in self.model:
            fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.optimizer = self.build()
        self.steps(2)

    def build(self, **options: Any) -> Any:
        """Return an optimizer over all layers."""
        sharding = {"collectives": self.job.sharding["collectives"], "kernel": "eager"}
        own = {"lr": 0.01, "sharding": sharding, **options}
        return self.job.make(self.model.named_parameters(), **own)

    def backward(self) -> None:
        """Make gradients of this rank's own data."""
        self.model(torch.full((4, 40), 0.1 * (1 + self.job.rank))).square().mean().backward()

    def step(self, max_norm: float = 1.0) -> None:
        """Clip and step."""
        self.optimizer.clip_grad_norm(max_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def steps(self, count: int = 4) -> None:
        """Train."""
        for _ in range(count):
            self.backward()
            self.step()


def _sharded(program: Callable[[FsdpJob], None]) -> Callable[[Job], None]:
    """Return a program of a Job, of the same name."""

    def run(job: Job) -> None:
        program(FsdpJob(job))

    run.__name__, run.__doc__ = f"fsdp_{program.__name__}", program.__doc__
    return run


@_sharded
def absent_gradient(job: FsdpJob) -> None:
    """One rank loses a gradient."""
    job.backward()
    job.mark()
    if job.is_bad:
        job.model[1].weight.grad = None
    job.step()


@_sharded
def lr_differs(job: FsdpJob) -> None:
    """One rank has another learning rate."""
    job.mark()
    if job.is_bad:
        job.optimizer.param_groups[0]["lr"] = 0.005
    job.steps()


@_sharded
def bad_lr(job: FsdpJob) -> None:
    """One rank sets a learning rate out of range."""
    job.mark()
    if job.is_bad:
        job.optimizer.param_groups[0]["lr"] = -1.0
    job.steps()


@_sharded
def clip_bound_differs(job: FsdpJob) -> None:
    """The ranks clip at different norms."""
    job.backward()
    job.mark()
    job.step(1.0 if job.is_bad else 2.0)


@_sharded
def replaced_param(job: FsdpJob) -> None:
    """One rank replaces a parameter in a group."""
    job.mark()
    if job.is_bad:
        params = job.optimizer.param_groups[0]["params"]
        params[0] = torch.nn.Parameter(params[0].detach().clone())
    job.steps()


@_sharded
def state_loaded_on_one(job: FsdpJob) -> None:
    """One rank alone loads a state; another backward would wait in FSDP2's own collective."""
    saved = job.optimizer.state_dict()
    job.backward()
    job.mark()
    if job.is_bad:
        job.optimizer.load_state_dict(saved)
    job.step()


@_sharded
def edited_state(job: FsdpJob) -> None:
    """One rank loads a state that lacks a moment."""
    saved = job.optimizer.state_dict()
    job.mark()
    if job.is_bad:
        saved["state"][0].pop("exp_avg")
    job.optimizer.load_state_dict(saved)


@_sharded
def build_another_class(job: FsdpJob) -> None:
    """One rank builds another optimizer."""
    if job.is_bad:
        own = job.job.make
        job.job.make = next(make for make in OPTIMIZERS.values() if make is not own)
    job.mark()
    job.build()


@_sharded
def killed(job: FsdpJob) -> None:
    """One rank is killed between backward and the step."""
    job.backward()
    job.mark()
    if job.is_bad:
        os.kill(os.getpid(), signal.SIGKILL)
    job.step()


def _in_files(job: FsdpJob, owner: type, act: Callable[[], None], at: int = 1) -> None:
    """Save or load, and have the bad rank act in place of a call of the files' writer or reader.

    The first call of the reader fills copies, and the second the model and the optimizer.
    """
    name = "read" if owner is ShardReader else "write"
    original, calls = getattr(owner, name), []

    def call(*args: Any) -> Any:
        calls.append(args)
        if len(calls) == at:
            job.mark()
            act()
        return original(*args)

    with tempfile.TemporaryDirectory() as own:
        folders = [own]
        dist.broadcast_object_list(folders)
        state = {"model": job.model, "optimizer": job.optimizer}
        if owner is ShardReader:
            save(state, f"{folders[0]}/saved")
        if job.is_bad:
            setattr(owner, name, call)
        if owner is ShardReader:
            load(state, f"{folders[0]}/saved")
        else:
            save(state, f"{folders[0]}/saved")


def _fill_disc() -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _lose_disc() -> None:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def _lack_memory() -> None:
    raise MemoryError("no memory for 1 shard")


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@_sharded
def disc_full_in_save(job: FsdpJob) -> None:
    """One rank's disc is full."""
    _in_files(job, ShardWriter, _fill_disc)


@_sharded
def fails_in_save(job: FsdpJob) -> None:
    """One rank lacks memory as it saves."""
    _in_files(job, ShardWriter, _lack_memory)


@_sharded
def killed_in_save(job: FsdpJob) -> None:
    """One rank is killed when it has begun to save."""
    _in_files(job, ShardWriter, _die)


@_sharded
def disc_fails_in_load(job: FsdpJob) -> None:
    """One rank's disc fails as it reads."""
    _in_files(job, ShardReader, _lose_disc)


@_sharded
def fails_in_load(job: FsdpJob) -> None:
    """One rank lacks memory as it fills its shards."""
    _in_files(job, ShardReader, _lack_memory, at=2)


@_sharded
def killed_in_load(job: FsdpJob) -> None:
    """One rank is killed as it loads."""
    _in_files(job, ShardReader, _die)
