"""An optimizer that is built before init_process_group(), in a job that a launcher has started."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shardfuse import ShardedGradScaler, ShardedLamb, ShardedSGD, compare_lamb_variants
from shardfuse.comm import select
from shardfuse.optim.npu import NpuFusedAdam
from shardfuse.optim.paddle import Lamb

pytestmark = pytest.mark.timeout(120)

ROOT = Path(__file__).parents[2]

SCRIPT = """
import json, os, sys
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset
import shardfuse

def build(**options):
    param = torch.nn.Parameter(torch.ones(3))
    try:
        optimizer = shardfuse.ShardedSGD([param], lr=1.0, **options)
    except RuntimeError as error:
        return str(error)
    param.grad = torch.full((3,), float(os.environ["RANK"]))
    optimizer.step()
    return float(param[0].detach())

class Builds(Dataset):
    def __len__(self):
        return 1

    def __getitem__(self, index):
        return build()

found = {
    "before": build(),
    "alone": build(sharding={"process_group": "alone"}),
    "worker": next(iter(DataLoader(Builds(), num_workers=1, batch_size=None))),
}
dist.init_process_group("gloo")
found["after"] = build()
found["alone after"] = build(sharding={"process_group": "alone"})
with open(f"{sys.argv[1]}/{os.environ['RANK']}.json", "w") as file:
    json.dump(found, file)
dist.barrier()
dist.destroy_process_group()
"""


def test_torchrun(tmp_path: Path) -> None:
    """Two ranks of torchrun: an error on both that says what to do, unless "alone" is asked for."""
    script = tmp_path / "job.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", str(script), str(tmp_path)]
    environ = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        ["env", *(f"{key}={value}" for key, value in environ.items()), *command],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    for rank in (0, 1):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        assert "WORLD_SIZE is 2" in found["before"]
        assert "init_process_group()" in found["before"]
        assert 'sharding={"process_group": "alone"}' in found["before"]
        alone = 1.0 - rank
        assert found["alone"] == found["worker"] == found["alone after"] == alone
        assert found["after"] == 0.5


def params() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(3, 3))]


BUILDS: dict[str, Callable[..., Any]] = {
    "sgd": lambda **options: ShardedSGD(params(), lr=0.1, **options),
    "lamb": lambda **options: ShardedLamb(params(), **options),
    "npu": lambda **options: NpuFusedAdam(params(), **options),
    "paddle": lambda **options: Lamb(parameters=params(), **options),
}


@pytest.mark.parametrize("name", BUILDS)
def test_every_class(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """The error comes at construction, and does not where the optimizer is to be alone."""
    monkeypatch.setenv("WORLD_SIZE", "8")
    with pytest.raises(RuntimeError, match=r"WORLD_SIZE is 8.*init_process_group\(\)"):
        BUILDS[name]()
    assert BUILDS[name](sharding={"process_group": "alone"}).communicator.world_size == 1


def test_a_scaler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Overflow decisions of ranks apart would differ: the scaler refuses alike."""
    monkeypatch.setenv("WORLD_SIZE", "2")

    def unscale(**options: Any) -> None:
        scaler = ShardedGradScaler("cpu", **options)
        optimizer = BUILDS["sgd"](sharding={"process_group": "alone"})
        scaler.scale(optimizer.param_groups[0]["params"][0].sum()).backward()
        scaler.unscale_(optimizer)

    with pytest.raises(RuntimeError, match='process_group="alone"'):
        unscale()
    unscale(process_group="alone")


@pytest.mark.parametrize("value", ["1", "0", "", "many"])
def test_no_other_ranks(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    """One rank, or a variable that is not the launcher's: nothing to say."""
    monkeypatch.setenv("WORLD_SIZE", value)
    assert BUILDS["sgd"]().communicator.world_size == 1


@pytest.mark.parametrize("name", ["SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"])
def test_tasks_without_torchrun(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    """srun python train.py: one warning, unless they are to be apart, or there is one task."""
    select._warn_of.cache_clear()
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("SLURM_NTASKS", "8")  # the batch script has it, too
    for value in ("1", "", "many"):
        monkeypatch.setenv(name, value)
        BUILDS["sgd"]()
    monkeypatch.setenv(name, "2")
    BUILDS["sgd"](sharding={"process_group": "alone"})
    monkeypatch.setenv("WORLD_SIZE", "1")  # torchrun with one rank
    BUILDS["sgd"]()
    assert not caplog.records
    monkeypatch.delenv("WORLD_SIZE")
    for _ in range(2):
        assert BUILDS["sgd"]().communicator.world_size == 1
    assert len(caplog.records) == 1
    assert f"2 processes ({name})" in caplog.text
    assert "torchrun" in caplog.text


def test_comparing_needs_no_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """compare_lamb_variants() takes no step of its own, and works before there is a group."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    named = [("weight", nn.Parameter(torch.ones(4, 4)))]
    named[0][1].grad = torch.ones(4, 4)
    assert compare_lamb_variants(named, "npu", "nvlamb")


def test_other_names_of_groups_are_refused() -> None:
    """A string that is not "alone" is no group."""
    with pytest.raises(ValueError, match="Invalid process_group: 'none'"):
        BUILDS["sgd"](sharding={"process_group": "none"})
