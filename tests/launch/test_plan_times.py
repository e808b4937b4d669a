"""What shardfuse.plan predicts of a step between hosts, against what was measured there."""

from __future__ import annotations

import csv
import statistics
from pathlib import Path
from typing import Any

import pytest

from launch.bench.transformer import SIZES, Transformer
from shardfuse import ShardConfig, ShardedAdam, ShardedLamb
from shardfuse.plan import Speeds, plan, predict
from shardfuse.plan.models import shapes_of_module

MEASURED = Path(__file__).parents[2] / "launch" / "bench" / "results" / "links.csv"

BF16 = {"grad_sync_dtype": "bfloat16", "param_sync_dtype": "bfloat16"}
NOTHING = {"overlap_grad_sync": False, "overlap_param_sync": False}
METHODS: dict[str, tuple[Any, dict[str, Any]]] = {
    "shardfuse adam": (ShardedAdam, {}),
    "shardfuse lamb": (ShardedLamb, {}),
    "shardfuse adam, stage 2": (ShardedAdam, {"stage": 2}),
    "shardfuse adam, bf16 wire": (ShardedAdam, BF16),
    "shardfuse adam, no overlap": (ShardedAdam, NOTHING),
}
"""Not those of few bits: what their encoding takes is not modelled."""

GBIT = {"200mbit": 0.2, "1gbit": 1.0}


def measured(rate: str, method: str) -> float:
    """Return the median of the rounds, in seconds."""
    with MEASURED.open() as file:
        rows = [row for row in csv.DictReader(file) if row["rate"] == rate]
    found = [r for r in rows if r["method"] == method and float(r["world_size"]) == 2]
    return statistics.median(float(row["step_s"]) for row in found)


@pytest.mark.parametrize("method", [*METHODS, "DDP + torch Adam fused"])
@pytest.mark.parametrize("rate", GBIT)
def test_within_a_quarter(rate: str, method: str) -> None:
    """Of the link's rate, compute alone, and 4 GB/s of memory, by two hosts on two cores."""
    cls, sharding = METHODS.get(method, (ShardedAdam, {}))
    budget = plan(
        shapes_of_module(Transformer(SIZES["33M"])),
        cls,
        world_size=2,
        device="cpu",
        sharding=ShardConfig.of(sharding),
    )
    compute = measured(rate, "compute alone")
    speeds = Speeds(link=GBIT[rate] * 1e9 / 8, latency_s=200e-6, memory=4e9)
    times = predict(budget, speeds, compute / 3, compute * 2 / 3)
    predicted = times.ddp if method not in METHODS else times.step
    assert predicted == pytest.approx(measured(rate, method), rel=0.25)
