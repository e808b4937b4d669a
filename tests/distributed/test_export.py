"""Whole tensors out of a checkpoint: plain torch, torch.optim and safetensors read them."""

from __future__ import annotations

import functools
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

import shardfuse
from shardfuse import ShardedAdam, ShardedAdamW, ShardedSGD
from shardfuse.__main__ import main
from shardfuse.checkpoint import CheckpointError, DamagedCheckpoint, save
from shardfuse.checkpoint.export import read_model, read_optimizer
from tests.support.checkpoints import Everything, Job, assert_same
from tests.support.harness import run_scripts, run_threads
from tests.support.runs import assert_bitwise

pytestmark = [
    pytest.mark.timeout(180),
    pytest.mark.filterwarnings("ignore:.*fewer than two dimensions.*:UserWarning"),
]

BUILDS: dict[str, Any] = {
    "adamw": functools.partial(ShardedAdamW, amsgrad=True),
    "sgd": functools.partial(ShardedSGD, momentum=0.5),
    "bert": functools.partial(shardfuse.ShardedBertAdam, max_grad_norm=-1),
}


def written(build: Any, folder: Path) -> Any:
    job = Job(build)
    job.train(3)
    save(job.objects, folder)
    values = job.values()
    optimizer = job.optimizer.state_dict()
    job.train(2)
    return values, optimizer, job.values()


@pytest.mark.parametrize("name", BUILDS)
def test_a_new_optimizer_goes_on_from_it(name: str, tmp_path: Path) -> None:
    """By load_state_dict() of both, at another number of ranks."""
    build = BUILDS[name]
    (values, expected, end), _ = run_threads(2, lambda: written(build, tmp_path / "a"))
    optimizer = read_optimizer(tmp_path / "a")
    assert optimizer["state"].keys() == expected["state"].keys()
    for number, states in expected["state"].items():
        found = dict(optimizer["state"][number])
        step = found.pop("step").item()
        assert step == states.get("step", step)  # SGD's dict has none
        names = found.keys()
        assert_bitwise([found[n] for n in names], [states[n] for n in names])
    model = read_model(tmp_path / "a")
    assert_same(
        {f"model.{key}": value for key, value in model.items()},
        {k: v for k, v in values.items() if k.startswith("model.") and "extra" not in k},
    )

    def go_on() -> Any:
        job = Job(build, seed=1)
        job.model.load_state_dict({**model, "_extra_state": {"seen": 3}})
        job.optimizer.load_state_dict(optimizer)
        job.step = 3
        job.scaler.load_state_dict(values["scaler"])
        job.scheduler.load_state_dict(values["scheduler"])
        job.train(2)
        return job.values()

    for found in run_threads(2, go_on):
        keys = [key for key in found if key.startswith(("state.", "model."))]
        assert_same({key: found[key] for key in keys}, {key: end[key] for key in keys})


def test_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """``python -m shardfuse export`` writes what plain libraries load, and names the files."""
    run_threads(2, lambda: written(ShardedAdam, tmp_path / "a"))
    files = [tmp_path / name for name in ("model.safetensors", "model.pt", "optimizer.pt")]
    folder = str(tmp_path / "a")
    assert main(["export", folder, "--model", str(files[0]), "--optimizer", str(files[2])]) == 0
    assert main(["export", folder, "--model", str(files[1])]) == 0
    assert capsys.readouterr().out.split() == [str(files[i]) for i in (0, 2, 1)]
    expected = read_model(tmp_path / "a")
    assert_same(safetensors.torch.load_file(files[0]), expected)
    assert_same(torch.load(files[1]), expected)
    missing = Everything(seed=1).load_state_dict(expected, strict=False)
    assert missing.missing_keys == ["_extra_state"]
    whole = torch.load(files[2])
    model = Everything(seed=1)
    named = {n: p for n, p in model.named_parameters() if n not in ("outside", "late", "frozen")}
    groups = [{"params": list(named.values())}, {"params": [model.late, model.frozen]}]
    theirs = torch.optim.Adam(groups)
    theirs.load_state_dict(whole)
    assert theirs.state[model.scale]["step"].item() == 3
    assert theirs.param_groups[1]["lr"] == whole["param_groups"][1]["lr"]


def test_errors(tmp_path: Path) -> None:
    """Other keys, and damage, are said."""
    run_threads(2, lambda: written(ShardedAdam, tmp_path / "a"))
    with pytest.raises(CheckpointError, match=r"no module 'net'\. It has \['list', 'model',"):
        read_model(tmp_path / "a", "net")
    with pytest.raises(CheckpointError, match="no optimizer 'opt'"):
        read_optimizer(tmp_path / "a", "opt")
    path = tmp_path / "a" / "__1_0.distcp"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    faults = ""
    for read in (read_model, read_optimizer):
        try:
            read(tmp_path / "a")
        except DamagedCheckpoint as damage:
            faults += str(damage)
    assert "in __1_0.distcp of a is damaged" in faults


LARGE = """
import sys
import torch
from shardfuse import ShardedAdam
from shardfuse.checkpoint import save
from tests.support.harness import join_world

join_world(int(sys.argv[1]), 2, sys.argv[2])
model = torch.nn.ModuleList([torch.nn.Linear(2048, 2048, bias=False) for _ in range(48)])
optimizer = ShardedAdam(model.named_parameters())
for param in model.parameters():
    param.grad = torch.ones_like(param)
optimizer.step()
save({"model": model, "optimizer": optimizer}, sys.argv[3])
"""

READS = """
import resource, sys
from shardfuse.checkpoint.export import read_model, read_optimizer, write_model

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

before = peak()
found = read_model(sys.argv[1]) if sys.argv[2] == "model" else read_optimizer(sys.argv[1])
print(peak() - before)
"""


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Save 201 M parameters by two ranks."""
    folder: Path = tmp_path_factory.mktemp("large")
    ended = run_scripts(LARGE, 2, folder, str(folder / "a"), timeout=170)
    assert [code for code, _ in ended] == [0, 0], ended
    yield folder / "a"
    shutil.rmtree(folder)


@pytest.mark.parametrize("what", ["model", "optimizer"])
def test_peak_memory(what: str, large: Path) -> None:
    """The result, one bucket of 25 MiB, and 64 MiB for what is imported; no second result."""
    result = subprocess.run(
        [sys.executable, "-c", READS, str(large), what],
        capture_output=True,
        text=True,
        timeout=150,
        cwd=Path(shardfuse.__file__).parent.parent,
    )
    assert result.returncode == 0, result.stderr
    nbytes = 48 * 2048 * 2048 * 4 * (1 if what == "model" else 2)
    assert int(result.stdout) < nbytes + (25 << 20) + (64 << 20)
