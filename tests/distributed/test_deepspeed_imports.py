"""States of real DeepSpeed engines, ZeRO stages 1 and 2, are imported, and training goes on."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import shardfuse
from shardfuse.checkpoint import CheckpointError
from shardfuse.checkpoint.imports import read_deepspeed, read_deepspeed_universal
from tests.support import deepspeed_runs as runs
from tests.support.deepspeed_runs import Job
from tests.support.harness import run_procs, run_threads
from tests.support.models import rank_grads, split_by_group
from tests.support.runs import TOLERANCE, assert_bitwise, max_relative_error

pytestmark = [
    pytest.mark.timeout(240),
    pytest.mark.skipif(
        importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed"
    ),
    pytest.mark.filterwarnings("ignore:.*fewer than two dimensions.*:UserWarning"),
]

TIMEOUT = 200.0
SAVED_AT = 3
END = 7


def job_of(stage: int, mode: str, name: str = "AdamW", **options: Any) -> Job:
    """Return a job of torch's Adam or ours, the same at every world size."""
    adam = {} if name.startswith("Sharded") else {"torch_adam": True, "adam_w_mode": "W" in name}
    return Job(
        name=name,
        params={"lr": 0.05, "weight_decay": 0.1, **adam},
        stage=stage,
        mode=mode,
        kind="integers",
        alike=True,
        **options,
    )


DYNAMIC = {"fp16": {"enabled": True, "loss_scale": 0, "initial_scale_power": 4}}

JOBS = {
    "1-fp32": job_of(1, "fp32"),
    "1-bf16": job_of(1, "bf16"),
    "1-elastic": job_of(1, "fp32", zero={"elastic_checkpoint": True}),
    "2-fp32": job_of(2, "fp32", name="Adam"),
    "2-bf16": job_of(2, "bf16"),
    "2-round-robin": job_of(2, "bf16", zero={"round_robin_gradients": True}),
    "2-fp16": job_of(2, "fp16", extra=DYNAMIC),
    "wrapped-bf16": job_of(1, "bf16", extra={"data_types": {"grad_accum_dtype": "fp32"}}),
    "ours-1-bf16": job_of(1, "bf16", name="ShardedAdamW"),
}
NAMES = split_by_group(runs.ENTRIES, [entry.name for entry in runs.ENTRIES])


def full_states(optimizer: Any, model: runs.Weights) -> dict[str, dict[str, Tensor]]:
    """Return what DeepSpeed's own functions give of every trained parameter."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    # It looks for all groups' states after the first group's first step, when others have none.
    optimizer._hp_optimizer_states_linked = False
    optimizer._lazy_init_hp_params_optimizer_state()
    return {
        entry.name: {
            "param": safe_get_full_fp32_param(param).clone(),
            **{
                key: safe_get_full_optimizer_state(param, key).clone()
                for key in ("exp_avg", "exp_avg_sq")
            },
        }
        for entry, param in zip(model.entries, model.members, strict=True)
        if param.requires_grad
    }


def save(folder: str) -> dict[str, Any]:
    """Train and save every job; return its states at that time, and its values at the end."""
    found: dict[str, Any] = {}
    for key, job in JOBS.items():
        engine, model = runs.build(job)
        runs.train(job, engine, 0, SAVED_AT)
        engine.save_checkpoint(f"{folder}/{key}", tag="middle")
        # What DeepSpeed says of round-robin parameters is of others; updates are elementwise.
        if key != "2-round-robin":
            states = full_states(engine.optimizer, model)
        else:
            states = found["2-bf16"][1]
        runs.train(job, engine, SAVED_AT, END)
        end = runs.masters(job, engine, model) if key != "2-round-robin" else found["2-bf16"][2]
        found[key] = (type(engine.optimizer).__name__, states, end)
        engine.destroy()
    return found


Saved = tuple[Path, dict[str, Any]]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    folder = tmp_path_factory.mktemp("deepspeed")
    return folder, run_procs(runs.WORLD, save, str(folder), timeout=TIMEOUT)[0]


def go_on(key: str, folder: Path, state: dict[str, Any]) -> list[Tensor]:
    """Load the module's own file and the imported states, train on; return fp32 values."""
    job = JOBS[key]
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(job.mode, torch.float32)
    model = runs.Weights(job.entries).to(dtype)
    file = torch.load(folder / key / "middle" / "mp_rank_00_model_states.pt", weights_only=True)
    model.load_state_dict(file["module"])
    lr = 0.05 if "elastic" in key else 7.0  # elsewhere it is the file's
    optimizer = getattr(shardfuse, "Sharded" + job.name.removeprefix("Sharded"))(
        model.groups(), lr=lr, weight_decay=0.1, sharding={"kernel": "eager"}
    )
    optimizer.load_state_dict(state)
    for step in range(SAVED_AT, END):
        grads = rank_grads(job.kind, 1, 0, step, job.entries)
        for param, grad in zip(model.members, grads, strict=True):
            param.grad = grad.to(dtype) if grad is not None and param.requires_grad else None
        optimizer.step()
    optimizer.consolidate_state_dict(to=None)
    entries = optimizer.state_dict()["state"]
    order = [id(p) for group in optimizer.param_groups for p in group["params"]]
    masters = [entries.get(order.index(id(p)), {}).get("param", p) for p in model.members]
    return [master.detach().float().clone() for master in masters]


def assert_goes_on(key: str, saved: Saved, state: dict[str, Any]) -> None:
    """Compare with DeepSpeed at its end, at one rank, two and three; those bit by bit."""
    folder, found = saved
    _, states, end = found[key]
    names = [name for group in state["param_groups"] for name in group["param_names"]]
    for number, name in enumerate(names):
        if name not in states:
            assert number not in state["state"]
            continue
        entry = dict(state["state"][number])
        assert entry.pop("step").item() == SAVED_AT
        low = {"param"} if JOBS[key].mode != "fp32" else set()
        assert entry.keys() == {"exp_avg", "exp_avg_sq"} | low
        assert_bitwise(list(entry.values()), [states[name][k] for k in entry])
    alone = run_threads(1, go_on, key, folder, state)[0]
    start = [p.detach() for p in runs.Weights(runs.ENTRIES).members]
    assert max_relative_error(alone, end, start) < TOLERANCE
    for world_size in (2, 3):
        for values in run_threads(world_size, go_on, key, folder, state):
            assert_bitwise(values, alone)


@pytest.mark.parametrize("key", JOBS)
def test_goes_on(key: str, saved: Saved) -> None:
    """Every form of DeepSpeed's files; states are those that DeepSpeed itself tells."""
    found = read_deepspeed(saved[0] / key, names=NAMES)
    assert [group["param_names"] for group in found["param_groups"]] == NAMES
    assert saved[1]["wrapped-bf16"][0] == "BF16_Optimizer"
    if "elastic" not in key:
        assert [group["lr"] for group in found["param_groups"]] == [0.05, 0.02]
    assert_goes_on(key, saved, found)


def test_universal(saved: Saved) -> None:
    """What DeepSpeed's own command makes of them."""
    for key in ("1-bf16", "2-round-robin"):
        path = saved[0] / key
        command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal"]
        command += ["--input_folder", str(path / "middle")]
        command += ["--output_folder", str(path / "universal"), "--inject_missing_state"]
        command += ["--num_extract_workers", "1", "--num_merge_workers", "1"]
        result = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=TIMEOUT
        )
        assert result.returncode == 0, result.stdout + result.stderr
    assert_goes_on("1-bf16", saved, read_deepspeed_universal(saved[0] / "1-bf16", names=NAMES))
    with pytest.raises(CheckpointError, match="round_robin_gradients"):
        read_deepspeed_universal(saved[0] / "2-round-robin", names=NAMES)


def test_order(saved: Saved) -> None:
    """Without names, parameters that are trained, in the order of DeepSpeed's groups."""
    found = read_deepspeed(saved[0] / "1-fp32" / "middle")
    trained = {e.name for e in runs.ENTRIES if e.role == "used"}
    expected = [[name for name in group if name in trained] for group in NAMES]
    assert [group["param_names"] for group in found["param_groups"]] == expected
    assert [group["params"] for group in found["param_groups"]] == [[0, 1, 2, 3], [4, 5, 6]]
    with pytest.raises(CheckpointError, match=r"Give names= \(--names\)"):
        read_deepspeed(saved[0] / "2-round-robin")
