"""torch.distributed.checkpoint.state_dict: get_ and set_ at any number of ranks, without a step."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)

from shardfuse import (
    ShardedAdamW,
    ShardedBertAdam,
    ShardedLamb,
    ShardedRMSpropTF,
    ShardedSGD,
    checkpoint,
)
from shardfuse.fragments import FragmentTensor, boxes
from tests.support.harness import run_procs, run_threads
from tests.support.runs import assert_bitwise

pytestmark = [
    pytest.mark.timeout(180),
    # torch.distributed.checkpoint's own, on torch 2.13.
    pytest.mark.filterwarnings("ignore::FutureWarning:torch"),
    pytest.mark.filterwarnings("ignore::UserWarning:torch"),
]

CASES: dict[str, tuple[Any, dict[str, Any], torch.dtype]] = {
    "adamw": (ShardedAdamW, {"amsgrad": True}, torch.float32),
    "adamw-bf16": (ShardedAdamW, {}, torch.bfloat16),
    "sgd": (ShardedSGD, {"momentum": 0.9, "dampening": 0.5}, torch.float32),
    "sgd-plain": (ShardedSGD, {}, torch.float32),
    "bert": (ShardedBertAdam, {"warmup": 0.3, "t_total": 12, "max_grad_norm": -1}, torch.float32),
    "rmsprop-tf": (ShardedRMSpropTF, {"momentum": 0.9}, torch.float32),
    "lamb": (ShardedLamb, {"adam": True}, torch.float32),  # no norms: equal at every world size
}
FULL = StateDictOptions(full_state_dict=True)
SHARDED = StateDictOptions()
OPTIONS = {
    "sharded": SHARDED,
    "sharded on the CPU": StateDictOptions(cpu_offload=True),
    "sharded flattened": StateDictOptions(flatten_optimizer_state_dict=True),
    "full": FULL,
}
SHARDING = {"kernel": "eager", "bucket_cap_mb": 0.005, "consolidate_every": 0}


class Net(nn.Module):
    """Weights cut over ranks and buckets, a scalar, an empty one, a strided and a frozen one."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(40, 50), nn.Conv2d(3, 7, 5))
        strided = torch.zeros(7, 3, 5, 5).to(memory_format=torch.channels_last)
        self.body[1].weight = nn.Parameter(strided)
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.nothing = nn.Parameter(torch.ones(0, 3))
        self.late = nn.Parameter(torch.zeros(700))
        self.frozen = nn.Parameter(torch.ones(30), requires_grad=False)
        generator = torch.Generator().manual_seed(0)  # ranks that are threads share the default one
        with torch.no_grad():
            for param in self.parameters():
                param.copy_(torch.randn(param.shape, generator=generator))
        self.to(dtype)


def build(name: str) -> tuple[Net, Any]:
    """Return a model and its optimizer of two groups, the same on every call."""
    cls, options, dtype = CASES[name]
    model = Net(dtype)
    named = dict(model.named_parameters())
    first = {key: param for key, param in named.items() if key.startswith("body.0")}
    rest = {key: param for key, param in named.items() if key not in first}
    groups = [{"params": list(first.items()), "lr": 0.05}, {"params": list(rest.items())}]
    return model, cls(groups, lr=0.1, **options, sharding=SHARDING)


def train(model: Net, optimizer: Any, steps: range) -> None:
    """Take steps whose mean gradient is the same integers at every world size."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    rank = dist.get_rank() if dist.is_initialized() else 0
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for name, param in model.named_parameters():
            grad = torch.randint(-3, 4, param.shape, generator=generator).to(param.dtype)
            if param.requires_grad and not (name == "late" and step < 4):
                param.grad = grad * (world if rank == 0 else 0)
        optimizer.step()
        optimizer.zero_grad()


def values(model: nn.Module) -> list[Tensor]:
    return [param.detach().clone() for param in model.parameters()]


def straight(name: str) -> list[Tensor]:
    model, optimizer = build(name)
    train(model, optimizer, range(6))
    return values(model)


def round_trip(name: str, options: StateDictOptions, at: int) -> list[Tensor]:
    """Get at one step, train on, and set it: in the same optimizer, and in a new one."""
    model, optimizer = build(name)
    train(model, optimizer, range(at))
    saved = get_state_dict(model, optimizer, options=options)
    saved = (copy.deepcopy(saved[0]), saved[1])  # the model's are the parameters themselves
    train(model, optimizer, range(at, 6))
    first = values(model)
    for target in ((model, optimizer), build(name)):
        kept = copy.deepcopy(saved)
        set_state_dict(*target, model_state_dict=kept[0], optim_state_dict=kept[1], options=options)
        train(*target, range(at, 6))
        assert_bitwise(values(target[0]), first)
    return first


@pytest.mark.parametrize("at", [0, 3])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("name", CASES)
def test_set_continues(name: str, options: StateDictOptions, at: int) -> None:
    """What get_state_dict() gave trains on to the same bits, before and after the first step."""
    if name == "sgd-plain" and options is FULL:
        pytest.skip("torch finds no device where there is no tensor of a dimension")
    expected = run_threads(1, straight, name)[0]
    for world_size in (1, 3):
        for result in run_threads(world_size, round_trip, name, options, at):
            assert_bitwise(result, expected)


def from_first_rank(name: str, at: int) -> list[Tensor]:
    """Get whole states on the first rank's CPU alone, and set from there."""
    model, optimizer = build(name)
    train(model, optimizer, range(at))
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    saved = copy.deepcopy(get_state_dict(model, optimizer, options=options))
    if dist.get_rank() > 0:
        assert saved == ({}, {})
    train(model, optimizer, range(at, 6))
    other, others = build(name)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    # Not by set_state_dict(), in which torch 2.13 leaves the model out on ranks that give it none.
    # It broadcasts memory, of whatever strides, and receives it as contiguous.
    weights = {name: value.contiguous() for name, value in saved[0].items()}
    set_model_state_dict(other, weights, options=options)
    set_optimizer_state_dict(other, others, saved[1], options=options)
    train(other, others, range(at, 6))
    assert_bitwise(values(other), values(model))
    return values(model)


@pytest.mark.parametrize("at", [0, 3])
@pytest.mark.parametrize("name", ["adamw-bf16", "sgd"])
def test_broadcast_from_rank_0(name: str, at: int) -> None:
    """One rank's full dict, without states on the others, continues all."""
    expected = run_threads(1, straight, name)[0]
    for result in run_procs(2, from_first_rank, name, at):
        assert_bitwise(result, expected)


def save(name: str, folder: str) -> None:
    model, optimizer = build(name)
    train(model, optimizer, range(3))
    saved = get_state_dict(model, optimizer)
    dcp.save({"model": saved[0], "optimizer": saved[1]}, checkpoint_id=folder)


def load(name: str, folder: str) -> list[Tensor]:
    model, optimizer = build(name)
    own = get_state_dict(model, optimizer)
    state = {"model": own[0], "optimizer": own[1]}
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )
    train(model, optimizer, range(3, 6))
    return values(model)


@pytest.mark.parametrize(("saved_at", "loaded_at"), [(2, 1), (2, 3), (1, 2)])
@pytest.mark.parametrize("name", ["adamw-bf16", "sgd"])
def test_other_world_sizes(name: str, saved_at: int, loaded_at: int, tmp_path: Path) -> None:
    """Saved sharded by torch.distributed.checkpoint, read at another number of ranks."""
    run_procs(saved_at, save, name, str(tmp_path))
    expected = run_threads(1, straight, name)[0]
    for result in run_procs(loaded_at, load, name, str(tmp_path)):
        assert_bitwise(result, expected)


def save_itself(name: str, folder: str, how: str) -> None:
    model, optimizer = build(name)
    train(model, optimizer, range(3))
    state = {"model": model, "optimizer": optimizer}
    if how == "ours":
        checkpoint.save(state, folder)
    else:
        dcp.save(state, checkpoint_id=folder)


def load_itself(name: str, folder: str) -> list[Tensor]:
    model, optimizer = build(name)
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    dcp.load({"model": model, "optimizer": optimizer}, checkpoint_id=folder)
    train(model, optimizer, range(3, 6))
    return values(model)


@pytest.mark.parametrize(("saved_at", "loaded_at"), [(2, 3), (3, 1)])
@pytest.mark.parametrize("name", ["adamw-bf16", "bert"])
@pytest.mark.parametrize("how", ["torch's", "ours"])
def test_save_and_load_of_the_optimizer_itself(
    how: str, name: str, saved_at: int, loaded_at: int, tmp_path: Path
) -> None:
    """torch's save() and load() of {"optimizer": optimizer}, also of what ours has saved."""
    run_procs(saved_at, save_itself, name, str(tmp_path / "saved"), how)
    expected = run_threads(1, straight, name)[0]
    for result in run_procs(loaded_at, load_itself, name, str(tmp_path / "saved")):
        assert_bitwise(result, expected)


def train_plain(folder: str) -> list[Tensor]:
    """Go on with torch.optim.AdamW from what two ranks of ours have saved."""
    model = Net(torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, amsgrad=True, foreach=False)
    own = get_state_dict(model, optimizer)
    state = {"model": own[0], "optimizer": {"state": own[1]["state"]}}
    dcp.load(state, checkpoint_id=folder)
    return [entry["exp_avg"] for _, entry in sorted(state["optimizer"]["state"].items())]


def read_plain(folder: str) -> list[Tensor]:
    model, optimizer = build("adamw")
    train(model, optimizer, range(3))
    state = get_optimizer_state_dict(model, optimizer, options=FULL)["state"]
    return [entry["exp_avg"] for _, entry in sorted(state.items())]


def test_files_have_the_shapes_of_torchs(tmp_path: Path) -> None:
    """Those of torch.optim.AdamW read them: states are saved in the parameters' shapes."""
    run_procs(2, save, "adamw", str(tmp_path))
    assert_bitwise(run_threads(1, train_plain, str(tmp_path))[0], read_plain(""))


def never_steps() -> None:
    model, optimizer = build("adamw")
    calls = []
    optimizer.register_step_pre_hook(lambda *args: calls.append(1))
    before = get_optimizer_state_dict(model, optimizer)
    assert {float(entry["step"]) for entry in before["state"].values()} == {0.0}
    assert "frozen" not in before["state"]
    train(model, optimizer, range(2))
    after = get_optimizer_state_dict(model, optimizer)
    assert float(after["state"]["scale"]["step"]) == 2.0
    assert float(after["state"]["late"]["step"]) == 0.0
    set_optimizer_state_dict(model, optimizer, after)
    assert len(calls) == 2
    with pytest.raises(TypeError, match="consolidate_state_dict"):
        torch.save(optimizer.sharded_state_dict(), Path("/dev/null"))


def test_get_state_dict_takes_no_step() -> None:
    """Neither before the first step, where torch takes one of zeros for empty states, nor after."""
    run_threads(1, never_steps)
    run_threads(2, never_steps)


def other_ranks_part() -> None:
    model, optimizer = build("adamw")
    train(model, optimizer, range(2))
    saved: dict[str, Any] = get_optimizer_state_dict(model, optimizer)
    entry = saved["state"]["body.0.weight"]
    own = entry["exp_avg"]
    assert isinstance(own, FragmentTensor)
    entry["exp_avg"] = FragmentTensor(own.shape, own.dtype, own.device, own.pieces[:-1])
    with pytest.raises(ValueError, match=r"body\.0\.weight holds another rank's part"):
        set_optimizer_state_dict(model, optimizer, saved)
    train(model, optimizer, range(2, 6))
    assert_bitwise(values(model), straight("adamw"))


def test_another_ranks_part_is_refused() -> None:
    """With words, and nothing of it is loaded."""
    run_threads(2, other_ranks_part)


@pytest.mark.parametrize("shape", [(), (7,), (3, 4), (2, 3, 4), (5, 1, 2, 2)])
def test_boxes(shape: tuple[int, ...]) -> None:
    """Boxes of a range are disjoint, few, in order, and hold its elements alone."""
    numel = math.prod(shape)
    index = torch.arange(numel).reshape(shape)
    for start in range(numel):
        for stop in range(start + 1, numel + 1):
            found: list[int] = []
            parts = list(boxes(shape, start, stop))
            for offsets, sizes in parts:
                cut = tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))
                found += index[cut].flatten().tolist()
            assert found == list(range(start, stop))
            assert len(parts) <= max(1, 2 * len(shape) - 1)
