"""engine.save_checkpoint and load_checkpoint: what is in the files, and how training goes on."""

from __future__ import annotations

import dataclasses
import importlib.util
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.support import deepspeed_runs as runs
from tests.support.deepspeed_runs import Job
from tests.support.harness import run_procs
from tests.support.runs import assert_bitwise, max_relative_error

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed"
)

TIMEOUT = 200.0
SAVED_AT = 4
END = 8

SCHEDULE = {
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 20, "warmup_max_lr": 0.05}}
}


def job_of(name: str, stage: int, mode: str) -> Job:
    """Return a job that is the same at every world size."""
    return Job(
        name=name,
        stage=stage,
        mode=mode,
        steps=END,
        kind="integers",
        alike=True,
        clip=0.5,
        extra=SCHEDULE,
    )


JOBS = {
    f"{name}-{stage}-{mode}": job_of(name, stage, mode)
    for name in ("ShardedLamb", "ShardedAdamW", "ShardedSGD", "ShardedRMSpropTF", "ShardedAdamP")
    for stage in (0, 1, 2)
    for mode in ("fp32", "bf16")
    if (name, stage) not in (("ShardedAdamP", 1), ("ShardedAdamP", 2))
}

JOBS["amsgrad-1-fp32"] = dataclasses.replace(
    job_of("ShardedAdamW", 1, "fp32"), params={"amsgrad": True}
)

STATES = {
    "ShardedSGD": ["momentum_buffer"],
    "ShardedRMSpropTF": ["square_avg", "momentum_buffer"],
}


def save(folder: str) -> dict[str, list[Tensor]]:
    """Save every job in the middle of its training; return the values at the end of it."""
    found = {}
    for key, job in JOBS.items():
        engine, model = runs.build(job)
        runs.train(job, engine, 0, SAVED_AT)
        engine.save_checkpoint(f"{folder}/{key}", tag="middle")
        runs.train(job, engine, SAVED_AT, END)
        found[key] = runs.masters(job, engine, model)
    return found


def resume(folder: str, keys: Sequence[str], universal: bool) -> dict[str, Any]:
    """Load every job into other weights and train to the end; return values, or the error."""
    found: dict[str, Any] = {}
    for key in keys:
        job = dataclasses.replace(JOBS[key], shift=1.0)
        if universal:
            extra = {**job.extra, "checkpoint": {"load_universal": True}}
            job = dataclasses.replace(job, extra=extra)
        engine, model = runs.build(job)
        try:
            path, _ = engine.load_checkpoint(
                f"{folder}/{key}", tag="universal" if universal else "middle"
            )
            assert path is not None
            assert engine.global_steps == SAVED_AT
            runs.train(job, engine, SAVED_AT, END)
        except Exception as error:
            found[key] = f"{type(error).__name__}: {error}"
            continue
        found[key] = runs.masters(job, engine, model)
    return found


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, list[Tensor]]]:
    folder = str(tmp_path_factory.mktemp("deepspeed"))
    first, second = run_procs(runs.WORLD, save, folder, timeout=TIMEOUT)
    for key in JOBS:
        assert_bitwise(first[key], second[key])
    return folder, first


def start_of(key: str) -> list[Tensor]:
    return [param.detach() for param in runs.Weights(JOBS[key].entries).members]


Saved = tuple[str, dict[str, list[Tensor]]]


@pytest.mark.parametrize("key", [key for key, job in JOBS.items() if job.stage == 0])
def test_what_rank_0_writes_at_stage_0_is_whole(saved: Saved, key: str) -> None:
    """The one file holds the full state of every trained parameter, of all ranks' shards."""
    job = JOBS[key]
    path = Path(saved[0]) / key / "middle" / "mp_rank_00_model_states.pt"
    optimizer = torch.load(path, weights_only=False)["optimizer"]
    names = [*STATES.get(job.name, ["exp_avg", "exp_avg_sq"])]
    names += ["param"] if job.mode == "bf16" else []
    trained = [entry for entry in job.entries if entry.role == "used"]
    assert len(optimizer["state"]) == len(trained)
    shapes = sorted(tuple(state[names[0]].shape) for state in optimizer["state"].values())
    assert shapes == sorted(entry.shape for entry in trained)
    for state in optimizer["state"].values():
        assert all(bool(state[name].any()) for name in names)
    assert not list((Path(saved[0]) / key / "middle").glob("*zero_pp_rank*"))


def test_load_at_the_same_world_size(saved: Saved) -> None:
    """Save at 2 ranks, load at 2: bitwise as if training had not stopped, at every stage."""
    folder, expected = saved
    for found in run_procs(2, resume, folder, list(JOBS), False, timeout=TIMEOUT):
        for key in JOBS:
            assert isinstance(found[key], list), (key, found[key])
            assert_bitwise(found[key], expected[key])


def test_load_at_another_world_size(saved: Saved) -> None:
    """Save at 2 ranks, load at 3: at stage 0 training goes on; at 1 and 2 DeepSpeed says no."""
    folder, expected = saved
    for found in run_procs(3, resume, folder, list(JOBS), False, timeout=TIMEOUT):
        for key, job in JOBS.items():
            if job.stage > 0:
                assert "DP world size of 2" in found[key]
                continue
            assert isinstance(found[key], list), (key, found[key])
            assert max_relative_error(found[key], expected[key], start_of(key)) < 1e-6


def test_universal_checkpoints(saved: Saved) -> None:
    """Save at 2 ranks at stage 1 or 2, convert, load at 3 and at 2, go on.

    DeepSpeed leaves amsgrad's third state out, which must not begin anew.
    """
    folder, expected = saved
    keys = ["ShardedLamb-1-fp32", "ShardedLamb-2-bf16", "amsgrad-1-fp32"]
    converting = []
    for key in keys:
        path = Path(folder) / key
        command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal"]
        command += ["--input_folder", str(path / "middle")]
        command += ["--output_folder", str(path / "universal"), "--inject_missing_state"]
        command += ["--num_extract_workers", "1", "--num_merge_workers", "1"]
        converting.append(
            subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        )
    for process in converting:
        said, _ = process.communicate(timeout=TIMEOUT)
        assert process.returncode == 0, said
    for world_size in (2, 3):
        for found in run_procs(world_size, resume, folder, keys, True, timeout=TIMEOUT):
            assert "has no max_exp_avg_sq" in found.pop("amsgrad-1-fp32")
            for key in found:
                assert isinstance(found[key], list), found[key]
                # DeepSpeed leaves parameters that are not trained out of universal checkpoints.
                trained = [i for i, e in enumerate(JOBS[key].entries) if e.role == "used"]
                lists = (found[key], expected[key], start_of(key))
                error = max_relative_error(*([values[i] for i in trained] for values in lists))
                assert error < 1e-6


def steps_that_lie_elsewhere() -> tuple[list[int], str]:
    """Return the steps that a state dict gives which has them in its groups; the error without."""
    engine, _ = runs.build(job_of("ShardedAdamW", 1, "fp32"))
    runs.train(job_of("ShardedAdamW", 1, "fp32"), engine, 0, 2)
    optimizer = engine.basic_optimizer
    saved = optimizer.state_dict()
    for group, state in zip(saved["param_groups"], saved["state"].values(), strict=True):
        group["step"] = state.pop("step")
    optimizer.load_state_dict(saved)
    steps = [state["step"] for state in optimizer.state.values()]
    for group in saved["param_groups"]:
        del group["step"]
    try:
        optimizer.load_state_dict(saved)
    except ValueError as error:
        return steps, str(error)
    return steps, "no error"


def test_steps_in_groups() -> None:
    """As apex's optimizers have them: Adam would correct the bias of loaded moments anew."""
    for steps, error in run_procs(2, steps_that_lie_elsewhere, timeout=TIMEOUT):
        assert steps == [2, 2]
        assert "has no step" in error


def states_of_other_sizes() -> tuple[str, bool]:
    """Return the error for states that are longer than the partition, and whether any changed."""
    job = job_of("ShardedAdamW", 1, "fp32")
    engine, _ = runs.build(job)
    runs.train(job, engine, 0, 2)
    optimizer = engine.basic_optimizer
    before = [dict(state) for state in optimizer.state.values()]
    saved = optimizer.state_dict()
    last = list(saved["state"])[-1]
    longer = {name: torch.cat([v, v]) for name, v in saved["state"][last].items() if name != "step"}
    saved["state"][last] = {**saved["state"][last], **longer}
    try:
        optimizer.load_state_dict(saved)
    except ValueError as error:
        same = zip(before, optimizer.state.values(), strict=True)
        return str(error), any(a[name] is not b[name] for a, b in same for name in a)
    return "no error", False


def one_rank_has_a_bad_dict() -> list[tuple[str, bool]]:
    """Return the error for each of some edits on rank 1, and whether anything has changed."""
    job = job_of("ShardedAdamW", 2, "fp32")
    engine, _ = runs.build(job)
    runs.train(job, engine, 0, 2)
    optimizer = engine.basic_optimizer
    found = []
    for edits in (
        {"step": -1},
        {"exp_avg": None},
        {"exp_avg": [0.0]},
        {"foo": torch.ones(3)},
        {"exp_avg": optimizer.state_dict()["state"][0]["exp_avg"] * 1j},
    ):
        before = [dict(state) for state in optimizer.state.values()]
        saved = optimizer.state_dict()
        if dist.get_rank() == 1:
            saved["state"][0] = {**saved["state"][0], **edits}
        try:
            optimizer.load_state_dict(saved)
            text = "no error"
        except (TypeError, ValueError, RuntimeError) as error:
            text = str(error)
        pairs = zip(before, optimizer.state.values(), strict=True)
        found.append((text, all(a[name] is b[name] for a, b in pairs for name in a)))
    runs.train(job, engine, 2, 3)
    return found


def test_one_rank_has_a_bad_dict() -> None:
    """Every rank raises, nothing has changed on any, and training goes on."""
    first, second = run_procs(2, one_rank_has_a_bad_dict, timeout=TIMEOUT)
    words = ["whole number", "no exp_avg", "must be a tensor", "none of AdamW's", "complex64"]
    for (others, is_same), (text, is_same_there), word in zip(first, second, words, strict=True):
        assert is_same
        assert is_same_there
        assert word in text
        assert word in others
        assert "Another rank failed to load the state dict. rank 1" in others


def test_states_of_other_sizes() -> None:
    """As of one rank's checkpoint on two: each would go on with the first half of them."""
    for error, is_changed in run_procs(2, states_of_other_sizes, timeout=TIMEOUT):
        assert error.startswith("State exp_avg has shape"), error
        assert not is_changed


def state_after_a_failure(folder: str) -> str:
    """Return what state_dict() on rank 0 alone says after a load that failed."""
    engine, _ = runs.build(JOBS["ShardedSGD-0-fp32"])
    runs.train(JOBS["ShardedSGD-0-fp32"], engine, 0, 1)
    engine.save_checkpoint(folder, tag="sgd")
    job = JOBS["ShardedLamb-0-fp32"]
    engine, _ = runs.build(job)
    runs.train(job, engine, 0, 1)
    with pytest.raises(ValueError, match="Lamb has no momentum"):
        engine.load_checkpoint(folder, tag="sgd")
    if dist.get_rank() == 0:
        try:
            engine.optimizer.state_dict()
        except RuntimeError as error:
            return str(error)
    return "no error"


def test_after_a_load_that_failed(tmp_path: Path) -> None:
    """state_dict() communicates only while the engine saves: rank 0 alone does not wait."""
    found, _ = run_procs(2, state_after_a_failure, str(tmp_path), timeout=60.0)
    assert found.startswith("The optimizer state is sharded and not consolidated"), found
