"""Growth: exponents, and what the count says of 4,096 ranks."""

from __future__ import annotations

import pytest

from launch.bench.bench_growth import (
    COUNTED,
    GROUPS,
    SIMULATED_RANKS,
    TENSORS,
    _targets,
    counted,
    exponent,
    laid_out,
    run,
    summary,
)
from launch.bench.options import Options, Row
from shardfuse import ShardedAdam, ShardedLamb
from shardfuse.layout import BLOCK


def test_exponents_are_slopes() -> None:
    assert exponent([(x, 3.0 * x**1.5) for x in (2, 8, 64)]) == pytest.approx(1.5)
    assert exponent([(x, 7.0) for x in (1, 10)]) == 0


def slope(rows: list[Row], column: str) -> float:
    return exponent([(row["x"], row[column]) for row in rows])


@pytest.mark.parametrize("build", [ShardedAdam, ShardedLamb])
def test_costs_of_a_rank_do_not_grow_with_ranks(build: type) -> None:
    """Bytes, memory and store requests are flat; messages grow less than ranks: buckets do."""
    rows = [counted("", build, world_size) for world_size in SIMULATED_RANKS]
    for column in ("sent_bytes", "memory_bytes", "store_requests_per_s"):
        assert slope(rows, column) <= 0.1, column
    assert slope(rows, "messages") <= 1.0
    assert rows[-1]["store_requests_per_s"] * SIMULATED_RANKS[-1] <= 20


def test_costs_are_linear_in_tensors() -> None:
    rows = [laid_out("tensors, counted", count, 1) for count in TENSORS]
    assert all(slope(rows, column) <= 1.0 for column in COUNTED[:3])


def test_a_group_costs_no_message_and_at_most_a_block() -> None:
    first, *others = [laid_out("groups, counted", 600, number) for number in GROUPS]
    assert {other["messages"] for other in others} == {first["messages"]}
    assert others[-1]["sent_bytes"] > first["sent_bytes"]  # else padding would not be seen
    for other in others:
        block = other["x"] * BLOCK * 4  # of parameters, which are sent and gathered
        assert other["sent_bytes"] - first["sent_bytes"] <= 2 * block * 7 / 8
        assert other["memory_bytes"] - first["memory_bytes"] <= 2 * block * 9 / 8


def test_a_target_is_judged_by_the_digits_that_are_shown() -> None:
    for slope_, shown, is_met in ((0.104, "0.10", True), (0.106, "0.11", False)):
        (target,) = _targets("ranks, counted", "Adam", "sent_bytes", slope_)
        assert (target.measured, target.is_met) == (shown, is_met)


def test_only_what_is_asked_for() -> None:
    options = Options(quick=True, only=("groups, counted",))
    assert [row["x"] for row in run(options)] == list(GROUPS)


def test_tables_have_an_exponent_of_each_cost() -> None:
    rows = [counted("Adam", ShardedAdam, world_size) for world_size in (2, 4)]
    found = summary(rows)
    assert [table.title for table in found.tables] == ["Over ranks, counted", "Exponents"]
    assert len(found.tables[-1].rows) == len(COUNTED)
    assert len(found.targets) == 3
