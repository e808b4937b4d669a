"""What goes wrong with the files of a run: one line, exit code 2 on every rank, nothing lost."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from pretraining.prepared import PreparedCorpus

from tests.launch import faults, jobs
from tests.launch.faults import Fault, on_rank
from tests.launch.jobs import SMALL

pytestmark = pytest.mark.timeout(120)

RUN = (*SMALL, "--steps", "10", "--save-every", "4", "--run-dir", "run")
RESUME = ("--resume", "--run-dir", "run")


@pytest.fixture(scope="module")
def finished(
    tmp_path_factory: pytest.TempPathFactory, text_file: Path, corpus: PreparedCorpus
) -> Path:
    """Return the folder of a run of ten steps by two ranks, with checkpoints of steps 8 and 10."""
    cwd = tmp_path_factory.mktemp("finished")
    inputs = ["--corpus", str(text_file), "--data-dir", str(corpus.folder.parent)]
    jobs.run(cwd, [*inputs, *RUN], 2)
    return cwd / "run"


@pytest.fixture
def copied(finished: Path, tmp_path: Path) -> Path:
    shutil.copytree(finished, tmp_path / "run")
    return tmp_path / "run"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Mount a tmpfs of the size asked for; skipped where that is not allowed."""
    folder = tmp_path / "disk"
    folder.mkdir()

    def mount(size: str) -> Path:
        command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(folder)]
        if os.geteuid() or subprocess.run(command, capture_output=True, check=False).returncode:
            pytest.skip("a file system cannot be mounted here")
        return folder

    yield mount
    if os.path.ismount(folder):
        subprocess.run(["umount", "-l", str(folder)], check=True)


def snapshot(folder: Path) -> dict[str, bytes]:
    """Return the contents of all files below, but for the lock's."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != ".lock"]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


# One rank decides.


def test_a_late_rank_trains_in_the_same_default_run_directory(
    tmp_path: Path, inputs: list[str]
) -> None:
    """Rank 1 comes when the directory is there already; what is saved can be restored."""
    config = tmp_path / "runs" / "bert-001" / "config.json"
    late = on_rank(1, partial(faults.late_until, config))
    job = jobs.start(tmp_path, [*inputs, *SMALL], 2, late)
    assert job.wait() == [0, 0], job.output()
    assert [path.name for path in (tmp_path / "runs").glob("bert-*")] == ["bert-001"]
    before = jobs.losses(config.parent)
    (config.parent / "metrics.jsonl").unlink()
    jobs.run(tmp_path, ["--resume"], 2)
    assert len(before) == 8


def test_ranks_with_other_options_are_refused(tmp_path: Path, inputs: list[str]) -> None:
    """Otherwise each would train with options of its own."""

    def shorten() -> None:
        import pretraining.session as session

        make_plan = session.make_plan
        session.make_plan = lambda argv, *rest: make_plan([*argv, "--lr", "1"], *rest)

    job = jobs.start(tmp_path, [*inputs, *RUN], 2, on_rank(1, shorten))
    line = jobs.refused(job)
    assert "--lr 1' where rank 0 has" in line.replace("',", "'")
    assert "(rank 1)" in line


# `latest` moves only when all parts are there.


@pytest.mark.parametrize("is_cut", [False, True], ids=["missing", "truncated"])
@pytest.mark.parametrize("rank", [0, 1])
def test_latest_stays_where_a_part_is_not_whole(
    tmp_path: Path, inputs: list[str], finished: Path, rank: int, is_cut: bool
) -> None:
    """The part of one rank is lost; the run ends, and goes on from the checkpoint before."""
    lose = partial(faults.part_of_second_save, tmp_path, rank, is_cut=is_cut)
    line = jobs.refused(jobs.start(tmp_path, [*inputs, *RUN], 2, on_rank(rank, lose)))
    assert "step 8 is not saved" in line
    assert f"__{rank}_0.distcp {'has' if is_cut else 'is missing'}" in line
    assert line.endswith("--resume continues from step-4")
    checkpoints = tmp_path / "run" / "checkpoints"
    assert sorted(path.name for path in checkpoints.iterdir()) == ["latest", "step-4"]
    jobs.run(tmp_path, RESUME, 2)
    assert jobs.losses(tmp_path / "run") == jobs.losses(finished)


def test_ranks_that_write_to_disks_of_their_own_are_found_out(
    tmp_path: Path, inputs: list[str]
) -> None:
    """Rank 1 has written its part, but not where rank 0 can see it."""
    elsewhere = tmp_path / "elsewhere"
    move = on_rank(1, partial(faults.own_run_dir, elsewhere))
    line = jobs.refused(jobs.start(tmp_path, [*inputs, *RUN], 2, move))
    assert "__1_0.distcp is missing; all ranks must write to one --run-dir" in line
    assert line.endswith("there is no earlier checkpoint")
    assert not (tmp_path / "run" / "checkpoints" / "latest").exists()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_part_that_cannot_be_written_leaves_the_checkpoint_before(
    tmp_path: Path, inputs: list[str], finished: Path, rank: int
) -> None:
    """One rank may not write a large file any more (EFBIG)."""
    fault = on_rank(rank, faults.small_files_from_second_save)
    line = jobs.refused(jobs.start(tmp_path, [*inputs, *RUN], 2, fault))
    assert f"File too large; free some space, or name a folder elsewhere (rank {rank})" in line
    jobs.run(tmp_path, RESUME, 2)
    assert jobs.losses(tmp_path / "run") == jobs.losses(finished)


def test_a_full_disk_leaves_the_checkpoint_before(
    tmp_path: Path, inputs: list[str], small_disk: Callable[[str], Path]
) -> None:
    """Room for one checkpoint of 5.4 MB and a bit; what did not fit is removed again."""
    folder = small_disk("9m")
    options = [*inputs, *RUN, "--run-dir", str(folder / "run")]
    line = jobs.refused(jobs.start(tmp_path, options, 2))
    assert "step 8 is not saved" in line
    assert "No space left on device; free some space" in line
    checkpoints = folder / "run" / "checkpoints"
    assert sorted(path.name for path in checkpoints.iterdir()) == ["latest", "step-4"]
    shutil.copytree(folder / "run", tmp_path / "run")
    jobs.run(tmp_path, RESUME, 1)
    assert len(jobs.losses(tmp_path / "run")) == 10


def test_metrics_that_cannot_be_written_save_the_run_and_end_it(
    tmp_path: Path, inputs: list[str], finished: Path
) -> None:
    """The file's disk is full at step 6; the state of that step is not lost."""
    fault = on_rank(0, partial(faults.full_at_metrics_step, 6))
    line = jobs.refused(jobs.start(tmp_path, [*inputs, *RUN], 2, fault))
    assert "metrics.jsonl: No space left on device" in line
    assert (tmp_path / "run" / "checkpoints" / "latest").read_text() == "step-6"
    jobs.run(tmp_path, RESUME, 2)
    found = {record["step"]: record["loss"] for record in jobs.records(tmp_path / "run", "train")}
    whole = jobs.losses(finished)
    assert found == {step: whole[step - 1] for step in (1, 2, 3, 4, 5, 7, 8, 9, 10)}


def test_a_signal_during_a_save_lets_it_finish(
    tmp_path: Path, inputs: list[str], finished: Path
) -> None:
    """SIGTERM to both ranks while one has not written its part."""
    flag = tmp_path / "saving"
    slow = on_rank(1, partial(faults.slow_save, flag, 0.5))
    job = jobs.start(tmp_path, [*inputs, *RUN], 2, slow)
    jobs.wait_until(flag.exists, "the save")
    job.signal(signal.SIGTERM)
    assert job.wait() == [0, 0], job.output()
    assert "stopped and saved after step 4 of 10" in job.output()
    jobs.run(tmp_path, RESUME, 2)
    assert jobs.losses(tmp_path / "run") == jobs.losses(finished)


# What --resume finds.


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "truncated": lambda folder: os.truncate(folder / "__1_0.distcp", 1000),
    "flipped": lambda folder: _flip(folder / "__1_0.distcp"),
    "missing": lambda folder: (folder / "__0_0.distcp").unlink(),
    "metadata": lambda folder: _flip(folder / ".metadata"),
    "listing": lambda folder: os.truncate(folder / "parts.json", 100),
    "old, truncated": lambda folder: (
        (folder / "parts.json").unlink(),
        os.truncate(folder / "__1_0.distcp", 1000),
    ),
    "old, no metadata": lambda folder: (
        (folder / "parts.json").unlink(),
        (folder / ".metadata").unlink(),
    ),
}
LATEST: dict[str, Callable[[Path], object]] = {
    "gone": lambda latest: latest.unlink(),
    "empty": lambda latest: latest.write_text(""),
    "dangling": lambda latest: latest.write_text("step-99"),
    "garbage": lambda latest: latest.write_bytes(b"\xff\0"),
}


@pytest.mark.parametrize("latest", LATEST)
def test_resume_without_latest_takes_the_newest_checkpoint(
    copied: Path, finished: Path, latest: str
) -> None:
    """It neither starts over nor writes over what is there."""
    LATEST[latest](copied / "checkpoints" / "latest")
    before = snapshot(copied / "checkpoints" / "step-10")
    output = jobs.run(copied.parent, RESUME, 0)
    assert "continuing from step-10, the newest whole checkpoint" in output
    assert f"run: {copied}, steps 10 to 10" in output
    assert jobs.losses(copied) == jobs.losses(finished)
    assert snapshot(copied / "checkpoints" / "step-10") == before


@pytest.mark.parametrize("damage", DAMAGES)
def test_resume_passes_by_a_damaged_checkpoint(copied: Path, finished: Path, damage: str) -> None:
    """It says so, and takes the one before."""
    DAMAGES[damage](copied / "checkpoints" / "step-10")
    output = jobs.run(copied.parent, RESUME, 2)
    assert "step-10: " in output
    assert "continuing from step-8, the newest whole checkpoint" in output
    assert f"run: {copied}, steps 8 to 10" in output
    assert jobs.losses(copied) == jobs.losses(finished)


def test_resume_refuses_where_no_checkpoint_is_whole(copied: Path) -> None:
    """Starting over would write over what may be mended."""
    for step in (8, 10):
        DAMAGES["truncated"](copied / "checkpoints" / f"step-{step}")
    before = snapshot(copied)
    line = jobs.refused(jobs.start(copied.parent, RESUME, 2))
    assert "has no whole checkpoint (step-10: __1_0.distcp has 1,000 bytes of" in line
    assert "; step-8: " in line
    assert snapshot(copied) == before


def test_resume_refuses_where_latest_names_a_checkpoint_and_there_is_none(copied: Path) -> None:
    """Someone has removed them, or the disk that they are on is not there."""
    for step in (8, 10):
        shutil.rmtree(copied / "checkpoints" / f"step-{step}")
    line = jobs.refused(jobs.start(copied.parent, RESUME, 0))
    assert "has no whole checkpoint (latest names step-10)" in line


def test_checkpoints_from_before_there_were_listings_load(copied: Path, finished: Path) -> None:
    """They have neither sizes nor digests of their own, and are restored as ever."""
    for listing in copied.glob("checkpoints/*/parts.json"):
        listing.unlink()
    (copied / "checkpoints" / "latest").write_text("step-8")
    jobs.run(copied.parent, RESUME, 2)
    assert jobs.losses(copied) == jobs.losses(finished)


@pytest.mark.parametrize("has_listing", [True, False])
def test_the_checkpoint_of_another_model_is_refused(
    copied: Path, inputs: list[str], has_listing: bool
) -> None:
    """Its options say so or, where it has none, its tensors."""
    other = copied.parent / "other"
    other.mkdir()
    jobs.run(other, [*inputs, *RUN, "--steps", "1", "--model-size", "mini"], 0)
    if not has_listing:
        (other / "run" / "checkpoints" / "step-1" / "parts.json").unlink()
    shutil.rmtree(copied / "checkpoints")
    shutil.copytree(other / "run" / "checkpoints", copied / "checkpoints")
    before = snapshot(copied)
    line = jobs.refused(jobs.start(copied.parent, RESUME, 2))
    wanted = (
        "is of a run with --model-size mini" if has_listing else "does not fit this run's model"
    )
    assert wanted in line
    assert snapshot(copied) == before


def test_another_number_of_ranks_that_cannot_share_the_batch_is_refused(copied: Path) -> None:
    """Twelve samples on five ranks; the run stays as it was."""
    before = snapshot(copied)
    line = jobs.refused(jobs.start(copied.parent, RESUME, 5))
    assert "--global-batch-size 12 cannot be split over 5 ranks" in line
    assert snapshot(copied) == before


@pytest.mark.parametrize("path", ["loss.png", ".metrics.jsonl"])
def test_what_cannot_be_drawn_or_read_at_the_end_takes_nothing_away(
    copied: Path, path: str
) -> None:
    """A curve that cannot be written is an error; metrics that are gone leave less to report."""
    if path == "loss.png":
        (copied / path).unlink()
        (copied / path).mkdir()
        line = jobs.refused(jobs.start(copied.parent, RESUME, 2))
        assert "loss.png: Is a directory" in line
    else:
        (copied / path[1:]).write_bytes(b'{"kind": "train", "st\xff\n7\n[]\n{"kind": "eval"}\n')
        assert "has no held-out evaluation" in jobs.run(copied.parent, RESUME, 2)
    assert (copied / "checkpoints" / "latest").read_text() == "step-10"


# Two jobs.


@pytest.mark.parametrize("arguments", [RESUME, RUN], ids=["resume", "new"])
def test_a_second_job_on_a_run_directory_is_refused_while_the_first_lives(
    tmp_path: Path, inputs: list[str], arguments: tuple[str, ...]
) -> None:
    """The message names the first; once that is killed nothing of it is in the way."""
    first = jobs.start(tmp_path, [*inputs, *RUN, "--steps", "100000"], 0)
    jobs.wait_until((tmp_path / "run" / "checkpoints" / "latest").exists, "a checkpoint")
    second = tmp_path / "second"
    second.mkdir()
    options = [*inputs] if arguments is RUN else []
    options += [*arguments, "--run-dir", str(tmp_path / "run")]
    line = jobs.refused(jobs.start(second, options, 2))
    assert f"is in use by process {first.ranks[0].pid} on {os.uname().nodename} since" in line
    first.signal(signal.SIGKILL)
    assert first.wait() == [-signal.SIGKILL]
    resumed = jobs.start(second, ["--resume", "--run-dir", str(tmp_path / "run")], 2)
    jobs.wait_until(lambda: "steps " in resumed.output(), "the resumed run")
    resumed.signal(signal.SIGTERM)
    assert resumed.wait() == [0, 0], resumed.output()


def test_two_jobs_prepare_one_text_at_once(tmp_path: Path, text_file: Path) -> None:
    """Both train, each in a numbered directory of its own, on what one of them prepared."""
    data = tmp_path / "data"
    options = ["--corpus", str(text_file), "--data-dir", str(data), *SMALL, "--steps", "1"]
    together = [jobs.start(tmp_path, options, 0) for _ in range(2)]
    assert [job.wait() for job in together] == [[0], [0]], [job.output() for job in together]
    (prepared,) = data.iterdir()
    digest = json.loads((prepared / "summary.json").read_text())["digest"]
    configs = [tmp_path / "runs" / f"bert-{n:03d}" / "config.json" for n in (1, 2)]
    assert [json.loads(c.read_text())["corpus_digest"] for c in configs] == [digest, digest]


# Folders that cannot be used.


def _no_fault(rank: int) -> None:
    """Nothing."""


@pytest.mark.parametrize(
    ("options", "fault", "message"),
    [
        (["--run-dir", "file"], _no_fault, "--run-dir file is a file; name a folder"),
        (["--run-dir", "file/run"], _no_fault, "--run-dir file/run: Not a directory"),
        (["--run-dir", "/proc/no/run"], _no_fault, "--run-dir /proc/no/run: No such file"),
        (["--data-dir", "file"], _no_fault, "--data-dir file: "),
        (["--data-dir", "data"], on_rank(0, partial(faults.small_files, 1000)), "free some space"),
        (["--seq-len", "9999"], _no_fault, "--seq-len must be at most 512, the positions that"),
    ],
    ids=["file", "below-file", "proc", "data", "data-full", "seq-len"],
)
def test_a_folder_that_cannot_be_written_is_one_line(
    tmp_path: Path, inputs: list[str], options: list[str], fault: Fault, message: str
) -> None:
    """On all ranks, and nothing is left behind."""
    (tmp_path / "file").write_text("text")
    run_dir = ["--run-dir", "run"] if "--run-dir" not in options else []
    job = jobs.start(tmp_path, [*inputs, *SMALL, *run_dir, *options], 2, fault)
    assert message in jobs.refused(job)
    left = {path.name for path in tmp_path.rglob("*")} - {"rank-0.log", "rank-1.log"}
    assert left <= {"file", "data"}
    assert (tmp_path / "file").read_text() == "text"


def test_a_full_disk_while_text_is_prepared_is_one_line(
    tmp_path: Path, text_file: Path, small_disk: Callable[[str], Path]
) -> None:
    """What was built so far is removed, so the disk is as empty as before."""
    data = small_disk("16k")
    options = ["--corpus", str(text_file), "--data-dir", str(data), *RUN]
    line = jobs.refused(jobs.start(tmp_path, options, 2))
    assert f"--data-dir {data}: " in line
    assert list(data.iterdir()) == []


@pytest.mark.parametrize("damage", ["text", "tokens", "summary"])
def test_text_that_is_gone_or_damaged_is_one_line(
    tmp_path: Path, text_file: Path, damage: str
) -> None:
    """Between a run and --resume; the run keeps its checkpoints."""
    data = tmp_path / "data"
    data.mkdir()
    text = data / "text.txt"
    shutil.copy(text_file, text)
    inputs = ["--corpus", str(text), "--data-dir", str(data)]
    jobs.run(tmp_path, [*inputs, *RUN, "--steps", "1"], 0)
    (prepared,) = data.glob("prepared-*")
    if damage == "text":
        text.unlink()
    elif damage == "tokens":
        os.truncate(prepared / "train" / "tokens.npy", 200)
    else:
        (prepared / "summary.json").write_text("{}")
    before = snapshot(tmp_path / "run")
    line = jobs.refused(jobs.start(tmp_path, RESUME, 2))
    assert ("text.txt is not a file; restore it" if damage == "text" else "cannot be read") in line
    assert snapshot(tmp_path / "run") == before


# The real command.


def test_torchrun_s_report_ends_with_the_one_line(copied: Path) -> None:
    """A used directory: the line comes first and, below torchrun's own traceback, last."""
    process = jobs.start_command(copied.parent, ["--run-dir", "run"], 2)
    _, stderr = process.communicate(timeout=60)
    line = "pretrain.py: error: --run-dir run is not empty; pass --resume"
    assert process.returncode == 1
    assert stderr.count("\n" + line) + stderr.startswith(line) == 1
    cause = stderr.partition("Root Cause")[2]
    assert "exitcode  : 2" in cause
    assert f"traceback : {line}" in cause
    assert "pretraining" not in stderr


def test_a_late_rank_of_torchrun_shares_the_default_run_directory(
    tmp_path: Path, inputs: list[str]
) -> None:
    """Rank 1 starts when rank 0 has decided; one run, which is whole."""
    script = (
        'while [ "$RANK" = 1 ] && [ ! -e runs/bert-001/config.json ]; do sleep 0.1; done; '
        'exec "$0" "$@"'
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    command += ["2", "--no-python", "bash", "-c", script, sys.executable, str(jobs.SCRIPT)]
    path = os.pathsep.join(filter(None, [str(jobs.REPOSITORY), os.environ.get("PYTHONPATH")]))
    result = subprocess.run(
        [*command, *inputs, *SMALL, "--steps", "2"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    (run,) = (tmp_path / "runs").glob("bert-*")
    parts = json.loads((run / "checkpoints" / "step-2" / "parts.json").read_text())["parts"]
    assert {part["name"] for part in parts} == {"__0_0.distcp", "__1_0.distcp", ".metadata"}
    assert "steps 2 to 2" in jobs.run(tmp_path, ["--resume"], 2)
