"""Gradients leave under backward, parameters arrive under forward: the same bits, nothing stale."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import shardfuse
from shardfuse import ShardedAdamW, ShardedLamb
from shardfuse.comm import communicator_for
from shardfuse.comm.transport import AsyncModel
from shardfuse.engine.gather import PendingParam
from tests.support.harness import run_procs, run_threads
from tests.support.lazy import LazyCommunicator, Post
from tests.support.overlap import (
    OFF,
    ON,
    PROGRAMS,
    WIRES,
    Net,
    count_early,
    plain,
    without_backward,
)
from tests.support.placing import device_type

pytestmark = pytest.mark.timeout(120)

STEPS = 4

SENT_ONCE = ("plain", "no_sync", "clipped", "asked_for_its_norm")
"""Programs in which gradients do not change after they were sent."""


def train(
    post: Post,
    world_size: int,
    names: Sequence[str],
    sharding: Mapping[str, Any],
    build: Callable[..., Any] = ShardedAdamW,
    dtype: torch.dtype = torch.float32,
    seed: int | None = None,
    used_last: bool = False,
) -> tuple[list[Tensor], int, list[str]]:
    """Train by a program a step; return parameters, buckets sent early, and collectives."""
    rank = dist.get_rank()
    comm = LazyCommunicator(post, rank, world_size, seed)
    model = Net(dtype, used_last=used_last)
    options = {"process_group": comm, "bucket_cap_mb": 0.004, "kernel": "eager", **sharding}
    optimizer = build(model.named_parameters(), lr=0.01, sharding=options)
    early = count_early(optimizer)
    for step, name in enumerate(names):
        model.with_sometimes, model.reentrant = False, None
        PROGRAMS[name](model, optimizer, rank, step)
        optimizer.step()
        optimizer.zero_grad()
    return [param.detach().clone() for param in model.parameters()], sum(early), comm.log


def run(world_size: int, *args: Any, **kwargs: Any) -> list[Any]:
    return run_threads(world_size, functools.partial(train, Post(), world_size, *args, **kwargs))


def assert_same(found: Sequence[Any], expected: Sequence[Any]) -> None:
    for (values, _, _), (others, _, _) in zip(found, expected, strict=True):
        for value, other in zip(values, others, strict=True):
            assert torch.equal(value, other)
            assert not value.isnan().any()


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("name", PROGRAMS)
def test_same_bits(name: str, world_size: int) -> None:
    """Whatever is done between backward and step(): on, off and waiting at once give one result."""
    expected = run(world_size, [name] * STEPS, OFF)
    found = run(world_size, [name] * STEPS, ON)
    assert_same(found, expected)
    assert_same(run(world_size, [name] * STEPS, {**ON, "debug_sync": True}), expected)
    assert all(num_early == 0 for _, num_early, _ in expected)
    assert any(num_early > 0 for _, num_early, _ in found)
    if name in SENT_ONCE:
        assert not any("attempt 1" in line for _, _, log in found for line in log)


OPTIMIZERS: dict[str, Callable[..., Any]] = {
    name: getattr(shardfuse, name)
    for name in shardfuse.__all__
    if name.startswith("Sharded") and name not in ("ShardedOptimizer", "ShardedGradScaler")
} | {
    "lamb_global_norm": functools.partial(ShardedLamb, use_global_grad_norm=True),
    "lamb_google": functools.partial(ShardedLamb, variant="google"),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer(name: str, dtype: torch.dtype) -> None:
    """All classes, in both kinds of precision, with accumulation and absent gradients."""
    names = ["plain", "no_sync", "on_one_rank", "twice"]
    build = OPTIMIZERS[name]
    found = run(2, names, ON, build, dtype)
    assert_same(found, run(2, names, OFF, build, dtype))
    assert found[0][1] > 0


@pytest.mark.parametrize("sharding", WIRES.values(), ids=WIRES)
def test_every_wire(sharding: dict[str, Any]) -> None:
    """Sums in another dtype, and a clip in step(); also where each bucket is waited for at once."""
    names = ["plain", "no_sync", "scaled", "plain"]
    expected = run(2, names, {**OFF, **sharding})
    for how in (ON, {**ON, "debug_sync": True}, {**OFF, "debug_sync": True}):
        assert_same(run(2, names, {**how, **sharding}), expected)


QUANTIZED = [sharding for name, sharding in WIRES.items() if "bit" in name]


def check_schedule(seed: int) -> None:
    """A random program on a random schedule of deliveries, against no overlap."""
    rng = random.Random(seed)
    world_size = rng.choice([2, 2, 3])
    names = [rng.choice(list(PROGRAMS)) for _ in range(rng.randrange(2, 6))]
    build = rng.choice(list(OPTIMIZERS.values()))
    sharding = {
        "bucket_cap_mb": rng.choice([0.002, 0.004, 0.01, 1.0]),
        **rng.choice([{}, {}, {"param_sync_dtype": torch.bfloat16}, *QUANTIZED]),
    }
    used_last = rng.random() < 0.5
    found = run(world_size, names, {**ON, **sharding}, build, seed=seed, used_last=used_last)
    assert_same(found, run(world_size, names, {**OFF, **sharding}, build, used_last=used_last))


@pytest.mark.parametrize("chunk", range(100))
def test_random_schedules(chunk: int) -> None:
    """Completions come late and in any order: the same bits, no deadlock, nothing stale."""
    for seed in range(10 * chunk, 10 * chunk + 10):
        check_schedule(seed)


def test_collectives() -> None:
    """B reduce-scatters in the order of backward, one small all-reduce, B gathers in forward's."""
    for _, num_early, log in run(2, ["plain"] * 3, ON):
        last = log[log.index(next(line for line in log if "round 3" in line)) :]
        (asked,) = (i for i, line in enumerate(last) if line.startswith("all_reduce by max"))
        del last[asked]
        kinds = [line.split(" of ")[0] for line in last]
        buckets = kinds.count("reduce_scatter")
        assert buckets > 4
        # What backward completes with its last gradient waits until that word is on its way.
        assert 1 < asked < buckets
        assert kinds == ["reduce_scatter"] * buckets + ["all_gather"] * buckets
        places = [int(line.split("bucket ")[1].split(",")[0]) for line in last[:buckets]]
        assert places == list(range(buckets))
        assert num_early == 2 * asked  # not in the first step, which waits for all gradients


def test_what_is_sent_twice_is_not_sent_early_for_long(caplog: pytest.LogCaptureFixture) -> None:
    """After three such steps all ranks stop alike, and a line says how to help."""
    found = run(2, ["twice"] * 6, ON)
    assert_same(found, run(2, ["twice"] * 6, OFF))
    for _, _, log in found:
        again = [line for line in log if "attempt 1" in line]
        assert [any(f"round {number}" in line for line in again) for number in range(2, 7)] == (
            [True] * 3 + [False] * 2
        )
        assert not any("round 5" in line for line in log)
    assert "no_sync()" in caplog.text


# Over real sockets


def train_over_sockets(sharding: Mapping[str, Any]) -> tuple[list[Tensor], int]:
    """Train on this rank over gloo; return the parameters and buckets sent early."""
    model = Net()
    options = {"bucket_cap_mb": 0.004, "kernel": "eager", **sharding}
    optimizer = ShardedLamb(model.named_parameters(), lr=0.01, sharding=options)
    early = count_early(optimizer)
    for step, name in enumerate(["plain", "no_sync", "on_one_rank", "scaled", "plain"]):
        model.with_sometimes = False
        PROGRAMS[name](model, optimizer, dist.get_rank(), step)
        optimizer.step()
        optimizer.zero_grad()
    return [param.detach().clone() for param in model.parameters()], sum(early)


@pytest.mark.parametrize("collectives", ["pairwise", "native"])
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_over_gloo(collectives: str, world_size: int) -> None:
    """Real processes: by pairs of ranks in any order, and by gloo's own collectives in theirs."""
    if collectives == "native" and world_size > 2:
        pytest.skip("gloo adds up three ranks in an order of its own, which depends on sizes")
    base = {"collectives": collectives}
    off = run_procs(world_size, train_over_sockets, {**base, **OFF})
    for (values, num_early), (expected, _) in zip(
        run_procs(world_size, train_over_sockets, {**base, **ON}), off, strict=True
    ):
        assert num_early > 0
        for value, other in zip(values, expected, strict=True):
            assert torch.equal(value, other)


def train_two_by_one_communicator(is_shared: bool) -> list[Tensor]:
    """Train two models of the same shapes, whose backwards come before both steps."""
    models = [Net(), Net()]
    comm = communicator_for(None, torch.device(device_type()), "pairwise")
    options = {"bucket_cap_mb": 0.004, "kernel": "eager", "collectives": "pairwise", **ON}
    if is_shared:
        options["process_group"] = comm
    optimizers = [ShardedAdamW(m.named_parameters(), lr=0.01, sharding=options) for m in models]
    for step in range(4):
        for number, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            plain(model, optimizer, dist.get_rank(), 10 * number + step)
        for optimizer in reversed(optimizers):
            optimizer.step()
            optimizer.zero_grad()
    return [param.detach().clone() for model in models for param in model.parameters()]


def test_optimizers_that_share_a_communicator() -> None:
    """Their messages are told apart, and what arrives lies apart."""
    expected = run_procs(2, train_two_by_one_communicator, False)
    for values, others in zip(
        run_procs(2, train_two_by_one_communicator, True), expected, strict=True
    ):
        assert all(map(torch.equal, values, others))


def choices() -> dict[str, tuple[bool, bool]]:
    """Return, for each setting, whether gradients and parameters overlap by default."""
    found = {}
    for collectives in ("auto", "pairwise", "native"):
        model = Net()
        options = {"collectives": collectives, "bucket_cap_mb": 0.004, "kernel": "eager"}
        optimizer = ShardedAdamW(model.named_parameters(), lr=0.1, sharding=options)
        early = count_early(optimizer)
        for step in range(2):  # the first waits for all gradients, also those that never come
            plain(model, optimizer, dist.get_rank(), step)
            optimizer.step()
        found[collectives] = (any(early), type(model.norm.weight) is PendingParam)
        optimizer.synchronize()
    return found


@pytest.mark.gloo_only("compares its own collectives with pairs of ranks")
def test_defaults() -> None:
    """Overlap is where bytes move while a rank computes: sockets, not the memory of one host."""
    comm = communicator_for("alone", torch.device(device_type()))
    assert comm.async_model is AsyncModel.BLOCKING
    for found in run_procs(2, choices):
        assert found["pairwise"] == (True, True)
        assert found["native"] == (False, False)
        assert found["auto"] in [(False, False), (True, True)]  # by what this system allows


def unfreeze(post: Post, sharding: Mapping[str, Any]) -> list[Tensor]:
    """Unfreeze a block after a backward whose buckets have left on one rank, add a group later."""
    rank = dist.get_rank()
    model = Net()
    model.blocks[1].requires_grad_(False)
    options = {
        "process_group": LazyCommunicator(post, rank, 2),
        "bucket_cap_mb": 0.004,
        "kernel": "eager",
        **sharding,
    }
    late = torch.nn.Parameter(torch.ones(3000))
    optimizer = ShardedAdamW(model.named_parameters(), lr=0.01, sharding=options)
    for step in range(6):
        if step == 2:
            model.blocks[1].requires_grad_(True)
        without = step == 2 and rank == 1
        (without_backward if without else plain)(model, optimizer, 0 if without else rank, step)
        if step == 4:
            optimizer.add_param_group({"params": [("late", late)]})
        if step > 4:
            late.grad = torch.full_like(late, float(rank + step))
        optimizer.step()
        optimizer.zero_grad()
    return [param.detach().clone() for param in [*model.parameters(), late]]


def test_what_joins_while_buckets_are_under_way() -> None:
    """A layer that is unfrozen after backward, a group that is added: the order begins anew."""
    for found, expected in zip(
        run_threads(2, unfreeze, Post(), ON), run_threads(2, unfreeze, Post(), OFF), strict=True
    ):
        assert all(map(torch.equal, found, expected))
