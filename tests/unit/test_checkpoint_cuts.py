"""Saving is cut at every call of the file system; what is loaded then is old or new, and whole."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shardfuse import ShardedAdamW
from shardfuse.checkpoint import CheckpointError, Checkpoints, DamagedCheckpoint, load, save
from tests.support.cuts import ENDS, Cut, in_a_child

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.cpu_only("a child of a process has none of the device's threads"),
]

MOST_CALLS = 200
"""More than any case makes: an endless loop would be found."""


def state(number: float) -> dict[str, Any]:
    """Return a state all of whose params are ``number``; each save writes what it is."""
    model = nn.Linear(3, 2)
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(number)
    optimizer = ShardedAdamW(model.named_parameters(), lr=0.0, weight_decay=0.0)
    return {"model": model, "optimizer": optimizer, "number": number}


def number_of(found: dict[str, Any]) -> float:
    """Return which state was loaded; an AssertionError where it is of two."""
    values = {v for param in found["model"].parameters() for v in param.flatten().tolist()}
    assert values == {found["number"]}, "a mixture"
    return float(found["number"])


def loaded(folder: Path) -> float | None:
    """Return the number of the state in a checkpoint; None if there is none."""
    found = state(-1)
    try:
        load(found, folder)
    except DamagedCheckpoint:
        raise
    except CheckpointError:
        return None
    return number_of(found)


def loaded_latest(folder: Path) -> float | None:
    """Return the number of the newest state in a run's folder; None if there is none."""
    found = state(-1)
    step = Checkpoints(folder).load_latest(found)
    assert step is None or step == number_of(found)
    return None if step is None else number_of(found)


class Case:
    """What is in a folder, what is saved there, and what may be loaded while that goes on."""

    look: Callable[[Path], float | None] = staticmethod(loaded)
    exchanges = True
    expected: tuple[float | None, ...] = (1.0, 2.0)

    def prepare(self, folder: Path) -> None:
        """Make what was there before."""
        save(state(1), folder / "ck")

    def save(self, folder: Path, number: float) -> None:
        """Save a state."""
        save(state(number), folder / "ck")

    def place(self, folder: Path) -> Path:
        """Return what is loaded."""
        return folder / "ck"


class First(Case):
    """Nothing is there yet."""

    expected = (None, 2.0)

    def prepare(self, folder: Path) -> None:
        pass


class Replaced(Case):
    """One takes the place of another."""


class OnNfs(Case):
    """The same where names cannot be exchanged."""

    exchanges = False


class Linked(Case):
    """The name is a link to a folder elsewhere."""

    def prepare(self, folder: Path) -> None:
        save(state(1), folder / "elsewhere" / "real")
        (folder / "ck").symlink_to(folder / "elsewhere" / "real")


class AfterAKill(Case):
    """A save was killed after names were exchanged, with more ranks."""

    def prepare(self, folder: Path) -> None:
        save(state(0), folder / "old")
        (folder / "old").rename(folder / ".ck.unfinished")
        (folder / ".ck.unfinished" / "__1_0.distcp").write_text("of another rank")
        (folder / ".ck.unfinished" / ".manifest.json.unfinished").write_text("{")
        save(state(1), folder / "new")
        (folder / "new").rename(folder / "ck")


class AfterAKillOnNfs(Case):
    """A save was killed between its two renames."""

    exchanges = False

    def prepare(self, folder: Path) -> None:
        save(state(2), folder / "new")
        (folder / "new").rename(folder / ".ck.unfinished")
        save(state(1), folder / "old")
        (folder / "old").rename(folder / ".ck.replaced")


class Run(Case):
    """A run that keeps one checkpoint: the old one is removed."""

    look = staticmethod(loaded_latest)

    def prepare(self, folder: Path) -> None:
        Checkpoints(folder, keep=1).save(state(1), 1)

    def save(self, folder: Path, number: float) -> None:
        Checkpoints(folder, keep=1).save(state(number), int(number))

    def place(self, folder: Path) -> Path:
        return folder


class RunTakenBack(Run):
    """There is a newer one, and the run has gone on from before."""

    expected = (5.0, 2.0)

    def prepare(self, folder: Path) -> None:
        Checkpoints(folder, keep=1).save(state(5), 5)
        shutil.copytree(folder / "step-5", folder / "superseded-step-5")


class RunSavesAnew(Run):
    """The same step is saved once more."""

    expected = (2.0,)

    def prepare(self, folder: Path) -> None:
        Checkpoints(folder, keep=1).save(state(2), 2)


CASES = [
    Replaced,
    First,
    OnNfs,
    Linked,
    AfterAKill,
    AfterAKillOnNfs,
    Run,
    RunTakenBack,
    RunSavesAnew,
]


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("kind", CASES, ids=lambda kind: kind.__name__)
def test_every_call_is_cut(kind: type[Case], end: str, tmp_path: Path) -> None:
    """Afterwards the old or the new state is loaded; the next save works and leaves no rest."""
    case = kind()
    before = tmp_path / "before"
    before.mkdir()
    case.prepare(before)
    state(0)  # what is imported and compiled later would be so in every child
    for number in range(MOST_CALLS):
        folder = tmp_path / "now"
        shutil.copytree(before, folder, symlinks=True)
        for link in (path for path in folder.rglob("*") if path.is_symlink()):
            target = link.readlink()
            link.unlink()
            link.symlink_to(folder / target.relative_to(before))
        calls = tmp_path / "calls"

        def act(number: int = number, folder: Path = folder, calls: Path = calls) -> None:
            def reader() -> None:
                names = sorted(folder.rglob("*"))
                assert case.look(case.place(folder)) in case.expected
                assert sorted(folder.rglob("*")) == names, "a reader has changed something"

            cut = Cut(number, end, reader)
            cut.install(exchanges=case.exchanges)
            try:
                case.save(folder, 2.0)
            except CheckpointError:
                assert end in ("EIO", "ENOSPC")
            cut.off()
            calls.write_text(str(cut.count))

        calls.unlink(missing_ok=True)
        assert in_a_child(act) == 0, (number, end)
        names = sorted(folder.rglob("*"))
        assert case.look(case.place(folder)) in case.expected, (number, names)
        assert sorted(folder.rglob("*")) == names, "a reader has changed something"
        case.save(folder, 7.0)
        assert case.look(case.place(folder)) == 7.0
        left = [path.name for path in folder.rglob("*") if path.name.startswith(".step")]
        left += [str(path) for path in folder.glob(".*") if path.name != ".metadata"]
        assert not left, (number, left)
        is_over = calls.exists() and int(calls.read_text()) <= number
        shutil.rmtree(folder)
        if is_over:
            break
    else:
        raise AssertionError("there is no end of calls")
    assert number > 15
