"""Paddle's API over torch parameters: arguments, learning rates, minimize, state dicts."""

from __future__ import annotations

import io
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from shardfuse.checkpoint import CheckpointError
from shardfuse.optim.paddle import ClipGradByGlobalNorm, ClipGradByNorm, ClipGradByValue, Lamb
from shardfuse.training import Job
from tests.support.harness import run_threads

EAGER = {"kernel": "eager"}


class Halving:
    """A scheduler that halves the learning rate in every step."""

    def __init__(self, learning_rate: float) -> None:
        self.last_lr = learning_rate

    def __call__(self) -> float:
        return self.last_lr

    def step(self) -> None:
        self.last_lr /= 2

    def state_dict(self) -> dict[str, float]:
        return {"last_lr": self.last_lr}

    def set_state_dict(self, state: dict[str, float]) -> None:
        self.last_lr = state["last_lr"]


def linear() -> torch.nn.Linear:
    model = torch.nn.Linear(4, 3)
    with torch.no_grad():
        model.weight.copy_(torch.arange(12.0).view(3, 4) / 10)
        model.bias.fill_(0.5)
    return model


def loss_of(model: torch.nn.Linear) -> Tensor:
    return model(torch.ones(2, 4)).square().mean()


def build(model: torch.nn.Linear, learning_rate: Any = 0.1, **options: Any) -> Lamb:
    return Lamb(learning_rate, parameters=model.parameters(), sharding=EAGER, **options)


def step(model: torch.nn.Linear, optimizer: Lamb) -> list[Tensor]:
    loss_of(model).backward()
    optimizer.step()
    optimizer.clear_grad()
    return [param.detach().clone() for param in model.parameters()]


def test_import_does_not_need_paddle() -> None:
    """Neither the library nor the drop-in loads paddle; the library does not load the drop-in."""
    script = (
        "import sys, shardfuse; print('shardfuse.optim.paddle' in sys.modules)\n"
        "import shardfuse.optim.paddle; print('paddle' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True)
    assert result.stdout.split() == [b"False", b"False"]


def test_arguments_are_paddles() -> None:
    """Names, order and defaults of the constructor are those of Paddle 3.3."""
    by_position = Lamb(
        0.1, 0.2, 0.8, 0.9, 1e-5, linear().parameters(), None, None, False, True, "lamb"
    )
    group = by_position.param_groups[0]
    assert (group["lr"], group["weight_decay"], group["eps"]) == (0.1, 0.2, 1e-5)
    assert group["betas"] == (0.8, 0.9)
    assert by_position._rule.switches.always_adapt
    group = Lamb(parameters=linear().parameters()).param_groups[0]
    assert (group["lr"], group["weight_decay"], group["eps"]) == (0.001, 0.01, 1e-6)
    assert group["betas"] == (0.9, 0.999)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"parameters": None}, AttributeError, "parameters"),
        ({"parameters": {"params": []}}, TypeError, "list of dicts"),
        ({"parameters": torch.ones(2)}, TypeError, "iterable"),
        ({"learning_rate": "fast"}, TypeError, "number"),
        ({"learning_rate": lambda: 0.1}, TypeError, "step"),
        ({"learning_rate": -0.1}, ValueError, "learning rate"),
        ({"learning_rate": float("nan")}, ValueError, "learning rate"),
        ({"lamb_weight_decay": float("nan")}, ValueError, "weight_decay"),
        ({"beta1": 1.0}, ValueError, "beta"),
        ({"epsilon": -1.0}, ValueError, "epsilon"),
        ({"grad_clip": 1.0}, TypeError, "ClipGradBy"),
    ],
)
def test_refusals(options: dict[str, Any], error: type[Exception], message: str) -> None:
    """Wrong arguments raise errors that say which."""
    with pytest.raises(error, match=message):
        Lamb(**{"parameters": linear().parameters(), **options})


@pytest.mark.parametrize(
    ("group", "error"),
    [
        ({"lr": 0.1}, ValueError),
        ({"learning_rate": -1.0}, ValueError),
        ({"weight_decay": float("nan")}, ValueError),
        ({"weight_decay": "l2"}, TypeError),
        ({"grad_clip": "norm"}, TypeError),
    ],
)
def test_group_refusals(group: dict[str, Any], error: type[Exception]) -> None:
    """So do group dicts, where torch's own names would be passed over in silence."""
    with pytest.raises(error):
        Lamb(parameters=[{"params": linear().parameters(), **group}])


@pytest.mark.parametrize(
    "clip",
    [
        lambda: ClipGradByGlobalNorm(0.0),
        lambda: ClipGradByNorm(float("nan")),
        lambda: ClipGradByValue(0.0),
        lambda: ClipGradByValue(-1.0),
        lambda: ClipGradByValue(2.0, min=1.0),
        lambda: ClipGradByValue(float("nan")),
    ],
)
def test_clip_refusals(clip: Any) -> None:
    """A clip that would make every gradient zero, NaN, or something out of nothing is refused."""
    with pytest.raises(ValueError, match="Invalid"):
        clip()


def test_exclusion_function() -> None:
    """It gets the very parameters, with the names given, and is left without a trace."""
    model = linear()
    seen = []

    def exclude(param: Any) -> bool:
        assert isinstance(param, torch.nn.Parameter)
        seen.append((param.name, param is model.bias))
        return str(param.name).endswith("bias")

    Lamb(
        parameters=model.named_parameters(),
        exclude_from_weight_decay_fn=exclude,
        sharding=EAGER,
    )
    assert seen == [("weight", False), ("bias", True)]
    assert type(model.bias) is torch.nn.Parameter
    unnamed = linear()
    seen.clear()
    optimizer = build(unnamed, exclude_from_weight_decay_fn=lambda p: p is unnamed.bias)
    policies = {spec.name: spec.policy for spec in optimizer.layout.specs}
    assert policies == {"param_groups[0][0]": "", "param_groups[0][1]": "no_decay"}


def test_exclusion_function_of_a_group() -> None:
    """A group's own function takes the place of the optimizer's, also in groups added later."""
    one, two = linear(), linear()
    groups = [{"params": one.parameters(), "exclude_from_weight_decay_fn": lambda p: p.dim() < 2}]
    optimizer = Lamb(parameters=groups, sharding=EAGER)
    optimizer.add_param_group({"params": two.parameters(), "learning_rate": 0.5})
    assert [spec.policy for spec in optimizer.layout.specs] == ["", "no_decay", "", ""]
    assert optimizer.param_groups[1]["lr_scale"] == 0.5
    assert optimizer.param_groups[1]["lr"] == optimizer.get_lr()


def add_bad_group() -> tuple[str, int, set[str]]:
    """Rank 1 alone gives a key that no group has; then all give a good group."""
    optimizer = build(linear())
    bad = {"eps": 1e-6} if dist.get_rank() == 1 else {}
    late = linear()
    try:
        optimizer.add_param_group(
            {"params": late.parameters(), "exclude_from_weight_decay_fn": lambda p: True, **bad}
        )
    except (ValueError, RuntimeError) as error:
        text = str(error)
    optimizer.add_param_group({"params": late.parameters()})
    return text, len(optimizer.param_groups), {spec.policy for spec in optimizer.layout.specs}


def test_bad_group_on_one_rank() -> None:
    """A late group that one rank cannot read raises on all, and leaves nothing behind."""
    for rank, (text, num_groups, policies) in enumerate(run_threads(3, add_bad_group, timeout=20)):
        assert "no 'eps'. Use learning_rate" in text
        assert rank == 1 or "rank 1" in text
        assert num_groups == 2
        assert policies == {""}


def test_learning_rate() -> None:
    """set_lr() holds for the next steps; get_lr() is a float; negative and strange are refused."""
    model, other = linear(), linear()
    optimizer, expected = build(model, 0.1), build(other, 0.25)
    assert optimizer.get_lr() == 0.1
    optimizer.set_lr(0.25)
    assert optimizer.get_lr() == 0.25
    assert all(map(torch.equal, step(model, optimizer), step(other, expected)))
    optimizer.set_lr(1)
    assert isinstance(optimizer.get_lr(), float)
    with pytest.raises(TypeError):
        optimizer.set_lr("fast")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="learning rate"):
        optimizer.set_lr(-1.0)


def test_scheduler() -> None:
    """Every step reads the scheduler's present value, and set_lr() is refused."""
    model, other = linear(), linear()
    scheduler = Halving(0.2)
    optimizer, expected = build(model, scheduler), build(other, 0.2)
    for _ in range(3):
        assert optimizer.get_lr() == scheduler()
        expected.set_lr(scheduler())
        assert all(map(torch.equal, step(model, optimizer), step(other, expected)))
        scheduler.step()
    with pytest.raises(RuntimeError, match="LRScheduler"):
        optimizer.set_lr(0.1)
    optimizer.set_lr_scheduler(Halving(0.5))
    assert optimizer.get_lr() == 0.5
    with pytest.raises(TypeError, match="step"):
        optimizer.set_lr_scheduler(0.1)  # type: ignore[arg-type]


def test_torch_scheduler() -> None:
    """torch's own schedulers work as on every torch optimizer."""
    optimizer = build(linear(), 0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    optimizer.step()
    schedule.step()
    assert optimizer.get_lr() == 0.05
    with pytest.raises(TypeError, match="over the optimizer"):
        optimizer.set_lr_scheduler(schedule)  # type: ignore[arg-type]


PADDLE_SCHEDULER_SCRIPT = """
import warnings
warnings.simplefilter("ignore")
import paddle, torch
from shardfuse.optim.paddle import Lamb

def build():
    decay = paddle.optimizer.lr.PolynomialDecay(0.1, 10)
    scheduler = paddle.optimizer.lr.LinearWarmup(decay, 2, 0.0, 0.1)
    return scheduler, Lamb(scheduler, parameters=torch.nn.Linear(4, 3).parameters())

scheduler, optimizer = build()
for _ in range(4):
    optimizer.step()
    assert optimizer.param_groups[0]["lr"] == optimizer.get_lr() == scheduler.last_lr
    scheduler.step()
other_scheduler, other = build()
other.set_state_dict(optimizer.state_dict())
assert other.get_lr() == scheduler() == other_scheduler() < 0.1
"""


@pytest.mark.skipif(find_spec("paddle") is None, reason="paddlepaddle is not installed")
def test_paddle_scheduler() -> None:
    """Paddle's own schedulers can be attached, followed, saved and loaded."""
    subprocess.run([sys.executable, "-c", PADDLE_SCHEDULER_SCRIPT], check=True, timeout=100)


@pytest.mark.parametrize("clear", ["to zero", "to None", "model to zero", "model to None"])
def test_minimize(clear: str) -> None:
    """It calls backward() where the caller has not, and never twice."""
    models = [linear() for _ in range(3)]
    optimizers = [build(model) for model in models]
    for _ in range(3):
        assert optimizers[0].minimize(loss_of(models[0]))[0] == []
        loss = loss_of(models[1])
        loss.backward()
        operations, pairs = optimizers[1].minimize(loss)
        assert operations == []
        assert [id(param) for param, _ in pairs] == [id(p) for p in models[1].parameters()]
        assert all(grad.abs().sum() > 0 for _, grad in pairs)
        loss_of(models[2]).backward()
        assert optimizers[2].step() is None
        for model, optimizer in zip(models, optimizers, strict=True):
            if clear.startswith("model"):
                model.zero_grad(set_to_none=clear.endswith("None"))
            else:
                optimizer.clear_grad(clear.endswith("zero"))
    for model in models[:2]:
        assert torch.equal(model.weight, models[2].weight)
    with pytest.raises(NotImplementedError, match="requires_grad"):
        optimizers[0].minimize(loss_of(models[0]), no_grad_set={"x"})  # type: ignore[arg-type]


def test_clear_grad() -> None:
    """Zero by default, None if asked; a gradient of zero moves a parameter on, None does not."""
    model = linear()
    optimizer = build(model)
    before = step(model, optimizer)
    assert model.weight.grad is not None
    assert not model.weight.grad.any()
    optimizer.step()
    assert not torch.equal(model.weight, before[0])
    optimizer.clear_gradients(set_to_zero=False)
    assert model.weight.grad is None


def test_state_dict() -> None:
    """Training goes on as if it had not been cut, schedule included, through torch.save."""
    model, scheduler = linear(), Halving(0.2)
    optimizer = build(model, scheduler, grad_clip=ClipGradByNorm(0.5))
    step(model, optimizer)
    scheduler.step()
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    assert saved["optimizer"]["LR_Scheduler"] == {"last_lr": 0.1}

    resumed, resumed_scheduler = linear(), Halving(0.7)
    other = build(resumed, resumed_scheduler, grad_clip=ClipGradByNorm(0.5))
    resumed.load_state_dict(saved["model"])
    other.set_state_dict(saved["optimizer"])
    assert other.get_lr() == 0.1
    assert all(map(torch.equal, step(model, optimizer), step(resumed, other)))
    del saved["optimizer"]["LR_Scheduler"]
    with pytest.raises(ValueError, match="LR_Scheduler"):
        other.set_state_dict(saved["optimizer"])


def test_a_job_goes_on_with_the_scheduler(tmp_path: Path) -> None:
    """The optimizer's own is saved with it; any other object of Paddle's is restored in place."""
    rates = []
    for first, last in ((0, 3), (3, 5)):
        model, scheduler, other = linear(), Halving(0.2), Halving(0.8)
        optimizer = build(model, scheduler)
        state: dict[str, Any] = {"model": model, "optimizer": optimizer, "other": other}
        with Job(tmp_path, state, save_every=1) as job:
            assert job.step == first
            for _ in job.steps(last):
                step(model, optimizer)
                rates.append(optimizer.param_groups[0]["lr"])
                scheduler.step()
                other.step()
        assert state["other"] is other
        assert other() == 0.8 / 2**last
    assert rates == [0.2 / 2**index for index in range(5)]
    with pytest.raises(CheckpointError, match="LR_Scheduler"):
        Job(tmp_path, {"model": model, "optimizer": build(model)}, save_every=1).__enter__()
