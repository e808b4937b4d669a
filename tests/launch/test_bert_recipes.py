"""Recipes that come with the job: each is a run, and its learning rates are its source's."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pretrain
import pytest
import torch
from pretraining.config import parse_config, write_stored_config
from pretraining.errors import UsageError
from pretraining.optimizers import build_optimizer
from pretraining.phases import RECIPES, Phase

NAMES = sorted(path.stem for path in RECIPES.glob("*.json"))


def phases_of(name: str) -> tuple[Phase, ...]:
    return parse_config(["--recipe", name, "--dry-run"]).phases


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", NAMES)
def test_a_dry_run_shows_it(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing but the recipe is needed, not even the checkpoint that it begins with."""
    monkeypatch.chdir(tmp_path)
    assert pretrain.main(["--recipe", name, "--micro-batch-size", "1", "--dry-run", "8"]) == 0
    told = capsys.readouterr().out
    for phase in phases_of(name):
        assert f"batch of {phase.global_batch_size:,} samples of {phase.seq_len} tokens" in told
    assert [path.name for path in tmp_path.iterdir()] == ["dry-run.png"]


@pytest.mark.parametrize("name", [name for name in NAMES if name.startswith("mlperf")])
def test_mlperf_s_begin_with_a_checkpoint(name: str, theirs: Any) -> None:
    """Without one they are refused, and with one of another size, too."""
    with pytest.raises(UsageError, match=f"--recipe {name} needs --init-from"):
        parse_config(["--recipe", name])
    with pytest.raises(UsageError, match=f"is BERT 2x48, --recipe {name} is of BERT large"):
        parse_config(["--recipe", name, "--init-from", str(theirs())])
    folder = theirs(
        num_hidden_layers=24, hidden_size=8, num_attention_heads=1, max_position_embeddings=512
    )
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"hidden_size": 1024}))
    config = parse_config(["--recipe", name, "--init-from", str(folder)])
    assert config.vocab_size == config.architecture["vocab_size"] < 200
    assert (config.model_size, config.eps, config.max_seq_len) == ("large", 1e-6, 512)


def mlperf_lr(step: int, peak: float, total: int, warmup: int, start: int) -> float:
    """Return what optimization.py of mlcommons/training gives."""
    if step - start < warmup:
        return peak * (step - start) / warmup
    return peak * (1 - step / total)


@pytest.mark.parametrize(
    ("name", "peak", "total", "warmup", "start"),
    [
        ("mlperf-256", 3.5e-4, 13700, 0, 0),
        ("mlperf-3072", 2e-3, 1141, 100, 0),
        ("mlperf-8192", 2.88293e-3, 600, 287, -76),
    ],
)
def test_learning_rates_of_mlperf(
    name: str, peak: float, total: int, warmup: int, start: int
) -> None:
    """The rise is one step ahead: theirs begins with a step of 0."""
    (phase,) = phases_of(name)
    num_warmup = warmup + start
    for step in range(total):
        ahead = step < num_warmup
        wanted = mlperf_lr(step, peak, total, warmup, start)
        if ahead:
            wanted += peak / warmup
        assert phase.lr_at(step) == pytest.approx(wanted, rel=2e-5), step


@pytest.mark.parametrize("number", [0, 1])
def test_learning_rates_of_nvidia(number: int) -> None:
    """PolyWarmUpScheduler counts from 1, so its fall is one step ahead."""
    phase = phases_of("nvidia-large")[number]
    num_warmup = round(phase.warmup * phase.steps)
    for step in range(phase.steps):
        progress = (step + (step < num_warmup)) / phase.steps
        wanted = phase.lr * (1 - progress) ** 0.5
        if step < num_warmup:
            wanted = phase.lr * progress / phase.warmup
        assert phase.lr_at(step) == pytest.approx(wanted, rel=1e-3), step


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"warmup_from": 1.0}, "--warmup-from must be from 0 to below 1, got 1.0"),
        ({"decay_from": "end"}, "--decay-from must be one of warmup, start, got end"),
    ],
)
def test_a_curve_that_cannot_be(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Phase(
            **{
                **{"seq_len": 24, "steps": 5, "global_batch_size": 12, "micro_batch_size": 0},
                **{"lr": 0.1, "warmup": 0.4, "decay_power": 1.0, "carry": "all"},
                **changes,
            }
        )


@pytest.mark.parametrize("optimizer", ["lamb", "adamw", "adam", "bertadam"])
def test_eps_reaches_the_optimizer(optimizer: str) -> None:
    """Without the option it is the optimizer's own."""
    found = []
    for arguments in ([], ["--eps", "0.125"]):
        config = parse_config(["--optimizer", optimizer, *arguments])
        named = [(name, torch.nn.Parameter(torch.ones(4, 4))) for name in ("weight", "bias")]
        built = build_optimizer(config, named, config.shard_config())
        group = built.param_groups[0]
        found.append(group.get("eps", group.get("e")))
    assert found[0] < 1e-5
    assert found[1] == 0.125


def test_eps_of_sgd_is_refused() -> None:
    with pytest.raises(UsageError, match="--eps must be left out with sgd"):
        parse_config(["--optimizer", "sgd", "--eps", "1e-6"])
    with pytest.raises(UsageError, match="--eps must be 0 or greater, got -1"):
        parse_config(["--eps", "-1"])


def test_a_recipe_and_a_checkpoint_on_resume(theirs: Any, tmp_path: Path, text_file: Path) -> None:
    """One line begins the run and goes on: the vocabulary is the checkpoint's, not the recipe's."""
    phase = {"seq_len": 24, "steps": 5, "global_batch_size": 12, "lr": 0.01}
    recipe = {"needs": ["init_from"], "options": {"vocab_size": 999}, "phases": [phase, phase]}
    (tmp_path / "recipe.json").write_text(json.dumps(recipe))
    folder = theirs()
    line = ["--corpus", str(text_file), "--recipe", str(tmp_path / "recipe.json")]
    line += ["--init-from", str(folder), "--run-dir", str(tmp_path / "run"), "--resume", "auto"]
    begun = parse_config(line)
    begun.run_dir.mkdir()
    write_stored_config(begun, begun.corpus, corpus_digest="abc")
    shutil.rmtree(folder)
    for again in (line, [*line[-4:-2], "--resume"]):
        resumed = parse_config(again)
        assert resumed.resume
        assert resumed.vocab_size == begun.vocab_size == begun.architecture["vocab_size"]
        assert (resumed.architecture, resumed.phases) == (begun.architecture, begun.phases)
