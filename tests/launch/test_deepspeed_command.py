"""launch/deepspeed: the BERT job under torchrun, driven by DeepSpeed's engine from JSON files."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from shardfuse.deepspeed import registry
from tests.launch import jobs

pytestmark = pytest.mark.timeout(240)

FOLDER = jobs.REPOSITORY / "launch" / "deepspeed"
CONFIGS = sorted((FOLDER / "configs").glob("*.json"))

SMALL = ("--vocab-size", "120", "--seq-len", "24", "--eval-samples", "12")

needs_deepspeed = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed"
)


def train(cwd: Path, inputs: list[str], config: str, *options: str) -> list[float]:
    """Run the real command on two ranks; return the loss of every step it took."""
    path = os.pathsep.join(filter(None, [str(jobs.REPOSITORY), os.environ.get("PYTHONPATH")]))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", str(FOLDER / "train_bert.py"), "--deepspeed-config"]
    result = subprocess.run(
        [*command, str(FOLDER / "configs" / config), *inputs, *SMALL, *options],
        cwd=cwd,
        env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    run_dir = cwd / options[options.index("--run-dir") + 1]
    return [record["loss"] for record in jobs.records(run_dir, "train")]


@needs_deepspeed
def test_stages_agree_and_a_run_is_continued(tmp_path: Path, inputs: list[str]) -> None:
    """LAMB at stage 0 and, from another JSON, at stage 2: one curve; half of it, and --load."""
    whole = train(tmp_path, inputs, "stage0_lamb.json", "--steps", "6", "--run-dir", "whole")
    half = train(tmp_path, inputs, "stage2_lamb.json", "--steps", "3", "--run-dir", "half")
    load = ("--load", str(tmp_path / "half" / "checkpoints"))
    rest = train(tmp_path, inputs, "stage2_lamb.json", "--steps", "6", "--run-dir", "rest", *load)
    assert len(whole) == 6
    assert len(set(whole)) == 6
    assert [*half, *rest] == pytest.approx(whole, rel=1e-5)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_configurations_are_what_their_names_say(path: Path) -> None:
    """Three stages, three optimizers, by names that are registered; alike but for these."""
    stage, kind = path.stem.removeprefix("stage").split("_")
    config = json.loads(path.read_text())
    assert config.pop("zero_optimization") == {"stage": int(stage)}
    name = config["optimizer"]["type"]
    assert name.lower() == f"sharded{kind}"
    assert name in registry.classes()
    other = json.loads((path.parent / f"stage0_{kind}.json").read_text())
    other.pop("zero_optimization")
    assert config == other


def test_there_are_nine_configurations() -> None:
    """LAMB, AdamW and BertAdam at stages 0, 1 and 2."""
    assert len(CONFIGS) == 9


@needs_deepspeed
@pytest.mark.parametrize("config", ["stage1_adamw.json", "stage1_bertadam.json"])
def test_other_optimizers_train(tmp_path: Path, inputs: list[str], config: str) -> None:
    """The loss falls from the first step to the last."""
    found = train(tmp_path, inputs, config, "--steps", "12", "--run-dir", "run")
    assert len(found) == 12
    assert found[-1] < found[0]
