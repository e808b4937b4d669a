"""Forged files of other libraries: one line, nothing is run, and nothing is read elsewhere."""

from __future__ import annotations

import copy
import pickle
import random
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from shardfuse.__main__ import main
from shardfuse.checkpoint import CheckpointError
from shardfuse.checkpoint.imports import (
    read_apex,
    read_deepspeed,
    read_deepspeed_universal,
    read_torch,
)

NUM_FORGED = 100
SHAPES = {"body.weight": torch.Size([3, 4]), "body.bias": torch.Size([3])}
STATES = "exp_avg", "exp_avg_sq"

pytestmark = pytest.mark.filterwarnings("ignore:.*:UserWarning:torch")


def model_states() -> dict[str, Any]:
    module = {name: torch.zeros(size, dtype=torch.bfloat16) for name, size in SHAPES.items()}
    return {"module": module, "param_shapes": [OrderedDict(SHAPES)], "dp_world_size": 1}


def group() -> dict[str, Any]:
    return {"lr": 0.1, "betas": (0.9, 0.99), "weight_decay": 0.0, "params": [0]}


def universal(folder: Path) -> dict[str, Any]:
    """Write a universal checkpoint; return what its files have."""
    files: dict[str, Any] = {"mp_rank_00_model_states.pt": model_states()}
    files["zero/optimizer_state.pt"] = {"param_groups": [group()]}
    for name, size in SHAPES.items():
        for state in ("fp32", *STATES):
            files[f"zero/{name}/{state}.pt"] = {"param": torch.zeros(size)}
        files[f"zero/{name}/step.pt"] = 3
    write(folder, files)
    return files


def partitions(folder: Path) -> dict[str, Any]:
    """Likewise, of ZeRO stage 1."""
    flat = {state: torch.zeros(16) for state in STATES}
    base = {"state": {0: {"step": 3, **flat}}, "param_groups": [group()]}
    held = {
        "zero_stage": 1,
        "partition_count": 1,
        "single_partition_of_fp32_groups": [torch.zeros(16)],
        "base_optimizer_state": base,
    }
    files = {"mp_rank_00_model_states.pt": model_states()}
    files["zero_pp_rank_0_mp_rank_00_optim_states.pt"] = {"optimizer_state_dict": held}
    write(folder, files)
    return files


def one_file(folder: Path) -> dict[str, Any]:
    """Likewise, of torch.optim's form, and apex's FP16_Optimizer with it."""
    state = {0: {"step": torch.tensor(3.0), **{s: torch.zeros(3) for s in STATES}}}
    saved = {"state": state, "param_groups": [{**group(), "step": 3}]}
    whole = {"optimizer_state_dict": saved, "fp32_from_fp16": [[torch.zeros(3)]], **saved}
    write(folder, {"a.pt": whole})
    return {"a.pt": whole}


def write(folder: Path, files: dict[str, Any]) -> None:
    for name, value in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        torch.save(value, folder / name)


READERS: dict[str, tuple[Callable[[Path], Any], Callable[[Path], Any]]] = {
    "universal": (universal, read_deepspeed_universal),
    "deepspeed": (partitions, read_deepspeed),
    "torch": (one_file, lambda folder: read_torch(folder / "a.pt")),
    "apex": (one_file, lambda folder: read_apex(folder / "a.pt")),
}


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield (container, key) of all that is in a nested value."""
    keys = (
        value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    )
    for key in keys:
        yield value, key
        yield from places(value[key])


def doubled() -> list[Any]:
    """Return a list of 2**60 numbers in a few bytes."""
    found: list[Any] = [0.1]
    for _ in range(60):
        found = [found, found]
    return found


FORGED: list[Callable[[], Any]] = [
    *(
        lambda value=value: value
        for value in (None, -1, 0, 10**30, 1.5, float("nan"), "x", b"\xff")
    ),  # type: ignore[misc]
    *(lambda value=value: value for value in (True, [], {}, (), [None], {"x": None}, {1: [2]})),  # type: ignore[misc]
    lambda: torch.zeros(()),
    lambda: torch.zeros(2, dtype=torch.int64),
    lambda: torch.zeros(3).to_sparse(),
    lambda: torch.zeros(1).expand(10**12),
    lambda: torch.zeros(3, device="meta"),
    lambda: torch.Size([-1]),
    lambda: torch.Size([1 << 40, 1 << 20]),
    doubled,
]


def refusal(read: Callable[[Path], Any], folder: Path) -> str:
    try:
        read(folder)
    except CheckpointError as error:
        return str(error)
    return ""


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", READERS)
def test_any_value_at_any_place_is_one_line(name: str, tmp_path: Path) -> None:
    """Or is read, where it does not matter."""
    make, read = READERS[name]
    files = make(tmp_path)
    read(tmp_path)
    rng = random.Random(0)
    num_refused = 0
    for _ in range(NUM_FORGED):
        file = rng.choice(sorted(files))
        top = {"top": copy.deepcopy(files[file])}
        container, key = rng.choice(list(places(top)))
        container[key] = rng.choice(FORGED)()
        write(tmp_path, {file: top["top"]})
        text = refusal(read, tmp_path)
        assert str(tmp_path) in text or "hyper-parameter" in text or not text
        assert len(text) < 3000
        assert "\n" not in text
        num_refused += bool(text)
        write(tmp_path, {file: files[file]})
    assert num_refused > NUM_FORGED // 4


def repacked(path: Path, ending: str, change: Callable[[bytes], bytes], compression: int) -> None:
    """Change an entry of a zip file."""
    with zipfile.ZipFile(path) as file:
        entries = [(entry.filename, file.read(entry)) for entry in file.infolist()]
    with zipfile.ZipFile(path, "w", compression) as file:
        for name, content in entries:
            file.writestr(name, change(content) if name.endswith(ending) else content)


def to_deep(pickled: bytes) -> bytes:
    """Put 5000 lists in each other, which no pickler would write, in place of a text."""
    text = b"X\x04\x00\x00\x00deep"
    assert text in pickled
    return pickled.replace(text, b"]" * 5000 + b"a" * 4999)


@pytest.mark.parametrize("name", READERS)
def test_deep_values(name: str, tmp_path: Path) -> None:
    make, read = READERS[name]
    for file, whole in make(tmp_path).items():
        held = list(places({"top": whole}))
        options = [container for container, key in held if key == "lr"]
        for group in options:
            group["lr"] = "deep"
        write(tmp_path, {file: whole})
        if options:
            repacked(tmp_path / file, "/data.pkl", to_deep, zipfile.ZIP_STORED)
    with pytest.raises(CheckpointError, match="recursion"):
        read(tmp_path)


class Runs:
    def __reduce__(self) -> Any:
        return Path.touch, (Path("ran"),)


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize("is_zip", [False, True])
def test_nothing_is_run(
    name: str, is_zip: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the environment asks torch.load() to trust files."""
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    monkeypatch.chdir(tmp_path)
    make, read = READERS[name]
    for file in make(tmp_path):
        make(tmp_path)
        torch.save({"x": Runs()}, tmp_path / file, _use_new_zipfile_serialization=is_zip)
        with pytest.raises(CheckpointError, match="--trusted"):
            read(tmp_path)
    (tmp_path / file).write_bytes(pickle.dumps(Runs()))
    with pytest.raises(CheckpointError):
        read(tmp_path)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "name", ["../../other/body.weight", "/other/body.weight", "a/../../../other"]
)
def test_a_universal_checkpoint_names_a_place_elsewhere(name: str, tmp_path: Path) -> None:
    files = universal(tmp_path / "saved")
    universal(tmp_path / "saved" / "other")
    (tmp_path / "other").symlink_to(tmp_path / "saved" / "other" / "zero")
    name = name.replace("/other/", f"{tmp_path}/other/") if name.startswith("/") else name
    model = files["mp_rank_00_model_states.pt"]
    model["param_shapes"] = [{name: torch.Size([3, 4])}]
    write(tmp_path / "saved", {"mp_rank_00_model_states.pt": model})
    with pytest.raises(
        CheckpointError, match=r"mp_rank_00_model_states\.pt names '.*not in .*zero"
    ):
        read_deepspeed_universal(tmp_path / "saved")


@pytest.mark.parametrize(
    "place",
    [
        "zero",
        "zero/body.bias",
        "zero/body.bias/fp32.pt",
        "zero/optimizer_state.pt",
        "mp_rank_00_model_states.pt",
    ],
)
def test_links_of_a_universal_checkpoint(place: str, tmp_path: Path) -> None:
    """To what lies in it they are followed, as the folder itself may be a link."""
    universal(tmp_path / "saved")
    (tmp_path / "link").symlink_to(tmp_path / "saved")
    read_deepspeed_universal(tmp_path / "link")
    (tmp_path / "saved" / place).rename(tmp_path / "saved" / "moved")
    (tmp_path / "saved" / place).symlink_to(tmp_path / "saved" / "moved")
    if "/" not in place or place.endswith("state.pt"):
        read_deepspeed_universal(tmp_path / "link")
    (tmp_path / "saved" / place).unlink()
    (tmp_path / "saved" / "moved").rename(tmp_path / "elsewhere")
    (tmp_path / "saved" / place).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match=r"leads to .*elsewhere.* which is not in"):
        read_deepspeed_universal(tmp_path / "link")


@pytest.mark.parametrize("text", [b"../elsewhere", b"/", b"..", b"a\0b", b"\xff" * 100_000])
@pytest.mark.parametrize("kind", ["latest", "latest_universal"])
def test_a_tag_that_a_file_names(kind: str, text: bytes, tmp_path: Path) -> None:
    universal(tmp_path / "elsewhere")
    universal(tmp_path / "saved" / "x")
    (tmp_path / "saved" / kind).write_bytes(text)
    read = read_deepspeed if kind == "latest" else read_deepspeed_universal
    with pytest.raises(CheckpointError, match=r"latest.* names|no folder|too long"):
        read(tmp_path / "saved")


def test_bombs(tmp_path: Path) -> None:
    """What a file says that it holds is compared with what it has, before memory is taken."""
    one_file(tmp_path)
    path = tmp_path / "a.pt"
    repacked(path, "/data/0", lambda data: bytes(50_000_000), zipfile.ZIP_DEFLATED)
    with pytest.raises(
        CheckpointError, match=r"50,000,000 bytes .* compressed more than 100 times"
    ):
        read_torch(path)
    one_file(tmp_path)
    data = bytearray(path.read_bytes())
    at = data.rindex(b"PK\x01\x02")
    data[at + 20 : at + 28] = (1 << 31).to_bytes(4, "little") * 2
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match="says that it holds more bytes than it has"):
        read_torch(path)


@pytest.mark.parametrize(
    "text", [b"[" * 200_000, b"\xff\xfe", b"3", b"{}", b'[["a"], 3]', b"[[[]]]", b'"a"', b"null"]
)
def test_names(text: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    partitions(tmp_path)
    names = tmp_path / "names.json"
    names.write_bytes(text)
    words = ["import", "deepspeed", str(tmp_path), "--to", str(tmp_path / "to.pt")]
    assert main([*words, "--names", str(names)]) == 2
    assert "names" in capsys.readouterr().err
    assert not (tmp_path / "to.pt").exists()


@pytest.mark.parametrize("part", ["\u00b2", "\u0663", "9" * 5000, "-1", "+0", "0_0", " 0"])
def test_keys_with_odd_digits(part: str, tmp_path: Path) -> None:
    torch.save({"states": [{"state": {}, "param_groups": []}]}, tmp_path / "a.pt")
    assert read_torch(tmp_path / "a.pt", "states.0") == {"state": {}, "param_groups": []}
    with pytest.raises(CheckpointError, match=r"has no 'states\..* Give the place") as caught:
        read_torch(tmp_path / "a.pt", f"states.{part}")
    assert len(str(caught.value)) < 600 + len(str(tmp_path))
