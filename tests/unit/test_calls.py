"""What tells two ranks' calls apart, and what does not."""

from __future__ import annotations

import json
from typing import Any

from shardfuse.comm.regions import Region, compare

LR, OTHER_LR, TO = ("lr = 0.1",), ("lr = 0.2",), ("to = 0",)


def call(*parts: tuple[str, ...], name: str = "step()", ops: int = 0) -> list[dict[str, Any]]:
    """Return the calls of a rank that is in its first one, and has declared `parts` there."""
    made = Region(1, name)
    made.declare(())
    for lines in parts:
        made.declare(lines)
    made.ops += ["all_reduce of 1 float32"] * ops
    return [made.describe()]


def told(calls: list[dict[str, Any]]) -> Any:
    return json.loads(json.dumps(calls))


def test_a_rank_in_a_later_part_of_a_call_makes_the_same_call() -> None:
    """What it has told may be old, too: neither way round is a difference."""
    early, late = call(LR), call(LR, TO, ops=3)
    for mine, theirs in [(early, late), (late, early), (call(), late), (late, call())]:
        assert compare(0, mine, 1, told(theirs)) is None


def test_what_differs_is_found_in_any_part() -> None:
    """By both sides."""
    for mine, theirs in [(call(LR), call(OTHER_LR, TO)), (call(TO, LR), call(TO, OTHER_LR))]:
        found = compare(0, mine, 1, told(theirs))
        assert found is not None
        assert "rank 0 has lr = 0.1; rank 1 has lr = 0.2" in found
        assert compare(1, theirs, 0, told(mine)) == found


def test_other_collectives_are_found_where_parts_are_not_declared_yet() -> None:
    """The first one that is not the same is named."""
    mine = call(LR, ops=2)
    theirs = call(LR, TO, ops=2)
    theirs[0]["ops"][1] = "broadcast of 1 float32"
    found = compare(0, mine, 1, told(theirs))
    assert found is not None
    assert "collective 2 of rank 0 is all_reduce of 1 float32" in found
