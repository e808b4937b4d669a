"""Parameters that torch has sharded: every optimizer, placement and mesh, against one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support import dtensors
from tests.support.deepspeed_runs import ORACLES, PARAMS
from tests.support.dtensors import BUILD, GROUPS, REDUCING, SECOND, SHAPES, WORLDS, Sharded
from tests.support.harness import run_procs
from tests.support.runs import max_relative_error

pytestmark = pytest.mark.timeout(240)

STEPS = 3


def train_all(world: str) -> dict[str, dict[str, Tensor]]:
    """Train each optimizer for three steps; return the whole parameters."""
    found = {}
    for name, build in BUILD.items():
        params = Sharded(world)
        optimizer = build(dtensors.groups_of(params.params), sharding={"kernel": "eager"})
        for step in range(STEPS):
            params.assign(step)
            optimizer.step()
        found[name] = params.values()
    return found


@pytest.fixture(scope="module")
def expected() -> dict[str, dict[str, Tensor]]:
    return {name: dtensors.train_plain(build, STEPS)[0] for name, build in BUILD.items()}


@pytest.mark.parametrize("world", WORLDS)
def test_every_optimizer(world: str, expected: dict[str, dict[str, Tensor]]) -> None:
    """Bit for bit those of one process where a rule has no norms, else within their rounding."""
    for found in run_procs(dtensors.size_of(world), train_all, world, timeout=200.0):
        for name, values in found.items():
            for param, value in values.items():
                same = expected[name][param]
                if name in REDUCING:
                    torch.testing.assert_close(value, same, rtol=2e-6, atol=2e-6, msg=name + param)
                else:
                    assert torch.equal(value, same), (name, param)


@pytest.mark.parametrize("name", ORACLES)
def test_one_process_follows_the_oracle(name: str, expected: dict[str, Any]) -> None:
    """What the ranks are compared with is within 1e-6 of a reference in double precision."""
    start = dtensors.plain()
    groups = [
        {"params": [start[n] for n in names], **extra}
        for names, extra in zip(GROUPS, ({}, SECOND), strict=True)
    ]
    options = {"decoupled": True} if name == "ShardedAdamW" else {}
    oracle = ORACLES[name](groups, names=GROUPS, **PARAMS[name], **options)
    for step in range(STEPS):
        oracle.step([[dtensors.grad_of(n, step) for n in names] for names in GROUPS])
    order = [name for names in GROUPS for name in names]
    values = [expected[name][n] for n in order]
    assert max_relative_error(values, oracle.values(), [start[n].detach() for n in order]) < 1e-6
    assert set(order) == set(SHAPES)
