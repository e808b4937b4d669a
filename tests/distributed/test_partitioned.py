"""Stage 2: gradients are summed under backward, and each rank keeps its shard: the same bits."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shardfuse import ShardedAdamW, ShardedLamb, ShardedSGD
from tests.distributed.test_overlap import OPTIMIZERS
from tests.support.harness import run_procs, run_threads
from tests.support.lazy import LazyCommunicator, Post
from tests.support.overlap import OFF, PROGRAMS, WIRES, Net

pytestmark = pytest.mark.timeout(120)

STEPS = 4


class Sums(nn.Module):
    """Parameters of many shapes whose gradients are small integers, so that sums of them are exact.

    One is cut over buckets, one is empty, one lies in memory by columns, one is used twice, one now
    and then and one never.
    """

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        shapes = [(7,), (40, 60), (0,), (1,), (30, 20), (9, 5, 3), (513,), (8, 8)]
        self.items = nn.ParameterList(nn.Parameter(torch.ones(shape)) for shape in shapes)
        self.items[4].data = torch.ones(20, 30).t()
        self.never, self.sometimes = nn.Parameter(torch.ones(600)), nn.Parameter(torch.ones(1500))
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for param in self.parameters():
                param.copy_(torch.randint(-4, 5, param.shape, generator=generator) / 16)
        self.to(dtype)

    def forward(self, seed: int, *, with_sometimes: bool = False) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        used = [*self.items, self.items[1], *([self.sometimes] if with_sometimes else [])]
        weights = [torch.randint(-3, 4, p.shape, generator=generator).to(p.dtype) for p in used]
        terms = [(param * weight).sum() for param, weight in zip(used, weights, strict=True)]
        return torch.stack(terms).sum()


def seed_of(rank: int, step: int, micro: int = 0) -> int:
    return 1000 * step + 10 * micro + rank


def one(model: Sums, optimizer: Any, rank: int, step: int) -> None:
    model(seed_of(rank, step)).backward()


def three(model: Sums, optimizer: Any, rank: int, step: int) -> None:
    for micro in range(3):
        model(seed_of(rank, step, micro), with_sometimes=micro == 1).backward()


def held_back(model: Sums, optimizer: Any, rank: int, step: int) -> None:
    with optimizer.no_sync():
        model(seed_of(rank, step, 1), with_sometimes=True).backward()
    model(seed_of(rank, step)).backward()


def here_and_there(model: Sums, optimizer: Any, rank: int, step: int) -> None:
    model(seed_of(rank, step), with_sometimes=rank == step % 2).backward()


def none_on_one(model: Sums, optimizer: Any, rank: int, step: int) -> None:
    if rank != step % 2:
        model(seed_of(rank, step)).backward()


def of_nothing(model: Sums, optimizer: Any, rank: int, step: int) -> None:
    """No rank runs a backward."""


def thrown_away(model: Sums, optimizer: Any, rank: int, step: int) -> None:
    model(seed_of(rank, step, 1), with_sometimes=True).backward()
    optimizer.zero_grad(set_to_none=step % 2 == 0)
    model(seed_of(rank, step)).backward()


def held_back_for_good(model: Sums, optimizer: Any, rank: int, step: int) -> None:
    with optimizer.no_sync():
        model(seed_of(rank, step)).backward()


def normed(model: Sums, optimizer: Any, rank: int, step: int) -> None:
    model(seed_of(rank, step)).backward()
    optimizer.grad_norm()
    model(seed_of(rank, step, 1)).backward()


def clipped(model: Sums, optimizer: Any, rank: int, step: int) -> None:
    model(seed_of(rank, step)).backward()
    optimizer.clip_grad_norm(3.0)


def set_by_hand(model: Sums, optimizer: Any, rank: int, step: int) -> None:
    model.sometimes.grad = torch.full_like(model.sometimes, float(rank + 1))
    model(seed_of(rank, step)).backward()


WORK: dict[str, Callable[..., None]] = {
    function.__name__: function
    for function in (
        one,
        three,
        held_back,
        here_and_there,
        none_on_one,
        of_nothing,
        thrown_away,
        held_back_for_good,
        normed,
        clipped,
        set_by_hand,
    )
}


def work(
    comm: Any,
    names: Sequence[str],
    sharding: Mapping[str, Any],
    build: Callable[..., Any] = ShardedAdamW,
    dtype: torch.dtype = torch.float32,
) -> list[Tensor]:
    """Do a piece of WORK a step; return the parameters and, last, the states of this rank."""
    model, rank = Sums(dtype), dist.get_rank()
    options = {"process_group": comm, "bucket_cap_mb": 0.004, "kernel": "eager", **sharding}
    optimizer = build(model.named_parameters(), lr=0.01, sharding=options)
    for step, name in enumerate(names):
        WORK[name](model, optimizer, rank, step)
        optimizer.step()
        optimizer.zero_grad()
    states = [arena.data for flat in optimizer._flats for arena in flat.states.values()]
    return [value.detach().clone() for value in [*model.parameters(), *states]]


def late(world_size: int, *args: Any, seed: int | None = None, **kwargs: Any) -> list[list[Tensor]]:
    """Work on threads whose collectives arrive when they are waited for, or at random."""
    post = Post()

    def body() -> list[Tensor]:
        return work(LazyCommunicator(post, dist.get_rank(), world_size, seed), *args, **kwargs)

    return run_threads(world_size, body)


def assert_same(found: Sequence[Sequence[Tensor]], expected: Sequence[Sequence[Tensor]]) -> None:
    for values, others in zip(found, expected, strict=True):
        for value, other in zip(values, others, strict=True):
            assert torch.equal(value, other)
            assert not value.isnan().any()


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("name", WORK)
def test_same_bits(name: str, world_size: int) -> None:
    """Stage 1 and 2, at once and not, whatever happens before step()."""
    expected = late(world_size, [name] * STEPS, OFF)
    assert_same(late(world_size, [name] * STEPS, {"stage": 2}), expected)
    assert_same(late(world_size, [name] * STEPS, {"stage": 2, "debug_sync": True}), expected)
    waiting = {"stage": 2, "overlap_grad_sync": False, "overlap_param_sync": False}
    assert_same(late(world_size, [name] * STEPS, waiting), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer(name: str, dtype: torch.dtype) -> None:
    """All classes, in both kinds of precision, with accumulation and absent gradients."""
    names = ["one", "three" if dtype == torch.float32 else "held_back", "here_and_there", "clipped"]
    build = OPTIMIZERS[name]
    found = late(2, names, {"stage": 2}, build, dtype)
    assert_same(found, late(2, names, OFF, build, dtype))


@pytest.mark.parametrize("sharding", WIRES.values(), ids=WIRES)
def test_every_wire(sharding: dict[str, Any]) -> None:
    """Sums in another dtype, and a clip in step()."""
    names = ["one", "held_back", "here_and_there", "one"]
    assert_same(late(2, names, {"stage": 2, **sharding}), late(2, names, {**OFF, **sharding}))


@pytest.mark.parametrize("chunk", range(5))
def test_random_schedules(chunk: int) -> None:
    """Completions come late and in any order: the same bits, and nobody waits for ever."""
    for seed in range(40 * chunk, 40 * chunk + 40):
        rng = random.Random(seed)
        world_size = rng.choice([2, 2, 3, 4])
        names = [rng.choice(list(WORK)) for _ in range(rng.randrange(2, 6))]
        build = rng.choice(list(OPTIMIZERS.values()))
        sizes = {"bucket_cap_mb": rng.choice([0.002, 0.004, 0.01, 1.0])}
        found = late(world_size, names, {"stage": 2, **sizes}, build, seed=seed)
        assert_same(found, late(world_size, names, {**OFF, **sizes}, build))


# A model with activations, checkpoints and a tied matrix


def train(comm: Any, name: str, sharding: Mapping[str, Any]) -> list[Tensor]:
    model, rank = Net(), dist.get_rank()
    options = {"process_group": comm, "bucket_cap_mb": 0.004, "kernel": "eager", **sharding}
    # Linear in gradients, so that what is rounded in another order stays that close.
    optimizer = ShardedSGD(model.named_parameters(), lr=0.5, momentum=0.9, sharding=options)
    for step in range(STEPS):
        model.with_sometimes, model.reentrant = False, None
        PROGRAMS[name](model, optimizer, rank, step)
        optimizer.step()
        optimizer.zero_grad()
    return [param.detach().clone() for param in model.parameters()]


UNTOUCHED = ("plain", "no_sync", "without_backward", "checkpointed", "discarded", "clipped")
"""Programs in which each gradient is one sum over two ranks."""


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize(
    "name", [*UNTOUCHED, "twice", "on_one_rank", "two_losses", "asked_for_its_norm"]
)
def test_a_model(name: str, world_size: int) -> None:
    """With real gradients: bit for bit where sums are the same, else to fp32's rounding."""

    def body(post: Post, sharding: Mapping[str, Any]) -> list[Tensor]:
        return train(LazyCommunicator(post, dist.get_rank(), world_size), name, sharding)

    expected = run_threads(world_size, functools.partial(body, Post(), OFF))
    found = run_threads(world_size, functools.partial(body, Post(), {"stage": 2}))
    for values, others in zip(found, expected, strict=True):
        for value, other in zip(values, others, strict=True):
            if name in UNTOUCHED:
                assert torch.equal(value, other)
            torch.testing.assert_close(value, other, rtol=1e-5, atol=1e-6)


# Over real transports


def work_here(sharding: Mapping[str, Any]) -> list[Tensor]:
    names = ["one", "three", "held_back", "here_and_there", "none_on_one", "clipped", "thrown_away"]
    return work(None, names, sharding, ShardedLamb)


@pytest.mark.parametrize("collectives", ["auto", "pairwise", "native"])
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_over_gloo(collectives: str, world_size: int) -> None:
    """Real processes: through shared memory, sockets, and gloo's own collectives."""
    base = {"collectives": collectives}
    expected = run_procs(world_size, work_here, {**base, **OFF})
    assert_same(run_procs(world_size, work_here, {**base, "stage": 2}), expected)


def test_one_rank_keeps_its_gradients() -> None:
    """Alone there is nothing to share: stage 2 is stage 1, and p.grad stays."""
    model = Sums()
    optimizer = ShardedAdamW(model.parameters(), sharding={"stage": 2})
    model(0).backward()
    assert model.items[0].grad is not None
    optimizer.step()


# What goes over the wire


def test_collectives() -> None:
    """B reduce-scatters a backward, one small all-reduce and B gathers a step."""
    post = Post()

    def body() -> list[str]:
        comm = LazyCommunicator(post, dist.get_rank(), 2)
        work(comm, ["one", "three"], {"stage": 2})
        return comm.log

    for log in run_threads(2, body):
        kinds = [line.split(" of ")[0] for line in log if not line.startswith("broadcast")]
        kinds = kinds[kinds.index("reduce_scatter") :]
        buckets = kinds.index("all_reduce by max")
        assert buckets > 4
        step = ["all_reduce by max", *["all_gather"] * buckets]
        scatters = ["reduce_scatter"] * buckets
        assert kinds == [*scatters, *step, *scatters * 3, *step]


def test_late_gradients_alone_are_sent_again() -> None:
    """A layer that the step before did not use costs its own buckets once more, not a round."""
    post = Post()

    def body() -> list[str]:
        comm = LazyCommunicator(post, dist.get_rank(), 2)
        train(comm, "on_one_rank", {"stage": 2})
        return comm.log

    for log in run_threads(2, body):
        again = [line for line in log if line.startswith("reduce") and "attempt 0" not in line]
        assert 0 < len(again) < 2 * (STEPS - 1)


# Added and unfrozen while gradients are held


def test_groups_and_unfrozen_params() -> None:
    """What joins later has its gradients summed like all others."""

    def body(post: Post, sharding: Mapping[str, Any]) -> list[Tensor]:
        rank = dist.get_rank()
        comm = LazyCommunicator(post, rank, 2)
        model, more = Sums(), Sums()
        model.items[1].requires_grad_(False)
        options = {"process_group": comm, "bucket_cap_mb": 0.004, "kernel": "eager", **sharding}
        optimizer = ShardedAdamW(model.parameters(), lr=0.01, sharding=options)
        for step in range(4):
            model(seed_of(rank, step)).backward()
            if step == 1:
                model.items[1].requires_grad_(True)
                model(seed_of(rank, step, 1)).backward()
            if step == 2:
                optimizer.add_param_group({"params": list(more.parameters()), "lr": 0.02})
            if step >= 2:
                more(seed_of(rank, step, 2)).backward()
            optimizer.step()
            optimizer.zero_grad()
        return [p.detach().clone() for p in [*model.parameters(), *more.parameters()]]

    expected = run_threads(2, functools.partial(body, Post(), OFF))
    assert_same(run_threads(2, functools.partial(body, Post(), {"stage": 2})), expected)


class Checkpointed(nn.Module):
    """All gradients come from backwards inside another, which tells of none until it ends."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(6))
        for param in self.parameters():
            nn.init.constant_(param, 0.01)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(lambda h, inner=layer: torch.tanh(inner(h)), x, use_reentrant=True)
        return x.square().mean()


def save_in_between(collectives: str, saves: bool) -> list[Tensor]:
    """Train; with ``saves``, make state dicts between backward and step()."""
    model, rank = Checkpointed(), dist.get_rank()
    options = {"stage": 2, "collectives": collectives, "bucket_cap_mb": 0.01, "kernel": "eager"}
    optimizer = ShardedAdamW(model.named_parameters(), lr=0.01, sharding=options)
    for step in range(3):
        generator = torch.Generator().manual_seed(10 * step + rank)
        model(torch.randn(4, 64, generator=generator).requires_grad_()).backward()
        if saves:
            optimizer.consolidate_state_dict(to=None)
            optimizer.sharded_state_dict()
        optimizer.step()
        optimizer.zero_grad()
    return [param.detach().clone() for param in model.parameters()]


@pytest.mark.parametrize("collectives", ["auto", "pairwise", "native"])
def test_saving_while_gradients_are_under_way(collectives: str) -> None:
    """Collectives of a save pass those of gradients, part of which have not left."""
    expected = run_procs(2, save_in_between, collectives, False)
    assert_same(run_procs(2, save_in_between, collectives, True), expected)


def unfreeze_after_a_clip(adds_group: bool) -> None:
    """What begins to train has no gradient in this step, and its decay begins with the first."""
    first, second = nn.Parameter(torch.ones(1000)), nn.Parameter(torch.ones(1000))
    second.requires_grad_(adds_group)
    params = [first] if adds_group else [first, second]
    optimizer = ShardedAdamW(params, lr=0.1, weight_decay=0.5, sharding={"stage": 2})
    first.sum().backward()
    optimizer.clip_grad_norm(1.0)
    if adds_group:
        optimizer.add_param_group({"params": [second]})
    second.requires_grad_(True)
    optimizer.step()
    assert optimizer.state[second]["step"] == 0
    assert torch.equal(second.detach(), torch.ones(1000))
    assert not torch.equal(first.detach(), torch.ones(1000))


@pytest.mark.parametrize("adds_group", [False, True])
def test_params_that_come_between_a_clip_and_its_step(adds_group: bool) -> None:
    run_threads(2, unfreeze_after_a_clip, adds_group)
