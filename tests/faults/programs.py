"""What goes wrong: small training jobs of which one rank, the last, does something else.

Each program gets a `Job` whose ranks have trained two steps together. It calls `job.mark()` where
the fault happens, and goes on as a training loop would. Nothing here looks at errors: an exception
ends the process, as in a script.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from shardfuse import ShardedAdamW, ShardedGradScaler, ShardedLamb, ShardedSGD

OPTIMIZERS: dict[str, Callable[..., Any]] = {"adam": ShardedAdamW, "lamb": ShardedLamb}
GROUP_TIMEOUT_S = 6


@dataclass
class Job:
    """One rank of a job, after two steps."""

    make: Callable[..., Any]
    sharding: dict[str, Any]
    report: Callable[[], None]

    def __post_init__(self) -> None:
        self.rank = dist.get_rank()
        self.is_bad = self.rank == dist.get_world_size() - 1
        generator = torch.Generator().manual_seed(0)
        self.layers = [torch.nn.Linear(40, 40) for _ in range(4)]
        with torch.no_grad():
            for layer in self.layers:
                layer.weight.copy_(torch.randn(40, 40, generator=generator) / 6)
                layer.bias.zero_()
        for layer in self.layers[1:3]:
            layer.requires_grad_(False)
        self.optimizer = self.build()
        self.steps(2)

    def build(self, **options: Any) -> Any:
        """Return an optimizer over all layers, each a group."""
        groups = [
            {"params": list(layer.named_parameters(prefix=f"layer{i}"))}
            for i, layer in enumerate(self.layers)
        ]
        # 0: no line in the log about state_dict() on rank 0 alone.
        sharding = {"consolidate_every": 0, **self.sharding}
        return self.make(groups, **{"lr": 0.01, "sharding": sharding, **options})

    def mark(self) -> None:
        """Tell the parent that the fault happens now."""
        self.report()

    def backward(self) -> None:
        """Make gradients of this rank's own data."""
        x = torch.full((4, 40), 0.1 * (1 + self.rank))
        for layer in self.layers:
            x = torch.tanh(layer(x))
        x.square().mean().backward()

    def steps(self, count: int = 4) -> None:
        """Train."""
        for _ in range(count):
            self.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()


def unfreeze(job: Job) -> None:
    """One rank unfreezes a layer."""
    job.mark()
    job.layers[1].requires_grad_(job.is_bad)
    job.steps()


def unfreeze_another(job: Job) -> None:
    """Two ranks unfreeze different layers of one shape."""
    job.mark()
    job.layers[1 if job.is_bad else 2].requires_grad_(True)
    job.steps()


def leave_a_grad(job: Job) -> None:
    """One rank leaves a gradient on a frozen parameter."""
    job.mark()
    if job.is_bad:
        job.layers[1].weight.grad = torch.ones(40, 40)
    job.steps()


def _set(job: Job, key: str, value: Any) -> None:
    job.mark()
    if job.is_bad:
        job.optimizer.param_groups[0][key] = value
    job.steps()


def lr_differs(job: Job) -> None:
    """ReduceLROnPlateau on a local loss."""
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(job.optimizer, patience=0, factor=0.5)
    scheduler.step(1.0)
    job.mark()
    scheduler.step(2.0 if job.is_bad else 0.5)
    job.steps()


def weight_decay_differs(job: Job) -> None:
    """One rank sets another weight decay."""
    _set(job, "weight_decay", 0.3)


def betas_differ(job: Job) -> None:
    """One rank sets other betas."""
    _set(job, "betas", (0.8, 0.9))


def model_loaded_on_one(job: Job) -> None:
    """One rank alone loads other weights, as is right before a DDP wrapper is built."""
    job.mark()
    if job.is_bad:
        weights = {name: torch.zeros_like(w) for name, w in job.layers[0].state_dict().items()}
        job.layers[0].load_state_dict(weights)
    job.steps()


def state_loaded_on_one(job: Job) -> None:
    """One rank alone loads a checkpoint of the optimizer."""
    job.optimizer.consolidate_state_dict(to=None)
    saved = job.optimizer.state_dict()
    job.steps(1)
    job.mark()
    if job.is_bad:
        job.optimizer.load_state_dict(saved)
    job.steps()


def another_checkpoint(job: Job) -> None:
    """Each rank loads the newest checkpoint that it can see, and one has not seen the last."""
    saved = []
    for _ in range(2):
        job.optimizer.consolidate_state_dict(to=None)
        saved.append(job.optimizer.state_dict())
        job.steps(1)
    job.mark()
    job.optimizer.load_state_dict(saved[0 if job.is_bad else 1])
    job.steps()


def sparse_gradient(job: Job) -> None:
    """One rank has a sparse gradient."""
    job.mark()
    job.backward()
    if job.is_bad:
        job.layers[0].weight.grad = torch.ones(40, 40).to_sparse()
    job.optimizer.step()


def gradient_of_another_size(job: Job) -> None:
    """One rank swaps the memory of a gradient for a smaller one."""
    job.mark()
    job.backward()
    if job.is_bad:
        job.layers[0].weight.grad.data = torch.ones(3, 3)
    job.optimizer.step()


def reallocated_param(job: Job) -> None:
    """One rank moves a parameter out of the buffer."""
    job.mark()
    if job.is_bad:
        job.layers[0].weight.data = job.layers[0].weight.data.clone()
    job.steps()


def replaced_param(job: Job) -> None:
    """A wrapper replaces a parameter on one rank."""
    job.mark()
    if job.is_bad:
        copy = torch.nn.Parameter(job.layers[0].weight.detach().clone())
        job.optimizer.param_groups[0]["params"][0] = copy
    job.steps()


def halved_model(job: Job) -> None:
    """One rank calls .half() after building."""
    job.mark()
    if job.is_bad:
        job.layers[0].half()
    job.optimizer.step()


def closure_raises(job: Job) -> None:
    """The closure fails on one rank."""
    job.mark()

    def closure() -> None:
        job.backward()
        if job.is_bad:
            raise OSError("batch 17 cannot be read")

    job.optimizer.step(closure)


def closure_is_interrupted(job: Job) -> None:
    """Ctrl-C reaches one rank, inside a step."""
    job.mark()

    def closure() -> None:
        job.backward()
        if job.is_bad:
            raise KeyboardInterrupt

    job.optimizer.step(closure)


def norm_on_one(job: Job) -> None:
    """One rank alone logs the gradient norm."""
    job.mark()
    job.backward()
    if job.is_bad:
        job.optimizer.grad_norm()
    job.optimizer.step()


def clip_on_one(job: Job) -> None:
    """One rank alone clips."""
    job.mark()
    job.backward()
    if job.is_bad:
        job.optimizer.clip_grad_norm(1.0)
    job.optimizer.step()


def clip_bound_differs(job: Job) -> None:
    """The ranks clip at different norms."""
    job.mark()
    job.backward()
    job.optimizer.clip_grad_norm(1.0 if job.is_bad else 2.0)
    job.optimizer.step()


def bad_clip_bound(job: Job) -> None:
    """One rank clips at a NaN."""
    job.mark()
    job.backward()
    job.optimizer.clip_grad_norm(float("nan") if job.is_bad else 2.0)
    job.optimizer.step()


def edit_after_clip(job: Job) -> None:
    """One rank changes a gradient between clipping and the step; the others go on."""
    job.mark()
    job.backward()
    job.optimizer.clip_grad_norm(1.0)
    if job.is_bad:
        job.layers[0].weight.grad.mul_(2)
    job.optimizer.step()  # may return with the bad rank's parameters under way
    job.steps(1)


def consolidate_on_one(job: Job) -> None:
    """One rank alone consolidates, as in `if rank == 0: save()`."""
    job.mark()
    if job.is_bad:
        job.optimizer.consolidate_state_dict()
    job.steps()


def consolidate_elsewhere(job: Job) -> None:
    """The ranks consolidate to different ranks."""
    job.mark()
    job.optimizer.consolidate_state_dict(to=1 if job.is_bad else 0)


def sharded_state_on_one(job: Job) -> None:
    """One rank alone asks for its sharded state."""
    job.mark()
    if job.is_bad:
        job.optimizer.sharded_state_dict()
    job.steps()


def group_on_one(job: Job) -> None:
    """One rank alone adds a group."""
    job.mark()
    if job.is_bad:
        job.optimizer.add_param_group({"params": [("new", torch.nn.Parameter(torch.ones(3)))]})
    job.steps()


def group_of_another_shape(job: Job) -> None:
    """The ranks add groups of different shapes."""
    job.mark()
    param = torch.nn.Parameter(torch.ones(3 if job.is_bad else 4))
    job.optimizer.add_param_group({"params": [("new", param)]})


def build_on_one(job: Job) -> None:
    """One rank alone builds a second optimizer."""
    job.mark()
    if job.is_bad:
        ShardedSGD([torch.nn.Parameter(torch.ones(3))], lr=0.1)
    job.steps()


def build_other_buckets(job: Job) -> None:
    """The ranks build with different bucket sizes."""
    job.mark()
    job.build(sharding={**job.sharding, "bucket_cap_mb": 1 if job.is_bad else 2})


def build_other_collectives(job: Job) -> None:
    """One rank builds with other collectives."""
    other = {"auto": "native", "pairwise": "auto", "native": "pairwise"}
    choice = job.sharding["collectives"]
    job.mark()
    job.build(sharding={**job.sharding, "collectives": other[choice] if job.is_bad else choice})


def build_another_class(job: Job) -> None:
    """One rank builds another optimizer."""
    job.mark()
    job.make = (
        OPTIMIZERS["lamb" if job.make is ShardedAdamW else "adam"] if job.is_bad else job.make
    )
    job.build()


def build_with_an_error(job: Job) -> None:
    """One rank gives a hyper-parameter that is out of range."""
    job.mark()
    job.build(lr=-1.0 if job.is_bad else 0.01)


def two_in_opposite_order(job: Job) -> None:
    """Two optimizers are stepped in opposite orders."""
    second = ShardedSGD([torch.nn.Parameter(torch.ones(900))], lr=0.1)
    job.mark()
    job.backward()
    second.param_groups[0]["params"][0].grad = torch.ones(900)
    for optimizer in (second, job.optimizer) if job.is_bad else (job.optimizer, second):
        optimizer.step()


def scaler_on_one(job: Job) -> None:
    """One rank alone steps through a gradient scaler."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    job.mark()
    scaler.scale(torch.ones(()))
    job.backward()
    scaler.step(job.optimizer) if job.is_bad else job.optimizer.step()


def sharded_scaler_on_one(job: Job) -> None:
    """One rank alone unscales with the sharded scaler."""
    scaler = ShardedGradScaler("cpu", init_scale=1.0)
    job.mark()
    scaler.scale(torch.ones(()))
    job.backward()
    if job.is_bad:
        scaler.unscale_(job.optimizer)
    job.optimizer.step()


def not_averaged(job: Job) -> None:
    """grads_are_reduced=True, but nothing averages."""
    job.mark()
    job.optimizer = job.build(sharding={**job.sharding, "grads_are_reduced": True})
    job.steps()


def destroyed_group(job: Job) -> None:
    """The process group is destroyed and training goes on."""
    job.mark()
    dist.destroy_process_group()
    job.steps()


def goes_on_after_an_error(job: Job) -> None:
    """One rank catches its error and goes on; the others' scripts end."""
    job.mark()
    job.backward()
    if job.is_bad:
        job.layers[0].weight.grad = torch.ones(40, 40).to_sparse()
        try:
            job.optimizer.step()
        except RuntimeError:
            job.optimizer.zero_grad()
            job.steps()
    job.optimizer.step()
