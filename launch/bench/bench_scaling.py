"""How the cost of a step grows: with ranks, with the number of tensors, with parameters."""

from __future__ import annotations

from collections.abc import Iterator

from launch.bench import bench_step
from launch.bench.options import Options, Row, interleaved

WORLDS = (1, 2, 4, 8)
TENSORS = (10, 100, 1000, 10_000)
NUMELS = (1 << 20, 8 << 20, 32 << 20, 200 << 20)
EQUAL_NUMEL = 32 << 20
ROUNDS = {"world size": 1, "tensors": 3, "parameters": 1}
"""Launches of each point: three where there is a bound to be reached."""

RULES = ("adam", "lamb")
_COUNT = 200

Point = tuple[str, str, str, int]
"""(axis, method, shapes, world size)."""


def points(quick: bool) -> list[Point]:
    """Return what is measured along each axis, everything else held."""
    numel = 1 << 16 if quick else EQUAL_NUMEL
    worlds = (1, 2) if quick else WORLDS
    tensors = (10, 100) if quick else TENSORS
    numels = (1 << 16,) if quick else NUMELS
    found: list[Point] = []
    for rule in RULES[: 1 if quick else None]:
        # The two ends have to be near each other; the first rule shows what is between.
        ends = (tensors[0], tensors[-1])
        counts = tensors if rule == RULES[0] else ends
        found += [("tensors", f"shardfuse {rule}", f"{count}x{numel}", 2) for count in counts]
        trained = f"shardfuse {rule}, after backward"
        found += [("tensors", trained, f"{count}x{numel}", 2) for count in ends]
    adam = f"shardfuse {RULES[0]}"
    found += [("world size", adam, f"{_COUNT}x{numel}", world) for world in worlds]
    found += [("parameters", adam, f"{_COUNT}x{size}", 2) for size in numels]
    return found


def run(options: Options) -> Iterator[Row]:
    """Yield a row per launch of every point."""
    chosen = [point for point in points(options.quick) if options.wants(point[0])]
    for index, point in interleaved(chosen, options.num_rounds(max(ROUNDS.values()))):
        axis, method, blocks, world = point
        if index < options.num_rounds(ROUNDS[axis]):
            row = bench_step.launch(method, blocks, world, index, options, rehearse=False)
            # Memory is the step part's: here it would hold the compiler.
            row.pop("peak_p", None)
            yield {"axis": axis, **row}
