"""Files of models whose parameters lie in one buffer: safetensors, Accelerate, torch.save."""

from __future__ import annotations

import copy
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shardfuse import ShardedAdamW
from shardfuse.integrations import consolidate_on_save
from tests.support.models import flat_buffers, lie_in
from tests.support.placing import on_device

pytestmark = pytest.mark.timeout(120)


def build() -> tuple[nn.Module, Any]:
    """Return a model with an empty and a strided parameter, and its optimizer after a step."""
    model = nn.Sequential(nn.Linear(200, 300), nn.Conv2d(3, 4, 2), nn.Linear(300, 4))
    model.register_parameter("nothing", nn.Parameter(torch.ones(0, 3)))
    model.register_parameter("void", nn.Parameter(torch.ones(0)))
    model[1].to(memory_format=torch.channels_last)
    optimizer = ShardedAdamW(model.parameters())
    train(model, optimizer)
    return model, optimizer


def train(model: nn.Module, optimizer: Any) -> None:
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()


def check_loaded(model: nn.Module, optimizer: Any, expected: dict[str, Any]) -> None:
    """Fail unless the model has the values, in the buffer still, and a step reaches it."""
    state = model.state_dict()
    assert state.keys() == expected.keys()
    assert all(torch.equal(state[name], expected[name]) for name in state)
    assert lie_in(model.parameters(), flat_buffers(optimizer))
    before = copy.deepcopy(state)
    train(model, optimizer)
    assert not any(torch.equal(state[n], before[n]) for n in state if state[n].numel())


@pytest.mark.parametrize("how", ["save_model", "save_file"])
@pytest.mark.cpu_only("params of a device out of tree share a storage, which it refuses in words")
def test_safetensors(how: str, tmp_path: Path) -> None:
    """Both ways of saving take the model, and what they read back trains on."""
    safetensors = pytest.importorskip("safetensors.torch")
    model, optimizer = build()
    path = str(tmp_path / "model.safetensors")
    saved = copy.deepcopy(model.state_dict())
    if how == "save_model":
        safetensors.save_model(model, path)
    else:
        contiguous = {name: value.contiguous() for name, value in model.state_dict().items()}
        safetensors.save_file(contiguous, path)
    train(model, optimizer)
    safetensors.load_model(model, path)
    check_loaded(model, optimizer, saved)


def test_safetensors_of_a_state_dict(tmp_path: Path) -> None:
    """save_file() and load_file() serve params that share a storage as well."""
    safetensors = pytest.importorskip("safetensors.torch")
    model, optimizer = build()
    path = str(tmp_path / "model.safetensors")
    saved = copy.deepcopy(model.state_dict())
    copies = {name: value.cpu().contiguous() for name, value in model.state_dict().items()}
    safetensors.save_file(copies, path)
    train(model, optimizer)
    model.load_state_dict(safetensors.load_file(path))
    check_loaded(model, optimizer, saved)


class Hooked:
    """As much of an Accelerator as takes a hook."""

    _optimizers: tuple[Any, ...] = ()

    def register_save_state_pre_hook(self, hook: Any) -> Any:
        return hook


def cleaned(state: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return what Accelerate saves of ``state`` after consolidate_on_save()'s hook."""
    other = pytest.importorskip("accelerate.utils.other")
    # Its own logger needs an Accelerator.
    monkeypatch.setattr(other, "logger", logging.getLogger("accelerate"))
    consolidate_on_save(Hooked())([], [state], "")
    saved: dict[str, Any] = other.clean_state_dict_for_safetensors(state)
    return saved


def test_accelerate_saves_params_that_share_a_storage(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes what shares a storage for tied, and saves one of them; what is tied stays so."""
    buffer = torch.arange(12.0)
    state = {"a": buffer[:4], "b": buffer[4:].view(2, 4), "tied": buffer[:4], "alone": buffer + 1}
    expected = {name: state[name].cpu() for name in ("a", "b", "alone")}
    saved = cleaned(state, monkeypatch)
    assert saved.keys() == expected.keys()
    assert all(torch.equal(saved[name].cpu(), expected[name]) for name in saved)


def test_accelerate_saves_the_whole_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """With parameters in one buffer, wherever that lies."""
    model, _ = build()
    state = model.state_dict()
    expected = {name: value.cpu() for name, value in state.items() if value.numel()}
    saved = cleaned(state, monkeypatch)
    assert saved.keys() >= expected.keys()
    assert all(torch.equal(saved[name].cpu(), expected[name]) for name in expected)


def test_files_of_submodules_hold_no_more(tmp_path: Path) -> None:
    """torch.save() of a submodule, and of one parameter, writes these alone.

    On a device out of tree params share a storage, which a file has once, as a whole.
    """
    model, optimizer = build()
    (buffer,) = flat_buffers(optimizer)
    for name, saved in (("sub", model[2].state_dict()), ("one", {"bias": model[0].bias})):
        path = tmp_path / name
        torch.save(saved, path)
        nbytes = sum(value.nbytes for value in saved.values())
        nbytes = buffer.nbytes if on_device() else nbytes
        assert nbytes < path.stat().st_size < nbytes + 3000
        loaded = torch.load(path, weights_only=True)
        assert all(torch.equal(loaded[key], saved[key]) for key in saved)
    whole = copy.deepcopy(model.state_dict())
    train(model, optimizer)
    model.load_state_dict(whole)
    check_loaded(model, optimizer, whole)


def test_copies_of_submodules_hold_no_more() -> None:
    """copy.deepcopy() copies a parameter's own memory, and the copy does not follow the model."""
    model, optimizer = build()
    twin = copy.deepcopy(model[2])
    assert twin.bias.untyped_storage().nbytes() == model[2].bias.nbytes
    before = twin.bias.detach().clone()
    train(model, optimizer)
    assert torch.equal(twin.bias, before)


def test_storages_keep_the_buffer_alive() -> None:
    """Parameters outlive the optimizer, as ever."""
    model, optimizer = build()
    saved = copy.deepcopy(model.state_dict())
    del optimizer
    others = [torch.full((300, 200), float("nan")) for _ in range(20)]
    assert all(torch.equal(value, saved[name]) for name, value in model.state_dict().items())
    assert len(others) == 20


def test_writing_through_a_state_dict_reaches_the_model() -> None:
    """model.state_dict() is the parameters themselves, not copies of them."""
    model, _ = build()
    model.state_dict()["0.bias"].fill_(7.0)
    assert torch.equal(model[0].bias, torch.full((300,), 7.0))


ACCELERATE = """
import os
import sys
import torch
from accelerate import Accelerator
from shardfuse import ShardedLamb
from shardfuse.integrations import consolidate_on_save

accelerator = Accelerator(cpu=True)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 600), torch.nn.Tanh(), torch.nn.Linear(600, 1))
options = {"grads_are_reduced": True, "consolidate_every": 0}
optimizer = ShardedLamb(model.named_parameters(), lr=1e-2, variant="google", sharding=options)
model, optimizer = accelerator.prepare(model, optimizer)
consolidate_on_save(accelerator)


def train(steps):
    for step in steps:
        data = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
        accelerator.backward(model(data).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    return [param.detach().clone() for param in model.parameters()]


train(range(3))
accelerator.save_state(sys.argv[1])
first = train(range(3, 6))
accelerator.load_state(sys.argv[1])
second = train(range(3, 6))
assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
accelerator.wait_for_everyone()
os.write(1, b"resumed %d\\n" % accelerator.num_processes)  # one write: two ranks share the pipe
accelerator.end_training()
"""


@pytest.mark.parametrize("world_size", [1, 2])
def test_accelerate_save_state(world_size: int, tmp_path: Path) -> None:
    """accelerator.save_state() and load_state(): the same bits again, alone and on two ranks."""
    pytest.importorskip("accelerate")
    script = tmp_path / "script.py"
    script.write_text(ACCELERATE)
    command = [sys.executable, "-W", "ignore"]
    if world_size > 1:
        command += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    result = subprocess.run(
        [*command, str(script), str(tmp_path / "state")],
        env=environment(),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=110,
    )
    assert result.stdout.count(f"resumed {world_size}") == world_size, result.stdout + result.stderr


def environment() -> dict[str, str]:
    """Return the environment of a script that imports this tree, on the CPU."""
    root = str(Path(__file__).parents[2])
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    hidden = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    return {**os.environ, **hidden}
