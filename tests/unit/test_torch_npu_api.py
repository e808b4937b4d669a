"""shardfuse's sources and drop-in classes against what the wheels of torch_npu have.

The inventories in ``torch_npu_api/`` were made from wheels by ``tests/support/torch_npu_api.py``;
neither torch_npu nor CANN is needed here, and nothing of this was run on an NPU.
"""

from __future__ import annotations

import ast
import copy
import json
import zipfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import shardfuse
from shardfuse.comm import native
from shardfuse.optim import npu
from tests.support.torch_npu_api import FOLDER, VERSIONS, inventory, main, read_from
from tests.support.torch_npu_uses import Uses, differences, lacks, takes

PACKAGE = Path(shardfuse.__file__).parent
SOURCES = [*PACKAGE.rglob("*.py"), *(PACKAGE.parent / "launch").rglob("*.py")]

_BOOKKEEPING = "of its own buffers by (group, dtype), which nothing outside of its classes reads"

DIFFERENT = {
    "combined_params_indexed_by_group": _BOOKKEEPING,
    "combined_grads_indexed_by_group": _BOOKKEEPING,
    "combined_param_states_indexed_by_group": _BOOKKEEPING,
    "params_lists_indexed_by_group": _BOOKKEEPING,
    "middle_vars_are_combined_by_group": _BOOKKEEPING,
    "is_states_combined": "states are combined from construction on, and no scaler asks",
    "is_grads_masks_combined": "padding is kept zero, so that norms need no masks",
    "params_all_group_combined": "get_combined_params() is the documented way to them",
    "adam": "an option of the rule, which is fixed at construction",
    "use_global_grad_norm": "an option of the rule, which is fixed at construction",
    "global_grad_norm": "grad_norm() computes it on demand",
    "max_grad_norm": "of each group, where it counts; torch_npu's groups have it and it does not",
}
"""Attributes of torch_npu's instances that ours have not, each with the reason."""

CANN_READS = {"HCCL_SOCKET_IFNAME": "read by CANN's HCCL, which is not in torch_npu's wheel"}
"""Environment variables that torch_npu's library does not name."""


def fused_classes(theirs: Any) -> list[str]:
    """Return the optimizers of an inventory, without their base class."""
    return [name for name in theirs["optimizers"] if name != "NpuFusedOptimizerBase"]


def built(name: str) -> Any:
    return getattr(npu, name)([torch.nn.Parameter(torch.ones(3))], lr=0.1)


@cache
def touched() -> Uses:
    """Return what the package and the jobs touch."""
    uses = Uses()
    for path in SOURCES:
        uses.read(path.read_text())
    return uses


def unexplained(theirs: Any) -> list[str]:
    """Return every difference of the drop-in classes that is not on the list above."""
    lines = []
    for name in fused_classes(theirs):
        told = theirs["optimizers"][name]
        if not hasattr(npu, name):
            lines.append(f"there is no {name}")
            continue
        lines += differences(name, told, getattr(npu, name), built(name))
    allowed = tuple(f"has no attribute {attribute}" for attribute in DIFFERENT)
    return [line for line in lines if not line.endswith(allowed)]


every_version = pytest.mark.parametrize("version", VERSIONS)


def test_inventories_are_of_these_wheels() -> None:
    """There is one of torch_npu and one of torch for each version, and no other."""
    expected = {f"{p}-{v}.json" for p in ("torch_npu", "torch") for v in VERSIONS}
    assert {path.name for path in FOLDER.iterdir()} == expected
    for package in ("torch_npu", "torch"):
        for version in VERSIONS:
            found = inventory(package, version)
            assert (found["package"], found["version"]) == (package, version)
            assert found["wheel"].startswith(f"{package}-{version}-cp")
            assert len(found["sha256"]) == 64


@every_version
def test_drop_ins_have_all_that_theirs_have(version: str) -> None:
    """All nine classes: parameters in order with their defaults, public methods, attributes."""
    theirs = inventory("torch_npu", version)
    assert len(fused_classes(theirs)) == 9
    assert unexplained(theirs) == []


@every_version
def test_sharded_classes_take_their_arguments(version: str) -> None:
    """The classes without torch_npu's methods have the same constructors."""
    theirs = inventory("torch_npu", version)["optimizers"]
    for name in fused_classes({"optimizers": theirs}):
        ours = getattr(shardfuse.optim, name.replace("NpuFused", "Sharded"))
        told = {"init": theirs[name]["init"], "methods": {}, "attributes": []}
        assert differences(name, told, ours, None) == []


def test_every_listed_difference_is_there() -> None:
    """What ours have got since, or torch_npu has dropped, is taken off the list."""
    lines = []
    theirs = inventory("torch_npu", VERSIONS[-1])
    for name in fused_classes(theirs):
        lines += differences(name, theirs["optimizers"][name], getattr(npu, name), built(name))
    assert {line.split()[-1] for line in lines} == set(DIFFERENT)


@every_version
def test_the_scaler_finds_what_it_reads(version: str) -> None:
    """torch_npu's GradScaler finds on ours what it reads, and ours on it."""
    scaler = inventory("torch_npu", version)["scaler"]
    assert "grads_all_group_combined" in scaler["reads_of_optimizers"]
    optimizer = built("NpuFusedAdam")
    assert [a for a in scaler["reads_of_optimizers"] if not hasattr(optimizer, a)] == []
    source = (PACKAGE / "optim" / "npu.py").read_text()
    reads = read_from(ast.parse(source), "scaler")
    assert reads == {"_per_optimizer_states", "unscale_", "_dynamic", "_has_overflow"}
    assert reads <= set(scaler["attributes"])
    assert {"stage", "found_inf_per_device"} <= set(scaler["state_keys"])


@every_version
def test_names_of_devices_exist(version: str) -> None:
    """What is taken from torch.npu and torch.accelerator is there, and is called as it can be."""
    uses = touched()
    assert {"get_rng_state", "set_rng_state"} <= {use.name for use in uses.device_module}
    assert {"current_accelerator", "synchronize"} <= {use.name for use in uses.accelerator}
    theirs, torchs = inventory("torch_npu", version), inventory("torch", version)
    assert lacks(uses.device_module, theirs["npu"], "torch.npu") == []
    assert lacks(uses.accelerator, torchs["accelerator"], "torch.accelerator") == []
    assert set(torchs["asks_of_device_module"]) <= set(theirs["npu"])
    assert "npu" in theirs["device_modules"]
    assert "hccl" in theirs["backends"]


@every_version
def test_what_is_asked_of_torch_npu_is_there(version: str) -> None:
    """No operator of its own is called, so that none needs a probe; questions are ones it knows."""
    uses = touched()
    assert uses.fused == []
    asked = set(uses.torch_npu) - {"torch_npu", "torch_npu.npu", "torch_npu._C"}
    assert "torch_npu.get_npu_format" in asked
    theirs = inventory("torch_npu", version)
    known = {*theirs["names"], *(f"torch_npu.npu.{name}" for name in theirs["npu"])}
    assert asked <= known


@every_version
def test_environment_variables_are_known(version: str) -> None:
    """The variables that are read or advised are those that torch_npu's library names."""
    named = set(touched().variables)
    assert {"TORCH_HCCL_ZERO_COPY", "HCCL_BUFFSIZE"} <= named
    known = set(inventory("torch_npu", version)["variables"])
    assert named - known == set(CANN_READS)


class Recorder:
    """A process group and its backend, which notes what is called."""

    def __init__(self, methods: list[str]) -> None:
        self.called: list[str] = []
        for method in methods:
            setattr(self, method, lambda *_, name=method: self.called.append(name))

    def _get_backend(self, device: torch.device) -> Recorder:
        return self


@every_version
def test_a_wait_is_ended_by_a_method_that_hccl_has(version: str) -> None:
    """HCCL's own method is called: abort(), which it inherits, does nothing."""
    methods = inventory("torch_npu", version)["backend_methods"]
    group = Recorder([*methods, "abort"])
    native._ABORTS["hccl"](group, torch.device("cpu"))
    assert group.called == ["abort_hccl_comm"]


# That the comparison can fail


def changed(**changes: Any) -> Any:
    """Return an inventory whose NpuFusedLamb is another one."""
    theirs = copy.deepcopy(inventory("torch_npu", VERSIONS[-1]))
    theirs["optimizers"]["NpuFusedLamb"].update(changes)
    return theirs


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"init": "params, lr=0.001, bound=1.0"}, "NpuFusedLamb.__init__ has no parameter bound"),
        ({"init": "params, lr=0.01"}, "NpuFusedLamb.__init__: lr is 0.001 here, 0.01 in torch_npu"),
        ({"init": "params, lr=required"}, "lr is 0.001 here, 'required' in torch_npu"),
        ({"init": "params, eps=1e-06, lr=0.001"}, "__init__ has its parameters in another order"),
        ({"methods": {"combine": ""}}, "NpuFusedLamb has no method combine"),
        (
            {"methods": {"step": "closure=None, scale=1"}},
            "NpuFusedLamb.step has no parameter scale",
        ),
        ({"methods": {"zero_grad": "set_to_none=True"}}, "set_to_none is False here, True"),
        ({"attributes": ["combined_masks"]}, "NpuFusedLamb has no attribute combined_masks"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_class_that_changes_is_told(changes: dict[str, Any], line: str) -> None:
    """A parameter, default, order, method or attribute that is new or another one is a line."""
    (found,) = unexplained(changed(**changes))
    assert line in found


def test_a_class_that_is_new_is_told() -> None:
    """A tenth optimizer would be missed."""
    theirs = inventory("torch_npu", VERSIONS[-1])
    theirs["optimizers"]["NpuFusedLion"] = theirs["optimizers"]["NpuFusedAdam"]
    assert unexplained(theirs) == ["there is no NpuFusedLion"]


def test_a_name_that_goes_is_told() -> None:
    """A function of torch.npu that is gone, or takes something else, is a line."""
    uses, names = touched(), inventory("torch_npu", VERSIONS[-1])["npu"]
    gone = {name: told for name, told in names.items() if name != "get_rng_state"}
    assert lacks(uses.device_module, gone, "torch.npu") == ["torch.npu has no get_rng_state"]
    (line,) = lacks(uses.device_module, {**names, "set_rng_state": ""}, "torch.npu")
    assert "set_rng_state() is called as" in line


@pytest.mark.parametrize(
    ("source", "kind", "found"),
    [
        ("import torch_npu.optim", "torch_npu", "torch_npu.optim"),
        ("from torch_npu.npu import amp", "torch_npu", "torch_npu.npu.amp"),
        ("torch.npu.current_stream()", "torch_npu", "torch.npu.current_stream"),
        ("importlib.import_module('torch_npu.npu')", "torch_npu", "torch_npu.npu"),
        ("torch_npu.npu_apply_adam_w(p, g)", "fused", "torch_npu.npu_apply_adam_w"),
        ("torch.ops.npu.npu_fused_lamb(p)", "fused", "torch.ops.npu.npu_fused_lamb"),
        ("getattr(ops, 'npu_apply_fused_adamw_v2')", "fused", "npu_apply_fused_adamw_v2"),
        ("param = param.npu()", "fused", "param.npu"),
        ("model(x).npu()", "fused", "npu"),
    ],
)
def test_a_use_is_found(source: str, kind: str, found: str) -> None:
    """However it is written."""
    uses = Uses()
    uses.read(source)
    assert found in getattr(uses, kind)


def test_a_use_of_the_device_module_is_found() -> None:
    """Also where it is held by a variable, and as it is called."""
    uses = Uses()
    uses.read("module = torch.get_device_module(d)\nmodule.Event(enable_timing=True)")
    uses.read("torch.get_device_module(d).synchronize(d, 1)\ntorch.accelerator.nothing()")
    (event, synchronize), (nothing,) = uses.device_module, uses.accelerator
    assert (event.name, synchronize.name, nothing.name) == ("Event", "synchronize", "nothing")
    names = inventory("torch_npu", VERSIONS[-1])["npu"]
    assert event.call is not None
    assert takes(names["Event"], event.call)
    assert len(lacks([event, synchronize], names, "torch.npu")) == 1


# The script that makes inventories

TINY = {
    "torch_npu/lib/libtorch_npu.so": "\0HCCL_TEST_NAME\0 no_HCCL",
    "torch_npu/__init__.py": """
torch._register_device_module("npu", torch_npu.npu)
torch.distributed.Backend.register_backend("hccl", None)
group._get_backend(device).abort_hccl_comm("again")
""",
    "torch_npu/npu/__init__.py": """
__all__ = ["now", "Later", "value"]
from .clock import *
from .clock import Late as Later
value = 1
""",
    "torch_npu/npu/clock.py": """
from . import value
def now(device: int = 3, *, exact: bool = False) -> float: ...
class Late:
    def __new__(cls, after, **kwargs): ...
""",
    "torch_npu/npu/amp/grad_scaler.py": """
class GradScaler:
    def step(self, optimizer):
        self._flag = hasattr(optimizer, "is_fused") and optimizer.step()
        optimizer_state["stage"] = 1
""",
    "torch_npu/optim/__init__.py": '__all__ = ["NpuFusedX"]\nfrom .x import NpuFusedX',
    "torch_npu/optim/base.py": """
class Base(Optimizer):
    def __init__(self, params): self.count = self._hidden = 0
    def step(self, closure=None): ...
    def _inner(self): ...
""",
    "torch_npu/optim/x.py": """
from .base import Base
LEAST = 0.5
class NpuFusedX(Base):
    def __init__(self, params, lr=required, decay: float = LEAST): self.rate = lr
    def step(self, closure=None, scale=1): ...
""",
}


def test_a_wheel_becomes_an_inventory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Imports are followed, in circles too; constants stand for themselves; bases count."""
    wheel = tmp_path / "torch_npu-9.9-cp311-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, text in TINY.items():
            archive.writestr(name, text)
    main([str(wheel)], tmp_path / "found")
    assert capsys.readouterr().out == f"torch_npu-9.9.json: {wheel.name}\n"
    found = json.loads((tmp_path / "found" / "torch_npu-9.9.json").read_text())
    assert found["npu"] == {
        "now": "device=3, *, exact=False",
        "Later": "after, **kwargs",
        "value": None,
    }
    assert found["optimizers"] == {
        "NpuFusedX": {
            "init": "params, lr=required, decay=0.5",
            "methods": {"step": "closure=None, scale=1"},
            "attributes": ["count", "rate"],
        }
    }
    assert found["scaler"] == {
        "attributes": ["_flag", "step"],
        "reads_of_optimizers": ["is_fused", "step"],
        "state_keys": ["stage"],
    }
    assert (found["device_modules"], found["backends"]) == (["npu"], ["hccl"])
    assert found["backend_methods"] == ["abort_hccl_comm"]
    assert found["variables"] == ["HCCL_TEST_NAME"]
