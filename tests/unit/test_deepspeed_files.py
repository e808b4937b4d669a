"""Files of DeepSpeed's ZeRO stages 1 and 2 that lack something, and names that do not fit.

The files are written here, in the form that real ones have in
tests/distributed/test_deepspeed_imports.py.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from shardfuse.__main__ import main
from shardfuse.checkpoint import CheckpointError, DamagedCheckpoint
from shardfuse.checkpoint.imports import read_deepspeed, read_deepspeed_universal

SHAPES = {"a": (3, 5), "b": (7,)}
LENGTH = 24  # of the flat: 22, and two of padding for two ranks
MODEL = "mp_rank_00_model_states.pt"


def rank_file(rank: int) -> str:
    return f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"


def write(folder: Path) -> None:
    """Write a checkpoint of two ranks: the flats of states are 0, 1, 2 and so on."""
    flat = torch.arange(float(LENGTH))
    for rank in range(2):
        part = flat[rank * LENGTH // 2 :][: LENGTH // 2].clone()
        held = {
            "base_optimizer_state": {
                "state": {0: {"step": 2, "exp_avg": part, "exp_avg_sq": part.clone()}},
                "param_groups": [{"lr": 0.5, "params": [0]}],
            },
            "single_partition_of_fp32_groups": [part[: 12 - 2 * rank].clone()],
            "zero_stage": 1,
            "partition_count": [2],
        }
        torch.save({"optimizer_state_dict": held}, folder / rank_file(rank))
    model = {
        "module": {**{k: torch.zeros(v) for k, v in SHAPES.items()}, "frozen": torch.zeros(2)},
        "param_shapes": [{name: torch.Size(shape) for name, shape in SHAPES.items()}],
        "dp_world_size": 2,
        "ds_config": {"zero_optimization": {"stage": 1}},
    }
    torch.save(model, folder / MODEL)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    (tmp_path / "run" / "tag").mkdir(parents=True)
    (tmp_path / "run" / "latest").write_text("tag\n")
    write(tmp_path / "run" / "tag")
    return tmp_path / "run" / "tag"


def edit(path: Path, change: Callable[[Any], Any]) -> None:
    found = torch.load(path)
    change(found)
    torch.save(found, path)


def test_whole(saved: Path) -> None:
    """By tag, by latest, or by the folder itself; fp32 parameters have no masters."""
    for found in (
        read_deepspeed(saved),
        read_deepspeed(saved.parent),
        read_deepspeed(saved.parent, "tag"),
    ):
        assert found["param_groups"] == [{"lr": 0.5, "param_names": ["a", "b"], "params": [0, 1]}]
        assert found["state"][1].keys() == {"step", "exp_avg", "exp_avg_sq"}
        assert torch.equal(found["state"][0]["exp_avg"], torch.arange(15.0).view(3, 5))
        assert torch.equal(found["state"][1]["exp_avg_sq"], torch.arange(15.0, 22.0))
        assert found["state"][1]["step"].item() == 2


def test_masters_of_low_precision_alone(saved: Path) -> None:
    """A module of two dtypes."""
    edit(saved / MODEL, lambda m: m["module"].update(b=torch.zeros(7, dtype=torch.bfloat16)))
    found = read_deepspeed(saved)["state"]
    assert "param" not in found[0]
    assert torch.equal(found[1]["param"], torch.arange(15.0, 22.0))


def test_names(saved: Path, tmp_path: Path) -> None:
    """Another order, with a frozen parameter; also by the command."""
    found = read_deepspeed(saved, names=["b", "frozen", "a"])
    assert found["param_groups"][0]["params"] == [0, 1, 2]
    assert found["state"].keys() == {0, 2}
    assert found["state"][0]["exp_avg"].shape == (7,)
    (tmp_path / "names.json").write_text(json.dumps([["b", "frozen", "a"]]))
    words = ["import", "deepspeed", str(saved.parent), "--to", str(tmp_path / "o.pt")]
    assert main([*words, "--tag", "tag", "--names", str(tmp_path / "names.json")]) == 0
    assert torch.load(tmp_path / "o.pt")["param_groups"] == found["param_groups"]
    for names, text in (
        (["a"], r"lacks what the checkpoint has: \['b'\]"),
        (["a", "b", "c"], r"has what the module does not have: \['c'\]"),
        ([["a"], ["b"]], "names has 2 groups, .* has 1"),
    ):
        with pytest.raises(CheckpointError, match=text):
            read_deepspeed(saved, names=names)


def of_optimizer(**values: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        edit(folder / rank_file(1), lambda file: file["optimizer_state_dict"].update(values))
        edit(folder / rank_file(0), lambda file: file["optimizer_state_dict"].update(values))

    return change


def of_model(**values: Any) -> Callable[[Path], None]:
    return lambda folder: edit(folder / MODEL, lambda file: file.update(values))


def without_step(file: Any) -> None:
    for states in file["optimizer_state_dict"]["base_optimizer_state"]["state"].values():
        del states["step"]


def to_elastic(file: Any) -> None:
    held = file["optimizer_state_dict"]
    states = held["base_optimizer_state"]["state"][0]
    lean = len(held["single_partition_of_fp32_groups"][0])
    held["base_optimizer_state"] = [
        {key: value[:lean] for key, value in states.items() if key != "step"}
    ]
    held["base_optimizer_state_step"] = 2


def to_fused(file: Any) -> None:
    without_step(file)
    group = file["optimizer_state_dict"]["base_optimizer_state"]["param_groups"][0]
    group.update(step=2, bias_correction=True)


@pytest.mark.parametrize("change", [to_elastic, to_fused])
def test_steps_that_lie_elsewhere(change: Callable[[Any], None], saved: Path) -> None:
    """With elastic_checkpoint beside the states, which are cut; with FusedAdam in the group."""
    expected = read_deepspeed(saved)
    for rank in range(2):
        edit(saved / rank_file(rank), change)
    found = read_deepspeed(saved)
    for number, entry in expected["state"].items():
        assert entry.keys() == found["state"][number].keys()
        assert all(torch.equal(found["state"][number][key], entry[key]) for key in entry)
    options = {"lr": 0.5} if change is to_fused else {}
    others = {"param_names": ["a", "b"], "params": [0, 1]}
    assert found["param_groups"] == [{**options, **others}]


def test_padding_between_parameters(saved: Path) -> None:
    """param_alignment_paddings lie behind each parameter."""
    of_optimizer(param_alignment_paddings=[[1, 0]])(saved)
    found = read_deepspeed(saved)["state"]
    assert torch.equal(found[0]["exp_avg"], torch.arange(15.0).view(3, 5))
    assert torch.equal(found[1]["exp_avg"], torch.arange(16.0, 23.0))


def test_without_states(saved: Path) -> None:
    """SGD without momentum, of which masters alone are left."""
    base = {"state": {}, "param_groups": [{"lr": 0.5, "params": [0]}]}
    of_optimizer(base_optimizer_state=base)(saved)
    assert read_deepspeed(saved)["state"] == {}
    edit(saved / MODEL, lambda m: m["module"].update(b=torch.zeros(7, dtype=torch.float16)))
    found = read_deepspeed(saved)["state"]
    assert found.keys() == {1}
    assert torch.equal(found[1]["param"], torch.arange(15.0, 22.0))


def another_step(folder: Path) -> None:
    def change(file: Any) -> None:
        file["optimizer_state_dict"]["base_optimizer_state"]["state"][0]["step"] = 3

    edit(folder / rank_file(1), change)


def in_fp64(folder: Path) -> None:
    def change(file: Any) -> None:
        states = file["optimizer_state_dict"]["base_optimizer_state"]["state"][0]
        states["exp_avg"] = states["exp_avg"].double()

    edit(folder / rank_file(1), change)


LONG = [{"a": torch.Size((30, 5)), "b": torch.Size((7,))}]
SHORT = [{"a": torch.Size((3, 5))}]
WRONG: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a rank's file is gone": (
        lambda folder: (folder / rank_file(1)).unlink(),
        r"by 2 ranks, and has no zero_pp_rank_<rank>_mp_rank_00_optim_states\.pt of ranks \[1\]",
    ),
    "the first rank's": (
        lambda folder: (folder / rank_file(0)).unlink(),
        r"of ranks \[0\]\. Copy the files of all ranks there",
    ),
    "a file too many": (
        lambda folder: shutil.copy(folder / rank_file(1), folder / rank_file(2)),
        "by 2 ranks, but has zero_pp_rank_2",
    ),
    "two saves": (
        lambda folder: shutil.copy(folder / rank_file(1), folder / f"bf16_{rank_file(1)}"),
        "files of two saves, with and without bf16_",
    ),
    "tensor parallelism": (
        lambda f: shutil.copy(f / rank_file(1), f / rank_file(1).replace("rank_00", "rank_01")),
        r"tensor parallelism .*ds_to_universal",
    ),
    "no files of ranks": (
        lambda folder: [(folder / rank_file(rank)).unlink() for rank in range(2)],
        "no checkpoint of DeepSpeed's ZeRO stages 1 and 2",
    ),
    "no file of the module": (lambda f: (f / MODEL).unlink(), f"There is no file .*{MODEL}"),
    "stage 3": (of_optimizer(zero_stage=3), "of ZeRO stage 3"),
    "experts": (of_optimizer(partition_count=[2, 1]), r"over \[1, 2\] ranks, as with expert"),
    "another layout": (of_optimizer(base_optimizer_state=[]), "0 with states; .* has 1"),
    "another world": (of_model(dp_world_size=4), "written by 4 ranks, the optimizer's files by 2"),
    "another step": (another_step, r"different steps: .*'2\.0'.*'3\.0'"),
    "longer shapes": (of_model(param_shapes=LONG), "exp_avg of group 0 has 24 elements .* 157"),
    "shorter shapes": (of_model(param_shapes=SHORT), "exp_avg of group 0 has 24 elements .* 15"),
    "no shapes": (of_model(param_shapes=None), "has no param_shapes"),
    "fp64": (in_fp64, r"exp_avg of group 0 in .*rank_1_.* is torch\.float64"),
    "objects": (of_model(client=Path("a")), r"not plain data: pathlib\..*trusted=True"),
}


@pytest.mark.parametrize("name", WRONG)
def test_errors(name: str, saved: Path) -> None:
    """Each names the file and what to do."""
    change, text = WRONG[name]
    change(saved)
    with pytest.raises(CheckpointError, match=text):
        read_deepspeed(saved)


def test_damage(saved: Path) -> None:
    """A cut file of a rank."""
    path = saved / rank_file(1)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(DamagedCheckpoint, match=r"rank_1_.* cannot be read"):
        read_deepspeed(saved)


def test_folders(saved: Path) -> None:
    """A tag that is not there, and a checkpoint that is not universal."""
    with pytest.raises(CheckpointError, match=r"no folder .*other\. Name the tag"):
        read_deepspeed(saved.parent, "other")
    with pytest.raises(CheckpointError, match=r"no universal checkpoint\. .*import deepspeed"):
        read_deepspeed_universal(saved)


def write_universal(saved: Path) -> None:
    found = read_deepspeed(saved)
    for number, name in enumerate(SHAPES):
        folder = saved / "zero" / name
        folder.mkdir(parents=True)
        for key in ("exp_avg", "exp_avg_sq"):
            torch.save({"param": found["state"][number][key]}, folder / f"{key}.pt")
        torch.save({"param": torch.ones(SHAPES[name])}, folder / "fp32.pt")
        torch.save(torch.tensor(2.0), folder / "step.pt")
    groups = [{"lr": 0.5, "params": [0]}]
    torch.save({"param_groups": groups}, saved / "zero" / "optimizer_state.pt")


def test_universal(saved: Path) -> None:
    """The same states, and what is missing or of another shape."""
    write_universal(saved)
    found, expected = read_deepspeed_universal(saved), read_deepspeed(saved)
    assert found["param_groups"] == expected["param_groups"]
    assert torch.equal(found["state"][0]["exp_avg"], expected["state"][0]["exp_avg"])
    path = saved / "zero" / "a" / "exp_avg.pt"
    torch.save({"param": torch.ones(2)}, path)
    with pytest.raises(CheckpointError, match=r"a/exp_avg\.pt has shape \(2,\), .* has \(3, 5\)"):
        read_deepspeed_universal(saved)
    torch.save(torch.ones(3, 5), path)
    with pytest.raises(CheckpointError, match=r"exp_avg\.pt has no 'param'"):
        read_deepspeed_universal(saved)
    path.unlink()
    with pytest.raises(CheckpointError, match=r"zero/a has no exp_avg\.pt, which others have"):
        read_deepspeed_universal(saved)
    (saved / "zero" / "b" / "step.pt").unlink()
    with pytest.raises(CheckpointError, match=r"b has no step\.pt"):
        read_deepspeed_universal(saved)
    shutil.rmtree(saved / "zero" / "b")
    with pytest.raises(CheckpointError, match="no folder b, a trained parameter"):
        read_deepspeed_universal(saved)
