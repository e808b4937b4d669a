"""Makes a failing program smaller: drops what it fails without."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace

from tests.fuzz.program import Program

Fails = Callable[[Program], bool]


def shrink(program: Program, fails: Fails, max_seconds: float = 90.0) -> Program:
    """Return a smaller program that fails too.

    Args:
        program: one that fails.
        fails: runs a program.
        max_seconds: when to stop looking for a smaller one.
    """
    begin = time.monotonic()
    improved = True
    while improved:
        improved = False
        for smaller in _smaller(program):
            if time.monotonic() - begin > max_seconds:
                return program
            if fails(smaller):
                program, improved = smaller, True
                break
    return program


def _smaller(program: Program) -> Iterator[Program]:
    """Yield programs with less in them, the smallest first."""
    num_ops = len(program.ops)
    size = num_ops // 2
    while size >= 1:
        for start in range(num_ops - size, -1, -size):
            yield replace(program, ops=program.ops[:start] + program.ops[start + size :])
        size //= 2
    for index, group in enumerate(program.groups):
        for position in range(len(group.specs)):
            specs = group.specs[:position] + group.specs[position + 1 :]
            if specs:
                changed = group._replace(specs=specs)
                groups = (*program.groups[:index], changed, *program.groups[index + 1 :])
                yield replace(program, groups=groups)
    if len(program.groups) > 1:
        yield replace(program, groups=program.groups[:-1])
    for key in program.sharding:
        if key not in ("grads_are_reduced", "report_overflow"):
            rest = {k: v for k, v in program.sharding.items() if k != key}
            yield replace(program, sharding=rest)
    for change in ({"own_group": False}, {"differs": False}, {"scaler": ""}):
        if any(getattr(program, key) != value for key, value in change.items()):
            yield replace(program, **change)
    if program.world > 2:
        yield replace(program, world=2)
