"""Files of other libraries: their forms, what is refused, and ``python -m shardfuse import``."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from shardfuse import ShardedAdamW, ShardedLamb
from shardfuse.__main__ import main
from shardfuse.checkpoint import CheckpointError, DamagedCheckpoint
from shardfuse.checkpoint.imports import read_apex, read_torch, read_zero_redundancy
from tests.support.harness import run_threads
from tests.support.models import MIXED, ParamSet, mean_grads
from tests.support.runs import TOLERANCE, assert_bitwise, max_relative_error

pytestmark = pytest.mark.filterwarnings("ignore:.*fewer than two dimensions.*:UserWarning")

SAVED_AT = 3
END = 6


def train(params: ParamSet, optimizer: Any, first: int, last: int) -> None:
    for step in range(first, last):
        params.assign(mean_grads("integers", 1, step, MIXED))
        optimizer.step()


def torch_adamw(dtype: torch.dtype = torch.float32) -> tuple[ParamSet, Any]:
    params = ParamSet(dtype=dtype)
    optimizer = torch.optim.AdamW(params.groups(), lr=0.05, weight_decay=0.1, foreach=False)
    train(params, optimizer, 0, SAVED_AT)
    return params, optimizer


def as_apex(saved: dict[str, Any], step: int, **of_groups: Any) -> dict[str, Any]:
    """Return a state dict in the form of apex's source, in which groups count steps.

    apex itself needs CUDA, and has not been run.
    """
    keys = ("lr", "betas", "eps", "weight_decay", "params")
    state = {
        number: {key: value for key, value in entry.items() if key in ("exp_avg", "exp_avg_sq")}
        for number, entry in saved["state"].items()
    }
    groups = [
        {**{key: group[key] for key in keys}, "bias_correction": True, **of_groups, "step": step}
        for group in saved["param_groups"]
    ]
    return {"state": state, "param_groups": groups}


def states_of(found: dict[str, Any]) -> list[Tensor]:
    return [value for _, entry in sorted(found["state"].items()) for value in entry.values()]


def go_on(build: Any, values: list[Tensor], state: dict[str, Any]) -> list[Tensor]:
    params = ParamSet(seed=1)
    with torch.no_grad():
        for param, value in zip(params.params, values, strict=True):
            param.copy_(value)
    optimizer = build(params.groups(), sharding={"kernel": "eager"})
    optimizer.load_state_dict(state)
    train(params, optimizer, SAVED_AT, END)
    return params.values()


def test_fused_adam(tmp_path: Path) -> None:
    """Written as apex's source does; every parameter's step is its group's."""
    params, theirs = torch_adamw()
    saved = as_apex(theirs.state_dict(), SAVED_AT)
    torch.save({"model": {}, "optimizer": saved, "amp": {}}, tmp_path / "a.pt")
    found = read_apex(tmp_path / "a.pt")
    assert [sorted(group) for group in found["param_groups"]] == [
        ["betas", "eps", "lr", "params", "weight_decay"]
    ] * 2
    assert found["param_groups"][1]["lr"] == 0.02
    for number, entry in found["state"].items():
        assert entry["step"].item() == SAVED_AT
        assert_bitwise([entry["exp_avg"]], [theirs.state_dict()["state"][number]["exp_avg"]])
    at = params.values()
    # apex counts for the group; of one that began late torch's own count is less, and so is ours.
    late = [e.name for group in (0, 1) for e in MIXED if e.group == group].index("late.weight")
    found["state"][late]["step"].fill_(1.0)
    some = [e.name for group in (0, 1) for e in MIXED if e.group == group].index("head.some.weight")
    found["state"][some]["step"].fill_(2.0)
    train(params, theirs, SAVED_AT, END)
    for values in run_threads(2, go_on, ShardedAdamW, at, found):
        assert max_relative_error(values, params.values(), at) < TOLERANCE


def lamb(groups: Any, sharding: Any) -> Any:
    return ShardedLamb(
        groups,
        lr=0.05,
        weight_decay=0.1,
        variant="apex",
        use_global_grad_norm=True,
        sharding=sharding,
    )


def test_fused_lamb(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Written as apex's source does, of states that our formula of apex's makes."""
    params = ParamSet()
    theirs = lamb(params.groups(), {"kernel": "eager"})
    train(params, theirs, 0, SAVED_AT)
    saved = theirs.state_dict()
    steps = {number: entry["step"] for number, entry in saved["state"].items()}
    torch.save(as_apex(saved, SAVED_AT, grad_averaging=True, max_grad_norm=1.0), tmp_path / "a.pt")
    found = read_apex(tmp_path / "a.pt")
    assert "use_global_grad_norm=True, max_grad_norm=1.0" in caplog.text
    assert [group["step"] for group in found["param_groups"]] == [SAVED_AT] * 2
    for number, entry in found["state"].items():  # ours count for each parameter
        entry["step"].fill_(float(steps[number]))
    at = params.values()
    train(params, theirs, SAVED_AT, END)
    for values in run_threads(2, go_on, lamb, at, found):
        assert max_relative_error(values, params.values(), at) < TOLERANCE


def test_fp16_optimizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Masters and a scaler's object, of which nothing is run, written as apex's source does."""
    masters = [torch.randn(3, 4), torch.randn(5), torch.randn(6)]
    for master in masters:
        master.grad = torch.randn_like(master)
    inner = torch.optim.AdamW([{"params": masters[:1]}, {"params": masters[1:]}], 0.01)
    inner.step()
    module = types.ModuleType("apex.fp16_utils.loss_scaler")
    scaler = type("LossScaler", (), {"__module__": module.__name__})
    module.LossScaler = scaler  # type: ignore[attr-defined]
    for name in ("apex", "apex.fp16_utils", "apex.fp16_utils.loss_scaler"):
        monkeypatch.setitem(sys.modules, name, module)
    saved = {
        "loss_scaler": scaler(),
        "dynamic_loss_scale": True,
        "optimizer_state_dict": as_apex(inner.state_dict(), 1),
        "fp32_from_fp16": [[], masters[1:]],
    }
    torch.save({"optimizer": saved}, tmp_path / "a.pt")
    torch.save({**saved, "fp32_from_fp16": [masters[:2], []]}, tmp_path / "b.pt")
    del saved["fp32_from_fp16"]
    torch.save(saved, tmp_path / "c.pt")
    for name in ("apex", "apex.fp16_utils", "apex.fp16_utils.loss_scaler"):
        monkeypatch.delitem(sys.modules, name)
    found = read_apex(tmp_path / "a.pt")["state"]
    assert found[0].keys() == {"step", "exp_avg", "exp_avg_sq"}
    assert_bitwise([found[1]["param"], found[2]["param"]], masters[1:])
    with pytest.raises(CheckpointError, match="1 parameters and 2 masters"):
        read_apex(tmp_path / "b.pt")
    with pytest.raises(CheckpointError, match="without 'fp32_from_fp16'"):
        read_apex(tmp_path / "c.pt")
    with pytest.raises(CheckpointError, match="that is not installed: No module named 'apex'"):
        read_apex(tmp_path / "a.pt", trusted=True)


def test_switches_that_ours_lack(tmp_path: Path) -> None:
    """Said, not ignored."""
    _, theirs = torch_adamw()
    saved = as_apex(theirs.state_dict(), SAVED_AT, bias_correction=False)
    torch.save(saved, tmp_path / "a.pt")
    with pytest.raises(CheckpointError, match=r"group 0 in .* has bias_correction=False"):
        read_apex(tmp_path / "a.pt")
    saved = as_apex(theirs.state_dict(), SAVED_AT, grad_averaging=False)
    torch.save(saved, tmp_path / "a.pt")
    with pytest.raises(CheckpointError, match="has grad_averaging=False"):
        read_apex(tmp_path / "a.pt")
    saved = as_apex(theirs.state_dict(), SAVED_AT)
    del saved["param_groups"][1]["step"]
    torch.save(saved, tmp_path / "a.pt")
    with pytest.raises(CheckpointError, match=r"parameter 9, of group 1 .* no step"):
        read_apex(tmp_path / "a.pt")


def test_low_precision_is_widened(tmp_path: Path) -> None:
    """States that torch.optim keeps in bf16 have the same values in fp32."""
    _, theirs = torch_adamw(torch.bfloat16)
    torch.save(theirs.state_dict(), tmp_path / "a.pt")
    found = read_torch(tmp_path / "a.pt")
    assert {value.dtype for value in states_of(found)} == {torch.float32}
    expected = [value.float() for value in states_of(theirs.state_dict())]
    assert_bitwise(states_of(found), expected)


def test_capturable(tmp_path: Path) -> None:
    """Hyper-parameters that are tensors come out as numbers."""
    _, theirs = torch_adamw()
    saved = theirs.state_dict()
    saved["param_groups"][0]["lr"] = torch.tensor(0.25)
    torch.save({"states": [saved]}, tmp_path / "a.pt")
    group = read_torch(tmp_path / "a.pt", "states.0")["param_groups"][0]
    assert type(group["lr"]) is float
    assert group["lr"] == 0.25


def saved_with(change: Any, tmp_path: Path) -> Path:
    """Write a torch.optim file after a change; return where."""
    _, theirs = torch_adamw()
    saved = theirs.state_dict()
    torch.save(change(saved) or saved, tmp_path / "a.pt")
    return tmp_path / "a.pt"


def to_double(saved: dict[str, Any]) -> None:
    saved["state"][0]["exp_avg_sq"] = saved["state"][0]["exp_avg_sq"].double()


def to_nadam(saved: dict[str, Any]) -> None:
    saved["state"][1]["mu_product"] = torch.tensor(0.5)


def to_half_a_step(saved: dict[str, Any]) -> None:
    saved["state"][1]["step"] = torch.tensor(0.5)


def to_stranger(saved: dict[str, Any]) -> None:
    saved["state"][99] = saved["state"][0]


WRONG: dict[str, tuple[Any, str]] = {
    "fp64": (to_double, r"exp_avg_sq of parameter 0 in .*a\.pt is torch\.float64; .* \(\.float"),
    "nadam": (to_nadam, "parameter 1 in .* has the state 'mu_product'"),
    "step": (to_half_a_step, "step of parameter 1 in .* is 0.5"),
    "stranger": (to_stranger, r"states of \['99'\], which are in none"),
    "other key": (lambda saved: {"opt": saved}, r"no 'optimizer': .* \['opt'\]\. Give .*--key"),
    "no dict": (lambda saved: {"optimizer": 3}, "no optimizer's state_dict"),
    "objects": (lambda saved: {"optimizer": Path("a")}, r"not plain data: pathlib\..*--trusted"),
}


@pytest.mark.parametrize("name", WRONG)
def test_errors(name: str, tmp_path: Path) -> None:
    """What a file lacks or cannot be read of it, by file, parameter and remedy."""
    change, text = WRONG[name]
    with pytest.raises(CheckpointError, match=text):
        read_torch(saved_with(change, tmp_path))


def test_damage(tmp_path: Path) -> None:
    """A file that is gone, cut, or no such file."""
    path = saved_with(lambda saved: None, tmp_path)
    whole = path.read_bytes()
    for data in (whole[: len(whole) // 2], b"", b"text", whole[:-1]):
        path.write_bytes(data)
        with pytest.raises(DamagedCheckpoint, match=r"a\.pt cannot be read"):
            read_torch(path)
    with pytest.raises(CheckpointError, match=r"There is no file .*b\.pt"):
        read_torch(tmp_path / "b.pt")


def test_without_states(tmp_path: Path) -> None:
    """ZeroRedundancyOptimizer's groups alone."""
    path = saved_with(lambda saved: {**saved, "state": {}}, tmp_path)
    assert read_torch(path)["state"] == {}
    with pytest.raises(CheckpointError, match="consolidate_state_dict"):
        read_zero_redundancy(path)


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It writes what the function returns; exit codes are those of the other commands."""
    path = saved_with(lambda saved: {"a": {"b": saved}}, tmp_path)
    to = tmp_path / "b.pt"
    assert main(["import", "torch", str(path), "--key", "a.b", "--to", str(to)]) == 0
    found, expected = torch.load(to), read_torch(path, "a.b")
    assert found["param_groups"] == expected["param_groups"]
    assert_bitwise(states_of(found), states_of(expected))
    assert main(["import", "zero-redundancy", str(to), "--to", str(to)]) == 0
    assert main(["import", "torch", str(path), "--to", str(to)]) == 2
    assert "key= (--key)" in capsys.readouterr().err
    assert main(["import", "torch", str(path), "--to", str(to), "--tag", "x"]) == 2
    assert "import torch takes no --tag" in capsys.readouterr().err
    names = tmp_path / "names.json"
    names.write_text(json.dumps([["a"]])[:-1])
    words = ["import", "deepspeed", str(tmp_path), "--to", str(to), "--names", str(names)]
    assert main(words) == 2
    assert "is not a JSON file" in capsys.readouterr().err
    path.write_bytes(b"")
    assert main(["import", "torch", str(path), "--to", str(to)]) == 1
    assert "DAMAGED" in capsys.readouterr().err
