"""Over DeepSpeed's partitions: methods that need buffers refuse, and no rank waits for another."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join

from tests.support import deepspeed_runs as runs
from tests.support.deepspeed_runs import Job
from tests.support.harness import run_procs

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed"
)

TIMEOUT = 200.0

METHODS: dict[str, Callable[[Any], Any]] = {
    "add_param_group()": lambda optimizer: optimizer.add_param_group({"params": []}),
    "rebind()": lambda optimizer: optimizer.rebind(),
    "memory_summary()": lambda optimizer: optimizer.memory_summary(),
    "grad_norm()": lambda optimizer: optimizer.grad_norm(),
    "clip_grad_norm()": lambda optimizer: optimizer.clip_grad_norm(1.0),
    "consolidate_state_dict()": lambda optimizer: optimizer.consolidate_state_dict(),
    "sharded_state_dict()": lambda optimizer: optimizer.sharded_state_dict(),
    "load_sharded_state_dict()": lambda optimizer: optimizer.load_sharded_state_dict({}),
    "torch.distributed.algorithms.Join": lambda optimizer: Join([optimizer]).__enter__(),
    "clip_grad_norm_fused_()": lambda optimizer: optimizer.clip_grad_norm_fused_(1.0),
    "get_combined_params()": lambda optimizer: optimizer.get_combined_params(),
    "get_combined_grads()": lambda optimizer: optimizer.get_combined_grads(),
    "torch_npu's GradScaler": lambda optimizer: optimizer.grads_all_group_combined,
}


def call_methods(name: str) -> dict[str, str]:
    """Return the message of every method of an optimizer at stage 1."""
    engine, _ = runs.build(Job(name=name, stage=1))
    found = {}
    for what, method in METHODS.items():
        try:
            method(engine.basic_optimizer)
        except (RuntimeError, AttributeError) as error:
            found[what] = f"{type(error).__name__}: {error}"
    return found


def test_methods_refuse_in_words() -> None:
    """torch_npu's methods and our own say whose they are, and what to do, on every rank."""
    for found in run_procs(runs.WORLD, call_methods, "NpuFusedLamb", timeout=TIMEOUT):
        for what in METHODS:
            expected = f"RuntimeError: {what} is not available while DeepSpeed shards (ZeRO"
            assert found.get(what, "no error").startswith(expected), (what, found.get(what))


def fail_on_one_rank(job: Job) -> tuple[str, float]:
    """Spoil a state on rank 1, and return the error of the next step and the seconds it took."""
    engine, _ = runs.build(job)
    runs.train(job, engine, 0, 1)
    optimizer = engine.basic_optimizer
    flat = optimizer.param_groups[0]["params"][0]
    if dist.get_rank() == 1:
        optimizer.state[flat]["exp_avg"] = torch.zeros(3)
    dist.barrier()
    start = time.monotonic()
    try:
        runs.train(job, engine, 1, 2)
    except Exception as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - start
    return "no error", 0.0


@pytest.mark.parametrize("stage", [1, 2])
def test_a_rank_that_fails_alone(stage: int) -> None:
    """One rank cannot update its partition: the other is told, and does not wait for its norms."""
    job = Job(stage=stage)
    (waiting, seconds), (failing, _) = run_procs(2, fail_on_one_rank, job, timeout=TIMEOUT)
    assert failing.startswith("RuntimeError"), failing
    assert "PeerError" in waiting, waiting
    assert "rank 1" in waiting, waiting
    assert seconds < 20, seconds
