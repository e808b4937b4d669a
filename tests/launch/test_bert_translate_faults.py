"""Other jobs' commands: what cannot be ours, and the page about them."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pretraining.config import parse_config
from pretraining.deepspeed_settings import ENGINE
from pretraining.sources import SOURCES

from tests.launch import jobs
from tests.launch.foreign import (
    BASE,
    BERT,
    EXPERIMENT,
    NVIDIA_PHASES,
    engine,
    options_in,
    ours_of,
    place,
    run,
)

PAGE = jobs.REPOSITORY / "launch" / "bert" / "migration.md"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Work where their files are."""
    monkeypatch.chdir(tmp_path)
    place(tmp_path)
    return tmp_path


# What cannot be


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("nvidia -- {nvidia}", "--gpus is missing: their --train_batch_size is of one GPU"),
        ("nvidia --gpus 8", "give their options after --, or both --phase1 and --phase2"),
        ("nvidia --gpus 8 --phase1 x", "give their options after --, or both"),
        ("nvidia --phase1 x --phase2 y -- --fp16", "options after -- are those of one command"),
        ("nvidia --gpus 8 --ignore fp16 -- {nvidia}", "--ignore fp16: there is nothing to ignore"),
        ("nvidia --gpus 8 -- --do_train --output_dir o", "--config_file is missing"),
        ("nvidia --gpus 8 -- --config_file no.json --do_train", "--output_dir is missing"),
        ("nvidia --gpus 8 -- --config_file no.json --do_train --output_dir o", "No such file"),
        ("nvidia --gpus 8 -- --config_file a.txt --do_train --output_dir o", "a.txt: Expecting"),
        ("nvidia --gpus 8 -- {nvidia} --gradient_accumulation_steps 5", "5 does not divide"),
        ("nvidia --gpus 8 -- {nvidia} --gradient_accumulation_steps 0", "must be at least 1"),
        ("nvidia --gpus 0 -- {nvidia}", "--gpus must be at least 1, got 0"),
        ('nvidia --gpus 8 --phase1 "\'x" --phase2 y', "No closing quotation"),
        ("google -- {google} --num_train_steps 0", "--num_train_steps must be at least 1, got 0"),
        ("google -- --bert_config_file=null.json --output_dir=o --do_train", "must be a number"),
        ("nvidia --gpus 8 -- {nvidia} --max_seq_length 1024", "--seq-len must be at most 512"),
        ("nvidia --gpus 8 -- {nvidia} --phase2", "give both commands"),
        ("google -- {google} --num_train_steps 10", "--warmup must be a share of the steps"),
        ("google -- --bert_config_file=bert_config.json --output_dir=o", "--do_train is missing"),
        ("google -- {google} --use_tpu=perhaps", "perhaps is neither true nor false"),
        ("google -- --bert_config_file=small.json --output_dir=o --do_train", "is none of tiny 2"),
        ("deepspeed -- {deepspeed} --max_seq_length 256", "has no mixed_seq_training of 256"),
        ("deepspeed -- --cf odd.json --deepspeed_config plain.json --output_dir o", "has speed"),
        ("google --corpus b.txt --table --ignore x --such", "unrecognized arguments: --such"),
        ("apex -- --fp16", "invalid choice: 'apex'"),
    ],
)
def test_what_cannot_be_translated(line: str, message: str, folder: Path, capsys: Any) -> None:
    """Code 2, a line that says why, and nothing that a shell could run."""
    (folder / "a.txt").write_text("no JSON")
    (folder / "small.json").write_text(json.dumps({**BERT, "hidden_size": 999}))
    (folder / "null.json").write_text(json.dumps({**BERT, "hidden_dropout_prob": None}))
    (folder / "odd.json").write_text(json.dumps({**EXPERIMENT, "speed": 3}))
    code, out, told = run(capsys, line.format(**BASE))
    assert (code, out) == (2, "")
    assert message in told


def test_phases_of_different_runs(capsys: Any) -> None:
    """What is not a phase's must be the same in both commands."""
    first, second = shlex.quote(NVIDIA_PHASES[0]), shlex.quote(NVIDIA_PHASES[1] + " --seed=7")
    line = f"nvidia --gpus 8 --corpus a --phase1 {first} --phase2 {second}"
    code, out, told = run(capsys, line)
    assert (code, out) == (2, "")
    assert "phase 1 has --seed 42, phase 2 7" in told


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"optimizer": {"type": "Muon"}}, "optimizer.type Muon is none of Lamb, OneBitLamb"),
        ({"speed": 3}, "--deepspeed_config has speed, which no table here knows"),
        ({"train_batch_size": 0}, "has no train_batch_size; add it"),
        ({"fp16": {"enabled": True, "loss_scale": 128}}, "fp16.loss_scale CHANGES TRAINING"),
        ({"fp16": {"enabled": False}}, "learning_rate CHANGES TRAINING: without fp16"),
        ({"optimizer": {"type": "OneBitAdam", "params": {"freeze_step": 9}}}, "no 1-bit compress"),
    ],
)
def test_an_engine_that_has_no_place(
    changes: dict[str, Any], message: str, folder: Path, capsys: Any
) -> None:
    (folder / "plain.json").write_text(json.dumps({**engine(4096), **changes}))
    code, out, told = run(capsys, f"{ours_of('deepspeed')} -- {BASE['deepspeed']}")
    assert (code, out) == (2, "")
    assert message in told


def test_adam_without_bias_correction_is_bertadam(folder: Path, capsys: Any) -> None:
    for is_corrected, name in ((True, "adamw"), (False, "bertadam")):
        content = engine(4096, bias_correction=is_corrected)
        content["optimizer"]["type"] = "Adam"
        (folder / "plain.json").write_text(json.dumps(content))
        code, line, _ = run(capsys, f"{ours_of('deepspeed')} -- {BASE['deepspeed']}")
        assert code == 0
        assert options_in(line)["--optimizer"] == [name]


# The page


def test_the_page_has_the_tables(capsys: Any) -> None:
    """As --table prints them."""
    page = PAGE.read_text()
    for name, source in SOURCES.items():
        code, table, _ = run(capsys, f"{name} --table")
        assert code == 0
        assert table in page, f"python launch/bert/translate.py {name} --table"
        assert source.where.split()[0] in page
    for row in ENGINE:
        assert f"| `{row.name}` | {row.ours} |" in page, row.name


COMMANDS = re.findall(r"^```sh\n(.*?)^```", PAGE.read_text() if PAGE.exists() else "", re.M | re.S)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("block", COMMANDS, ids=range(len(COMMANDS)))
def test_the_page_s_commands_run(block: str, folder: Path) -> None:
    """As they stand, where their files are; what is printed is a run of ours."""
    (folder / "launch").symlink_to(jobs.REPOSITORY / "launch")
    (folder / "wiki.txt").write_text("a text\n")
    python = Path(sys.executable).parent
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", block],
        env={"PATH": f"{python}:/usr/bin:/bin", "PYTHONPATH": str(jobs.REPOSITORY)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    if done.stdout.startswith("launch/bert/pretrain.py"):
        options_in(done.stdout)
    else:
        assert parse_config(["--recipe", "theirs.json"]).steps > 1000


def test_xargs_takes_the_line(capsys: Any) -> None:
    """Quotes and all, as the page has it."""
    theirs = f"{NVIDIA_PHASES[0]} --output_dir='a folder'"
    code, line, _ = run(capsys, f"nvidia --gpus 8 --corpus wiki.txt -- {theirs}")
    assert code == 0
    show = [sys.executable, "-c", "import sys, json; print(json.dumps(sys.argv[1:]))"]
    done = subprocess.run(["xargs", *show], input=line, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == shlex.split(line)
    assert {"a folder", '{"grad_sync_dtype": "float16"}'} <= set(shlex.split(line))


def test_the_page_has_commands() -> None:
    assert len(COMMANDS) >= 4
    assert shutil.which("bash")
