"""Ranks that do different things where waits do not block the host: all hear of it, a little later.

On the stand-in of `pytest --device npu`; test_disagreement.py is of waits that block.
"""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist

from shardfuse import ShardedAdamW
from shardfuse.comm.session import PeerError
from tests.support import placing
from tests.support.harness import run_procs

pytestmark = [
    pytest.mark.skipif(not placing.on_device(), reason="the CPU blocks: test_disagreement.py"),
    pytest.mark.timeout(100),
]


def train_apart(is_ahead: bool) -> list[str]:
    """Set lr apart after some steps; return the errors of the step that raises and of the next."""
    model = torch.nn.Linear(8, 8)
    optimizer = ShardedAdamW(model.named_parameters(), lr=0.01, sharding={"kernel": "eager"})
    errors: list[str] = []
    for step in range(100_000):
        if step == 5 and dist.get_rank() == 1:
            optimizer.param_groups[0]["lr"] = 0.5
        model(torch.ones(4, 8)).square().mean().backward()
        try:
            optimizer.step()
        except PeerError as error:
            errors.append(str(error))
            if len(errors) == 2:
                break
        if not is_ahead:
            torch.accelerator.synchronize()
            time.sleep(0.05)  # as a step takes: so the ranks' watches look at the same one
    return errors


def test_every_rank_hears_what_differs() -> None:
    for errors in run_procs(2, train_apart, False, timeout=25):
        for text in errors:
            assert "rank 0 has lr = 0.01 in group 0; rank 1 has lr = 0.5" in text
        assert "Start again from the last checkpoint" in errors[1]


def test_hosts_that_run_ahead_hear_of_it_too() -> None:
    """They may be in other calls by then, so that what differed is not known any more."""
    for errors in run_procs(2, train_apart, True, timeout=25):
        for text in errors:
            assert "the ranks disagree in step()" in text or "is in another collective" in text
