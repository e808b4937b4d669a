"""A rank's process is killed: every other rank raises, and names that rank and no other."""

from __future__ import annotations

import pytest

from tests.distributed.test_faults import SLOWNESS_S
from tests.faults.__main__ import COLLECTIVES
from tests.faults.runner import Setting, run
from tests.faults.table import FAULTS

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.cpu_only("where waits do not block the host, ranks hear of it in a later call"),
]

_MARKS = {
    "killed_before_a_group": pytest.mark.gloo_only(
        "torch waits in the store until the group's timeout, and connections show nothing"
    )
}

CASES = [
    pytest.param(name, collectives, marks=_MARKS.get(name, ()))
    for name, fault in FAULTS.items()
    if name.startswith("killed")
    for collectives in fault.only or COLLECTIVES
]


@pytest.mark.parametrize(("name", "collectives"), CASES)
@pytest.mark.parametrize("world_size", [4, 8, 16])
def test_the_dead_rank_alone_is_named(name: str, collectives: str, world_size: int) -> None:
    """Wherever it dies, and although the others end one after the other."""
    fault = FAULTS[name]
    endings = run(name, Setting(collectives, "adam", world_size))
    bound_s = fault.bound_s + SLOWNESS_S
    verdicts = [ending.verdict(fault, bad=world_size - 1, bound_s=bound_s) for ending in endings]
    assert verdicts == ["ok"] * world_size, [ending.message for ending in endings]
