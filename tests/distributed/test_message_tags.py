"""Messages in flight have tags of their own by construction, not by the hash in them.

[Note: message tags] in comm/numbers.py. With the hashes set to zero, ranks that are out of step
would no longer be told apart, but a correct program must train bit for bit as before.
"""

from __future__ import annotations

import functools
import gc
import random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from shardfuse import ShardedAdam, ShardedLamb, ShardedSGD
from shardfuse.comm import gloo
from shardfuse.comm.numbers import Channels
from shardfuse.comm.session import PeerError
from tests.support.harness import run_procs
from tests.support.overlap import ON

pytestmark = [
    pytest.mark.timeout(180),
    pytest.mark.gloo_only("other backends have no tags"),
    pytest.mark.cpu_only("messages go from rank to rank on the CPU alone"),
]

SOCKETS: dict[str, Any] = {**ON, "collectives": "pairwise", "kernel": "eager"}


def without_hashes() -> None:
    """Have equal hashes in all tags."""
    tag, unlabelled = Channels.tag, gloo.unlabelled_tag
    Channels.tag = lambda self, channel, generation, digest: tag(self, channel, generation, 0)
    gloo.unlabelled_tag = lambda generation, digest: unlabelled(generation, 0)


class Trained:
    """A model of its own and its optimizer; it counts buckets that were sent again."""

    def __init__(self, cls: Any, seed: int, *, cap: float, **sharding: Any) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(4)))
        self.model[1].requires_grad_(False)
        options = {**SOCKETS, "bucket_cap_mb": cap, "consolidate_every": 0, **sharding}
        self.optimizer = cls(self.model.named_parameters(), lr=0.01, sharding=options)

    def step(self, number: int, *, edits: bool = False, fails: bool = False) -> None:
        generator = torch.Generator().manual_seed(100 * number + dist.get_rank())
        self.model(torch.randn(4, 32, generator=generator)).square().mean().backward()
        if edits:  # after they were sent
            for param in self.model[2:].parameters():
                assert param.grad is not None
                param.grad.mul_(0.5)
        if fails:  # on all ranks: else the connections would be closed
            self.optimizer.param_groups[0]["lr"] = float("nan")
        try:
            self.optimizer.step()
        except (ValueError, PeerError):
            assert fails
        else:
            assert not fails
        self.optimizer.param_groups[0]["lr"] = 0.01
        self.optimizer.zero_grad()

    def values(self) -> Tensor:
        return torch.cat([p.detach().flatten() for p in self.model.parameters()])


def train(*, has_hashes: bool) -> list[Tensor]:
    """Return the params of optimizers that take turns, fail, grow, and are built anew."""
    if not has_hashes:
        without_hashes()
    kinds: list[tuple[Any, dict[str, Any]]] = [
        (ShardedAdam, {"cap": 0.004}),
        (ShardedLamb, {"cap": 0.008}),
        (ShardedSGD, {"cap": 0.004, "stage": 2}),
        (ShardedAdam, {"cap": 0.008, "param_sync_bits": 8, "grad_sync_bits": 8}),
    ]
    done = []
    for seed in range(2):  # the second time, receives of the freed ones are still posted
        jobs = [Trained(cls, seed, **options) for cls, options in kinds]
        for number in range(8):
            for job in jobs[:: -1 if number % 2 else 1]:  # not in the order of posted receives
                if number == 3:
                    job.model[1].requires_grad_(True)
                edits = number in (2, 5) and job is not jobs[2]
                job.step(number, edits=edits, fails=number in (4, 6))
            jobs[number % 4].optimizer.grad_norm()  # without a label
        done += [job.values() for job in jobs]
        del jobs, job
        gc.collect()
    return done


def train_on_a_row(*, has_hashes: bool) -> list[Tensor]:
    """As train(), of one optimizer over a mesh, and of another over this rank's row of it."""
    if not has_hashes:
        without_hashes()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    row = mesh["shard"].get_group()
    jobs = [
        Trained(ShardedAdam, 0, cap=0.008, mesh=mesh),
        Trained(ShardedAdam, 1, cap=0.004, process_group=row),
    ]
    for number in range(6):
        for job in jobs[:: -1 if number % 2 else 1]:  # not in the order of posted receives
            job.step(number, fails=number == 3)
    return [job.values() for job in jobs]


def test_a_row_of_a_mesh_and_a_group_of_its_own() -> None:
    """The ranks of the mesh count the channels of one optimizer, and those of a row the other's."""
    expected = run_procs(4, functools.partial(train_on_a_row, has_hashes=True))
    found = run_procs(4, functools.partial(train_on_a_row, has_hashes=False))
    for values, others in zip(expected, found, strict=True):
        for value, other in zip(values, others, strict=True):
            assert torch.equal(value, other)


@pytest.mark.parametrize("world_size", [2, 3])
def test_no_two_messages_in_flight_have_one_tag(world_size: int) -> None:
    """Four optimizers, resent buckets, survived errors, new parameters and freed optimizers."""
    expected = run_procs(world_size, functools.partial(train, has_hashes=True))
    found = run_procs(world_size, functools.partial(train, has_hashes=False))
    for values, others in zip(expected, found, strict=True):
        assert len(values) == len(others) == 8
        for value, other in zip(values, others, strict=True):
            assert torch.equal(value, other)
            assert value.isfinite().all()


def test_channels_are_not_used_again() -> None:
    """Neither in a later generation, nor by a source that has reserved later."""
    draw = random.Random(0)
    channels, used = Channels(), set[int]()
    of_sources: list[range] = []
    for generation in range(40):
        for _ in range(draw.randrange(3)):
            count = draw.randrange(1, 20)
            first = channels.reserve(count)
            of_sources.append(range(first, first + count))
        tags = [channels.tag(c, generation, 0) for source in of_sources for c in source]
        assert len(set(tags)) == len(tags)
        assert used.isdisjoint(tags)
        used |= set(tags)
        # The next one begins before the ranks have met in it.
        early = [channels.tag(c, generation + 1, 0) for source in of_sources for c in source]
        assert used.isdisjoint(early)
        channels.restart(generation, channels.num_reserved)
        assert early == [channels.tag(c, generation + 1, 0) for s in of_sources for c in s]
