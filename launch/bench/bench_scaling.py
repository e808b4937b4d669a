"""How the cost of a step grows: with ranks, with the number of tensors, with parameters."""

from __future__ import annotations

from collections.abc import Iterator

from launch.bench import bench_step
from launch.bench.options import Options, Row, interleaved

WORLDS = (1, 2, 4, 8)
TENSORS = (10, 100, 1000, 10_000)
NUMELS = (1 << 20, 8 << 20, 32 << 20, 200 << 20)
EQUAL_NUMEL = 32 << 20
ROUNDS = {"world size": 1, "tensors": 5, "parameters": 1}
"""Launches of each point: more where there is a bound to be reached."""

RULES = ("adam", "lamb")
_COUNT = 200

Point = tuple[str, str, tuple[str, ...], int]
"""(axis, method, shapes, world size): one launch, in which models of all shapes take turns."""


def points(quick: bool) -> list[Point]:
    """Return what is measured along each axis, everything else held."""
    numel = 1 << 16 if quick else EQUAL_NUMEL
    worlds = (1, 2) if quick else WORLDS
    tensors = (10, 100) if quick else TENSORS
    numels = (1 << 16,) if quick else NUMELS
    found: list[Point] = []
    for rule in RULES[: 1 if quick else None]:
        # The two ends have to be near each other; the first rule shows what is between.
        counts = tensors if rule == RULES[0] else (tensors[0], tensors[-1])
        shapes = tuple(f"{count}x{numel}" for count in counts)
        found.append(("tensors", f"shardfuse {rule}", shapes, 2))
        for grads in ("after backward", "first one first"):
            found.append(("tensors", f"shardfuse {rule}, {grads}", (shapes[0], shapes[-1]), 2))
    adam = f"shardfuse {RULES[0]}"
    found += [("world size", adam, (f"{_COUNT}x{numel}",), world) for world in worlds]
    found += [("parameters", adam, (f"{_COUNT}x{size}",), 2) for size in numels]
    return found


def run(options: Options) -> Iterator[Row]:
    """Yield a row per launch of every point."""
    chosen = [p for p in points(options.quick) if options.wants(f"{p[0]}, {p[1]}")]
    for index, point in interleaved(chosen, options.num_rounds(max(ROUNDS.values()))):
        axis, method, shapes, world = point
        if index < options.num_rounds(ROUNDS[axis]):
            for row in bench_step.launch_together(method, shapes, world, index, options):
                yield {"axis": axis, **row}
