"""What a rank does when, in one step between two hosts and the forward pass after it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from launch.bench.hosts import Hosts, reason_unavailable
from launch.bench.launches import LaunchError, run_ranks
from launch.bench.options import Options, Row
from launch.bench.training import ADAM, built
from launch.bench.transformer import SIZES, make_batch

RATE = "1gbit"
WARM_UP = 3
LANES = {
    "train::forward": "forward",
    "train::backward": "backward",
    "train::step": "step",
    "shardfuse::reduce_scatter": "launch reduce-scatter",
    "shardfuse::all_gather": "launch all-gather",
    "shardfuse::wait": "wait",
}
"""Beginnings of the profiler's names, and the lane of a picture that such a range is in."""


def measure(method: str, size: str) -> list[Row]:
    """Run on every rank: return rank 0's ranges of the last step and the next forward."""
    training = built(method, size)
    batches = [make_batch(SIZES[size], step, dist.get_rank()) for step in range(WARM_UP + 3)]
    for batch in batches[:WARM_UP]:
        training.step(batch)
    if dist.get_rank() > 0:
        for batch in batches[WARM_UP:]:
            training.step(batch)
        training.finish()
        return []
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        for batch in batches[WARM_UP:]:
            training.step(batch)
        training.finish()
    return ranges(profiler.events() or [])


def ranges(events: Sequence[Any]) -> list[Row]:
    """Return the named ranges from the second forward to the end of the third, in ms."""
    named = sorted(
        (event.time_range.start, event.time_range.end, event.name)
        for event in events
        if lane_of(event.name) is not None
    )
    forwards = [(start, end) for start, end, name in named if name == "train::forward"]
    (begin, _), (_, stop) = forwards[1:3]
    return [
        {
            "lane": lane_of(name),
            "name": name,
            "start_ms": round((start - begin) / 1e3, 3),
            "ms": round((end - start) / 1e3, 3),
        }
        for start, end, name in named
        if begin <= start <= stop
    ]


def lane_of(name: str) -> str | None:
    """Return the lane of a range; None for what is not drawn."""
    return next((lane for prefix, lane in LANES.items() if name.startswith(prefix)), None)


def run(options: Options) -> Iterator[Row]:
    """Yield a row per range of shardfuse's Adam."""
    reason = reason_unavailable()
    if reason is not None:
        yield {"method": ADAM, "note": f"not measured: {reason}"}
        return
    arguments = {"method": ADAM, "size": "tiny" if options.quick else "33M"}
    try:
        with Hosts(2, RATE) as hosts:
            found = run_ranks("launch.bench.trace:measure", arguments, world_size=2, hosts=hosts)
    except LaunchError as error:
        print(error, flush=True)
        yield {"method": ADAM, "note": "failed"}
        return
    for row in found[0]:
        yield {"method": ADAM, "rate": RATE, **row, "note": ""}
