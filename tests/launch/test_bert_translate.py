"""Other jobs' commands in ours: each option has a place, is told, or is an error."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from pretraining.config import parse_config
from pretraining.phases import RECIPES
from pretraining.sources import SOURCES
from pretraining.translation import Fate, Row

from tests.launch.foreign import (
    BASE,
    IGNORED,
    NVIDIA_PHASES,
    OURS,
    options_in,
    ours_of,
    place,
    run,
)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Work where their files are."""
    monkeypatch.chdir(tmp_path)
    place(tmp_path)
    return tmp_path


# Each option of each table


def another(row: Row) -> list[str]:
    """Return the option with a value that is not theirs."""
    if row.name == "allreduce_post_accumulation_fp16":  # without fp16 theirs does nothing by it
        return [f"--{row.name}", "--fp16"]
    values = {
        "max_steps": 500,
        "json-summary": "x",
        "max_seq_length": 128 if row.default == 512 else 64,
        "lr_schedule": "EP",
        "loss_scale": 128.0,
        "lr_offset": 1e-3,
    }
    value: Any = values.get(row.name)
    if row.default is False:
        return [f"--{row.name}"]
    if value is None:
        value = {int: 2, float: 2.0}[type(row.default)] * row.default if row.default else "x"
    if row.default == 0:
        value = 3
    return [f"--{row.name}", str(value)]


ROWS = [
    (name, row)
    for name, source in SOURCES.items()
    for row in source.rows
    if not {f"--{word}" for word in row.names.split()} & set(BASE[name].replace("=", " ").split())
]


@pytest.mark.parametrize(("name", "row"), ROWS, ids=[f"{name}-{row.name}" for name, row in ROWS])
def test_each_option(name: str, row: Row, capsys: Any) -> None:
    """It changes our line, is told, or is an error that names it; ours accepts what is printed."""
    code, plain, _ = run(capsys, f"{ours_of(name)} -- {BASE[name]}")
    assert code == 0
    command = f"{BASE[name]} {shlex.join(another(row))}"
    code, line, told = run(capsys, f"{ours_of(name)} -- {command}")
    if row.fate is Fate.CHANGES:
        assert (code, line) == (2, "")
        assert f"translate.py: {row.name} CHANGES TRAINING: {row.ours}" in told
        assert f"--ignore {row.name} goes on" in told
        ignored = f"{IGNORED[name]},{row.name}".strip(",")
        code, line, told = run(capsys, f"{name} {OURS[name]} --ignore {ignored} -- {command}")
        assert f"{row.name}: ignored; {row.ours}" in told
    elif row.fate is Fate.MAPPED:
        is_same = line == plain
        assert is_same == (row.name in ("lr_schedule",)), told
    else:
        assert f"translate.py: {row.name}: {row.ours}" in told
        assert line == plain
    assert code == 0, told
    assert options_in(line)


@pytest.mark.parametrize("name", SOURCES)
def test_an_unknown_option_is_named(name: str, capsys: Any) -> None:
    """Nothing is printed; an abbreviation is unknown, too."""
    for unknown in ("--no_such_option=3", "--learning_rat=3"):
        code, line, told = run(capsys, f"{ours_of(name)} -- {BASE[name]} {unknown}")
        assert (code, line) == (2, "")
        assert unknown in told
        assert SOURCES[name].where in told


@pytest.mark.parametrize("name", SOURCES)
def test_a_value_may_be_called_as_a_script(name: str, capsys: Any) -> None:
    """Nothing before it is dropped: it was taken for theirs, and all options so far were left."""
    plain = run(capsys, f"{ours_of(name)} -- {BASE[name]}")
    for launcher in ("python their.py", "python start.py --nproc 8 their.py", ""):
        told = run(capsys, f"{ours_of(name)} -- {launcher} {BASE[name]} --max_seq_length x.py")
        assert told[0] == 2, launcher
        assert "invalid int value: 'x.py'" in told[2]
        assert run(capsys, f"{ours_of(name)} -- {launcher} {BASE[name]}") == plain


@pytest.mark.parametrize("name", SOURCES)
def test_data_need_a_text(name: str, capsys: Any) -> None:
    """Without --corpus their data would silently be other data."""
    (row,) = (row for row in SOURCES[name].rows if row.ours.startswith("`--corpus`: text"))
    ours = ours_of(name).replace("--corpus a.txt", "")
    code, _, told = run(capsys, f"{ours} -- {BASE[name]} --{row.name} data")
    assert code == 2
    assert f"{row.name} CHANGES TRAINING: `--corpus`" in told


# Whole commands


def test_nvidia_s_two_commands_are_our_recipe(folder: Path, capsys: Any) -> None:
    """But for what is the machine's; and the job takes it."""
    first, second = map(shlex.quote, NVIDIA_PHASES)
    line = f"nvidia --gpus 8 --corpus a.txt --phase1 {first} --phase2 {second}"
    code, text, told = run(capsys, line)
    assert code == 0
    assert "add --run-dir /results/checkpoints" in told
    assert "phase2" not in told
    (folder / "theirs.json").write_text(text)
    (folder / "a.txt").write_text("a text\n")
    ours = json.loads((RECIPES / "nvidia-large.json").read_text())
    found = json.loads(text)
    sizes = [phase.pop("micro_batch_size") for phase in found["phases"]]
    assert sizes == [256, 32]
    assert found["phases"] == ours["phases"]
    assert {k: found["options"][k] for k in ours["options"]} == ours["options"]
    config = parse_config(["--recipe", "theirs.json"])
    config.check_batches(8)
    assert (config.seed, config.corpus, config.save_every) == (42, (Path("a.txt"),), 200)
    assert config.shard_config().grad_sync_dtype is not None


def test_nvidia_s_first_command(capsys: Any) -> None:
    """One line for a shell, of which each option is what theirs means."""
    code, line, _ = run(capsys, f"nvidia --gpus 8 --corpus a.txt -- {NVIDIA_PHASES[0]}")
    assert code == 0
    found = options_in(line)
    assert found["--global-batch-size"] == ["65536"]
    assert found["--micro-batch-size"] == ["256"]
    assert (found["--lr"], found["--steps"]) == (["0.006"], ["7038"])
    assert found["--vocab-size"] == ["30528"]
    assert json.loads(found["--sharding"][0]) == {"grad_sync_dtype": "float16"}


def test_a_start_from_a_checkpoint(capsys: Any) -> None:
    """Sizes come with it, so they are not given; a file of theirs is told to be converted."""
    line = f"nvidia --gpus 8 -- {BASE['nvidia']} --init_checkpoint ckpt_28252.pt"
    code, line, told = run(capsys, line)
    assert code == 0
    found = options_in(line)
    assert found["--init-from"] == ["ckpt_28252.pt"]
    assert not {"--model-size", "--vocab-size"} & found.keys()
    assert "takes a transformers folder; convert theirs" in told


def test_google_s_switches(capsys: Any) -> None:
    """TensorFlow's forms: --name=false, --noname; the rule is BertAdam, the fall from step 0."""
    line = (
        "google --corpus a.txt -- --bert_config_file=bert_config.json --output_dir=runs/out"
        " --do_train=True --nodo_eval --use_tpu=False --train_batch_size=256"
        " --num_train_steps=1000 --num_warmup_steps=100 --learning_rate=1e-4"
    )
    code, line, told = run(capsys, line)
    assert code == 0
    assert "do_eval" not in told
    found = options_in(line)
    assert found["--optimizer"] == ["bertadam"]
    assert (found["--warmup"], found["--decay-from"]) == (["0.1"], ["start"])
    assert (found["--resume"], found["--run-dir"]) == (["auto"], ["runs/out"])
    assert found["--vocab-size"] == ["30522"]


def test_deepspeed_s_files(capsys: Any) -> None:
    """What is not there is told at once, with the switch to go on."""
    theirs = (
        "--cf bert_large_lamb.json --max_seq_length 128 --output_dir out --deepspeed"
        " --lr_schedule EE --lr_offset 10e-4 --job_name job --print_steps 100"
        " --deepspeed_config deepspeed_bsz64k_lamb_config_seq128.json --data_path_prefix /data"
    )
    code, line, told = run(capsys, f"deepspeed --corpus a.txt -- {theirs}")
    assert (code, line) == (2, "")
    names = re.search(r"--ignore (\S+) goes on so", told)[1]  # type: ignore[index]
    changes = {"pre_layernorm", "lr_schedule"}
    changes |= {"optimizer.params.max_coeff", "optimizer.params.bias_correction"}
    assert set(names.split(",")) == changes
    code, line, told = run(capsys, f"deepspeed --corpus a.txt --ignore {names} -- {theirs}")
    assert code == 0
    found = options_in(line)
    assert (found["--lamb-variant"], found["--eps"]) == (["deepspeed"], ["1e-08"])
    assert (found["--lr"], found["--steps"]) == (["0.012"], ["7500"])
    assert (found["--global-batch-size"], found["--micro-batch-size"]) == (["65536"], ["16"])


def test_deepspeed_s_two_commands(folder: Path, capsys: Any) -> None:
    """The second goes on with everything; the job takes the recipe."""
    common = "--cf bert_large_lamb.json --output_dir out --deepspeed --data_path_prefix /data"
    config = "--deepspeed_config deepspeed_bsz{}k_lamb_config_seq{}.json"
    first = f"{common} --max_seq_length 128 {config.format(64, 128)}"
    second = (
        f"{common} --max_seq_length 512 {config.format(32, 512)} --rewarmup"
        " --load_training_checkpoint out/saved_models --load_checkpoint_id epoch150"
    )
    names = "pre_layernorm,lr_schedule"
    names += ",optimizer.params.max_coeff,optimizer.params.bias_correction"
    line = f"deepspeed --ignore {names},data_path_prefix"
    code, text, told = run(capsys, f"{line} --phase1 {first!r} --phase2 {second!r}")
    assert code == 0, told
    (folder / "theirs.json").write_text(text)
    phases = parse_config(["--recipe", "theirs.json"]).phases
    assert [(p.seq_len, p.global_batch_size, p.lr) for p in phases] == [
        (128, 65536, 0.011),
        (512, 32768, 0.002),
    ]
    assert phases[1].carry == "all"
