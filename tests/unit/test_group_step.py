"""LAMB keeps ``step`` in its groups as apex does, and NVIDIA's scheduler reads it there."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim.lr_scheduler import LRScheduler

from shardfuse import ShardedAdam, ShardedLamb
from shardfuse.optim import npu, paddle
from tests.support.harness import run_procs, run_threads
from tests.support.placing import device_type
from tests.unit.test_validation import case_id

# One process saves; torch says so.
alone = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
LAMBS: list[tuple[Any, dict[str, Any]]] = [
    (ShardedLamb, {"variant": "apex", "weight_decay": 0.01}),
    (ShardedLamb, {"variant": "nvlamb"}),
    (npu.NpuFusedLamb, {}),
]


class PolyWarmUpScheduler(LRScheduler):
    """NVIDIA's, of its recipe for BERT: polynomial decay after a warm-up, by the group's step."""

    def __init__(
        self,
        optimizer: Any,
        warmup: float,
        total_steps: int,
        degree: float = 0.5,
        last_epoch: int = -1,
        base_lr: float = 1.0,
    ) -> None:
        self.warmup = torch.tensor(warmup)
        self.total_steps = torch.tensor(total_steps)
        self.degree = torch.tensor(degree)
        self.base_lr = torch.tensor(base_lr)
        super().__init__(optimizer, torch.tensor(last_epoch))  # type: ignore[arg-type]

    def step(self, epoch: Any = None) -> None:
        """Set the learning rate of the step that comes."""
        group = self.optimizer.param_groups[0]
        self.last_epoch = group["step"] + 1 if "step" in group else torch.tensor(1.0)
        for group, lr in zip(self.optimizer.param_groups, self.get_lr(), strict=True):
            group["lr"] = lr

    def get_lr(self) -> list[Any]:
        """Return the learning rate of every group, each a tensor ()."""
        progress = self.last_epoch / self.total_steps
        warm = self.base_lr * progress / self.warmup  # type: ignore[operator]
        lr = torch.where(
            progress < self.warmup,  # type: ignore[arg-type]
            warm,
            self.base_lr * ((1.0 - progress) ** self.degree),  # type: ignore[arg-type]
        )
        return [lr for _ in self.optimizer.param_groups]


def build(cls: Any, **options: Any) -> tuple[nn.Module, Any]:
    """Return NVIDIA's two groups, with and without a decay, over a small model."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 1))
    named = list(model.named_parameters())
    groups = [
        {"params": [p for name, p in named if "bias" not in name], "weight_decay": 0.01},
        {"params": [p for name, p in named if "bias" in name], "weight_decay": 0.0},
    ]
    return model, cls(groups, lr=6e-3, **options)


def backward(model: nn.Module, step: int, scale: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(step)
    (model(torch.randn(4, 8, generator=generator)).square().mean() * scale).backward()


def expected_lr(step: int) -> float:
    """Return NVIDIA's learning rate of the step, from 1: warm-up over 0.2 of 20, then decay."""
    progress = step / 20
    return 6e-3 * (progress / 0.2 if progress < 0.2 else (1 - progress) ** 0.5)


def train_scheduled(cls: Any, options: dict[str, Any]) -> tuple[list[float], list[Any], Tensor]:
    """Train as poly_schedule_job.py does; return the learning rates, steps and a weight."""
    model, optimizer = build(cls, **options)
    scheduler = PolyWarmUpScheduler(optimizer, warmup=0.2, total_steps=20, base_lr=6e-3)
    assert "step" not in optimizer.param_groups[0]
    rates, steps = [], []
    for step in range(10):
        backward(model, step + 100 * torch.distributed.get_rank())
        scheduler.step()
        optimizer.step()
        for param in model.parameters():
            param.grad = None
        rates.append(float(optimizer.param_groups[0]["lr"]))
        steps.append([group["step"] for group in optimizer.param_groups])
    weight: Any = next(model.parameters())
    return rates, steps, weight.detach().clone()


@pytest.mark.parametrize(("cls", "options"), LAMBS, ids=case_id)
def test_nvidias_schedule_moves(cls: Any, options: dict[str, Any]) -> None:
    """On two ranks the learning rate rises and falls as the recipe has it, alike on both."""
    first, second = run_threads(2, train_scheduled, cls, options)
    assert first[0] == pytest.approx([expected_lr(step) for step in range(1, 11)])
    assert first[1] == [[step, step] for step in range(1, 11)]
    assert all(type(count) is int for counts in first[1] for count in counts)
    assert first[:2] == second[:2]
    assert torch.equal(first[2], second[2])


def test_nvidias_schedule_over_gloo() -> None:
    """The program poly_schedule_job.py, in two processes."""
    options = {"use_global_grad_norm": True, "max_grad_norm": 65536.0}
    for rates, _, _ in run_procs(2, train_scheduled, npu.NpuFusedLamb, options):
        assert rates[0] < rates[2] > rates[9]


@alone
@pytest.mark.parametrize("sharded", [False, True], ids=["torch", "dcp"])
def test_step_survives_a_checkpoint(sharded: bool, tmp_path: Any) -> None:
    """A resumed run goes on at the rate where it was, and trains as if never stopped."""

    def start() -> tuple[nn.Module, Any, Any]:
        model, optimizer = build(ShardedLamb, variant="nvlamb")
        scheduler = PolyWarmUpScheduler(optimizer, warmup=0.2, total_steps=20, base_lr=6e-3)
        return model, optimizer, scheduler

    def train(model: nn.Module, optimizer: Any, scheduler: Any, first: int, last: int) -> Any:
        for step in range(first, last):
            backward(model, step)
            scheduler.step()
            optimizer.step()
            optimizer.zero_grad()
        return model.state_dict()

    expected = train(*start(), 0, 6)
    model, optimizer, scheduler = start()
    values = copy.deepcopy(train(model, optimizer, scheduler, 0, 3))
    if sharded:
        dcp.save(optimizer.sharded_state_dict(), checkpoint_id=tmp_path)
    saved = copy.deepcopy(optimizer.state_dict())
    assert saved["param_groups"][1]["step"] == 3
    model, optimizer, scheduler = start()
    model.load_state_dict(values)
    if sharded:
        state = optimizer.sharded_state_dict()
        dcp.load(state, checkpoint_id=tmp_path)
        optimizer.load_sharded_state_dict(state)
    else:
        optimizer.load_state_dict(saved)
    for group in optimizer.param_groups:
        assert group["step"] == 3
    actual = train(model, optimizer, scheduler, 3, 6)
    assert all(torch.equal(actual[name], expected[name]) for name in expected)


def test_load_sets_the_step_back() -> None:
    """A dict of fewer steps, of none, or without the key, leaves no count of another run."""
    model, optimizer = build(ShardedLamb)
    fresh = copy.deepcopy(optimizer.state_dict())
    dicts = []
    for step in range(3):
        backward(model, step)
        optimizer.step()
        dicts.append(copy.deepcopy(optimizer.state_dict()))
    optimizer.load_state_dict(dicts[0])
    assert [group["step"] for group in optimizer.param_groups] == [1, 1]
    optimizer.load_state_dict(fresh)
    assert all("step" not in group for group in optimizer.param_groups)
    for group in dicts[1]["param_groups"]:
        del group["step"]  # as torch_npu's dicts have it
    optimizer.load_state_dict(dicts[1])
    assert [group["step"] for group in optimizer.param_groups] == [2, 2]


@alone
def test_distributed_checkpoint_of_before(tmp_path: Any) -> None:
    """One whose groups have no step loads where the keys are left out, by the params' counts."""
    model, optimizer = build(ShardedLamb)
    backward(model, 0)
    optimizer.step()
    state = optimizer.sharded_state_dict()
    for group in state["param_groups"]:
        del group["step"]
    dcp.save(state, checkpoint_id=tmp_path)
    for step in range(3):
        backward(model, step)
        optimizer.step()
    state = optimizer.sharded_state_dict()
    for group in state["param_groups"]:
        del group["step"]
    dcp.load(state, checkpoint_id=tmp_path)
    optimizer.load_sharded_state_dict(state)
    assert [group["step"] for group in optimizer.param_groups] == [1, 1]


@pytest.mark.parametrize("cls", [ShardedLamb, ShardedAdam])
@pytest.mark.parametrize("as_tensor", [False, True])
def test_apexs_own_dict(cls: Any, as_tensor: bool) -> None:
    """apex counts in the group alone, as an int or a tensor: moments are corrected for that."""
    runs = []
    for is_apex in (False, True):
        model, optimizer = build(cls, **({"variant": "nvlamb"} if cls is ShardedLamb else {}))
        for step in range(3):
            backward(model, step)
            optimizer.step()
        state = copy.deepcopy(optimizer.state_dict())
        if is_apex:
            for entry in state["state"].values():
                del entry["step"]
            for group in state["param_groups"]:
                group["step"] = torch.tensor([3]) if as_tensor else 3
        values = copy.deepcopy(model.state_dict())
        model, optimizer = build(cls, **({"variant": "nvlamb"} if cls is ShardedLamb else {}))
        model.load_state_dict(values)
        optimizer.load_state_dict(state)
        backward(model, 3)
        optimizer.step()
        runs.append(model.state_dict())
    assert all(torch.equal(runs[0][name], runs[1][name]) for name in runs[0])


def test_moments_without_any_step_are_refused() -> None:
    """They would be corrected as if there had been none."""
    model, optimizer = build(ShardedAdam)
    backward(model, 0)
    optimizer.step()
    state = copy.deepcopy(optimizer.state_dict())
    for entry in state["state"].values():
        del entry["step"]
    with pytest.raises(ValueError, match=r"no step for .*param_groups\[0\]\[0\]"):
        optimizer.load_state_dict(state)


def test_skipped_step_is_not_counted() -> None:
    """As in NVIDIA's: a step that the scaler skips does not move the schedule."""
    model, optimizer = build(ShardedLamb)
    scaler = GradScaler(device_type(), init_scale=8.0)
    for step, factor in enumerate([1.0, float("inf"), 1.0]):
        backward(model, step, scaler.scale(torch.tensor(1.0)).item() * factor)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert [group["step"] for group in optimizer.param_groups] == [2, 2]


def test_others_have_none() -> None:
    """Adam's groups are torch's, and Paddle's Lamb has no such key."""
    for optimizer in (
        build(ShardedAdam)[1],
        paddle.Lamb(parameters=[nn.Parameter(torch.ones(2, 2))]),
    ):
        for group in optimizer.param_groups:
            for param in group["params"]:
                param.grad = torch.ones_like(param)
        optimizer.step()
        assert all("step" not in group for group in optimizer.param_groups)
