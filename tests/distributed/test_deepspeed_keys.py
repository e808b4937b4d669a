"""Keys of groups and of sharding under DeepSpeed: maximize at every stage, and what is refused."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from tests.distributed.test_deepspeed import error_of
from tests.support import deepspeed_runs as runs
from tests.support.deepspeed_runs import Job
from tests.support.harness import run_procs

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed"
)

MAXIMIZING = [
    Job(name=name, stage=stage, steps=3, clip=0.5, params={"maximize": True, **options})
    for stage in (0, 1, 2)
    for name, options in (
        ("ShardedLamb", {"use_global_grad_norm": True, "clip_grad_norm": 0.3}),
        ("ShardedAdamW", {"foreach": False, "fused": True}),
        ("ShardedBertAdam", {}),
    )
]
REFUSED = {
    "gradient_clipping": {"sharding": {"clip_grad_norm": 1.0}},
    '"param_sync_bits": ...': {"sharding": {"param_sync_bits": 8}},
    '"stage": ...': {"sharding": {"stage": 2}},
    "differentiable=True": {"differentiable": True},
    "unexpected keyword argument": {"fussed": True},
}


def run_all() -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Train those that maximize; return the message of each that is refused at stage 1."""
    results = runs.run_all(MAXIMIZING)
    messages = {}
    for name, params in REFUSED.items():
        try:
            messages[name] = str(runs.run(Job(stage=1, params=params)).get("refusal"))
        except TypeError as error:
            messages[name] = str(error)
    return results, messages


def test_keys_under_deepspeed() -> None:
    """The sign comes after DeepSpeed's clip and the rule's own; its partitions see it, too."""
    for results, messages in run_procs(runs.WORLD, run_all, timeout=200):
        for job, result in zip(MAXIMIZING, results, strict=True):
            assert error_of(job, result) < 1e-5
        for name, message in messages.items():
            assert name in message
