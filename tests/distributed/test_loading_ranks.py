"""A rank that dies while all ranks load a state dict: the others raise, and have loaded nothing."""

from __future__ import annotations

import os
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardfuse import ShardedAdamW
from shardfuse.engine import torch_state
from tests.support.harness import RanksFailedError, run_procs

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.cpu_only("where waits do not block the host, ranks hear of it in a later call"),
]


def load_beside_a_death(collectives: str, when: str) -> None:
    """Load while rank 1 dies, before it checks its dict or after."""
    torch.manual_seed(0)
    model = nn.Linear(30, 20)
    sharding = {"collectives": collectives, "kernel": "eager"}
    optimizer = ShardedAdamW(model.named_parameters(), lr=0.1, sharding=sharding)
    for _ in range(2):
        model(torch.ones(1, 30)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.consolidate_state_dict(to=None)
    saved = optimizer.state_dict()
    for entry in saved["state"].values():
        entry["exp_avg"] = entry["exp_avg"] + 1
    saved["param_groups"][0]["lr"] = 0.5
    if dist.get_rank() == 1 and when == "before its check":
        torch_state.prepared = lambda *_: os._exit(7)
    elif dist.get_rank() == 1:
        optimizer._agreed_error = lambda error: os._exit(7)  # type: ignore[method-assign]
    before = [value.clone() for value in states(optimizer)]
    try:
        optimizer.load_state_dict(saved)
    except Exception as error:
        unchanged = all(map(torch.equal, states(optimizer), before))
        lr = optimizer.param_groups[0]["lr"]
        raise RuntimeError(f"nothing loaded: {unchanged and lr == 0.1}; {error}") from None


def states(optimizer: Any) -> list[torch.Tensor]:
    """Return this rank's states."""
    return [arena.data for state in optimizer._flats for arena in state.states.values()]


@pytest.mark.parametrize("when", ["before its check", "after its check"])
@pytest.mark.parametrize("collectives", ["auto", "pairwise", "native"])
def test_a_rank_dies(collectives: str, when: str) -> None:
    """In seconds; neither states nor hyper-parameters have changed then."""
    with pytest.raises(RanksFailedError) as caught:
        run_procs(2, load_beside_a_death, collectives, when, timeout=30, backend="gloo")
    failures = caught.value.failures
    last = failures[0].strip().splitlines()[-1]
    assert "nothing loaded: True" in last, failures[0]
    assert re.search(r"rank 1|another rank", last), last
    assert "died" in failures[1]
