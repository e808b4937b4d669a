"""optim.paddle.Lamb given to DeepSpeed: its own scheduler, clips, decays and factors at each stage.

What it is compared with is the same optimizer without DeepSpeed, on the same ranks.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from shardfuse import ShardedSGD
from shardfuse.optim.paddle import ClipGradByGlobalNorm, ClipGradByNorm, ClipGradByValue, Lamb
from tests.support import deepspeed_runs as runs
from tests.support.deepspeed_runs import Job
from tests.support.harness import run_procs
from tests.support.models import rank_grads
from tests.support.runs import max_relative_error

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed"
)

TIMEOUT = 200.0
STAGES = (0, 1, 2)
NUM_STEPS = 4

CLIPS: dict[str, Any] = {
    "none": None,
    "norm": ClipGradByNorm(0.7),
    "norm-unreached": ClipGradByNorm(1e6),
    "global": ClipGradByGlobalNorm(2.0),
    "value": ClipGradByValue(0.3, -0.2),
}
# Every group by another clip, with Paddle's L2 decay and a rate of its own.
OWN = {"grad_clip": ClipGradByNorm(0.5), "weight_decay": 0.3, "learning_rate": 0.5, "beta1": 0.8}


class Falling:
    """A scheduler as Paddle's are: called for the rate, stepped and saved by the user."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> float:
        return 0.1 * 0.5**self.count

    def step(self) -> None:
        self.count += 1

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def set_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


def build(
    entries: Sequence[runs.Entry], clip: str, *, own: bool, **options: Any
) -> tuple[Falling, runs.Weights, Lamb]:
    """Return (scheduler, model, optimizer); with ``own``, a group that differs in everything."""
    model, scheduler = runs.Weights(entries), Falling()
    names = {id(param): name for name, param in model.named_parameters()}
    groups = []
    for index, group in enumerate(model.groups()):
        named = [(names[id(param)], param) for param in group["params"]]
        groups.append({"params": named, **(OWN if own and index else {})})
    optimizer = Lamb(
        learning_rate=scheduler,
        lamb_weight_decay=0.1,
        beta2=0.99,
        parameters=groups,
        grad_clip=CLIPS[clip],
        exclude_from_weight_decay_fn=lambda param: param.dim() < 2,
        **options,
    )
    return scheduler, model, optimizer


def grads_of(job: Job, step: int) -> list[Tensor | None]:
    """Return this rank's gradients."""
    ranks = (1, 0) if job.alike else (dist.get_world_size(), dist.get_rank())
    return list(rank_grads(job.kind, *ranks, step, job.entries))


def train_alone(job: Job, clip: str, own: bool) -> list[Tensor]:
    """Return the values after training without DeepSpeed."""
    scheduler, model, optimizer = build(job.entries, clip, own=own)
    for step in range(NUM_STEPS):
        model(grads_of(job, step)).backward()
        optimizer.step()
        optimizer.clear_grad()
        scheduler.step()
    return [param.detach().clone() for param in model.members]


def engine_of(job: Job, model: torch.nn.Module, optimizer: Any, **kwargs: Any) -> Any:
    """Return the engine."""
    config = job.config(dist.get_world_size())
    deepspeed = runs.start_deepspeed()
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config, **kwargs)[0]


def train_driven(job: Job, clip: str, own: bool) -> tuple[list[Tensor], list[float]]:
    """Return (values, rates of the first group) of the same training by an engine."""
    scheduler, model, optimizer = build(job.entries, clip, own=own)
    engine = engine_of(job, model, optimizer)
    rates = []
    for step in range(NUM_STEPS):
        engine.backward(engine(grads_of(job, step)))
        engine.step()
        rates.append(engine.get_lr()[0])
        scheduler.step()
    values = [param.detach().clone() for param in model.members]
    engine.destroy()
    return values, rates


CASES = {f"{clip}-{own}": (clip, own) for clip in CLIPS for own in (False, True)}

JOBS = {
    **{f"stage {stage}": Job(how="instance", stage=stage) for stage in STAGES},
    "offload": Job(
        how="instance",
        stage=2,
        zero={"offload_optimizer": {"device": "cpu"}},
        extra={"zero_force_ds_cpu_optimizer": False},
    ),
    "round robin": Job(how="instance", stage=1, zero={"round_robin_gradients": True}),
}
KEYS = [
    *((case, job) for case in CASES for job in list(JOBS)[:3]),
    *((case, job) for case in ("norm-True", "global-False") for job in list(JOBS)[3:]),
]

Trained = tuple[dict[str, list[Tensor]], dict[tuple[str, str], Any]]


def train_all(keys: Sequence[tuple[str, str]]) -> Trained:
    """Return ({case: values alone}, {(case, job): (values driven, rates)})."""
    alone = {case: train_alone(JOBS["stage 0"], *CASES[case]) for case, _ in keys}
    return alone, {key: train_driven(JOBS[key[1]], *CASES[key[0]]) for key in keys}


@pytest.fixture(scope="module")
def trained() -> list[Trained]:
    return run_procs(runs.WORLD, train_all, KEYS, timeout=TIMEOUT)


@pytest.mark.parametrize("key", KEYS, ids="-".join)
def test_equals_the_optimizer_alone(trained: list[Trained], key: tuple[str, str]) -> None:
    """Whole tensors' norms wherever partitions cut them, and the rate of the scheduler's step."""
    start = [param.detach() for param in runs.Weights(runs.ENTRIES).members]
    for alone, driven in trained:
        values, rates = driven[key]
        assert max_relative_error(values, alone[key[0]], start) < 1e-6
        assert rates == pytest.approx([0.1 * 0.5**step for step in range(NUM_STEPS)])


def test_cases_differ(trained: list[Trained]) -> None:
    """Each clip ends elsewhere, so that agreeing says something; one that is not reached does not.

    Groups of their own differ by more than that, too.
    """
    start = [param.detach() for param in runs.Weights(runs.ENTRIES).members]
    ends = trained[0][0]
    same = {
        frozenset((a, b))
        for a in ends
        for b in ends
        if a != b and max_relative_error(ends[a], ends[b], start) < 1e-4
    }
    assert same == {frozenset((f"none-{own}", f"norm-unreached-{own}")) for own in (False, True)}


# More ranks than some groups have elements, so that a rank may have padding alone.
TINY = (runs.Entry("a.weight", (3,)), runs.Entry("b.bias", (1,)), runs.Entry("c", (1,), group=1))


def train_tiny() -> list[list[Tensor]]:
    """Return the values alone, then those at each stage."""
    jobs = [Job(how="instance", stage=stage, entries=TINY, alike=True) for stage in STAGES]
    return [
        train_alone(jobs[0], "global", True),
        *(train_driven(job, "global", True)[0] for job in jobs),
    ]


def test_partitions_that_hold_nothing() -> None:
    """A rank without a tensor of a group takes part in that group's norms all the same."""
    start = [param.detach() for param in runs.Weights(TINY).members]
    for alone, *driven in run_procs(3, train_tiny, timeout=TIMEOUT):
        for values in driven:
            assert max_relative_error(values, alone, start) < 1e-6


def all_reduced(stage: int) -> dict[str, list[int]]:
    """Return the elements of every all-reduce that step() itself makes, by clip."""
    found = {}
    for clip in ("none", "norm", "global", "value"):
        native = {"collectives": "native"}  # gloo's own, which can be counted
        _, model, optimizer = build(runs.ENTRIES, clip, own=False, sharding=native)
        job = Job(how="instance", stage=stage)
        engine = engine_of(job, model, optimizer)
        engine.backward(engine(grads_of(job, 0)))
        own = type(optimizer).step
        with runs.CountOps() as count:
            engine.step()
        assert own is type(optimizer).step
        found[clip] = [numel for op, numel in count.calls if op.startswith("allreduce")]
        dist.barrier()
    return found


def resume(folder: str) -> list[tuple[list[Tensor], list[Tensor]]]:
    """Return (values of a whole run, of one that was saved and loaded) for each stage."""
    found = []
    for stage in STAGES:
        job = Job(how="instance", stage=stage)
        whole = train_driven(job, "norm", True)[0]
        for part in (range(2), range(2, NUM_STEPS)):
            scheduler, model, optimizer = build(job.entries, "norm", own=True)
            engine = engine_of(job, model, optimizer)
            if part.start:
                engine.load_checkpoint(f"{folder}/{stage}", tag="middle")
                assert scheduler.count == 2
            for step in part:
                engine.backward(engine(grads_of(job, step)))
                engine.step()
                scheduler.step()
            if not part.start:
                engine.save_checkpoint(f"{folder}/{stage}", tag="middle")
        found.append((whole, [param.detach().clone() for param in model.members]))
    return found


def refused() -> dict[str, str]:
    """Return the errors of what cannot be right."""
    warmup = {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 20}}}
    jobs: dict[str, tuple[Job, dict[str, Any]]] = {}
    for stage in STAGES:
        jobs[f"scheduler block {stage}"] = Job(how="instance", stage=stage, extra=warmup), {}
        rates = {"lr_scheduler": lambda optimizer: None}
        jobs[f"lr_scheduler {stage}"] = Job(how="instance", stage=stage), rates
    elastic = {"elastic_checkpoint": True}
    jobs["elastic"] = Job(how="instance", stage=1, zero=elastic), {}
    universal = {"checkpoint": {"load_universal": True}}
    jobs["universal"] = Job(how="instance", stage=1, extra=universal), {}
    found = {}
    for name, (job, kwargs) in jobs.items():
        _, model, optimizer = build(job.entries, "none", own=False)
        found[name] = error_of(lambda: engine_of(job, model, optimizer, **kwargs))  # noqa: B023
    _, model, optimizer = build(runs.ENTRIES, "none", own=False)
    engine_of(Job(how="instance", stage=1), model, optimizer)
    model = runs.Weights(runs.ENTRIES)
    apart = ShardedSGD(model.groups(), 0.1, sharding={"process_group": "alone"})
    found["apart"] = error_of(lambda: engine_of(Job(how="instance"), model, apart))
    found["minimize"] = error_of(lambda: optimizer.minimize(torch.zeros(())))
    return found


def error_of(action: Callable[[], Any]) -> str:
    """Return the error of an action, or that there was none."""
    try:
        action()
    except Exception as failure:
        return f"{type(failure).__name__}: {failure}"
    return "no error"


def count_hooks() -> dict[int, tuple[int, int]]:
    """Return {stage: how often hooks before and after a step were called in two steps}."""
    found = {}
    for stage in STAGES:
        _, model, optimizer = build(runs.ENTRIES, "none", own=False)
        calls = []
        optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))  # noqa: B023
        job = Job(how="instance", stage=stage)
        engine = engine_of(job, model, optimizer)
        optimizer.register_step_post_hook(lambda *_: calls.append("post"))  # noqa: B023
        for step in range(2):
            engine.backward(engine(grads_of(job, step)))
            engine.step()
        found[stage] = calls.count("pre"), calls.count("post")
    return found


def look(folder: str) -> dict[str, Any]:
    """Return what the tests below are about; one job, for importing DeepSpeed takes seconds."""
    return {
        "all-reduces": all_reduced(1),
        "resumed": resume(folder),
        "refused": refused(),
        "hooks": count_hooks(),
    }


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("checkpoints")
    return run_procs(runs.WORLD, look, str(folder), timeout=TIMEOUT)


@pytest.mark.gloo_only("counts what gloo is given, by the dispatcher")
def test_a_clip_by_norm_is_one_small_all_reduce_a_group(seen: list[dict[str, Any]]) -> None:
    """One float a tensor for ClipGradByNorm; for ClipGradByGlobalNorm two a group, else none.

    These are of its decayed and its undecayed parameters.
    """
    for counts in (rank["all-reduces"] for rank in seen):
        sizes = [
            len([e for e in runs.ENTRIES if e.group == group and e.role == "used"])
            for group in (0, 1)
        ]
        assert counts["value"] == counts["none"]
        extra = {clip: len(counts[clip]) - len(counts["none"]) for clip in counts}
        assert extra == {"none": 0, "value": 0, "norm": 2, "global": 2}
        assert sum(counts["norm"]) == sum(counts["none"]) + sum(sizes)
        assert sum(counts["global"]) == sum(counts["none"]) + 2 * 2


def test_checkpoints_hold_the_scheduler(seen: list[dict[str, Any]]) -> None:
    """A run that is loaded goes on at the rate it was saved at, and ends where a whole one does."""
    for rank in seen:
        for whole, resumed in rank["resumed"]:
            assert all(torch.equal(a, b) for a, b in zip(whole, resumed, strict=True))


def test_what_cannot_be_right_is_refused(seen: list[dict[str, Any]]) -> None:
    """Two schedulers of one rate, and checkpoints without the scheduler: refused at the start."""
    for found in (rank["refused"] for rank in seen):
        for name, text in found.items():
            if name == "minimize":
                assert text.startswith("RuntimeError: minimize() is not available"), text
            elif name == "apart":
                assert text.startswith("ValueError: ShardedSGD was built for 1 rank, the"), text
            elif name in ("elastic", "universal"):
                assert text.startswith("ValueError: The scheduler that Lamb was given"), text
            else:
                assert text.startswith("ValueError: Lamb reads its learning rate from"), (
                    name,
                    text,
                )


def test_step_hooks_are_called(seen: list[dict[str, Any]]) -> None:
    """Once a step at stage 0; else once a group, for so DeepSpeed calls step()."""
    for rank in seen:
        assert rank["hooks"] == {0: (2, 2), 1: (4, 4), 2: (4, 4)}
