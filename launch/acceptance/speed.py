"""Checks of the update and of backward alone: bandwidth, bucket sizes, and replays of a graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from launch.acceptance.model import batch_of, sharded
from launch.acceptance.timing import mean_ms
from launch.bench.bench_update import BYTES
from launch.bench.ours import RULES
from launch.bench.shapes import equal_tensors
from launch.bench.synthetic import Model
from launch.bench.timing import median
from shardfuse import ShardedAdamW
from shardfuse.comm import Communicator
from shardfuse.doctor import Finding

GOALS = {"cuda": 0.9}
"""Share of the copy bandwidth that an update is to reach, by kind of device; others have none."""

_WARM_UP = 3
_ROUNDS = 3
_COPY_BYTES = 8
_TENSORS = 64

Capture = Callable[[Callable[[], object]], Callable[[], object]]
"""Takes what is to be captured; returns what replays it."""


def against_copy(
    comm: Communicator, device: torch.device, *, numel: int, repeats: int, kernel: str
) -> Finding:
    """The bytes per second of an update by one rank alone, as a share of a copy's.

    Args:
        numel: of the parameters, in 64 tensors.
        kernel: as of ShardConfig.
    """
    shares, rates = {}, {"copy": _copy_rate(device, numel, repeats)}
    for rule in ("adam", "lamb"):
        model = Model(equal_tensors(_TENSORS, numel), 0, device)
        cls, arguments = RULES[rule]
        sharding = {"process_group": "alone", "kernel": kernel}
        optimizer = cls(model.named_parameters(), **arguments, sharding=sharding)
        model.run_backward(model, 0)
        ms = _median_ms(optimizer.step, device, repeats)
        rates[rule] = BYTES[rule] * numel / ms / 1e6
        shares[rule] = rates[rule] / rates["copy"]
    goal = GOALS.get(device.type)
    text = ", ".join(f"{rule} {share:.2f}" for rule, share in shares.items())
    text += f" of a copy's {rates['copy']:.0f} GB/s"
    values = {"shares": shares, "gb_per_s": rates, "goal": goal, "kernel": kernel}
    if goal is None:
        return Finding("", "ok", f"{text}; no goal for {device.type}", values=values)
    if min(shares.values()) >= goal:
        return Finding("", "ok", f"{text}; goal {goal}", values=values)
    return Finding("", "warning", f"{text}; goal {goal}", "Try the other kernel.", values)


def _copy_rate(device: torch.device, numel: int, repeats: int) -> float:
    source = torch.ones(numel, device=device)
    target = torch.empty_like(source)
    return _COPY_BYTES * numel / _median_ms(lambda: target.copy_(source), device, repeats) / 1e6


def _median_ms(run: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Return the time of a run, of the median round of ``repeats`` in a row.

    The host waits after a round only. So it is the device's time, unless the host takes longer.
    """
    for _ in range(_WARM_UP):
        run()
    return median([mean_ms(run, repeats, device) for _ in range(_ROUNDS)])


def bucket_sizes(
    comm: Communicator,
    device: torch.device,
    *,
    caps: Sequence[float],
    numel: int,
    repeats: int,
    kernel: str,
) -> Finding:
    """The time of step() by bucket size, for one to be set; all must make the same parameters.

    Args:
        caps: sizes in MiB that are measured beside "auto".
        numel: of the parameters, in 64 tensors.
        kernel: as of ShardConfig.
    """
    if comm.world_size == 1:
        return Finding("", "not run", "one rank sends nothing")
    times: dict[str, float] = {}
    first: list[torch.Tensor] = []
    for cap in ("auto", *caps):
        model = Model(equal_tensors(_TENSORS, numel), comm.rank, device)
        sharding = {"bucket_cap_mb": cap, "kernel": kernel, "consolidate_every": 0}
        optimizer = ShardedAdamW(model.named_parameters(), lr=1e-3, sharding=sharding)
        model.run_backward(model, 0)
        times[str(cap)] = _median_ms(optimizer.step, device, repeats)
        optimizer.synchronize()
        params = [param.detach() for param in model.parameters()]
        first = first or [param.clone() for param in params]
        off = max(float((a - b).abs().max()) for a, b in zip(params, first, strict=True))
        if not off <= _BUCKETS_ERROR:
            text = f"parameters with buckets of {cap} MiB differ by {off:.1e} from those of auto"
            return Finding("", "failed", text, "Report this: sizes change no sums.", times)
        del model, optimizer, params
    best = min(times, key=times.__getitem__)
    shown = ", ".join(f"{cap} {ms:.2f}" for cap, ms in times.items())
    text = f"ms of step() by MiB: {shown}; the best: {best}"
    return Finding("", "ok", text, values={"ms": times, "best": best})


_BUCKETS_ERROR = 1e-5


def forward_backward_graph(
    comm: Communicator, device: torch.device, *, size: str, capture: Capture | None = None
) -> Finding:
    """Forward and backward are captured once; replays with eager steps between are a training.

    Stage 1 without overlap: a replay calls no hook of autograd, so no gradient leaves in it.

    Args:
        capture: None: by a CUDA graph.
    """
    if capture is None and device.type != "cuda":
        return Finding("", "not run", f"{device.type} has no CUDA graphs")
    off = {"overlap_grad_sync": False, "overlap_param_sync": False}
    (own, optimizer), (other, twin) = (sharded(device, size, **off) for _ in range(2))
    start = _flat(twin)
    batch = batch_of(comm, device, size, 0)  # a graph reads it where it lies
    for training in (own, other):
        for _ in range(_WARM_UP):
            training.backward(batch, set_to_none=False)
            training.optimizer.step()
    try:
        replay = (capture or _cuda_capture)(lambda: own.backward(batch, set_to_none=False))
        for step in range(1, _REPLAYS + 1):
            batch.copy_(batch_of(comm, device, size, step))
            replay()
            optimizer.step()
            other.step(batch)
    except RuntimeError as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0][:160]
        text = f"forward and backward cannot be captured: {reason}"
        return Finding("", "failed", text, "Train without CUDA graphs, and report this.")
    moved = float((_flat(twin) - start).norm())
    difference = float((_flat(optimizer) - _flat(twin)).norm()) / moved
    values = {"error": difference, "replays": _REPLAYS}
    if difference <= _GRAPH_ERROR:
        text = f"{_REPLAYS} replays, with steps between, make the same training within "
        text += f"{difference:.0e}"
        return Finding("", "ok", text, values=values)
    text = f"replays make other gradients: params differ by {difference:.1e} of their way"
    return Finding("", "failed", text, "Train without CUDA graphs, and report this.", values)


_REPLAYS = 3
_GRAPH_ERROR = 0.05
"""Share of the way of all parameters: atomics of backward may add up in another order."""


def _flat(optimizer: ShardedAdamW) -> torch.Tensor:
    """Return a copy of all parameters."""
    optimizer.synchronize()
    params = [param for group in optimizer.param_groups for param in group["params"]]
    return torch.cat([param.detach().flatten() for param in params])


def _cuda_capture(backward: Callable[[], object]) -> Callable[[], object]:
    graph: Any = torch.cuda.CUDAGraph()  # not run on hardware
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # as torch's documents warm up
        for _ in range(_WARM_UP):
            backward()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        backward()
    return graph.replay
