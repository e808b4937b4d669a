"""Hostile and merely unlucky files around checkpoints, and what becomes of each; the table of them.

python -m tests.faults.attacks --write FILE
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardfuse import ShardedAdamW
from shardfuse.__main__ import main as command
from shardfuse.checkpoint import CheckpointError, Checkpoints, load, save
from shardfuse.checkpoint.index import decode_with_digest, encode_with_digest
from shardfuse.files import digest_of

ATTACKS: dict[str, Callable[[Path], str]] = {}
WEIGHT = "model.0.weight"


def attack(function: Callable[[Path], str]) -> Callable[[Path], str]:
    """List a function that tries something in an empty folder, and returns what came of it."""
    ATTACKS[(function.__doc__ or "").split("\n")[0].rstrip(".")] = function
    return function


def state(seed: int = 0) -> dict[str, Any]:
    """Return a state of one step."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 1))
    optimizer = ShardedAdamW(model.named_parameters(), lr=0.01, sharding={"kernel": "eager"})
    model(torch.randn(4, 8)).square().mean().backward()
    optimizer.step()
    return {"model": model, "optimizer": optimizer, "extra": torch.ones(4) * seed}


def values(held: dict[str, Any]) -> list[torch.Tensor]:
    """Return copies of all tensors of a state."""
    entries = held["optimizer"].state_dict()["state"].values()
    states = [value for entry in entries for value in entry.values()]
    return [
        torch.as_tensor(v).clone()
        for v in (*held["model"].state_dict().values(), *states, held["extra"])
    ]


def attempt(act: Callable[[], object], *, keeps: Path | None = None) -> str:
    """Return "done", or what was raised; fail if something in ``keeps`` has changed."""
    before = None if keeps is None else tree(keeps)
    try:
        act()
        text = "done"
    except (CheckpointError, ValueError, TypeError) as error:
        text = f"{type(error).__name__}: {error}"
    assert keeps is None or tree(keeps) == before, f"changed, and said: {text}"
    return text


def tree(folder: Path) -> dict[str, Any]:
    """Return what is in a folder, by name."""
    found: dict[str, Any] = {}
    for path in sorted(folder.rglob("*")):
        if path.is_symlink():
            found[str(path)] = os.readlink(path)
        elif path.is_file():
            found[str(path)] = path.read_bytes()
        else:
            found[str(path)] = oct(path.stat().st_mode)
    return found


def loads(folder: Path, expected: dict[str, Any] | None = None) -> str:
    """Load; nothing may have changed if that fails, and everything has to be right if not."""
    target = state(3)
    before = values(target)
    text = attempt(lambda: load(target, folder))
    now, right = values(target), before if text != "done" else values(expected or state())
    assert all(map(torch.equal, now, right)), f"neither old nor new, and said: {text}"
    return text


def said(*words: object) -> str:
    """Return what a command prints, or its last line of it, with the exit code."""
    out = StringIO()
    with redirect_stdout(out), redirect_stderr(out):
        code = command([str(word) for word in words])
    lines = out.getvalue().strip().splitlines()
    return f"{code}: {lines[-1].strip() if lines else ''}"


def files(folder: Path, **texts: str) -> Path:
    """Make a folder of a user's files."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        (folder / name.replace("_dot_", ".")).write_text(text)
    return folder


def reseal(path: Path, edit: Callable[[Any], object]) -> None:
    """Edit a sealed JSON file, and give it a right digest."""
    content = decode_with_digest(path.read_bytes(), path.name)
    edit(content)
    path.write_bytes(encode_with_digest(content))


def forge(folder: Path, edit: Callable[[Any], object]) -> Path:
    """Save a checkpoint, and edit the first rank's index as one who can compute digests."""
    save(state(), folder)
    part = folder / "part-0.json"
    reseal(part, edit)
    data = part.read_bytes()

    def note(content: Any) -> None:
        for file in content["files"]:
            if file[0] == part.name:
                file[1:] = [len(data), digest_of(data)]

    reseal(folder / "manifest.json", note)
    return folder


def forge_manifest(folder: Path, edit: Callable[[Any], object]) -> Path:
    """Save a checkpoint, and edit its manifest."""
    save(state(), folder)
    reseal(folder / "manifest.json", edit)
    return folder


def item_of(content: Any, key: str = WEIGHT) -> Any:
    """Return the item of a key."""
    return next(item for item in content["items"] if item[0] == key)


def everywhere(folder: Path) -> str:
    """Return what load says of a forged checkpoint; verify and export have to refuse it as well."""
    text = loads(folder)
    for words in (("verify", folder), ("export", folder, "--model", folder.parent / "m.pt")):
        code = said(*words)
        assert code.startswith("1: "), (words[0], code)
    assert not (folder.parent / "m.pt").exists()
    assert text.startswith("DamagedCheckpoint"), text
    return text


# --- what a save removes ---


OTHERS: dict[str, dict[str, str]] = {
    "Save into a folder with another program's manifest.json": {
        "manifest.json": '{"name": "app"}',
        "thesis.tex": "years",
    },
    "Save into a folder with a file .metadata": {".metadata": "x", "thesis.tex": "years"},
    "Save over a checkpoint of torch.distributed.checkpoint": {
        ".metadata": "x",
        "__0_0.distcp": "x",
    },
}


def into_a_folder_of(texts: dict[str, str]) -> Callable[[Path], str]:
    """Return an attack that saves into a folder of somebody's files."""

    def run(place: Path) -> str:
        folder = files(place / "others")
        for name, text in texts.items():
            (folder / name).write_text(text)
        return attempt(lambda: save(state(), folder), keeps=place)

    return run


ATTACKS |= {name: into_a_folder_of(texts) for name, texts in OTHERS.items()}


@attack
def nested(place: Path) -> str:
    """Save over a checkpoint that has another one and notes in it."""
    save(state(), place / "ck")
    save(state(), place / "ck" / "best")
    files(place / "ck", notes_dot_txt="n")
    return attempt(lambda: save(state(1), place / "ck"), keeps=place)


@attack
def notes_in_a_pruned_one(place: Path) -> str:
    """Notes in a checkpoint of a run that is removed."""
    run = Checkpoints(place, keep=1)
    run.save(state(), 1)
    files(place / "step-1", notes_dot_txt="n")
    run.save(state(), 2)
    assert [path.name for path in (place / "step-1").iterdir()] == ["notes.txt"]
    assert run.steps() == [2]
    return "the checkpoint's own files are removed, the notes stay"


@attack
def written_meanwhile(place: Path) -> str:
    """A logger makes a file in the old checkpoint while the new one is written."""
    save(state(), place / "ck")
    save(state(1), place / "ck", then=lambda: None)
    held = state(2)
    held["late"] = Writes(place / "ck" / "events")
    save(held, place / "ck")
    assert (place / "ck.unfinished.kept" / "events").read_text() == "1"
    return "saved; the file is kept under another name"


class Writes:
    """Writes a file when it is saved."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def state_dict(self) -> dict[str, int]:
        self._path.write_text("1")
        return {}

    def load_state_dict(self, state: dict[str, int]) -> None:
        pass


# --- links and names in the way ---


@attack
def unfinished_link(place: Path) -> str:
    """.ck.unfinished is a link to somebody's folder."""
    victim = files(place / "victim", precious="p")
    (place / ".ck.unfinished").symlink_to(victim)
    text = attempt(lambda: save(state(), place / "ck"), keeps=victim)
    assert loads(place / "ck") == "done"
    assert not (place / "ck").is_symlink()
    return f"{text}; the link is renamed"


@attack
def data_link(place: Path) -> str:
    """A data file in .ck.unfinished is a link to somebody's file."""
    victim = files(place / "victim", precious="p")
    (place / ".ck.unfinished").mkdir()
    (place / ".ck.unfinished" / "__0_0.distcp").symlink_to(victim / "precious")
    (place / ".ck.unfinished" / ".part-0.json.unfinished").symlink_to(victim / "precious")
    text = attempt(lambda: save(state(), place / "ck"), keeps=victim)
    assert loads(place / "ck") == "done"
    return text


@attack
def unfinished_file(place: Path) -> str:
    """.ck.unfinished is a file."""
    files(place, _dot_ck_dot_unfinished="x")
    text = attempt(lambda: save(state(), place / "ck"))
    assert (place / "ck.unfinished.kept").read_text() == "x"
    return f"{text}; the file is renamed"


@attack
def unfinished_holds_a_folder(place: Path) -> str:
    """.ck.unfinished has a folder of somebody's in place of the data file."""
    files(place / ".ck.unfinished" / "__0_0.distcp", precious="p")
    text = attempt(lambda: save(state(), place / "ck"))
    assert (place / "ck.unfinished.kept" / "__0_0.distcp" / "precious").read_text() == "p"
    return f"{text}; the folder is kept under another name"


@attack
def target_link(place: Path) -> str:
    """The checkpoint is a link to another disk; it is saved three times."""
    save(state(), place / "disk" / "ck")
    (place / "ck").symlink_to(place / "disk" / "ck")
    for seed in range(3):
        save(state(seed), place / "ck")
        assert loads(place / "ck", state(seed)) == "done"
    assert (place / "ck").is_symlink()
    assert os.listdir(place / "disk") == ["ck"]
    return "done; the link stays, and the folder that it names is replaced"


@attack
def pruned_link(place: Path) -> str:
    """A checkpoint of a run was moved to another disk, and is removed."""
    run = Checkpoints(place / "run", keep=1)
    run.save(state(), 1)
    shutil.move(place / "run" / "step-1", place / "moved")
    (place / "run" / "step-1").symlink_to(place / "moved")
    text = attempt(lambda: run.save(state(1), 2), keeps=place / "moved")
    assert run.steps() == [2]
    return f"{text}; the link goes, its target stays"


@attack
def latest_link(place: Path) -> str:
    """The file latest is a link to somebody's file."""
    victim = files(place / "victim", precious="p")
    (place / "run").mkdir()
    (place / "run" / "latest").symlink_to(victim / "precious")
    text = attempt(lambda: Checkpoints(place / "run").save(state(), 1), keeps=victim)
    assert (place / "run" / "latest").read_text() == "step-1"
    return f"{text}; the link is replaced"


# --- files of a run ---


def in_a_run(plant: Callable[[Path], object]) -> Callable[[Path], str]:
    """Return an attack that plants something beside step-5, loads, saves step-6 and verifies."""

    def run(place: Path) -> str:
        Checkpoints(place).save(state(), 5)
        plant(place)
        found = state(3)
        step = Checkpoints(place).load_latest(found)
        Checkpoints(place).save(state(), 6)
        assert Checkpoints(place).steps()[0] == 6
        assert said("verify", place / "step-6") == f"0: {place / 'step-6'}: whole"
        assert said("verify", place).startswith("0: ")
        return f"step {step} is loaded, step 6 is saved"

    return run


def damaged_copy(name: str, plant: Callable[[Path], object]) -> Callable[[Path], object]:
    """Return what copies step-5 to step-9 and has a file of it replaced."""

    def make(run: Path) -> None:
        shutil.copytree(run / "step-5", run / "step-9")
        (run / "step-9" / name).unlink()
        plant(run / "step-9" / name)

    return make


RUNS: dict[str, Callable[[Path], object]] = {
    "step-007, a folder": lambda run: (run / "step-007").mkdir(),
    "step-9 in Arabic digits": lambda run: (run / "step-\u0669").mkdir(),
    "step-9, a file": lambda run: (run / "step-9").write_text("x"),
    "step-9, a dangling link": lambda run: (run / "step-9").symlink_to("/nonexistent/x"),
    "step-9, a link to itself": lambda run: (run / "step-9").symlink_to("step-9"),
    "step-1000..., 200 digits": lambda run: (run / f"step-1{'0' * 200}").mkdir(),
    "latest, a folder": lambda run: ((run / "latest").unlink(), (run / "latest").mkdir()),
    "latest, a pipe": lambda run: ((run / "latest").unlink(), os.mkfifo(run / "latest")),
    "latest, a megabyte": lambda run: (run / "latest").write_bytes(bytes(range(256)) * 4096),
    "latest, a step of 5,000 digits": lambda run: (run / "latest").write_text("step-" + "9" * 5000),
    "no latest": lambda run: (run / "latest").unlink(),
    "superseded-step-9, a dangling link": lambda run: (
        (run / "superseded-step-9").symlink_to("nothing"),
        shutil.copytree(run / "step-5", run / "step-9"),
    ),
    "step-9, manifest.json is a folder": damaged_copy("manifest.json", Path.mkdir),
    "step-9, manifest.json is a pipe": damaged_copy("manifest.json", os.mkfifo),
    "step-9, manifest.json leads to /dev/zero": damaged_copy(
        "manifest.json", lambda path: path.symlink_to("/dev/zero")
    ),
    "step-9, manifest.json of another form": damaged_copy(
        "manifest.json", lambda path: path.write_bytes(encode_with_digest({"format": 1, "odd": 1}))
    ),
    "step-9, no part-0.json": damaged_copy("part-0.json", lambda path: None),
    "step-9, part-0.json is a folder": damaged_copy("part-0.json", Path.mkdir),
    "step-9, the data file is a folder": damaged_copy("__0_0.distcp", Path.mkdir),
    "step-9, .metadata is a folder": damaged_copy(".metadata", Path.mkdir),
}
ATTACKS |= {f"in a run: {name}": in_a_run(plant) for name, plant in RUNS.items()}


# --- indices, with right digests ---

PARTS: dict[str, Callable[[Any], object]] = {
    "a tensor of 2**60 elements": lambda c: c["kinds"].__setitem__(WEIGHT, ["float32", [1 << 60]]),
    "a tensor of another dtype": lambda c: c["kinds"].__setitem__(WEIGHT, ["int64", [16, 8]]),
    "a dtype that is none": lambda c: c["kinds"].__setitem__(WEIGHT, ["nn", [16, 8]]),
    "2,000 dimensions": lambda c: c["kinds"].__setitem__(WEIGHT, ["float32", [1 << 60] * 2000]),
    "negative sizes": lambda c: item_of(c).__setitem__(2, [-16, -8]),
    "a fragment outside of its tensor": lambda c: item_of(c).__setitem__(1, [1, 0]),
    "a length of 2**62": lambda c: item_of(c).__setitem__(5, 1 << 62),
    "a length of -1": lambda c: item_of(c).__setitem__(5, -1),
    "a start of -5": lambda c: item_of(c).__setitem__(4, -5),
    "a start of 1.5": lambda c: item_of(c).__setitem__(4, 1.5),
    "the file /dev/zero": lambda c: item_of(c).__setitem__(3, "/dev/zero"),
    "the file ../ck/__0_0.distcp": lambda c: item_of(c).__setitem__(3, "../ck/__0_0.distcp"),
    "the file ..": lambda c: item_of(c).__setitem__(3, ".."),
    "a file name with a NUL byte": lambda c: item_of(c).__setitem__(3, "a\0b"),
    "one half twice, the other never": lambda c: (
        c["items"].append([*item_of(c)[:2], [8, 8], *item_of(c)[3:]]),
        item_of(c).__setitem__(2, [8, 8]),
    ),
    "a fragment that is missing": lambda c: c["items"].remove(item_of(c)),
    "an item that is no list": lambda c: c["items"].append(7),
    "items that are none": lambda c: c.__setitem__("items", None),
    "an index of another rank": lambda c: c.__setitem__("rank", 3),
    "a place in a list at -1": lambda c: c["paths"].__setitem__("extra", ["extra", -1]),
}
ATTACKS |= {
    f"an index with {name}": lambda place, edit=edit: everywhere(forge(place / "ck", edit))  # type: ignore[misc]
    for name, edit in PARTS.items()
}

MANIFESTS: dict[str, Callable[[Any], object]] = {
    "10**12 ranks": lambda c: c.__setitem__("world_size", 10**12),
    "0 ranks": lambda c: c.__setitem__("world_size", 0),
    "a file ../../x": lambda c: c["files"][0].__setitem__(0, "../../x"),
    "a file of 2**40 bytes": lambda c: c["files"][0].__setitem__(1, 1 << 40),
    "files that are text": lambda c: c.__setitem__("files", "x"),
    "no params": lambda c: c.__delitem__("params"),
    "another kind than the index": lambda c: c["kinds"].__setitem__("extra", ["int8", [4]]),
    "a param of other strides": lambda c: c["params"]["optimizer"][0].__setitem__(2, [1000, 1]),
    "a step of -7": lambda c: c["counts"].__setitem__("optimizer.state.0.bias.step", -7),
    "a step of 10**30": lambda c: c["counts"].__setitem__("optimizer.state.0.bias.step", 10**30),
    "a step of 1.5": lambda c: c["counts"].__setitem__("optimizer.state.0.bias.step", 1.5),
}
ATTACKS |= {
    f"a manifest with {name}": lambda place, edit=edit: everywhere(  # type: ignore[misc]
        forge_manifest(place / "ck", edit)
    )
    for name, edit in MANIFESTS.items()
}


@attack
def forged_layouts(place: Path) -> str:
    """A manifest with layouts of another form."""
    return loads(forge_manifest(place / "ck", lambda c: c["layouts"].update(optimizer=[{"a": 1}])))


@attack
def endless_layouts(place: Path) -> str:
    """A manifest with a layout of 10**15 ranks."""
    bucket = [[0, 1, 10**15]]

    def edit(content: Any) -> None:
        for flat in content["layouts"]["optimizer"]:
            flat["slots"] = dict.fromkeys(flat["slots"], 10**14)
            flat["buckets"] = bucket

    return loads(forge_manifest(place / "ck", edit))


@attack
def deep(place: Path) -> str:
    """A manifest of 200,000 brackets."""
    save(state(), place / "ck")
    text = b"[" * 200_000 + b"]" * 200_000
    whole = b'{"digest":"%s","content":%s}\n' % (digest_of(text).encode(), text)
    (place / "ck" / "manifest.json").write_bytes(whole)
    return everywhere(place / "ck")


@attack
def huge(place: Path) -> str:
    """A manifest of 100 GB, of which the disk has none."""
    save(state(), place / "ck")
    os.truncate(place / "ck" / "manifest.json", 100_000_000_000)
    return everywhere(place / "ck")


@attack
def trailing(place: Path) -> str:
    """Bytes after the last fragment: verify tells, load reads what was saved."""
    save(state(), place / "ck")
    with (place / "ck" / "__0_0.distcp").open("ab") as file:
        file.write(b"junk")
    assert loads(place / "ck") == "done"
    return said("verify", place / "ck")


@attack
def list_bomb(place: Path) -> str:
    """A param group at number 10**9: export makes no list of that length."""
    edit = "optimizer.param_groups.0.lr"
    folder = forge(
        place / "ck",
        lambda c: c["paths"].__setitem__(edit, ["optimizer", "param_groups", 10**9, "lr"]),
    )
    return said("export", folder, "--optimizer", place / "o.pt")


# --- export and import ---


def exported(place: Path, *words: object) -> str:
    """Return what export says; the checkpoint has to be whole after it."""
    if not (place / "ck").exists():
        save(state(), place / "ck")
    text = said("export", place / "ck", *words)
    assert said("verify", place / "ck").startswith("0: ")
    return text


@attack
def twice_onto_one(place: Path) -> str:
    """Export the model and the optimizer to one file."""
    return exported(place, "--model", place / "a.pt", "--optimizer", f"{place}/./a.pt")


@attack
def onto_itself(place: Path) -> str:
    """Export onto a file of the checkpoint."""
    return exported(place, "--optimizer", place / "ck" / "__0_0.distcp")


@attack
def onto_itself_by_a_link(place: Path) -> str:
    """Export onto a link to a file of the checkpoint."""
    (place / "m.pt").symlink_to(place / "ck" / "manifest.json")
    return exported(place, "--model", place / "m.pt")


@attack
def onto_a_pipe(place: Path) -> str:
    """Export onto a pipe."""
    os.mkfifo(place / "pipe.pt")
    text = exported(place, "--model", place / "pipe.pt")
    assert (place / "pipe.pt").is_fifo()
    return text


@attack
def onto_a_private_file(place: Path) -> str:
    """Export onto a file of mode 0600, by a link."""
    files(place, own_dot_pt="x")
    (place / "own.pt").chmod(0o600)
    (place / "link.pt").symlink_to(place / "own.pt")
    text = exported(place, "--model", place / "link.pt")
    assert text.startswith("0: ")
    assert (place / "own.pt").stat().st_mode & 0o777 == 0o600
    assert (place / "link.pt").is_symlink()
    return "done; the mode stays, and so does the link"


@attack
def a_nul_byte(place: Path) -> str:
    """Export to a name with a NUL byte."""
    return exported(place, "--model", f"{place}/a\0b.pt")


@attack
def name_of_5000(place: Path) -> str:
    """Inspect a name of 5,000 characters."""
    return said("inspect", place / ("z" * 5000)).replace("z" * 5000, "zzz...")


@attack
def root(place: Path) -> str:
    """Verify the file system's root."""
    text = said("verify", "/")
    assert text[0] in "12", text
    return "refused in one line"


def table() -> list[str]:
    """Return the rows of the table: each attack, and its result."""
    rows = []
    for name, function in ATTACKS.items():
        with tempfile.TemporaryDirectory() as place:
            rows.append(row(name, function(Path(place).resolve()), place))
    return rows


def row(name: str, result: str, place: str | Path) -> str:
    """Return one row, without what differs between machines."""
    text = " ".join(result.replace(str(place), "").split()).replace("|", "/")
    text = re.sub(r"\b[0-9]{1,3}(,[0-9]{3})+\b", "N", text)  # sizes of torch's files
    return f"| {name} | {text[:240]} |".replace("\0", "")


def main() -> None:
    """Write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", type=Path, required=True)
    file = parser.parse_args().write
    lines = [
        "# Attacks on files, and their results",
        "",
        f"`python -m tests.faults.attacks --write FILE`, {datetime.date.today()}, "
        f"torch {torch.__version__}. Each row is a test: tests/unit/test_checkpoint_attacks.py.",
        "Numbers before a colon are exit codes of commands.",
        "",
        "| attack | result |",
        "|---|---|",
        *table(),
    ]
    file.write_text("\n".join(lines) + "\n")
    json.dump({"attacks": len(ATTACKS)}, sys.stdout)


if __name__ == "__main__":
    main()
