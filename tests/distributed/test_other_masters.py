"""Checkpoints that have masters where none are kept, or none where there are to be some."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from shardfuse import ShardedAdam
from shardfuse.checkpoint import CheckpointError, load, save
from tests.support.checkpoints import Job, assert_same
from tests.support.harness import run_threads

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.filterwarnings("ignore:.*fewer than two dimensions.*:UserWarning"),
]

BF16 = torch.bfloat16
CASTS: dict[str, Any] = {"param_sync_dtype": "bfloat16"}
DIFFERENCES: dict[str, Any] = {"param_sync_bits": 8}


def in_fp32(job: Job) -> dict[str, Tensor]:
    """Return every trained parameter, whole: its master, or itself where there is none."""
    values = job.values()
    names = {id(param): name for name, param in job.model.named_parameters()}
    params = [param for group in job.optimizer.param_groups for param in group["params"]]
    return {
        names[id(param)]: values.get(f"state.{number}.param", values[f"model.{names[id(param)]}"])
        for number, param in enumerate(params)
        if param.requires_grad and param.numel()
    }


def saved(folder: Path, **options: Any) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Train and save; return parameters in fp32, and all values."""
    job = Job(ShardedAdam, **options)
    job.train(3)
    save(job.objects, folder)
    return in_fp32(job), job.values()


def loaded(folder: Path, **options: Any) -> tuple[dict[str, Tensor], dict[str, Any], bool]:
    """Load into other values; return the same, and whether training goes on from them."""
    job = Job(ShardedAdam, seed=1, **options)
    state = job.objects
    load(state, folder)
    job.step = state["step"]
    found, values = in_fp32(job), job.values()
    job.train(1)
    after = in_fp32(job)
    return found, values, all(not torch.equal(after[name], found[name]) for name in found)


def states(values: dict[str, Any]) -> dict[str, Any]:
    """Return what is no parameter and no master."""
    return {
        key: value
        for key, value in values.items()
        if key.startswith("state.") and key.rpartition(".")[2] not in ("param", "param_error")
    }


WAYS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "fp32 to bf16": ({"dtype": torch.float32}, {"dtype": BF16}),
    "bf16 to fp32": ({"dtype": BF16}, {"dtype": torch.float32}),
    "mixed to bf16": ({}, {"dtype": BF16}),
    "mixed to fp32": ({}, {"dtype": torch.float32}),
    "plain to casts": ({}, {"sharding": CASTS}),
    "casts to plain": ({"sharding": CASTS}, {}),
    "plain to differences": ({}, {"sharding": DIFFERENCES}),
    "casts to differences": ({"sharding": CASTS}, {"sharding": DIFFERENCES}),
}


@pytest.mark.parametrize("way", WAYS)
def test_no_bit_is_lost(way: str, tmp_path: Path) -> None:
    """What was fp32, a master or a parameter, is so again, at another world size; states too."""
    source, target = WAYS[way]
    (expected, values), _ = run_threads(2, lambda: saved(tmp_path / "a", **source))
    assert any(not torch.equal(v, v.bfloat16().float()) for v in expected.values())
    results = run_threads(3, lambda: loaded(tmp_path / "a", **target))
    for found, others, goes_on in results:
        assert goes_on
        assert_same({k: v.float() for k, v in found.items()}, expected)
        assert_same(states(others), states(values))
        for name, value in found.items():
            param = others[f"model.{name}"]
            if param.dtype == BF16 or target.get("sharding") != CASTS:
                assert torch.equal(param, value.to(param.dtype))
        errors = [value for key, value in others.items() if key.endswith(".param_error")]
        assert not any(value.any() for value in errors)
        assert bool(errors) == (target.get("sharding") == DIFFERENCES)


def test_without_the_model(tmp_path: Path) -> None:
    """An optimizer that is loaded alone has masters of what its parameters are."""
    run_threads(2, lambda: saved(tmp_path / "a", dtype=torch.float32))

    def load_alone() -> None:
        job = Job(ShardedAdam, seed=1, dtype=BF16)
        load({"optimizer": job.optimizer}, tmp_path / "a")
        masters, values = in_fp32(job), job.values()
        assert_same(masters, {name: values[f"model.{name}"].float() for name in masters})

    run_threads(3, load_alone)


def test_differences_need_a_place(tmp_path: Path) -> None:
    """What parameters lack of their values is not dropped in silence."""
    run_threads(2, lambda: saved(tmp_path / "a", sharding=DIFFERENCES))

    def refuse() -> None:
        job = Job(ShardedAdam, seed=1)
        with pytest.raises(CheckpointError, match=r"it has optimizer\.state\.\S*param_error"):
            load(job.objects, tmp_path / "a")

    run_threads(2, refuse)
