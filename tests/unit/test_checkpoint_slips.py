"""What a slip of the hand does to a checkpoint: no file of others is lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint

from shardfuse import ShardedAdam
from shardfuse.checkpoint import CheckpointError, Checkpoints, PerRank, async_save, load, save
from shardfuse.checkpoint.export import read_model
from shardfuse.training import Job, StepMonitor
from tests.support import checkpoints
from tests.support.harness import STAYING, log_of_shardfuse, run_procs, run_threads

pytestmark = pytest.mark.filterwarnings("ignore:.*fewer than two dimensions.*:UserWarning")


def refusals(folder: Path, how: Any) -> list[str]:
    """Return what two ranks hear that save to ``folder``."""

    def write() -> str:
        objects = checkpoints.Job(ShardedAdam).objects
        with pytest.raises(CheckpointError) as caught:
            how(objects, folder)
        STAYING.append(caught.value)  # its connections stay open: the other may still use them
        return str(caught.value)

    return list(run_threads(2, write))


def save_beside(objects: Any, folder: Path) -> None:
    async_save(objects, folder).wait()


@pytest.mark.parametrize("how", [save, save_beside])
def test_saving_removes_nothing_of_others(how: Any, tmp_path: Path) -> None:
    """A folder of a run, of a thesis, or a file: all ranks are refused, and it stays."""
    run, thesis, file = (tmp_path / name for name in ("run", "thesis", "file"))
    thesis.mkdir()
    for path in (thesis / "a.tex", thesis / "b.tex", file):
        path.write_text("years")
    run_threads(1, lambda: Checkpoints(run).save(checkpoints.Job(ShardedAdam).objects, 1))
    for folder, words in (
        (run, "the folder has latest and 1 more, of no checkpoint"),
        (thesis, "the folder has a.tex and 1 more, of no checkpoint, which saving would remove"),
        (file, "it is a file; name a folder"),
    ):
        before = sorted(folder.rglob("*"))
        assert all(words in text for text in refusals(folder, how))
        assert sorted(folder.rglob("*")) == before
    assert file.read_text() == "years"


@pytest.mark.parametrize("left", ["nothing", "part-0.json", "__0_0.distcp", "all"])
def test_what_is_left_of_a_checkpoint_is_replaced(left: str, tmp_path: Path) -> None:
    """As is an empty folder: nothing but a checkpoint was there."""

    def write() -> None:
        job = checkpoints.Job(ShardedAdam)
        save(job.objects, tmp_path / "here")
        if left != "all":
            for path in (tmp_path / "here").iterdir():
                if path.name != left:
                    path.unlink()
        save(job.objects, tmp_path / "here")
        load(job.objects, tmp_path / "here")

    run_threads(1, write)


def test_arguments_of_another_kind(tmp_path: Path) -> None:
    """A model for a state, a folder for a state, an optimizer of torch for one of ours."""
    model = torch.nn.Linear(2, 2)
    words = r"state must be a dict, such as .*, got "
    of_a_run = Checkpoints(tmp_path)
    calls: list[Any] = [save, load, lambda state, _: of_a_run.save(state, 1)]
    for call in [*calls, lambda state, _: of_a_run.load_latest(state)]:
        with pytest.raises(TypeError, match=f"{words}Linear"):
            call(model, tmp_path)
    for call in (save, load):
        with pytest.raises(TypeError, match=f"{words}str"):
            call("folder", {"model": model})
    with pytest.raises(TypeError, match=f"{words}Linear"):
        Job(tmp_path, model, save_every=1)
    with pytest.raises(ValueError, match="Invalid save_every: '2'"):
        Job(tmp_path, {"model": model}, save_every="2")
    with pytest.raises(TypeError, match="StepMonitor watches shardfuse's optimizers, got SGD"):
        StepMonitor(torch.optim.SGD(model.parameters(), 0.1))


class OneWay:
    """An object that takes nothing back."""

    def state_dict(self) -> dict[str, int]:
        return {"position": 3}


def test_what_would_not_come_back_is_refused(tmp_path: Path) -> None:
    """Before anything is saved; when the job is started again it would be too late."""
    optimizer = ShardedAdam(torch.nn.Linear(2, 2).named_parameters())
    state = {"optimizer": optimizer, "loader": OneWay()}
    with pytest.raises(CheckpointError, match=r"'loader'\] has state_dict\(\) but no load_state"):
        save(state, tmp_path / "one")
    assert not (tmp_path / "one").exists()
    for value in (OneWay(), 5):
        with pytest.raises(TypeError, match=f"load_state_dict.., got {type(value).__name__}"):
            PerRank(value)
    with pytest.raises(ValueError, match="'random' is the Job's own"):
        Job(tmp_path, {"optimizer": optimizer, "random": 5}, save_every=1)


def saved_at(folder: Path, steps: list[Any]) -> tuple[int | None, list[int], list[str]]:
    """Return which of two checkpoints is loaded, which are there, and what is said."""
    logged = log_of_shardfuse()
    run, objects = Checkpoints(folder), checkpoints.Job(ShardedAdam).objects
    for step in steps:
        run.save(objects, step)
    return run.load_latest(objects), run.steps(), logged


def test_steps_may_count_samples_or_tokens(tmp_path: Path) -> None:
    """They have more digits than fp32, and than int32; what is no number of steps is refused."""
    first, second = (1 << 24) + 1, 5_000_000_001
    for found in run_procs(2, saved_at, tmp_path / "run", [torch.tensor(first), second]):
        assert found == (second, [second, first], [])
    for step in (-1, 1.5, "3"):
        with pytest.raises(ValueError, match="Invalid step"):
            saved_at(tmp_path / "none", [step])
    assert not (tmp_path / "none").exists()


def save_as(folder: Path, wrong: Any, is_async: bool) -> tuple[str, list[int], int | None]:
    """Return what ranks hear of which the last saves as ``wrong``; then what a save of 4 leaves."""
    step = 3 if dist.get_rank() == 0 else wrong
    run, objects = Checkpoints(folder), checkpoints.Job(ShardedAdam).objects
    run.save(objects, 2, async_save=is_async)
    with pytest.raises(RuntimeError) as caught:
        run.save(objects, step, async_save=is_async)
    run.save(objects, 4, async_save=is_async)
    run.wait()
    return f"{caught.type.__name__}: {caught.value}", run.steps(), run.load_latest(objects)


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("wrong", [-3, "3", 5])
def test_one_rank_alone_saves_another_step(wrong: Any, is_async: bool, tmp_path: Path) -> None:
    """The others do not wait for it: all hear of it, and all go on."""
    found = run_procs(2, save_as, tmp_path, wrong, is_async)
    for text, steps, loaded in found:
        assert (steps, loaded) == ([4, 2], 4), text
        assert text.startswith("PeerError")
        assert f"rank 0 has step = 3; rank 1 has step = {wrong!r}. Set it alike" in text


class Tied(torch.nn.Module):
    """Two names for one weight, which no optimizer has, and two for a part of another."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(1000, 32)
        self.head = torch.nn.Linear(32, 1000, bias=False)
        torch.nn.init.constant_(self.embedding.weight, value)
        self.head.weight = self.embedding.weight
        self.register_buffer("whole", torch.full((4,), value))
        self.register_buffer("first", self.whole[:2])


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.parametrize("how", [save, save_beside])
def test_a_tied_weight_is_stored_once(how: Any, tmp_path: Path) -> None:
    """And what shares memory, but is another tensor, by itself."""
    how({"model": Tied(2.0)}, tmp_path / "a")
    assert (tmp_path / "a" / "__0_0.distcp").stat().st_size < 1.5 * 1000 * 32 * 4
    loaded, plain = Tied(0.0), {"model": Tied(0.0)}
    load({"model": loaded}, tmp_path / "a")
    torch.distributed.checkpoint.load(plain, checkpoint_id=tmp_path / "a", no_dist=True)
    for model in (loaded, plain["model"]):
        for value in model.state_dict().values():
            assert torch.equal(value, torch.full_like(value, 2.0))
    exported = read_model(tmp_path / "a")
    assert torch.equal(exported["head.weight"], exported["embedding.weight"])
