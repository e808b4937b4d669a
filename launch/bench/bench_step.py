"""A whole optimizer step, gradients to parameters, against every peer.

One launch measures one method: its own processes, its own peak memory. Launches of all methods are
shuffled within a round. Within a launch, steps alternate with an all-reduce of as many floats, the
unit that results are given in: both see the same state of the machine.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from launch.bench import engines, ours, peers, shapes
from launch.bench.drivers import Driver, Method
from launch.bench.environment import version_of
from launch.bench.launches import LaunchError, run_ranks
from launch.bench.options import Options, Row, interleaved
from launch.bench.references import expected_values, largest_error
from launch.bench.shapes import Shape
from launch.bench.synthetic import Model, initial_values
from launch.bench.timing import (
    PeakMemory,
    bytes_written,
    median,
    return_free_memory,
    time_ms,
)
from shardfuse.engine.kernels import COMPILE_MIN_NUMEL

COMPARED = [*ours.METHODS, *peers.METHODS, *engines.METHODS]
METHODS = {method.name: method for method in [*COMPARED, *ours.FOR_SCALING]}
WARM_UP = 2
ROUNDS = 3
STEPS = 6
TOLERANCE = 1e-3
"""Of the largest movement; a wrong mean, rule or step count gives 0.1 or more."""

_TINY: list[list[Shape]] = [[(256, 16), (16,)], [(64, 32)]]
_CPU = torch.device("cpu")


def measure(method: str, blocks: str, num_steps: int, *, check: bool) -> Row:
    """Run on every rank of a launch: return times, bytes and, with ``check``, the error.

    Raises:
        AssertionError: the ranks' parameters differ, or they are not what they should be.
    """
    chosen = METHODS[method]
    rank, world_size = _rank_and_world()
    layout = shapes.named(blocks)
    is_small = shapes.numel_of(layout) // world_size < COMPILE_MIN_NUMEL
    _train(chosen, chosen.build if is_small else chosen.rehearse or chosen.build, rank)
    memory = PeakMemory()
    model = Model(layout, rank, _CPU)
    backward_ms = _backward_ms(model) if chosen.has_backward else 0.0
    driver = chosen.build(model)
    _warm_up(driver)
    peak_nbytes = memory.nbytes()
    (times,) = _timed_steps([driver], shapes.numel_of(layout), num_steps)
    result = _result(chosen, driver, layout, times, check=check)
    return {**result, "backward_ms": backward_ms, "peak_nbytes": peak_nbytes}


def measure_together(
    method: str, blocks: Sequence[str], num_steps: int, *, check: bool
) -> list[Row]:
    """As measure(), for models of several shapes and equal size whose steps take turns.

    All of them see the same state of the machine, so that their times can be compared.
    """
    chosen = METHODS[method]
    rank, _ = _rank_and_world()
    layouts = [shapes.named(name) for name in blocks]
    drivers = [chosen.build(Model(layout, rank, _CPU)) for layout in layouts]
    for driver in drivers:
        _warm_up(driver)
    found = _timed_steps(drivers, shapes.numel_of(layouts[0]), num_steps)
    return [
        _result(chosen, driver, layout, times, check=check)
        for driver, layout, times in zip(drivers, layouts, found, strict=True)
    ]


def _warm_up(driver: Driver) -> None:
    for step in range(WARM_UP):
        driver.prepare(step)
        driver.step()


def _result(
    method: Method, driver: Driver, layout: list[list[Shape]], times: Row, *, check: bool
) -> Row:
    """Return what one driver's steps gave, after the check that they were right."""
    result = {**times, "numel": shapes.numel_of(layout), "state_nbytes": driver.state_nbytes()}
    result["tensors"] = sum(len(block) for block in layout)
    _check_ranks_agree(driver, method.name)
    if check:
        result["error"] = _error(driver, method, layout, WARM_UP + len(times["step_ms"]))
    return result


def _rank_and_world() -> tuple[int, int]:
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def _train(method: Method, build: Any, rank: int) -> None:
    """Import and compile what the method needs: not its memory, and not its step."""
    model = Model(_TINY, rank, _CPU)
    driver = build(model)
    for step in range(2):
        driver.prepare(step)
        driver.step()
    del driver, model
    gc.collect()


def _backward_ms(model: Model) -> float:
    """Return the time of forward and backward without an optimizer or a wrapper."""
    times = []
    for step in range(1 + STEPS):
        times.append(time_ms(functools.partial(model.run_backward, model, step)))
        for param in model.parameters():
            param.grad = None
    return_free_memory()  # what is kept for later gradients is not the method's
    return median(times[1:])


def _timed_steps(drivers: Sequence[Driver], numel: int, num_steps: int) -> list[Row]:
    """Return each driver's times of steps and of all-reduces, and the bytes sent, by step."""
    world_size = _rank_and_world()[1]
    buffer = torch.zeros(numel) if world_size > 1 else torch.zeros(1)
    if world_size > 1:
        dist.all_reduce(buffer)
    found: list[Row] = [{"step_ms": [], "all_reduce_ms": [], "sent_nbytes": []} for _ in drivers]
    for step in range(WARM_UP, WARM_UP + num_steps):
        for driver, times in zip(drivers, found, strict=True):
            driver.prepare(step)
            _barrier()
            before = bytes_written()
            times["step_ms"].append(time_ms(driver.step))
            times["sent_nbytes"].append(bytes_written() - before)
            if world_size > 1:
                _barrier()
                times["all_reduce_ms"].append(time_ms(lambda: dist.all_reduce(buffer)))
    return found


def _barrier() -> None:
    if dist.is_initialized():
        dist.barrier()


def _check_ranks_agree(driver: Driver, method: str) -> None:
    """Compare every parameter with rank 0's, bit for bit, and fail on all ranks alike."""
    if not dist.is_initialized():
        return
    differs = torch.zeros(1)
    for value in driver.values():
        other = value.clone()
        dist.broadcast(other, 0)
        differs += float(not torch.equal(other, value))
    dist.all_reduce(differs)
    assert differs == 0, f"{method}: ranks ended with different parameters"


def _error(driver: Driver, method: Method, layout: list[list[Shape]], num_steps: int) -> float:
    """Return the largest error against the unsharded reference; rank 0 computes it."""
    values = driver.values()
    rank, world_size = _rank_and_world()
    if rank > 0:
        return 0.0
    expected = expected_values(method.reference, layout, num_steps, world_size, _CPU)
    error = largest_error(values, expected, initial_values(layout, _CPU))
    assert error < TOLERANCE, f"{method.name}: off by {error:.1e} of the largest movement"
    return error


def combine(ranks: list[Row]) -> Row:
    """Return one launch's row from what its ranks measured: the slowest rank of every step."""
    first = ranks[0]
    param_nbytes = 4 * first["numel"]
    slowest = {
        key: median([max(values) for values in zip(*(r[key] for r in ranks), strict=True)] or [0.0])
        for key in ("step_ms", "all_reduce_ms", "sent_nbytes")
    }
    backward_ms = max(rank.get("backward_ms", 0.0) for rank in ranks)
    step_ms = slowest["step_ms"] - backward_ms
    all_reduce_ms = slowest["all_reduce_ms"]
    row = {
        "tensors": first["tensors"],
        "numel": first["numel"],
        "step_ms": round(step_ms, 3),
        "all_reduce_ms": round(all_reduce_ms, 3),
        "ratio": round(step_ms / all_reduce_ms, 4) if all_reduce_ms else "",
        "backward_ms": round(backward_ms, 3),
        "state_p": round(max(rank["state_nbytes"] for rank in ranks) / param_nbytes, 3),
        "sent_p": round(slowest["sent_nbytes"] / param_nbytes, 4),
        "error": f"{first['error']:.1e}" if "error" in first else "",
    }
    if "peak_nbytes" in first:
        row["peak_p"] = round(max(rank["peak_nbytes"] for rank in ranks) / param_nbytes, 3)
    return row


def launch(method: str, blocks: str, world_size: int, index: int, options: Options) -> Row:
    """Launch one method once; return its row, with a note in place of numbers if it failed."""
    package = METHODS[method].package
    if package is not None and version_of(package) is None:
        return {**_facts(method, blocks, world_size, index), "note": "not installed"}
    arguments = {"method": method, "blocks": blocks, **_arguments(index, options)}
    try:
        ranks = run_ranks("launch.bench.bench_step:measure", arguments, world_size=world_size)
    except LaunchError as error:
        print(error, flush=True)
        return {**_facts(method, blocks, world_size, index), "note": "failed"}
    return {**_facts(method, blocks, world_size, index), **combine(ranks)}


def launch_together(
    method: str, blocks: Sequence[str], world_size: int, index: int, options: Options
) -> list[Row]:
    """As launch(), for measure_together(); return a row for each of ``blocks``."""
    rows = [_facts(method, name, world_size, index) for name in blocks]
    arguments = {"method": method, "blocks": list(blocks), **_arguments(index, options)}
    target = "launch.bench.bench_step:measure_together"
    try:
        ranks = run_ranks(target, arguments, world_size=world_size)
    except LaunchError as error:
        print(error, flush=True)
        return [{**row, "note": "failed"} for row in rows]
    return [
        {**row, **combine(list(found))}
        for row, found in zip(rows, zip(*ranks, strict=True), strict=True)
    ]


def _facts(method: str, blocks: str, world_size: int, index: int) -> Row:
    return {
        "method": method,
        "family": METHODS[method].family,
        "shapes": blocks,
        "world_size": world_size,
        "round": index,
        "note": "",
    }


def _arguments(index: int, options: Options) -> Row:
    return {"num_steps": 3 if options.quick else STEPS, "check": index == 0}


def run(options: Options) -> Iterator[Row]:
    """Yield a row per launch: every method in every round."""
    blocks = "bert-tiny" if options.quick else "bert-base"
    names = [method.name for method in COMPARED if options.wants(method.name)]
    for index, name in interleaved(names, options.num_rounds(ROUNDS)):
        yield launch(name, blocks, 2, index, options)
