"""What goes wrong with the files of a run: one line, exit code 2 on every rank, nothing lost."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from tests.launch import faults, jobs
from tests.launch.faults import on_rank
from tests.launch.jobs import RESUME, RUN, SMALL, snapshot

pytestmark = pytest.mark.timeout(120)

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
    assert "step-8 is not saved" in line
    assert "bytes of " in line
    assert f"__{rank}_0.distcp; all ranks must write to one file system" in line
    assert ("rank 0 sees 0 bytes" in line) != is_cut
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
    assert "what rank 1 has written there; all ranks must write to one file system" in line
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
    assert "step-8 is not saved" in line
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
    "index": lambda folder: os.truncate(folder / "part-1.json", 100),
    "manifest": lambda folder: (folder / "manifest.json").unlink(),
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
    said = "loading step-10, the newest whole checkpoint" in output
    assert said == (latest != "gone")
    assert f"run: {copied}, steps 10 to 10" in output
    assert jobs.losses(copied) == jobs.losses(finished)
    assert snapshot(copied / "checkpoints" / "step-10") == before


@pytest.mark.parametrize("damage", DAMAGES)
def test_resume_passes_by_a_damaged_checkpoint(copied: Path, finished: Path, damage: str) -> None:
    """It says so, and takes the one before."""
    DAMAGES[damage](copied / "checkpoints" / "step-10")
    output = jobs.run(copied.parent, RESUME, 2)
    assert "step-10" in output
    assert "loading step-8, the newest whole checkpoint" in output
    assert f"run: {copied}, steps 8 to 10" in output
    assert jobs.losses(copied) == jobs.losses(finished)


def test_resume_refuses_where_no_checkpoint_is_whole(copied: Path) -> None:
    """Starting over would write over what may be mended."""
    for step in (8, 10):
        DAMAGES["truncated"](copied / "checkpoints" / f"step-{step}")
    before = snapshot(copied)
    line = jobs.refused(jobs.start(copied.parent, RESUME, 2))
    assert "has no whole checkpoint" in line
    assert "step-10/__1_0.distcp has 1,000 bytes of" in line
    assert "; step-8/__1_0.distcp has " in line
    assert snapshot(copied) == before


def test_resume_refuses_where_latest_names_a_checkpoint_and_there_is_none(copied: Path) -> None:
    """Someone has removed them, or the disk that they are on is not there."""
    for step in (8, 10):
        shutil.rmtree(copied / "checkpoints" / f"step-{step}")
    line = jobs.refused(jobs.start(copied.parent, RESUME, 0))
    assert "latest names step-10" in line
    assert "has no whole checkpoint" in line


def test_the_checkpoint_of_another_model_is_refused(copied: Path, inputs: list[str]) -> None:
    """Its options say so."""
    other = copied.parent / "other"
    other.mkdir()
    jobs.run(other, [*inputs, *RUN, "--steps", "1", "--seq-len", "32"], 0)
    shutil.rmtree(copied / "checkpoints")
    shutil.copytree(other / "run" / "checkpoints", copied / "checkpoints")
    before = snapshot(copied)
    line = jobs.refused(jobs.start(copied.parent, RESUME, 2))
    assert "is of a run with --seq-len 32" in line
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
