"""Options: what is refused, how, and what a resumed run takes from the run before."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from pretraining.config import RunConfig, check_options, parse_config, write_stored_config
from pretraining.errors import UsageError
from pretraining.launch import Launch

from tests.launch import jobs


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--optimizer", "adagrad"], r"--optimizer: invalid choice: 'adagrad'"),
        (["--model-size", "huge"], r"--model-size: invalid choice"),
        (["--no-such-option"], r"unrecognized arguments: --no-such-option"),
        (["--steps", "many"], r"--steps: invalid int value: 'many'"),
        (["--steps", "0"], r"--steps must be at least 1, got 0"),
        (["--lr", "-1"], r"--lr must be a number greater than 0, got -1"),
        (["--lr", "nan"], r"--lr must be a number greater than 0, got nan"),
        (["--dropout", "1"], r"--dropout must be from 0 to below 1"),
        (["--warmup", "2"], r"--warmup must be a share of the steps"),
        (["--betas", "0.9", "1"], r"--betas must be from 0 to below 1"),
        (["--seq-len", "4"], r"--seq-len must be at least 8"),
        (["--save-every", "0"], r"--save-every must be greater than 0"),
        (["--seed", "-1"], r"--seed must be 0 or greater"),
        (["--seed", "9223372036854775808"], r"--seed must be below 2\*\*63"),
        (["--weight-decay", "inf"], r"--weight-decay must be a number, got inf"),
        (["--eps", "inf"], r"--eps must be a number, got inf"),
        (["--decay-power", "inf"], r"--decay-power must be a number, got inf"),
        (["--sharding", "stage=2"], r"--sharding must be a JSON object .* got stage=2: "),
        (["--sharding", "[1]"], r"--sharding must be a JSON object"),
        (["--sharding", '{"stage": 3}'], r"--sharding .* Invalid stage: 3"),
        (["--sharding", '{"stages": 2}'], r"--sharding .* Unknown sharding options"),
        (["--corpus", "nowhere.txt"], r"--corpus: nowhere.txt is not a file or folder"),
        (["--vocab-words", "0"], r"--vocab-words must be at least 1, got 0"),
        (["--resume"], r"--resume: runs holds no run; name one with --run-dir"),
        (["--resume", "--run-dir", "x"], r"config.json cannot be read; name the folder of a run"),
    ],
)
def test_a_wrong_option_is_named(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every message is one line that names the option."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=message) as caught:
        parse_config(arguments)
    assert "\n" not in str(caught.value)


def test_a_dry_run_is_of_some_ranks() -> None:
    check_options(["--dry-run", "2"], 1)
    with pytest.raises(UsageError, match="--dry-run must be a number of ranks, got -2"):
        check_options(["--dry-run", "-2"], 1)


def test_the_readme_lists_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    """With a row in one of its tables, as --help does."""
    with pytest.raises(SystemExit):
        parse_config(["--help"])
    options = set(re.findall(r"--[a-z][a-z-]+", capsys.readouterr().out)) - {"--help"}
    assert {"--corpus", "--jsonl-key", "--strict", "--vocab-words"} < options
    readme = jobs.SCRIPT.with_name("README.md").read_text()
    rows = "".join(line.split(" | ")[0] for line in readme.splitlines() if line.startswith("| `"))
    assert {name for name in options if not re.search(rf"{name}\b", rows)} == set()


@pytest.mark.parametrize(
    ("arguments", "world_size", "message"),
    [
        (
            ["--global-batch-size", "10"],
            4,
            r"cannot be split over 4 ranks; use a multiple such as 8",
        ),
        (
            ["--global-batch-size", "2"],
            3,
            r"cannot be split over 3 ranks; use a multiple such as 3",
        ),
        (
            ["--global-batch-size", "12", "--micro-batch-size", "4"],
            2,
            r"--micro-batch-size 4 does not divide a rank's 6 samples .* use a divisor of 6",
        ),
    ],
)
def test_a_batch_that_cannot_be_split_is_refused(
    arguments: list[str], world_size: int, message: str
) -> None:
    """The message proposes a batch that works."""
    with pytest.raises(UsageError, match=message):
        parse_config(arguments).check_batches(world_size)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_the_defaults_work_on_one_to_four_ranks(world_size: int) -> None:
    """By default each rank takes its share of the batch in one forward pass."""
    config = parse_config([])
    split = config.phases[0].micro_batches(world_size)
    assert split.number == 1
    assert split.size * world_size == config.phases[0].global_batch_size


def test_micro_batches_divide_the_rank_s_share() -> None:
    """24 samples over 2 ranks in micro-batches of 3 are 4 forward passes each."""
    config = parse_config(["--global-batch-size", "24", "--micro-batch-size", "3"])
    split = config.phases[0].micro_batches(2)
    assert (split.samples_per_rank, split.size, split.number) == (12, 3, 4)


def test_new_runs_are_numbered_and_resume_takes_the_newest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other folders beside the runs do not count."""
    monkeypatch.chdir(tmp_path)
    assert parse_config([]).run_dir == Path("runs/bert-001")
    for name in ("bert-009", "bert-010", "bert-old", "data"):
        (tmp_path / "runs" / name).mkdir(parents=True)
    assert parse_config([]).run_dir == Path("runs/bert-011")
    with pytest.raises(UsageError, match=r"bert-010/config\.json cannot be read"):
        parse_config(["--resume"])


def test_a_used_run_directory_is_refused_without_resume(tmp_path: Path) -> None:
    """An empty folder is fine; one with anything in it, and a file, are not."""
    assert parse_config(["--run-dir", str(tmp_path)]).run_dir == tmp_path
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="is not empty; pass --resume"):
        parse_config(["--run-dir", str(tmp_path)])
    with pytest.raises(UsageError, match="file is a file; name a folder"):
        parse_config(["--run-dir", str(tmp_path / "file")])


@pytest.fixture
def stored_run(tmp_path: Path, text_file: Path) -> RunConfig:
    arguments = ["--corpus", str(text_file), "--optimizer", "adamw", "--steps", "77"]
    config = parse_config([*arguments, "--run-dir", str(tmp_path / "run"), "--save-every", "5"])
    config.run_dir.mkdir()
    write_stored_config(config, config.corpus, corpus_digest="abc")
    return config


def test_resume_takes_the_options_of_the_run(stored_run: RunConfig, text_file: Path) -> None:
    """Nothing but the folder has to be repeated, and operational options may change."""
    resumed = parse_config(["--resume", "--run-dir", str(stored_run.run_dir), "--save-every", "9"])
    assert resumed.corpus == (text_file,)
    assert (resumed.optimizer, resumed.steps, resumed.save_every) == ("adamw", 77, 9)
    assert resumed.phases == stored_run.phases
    assert resumed.betas == stored_run.betas
    assert resumed.resume


def test_a_run_from_before_there_was_an_option_resumes(stored_run: RunConfig) -> None:
    """What it cannot name has its default."""
    path = stored_run.run_dir / "config.json"
    stored = json.loads(path.read_text())
    for name in ("sharding", "jsonl_key", "strict", "vocab_words"):
        del stored[name]
    path.write_text(json.dumps(stored))
    resumed = parse_config(["--resume", "--run-dir", str(stored_run.run_dir)])
    assert (resumed.sharding, resumed.jsonl_key, resumed.strict) == ("{}", "text", False)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--optimizer", "lamb"],
        ["--steps", "78"],
        ["--betas", "0.8", "0.9"],
        ["--sharding", '{"param_sync_bits": 4}'],
        ["--jsonl-key", "body"],
    ],
)
def test_resume_refuses_another_configuration(stored_run: RunConfig, arguments: list[str]) -> None:
    """An option that would change the losses is named with both values."""
    with pytest.raises(UsageError, match=rf"was made with {arguments[0]} .*, not ") as caught:
        parse_config(["--resume", "--run-dir", str(stored_run.run_dir), *arguments])
    assert "\n" not in str(caught.value)


def test_the_stored_configuration_is_plain_json(stored_run: RunConfig) -> None:
    """It does not depend on the working directory, and has no entry that names the run itself."""
    stored = json.loads((stored_run.run_dir / "config.json").read_text())
    assert Path(stored["data_dir"]).is_absolute()
    assert stored["corpus_digest"] == "abc"
    assert "run_dir" not in stored


@pytest.mark.parametrize(
    "environ", [{"RANK": "0"}, {"WORLD_SIZE": "2"}, {"RANK": "a", "WORLD_SIZE": "2"}]
)
def test_a_half_set_launch_environment_is_refused(environ: dict[str, str]) -> None:
    """RANK without WORLD_SIZE would otherwise train alone and overwrite the others' files."""
    with pytest.raises(UsageError, match="RANK and WORLD_SIZE"):
        Launch.from_environment(environ)
    assert not Launch.from_environment({}).is_distributed


@pytest.mark.parametrize("name", ["SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"])
def test_several_processes_without_torchrun_are_refused(name: str) -> None:
    """Each would train alone. A batch script's SLURM_NTASKS says nothing of this process."""
    with pytest.raises(UsageError, match=f"has started 4 processes .{name}.*torchrun"):
        Launch.from_environment({name: "4"})
    for other in ({name: "1"}, {"SLURM_NTASKS": "4", "SLURM_PROCID": "0"}):
        assert not Launch.from_environment(other).is_distributed
    assert Launch.from_environment({name: "4", "RANK": "0", "WORLD_SIZE": "1"}).is_distributed


@pytest.mark.timeout(60)
def test_the_command_exits_with_code_2_and_one_line(tmp_path: Path) -> None:
    """Plain Python: nothing on stdout, one line on stderr, no run directory."""
    process = jobs.start_command(tmp_path, ["--optimizer", "adagrad"], world_size=0)
    stdout, stderr = process.communicate(timeout=50)
    assert process.returncode == 2
    assert stdout == ""
    assert stderr.startswith("pretrain.py: error: ")
    assert stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.timeout(60)
def test_ranks_all_exit_with_code_2_and_only_rank_0_speaks(tmp_path: Path) -> None:
    """A world size that cannot work is refused before the ranks have met."""
    processes = [
        jobs.start_command(
            tmp_path,
            ["--global-batch-size", "16"],
            world_size=0,
            environ={"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "3"},
        )
        for rank in range(3)
    ]
    outputs = [process.communicate(timeout=50) for process in processes]
    assert [process.returncode for process in processes] == [2, 2, 2]
    assert outputs[0][1].count("\n") == 1
    assert "cannot be split over 3 ranks" in outputs[0][1]
    assert outputs[1] == outputs[2] == ("", "")
