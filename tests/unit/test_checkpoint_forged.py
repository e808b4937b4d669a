"""Folders forged by chance, with right digests: refused without change, or right; never a bomb.

``python -m tests.unit.test_checkpoint_forged`` prints the longest time and the most memory.
"""

from __future__ import annotations

import json
import random
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from shardfuse.checkpoint import CheckpointError, load, save
from shardfuse.checkpoint.index import decode_with_digest, encode_with_digest
from shardfuse.files import digest_of
from tests.faults.attacks import said, state, values
from tests.support.cuts import in_a_child

pytestmark = pytest.mark.timeout(300)

NUM_SEEDS = 300
CHUNK = 30
MOST_NBYTES = 6 << 30
"""Of a process: what torch maps, and one GiB."""

ODD: list[Any] = [
    None,
    True,
    -1,
    0,
    1,
    7,
    1.5,
    float("nan"),
    float("inf"),
    1 << 33,
    1 << 62,
    10**30,
    "",
    "x",
    "..",
    "/dev/zero",
    "__0_0.distcp",
    "model.0.weight",
    "float64",
    [],
    [1 << 40],
    [0, 0],
    {},
    {"a": 1},
    [[1 << 30] * 3] * 3,
]


def places(content: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return where values lie in nested dicts and lists."""
    keys: Any = ()
    if isinstance(content, dict):
        keys = content
    elif isinstance(content, list):
        keys = range(len(content))
    found = [path] if path else []
    for key in keys:
        found += places(content[key], (*path, key))
    return found


def mutate(content: Any, rng: random.Random) -> None:
    """Replace, remove, double or rename something, or have two things change places."""
    *path, key = rng.choice(places(content))
    holder = content
    for step in path:
        holder = holder[step]
    kind = rng.choice(["replace", "replace", "remove", "double", "rename", "swap"])
    if kind == "replace":
        holder[key] = rng.choice(ODD)
    elif kind == "remove":
        del holder[key]
    elif kind == "double" and isinstance(holder, list):
        holder.insert(key, json.loads(json.dumps(holder[key])))
    elif kind == "rename" and isinstance(holder, dict):
        holder[str(rng.choice(ODD))] = holder.pop(key)
    else:
        other = rng.choice(list(holder) if isinstance(holder, dict) else range(len(holder)))
        holder[key], holder[other] = holder[other], holder[key]


def forge(folder: Path, seed: int) -> None:
    """Have one to three places of the manifest or of the index changed."""
    rng = random.Random(seed)
    manifest, part = folder / "manifest.json", folder / "part-0.json"
    contents = {path: decode_with_digest(path.read_bytes(), path.name) for path in (manifest, part)}
    for _ in range(rng.randrange(1, 4)):
        mutate(contents[rng.choice([manifest, part])], rng)
    part.write_bytes(encode_with_digest(contents[part]))
    data = part.read_bytes()
    files = contents[manifest].get("files")
    for file in files if isinstance(files, list) else ():
        if isinstance(file, list) and len(file) == 3 and file[0] == part.name:
            file[1:] = [len(data), digest_of(data)]
    manifest.write_bytes(encode_with_digest(contents[manifest]))


def loads_right(folder: Path, right: list[torch.Tensor]) -> bool:
    """Return whether it loads; fail if it then has other tensors, or has changed without."""
    target = state(3)
    before = values(target)
    text = ""
    try:
        load(target, folder)
    except CheckpointError as error:
        text = str(error)
    assert "\n" not in text
    if text:
        assert all(map(torch.equal, values(target), before)), f"half loaded: {text}"
        return False
    for found, expected in zip(values(target), right, strict=True):
        # Steps are what the manifest says, and nothing else is there to compare them with.
        assert not expected.dim() or torch.equal(found, expected)
    return True


def each(seeds: range, tell: Callable[[int, bool, float], None]) -> None:
    """Load, verify, inspect and export a forged folder of every seed."""
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        save(state(), place / "whole")
        for seed in seeds:
            folder = place / "ck"
            shutil.rmtree(folder, ignore_errors=True)
            shutil.copytree(place / "whole", folder)
            forge(folder, seed)
            begin = time.perf_counter()
            is_loaded = loads_right(folder, values(state()))
            for words in (
                ("verify", folder),
                ("inspect", folder),
                ("export", folder, "--model", place / "m.pt", "--optimizer", place / "o.pt"),
            ):
                assert said(*words)[0] in "012", (seed, words)
            tell(seed, is_loaded, time.perf_counter() - begin)


@pytest.mark.cpu_only("a child of a process has none of the device's threads")
@pytest.mark.parametrize("first", range(0, NUM_SEEDS, CHUNK))
def test_forged(first: int, tmp_path: Path) -> None:
    state()

    def act() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (MOST_NBYTES, MOST_NBYTES))
        results = []
        each(range(first, first + CHUNK), lambda seed, is_loaded, _: results.append(is_loaded))
        assert len(results) == CHUNK
        (tmp_path / "refused").write_text(str(results.count(False)))

    assert in_a_child(act) == 0
    assert int((tmp_path / "refused").read_text()) > CHUNK // 2


if __name__ == "__main__":
    found: list[tuple[float, int, bool]] = []
    each(range(NUM_SEEDS), lambda seed, is_loaded, s: found.append((s, seed, is_loaded)))
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    refused = sum(not is_loaded for _, _, is_loaded in found)
    print(f"{refused} refused, {len(found) - refused} right; longest {max(found)}; {most} MiB")
    sys.exit(0)
