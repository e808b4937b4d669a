"""What a profiler sees of one step over sockets: the order of events that overlap consists of."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch.profiler import ProfilerActivity, profile, record_function

from shardfuse import ShardedAdam
from tests.support.harness import run_procs

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.gloo_only("about pairs of ranks"),
]

LAYERS = 8


class Range(NamedTuple):
    """One range of the profiler's."""

    name: str
    start: float
    end: float

    @property
    def bucket(self) -> int:
        """The number that a collective's range ends in."""
        return int(self.name.rpartition(" b")[2])

    def holds(self, other: Range) -> bool:
        """Return whether ``other`` begins and ends inside."""
        return self.start <= other.start and other.end <= self.end


def trace() -> list[Range]:
    """Return the named ranges of two steps of a model whose every layer is a bucket."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64, bias=False) for _ in range(LAYERS)))
    sharding = {"collectives": "pairwise", "bucket_cap_mb": 64 * 64 * 4 / 2**20, "kernel": "eager"}
    optimizer = ShardedAdam(model.named_parameters(), lr=0.01, sharding=sharding)

    def step(number: int) -> None:
        with record_function(f"forward {number}"):
            loss = model(torch.ones(4, 64)).square().mean()
        with record_function(f"backward {number}"):
            loss.backward()
        with record_function(f"step {number}"):
            optimizer.step()
        optimizer.zero_grad()

    for number in range(2):
        step(number)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        for number in (2, 3):
            step(number)
        optimizer.synchronize()
    wanted = ("forward ", "backward ", "step ", "shardfuse::")
    return sorted(
        (
            Range(event.name, event.time_range.start, event.time_range.end)
            for event in profiler.events() or []
            if event.name.startswith(wanted)
        ),
        key=lambda found: found.start,
    )


def test_communication_is_under_backward_and_under_forward() -> None:
    """Sums leave under backward, last layer first; parameters arrive under the next forward."""
    for found in run_procs(2, trace):
        whole = {r.name: r for r in found if not r.name.startswith("shardfuse::")}

        def named(name: str, within: str, found: list[Range] = found) -> list[Range]:
            around = next(r for r in found if r.name == within)
            return [r for r in found if r.name.startswith(name) and around.holds(r)]

        sends = named("shardfuse::reduce_scatter", "backward 2")
        # The layer that backward ends with goes behind the word on what has changed.
        assert [r.bucket for r in sends] == list(range(LAYERS - 1))
        assert [r.bucket for r in named("shardfuse::reduce_scatter", "step 2")] == [LAYERS - 1]

        agreed = named("shardfuse::wait_agreement", "step 2")
        arrivals = named("shardfuse::wait_reduce_scatter", "step 2")
        gathers = named("shardfuse::all_gather", "step 2")
        assert (len(agreed), len(arrivals)) == (1, LAYERS)
        assert agreed[0].end <= arrivals[0].start
        # Half of the sums that left early are used first, then that of the first layer, whose
        # parameters leave before any other sum is used.
        used_before = [r for r in arrivals if r.end <= gathers[0].start]
        assert len(used_before) == (LAYERS - 1) // 2 + 1
        assert used_before[-1].end <= gathers[0].start <= arrivals[len(used_before)].start
        assert [r.bucket for r in gathers] == list(range(LAYERS))[::-1]

        waits = named("shardfuse::wait_all_gather b", "forward 3")
        assert [r.bucket for r in waits] == [r.bucket for r in gathers]
        assert not named("shardfuse::wait_all_gather b", "step 2")
        assert whole["step 2"].end <= waits[0].start
        assert waits[-1].end <= whole["backward 3"].start
