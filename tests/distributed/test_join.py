"""Uneven inputs under torch.distributed.algorithms.Join: a rank without any left shadows steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.distributed.algorithms.join import Join, Joinable

from shardfuse import ShardedAdam, ShardedAdamP, ShardedLamb, ShardedSGD
from tests.support.harness import run_procs
from tests.support.placing import device_type

pytestmark = pytest.mark.timeout(120)

CLASSES: dict[str, tuple[Any, dict[str, Any]]] = {
    "sgd": (ShardedSGD, {"momentum": 0.9, "sharding": {"clip_grad_norm": 0.5}}),
    "adam": (ShardedAdam, {"sharding": {"bucket_cap_mb": 0.001}}),
    "lamb": (ShardedLamb, {"use_global_grad_norm": True, "weight_decay": 0.1}),
    "adamp": (ShardedAdamP, {}),
    "native": (ShardedAdam, {"sharding": {"collectives": "native"}}),
}
BATCHES = {0: 2, 1: 5, 2: 3}


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 40), nn.Tanh(), nn.Linear(40, 1))


def loss_of(model: nn.Module, rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    loss: Tensor = model(torch.randn(4, 8, generator=generator)).square().mean()
    return loss


def values_of(model: nn.Module) -> list[Tensor]:
    return [param.detach().clone() for param in model.parameters()]


def train_joined(name: str, num_epochs: int) -> list[Tensor]:
    """Train with as many batches as BATCHES says; save after each epoch."""
    cls, options = CLASSES[name]
    model = net()
    optimizer = cls(model.parameters(), lr=0.05, **options)
    assert isinstance(optimizer, Joinable)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    rank = dist.get_rank()
    for _ in range(num_epochs):
        with Join([optimizer]):
            for step in range(BATCHES[rank]):
                optimizer.zero_grad()
                loss_of(model, rank, step).backward()
                optimizer.step()
        optimizer.consolidate_state_dict()
        scheduler.step()
    return values_of(model)


def train_padded(name: str, num_epochs: int) -> list[Tensor]:
    """Do the same with gradients of zero where a rank has no batch left."""
    cls, options = CLASSES[name]
    model = net()
    optimizer = cls(model.parameters(), lr=0.05, **options)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    rank, most = dist.get_rank(), max(BATCHES[r] for r in range(dist.get_world_size()))
    for _ in range(num_epochs):
        for step in range(most):
            optimizer.zero_grad()
            (loss_of(model, rank, step) * (step < BATCHES[rank])).backward()
            optimizer.step()
        scheduler.step()
    return values_of(model)


def train_both(num_epochs: int) -> dict[str, tuple[list[Tensor], list[Tensor]]]:
    return {
        name: (train_joined(name, num_epochs), train_padded(name, num_epochs)) for name in CLASSES
    }


@pytest.mark.parametrize("world_size", [2, 3])
def test_joined_ranks_count_as_zero(world_size: int) -> None:
    """The mean is over all ranks, as DDP's join takes it by default; over two epochs."""
    ranks = run_procs(world_size, train_both, 2, timeout=100)
    for results in ranks:
        for name, (joined, padded) in results.items():
            for a, b, first in zip(joined, padded, ranks[0][name][0], strict=True):
                assert torch.equal(a, b), name
                assert torch.equal(a, first), name


def misuse() -> dict[str, str]:
    """Return the error of every misuse that would leave a rank waiting, or train it apart."""
    rank = dist.get_rank()
    found: dict[str, str] = {}

    def attempt(name: str, body: Any, num_steps: tuple[int, int] = (1, 1)) -> None:
        model = net()
        optimizer = ShardedSGD(model.parameters(), 0.1)
        scaler = GradScaler(device_type(), init_scale=8.0)
        try:
            with Join([optimizer]):
                for step in range(num_steps[rank]):
                    loss = loss_of(model, rank, step)
                    (scaler.scale(loss) if name == "scaler" else loss).backward()
                    body(optimizer, scaler)
        except (RuntimeError, ValueError) as error:
            found[name] = f"{type(error).__name__}: {error}"

    attempt("clip", lambda optimizer, scaler: optimizer.clip_grad_norm(1.0))
    attempt("norm", lambda optimizer, scaler: optimizer.grad_norm())
    attempt("save", lambda optimizer, scaler: optimizer.consolidate_state_dict())
    attempt("sharded", lambda optimizer, scaler: optimizer.sharded_state_dict())
    attempt("scaler", lambda optimizer, scaler: scaler.step(optimizer))

    def scheduled(optimizer: Any, scaler: Any) -> None:
        optimizer.step()
        optimizer.param_groups[0]["lr"] *= 0.5

    attempt("scheduler", scheduled, (1, 3))
    try:
        Join([ShardedSGD(net().parameters(), 0.1, sharding={"grads_are_reduced": True})])
    except RuntimeError as error:
        found["reduced"] = str(error)
    return found


@pytest.mark.cpu_only("where waits do not block the host, ranks hear of it in a later call")
def test_misuse_is_told_on_all_ranks() -> None:
    """Collectives that a joined rank takes no part in, other hyper-parameters, DDP's gradients."""
    for found in run_procs(2, misuse, timeout=60):
        for name in ("clip", "norm", "save", "sharded", "scaler"):
            assert "refused inside Join" in found[name], found
        assert "rank 0 has lr = 0.05 in group 0; rank 1 has lr = 0.025" in found["scheduler"], found
        assert "grads_are_reduced=True" in found["reduced"]


def other_uses() -> None:
    """Leave the context, throw in it, and use the optimizer without it."""
    rank = dist.get_rank()
    model = net()
    optimizer = ShardedSGD(model.parameters(), 0.1)

    def loop(num_steps: int) -> None:
        for step in range(num_steps):
            loss_of(model, rank, step).backward()
            optimizer.step()
            optimizer.zero_grad()

    with Join([optimizer], enable=False):
        loop(2)
        optimizer.grad_norm()
    with Join([optimizer]):
        loop(2 + rank)
    loss_of(model, rank, 9).backward()
    optimizer.clip_grad_norm(1.0)
    optimizer.step()
    with pytest.raises(RuntimeError, match="exhausted"):  # noqa: SIM117
        with Join([optimizer], throw_on_early_termination=True):
            loop(1 + rank)


def test_other_uses() -> None:
    """After it, clipping works again; disabled or throwing, it does as torch says."""
    run_procs(2, other_uses, timeout=60)
