"""Optimizers by name in DeepSpeed's JSON: parity at every stage, traffic, overflow, refusals."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support import deepspeed_runs as runs
from tests.support.deepspeed_runs import Job
from tests.support.harness import log_of_shardfuse, run_procs
from tests.support.runs import max_relative_error

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed"
)

TIMEOUT = 200.0

VARIANTS = ("npu", "apex", "nvlamb", "google", "paddle", "deepspeed")


def error_of(job: Job, result: dict[str, Any]) -> float:
    """Return the largest relative error against per-tensor fp64 math, after checking that it ran.

    Also that the model itself, not only a master copy, is where it should be.
    """
    assert "refusal" not in result, result.get("refusal")
    start = [param.detach() for param in runs.Weights(job.entries).members]
    expected = runs.reference(job)
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(job.mode, torch.float32)
    for model, master, before, entry in zip(
        result["model"], result["values"], start, job.entries, strict=True
    ):
        assert torch.equal(model, master.to(dtype).float())
        assert torch.equal(model, before.to(dtype).float()) == (entry.role == "frozen")
    return max_relative_error(result["values"], expected, start)


@pytest.fixture(scope="module")
def lamb() -> list[tuple[Job, list[dict[str, Any]]]]:
    jobs = [
        Job(stage=stage, params={"variant": variant}, gas=2, clip=0.5)
        for stage in (0, 1, 2)
        for variant in VARIANTS
    ]
    jobs += [
        Job(stage=stage, params={"use_global_grad_norm": True, "clip_grad_norm": 0.3}, clip=clip)
        for stage in (0, 1, 2)
        for clip in (0.0, 0.2, 1.0)
    ]
    jobs += [Job(stage=stage, params={"adam": True}, steps=3) for stage in (1, 2)]
    results = run_procs(runs.WORLD, runs.run_all, jobs, timeout=TIMEOUT)
    return [(job, list(ranks)) for job, *ranks in zip(jobs, *results, strict=True)]


@pytest.mark.parametrize("index", range(29))
def test_lamb_is_exact_per_tensor(
    lamb: Sequence[tuple[Job, list[dict[str, Any]]]], index: int
) -> None:
    """10 steps, two groups, tensors cut by partitions, accumulation, clipping, every variant."""
    job, results = lamb[index]
    for result in results:
        assert error_of(job, result) < 1e-5
        if job.clip:
            expected = runs.grad_norm(runs.step_grads(job, job.steps - 1))
            assert expected > job.clip
            assert math.isclose(result["norm"], expected, rel_tol=1e-5)


def test_trust_ratios_are_named_and_the_same_at_every_stage(
    lamb: Sequence[tuple[Job, list[dict[str, Any]]]],
) -> None:
    """trust_ratios() tells of every tensor by its name in the model, on every rank."""
    of_variant: dict[str, list[dict[str, float]]] = {}
    for job, results in lamb[: 3 * len(VARIANTS)]:
        of_variant.setdefault(str(job.params["variant"]), []).extend(r["ratios"] for r in results)
    for variant, found in of_variant.items():
        assert len(found) == 3 * runs.WORLD
        assert "head.LayerNorm.bias" in found[0]
        assert (found[0]["head.LayerNorm.bias"] == 1.0) == (variant == "google")
        for ratios in found[1:]:
            assert ratios == pytest.approx(found[0], rel=1e-4)


def deepspeeds_own_lamb(jobs: Sequence[Job]) -> list[dict[str, Any]]:
    """Run `{"type": "Lamb"}` by DeepSpeed's FusedLamb, then by ours, from the same JSON."""
    deepspeed = runs.start_deepspeed()
    import deepspeed.ops.lamb.fused_lamb as fused_lamb
    from deepspeed.ops.op_builder.npu.fused_lamb import NPUFusedLamb

    import shardfuse.deepspeed

    # DeepSpeed has no LAMB kernel for CPUs; that of its NPU backend is written in torch.
    fused_lamb.FusedLambBuilder = lambda: SimpleNamespace(load=lambda: NPUFusedLamb)
    own = [runs.run(job) for job in jobs]
    shardfuse.deepspeed.register(replace_lamb=True)
    ours = [runs.run(job) for job in jobs]
    config = {**jobs[0].config(), "zero_allow_untested_optimizer": False}
    del config["optimizer"]
    # A model of its own: DeepSpeed leaves its hooks on one that it has refused.
    refused = runs.Weights(jobs[0].entries)
    instance = deepspeed.ops.lamb.FusedLamb(refused.groups(), **jobs[0].options)
    scheduler = torch.optim.lr_scheduler.LambdaLR(instance, lambda step: 1.0)
    with pytest.raises(ValueError, match="lr_scheduler=lambda optimizer"):
        deepspeed.initialize(
            model=refused, optimizer=instance, lr_scheduler=scheduler, config=config
        )
    model = runs.Weights(jobs[0].entries)
    instance = deepspeed.ops.lamb.FusedLamb(model.groups(), **jobs[0].options)
    engine, *_ = deepspeed.initialize(model=model, optimizer=instance, config=config)
    runs.train(jobs[0], engine)
    given = {
        "values": runs.masters(jobs[0], engine, model),
        "model": [p.detach().clone() for p in model.members],
    }
    return [*own, *ours, given]


def test_deepspeeds_own_lamb_is_not_exact_and_its_replacement_is() -> None:
    """The same JSON, {"type": "Lamb"}: DeepSpeed's norms are those of its flat partitions."""
    jobs = [
        Job(
            name="Lamb",
            params={"lr": 0.05, "weight_decay": 0.1, "max_coeff": 10.0, "min_coeff": 0.01},
            stage=stage,
            gas=2,
            clip=0.5,
            extra={"zero_allow_untested_optimizer": True},
        )
        for stage in (1, 2)
    ]
    results = run_procs(runs.WORLD, deepspeeds_own_lamb, jobs, timeout=TIMEOUT)
    for own_1, own_2, ours_1, ours_2, given in results:
        for job, own, ours in zip(jobs, (own_1, own_2), (ours_1, ours_2), strict=True):
            same = Job(**{**vars_of(job), "name": "ShardedLamb", "params": fused_lamb_params(job)})
            assert error_of(same, own) > 1e-2
            assert error_of(same, ours) < 1e-5
        same = Job(**{**vars_of(jobs[0]), "name": "ShardedLamb", "params": fused_lamb_params(job)})
        assert error_of(same, given) < 1e-5


def vars_of(job: Job) -> dict[str, Any]:
    """Return the fields of a job."""
    return {name: getattr(job, name) for name in job.__dataclass_fields__}


def fused_lamb_params(job: Job) -> dict[str, Any]:
    """Return what the fp64 LAMB needs to be DeepSpeed's formula."""
    return {**job.params, "variant": "deepspeed", "eps": 1e-8}


ZERO_OPTIONS: dict[str, dict[str, Any]] = {
    "offload": {"offload_optimizer": {"device": "cpu"}},
    "pinned offload": {"offload_optimizer": {"device": "cpu", "pin_memory": False}},
    "round robin": {"round_robin_gradients": True},
    "not contiguous": {"contiguous_gradients": False},
    "overlap": {"overlap_comm": True},
    "aligned": {"parameter_alignment": True},
    "small buckets": {"reduce_bucket_size": 3000, "allgather_bucket_size": 3000},
}


@pytest.fixture(scope="module")
def options() -> dict[tuple[str, int], tuple[Job, list[dict[str, Any]]]]:
    keys = [(name, stage) for name in ZERO_OPTIONS for stage in (1, 2)]
    jobs = [
        Job(stage=stage, zero=ZERO_OPTIONS[name], params={"variant": "nvlamb"}, clip=0.5, gas=2)
        for name, stage in keys
    ]
    results = run_procs(runs.WORLD, runs.run_all, jobs, timeout=TIMEOUT)
    per_job = [(job, list(ranks)) for job, *ranks in zip(jobs, *results, strict=True)]
    return dict(zip(keys, per_job, strict=True))


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("name", ZERO_OPTIONS)
def test_options_of_zero(
    options: dict[tuple[str, int], tuple[Job, list[dict[str, Any]]]], name: str, stage: int
) -> None:
    """However DeepSpeed arranges its partitions, LAMB finds the tensors in them."""
    job, results = options[name, stage]
    for result in results:
        assert error_of(job, result) < 1e-5


def test_a_dynamic_scale_that_grows() -> None:
    """DeepSpeed divides by the scale it has grown to, which gradients were not multiplied by."""
    fp16 = {"enabled": True, "initial_scale_power": 2, "loss_scale_window": 2}
    common: dict[str, Any] = {"mode": "fp16", "kind": "integers", "steps": 5}
    jobs = [
        Job(name="ShardedSGD", stage=stage, clip=clip, zero=zero, extra={"fp16": fp16}, **common)
        for stage, zero in ((1, {}), (2, {}), (2, ZERO_OPTIONS["offload"]))
        for clip in (0.0, 300.0)
    ]
    for results in run_procs(runs.WORLD, runs.run_all, jobs, timeout=TIMEOUT):
        for job, result in zip(jobs, results, strict=True):
            assert error_of(job, result) < 1e-6


# Three ranks and four elements a group: partitions of padding alone, and of a part of a tensor.
TINY = (runs.Entry("a.weight", (3,)), runs.Entry("b.bias", (1,)), runs.Entry("c", (1,), group=1))


def test_partitions_that_hold_nothing() -> None:
    """Ranks without a tensor of a group take part in its norms all the same."""
    jobs = [
        Job(name=name, stage=stage, entries=TINY, alike=True, steps=3)
        for name in ("ShardedLamb", "ShardedAdamW")
        for stage in (0, 1, 2)
    ]
    for results in run_procs(3, runs.run_all, jobs, timeout=TIMEOUT):
        for job, result in zip(jobs, results, strict=True):
            assert error_of(job, result) < 1e-5


def messages_of_bind(job: Job) -> list[str]:
    """Return what the plug-in logs while it builds."""
    messages = log_of_shardfuse()
    runs.build(job)
    return messages


@pytest.mark.parametrize("name", ["round robin", "overlap"])
def test_a_wrong_map_of_deepspeeds_is_told(name: str) -> None:
    """Universal checkpoints go by a map that round robin makes wrong: ranks that see it warn."""
    job = Job(stage=1, zero=ZERO_OPTIONS[name])
    first, second = run_procs(runs.WORLD, messages_of_bind, job, timeout=TIMEOUT)
    told = any("Do not convert checkpoints of this run" in message for message in [*first, *second])
    assert told == (name == "round robin")


def count_traffic(job: Job) -> tuple[list[tuple[str, int]], int, int]:
    """Return (collectives of one optimizer step, buckets, elements of all gradients)."""
    engine, _ = runs.build(job)
    runs.train(job, engine, 0, 1)
    with runs.CountOps() as count:
        runs.train(job, engine, 1, 2)
    layout = engine.optimizer.layout
    awake = [flat for flat in layout.flats if not flat.frozen]
    dist.barrier()
    return (
        count.calls,
        sum(len(flat.buckets) for flat in awake),
        sum(flat.numel for flat in awake),
    )


@pytest.mark.gloo_only("counts what gloo is given, by the dispatcher")
@pytest.mark.parametrize("name", ["ShardedLamb", "ShardedAdamW"])
@pytest.mark.parametrize("collectives", ["native", "pairwise", "auto"])
def test_traffic_at_stage_0(name: str, collectives: str) -> None:
    """One reduce-scatter and one all-gather a bucket and step; the engine all-reduces nothing."""
    sharding = {"bucket_cap_mb": 0.02, "collectives": collectives}
    job = Job(name=name, params={"sharding": sharding}, gas=3, steps=2, clip=0.5)
    for calls, buckets, numel in run_procs(runs.WORLD, count_traffic, job, timeout=TIMEOUT):
        assert buckets >= 4
        # The squared norms of the clip, and LAMB's two per tensor; between pairs they are sent to
        # the other rank, and with "auto" nothing is where ranks read each other's memory. Sends
        # beside gloo's own collectives compare the two calls, clip and step, by a number each.
        small = [n for op, n in calls if op == "send" and n < 100]
        reduced = [n for op, n in calls if op == "allreduce_"]
        if collectives == "native":
            assert small == [1, 1]
        else:
            reduced += small
        rest = [(op, n) for op, n in calls if op != "allreduce_" and n >= 100]
        assert sum(reduced) < 100 < numel
        if collectives != "auto" or rest:
            agreed = int(collectives != "native")  # on what has changed since it was sent
            assert len(reduced) == (2 if name == "ShardedLamb" else 1) + agreed
        if collectives == "native":
            assert sorted({op for op, _ in rest}) == ["_allgather_base_", "_reduce_scatter_base_"]
            for op in ("_allgather_base_", "_reduce_scatter_base_"):
                moved = [n for other, n in rest if other == op]
                assert len(moved) == buckets
                assert sum(moved) == numel
        elif collectives == "pairwise" or rest:
            # To the other rank go its half of the gradients and our own parameters.
            sent = [n for op, n in rest if op == "send"]
            assert len(sent) == 2 * buckets
            assert sum(sent) == numel
            assert {op for op, _ in rest} <= {"send", "recv_", "recv_any_source_"}


OVERFLOWS = [
    Job(
        stage=0,
        extra={"torch_autocast": {"enabled": True, "dtype": "float16"}},
        overflow_at=2,
        clip=0.5,
    ),
    Job(stage=0, extra={"torch_autocast": {"enabled": True, "dtype": "float16"}}, overflow_at=2),
    Job(stage=0, mode="bf16", overflow_at=2, clip=0.5),
    Job(stage=0, mode="bf16", params={"sharding": {"stage": 2}}, overflow_at=2),
    Job(stage=1, mode="fp16", kind="integers", overflow_at=2, clip=0.5),
    Job(stage=2, mode="fp16", kind="integers", overflow_at=2),
    Job(stage=2, mode="bf16", overflow_at=2),
]


def train_past_overflow(jobs: Sequence[Job]) -> list[dict[str, Any]]:
    """Return what the engine tells before, at and after the step that overflows."""
    found = []
    for job in jobs:
        engine, model = runs.build(job, lr_scheduler=counting_scheduler)
        told = []
        skipped = -1
        while engine.skipped_steps > skipped:  # until a dynamic scale has found its level
            skipped = engine.skipped_steps
            runs.train(job, engine, 100, 101)
        for step in range(5):
            before = runs.masters(job, engine, model)
            runs.train(job, engine, step, step + 1)
            after = runs.masters(job, engine, model)
            moved = [not torch.equal(a, b) for a, b in zip(before, after, strict=True)]
            norm = engine.get_global_grad_norm()
            told.append((engine.skipped_steps - skipped, engine.get_lr()[0], any(moved), norm))
        found.append({"told": told, "values": after})
    return found


def counting_scheduler(optimizer: torch.optim.Optimizer) -> Any:
    """Return a schedule whose rate tells how often it was stepped."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 - 0.1 * step)


# Not all stages in one process: DeepSpeed goes on to take fp16 autocast as asked for.
@pytest.mark.parametrize("stages", [(0,), (1, 2)])
def test_overflow_is_agreed(stages: tuple[int, ...]) -> None:
    """One rank's infinite gradient: all skip, nothing moves, the schedule waits, all go on."""
    jobs = [job for job in OVERFLOWS if job.stage in stages]
    first, second = run_procs(runs.WORLD, train_past_overflow, jobs, timeout=TIMEOUT)
    for job, one, two in zip(jobs, first, second, strict=True):
        skipped, rates, moved, norms = zip(*one["told"], strict=True)
        assert skipped == (0, 0, 1, 1, 1)
        assert [round(rate / job.options["lr"], 6) for rate in rates] == [0.8, 0.7, 0.7, 0.6, 0.5]
        assert moved == (True, True, False, True, True)
        if job.clip:
            assert [math.isinf(float(norm)) for norm in norms] == [False, False, True, False, False]
        assert two["told"][2][:3] == one["told"][2][:3]
        for a, b in zip(one["values"], two["values"], strict=True):
            assert torch.equal(a, b)
            assert torch.isfinite(a).all()
