"""How the cost of a step grows: with ranks, with the number of tensors, with parameters."""

from __future__ import annotations

from collections.abc import Iterator

from launch.bench import bench_step
from launch.bench.options import Options, Row, interleaved

WORLDS = (1, 2, 4, 8)
TENSORS = (10, 100, 1000, 10_000)
NUMELS = (1 << 20, 8 << 20, 32 << 20, 110 << 20, 200 << 20)
EQUAL_NUMEL = 32 << 20
ROUNDS = 3
RULES = ("adam", "lamb")
_COUNT = 200

Point = tuple[str, str, str, int]
"""(axis, method, shapes, world size)."""


def points(quick: bool) -> list[Point]:
    """Return what is measured along each axis, everything else held."""
    numel = 1 << 16 if quick else EQUAL_NUMEL
    worlds, tensors, numels = WORLDS, TENSORS, NUMELS
    if quick:
        worlds, tensors, numels = (1, 2), (10, 100), (1 << 16,)
    found: list[Point] = []
    for rule in RULES[: 1 if quick else None]:
        method = f"shardfuse {rule}"
        found += [("world size", method, f"{_COUNT}x{numel}", world) for world in worlds]
        found += [("tensors", method, f"{count}x{numel}", 2) for count in tensors]
    method = f"shardfuse {RULES[0]}"
    found += [("parameters", method, f"{_COUNT}x{size}", 2) for size in numels]
    return found


def run(options: Options) -> Iterator[Row]:
    """Yield a row per launch of every point."""
    chosen = [point for point in points(options.quick) if options.wants(point[0])]
    for index, (axis, method, blocks, world) in interleaved(chosen, options.num_rounds(ROUNDS)):
        yield {"axis": axis, **bench_step.launch(method, blocks, world, index, options)}
