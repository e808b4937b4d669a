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


def launch(
    cwd: Path, arguments: list[str], shell: str = "true"
) -> subprocess.CompletedProcess[str]:
    """Run the real command on two ranks, each of which runs a line of shell before it."""
    path = os.pathsep.join(filter(None, [str(jobs.REPOSITORY), os.environ.get("PYTHONPATH")]))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    command += ["2", "--no-python", "bash", "-c", f'{shell}; exec "$0" "$@"', sys.executable]
    return subprocess.run(
        [*command, str(FOLDER / "train_bert.py"), *arguments],
        cwd=cwd,
        env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )


def options_of(config: str, inputs: list[str], *options: str) -> list[str]:
    """Return the command line of a small run by one of the JSON files."""
    return ["--deepspeed-config", str(FOLDER / "configs" / config), *inputs, *SMALL, *options]


def train(cwd: Path, inputs: list[str], config: str, *options: str) -> list[float]:
    """Run the real command on two ranks; return the loss of every step it took."""
    result = launch(cwd, options_of(config, inputs, *options))
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


@needs_deepspeed
def test_a_part_that_cannot_be_written_is_one_line_and_no_checkpoint(
    tmp_path: Path, inputs: list[str]
) -> None:
    """Rank 1 may write no large file: neither rank waits for the other, nothing half is left."""
    arguments = options_of("stage1_adamw.json", inputs, "--steps", "1", "--run-dir", "run")
    result = launch(tmp_path, arguments, shell='[ "$RANK" = 0 ] || ulimit -f 500')
    lines = [line for line in result.stderr.splitlines() if line.startswith("train_bert.py: error")]
    assert result.returncode == 1
    assert len(lines) == 1, result.stderr
    assert lines[0].endswith("free some space, or name a folder elsewhere (rank 1)")
    assert "exitcode  : 2" in result.stderr.partition("Root Cause")[2]
    names = {path.name for path in (tmp_path / "run").iterdir()}
    assert names == {".lock", "config.json", "metrics.jsonl", "tokenizer"}


@pytest.mark.parametrize(
    ("settings", "options", "message"),
    [
        ("{", [], "Expecting property name"),
        ("[]", [], "must have train_batch_size and an optimizer with params"),
        ('{"train_batch_size": 8}', [], "must have train_batch_size and an optimizer"),
        (None, ["--resume"], "--resume is not for this job; name a folder with --load"),
        (None, ["--recipe", "nvidia-large"], "--recipe is of launch/bert/pretrain.py; drop it"),
        (None, ["--dry-run=2"], "--dry-run is of launch/bert/pretrain.py; drop it here"),
        pytest.param(
            None,
            ["--run-dir", "settings.json"],
            "settings.json is a file; name a folder",
            marks=needs_deepspeed,
        ),
        (None, ["--seq-len", "9999"], "--seq-len must be at most 512"),
        (None, ["--init-from", "x"], "--init-from is of launch/bert/pretrain.py; drop it here"),
    ],
)
def test_what_cannot_be_run_is_one_line(
    tmp_path: Path, settings: str | None, options: list[str], message: str
) -> None:
    """By plain Python: exit code 2, and nothing is left."""
    path = tmp_path / "settings.json"
    path.write_text(settings or (FOLDER / "configs" / "stage1_lamb.json").read_text())
    result = subprocess.run(
        [sys.executable, str(FOLDER / "train_bert.py"), "--deepspeed-config", str(path), *options],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(jobs.REPOSITORY)},
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert result.returncode == 2, result.stderr
    assert message in result.stderr
    assert result.stderr.startswith("train_bert.py: error: ")
    assert result.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == [path]
