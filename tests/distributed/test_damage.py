"""Damaged checkpoints: every byte counts, nothing is loaded, and the newest whole one is found."""

from __future__ import annotations

import logging
import os
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardfuse import ShardedAdamW, ShardedSGD
from shardfuse.checkpoint import (
    CheckpointError,
    Checkpoints,
    DamagedCheckpoint,
    load,
    loading,
    save,
)
from shardfuse.checkpoint.index import CheckpointReader, Manifest
from shardfuse.comm.session import PeerError
from tests.support.checkpoints import Job, assert_same
from tests.support.harness import run_procs, run_threads

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.filterwarnings("ignore:.*fewer than two dimensions.*:UserWarning"),
]

STEPS = (2, 3)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two checkpoints of two ranks."""
    folder: Path = tmp_path_factory.mktemp("written")

    def write() -> None:
        job = Job(ShardedAdamW)
        for step in STEPS:
            job.train(step - job.step)
            Checkpoints(folder).save(job.objects, step)

    run_threads(2, write)
    return folder


@pytest.fixture
def copied(written: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(written, tmp_path / "copied"))


def attempt(folder: Path, **options: Any) -> tuple[str, bool]:
    """Load on this rank: return the error's text, and whether everything is as before."""
    job = Job(ShardedAdamW, seed=1)
    before = job.values()
    try:
        load(job.objects, folder, **options)
    except DamagedCheckpoint as damage:
        assert_same(job.values(), before)
        return str(damage), True
    return "", False


def damage(path: Path, rng: random.Random) -> Callable[[], None]:
    """Flip a bit or cut a file off; return what mends that."""
    data = path.read_bytes()
    if rng.random() < 0.3:
        os.truncate(path, rng.randrange(len(data)))
    else:
        with path.open("r+b") as file:
            place = rng.randrange(len(data))
            file.seek(place)
            file.write(bytes([data[place] ^ 1 << rng.randrange(8)]))
    return lambda: path.write_bytes(data) and None


def test_a_tensor_without_elements(copied: Path) -> None:
    """Nothing of it is read; what was written for it is looked at all the same."""
    folder = copied / "step-3"
    with CheckpointReader(folder) as source:
        parts = Manifest.read(source).read_indices(source)
    (item,) = [item for part in parts for item in part.entries if item.key == "model.nothing"]
    with (folder / item.file).open("r+b") as file:
        file.seek(item.start + item.length // 2)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))
    for text, is_unchanged in run_threads(2, lambda: attempt(folder, look_beside=False)):
        assert is_unchanged
        assert "model.nothing" in text


@pytest.mark.parametrize("chunk", range(8))
def test_any_bit_and_any_end(copied: Path, chunk: int) -> None:
    """25 times: one flipped bit or cut end, in a file drawn by chance, is told on both ranks."""
    rng, folder = random.Random(chunk), copied / "step-3"
    files = sorted(folder.iterdir())
    assert {path.name for path in files} >= {".metadata", "manifest.json", "__1_0.distcp"}
    for _ in range(25):
        path = rng.choice(files)
        mend = damage(path, rng)
        for text, is_unchanged in run_threads(2, lambda: attempt(folder, look_beside=False)):
            assert is_unchanged
            assert path.name in text, (path, text)
            if path.suffix == ".distcp":
                # Which state of which parameter, or which other value.
                assert re.search(r"(optimizer|model|scheduler|scaler|step|list)\S* .*in __", text)
        mend()
    assert [text for text, _ in run_threads(2, lambda: attempt(folder))] == ["", ""]


def test_the_error_names_the_newest_whole_one(copied: Path) -> None:
    """Of the run; the damaged one is not it, nor is one that is damaged too. All ranks tell it."""
    damage(copied / "step-3" / "__1_0.distcp", random.Random(0))
    shutil.copytree(copied / "step-3", copied / "step-4")
    for text, is_unchanged in run_threads(2, lambda: attempt(copied / "step-3")):
        assert is_unchanged
        assert "step-3" in text
        assert f"The newest whole checkpoint beside it is {copied / 'step-2'}." in text
    alone = copied / "alone"
    shutil.copytree(copied / "step-3", alone)
    for text, _ in run_threads(2, lambda: attempt(alone)):
        assert "alone" in text
        assert "beside" not in text
    damage(copied / "step-2" / ".metadata", random.Random(0))
    for text, _ in run_threads(2, lambda: attempt(copied / "step-3")):
        assert text.endswith("No other checkpoint beside it is whole.")


def test_looking_for_it_is_left_to_load(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """load_latest() finds the newest whole one by loading it, and reads nothing twice."""
    damage(copied / "step-3" / "__0_0.distcp", random.Random(3))
    monkeypatch.setattr(loading, "name_intact_sibling", lambda *_: pytest.fail("read twice"))
    assert [step for step, _ in run_threads(2, lambda: resume(copied))] == [2, 2]


def resume(folder: Path) -> tuple[int | None, dict[str, Any]]:
    job = Job(ShardedAdamW, seed=1)
    state = job.objects
    step = Checkpoints(folder).load_latest(state)
    job.step = state["step"]
    return step, job.values()


@pytest.mark.parametrize("world_size", [1, 3])
def test_the_newest_whole_one_is_taken(
    copied: Path, world_size: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Also where fewer or more ranks read than have written; and it is said."""
    caplog.set_level(logging.WARNING, "shardfuse")
    ((expected, values), *_) = run_threads(2, lambda: resume(copied))
    assert expected == 3
    assert not caplog.records
    damage(copied / "step-3" / "__0_0.distcp", random.Random(3))
    for step, found in run_threads(world_size, lambda: resume(copied)):
        assert step == 2
        assert found["step"] == 2
        assert found["model.tied.weight"].shape == values["model.tied.weight"].shape
    assert "loading step-2, the newest whole checkpoint" in caplog.text
    assert "step-3" in caplog.text


def refuse(folder: Path) -> str:
    with pytest.raises(DamagedCheckpoint) as caught:
        resume(folder)
    return str(caught.value)


def test_no_whole_one_is_an_error(copied: Path) -> None:
    """Starting over would write over what may be mended."""
    for step in STEPS:
        damage(copied / f"step-{step}" / "__1_0.distcp", random.Random(0))
    for text in run_threads(2, lambda: refuse(copied)):
        assert "has no whole checkpoint" in text
        assert "step-3" in text
        assert "step-2" in text
    for step in STEPS:
        shutil.rmtree(copied / f"step-{step}")
    for text in run_threads(2, lambda: refuse(copied)):
        assert "latest names step-3" in text
    (copied / "latest").unlink()
    assert [step for step, _ in run_threads(2, lambda: resume_empty(copied))] == [None, None]


def resume_empty(folder: Path) -> tuple[int | None, None]:
    return Checkpoints(folder).load_latest(Job(ShardedAdamW).objects), None


def test_a_damaged_one_is_not_counted(tmp_path: Path) -> None:
    """Two are kept; the one that is damaged between them is none of them."""
    names: list[list[str]] = []

    def keep() -> None:
        job, checkpoints = Job(ShardedSGD), Checkpoints(tmp_path, keep=2)
        for step in range(1, 6):
            job.train(1)
            checkpoints.save(job.objects, step)
            dist.barrier()
            if dist.get_rank() == 0:
                names.append(sorted(path.name for path in tmp_path.iterdir()))
                if step == 3:
                    damage(tmp_path / "step-3" / "__1_0.distcp", random.Random(1))
            dist.barrier()

    run_threads(2, keep)
    assert names == [
        ["latest", "step-1"],
        ["latest", "step-1", "step-2"],
        ["latest", "step-2", "step-3"],
        ["latest", "step-2", "step-3", "step-4"],
        ["latest", "step-4", "step-5"],
    ]


def test_killed_between_the_old_and_the_new(copied: Path) -> None:
    """A step that is saved anew: the one is gone, the other has not got its name yet."""
    for place in (".step-3.replaced", ".step-3.unfinished"):
        (copied / "step-3").rename(copied / place)
        before = sorted(copied.rglob("*"))
        assert [step for step, _ in run_threads(2, lambda: resume(copied))] == [3, 3]
        assert sorted(copied.rglob("*")) == before  # who loads renames nothing
        (copied / place).rename(copied / "step-3")
    (copied / "step-3").rename(copied / ".step-3.unfinished")
    (copied / ".step-3.unfinished" / "manifest.json").unlink()
    assert [step for step, _ in run_threads(2, lambda: resume(copied))] == [2, 2]


def test_taken_back(copied: Path) -> None:
    """Going on from before leaves what was newer, under a name that is not taken for the newest."""

    def go_on() -> list[int]:
        job = Job(ShardedAdamW)
        Checkpoints(copied).save(job.objects, 1)
        return Checkpoints(copied).steps()

    assert run_threads(2, go_on) == [[1], [1]]
    assert (copied / "superseded-step-3" / "manifest.json").exists()


class Unsafe:
    """Pickled by a call."""

    def __reduce__(self) -> Any:
        return os.getenv, ("HOME",)


def save_unsafe(folder: Path) -> list[str]:
    save({"value": Unsafe()}, folder)
    texts = []
    for trusted in (False, True):
        state = {"value": 0}
        try:
            load(state, folder, trusted=trusted)
            texts.append(str(state["value"]))
        except CheckpointError as error:
            texts.append(str(error))
    return texts


def test_nothing_is_run_unasked(tmp_path: Path) -> None:
    """A value of any class could run anything; .metadata, which is pickled, is not read at all."""
    for refused, loaded in run_threads(2, lambda: save_unsafe(tmp_path / "a")):
        assert "value is more than plain data, it has os.getenv: " in refused
        assert "trusted=True" in refused
        assert loaded == os.environ["HOME"]


class Failing:
    """Cannot be saved on one rank."""

    def state_dict(self) -> dict[str, Any]:
        if dist.get_rank() == 1:
            raise ValueError("it is broken here")
        return {"a": 1}

    def load_state_dict(self, state: Any) -> None:
        raise AssertionError


def test_a_rank_that_cannot_begin_is_told_of(tmp_path: Path) -> None:
    """An object whose state_dict() raises on one rank."""

    def fail() -> list[str]:
        job, texts = Job(ShardedAdamW), []
        objects = job.objects | {"failing": Failing()}
        for act in (
            lambda: save(objects, tmp_path / "a"),
            lambda: load(objects, tmp_path / "a"),
        ):
            with pytest.raises(CheckpointError) as caught:
                act()
            texts.append(str(caught.value))
        return texts

    for first, second in run_threads(2, fail):
        assert "it is broken here (rank 1)" in first
        assert "a is not loaded" in second or "There is no checkpoint" in second


def other_keys(folder: Path) -> str:
    job = Job(ShardedAdamW)
    objects = job.objects
    if dist.get_rank() == 1:
        objects = dict(reversed(objects.items()))
    with pytest.raises(PeerError) as disagreed:
        save(objects, folder)
    return str(disagreed.value)


def test_ranks_that_save_other_things_are_told_of(tmp_path: Path) -> None:
    """In another order, which decides what they send when they load."""
    for text in run_procs(2, other_keys, tmp_path / "a"):
        assert "keys = " in text


def test_another_model_is_refused(copied: Path) -> None:
    """By name, before anything has changed."""

    def other() -> str:
        job = Job(ShardedAdamW, seed=1)
        state = job.objects | {"model": torch.nn.Linear(40, 3)}
        before = job.values()
        with pytest.raises(CheckpointError, match=r"model\.weight") as caught:
            load(state, copied / "step-3")
        assert_same(job.values(), before)
        return str(caught.value)

    for text in run_threads(2, other):
        assert "does not fit" in text


def test_less_of_a_model_is_refused(copied: Path) -> None:
    """What was saved of a layer that is not there any more would be lost in silence."""

    def smaller() -> str:
        job = Job(ShardedAdamW, seed=1)
        state = job.objects
        del job.model.counter
        with pytest.raises(CheckpointError) as caught:
            load(state, copied / "step-3")
        return str(caught.value)

    for text in run_threads(2, smaller):
        assert "it has model.counter" in text


def fail_to_write(folder: Path, limit: int) -> list[str]:
    """Save, fail to on rank 1, save again; return what is there after each."""
    import resource

    job, seen = Job(ShardedAdamW), []
    checkpoints = Checkpoints(folder)
    for step in (1, 2, 3):
        job.train(1)
        number = limit if step == 2 and dist.get_rank() == 1 else resource.RLIM_INFINITY
        resource.setrlimit(resource.RLIMIT_FSIZE, (number, resource.RLIM_INFINITY))
        try:
            checkpoints.save(job.objects, step)
            text = ""
        except CheckpointError as error:
            text = str(error)
        seen.append(f"{text} {sorted(path.name for path in folder.iterdir())}")
        dist.barrier()
    return seen


def test_a_rank_that_cannot_write_is_told_of(tmp_path: Path) -> None:
    """All ranks raise, the checkpoint before stays, and the next save is as good as any."""
    import signal

    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    for first, second, third in run_procs(2, fail_to_write, tmp_path, 20_000):
        assert "['latest', 'step-1']" in first
        assert "File too large" in second
        assert "rank 1" in second
        assert "step-1" in second
        assert "step-2'" not in second.rpartition("[")[2]
        assert "'latest', 'step-1', 'step-3'" in third
