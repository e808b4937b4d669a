"""Checks of the update alone: its share of the memory's bandwidth, and whether it is one graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from launch.bench.bench_update import BYTES
from launch.bench.ours import RULES
from launch.bench.shapes import equal_tensors
from launch.bench.synthetic import Model
from launch.bench.timing import median, time_ms
from shardfuse import ShardedAdamW
from shardfuse.comm import Communicator
from shardfuse.doctor import Finding

GOALS = {"cuda": 0.9}
"""Share of the copy bandwidth that an update is to reach, by kind of device; others have none."""

_WARM_UP = 3
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
    for _ in range(_WARM_UP):
        run()
    return median([time_ms(run, device) for _ in range(repeats)])


def as_a_graph(
    comm: Communicator, device: torch.device, *, capture: Capture | None = None
) -> Finding:
    """A whole step, collectives included, is captured once and replayed with the same results.

    Args:
        capture: None: by a CUDA graph.
    """
    if capture is None and device.type != "cuda":
        return Finding("", "not run", f"{device.type} has no CUDA graphs")
    own, reference = _Steps(device), _Steps(device)
    for steps in (own, reference):
        for _ in range(_WARM_UP):
            steps.run()
    try:
        replay = (capture or _cuda_capture)(own.run)
        is_equal = []
        for _ in range(2):
            replay()
            reference.run()
            is_equal.append(torch.equal(own.value(), reference.value()))
    except Exception as error:  # what capturing refuses has many types
        reason = (str(error).splitlines() or [type(error).__name__])[0][:160]
        return Finding("", "warning", f"not possible: {reason}", "Run steps one by one.")
    values = {"equal": is_equal}
    if all(is_equal):
        return Finding("", "ok", "two replays make the steps of the optimizer", values=values)
    text = "not possible: what a replay does differs from a step"
    if is_equal[0]:
        text = "not possible: a second replay repeats the first one's step count and learning rate"
    return Finding("", "warning", text, "Run steps one by one.", values)


def _cuda_capture(step: Callable[[], object]) -> Callable[[], object]:
    graph: Any = torch.cuda.CUDAGraph()  # not run on hardware
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        step()
    return graph.replay  # type: ignore[no-any-return]


class _Steps:
    """An optimizer that makes steps by one gradient."""

    def __init__(self, device: torch.device) -> None:
        self._param = nn.Parameter(torch.linspace(-1, 1, 4096, device=device))
        sharding = {"kernel": "eager", "consolidate_every": 0}
        self._optimizer = ShardedAdamW([self._param], lr=0.1, sharding=sharding)
        self._grad = torch.linspace(0.1, 1, 4096, device=device)

    def run(self) -> None:
        self._param.grad = self._grad
        self._optimizer.step()
        self._optimizer.synchronize()

    def value(self) -> torch.Tensor:
        return self._param.detach()
