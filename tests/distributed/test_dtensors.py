"""Parameters that torch has sharded: every optimizer, placement and mesh, against one process."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.support import dtensors
from tests.support.deepspeed_runs import ORACLES, PARAMS
from tests.support.dtensors import BUILD, GROUPS, REDUCING, SECOND, SHAPES, WORLDS, Sharded
from tests.support.harness import run_procs
from tests.support.runs import max_relative_error

pytestmark = [
    pytest.mark.timeout(240),
    pytest.mark.cpu_only("DTensors gather by coalesced collectives; see test_fsdp_device.py"),
]

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


ORDER = [name for names in GROUPS for name in names]


def reference(name: str) -> list[Tensor]:
    """Return the parameters of the reference in double precision, in ORDER."""
    start = dtensors.plain()
    groups = [
        {"params": [start[n] for n in names], **extra}
        for names, extra in zip(GROUPS, ({}, SECOND), strict=True)
    ]
    oracle = ORACLES[name](groups, names=GROUPS, **PARAMS[name])
    for step in range(STEPS):
        oracle.step([[dtensors.grad_of(n, step) for n in names] for names in GROUPS])
    return oracle.values()


@pytest.mark.parametrize("world", WORLDS)
def test_every_optimizer(world: str, expected: dict[str, dict[str, Tensor]]) -> None:
    """Bit for bit those of one process where a rule has no norms, else within 1e-6 of fp64."""
    ranks = run_procs(dtensors.size_of(world), train_all, world, timeout=200.0)
    start = [dtensors.whole(name, 0) for name in ORDER]
    for name in REDUCING:
        if name in ORACLES:
            values = [ranks[0][name][param] for param in ORDER]
            assert max_relative_error(values, reference(name), start) < 1e-6, name
    for found in ranks:
        for name, own in found.items():
            for param, value in own.items():
                if name in REDUCING:  # in another order than in one process, alike on all ranks
                    assert torch.equal(value, ranks[0][name][param]), (name, param)
                    torch.testing.assert_close(
                        value, expected[name][param], rtol=2e-6, atol=2e-6, msg=name + param
                    )
                else:
                    assert torch.equal(value, expected[name][param]), (name, param)
    assert set(ORDER) == set(SHAPES)
