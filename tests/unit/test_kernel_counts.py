"""Upper bounds of kernels and bytes per launch unit, and no host wait: see launch/acceptance."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from functools import partial
from typing import Any

import pytest
import torch

import shardfuse
from shardfuse.plan.budget import plan
from shardfuse.plan.models import shapes_of

pytestmark = [
    pytest.mark.timeout(400),
    pytest.mark.cpu_only("the counting mode sees operators of the CPU"),
]

# {(optimizer, kernel): ((kernels, bytes per element) of fp32 params, the same of bf16)}
BOUNDS: dict[tuple[str, str], tuple[tuple[int, int], tuple[int, int]]] = {
    ("SGD", "eager"): ((1, 12), (6, 46)),
    ("SGD, momentum", "eager"): ((3, 32), (8, 66)),
    ("SGD, momentum", "fused"): ((2, 28), (6, 54)),
    ("Adam", "eager"): ((8, 84), (12, 110)),
    ("Adam", "fused"): ((2, 36), (6, 62)),
    ("AdamW", "eager"): ((8, 80), (12, 106)),
    ("AdamW", "fused"): ((2, 36), (6, 62)),
    ("AdamW", "compiled"): ((1, 28), (1, 30)),
    ("LAMB", "eager"): ((13, 120), (17, 146)),
    ("LAMB", "fused"): ((9, 92), (13, 118)),
    ("LAMB", "compiled"): ((3, 40), (3, 44)),
    ("BertAdam", "eager"): ((9, 92), (13, 118)),
    ("BertAdam", "fused"): ((4, 56), (8, 82)),
    ("RMSprop", "eager"): ((6, 60), (10, 86)),
    ("RMSpropTF", "eager"): ((6, 60), (10, 86)),
    ("Adadelta", "eager"): ((12, 116), (16, 142)),
    ("AdamP", "eager"): ((27, 362), (31, 388)),
}
SMALL = {"LAMB": 5, "AdamP": 8}


def counted(*options: str) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "launch.acceptance.counts", "--json", *options]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=380)
    assert done.returncode == 0, done.stderr[-4000:]
    rows: list[dict[str, Any]] = json.loads(done.stdout)
    return rows


def check(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        fp32, bf16 = BOUNDS[row["optimizer"], row["kernel"]]
        kernels, nbytes = fp32 if row["dtype"] == "fp32" else bf16
        if row["stage"] == 2 and row["dtype"] == "bf16":
            kernels, nbytes = kernels, nbytes + 2  # sums are fp32 there, and need no conversion
        assert row["kernels"] <= kernels, row
        assert row["bytes_per_element"] <= nbytes + 0.5, row
        assert row["small"] <= SMALL.get(row["optimizer"], 0), row
        assert row["waits"] <= row["stage"] - 1, row


def test_bounds() -> None:
    """Of every optimizer, in-place and fused, at both stages, with fp32 and bf16 params."""
    rows = counted("--kernel", "eager", "--kernel", "fused")
    assert {(row["optimizer"], row["kernel"]) for row in rows} == {
        key for key in BOUNDS if key[1] != "compiled"
    }
    check(rows)


@pytest.mark.exhaustive
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler on the CPU")
@pytest.mark.parametrize("name", ["AdamW", "LAMB"])
def test_bounds_compiled(name: str) -> None:
    """What inductor generates for the CPU, at stage 1."""
    check(counted("--optimizer", name, "--kernel", "compiled", "--stage", "1"))


def test_a_step_of_7b() -> None:
    """On 8 ranks: at most 120 collectives, and 250 kernels with those of the fused AdamW."""
    build = partial(shardfuse.ShardedAdamW, lr=1e-3)
    budget = plan(shapes_of("6.74b"), build, world_size=8, dtype=torch.bfloat16, device="cuda")
    (kernels, _) = BOUNDS["AdamW", "fused"][1]
    assert sum(collective.number for collective in budget.collectives) <= 120
    assert kernels * budget.num_buckets <= 250
