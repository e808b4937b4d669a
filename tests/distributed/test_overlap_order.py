"""Buckets that leave under backward keep their order beside all else that ranks communicate.

With a backend's own collectives, which know no labels: gloo's, or those of `pytest --backend hccl`.
"""

from __future__ import annotations

import errno
import gc
import inspect
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardfuse import ShardedAdam, ShardedSGD
from shardfuse.comm.native import ProcessGroupCommunicator
from shardfuse.comm.session import PeerError
from tests.support import contract, placing
from tests.support.harness import run_procs
from tests.support.overlap import OFF, ON, count_early

pytestmark = pytest.mark.timeout(120)

STEPS = 4

OWN = ProcessGroupCommunicator.__name__

NATIVE: dict[str, Any] = {"collectives": "native", "bucket_cap_mb": 0.004, "kernel": "eager"}


class Mean(torch.autograd.Function):
    """The mean over ranks, in forward and in backward, as SyncBatchNorm takes it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        total = x.clone()
        dist.all_reduce(total)
        return total / dist.get_world_size()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        total = grad.clone()
        dist.all_reduce(total)
        return total / dist.get_world_size()


class Synced(nn.Module):
    """Layers with a mean over ranks between them, and a branch that a rank may leave out.

    The branch is registered last, so that its bucket is the first in the order of backward.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))
        self.branch = nn.Linear(32, 32)

    def forward(self, x: Tensor, has_branch: bool) -> Tensor:
        for layer in self.layers:
            x = Mean.apply(torch.tanh(layer(x)))
        return (x + self.branch(x) if has_branch else x).square().mean()


def batch(step: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
    return torch.randn(4, 32, generator=generator)


def values(*models: nn.Module) -> list[Tensor]:
    return [param.detach().clone() for model in models for param in model.parameters()]


def with_a_synced_model(sharding: dict[str, Any]) -> tuple[list[Tensor], int]:
    """One rank lacks the branch, another in each step: its buckets leave at another time."""
    model = Synced()
    optimizer = ShardedAdam(model.named_parameters(), lr=0.01, sharding=NATIVE | sharding)
    early = count_early(optimizer) if sharding.get("stage") != 2 else [True]
    for step in range(STEPS):
        has_branch = sharding.get("stage") == 2 or dist.get_rank() != step % 2
        model(batch(step), has_branch).backward()
        optimizer.step()
        optimizer.zero_grad()
    return values(model), sum(early)


def with_two_optimizers(sharding: dict[str, Any]) -> tuple[list[Tensor], int]:
    """One backward reaches both, whose buckets are complete in another order on each rank."""
    models = [Synced(), Synced()]
    optimizers = [
        ShardedAdam(model.named_parameters(), lr=0.01, sharding=NATIVE | sharding)
        for model in models
    ]
    early = count_early(optimizers[0]) if sharding.get("stage") != 2 else [True]
    for step in range(STEPS):
        is_whole = sharding.get("stage") == 2
        one, other = (
            model(batch(step), is_whole or dist.get_rank() == rank)
            for rank, model in enumerate(models)
        )
        (one + other).backward()
        for optimizer in reversed(optimizers):
            optimizer.step()
            optimizer.zero_grad()
    return values(*models), sum(early)


def with_an_evaluation_on_one_rank(sharding: dict[str, Any]) -> tuple[list[Tensor], int]:
    """The first rank reads all parameters between steps, while the other goes on."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(4)))
    optimizer = ShardedAdam(model.named_parameters(), lr=0.01, sharding=NATIVE | sharding)
    early = count_early(optimizer) if sharding.get("stage") != 2 else [True]
    for step in range(STEPS):
        model(batch(step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            with torch.no_grad():
                model(batch(step))
    return values(model), sum(early)


def with_a_rank_without_backward(sharding: dict[str, Any]) -> tuple[list[Tensor], int]:
    """It sends in step(); before that the ranks add up their losses."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(4)))
    optimizer = ShardedAdam(model.named_parameters(), lr=0.01, sharding=NATIVE | sharding)
    early = count_early(optimizer) if sharding.get("stage") != 2 else [True]
    for step in range(STEPS):
        loss = model(batch(step)).square().mean()
        if step == 0 or dist.get_rank() != step % 2:
            loss.backward()
        total = loss.detach().clone()
        dist.all_reduce(total)
        optimizer.step()
        optimizer.zero_grad()
    return values(model), sum(early)


PROGRAMS: dict[str, Callable[[dict[str, Any]], tuple[list[Tensor], int]]] = {
    function.__name__: function
    for function in (
        with_a_synced_model,
        with_two_optimizers,
        with_an_evaluation_on_one_rank,
        with_a_rank_without_backward,
    )
}


@pytest.mark.parametrize(
    ("name", "stage"),
    # At stage 2 ranks wait under backward for one that runs none.
    [(n, s) for n in PROGRAMS for s in (1, 2) if (n, s) != ("with_a_rank_without_backward", 2)],
)
def test_beside_other_collectives(name: str, stage: int) -> None:
    """No rank hangs, none takes another's message, and the bits are those without overlap."""
    program = PROGRAMS[name]
    found = run_procs(2, program, {**ON, "stage": stage}, timeout=60.0)
    expected = run_procs(2, program, {**OFF, "stage": stage}, timeout=60.0)
    for (tensors, num_early), (others, _) in zip(found, expected, strict=True):
        assert num_early > 0
        assert all(map(torch.equal, tensors, others))


def groups_of_optimizers() -> list[int]:
    """Return how many process groups there are after each of several optimizers."""
    numbers = []
    for number in range(5):
        model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(4)))
        optimizer = ShardedSGD(model.named_parameters(), lr=0.1, sharding={**NATIVE, **ON})
        for step in range(2):
            model(batch(step)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        if number == 3 and dist.get_rank() == 0:  # on this rank alone, and no step follows
            model(batch(2)).square().mean().backward()
        del optimizer, model
        gc.collect()
        numbers.append(len(dist.distributed_c10d._world.pg_names))
    return numbers


def test_groups_are_used_again() -> None:
    """Each takes memory of the device. One in which a rank has sent alone is left alone."""
    for first, *later in run_procs(2, groups_of_optimizers):
        assert first == 2
        assert later == [2, 2, 2, 3]


def sender_over(group: Any) -> str:
    """Return what an optimizer over a part of the ranks sends its gradients through."""
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        return "none"
    model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(4)))
    sharding = {**NATIVE, **ON, "process_group": group}
    optimizer = ShardedSGD(model.named_parameters(), lr=0.1, sharding=sharding)
    for _ in range(2):
        model(batch(0)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    sender = optimizer._grads._sender
    assert isinstance(sender, ProcessGroupCommunicator)
    return "shared" if sender is optimizer.communicator else "own"


def group_without_counterpart() -> str:
    """Return what an optimizer sends through after one of its ranks alone has made a group."""
    alone = dist.new_group([0])
    found = sender_over(dist.new_group([0, 1]))
    del alone
    return found


COUNTS_GROUPS_MADE = "group_count" in inspect.getsource(dist.distributed_c10d._hash_ranks_to_str)
"""Whether torch names a group by the groups that were made (2.14), and not by those that exist."""


def test_ranks_in_different_numbers_of_groups() -> None:
    """torch names a group by their number, and would wait for a name that no peer has."""
    expected = "own" if COUNTS_GROUPS_MADE else "shared"
    assert run_procs(3, group_without_counterpart) == [expected, expected, "none"]


def group_after_one_of_two() -> str:
    """Return what an optimizer sends through after two of three ranks have made a group."""
    if dist.get_rank() != 1:
        dist.destroy_process_group(dist.new_group([0, 2], use_local_synchronization=True))
    return sender_over(dist.group.WORLD)


def test_ranks_that_have_made_different_numbers_of_groups() -> None:
    """Where torch counts those, it would wait for a name that no peer has."""
    expected = "shared" if COUNTS_GROUPS_MADE else "own"
    assert run_procs(3, group_after_one_of_two) == [expected] * 3


def group_after_a_destroyed_one() -> tuple[str, list[float]]:
    """Return what a second optimizer sends through, and losses of its steps."""
    early = dist.new_group()
    models = [nn.Sequential(*(nn.Linear(32, 32) for _ in range(4))) for _ in range(2)]
    sharding = {**NATIVE, **ON}
    first = ShardedSGD(models[0].named_parameters(), lr=0.1, sharding=sharding)
    dist.destroy_process_group(early)
    second = ShardedSGD(models[1].named_parameters(), lr=0.1, sharding=sharding)
    losses = []
    for _ in range(3):
        for model, optimizer in zip(models, (first, second), strict=True):
            loss = model(batch(0)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        losses.append(float(loss.detach()))
    sender: Any = second._grads._sender
    return "shared" if sender is second.communicator else "own", losses


def test_a_group_that_was_destroyed_before() -> None:
    """Before 2.14, torch names a group by the number of groups, and so as another one."""
    for sender, losses in run_procs(2, group_after_a_destroyed_one):
        assert sender == ("own" if COUNTS_GROUPS_MADE else "shared")
        assert losses[2] < losses[1] < losses[0]


def one_after_another(kinds: Sequence[str]) -> list[tuple[str, Tensor]]:
    """Return the kind of each optimizer's communicator of buckets, and the params it trains."""
    found = []
    for kind in kinds:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(4)))
        sharding = {**NATIVE, **ON, "collectives": kind}
        optimizer: Any = ShardedSGD(model.named_parameters(), lr=0.1, sharding=sharding)
        for step in range(4):
            model(batch(step)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        sender = type(optimizer._grads._sender).__name__
        found.append((sender, torch.cat([p.detach().flatten() for p in model.parameters()])))
        del model, optimizer
        gc.collect()
    assert len(dist.distributed_c10d._world.pg_names) == 2
    return found


@pytest.mark.gloo_only("other backends have no messages with labels")
@pytest.mark.parametrize("first", ["native", "pairwise"])
def test_one_group_for_both_kinds_of_messages(first: str) -> None:
    """The group of a freed optimizer is used again, by any kind and with nothing left over."""
    kinds = [first, "pairwise", "native", "pairwise"]
    expected = ["PairwiseCommunicator" if k == "pairwise" else OWN for k in kinds]
    for found in run_procs(2, one_after_another, kinds):
        assert [sender for sender, _ in found] == expected
        for _, values in found:
            assert torch.equal(values, found[0][1])


def after_a_failed_group(kind: str) -> tuple[str, float, list[float]]:
    """Return a build's error and its seconds, and losses of steps after a second build."""
    model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(4)))
    sharding = {**NATIVE, **ON, "collectives": kind}
    original = dist.new_group

    def failing(*args: Any, **options: Any) -> Any:
        raise OSError(errno.EMFILE, "Too many open files")

    if dist.get_rank() == 1:
        dist.new_group = failing
    begin_s = time.monotonic()
    with pytest.raises(PeerError if dist.get_rank() != 1 else OSError) as raised:
        ShardedSGD(model.named_parameters(), lr=0.1, sharding=sharding)
    seconds = time.monotonic() - begin_s
    dist.new_group = original
    optimizer = ShardedSGD(model.named_parameters(), lr=0.1, sharding=sharding)
    losses = []
    for _ in range(3):
        loss = model(batch(0)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    assert len(dist.distributed_c10d._world.pg_names) == 1
    return str(raised.value), seconds, losses


@pytest.mark.gloo_only("other backends have no messages with labels")
@pytest.mark.parametrize("kind", ["native", "pairwise"])
def test_a_group_that_one_rank_cannot_make(kind: str) -> None:
    """All ranks raise long before the timeout; a second optimizer does without the group."""
    for text, seconds, losses in run_procs(3, after_a_failed_group, kind):
        assert "Too many open files" in text
        assert seconds < 30.0  # of 60
        assert losses[2] < losses[1] < losses[0]


def by_default() -> tuple[bool, bool]:
    model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(4)))
    options = {"bucket_cap_mb": 0.004, "kernel": "eager"}
    optimizer = ShardedSGD(model.named_parameters(), lr=0.1, sharding=options)
    early = count_early(optimizer)
    for step in range(2):
        model(batch(step)).square().mean().backward()
        num_early = sum(early)
        if placing.on_device():
            # Kernels that the stand-in has not run yet hold their tensors, which step() would take
            # for views of the user's.
            torch.accelerator.synchronize()
        optimizer.step()
        optimizer.zero_grad()
    is_pending = type(model[0].weight) is not nn.Parameter
    optimizer.synchronize()
    return num_early > len(optimizer.layout.buckets) * int(placing.on_device()), is_pending


@pytest.mark.skipif(contract.chosen() == "gloo", reason="of HCCL and NCCL")
def test_default_of_hccl() -> None:
    """Both directions overlap; on a device from the second step on."""
    for sends_early, is_pending in run_procs(2, by_default):
        assert sends_early
        assert is_pending
