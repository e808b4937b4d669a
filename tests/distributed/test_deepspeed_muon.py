"""ShardedMuon under DeepSpeed: whole matrices from partitions, and the keys of DeepSpeed's Muon."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

pytest.importorskip("deepspeed")

from shardfuse import ShardedMuon
from tests.support import deepspeed_runs as runs
from tests.support.deepspeed_runs import CountOps, Job
from tests.support.harness import run_procs
from tests.support.models import Entry
from tests.support.runs import assert_bitwise

pytestmark = [pytest.mark.timeout(280), pytest.mark.filterwarnings("ignore:Muon orthogonalises")]

TIMEOUT = 200.0
EAGER = {"sharding": {"kernel": "eager"}}
MATRICES = tuple(
    Entry(f"hidden.{index}.weight", shape)
    for index, shape in enumerate([(120, 33), (24, 96), (24, 96), (24, 24), (24, 24)])
)
"""Of so few shapes that none share kernel calls, whose numbers are tensors and round otherwise."""

ENTRIES = (*runs.ENTRIES[:3], *MATRICES, *runs.ENTRIES[3:])
OURS = Job(
    name="ShardedMuon",
    params={"lr": 0.05, "adamw": {"lr": 0.01}, **EAGER},
    kind="integers",
    steps=5,
    gas=2,
    entries=ENTRIES,
)
THEIRS = dataclasses.replace(
    OURS,
    name="Muon",
    params={"lr": 0.05, "adam_lr": 0.01, "weight_decay": 0.1, "momentum": 0.9, "betas": [0.8, 0.9]},
)


def at_stages(job: Job, marks: dict[str, bool] | None = None) -> list[list[Tensor]]:
    """Return the masters after training at stages 0, 1 and 2."""
    ends = []
    for stage in range(3):
        own = dataclasses.replace(job, stage=stage)
        if marks is None:
            engine, model = runs.build(own)
        else:
            deepspeed, model = runs.start_deepspeed(), runs.Weights(own.entries)
            for name, param in model.named_parameters():
                if name in marks:
                    param.use_muon = marks[name]
            engine, *_ = deepspeed.initialize(
                model=model, model_parameters=model.groups(), config=own.config(runs.WORLD)
            )
        runs.train(own, engine)
        ends.append(runs.masters(own, engine, model))
        engine.destroy()
    return ends


def without_deepspeed(job: Job) -> list[Tensor]:
    """Return the parameters after the same training by a loop of one's own."""
    model = runs.Weights(job.entries)
    optimizer = ShardedMuon(model.groups(), **job.options)
    for step in range(job.steps):
        for micro in range(job.gas):
            grads = runs.rank_grads(
                job.kind, runs.WORLD, dist.get_rank(), step * job.gas + micro, job.entries
            )
            (model(grads) / job.gas).backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.synchronize()
    return [param.detach().clone() for param in model.members]


START = [param.detach() for param in runs.Weights(ENTRIES).members]


def assert_alike(ends: list[list[Tensor]], expected: list[Tensor]) -> None:
    for found in ends:
        assert_bitwise(found, expected)


@pytest.mark.parametrize("mode", ["fp32", "bf16"])
def test_every_stage_is_without_deepspeed(mode: str) -> None:
    """Partitions cut matrices anywhere. In bf16, stages are compared with each other."""
    job = dataclasses.replace(OURS, mode=mode, gas=2 if mode == "fp32" else 1)
    ranks = run_procs(runs.WORLD, at_stages, job, timeout=TIMEOUT)
    expected = run_procs(runs.WORLD, without_deepspeed, job)[0] if mode == "fp32" else ranks[0][0]
    for ends in ranks:
        assert_alike(ends, expected)
    moved = [not torch.equal(a, b) for a, b in zip(expected, START, strict=True)]
    assert mode == "bf16" or moved == [entry.role != "frozen" for entry in ENTRIES]


ZERO = (
    {"offload_optimizer": {"device": "cpu"}},
    {"round_robin_gradients": True},
    {"contiguous_gradients": False, "overlap_comm": True},
)


def test_convolutions_follow_adamw() -> None:
    """At every stage, as without DeepSpeed; torch.optim.Muon takes matrices alone."""
    entries = (*ENTRIES, Entry("conv.weight", (8, 4, 3, 3)))
    job = dataclasses.replace(OURS, entries=entries)
    expected = run_procs(runs.WORLD, without_deepspeed, job)[0]
    for ends in run_procs(runs.WORLD, at_stages, job, timeout=TIMEOUT):
        assert_alike(ends, expected)


def test_offloaded_and_in_another_order() -> None:
    """Options of ZeRO that place partitions elsewhere."""
    jobs = [dataclasses.replace(OURS, stage=2, zero=zero) for zero in ZERO]
    expected = run_procs(runs.WORLD, without_deepspeed, OURS)[0]
    for results in run_procs(runs.WORLD, runs.run_all, jobs, timeout=TIMEOUT):
        for found in results:
            assert "refusal" not in found, found
            assert_bitwise(found["values"], expected)


def test_marks_on_parameters() -> None:
    """They count at every stage; DeepSpeed, which looks for them, too, does nothing by them."""
    marks = {"hidden.0.weight": False, "hidden.1.weight": True, "embedding.weight": False}
    plain = run_procs(runs.WORLD, without_deepspeed, OURS)[0]
    for ends in run_procs(runs.WORLD, at_stages, OURS, marks, timeout=TIMEOUT):
        assert_alike(ends, ends[0])
        pairs = zip(ENTRIES, plain, ends[0], strict=True)
        differs = {entry.name for entry, a, b in pairs if not torch.equal(a, b)}
        assert differs == {"hidden.0.weight", "embedding.weight"}


def count_calls() -> list[tuple[str, int]]:
    """Return the all-to-alls of a step, by name, of native collectives."""
    options = {**OURS.options, "sharding": {"kernel": "eager", "collectives": "native"}}
    job = dataclasses.replace(OURS, stage=1, gas=1, params=options)
    engine, _ = runs.build(job)
    runs.train(job, engine, 0, 1)
    with CountOps() as counted:
        runs.train(job, engine, 1, 2)
    return [call for call in counted.calls if "alltoall" in call[0]]


def test_two_all_to_alls_for_each_group_of_matrices() -> None:
    """However many matrices a group has; the second group of the job has one 3-D tensor only."""
    for calls in run_procs(runs.WORLD, count_calls, timeout=TIMEOUT):
        assert len(calls) == 2


def go_on(folder: str, stage: int) -> tuple[list[Tensor], list[Tensor]]:
    """Return the values of training on, and of training on after a load into other weights."""
    job = dataclasses.replace(OURS, stage=stage, steps=6)
    engine, model = runs.build(job)
    runs.train(job, engine, 0, 3)
    engine.save_checkpoint(folder, tag="middle")
    runs.train(job, engine, 3, 6)
    other, loaded = runs.build(dataclasses.replace(job, shift=1.0))
    other.load_checkpoint(folder, tag="middle")
    runs.train(job, other, 3, 6)
    return runs.masters(job, engine, model), runs.masters(job, other, loaded)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_checkpoints(stage: int, tmp_path: Any) -> None:
    """Momentum is in DeepSpeed's files."""
    for expected, found in run_procs(runs.WORLD, go_on, str(tmp_path), stage, timeout=TIMEOUT):
        assert_bitwise(found, expected)


# {"type": "Muon"}


def translated() -> tuple[list[list[Tensor]], list[Tensor]]:
    """Return what {"type": "Muon"} trains at each stage by ours, and ShardedMuon by itself."""
    import shardfuse.deepspeed

    runs.start_deepspeed()
    shardfuse.deepspeed.register(replace_muon=True)
    job = dataclasses.replace(THEIRS, params={**THEIRS.params, **EAGER})
    ends = at_stages(job)
    own = {
        "lr": 0.05,
        "weight_decay": 0.1,
        "momentum": 0.9,
        "adamw": {"lr": 0.01, "betas": (0.8, 0.9), "eps": 1e-10},
        **EAGER,
    }
    # DeepSpeed marks parameters by name and shape, and no entry but a stack has three dimensions.
    model = runs.Weights(ENTRIES)
    first, second = model.groups()
    matrices = [p for p in first["params"] if p.dim() == 2 and p.shape != (211, 40)]
    ids = {id(p) for p in matrices}
    others = [p for p in first["params"] if id(p) not in ids]
    stacks = [p for p in second["params"] if p.dim() == 3]
    flat = [p for p in second["params"] if p.dim() != 3]
    rest = {key: value for key, value in second.items() if key != "params"}
    optimizer = ShardedMuon(
        [
            {"params": matrices, "use_muon": True},
            {"params": others, "use_muon": False},
            {"params": stacks, "use_muon": True, "split": 3, **rest},
            {"params": flat, "use_muon": False, **rest},
        ],
        **own,
    )
    for step in range(job.steps):
        for micro in range(job.gas):
            grads = runs.rank_grads(
                job.kind, runs.WORLD, dist.get_rank(), step * job.gas + micro, job.entries
            )
            (model(grads) / job.gas).backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.synchronize()
    return ends, [param.detach().clone() for param in model.members]


def test_deepspeeds_keys_are_translated() -> None:
    """Its defaults, its rates and its marks, at every stage."""
    for ends, expected in run_procs(runs.WORLD, translated, timeout=TIMEOUT):
        assert_alike(ends, expected)


def both(ns_method: str) -> tuple[list[Tensor], list[Tensor]]:
    """Return the parameters by DeepSpeed's Muon, then by ours, of one JSON at stage 1."""
    import torch._dynamo

    import shardfuse.deepspeed

    torch._dynamo.config.disable = True  # DeepSpeed compiles its iteration, which takes long
    runs.start_deepspeed()
    found = []
    for replace in (False, True):
        shardfuse.deepspeed.register(replace_muon=replace)
        params = {**THEIRS.params, "ns_method": ns_method, "torch_adam": True}
        entries = tuple(entry for entry in ENTRIES if len(entry.shape) != 3)
        job = dataclasses.replace(
            THEIRS, params=params, stage=1, kind="floats", steps=3, entries=entries
        )
        result = runs.run(job)
        assert "refusal" not in result, result
        found.append(result["values"])
    return found[0], found[1]


@pytest.mark.parametrize("ns_method", ["standard", "gram"])
def test_as_deepspeeds_own(ns_method: str) -> None:
    """Within what iterations in 16 bits differ."""
    entries = tuple(entry for entry in ENTRIES if len(entry.shape) != 3)
    start = [param.detach() for param in runs.Weights(entries).members]
    theirs, ours = run_procs(runs.WORLD, both, ns_method, timeout=TIMEOUT)[0]
    for entry, before, a, b in zip(entries, start, theirs, ours, strict=True):
        moved, differs = float((a - before).norm()), float((a - b).norm())
        is_matrix = len(entry.shape) == 2 and "embed" not in entry.name
        assert differs <= (0.04 if is_matrix else 1e-4) * moved, entry.name


def refused() -> dict[str, str]:
    import shardfuse.deepspeed

    runs.start_deepspeed()
    shardfuse.deepspeed.register(replace_muon=True)
    found = {}
    for key, value in REFUSED:
        params = {**THEIRS.params, key: value}
        found[key] = str(runs.run(dataclasses.replace(THEIRS, params=params)).get("refusal"))
    job = dataclasses.replace(THEIRS, entries=(Entry("conv.weight", (4, 3, 2, 2)),))
    model = runs.Weights(job.entries)
    with pytest.raises(ValueError, match="flattens a parameter") as error:
        runs.start_deepspeed().initialize(
            model=model, model_parameters=list(model.parameters()), config=job.config(runs.WORLD)
        )
    found["conv"] = str(error.value)
    return found


REFUSED = [
    ("adam_w_mode", False),
    ("fp32_optimizer_states", False),
    ("ns_method", "other"),
    ("ns_steps", 3),
    ("max_grad_norm", 1.0),
]


def test_keys_without_a_counterpart() -> None:
    """Each is named, with what to write."""
    for found in run_procs(runs.WORLD, refused, timeout=TIMEOUT):
        for key, _ in REFUSED:
            assert f'"{key}"' in found[key], found[key]
        assert "ShardedMuon" in found["conv"]
