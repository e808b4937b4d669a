"""A process group that is gone: what step() then says."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardfuse import ShardedLamb, ShardedSGD
from tests.support.harness import run_procs

pytestmark = pytest.mark.timeout(120)

CHOICES = ("auto", "pairwise", "native")


def build(choice: str, *, lamb: bool = False, group: Any = None) -> Any:
    params = [nn.Parameter(torch.ones(3000))]
    sharding = {"collectives": choice, "process_group": group}
    cls: Any = ShardedLamb if lamb else ShardedSGD
    return cls(params, lr=1.0, sharding=sharding)


def step(optimizer: Any) -> None:
    for group in optimizer.param_groups:
        for param in group["params"]:
            param.grad = torch.full_like(param, 1.0)
    optimizer.step()


def after_destroying(choice: str) -> dict[str, tuple[str, float, bool]]:
    """Return {optimizer: (what step() raises, seconds to it, whether its parameters stayed)}."""
    subgroup = dist.new_group([0, 1])
    optimizers = {
        "never stepped": build(choice),
        "stepped": build(choice),
        "lamb": build(choice, lamb=True),
        "subgroup": build(choice, group=subgroup),
    }
    for name, optimizer in optimizers.items():
        if name != "never stepped":
            step(optimizer)
    dist.barrier()
    dist.destroy_process_group(subgroup)
    found = {"subgroup": outcome(optimizers.pop("subgroup"))}
    step(optimizers["stepped"])  # the default group is there still
    dist.destroy_process_group()
    return {**found, **{name: outcome(optimizer) for name, optimizer in optimizers.items()}}


def outcome(optimizer: Any) -> tuple[str, float, bool]:
    param = optimizer.param_groups[0]["params"][0]
    before, start = param.detach().clone(), time.monotonic()
    try:
        step(optimizer)
        text = "no error"
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
    return text, time.monotonic() - start, torch.equal(before, param.detach())


# Importing torch._dynamo, as torch.optim does, gives functions of torch.distributed.nn the default
# group as a default argument: it outlives destroy_process_group(), and so a weak reference to it.
@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.cpu_only("it makes groups of gloo")
def test_a_destroyed_group_is_an_error(choice: str) -> None:
    """At once and on every rank, in the words that tell the remedy; no parameter changes."""
    for found in run_procs(2, after_destroying, choice, timeout=60):
        assert len(found) == 4
        for name, (text, seconds, stayed) in found.items():
            assert text.startswith("RuntimeError"), (name, text)
            assert "process group was destroyed. Build a new optimizer" in text, (name, text)
            assert seconds < 10
            assert stayed


def initialised_anew(choice: str) -> tuple[str, float]:
    """Return what an optimizer of the old group raises, and what one of the new one makes."""
    old = build(choice)
    step(old)
    dist.barrier()
    rank, store = dist.get_rank(), dist.distributed_c10d._get_default_store()
    dist.destroy_process_group()
    dist.init_process_group("gloo", rank=rank, world_size=2, store=dist.PrefixStore("anew", store))
    text = outcome(old)[0]
    new = build(choice)
    step(new)
    return text, float(new.param_groups[0]["params"][0][0].detach())


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.cpu_only("it makes groups of gloo")
def test_a_new_group_is_not_the_old_one(choice: str) -> None:
    """After init_process_group() anew the old optimizer still says so, and a new one trains."""
    for text, value in run_procs(2, initialised_anew, choice, timeout=60):
        assert "process group was destroyed" in text
        assert value == 0.0
