"""DeepSpeed's engine drives: schedules, accumulation, clients' own instances, and refusals."""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import shardfuse
from tests.support import deepspeed_runs as runs
from tests.support.deepspeed_runs import Job
from tests.support.harness import run_procs
from tests.support.models import MIXED, rank_grads, split_by_group
from tests.support.overlap import count_early
from tests.support.runs import in_entry_order, max_relative_error

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed"
)

TIMEOUT = 200.0


def error(job: Job, values: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Return the largest relative error of a job's parameters."""
    start = [param.detach() for param in runs.Weights(job.entries).members]
    return max_relative_error(values, expected, start)


WARMUP = {"type": "WarmupLR", "params": {"warmup_num_steps": 6, "warmup_max_lr": 0.05}}


def cosine(optimizer: torch.optim.Optimizer) -> Any:
    """Return a schedule in code."""
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=12)


def train_with_schedules(jobs: Sequence[Job]) -> list[tuple[list[list[float]], list[Tensor]]]:
    """Return (rates of every step, values) of each job: JSON, callable, and one made before."""
    found = []
    for job in jobs:
        kwargs: dict[str, Any] = {}
        if "scheduler" not in job.extra:
            kwargs["lr_scheduler"] = cosine
        if job.how == "instance":
            model = runs.Weights(job.entries)
            optimizer = getattr(shardfuse, job.name)(model.groups(), **job.options)
            kwargs = {"optimizer": optimizer, "lr_scheduler": cosine(optimizer), "model": model}
        engine, model = build_with(job, **kwargs)
        if job.how == "instance":
            assert kwargs["optimizer"] in (engine.optimizer, engine.basic_optimizer)
        rates = []
        for step in range(job.steps):
            rates.append([group["lr"] for group in engine.optimizer.param_groups])
            runs.train(job, engine, step, step + 1)
        found.append((rates, runs.masters(job, engine, model)))
    return found


def build_with(job: Job, **kwargs: Any) -> tuple[Any, runs.Weights]:
    """Return (engine, model), the model being one that was made before."""
    if "model" not in kwargs:
        return runs.build(job, **kwargs)
    deepspeed = runs.start_deepspeed()
    engine, *_ = deepspeed.initialize(config=job.config(dist.get_world_size()), **kwargs)
    return engine, kwargs["model"]


def test_schedules() -> None:
    """From JSON at stage 0, from code as a callable, and made before initialize()."""
    jobs = [Job(extra={"scheduler": WARMUP}, how=how) for how in ("name", "callable")]
    jobs += [Job(stage=stage, how="instance", clip=0.5) for stage in (0, 1, 2)]
    jobs += [Job(), Job(name="ShardedAdamW", how="instance", stage=1)]
    for results in run_procs(runs.WORLD, train_with_schedules, jobs, timeout=TIMEOUT):
        for job, (rates, values) in zip(jobs, results, strict=True):
            assert len({tuple(rate) for rate in rates}) > 5
            assert error(job, values, reference_at(job, rates)) < 1e-5


def reference_at(job: Job, rates: Sequence[Sequence[float]]) -> list[Tensor]:
    """Return per-tensor fp64 values with each step at its own rates."""
    names = split_by_group(job.entries, [entry.name for entry in job.entries])
    options = {**job.options, **({"decoupled": True} if job.name == "ShardedAdamW" else {})}
    oracle = runs.ORACLES[job.name](runs.Weights(job.entries).groups(), names=names, **options)
    for step, own in enumerate(rates):
        grads = runs.step_grads(job, step)
        norm = runs.grad_norm(grads)
        factor = job.clip / (norm + 1e-6) if 0 < job.clip < norm else 1.0
        for group, rate in zip(oracle.groups, own, strict=True):
            group["lr"] = rate
        scaled = [None if grad is None else grad * factor for grad in grads]
        oracle.step(split_by_group(job.entries, scaled))
    return in_entry_order(job.entries, oracle.values())


# With parameters that some ranks, or all in some steps, have no gradient of.
ABSENT = tuple(entry for entry in MIXED if entry.shape and 0 not in entry.shape)


def train_unusually() -> list[list[Tensor]]:
    """Return values after the same two gradients summed in no_sync(), by zero_grad(), unmanaged."""
    rank, found = dist.get_rank(), []
    grads = [rank_grads("floats", runs.WORLD, rank, step, runs.ENTRIES) for step in range(2)]
    job = Job(clip=1.0)
    for way in ("no_sync", "zero_grad", "unmanaged"):
        extra = {"managed_gradient_accumulation": False} if way == "unmanaged" else {}
        engine, model = runs.build(dataclasses.replace(job, extra=extra))
        if way == "no_sync":
            with engine.no_sync():
                engine.backward(engine(grads[0]))
        else:
            engine.backward(engine(grads[0]))
        if way == "zero_grad":
            engine.zero_grad()
            engine.backward(engine(grads[0]))
        engine.backward(engine(grads[1]))
        engine.step()
        found.append(runs.masters(job, engine, model))
    return found


def test_accumulation_by_hand() -> None:
    """Backward twice, in no_sync(), after zero_grad(), or unmanaged: one mean gradient, clipped."""
    job = Job(clip=1.0, gas=2, steps=1)  # the mean in place of the sum: clipped, they are the same
    expected = runs.reference(job)
    for results in run_procs(runs.WORLD, train_unusually, timeout=TIMEOUT):
        for values in results:
            assert error(job, values, expected) < 1e-5


def test_absent_gradients_at_stage_0() -> None:
    """Parameters that no rank has a gradient of stay as they are, as without DeepSpeed."""
    job = Job(entries=ABSENT, gas=1)
    for result in run_procs(runs.WORLD, runs.run, job, timeout=TIMEOUT):
        assert error(job, result["values"], runs.reference(job)) < 1e-5


def test_client_instances() -> None:
    """An instance or a callable trains as the name in the JSON does, at every stage."""
    jobs = [
        Job(name=name, stage=stage, how=how, clip=0.5, steps=4, mode=mode, kind="integers")
        for name in ("ShardedLamb", "ShardedSGD")
        for stage in (0, 1, 2)
        for how, mode in (("instance", "fp32"), ("callable", "fp32"), ("callable", "bf16"))
    ]
    jobs += [Job(how="instance", stage=2, mode="bf16", kind="integers")]
    for results in run_procs(runs.WORLD, runs.run_all, jobs, timeout=TIMEOUT):
        for job, result in zip(jobs, results, strict=True):
            assert "refusal" not in result, result
            assert error(job, result["values"], runs.reference(job)) < 1e-5


def train_with_empty_group(jobs: Sequence[Job]) -> list[list[Tensor]]:
    """Return the values of each job; a group without parameters comes before its others."""
    found = []
    for job in jobs:
        deepspeed = runs.start_deepspeed()
        model = runs.Weights(job.entries)
        groups = [{"params": [], "lr": 9.0}, *model.groups()]
        config = job.config(dist.get_world_size())
        engine, *_ = deepspeed.initialize(model=model, model_parameters=groups, config=config)
        runs.train(job, engine)
        found.append(runs.masters(job, engine, model))
    return found


def test_empty_groups_are_left_out() -> None:
    """As DeepSpeed leaves them out: the others keep their own rates."""
    jobs = [Job(stage=stage, steps=3) for stage in (0, 1)]
    for results in run_procs(runs.WORLD, train_with_empty_group, jobs, timeout=TIMEOUT):
        for job, values in zip(jobs, results, strict=True):
            assert error(job, values, runs.reference(job)) < 1e-5


def attempt(action: Callable[[], Any]) -> str:
    """Return the error of an action, or that there was none."""
    try:
        action()
    except Exception as failure:
        return f"{type(failure).__name__}: {failure}"
    return "no error"


def misuse() -> dict[str, str]:
    """Return the errors of what must not be done."""
    runs.start_deepspeed()
    import shardfuse.deepspeed

    lamb = Job(how="instance", stage=1)
    used = shardfuse.ShardedLamb(runs.Weights(lamb.entries).groups())
    for group in used.param_groups:
        for param in group["params"]:
            param.grad = torch.ones_like(param)
    used.step()
    engine, _ = runs.build(lamb)
    first, _ = runs.build(Job(how="instance"))
    instance = engine.basic_optimizer
    empty = shardfuse.ShardedLamb(
        [*runs.Weights(lamb.entries).groups(), {"params": torch.nn.ParameterList()}]
    )
    found = {
        "stepped": attempt(lambda: runs.build(lamb, optimizer=used)),
        "twice": attempt(lambda: runs.build(lamb, optimizer=instance)),
        "twice at stage 0": attempt(
            lambda: runs.build(Job(how="instance"), optimizer=first.optimizer)
        ),
        "empty group": attempt(lambda: runs.build(Job(how="instance"), optimizer=empty)),
        "cast": attempt(lambda: runs.build(Job(how="instance", mode="bf16"))),
        "row rule": attempt(lambda: runs.build(Job(name="ShardedAdamP", how="instance", stage=1))),
        "add a group": attempt(lambda: instance.add_param_group({"params": []})),
        "clip": attempt(lambda: instance.clip_grad_norm(1.0)),
        "other partition": attempt(lambda: step_on_other_partition(instance)),
    }
    shardfuse.deepspeed.unregister()
    opaque = Job(how="instance", stage=1, extra={"zero_allow_untested_optimizer": True})
    engine, _ = runs.build_unregistered(opaque)
    found["opaque partition"] = attempt(lambda: runs.train(opaque, engine, 0, 1))
    return found


def step_on_other_partition(optimizer: Any) -> None:
    """Step on a flat tensor that no boundaries of tensors are known in."""
    flat = torch.zeros(10, requires_grad=True)
    flat.grad = torch.ones(10)
    optimizer.param_groups[0]["params"] = [flat]
    optimizer.step()


def overlap_at_stage_0(overlaps: bool) -> tuple[list[Tensor], int, int]:
    """Train with accumulation over sockets; return values, buckets sent early, steps sent twice."""
    sharding = {
        "collectives": "pairwise",
        "bucket_cap_mb": 0.02,
        "overlap_grad_sync": overlaps,
        "overlap_param_sync": overlaps,
    }
    job = Job(name="ShardedAdamW", params={"sharding": sharding}, gas=3, steps=5, clip=0.5)
    engine, model = runs.build(job)
    optimizer = engine.optimizer
    early = count_early(optimizer)
    runs.train(job, engine)
    return runs.masters(job, engine, model), sum(early), optimizer._grads._num_wasted


def test_overlap_at_stage_0() -> None:
    """Buckets leave under the last backward of a step alone, which the engine knows."""
    for (values, num_early, num_wasted), (expected, none, _) in zip(
        run_procs(runs.WORLD, overlap_at_stage_0, True, timeout=TIMEOUT),
        run_procs(runs.WORLD, overlap_at_stage_0, False, timeout=TIMEOUT),
        strict=True,
    ):
        assert num_early > 4
        assert none == num_wasted == 0
        assert all(map(torch.equal, values, expected))


def partitioned_at_stage_0(stage: int, gas: int, name: str) -> list[Tensor]:
    """Train by DeepSpeed's engine over sockets, our gradients in full or sharded."""
    sharding = {"collectives": "pairwise", "bucket_cap_mb": 0.02, "stage": stage}
    job = Job(name=name, params={"sharding": sharding}, gas=gas, steps=5, clip=0.5)
    engine, model = runs.build(job)
    runs.train(job, engine)
    return runs.masters(job, engine, model)


@pytest.mark.parametrize(("gas", "name"), [(1, "ShardedLamb"), (3, "ShardedSGD")])
def test_gradients_are_sharded_at_stage_0(gas: int, name: str) -> None:
    """The engine drives our stage 2 as it does stage 1; sums of micro-batches are rounded anew."""
    for values, expected in zip(
        run_procs(runs.WORLD, partitioned_at_stage_0, 2, gas, name, timeout=TIMEOUT),
        run_procs(runs.WORLD, partitioned_at_stage_0, 1, gas, name, timeout=TIMEOUT),
        strict=True,
    ):
        for value, other in zip(values, expected, strict=True):
            if gas == 1:
                assert torch.equal(value, other)
            torch.testing.assert_close(value, other, rtol=1e-5, atol=1e-6)


MISUSES = {
    "stepped": "ValueError: .*stepped already",
    "twice": "ValueError: .*driven by another DeepSpeed engine",
    "twice at stage 0": "ValueError: .*driven by another DeepSpeed engine",
    "empty group": "ValueError: .*group without parameters",
    "cast": 'ValueError: .*by its name in "optimizer"',
    "row rule": 'ValueError: .*"stage": 0',
    "add a group": "RuntimeError: add_param_group",
    "clip": "RuntimeError: clip_grad_norm",
    "other partition": "RuntimeError: .*whose tensors it does not know",
    "opaque partition": "RuntimeError: .*param_groups hold other parameters",
}


def test_misuse_raises_on_every_rank() -> None:
    """Nothing runs a norm over a partition it does not know, nor half connected."""
    for found in run_procs(runs.WORLD, misuse, timeout=TIMEOUT):
        assert found.keys() == MISUSES.keys()
        for name, pattern in MISUSES.items():
            assert re.match(pattern, found[name]), (name, found[name])


REFUSED = {
    "stage 3": (Job(stage=3), '"stage": 2'),
    "fp16 at stage 0": (Job(mode="fp16"), 'Remove "fp16"'),
    "fp32 accumulation at stage 0": (
        Job(mode="bf16", extra={"data_types": {"grad_accum_dtype": "fp32"}}),
        "grad_accum_dtype",
    ),
    "BF16_Optimizer": (
        Job(stage=1, mode="bf16", extra={"data_types": {"grad_accum_dtype": "fp32"}}),
        '"stage": 2',
    ),
    "fp16 autocast at stage 1": (
        Job(stage=1, extra={"torch_autocast": {"enabled": True, "dtype": "float16"}}),
        '"fp16": {"enabled": true}',
    ),
    "max_grad_norm": (
        Job(name="ShardedBertAdam", params={"max_grad_norm": 1.0}),
        "gradient_clipping",
    ),
    "no norm to clip by": (
        Job(stage=1, params={"use_global_grad_norm": True}, zero={"compute_grad_norm": False}),
        "compute_grad_norm",
    ),
    "elastic": (
        Job(name="ShardedAdamW", stage=2, zero={"elastic_checkpoint": True}),
        'Remove "elastic_checkpoint"',
    ),
    "offload at stage 0": (Job(zero={"offload_optimizer": {"device": "cpu"}}), "offload_optimizer"),
    "universal at stage 0": (
        Job(extra={"checkpoint": {"load_universal": True}}),
        'Remove "checkpoint"',
    ),
    "out of range": (Job(params={"lr": -1.0}), "Invalid learning rate"),
    "out of range at stage 2": (Job(stage=2, params={"lr": -1.0}), "Invalid learning rate"),
    "names of tensors": (Job(name="shardedlamb"), "not a supported DeepSpeed Optimizer"),
}


def test_refusals_name_the_line_to_change() -> None:
    """A configuration that cannot train right is refused by initialize(), on every rank."""
    jobs = [job for job, _ in REFUSED.values()]
    for results in run_procs(runs.WORLD, runs.run_all, jobs, timeout=TIMEOUT):
        for (name, (_, text)), result in zip(REFUSED.items(), results, strict=True):
            assert text in result.get("refusal", "trained"), (name, result)


def test_fp32_accumulation_at_stage_2() -> None:
    """bf16 parameters whose gradients accumulate in fp32 are DeepSpeed's stage 2 as ever."""
    job = Job(
        stage=2,
        mode="bf16",
        gas=2,
        clip=0.5,
        kind="integers",
        extra={"data_types": {"grad_accum_dtype": "fp32"}},
    )
    for result in run_procs(runs.WORLD, runs.run, job, timeout=TIMEOUT):
        assert error(job, result["values"], runs.reference(job)) < 1e-5
        assert math.isfinite(result["norm"])
