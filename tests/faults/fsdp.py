"""What goes wrong on one rank of a job over FSDP2's DTensors; as programs.py otherwise.

Every step clips: that of a rule by elements communicates nothing, and an error reaches the others
in the next call that does.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.faults.programs import OPTIMIZERS, Job


class FsdpJob:
    """One rank of a job whose layers FSDP2 has sharded, after two steps."""

    def __init__(self, job: Job) -> None:
        self.job, self.is_bad, self.mark = job, job.is_bad, job.mark
        mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
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
