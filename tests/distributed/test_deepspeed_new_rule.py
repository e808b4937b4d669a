"""A rule of a user's own is driven by DeepSpeed like ours, with no file of the package touched."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from torch import Tensor

pytest.importorskip("deepspeed")

from tests.distributed.test_new_rule import Lion
from tests.support import deepspeed_runs as runs
from tests.support.deepspeed_runs import Job
from tests.support.harness import run_procs
from tests.support.runs import assert_bitwise

pytestmark = pytest.mark.timeout(280)


def train_lion(stages: list[int]) -> list[list[Tensor]]:
    """Return the parameters after five steps at each stage."""
    deepspeed = runs.start_deepspeed()
    ends = []
    for stage in stages:
        entries = tuple(entry for entry in runs.ENTRIES if entry.role == "used")
        job = Job(stage=stage, how="instance", kind="integers", steps=5, entries=entries)
        model = runs.Weights(entries)
        engine, *_ = deepspeed.initialize(
            model=model,
            optimizer=Lion(model.groups(), lr=0.125, betas=(0.5, 0.75)),
            config=job.config(dist.get_world_size()),
        )
        runs.train(job, engine)
        ends.append([param.detach().clone() for param in model.members])
        engine.destroy()
    return ends


def test_a_new_rule_at_every_stage() -> None:
    """Stages 1 and 2, where the partitions are DeepSpeed's, end at the bits of stage 0."""
    for at_0, at_1, at_2 in run_procs(runs.WORLD, train_lion, [0, 1, 2], timeout=200):
        assert_bitwise(at_1, at_0)
        assert_bitwise(at_2, at_0)
