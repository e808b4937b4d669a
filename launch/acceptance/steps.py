"""Checks of whole training steps: memory, waits of the host, time beside DDP."""

from __future__ import annotations

import gc
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from launch.acceptance.model import LR, batch_of, replicated, sharded
from launch.bench.timing import median, time_ms
from launch.bench.transformer import SIZES, Transformer
from shardfuse import ShardConfig, ShardedAdamW
from shardfuse.comm import Communicator
from shardfuse.comm.transport import AsyncModel
from shardfuse.doctor import Finding
from shardfuse.plan import Budget, plan
from shardfuse.plan.models import shapes_of_module

_WARM_UP = 3
_MEMORY_ERROR = 0.1
_SETTLED = 1.0
"""Ratio of our step to DDP's up to which there is nothing to say."""


def memory(comm: Communicator, device: torch.device, *, size: str) -> Finding:
    """Bytes that a rank holds between steps are those of ``python -m shardfuse plan``."""
    counter = getattr(torch.get_device_module(device), "memory_allocated", None)
    before = 0 if counter is None else _settled(counter, device)
    training, optimizer = sharded(device, size)
    for step in range(_WARM_UP):
        training.step(batch_of(comm, device, size, step))
    training.finish()
    summary = optimizer.memory_summary()
    own = summary.param_nbytes + summary.grad_nbytes + summary.state_nbytes
    held = own if counter is None else _settled(counter, device) - before
    planned = _planned(comm, device, size, optimizer.communicator.async_model).total_nbytes
    mib = 1 / (1 << 20)
    values = {"held_nbytes": held, "planned_nbytes": planned, "summary_nbytes": own}
    text = f"{held * mib:.1f} MiB between steps, {planned * mib:.1f} planned"
    if abs(held / planned - 1) <= _MEMORY_ERROR:
        return Finding("", "ok", text, values=values)
    return Finding("", "warning", text, "Report this: the plan leaves something out.", values)


def _settled(counter: Callable[..., int], device: torch.device) -> int:
    gc.collect()
    torch.accelerator.synchronize(device)
    return int(counter(device))


def _planned(comm: Communicator, device: torch.device, size: str, progress: AsyncModel) -> Budget:
    with torch.device("meta"):
        shapes = shapes_of_module(Transformer(SIZES[size]))
    return plan(
        shapes,
        lambda params, sharding: ShardedAdamW(params, lr=LR, sharding=sharding),
        world_size=comm.world_size,
        device=device.type,
        sharding=ShardConfig(),
        progress=progress,
    )


def host_synchronization(
    comm: Communicator, device: torch.device, *, size: str, set_mode: Any = None
) -> Finding:
    """A step never waits for the device: the host runs ahead, and the device does not idle.

    Args:
        set_mode: makes such a wait an error; None: the device's own.
    """
    module = torch.get_device_module(device)
    set_mode = set_mode or getattr(module, "set_sync_debug_mode", None)
    training, optimizer = sharded(device, size)
    for step in range(_WARM_UP):
        training.step(batch_of(comm, device, size, step))
    training.finish()
    if set_mode is None:
        return Finding("", "not run", f"{device.type} has no set_sync_debug_mode()")
    batch = batch_of(comm, device, size, _WARM_UP)
    set_mode("error")
    try:
        training.step(batch)
        optimizer.zero_grad()
    except RuntimeError as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{Path(where.filename).name}:{where.lineno}"
        text = f"a step waits for the device, at {place}: {str(error).splitlines()[0][:120]}"
        return Finding("", "failed", text, "Report this where the place is in shardfuse.")
    finally:
        set_mode("default")
    training.finish()
    return Finding("", "ok", "forward, backward and step never wait for the device")


def against_ddp(comm: Communicator, device: torch.device, *, size: str, repeats: int) -> Finding:
    """The time of a training step, as a ratio to DDP with torch's fused AdamW."""
    if comm.world_size == 1:
        return Finding("", "not run", "one rank: there is nothing to shard")
    ways = {"shardfuse": sharded(device, size)[0], "DDP": replicated(comm, device, size)}
    times: dict[str, list[float]] = {name: [] for name in ways}
    for step in range(_WARM_UP + repeats):
        batch = batch_of(comm, device, size, step)
        for name, training in ways.items():
            ms = time_ms(lambda training=training, batch=batch: training.step(batch), device)
            if step >= _WARM_UP:
                times[name].append(ms)
    ways["shardfuse"].finish()
    own, other = median(times["shardfuse"]), median(times["DDP"])
    values = {"shardfuse_ms": own, "ddp_ms": other, "ratio": own / other}
    text = f"{own:.2f} ms, DDP with fused AdamW {other:.2f} ms: {own / other:.2f}"
    if own <= _SETTLED * other:
        return Finding("", "ok", text, values=values)
    remedy = "Look at the trace for gaps; try ShardConfig(bucket_cap_mb=...)."
    return Finding("", "warning", text, remedy, values)
