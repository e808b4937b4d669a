"""One rank's update alone, on one thread or one accelerator, against the memory bandwidth.

Rates count the bytes that must move per fp32 element, read and written once: parameter, gradient,
states. The bandwidth is that of a = b + s * c in the same process, alternating with the steps. As
STREAM does, it leaves out that a's cache lines are read before they are written: an update, which
has read what it writes, may come to more than 1.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from launch.bench import ours
from launch.bench.drivers import LR
from launch.bench.launches import LaunchError, run_ranks
from launch.bench.options import Options, Row, interleaved, resolve_device
from launch.bench.references import NpuLamb
from launch.bench.shapes import equal_tensors
from launch.bench.synthetic import Model
from launch.bench.timing import median, time_ms

BYTES = {"sgd": 20, "adam": 28, "adamw": 28, "bertadam": 32, "lamb": 40}
"""Per fp32 element. BertAdam's 32: its clipping reads the gradient once more. LAMB's 40: the
direction is written, and read again with the parameter once all norms are known."""

TRIAD_BYTES = 12
NUMEL = 32 << 20
TENSORS = 64
ROUNDS = 3
REPEATS = 10
_WARM_UP = 3


@dataclass(frozen=True)
class Update:
    """One row: an optimizer in one process."""

    name: str
    family: str
    make: Callable[[Model], Any]


def _ours(rule: str, kernel: str, model: Model) -> Any:
    cls, arguments = ours.RULES[rule]
    return cls(model.named_parameters(), **arguments, sharding={"kernel": kernel})


def _torch(cls: Any, arguments: dict[str, Any], model: Model) -> Any:
    return cls(list(model.parameters()), lr=LR, **arguments)


def _updates() -> list[Update]:
    rows = [
        Update(f"shardfuse {rule}, {kernel}", rule, functools.partial(_ours, rule, kernel))
        for rule in ours.RULES
        for kernel in ("compile", "eager")
    ]
    ways: dict[str, dict[str, Any]] = {
        "single": {"foreach": False},
        "foreach": {"foreach": True},
        "fused": {"fused": True},
    }
    for way, arguments in ways.items():
        adam = functools.partial(_torch, torch.optim.Adam, arguments)
        rows.append(Update(f"torch Adam, {way}", "adam", adam))
    fused = ways["fused"]
    sgd = functools.partial(_torch, torch.optim.SGD, {**fused, "momentum": 0.9})
    rows.append(Update("torch SGD, fused", "sgd", sgd))
    adamw = functools.partial(_torch, torch.optim.AdamW, fused)
    rows.append(Update("torch AdamW, fused", "adamw", adamw))
    npu = functools.partial(_torch, NpuLamb, {"weight_decay": 0.01})
    rows.append(Update("NpuFusedLamb algorithm", "lamb", npu))
    return rows


UPDATES = {update.name: update for update in _updates()}


class Triad:
    """a = b + 3 * c over three arrays, as torch runs it and compiled."""

    def __init__(self, numel: int, device: torch.device, *, compiled: bool) -> None:
        a, b, c = (torch.full((numel,), float(i), device=device) for i in range(3))
        self._nbytes = TRIAD_BYTES * numel
        self._device = device
        self._ways: list[Callable[[], object]] = [lambda: torch.add(b, c, alpha=3.0, out=a)]
        if compiled:
            fused = torch.compile(_triad)
            self._ways.append(lambda: fused(a, b, c))
        self._times: list[list[float]] = [[] for _ in self._ways]
        for way in self._ways:
            way()

    def sample(self) -> None:
        """Time each way once."""
        for way, times in zip(self._ways, self._times, strict=True):
            times.append(time_ms(way, self._device))

    def take_gb_per_s(self) -> float:
        """Return the rate of the faster way, by the median of its samples, and forget these."""
        best_ms = min(median(times) for times in self._times)
        for times in self._times:
            times.clear()
        return self._nbytes / best_ms / 1e6


def _triad(a: Tensor, b: Tensor, c: Tensor) -> None:
    a.copy_(b + 3.0 * c)


def measure(
    names: list[str], numel: int, repeats: int, device: str, compile_triad: bool
) -> dict[str, Any]:
    """Run in the one process of a launch: return each update's times and the triad's rate then."""
    where = resolve_device(device)
    triad = Triad(numel, where, compiled=compile_triad)
    times: dict[str, list[float]] = {}
    rates: dict[str, float] = {}
    for name in names:
        model = Model(equal_tensors(TENSORS, numel), 0, where)
        optimizer = UPDATES[name].make(model)
        # shardfuse's hooks move gradients in during backward: here as in training, before step().
        model.run_backward(model, 0)
        for _ in range(_WARM_UP):
            optimizer.step()
        times[name] = []
        for _ in range(repeats):
            times[name].append(time_ms(optimizer.step, where))
            triad.sample()
        rates[name] = triad.take_gb_per_s()
        assert all(bool(p.isfinite().all()) for p in model.parameters()), name
        del optimizer, model
    return {"times": times, "triad": rates}


def run(options: Options) -> Iterator[Row]:
    """Yield a row per update and launch; one launch has all updates, in shuffled order."""
    numel = 1 << 16 if options.quick else NUMEL
    names = [name for name in UPDATES if options.wants(name)]
    if options.quick:
        names = [name for name in names if not name.endswith("compile")]
    rounds = options.num_rounds(ROUNDS)
    order = list(interleaved(names, rounds))
    for index in range(rounds):
        arguments = {
            "names": [name for position, name in order if position == index],
            "numel": numel,
            "repeats": 3 if options.quick else REPEATS,
            "device": options.device,
            "compile_triad": not options.quick,
        }
        try:
            (result,) = run_ranks("launch.bench.bench_update:measure", arguments, world_size=1)
        except LaunchError as error:
            print(error, flush=True)
            yield from ({"method": name, "round": index, "note": "failed"} for name in names)
            continue
        for name in names:
            family = UPDATES[name].family
            step_ms = median(result["times"][name])
            rate = BYTES[family] * numel / step_ms / 1e6
            triad = result["triad"][name]
            yield {
                "method": name,
                "family": family,
                "numel": numel,
                "round": index,
                "step_ms": round(step_ms, 4),
                "gb_per_s": round(rate, 3),
                "triad_gb_per_s": round(triad, 3),
                "share": round(rate / triad, 4),
                "note": "",
            }
