"""Training goes on after an error that a loop has caught, on all ranks."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardfuse import ShardedAdamW
from shardfuse.comm.session import PeerError
from tests.support import contract
from tests.support.harness import run_procs

OUT_OF_STEP = "Start again from the last checkpoint"


def fail_once(failing_step: int, collectives: str) -> list[float | str]:
    """One step fails on one rank before it has said what it does; return what becomes of each."""
    weight = torch.nn.Parameter(torch.ones(600))
    sharding = {"collectives": collectives, "consolidate_every": 0}
    optimizer = ShardedAdamW([("weight", weight)], lr=0.1, sharding=sharding)
    found: list[float | str] = []

    def closure(step: int) -> None:
        optimizer.zero_grad()
        (weight * (1 + dist.get_rank())).sum().backward()
        if step == failing_step and dist.get_rank() == 1:
            raise ArithmeticError("of this rank alone")

    for step in range(4):
        try:
            optimizer.step(functools.partial(closure, step))
            found.append(weight[0].item())
        except (ArithmeticError, PeerError) as error:
            found.append(OUT_OF_STEP if OUT_OF_STEP in str(error) else "failed")
    return found


@pytest.mark.timeout(120)
@pytest.mark.cpu_only("where waits do not block the host, ranks hear of it in a later call")
@pytest.mark.parametrize("backend", [None, "hccl"])
@pytest.mark.parametrize("collectives", ["auto", "native"])
@pytest.mark.parametrize("failing_step", [0, 1, 2])
def test_after_an_error_all_ranks_go_on_or_none(
    failing_step: int, collectives: str, backend: str | None
) -> None:
    """In the first two steps ranks compare more, and one that failed has not done so.

    A backend's own collective that has begun cannot be taken back: then all are told to stop.
    """
    ranks = run_procs(2, fail_once, failing_step, collectives, backend=backend, timeout=30)
    assert ranks[0] == ranks[1]
    before, failed, after = (
        ranks[0][:failing_step],
        ranks[0][failing_step],
        ranks[0][failing_step + 1 :],
    )
    assert failed == "failed"
    assert set(after) == {OUT_OF_STEP} or all(
        b < a for a, b in itertools.pairwise([1.0, *before, *after])
    )
    if collectives == "auto" and (backend or contract.chosen()) == "gloo":
        assert OUT_OF_STEP not in after


def unfreeze(sharding: dict[str, Any]) -> list[bool | str]:
    """A step fails on one rank where a layer begins to train; return in which steps that moves."""
    layers = [torch.nn.Linear(40, 40) for _ in range(3)]
    model, late = torch.nn.Sequential(*layers), layers[1]
    late.requires_grad_(False)
    options = {"bucket_cap_mb": 0.004, "kernel": "eager", "consolidate_every": 0, **sharding}
    optimizer = ShardedAdamW(model.named_parameters(), lr=0.1, sharding=options)
    found: list[bool | str] = []

    def closure(step: int) -> None:
        optimizer.zero_grad()
        model(torch.ones(2, 40)).square().mean().backward()
        if step == 2 and dist.get_rank() == 1:
            raise ArithmeticError("of this rank alone")

    for step in range(5):
        late.requires_grad_(step >= 2)
        before = late.weight.detach().clone()
        try:
            optimizer.step(functools.partial(closure, step))
            found.append(not torch.equal(late.weight, before))
        except (ArithmeticError, PeerError):
            found.append("failed")
    return [*found, f"{late.weight.double().sum().item():.9g}"]


@pytest.mark.timeout(60)
@pytest.mark.cpu_only("where waits do not block the host, ranks hear of it in a later call")
@pytest.mark.parametrize("sharding", [{}, {"stage": 2}])
def test_what_begins_to_train_in_a_step_that_fails_trains_in_the_next(
    sharding: dict[str, Any],
) -> None:
    """At stage 2 it never did, on any rank, and nothing said so; at stage 1 one more step failed.

    The other rank had begun to send its gradients, and this one had not.
    """
    ranks = run_procs(2, unfreeze, sharding, timeout=30, backend="gloo")
    assert ranks[0] == ranks[1]
    assert ranks[0][:-1] == [False, False, "failed", True, True]


def consolidate_to_no_rank() -> str:
    weight = torch.nn.Parameter(torch.ones(600))
    optimizer = ShardedAdamW([("weight", weight)], lr=0.1)
    weight.grad = torch.ones(600)
    optimizer.step()
    try:
        optimizer.consolidate_state_dict(to=2 if dist.get_rank() == 1 else 0)
    except (ValueError, PeerError) as error:
        found = f"{type(error).__name__}: {error}"
    optimizer.consolidate_state_dict()
    return found


@pytest.mark.timeout(60)
@pytest.mark.cpu_only("where waits do not block the host, ranks hear of it in a later call")
def test_one_rank_gives_a_wrong_rank_to_consolidate_to() -> None:
    """The others waited for it until the timeout of the group, or until its next call."""
    found = run_procs(2, consolidate_to_no_rank, timeout=30, backend="gloo")
    assert found[1].startswith("ValueError: Invalid rank to: 2")
    assert found[0].startswith("PeerError")
    assert "Invalid rank to: 2" in found[0]
