"""Checks of whole training steps: memory, waits of the host, time beside DDP."""

from __future__ import annotations

import functools
import gc
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from launch.acceptance.model import LR, SIZES, batch_of, bucket_mib, replicated, sharded
from launch.acceptance.timing import mean_ms
from launch.bench.timing import median
from launch.bench.transformer import Transformer
from shardfuse import ShardConfig, ShardedAdamW
from shardfuse.comm import Communicator
from shardfuse.comm.transport import AsyncModel
from shardfuse.doctor import Finding
from shardfuse.engine.gather import PendingParam
from shardfuse.plan import Budget, plan
from shardfuse.plan.models import shapes_of_module

_WARM_UP = 3
_NUM_COUNTED = 10
_ROUNDS = 3
_MEMORY_ERROR = 0.1
_TEMPORARIES = 4
"""Of an update, each as large as this rank's shard of the largest bucket in fp32."""

_SETTLED = 1.1
"""Ratio of our step to DDP's up to which there is nothing to say."""

_LOSS_ERROR = 0.05
"""Difference of the last losses, as a share of the fall of DDP's."""

_MIB = 1 / (1 << 20)


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
    values = {"held_nbytes": held, "planned_nbytes": planned, "summary_nbytes": own}
    text = f"{held * _MIB:.1f} MiB between steps, {planned * _MIB:.1f} planned"
    if abs(held / planned - 1) <= _MEMORY_ERROR:
        return Finding("", "ok", text, values=values)
    return Finding("", "warning", text, "Report this: the plan leaves something out.", values)


def peak_memory(comm: Communicator, device: torch.device, *, size: str) -> Finding:
    """The most bytes that a rank holds in step() are those of the plan and an update's temporaries.

    After backward, so without activations.
    """
    module = torch.get_device_module(device)
    if not hasattr(module, "max_memory_allocated"):
        return Finding("", "not run", f"torch does not count the peak of {device.type}")
    before = _settled(module.memory_allocated, device)
    training, optimizer = sharded(device, size)
    batch = batch_of(comm, device, size, 0)
    for _ in range(_WARM_UP):
        training.step(batch)
    training.backward(batch)
    _settled(module.memory_allocated, device)
    module.reset_peak_memory_stats(device)
    optimizer.step()
    training.finish()
    torch.accelerator.synchronize(device)
    peak = int(module.max_memory_allocated(device)) - before
    planned = _planned(comm, device, size, optimizer.communicator.async_model)
    allowed = round(_planned_peak(planned, device) * (1 + _MEMORY_ERROR)) + _temporaries(planned)
    values = {"peak_nbytes": peak, "planned_nbytes": planned.total_nbytes, "allowed": allowed}
    text = f"{peak * _MIB:.1f} MiB in step(), {planned.total_nbytes * _MIB:.1f} planned between"
    text += f" steps, up to {allowed * _MIB:.1f} allowed"
    if planned.total_nbytes * (1 - _MEMORY_ERROR) <= peak <= allowed:
        return Finding("", "ok", text, values=values)
    remedy = "Report this: the plan leaves something out. Until then leave that much memory free."
    return Finding("", "warning", text, remedy, values)


def _planned_peak(planned: Budget, device: torch.device) -> int:
    """Return the plan's peak, or what it has without one: HCCL's all-gathers send copies."""
    copies = planned.memory["parameters"] // planned.num_shards if device.type == "npu" else 0
    return int(getattr(planned, "peak_nbytes", planned.total_nbytes + copies))


def _temporaries(planned: Budget) -> int:
    return _TEMPORARIES * planned.bucket_nbytes // planned.num_shards


def _settled(counter: Callable[..., int], device: torch.device) -> int:
    gc.collect()
    torch.accelerator.synchronize(device)
    return int(counter(device))


def _planned(
    comm: Communicator,
    device: torch.device,
    size: str,
    progress: AsyncModel,
    sharding: Mapping[str, Any] | None = None,
) -> Budget:
    with torch.device("meta"):
        shapes = shapes_of_module(Transformer(SIZES[size]))
    return plan(
        shapes,
        lambda params, sharding: ShardedAdamW(params, lr=LR, sharding=sharding),
        world_size=comm.world_size,
        device=device.type,
        sharding=ShardConfig.of(sharding),
        progress=progress,
    )


OPTIONS: dict[str, dict[str, Any]] = {
    "stage 2": {"stage": 2},
    "overlap": {"overlap_grad_sync": True, "overlap_param_sync": True},
    "clip": {"clip_grad_norm": 1.0},
    "8-bit gradients": {"grad_sync_bits": 8},
    "8 and 4 bits": {"grad_sync_bits": 8, "param_sync_bits": 4},
}
"""Sharding options under which a step should not wait for the device."""

SetMode = Callable[[str], None]


def host_synchronization(
    comm: Communicator, device: torch.device, *, size: str, set_mode: SetMode | None = None
) -> Finding:
    """A step never waits for the device: the host runs ahead, and the device does not idle.

    Where gradients leave during backward, it may wait once: for the ranks' agreement on which of
    them came late.

    Args:
        set_mode: makes such a wait a warning; None: the device's own.
    """
    set_mode = set_mode or _sync_debug_mode(device)
    if set_mode is None:
        return Finding("", "not run", f"{device.type} has no set_sync_debug_mode()")
    waits, allowed = _waits(comm, device, size, {}, set_mode)
    values = {"waits": waits, "allowed": allowed}
    if sum(waits.values()) > allowed:
        text = f"a step waits for the device, {_shown(waits)}; {allowed} allowed"
        return Finding("", "failed", text, "Report this where the place is in shardfuse.", values)
    return Finding("", "ok", "forward, backward and step leave the host ahead", values=values)


def host_waits_by_option(
    comm: Communicator, device: torch.device, *, size: str, set_mode: SetMode | None = None
) -> Finding:
    """The same for stage 2, overlap, a clip, 8 and 4 bits."""
    set_mode = set_mode or _sync_debug_mode(device)
    if set_mode is None:
        return Finding("", "not run", f"{device.type} has no set_sync_debug_mode()")
    found = {
        name: _waits(comm, device, size, sharding, set_mode) for name, sharding in OPTIONS.items()
    }
    values = {name: {"waits": waits, "allowed": most} for name, (waits, most) in found.items()}
    slow = {name: waits for name, (waits, most) in found.items() if sum(waits.values()) > most}
    if not slow:
        return Finding("", "ok", f"{', '.join(found)} leave the host ahead", values=values)
    text = "; ".join(f"{name} waits for the device, {_shown(w)}" for name, w in slow.items())
    remedy = "Leave these options out where steps are short, and report the places in shardfuse."
    return Finding("", "warning", text, remedy, values)


def params_in_flight(comm: Communicator, device: torch.device, *, size: str) -> Finding:
    """Where params overlap by default, step() leaves them in flight, and forward waits for each.

    step() waits for all of them where it counts more references to a storage than at construction:
    code of the user may have made views. A queue of kernels must not count as such code.
    """
    training, optimizer = sharded(device, size, bucket_cap_mb=bucket_mib(size))
    progress = optimizer.communicator.async_model
    if not _planned(comm, device, size, progress).overlaps[1]:
        return Finding("", "not run", "params do not overlap by default here")
    numbers = []
    for step in range(_WARM_UP + _NUM_COUNTED):
        training.step(batch_of(comm, device, size, step))
        numbers.append(sum(type(param) is PendingParam for param in training.model.parameters()))
    training.finish()
    num_steps = sum(number > 0 for number in numbers[_WARM_UP:])
    values = {"params_in_flight": numbers}
    text = f"step() left params in flight in {num_steps} of {_NUM_COUNTED} steps"
    if num_steps == _NUM_COUNTED:
        return Finding("", "ok", text, values=values)
    return Finding("", "warning", text, "Report this: the others waited for all of them.", values)


def _sync_debug_mode(device: torch.device) -> SetMode | None:
    return getattr(torch.get_device_module(device), "set_sync_debug_mode", None)


def _waits(
    comm: Communicator,
    device: torch.device,
    size: str,
    sharding: Mapping[str, Any],
    set_mode: SetMode,
) -> tuple[dict[str, int], int]:
    """Return the host's waits in a step of a few buckets by place, and how many there may be."""
    sharding = {"bucket_cap_mb": bucket_mib(size), **sharding}
    training, optimizer = sharded(device, size, **sharding)
    for step in range(_WARM_UP):
        training.step(batch_of(comm, device, size, step))
    training.finish()
    batch = batch_of(comm, device, size, _WARM_UP)
    with _noted_waits(set_mode) as places:
        training.step(batch)
        optimizer.zero_grad()
    training.finish()
    progress = optimizer.communicator.async_model
    planned = _planned(comm, device, size, progress, sharding)
    return dict(Counter(places)), int(planned.overlaps[0])


@contextmanager
def _noted_waits(set_mode: SetMode) -> Iterator[list[str]]:
    """Yield a list that has, after the block, the place of each wait for the device in it.

    Waits warn and do not raise: ranks that stop in the middle of a step would break the group.
    """
    places: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        set_mode("warn")
        try:
            yield places
        finally:
            set_mode("default")
    for warning in caught:
        text = str(warning.message)
        if "called a synchronizing" in text:
            places.append(f"{Path(warning.filename).name}:{warning.lineno}")


def _shown(waits: Mapping[str, int]) -> str:
    places = ", ".join(f"{place} ({number})" for place, number in list(waits.items())[:3])
    return f"{sum(waits.values())} times, at {places}"


def against_ddp(comm: Communicator, device: torch.device, *, size: str, repeats: int) -> Finding:
    """The time of a training step, as a ratio to DDP with torch's fused AdamW; and the same losses.

    The host waits for the device after ``repeats`` steps only, so the device's time counts as long
    as the host runs ahead of it.
    """
    if comm.world_size == 1:
        return Finding("", "not run", "one rank: there is nothing to shard")
    ways = {"shardfuse": sharded(device, size)[0], "DDP": replicated(comm, device, size)}
    batch = batch_of(comm, device, size, 0)
    first, last = {}, {}
    times: dict[str, list[float]] = {name: [] for name in ways}
    for name, training in ways.items():
        first[name] = float(training.step(batch))
        for _ in range(_WARM_UP):
            training.step(batch)
    for _ in range(_ROUNDS):
        for name, training in ways.items():
            ms = mean_ms(functools.partial(training.step, batch), repeats, device)
            times[name].append(ms)
    for name, training in ways.items():
        last[name] = float(training.step(batch))
    ways["shardfuse"].finish()
    own, other = median(times["shardfuse"]), median(times["DDP"])
    values: dict[str, Any] = {"shardfuse_ms": own, "ddp_ms": other, "ratio": own / other}
    values |= {"first_losses": first, "last_losses": last}
    if not abs(last["shardfuse"] - last["DDP"]) <= _LOSS_ERROR * abs(first["DDP"] - last["DDP"]):
        text = f"a loss of {last['shardfuse']:.4f} where DDP has {last['DDP']:.4f}"
        return Finding("", "failed", text, "Look at the rows of kernels and options.", values)
    text = f"{own:.2f} ms, DDP with fused AdamW {other:.2f} ms: {own / other:.2f}"
    if own <= _SETTLED * other:
        return Finding("", "ok", text, values=values)
    remedy = (
        "See the rows of bucket sizes and of host waits, look at the trace for gaps, and try "
        "ShardConfig(overlap_grad_sync=True, overlap_param_sync=True)."
    )
    return Finding("", "warning", text, remedy, values)
