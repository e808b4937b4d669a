"""Ranks that do different things: an error on every rank that names both, in every transport."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from shardfuse import ShardedAdamW, ShardedLamb, ShardedSGD
from shardfuse.comm.session import GroupState, PeerError
from tests.support.harness import run_procs

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.cpu_only("where waits do not block the host, ranks hear of it in a later call"),
]

CHOICES = ["auto", "pairwise", "native"]
SECONDS = 5.0  # on a machine that does other things, too; measured: 0.1 to 0.5


class Net(torch.nn.Module):
    """Four layers, each a group, of which the second and third are frozen at first."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.first, self.second, self.third, self.last = (torch.nn.Linear(8, 8) for _ in range(4))
        with torch.no_grad():
            for param in self.parameters():
                param.copy_(torch.randn(param.shape, generator=generator))
        self.second.requires_grad_(False)
        self.third.requires_grad_(False)

    def groups(self) -> list[dict[str, Any]]:
        """Return a group for each layer."""
        layers = self.named_children()
        return [{"params": list(layer.named_parameters(prefix=name))} for name, layer in layers]

    def train_step(self, optimizer: Any) -> None:
        """One step on this rank's own data."""
        x = torch.ones(4, 8) * (dist.get_rank() + 1)
        self.last(self.third(self.second(self.first(x)))).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def unfreeze_on_one(net: Net, optimizer: Any, is_odd: bool) -> None:
    net.second.requires_grad_(is_odd)
    net.train_step(optimizer)


def unfreeze_others(net: Net, optimizer: Any, is_odd: bool) -> None:
    (net.second if is_odd else net.third).requires_grad_(True)
    net.train_step(optimizer)


def leave_a_grad(net: Net, optimizer: Any, is_odd: bool) -> None:
    if is_odd:
        net.second.weight.grad = torch.ones(8, 8)
    net.train_step(optimizer)


def another_lr(net: Net, optimizer: Any, is_odd: bool) -> None:
    if is_odd:
        optimizer.param_groups[0]["lr"] = 0.5
    net.train_step(optimizer)


def another_param(net: Net, optimizer: Any, is_odd: bool) -> None:
    with torch.no_grad():
        net.first.weight.mul_(0.5 if is_odd else 1.0)
    net.train_step(optimizer)


def another_state(net: Net, optimizer: Any, is_odd: bool) -> None:
    optimizer.consolidate_state_dict(to=None)
    if is_odd:
        optimizer.load_state_dict(optimizer.state_dict())
    net.train_step(optimizer)


def another_call(net: Net, optimizer: Any, is_odd: bool) -> None:
    net.first.weight.grad = torch.ones(8, 8)
    optimizer.grad_norm() if is_odd else optimizer.step()


def another_bound(net: Net, optimizer: Any, is_odd: bool) -> None:
    net.first.weight.grad = torch.ones(8, 8)
    optimizer.clip_grad_norm(1.0 if is_odd else 2.0)


def consolidate_on_one(net: Net, optimizer: Any, is_odd: bool) -> None:
    if is_odd:
        optimizer.consolidate_state_dict()
    net.train_step(optimizer)


def build_on_one(net: Net, optimizer: Any, is_odd: bool) -> None:
    if is_odd:
        ShardedSGD([torch.nn.Parameter(torch.ones(3))], lr=0.1)
    net.train_step(optimizer)


def sparse_gradient(net: Net, optimizer: Any, is_odd: bool) -> None:
    grad = torch.ones(8, 8)
    net.first.weight.grad = grad.to_sparse() if is_odd else grad
    optimizer.step()


def move_a_param(net: Net, optimizer: Any, is_odd: bool) -> None:
    if is_odd:
        net.first.weight.data = net.first.weight.data.clone()
    net.train_step(optimizer)


def fail_in_closure(net: Net, optimizer: Any, is_odd: bool) -> None:
    def closure() -> None:
        if is_odd:
            raise KeyError("batch 17")

    net.first.weight.grad = torch.ones(8, 8)
    optimizer.step(closure)


# fault: what the errors of all ranks have to name.
FAULTS: dict[Callable[[Net, Any, bool], None], list[str]] = {
    unfreeze_on_one: ["rank 1 has unfrozen second.weight, second.bias", "has nothing of the kind"],
    unfreeze_others: ["unfrozen second.weight", "unfrozen third.weight"],
    leave_a_grad: ["unfrozen second.weight"],
    another_lr: ["has lr = 0.01 in group 0", "rank 1 has lr = 0.5 in group 0"],
    another_param: ["params from first.weight to last.bias, by a sample with checksum"],
    another_state: ["load_state_dict()", "step()"],
    another_call: ["grad_norm()", "step()"],
    another_bound: ["max_norm = 1.0", "max_norm = 2.0"],
    consolidate_on_one: ["consolidate_state_dict()", "step()"],
    build_on_one: ["building an optimizer", "step()"],
    sparse_gradient: ["first.weight is sparse"],
    move_a_param: ["first.weight", "re-allocated", "rebind()"],
    fail_in_closure: ["batch 17"],
}


def commit(fault: Any, optimizer_class: Any, collectives: str) -> tuple[str, float, list[Tensor]]:
    """Train, commit the fault; return the error, seconds until it, and the params then."""
    net = Net()
    sharding = {"collectives": collectives, "kernel": "eager"}
    optimizer = optimizer_class(net.groups(), lr=0.01, sharding=sharding)
    for _ in range(2):
        net.train_step(optimizer)
    dist.barrier()
    start = time.monotonic()
    try:
        fault(net, optimizer, dist.get_rank() % 2 == 1)
    except Exception as error:
        values = [param.detach().clone() for param in net.parameters()]
        return f"{type(error).__name__}: {error}", time.monotonic() - start, values
    raise AssertionError("no error")


@pytest.mark.parametrize("collectives", CHOICES)
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_every_rank_hears_of_it(fault: Any, collectives: str) -> None:
    """All ranks raise within seconds, name what differs, and no param has been changed."""
    world_size = 3 if collectives == "auto" else 2
    optimizer_class = ShardedLamb if collectives == "pairwise" else ShardedAdamW
    results = run_procs(world_size, commit, fault, optimizer_class, collectives)
    for message, seconds, values in results:
        for text in FAULTS[fault]:
            assert text in message
        assert seconds < SECONDS
        for value, other in zip(values, results[0][2], strict=True):
            assert torch.equal(value, other) or fault is another_param


def mend_and_go_on(collectives: str) -> tuple[str, list[Tensor], bool]:
    """Set lr apart, set it alike again, and train; return the error and the params."""
    net = Net()
    sharding = {"collectives": collectives, "kernel": "eager"}
    optimizer = ShardedLamb(net.groups(), lr=0.01, sharding=sharding)
    net.train_step(optimizer)
    optimizer.param_groups[0]["lr"] = 0.01 * (1 + dist.get_rank())
    with pytest.raises(PeerError) as caught:
        net.train_step(optimizer)
    optimizer.param_groups[0]["lr"] = 0.01
    optimizer.zero_grad()
    try:
        for _ in range(2):
            net.train_step(optimizer)
        optimizer.consolidate_state_dict(to=None)
    except PeerError as error:
        return str(error), [], False
    return str(caught.value), [param.detach().clone() for param in net.parameters()], True


def never_wrong(collectives: str) -> list[Tensor]:
    """What mend_and_go_on() comes to without the fault."""
    net = Net()
    sharding = {"collectives": collectives, "kernel": "eager"}
    optimizer = ShardedLamb(net.groups(), lr=0.01, sharding=sharding)
    for _ in range(3):
        net.train_step(optimizer)
    return [param.detach().clone() for param in net.parameters()]


@pytest.mark.parametrize("collectives", ["auto", "native"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_a_mended_fault_leaves_no_trace(collectives: str, world_size: int) -> None:
    """Where no connection had to be closed, ranks that all caught the error go on as if never."""
    expected = run_procs(world_size, never_wrong, collectives)[0]
    for message, values, went_on in run_procs(world_size, mend_and_go_on, collectives):
        assert went_on, message
        for value, other in zip(values, expected, strict=True):
            assert torch.equal(value, other)


@pytest.mark.gloo_only("about sockets, which it closes")
def test_closed_connections_are_said_at_every_call() -> None:
    """Through sockets the wait had to be ended by closing them; the next call says so, at once."""
    start = time.monotonic()
    for message, _, went_on in run_procs(2, mend_and_go_on, "pairwise"):
        assert not went_on
        assert "out of step since an earlier error" in message
        assert "lr = 0.02" in message
    assert time.monotonic() - start < 20


def test_a_neighbour_that_never_comes() -> None:
    """Where ranks compare in the store, one that says nothing is waited for no longer than that."""
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=0.3))
    board = GroupState(store, rank=0, world_size=2)
    with pytest.raises(PeerError, match="within the timeout"), board.region("step()"):
        board.verify_digest()


def test_ranks_that_do_not_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that goes on after an error waits for the others only so long."""
    monkeypatch.setattr("shardfuse.comm.session._REJOIN_S", 0.3)
    board = GroupState(dist.HashStore(), rank=0, world_size=2)
    with pytest.raises(ValueError, match="batch 17"), board.region("step()"):
        raise ValueError("batch 17")
    for _ in range(2):
        with pytest.raises(PeerError, match="rank 1 has not come back"), board.region("step()"):
            raise AssertionError("not reached")
