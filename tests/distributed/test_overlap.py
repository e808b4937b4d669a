"""Gradients leave under backward, parameters arrive under forward: the same bits, nothing stale."""

from __future__ import annotations

import copy
import ctypes
import functools
import io
import random
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import shardfuse
from shardfuse import ShardedAdamW, ShardedLamb
from shardfuse.comm import communicator_for
from shardfuse.engine.under_way import ParamUnderWay
from tests.support.harness import run_procs, run_threads
from tests.support.lazy import LazyCommunicator, Post

pytestmark = pytest.mark.timeout(120)

ON = {"overlap_grad_sync": True, "overlap_param_sync": True}
OFF = {"overlap_grad_sync": False, "overlap_param_sync": False}
STEPS = 4


class Net(nn.Module):
    """A tied matrix, blocks that may be checkpointed, a layer used now and then, one never."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.embedding = nn.Embedding(40, 32)
        self.blocks = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))
        self.norm = nn.LayerNorm(32)
        self.sometimes = nn.Linear(32, 32)
        self.never = nn.Linear(32, 40)
        with torch.no_grad():
            for param in self.parameters():
                param.copy_(torch.randint(-4, 5, param.shape, generator=generator) / 16)
        self.to(dtype)
        self.with_sometimes = False
        self.reentrant: bool | None = None

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            if self.reentrant is None:
                x = torch.tanh(block(x))
            else:
                x = checkpoint(lambda h, b=block: torch.tanh(b(h)), x, use_reentrant=self.reentrant)
        if self.with_sometimes:
            x = x + self.sometimes(x)
        logits = self.norm(x) @ self.embedding.weight.t()
        return nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens.flatten())


def tokens(rank: int, step: int, micro: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + 10 * micro + rank)
    return torch.randint(40, (2, 6), generator=generator)


Program = Callable[[Net, Any, int, int], None]


def plain(model: Net, optimizer: Any, rank: int, step: int) -> None:
    model(tokens(rank, step)).backward()


def twice(model: Net, optimizer: Any, rank: int, step: int) -> None:
    for micro in range(2):
        model(tokens(rank, step, micro)).backward()


def no_sync(model: Net, optimizer: Any, rank: int, step: int) -> None:
    with optimizer.no_sync():
        model(tokens(rank, step, 1)).backward()
    plain(model, optimizer, rank, step)


def on_one_rank(model: Net, optimizer: Any, rank: int, step: int) -> None:
    model.with_sometimes = rank == step % 2
    plain(model, optimizer, rank, step)


def without_backward(model: Net, optimizer: Any, rank: int, step: int) -> None:
    if rank > 0 or step % 2:
        plain(model, optimizer, rank, step)


def two_losses(model: Net, optimizer: Any, rank: int, step: int) -> None:
    model.sometimes(model.embedding.weight[:3]).square().mean().backward()
    plain(model, optimizer, rank, step)


def checkpointed(model: Net, optimizer: Any, rank: int, step: int) -> None:
    model.reentrant = step % 2 == 1
    plain(model, optimizer, rank, step)


def scaled(model: Net, optimizer: Any, rank: int, step: int) -> None:
    plain(model, optimizer, rank, step)
    for param in list(model.parameters())[:3]:
        assert param.grad is not None
        param.grad.mul_(0.5)


def scaled_by_data(model: Net, optimizer: Any, rank: int, step: int) -> None:
    plain(model, optimizer, rank, step)
    for param in model.parameters():
        if param.grad is not None:
            param.grad.data.mul_(0.5)


def replaced(model: Net, optimizer: Any, rank: int, step: int) -> None:
    plain(model, optimizer, rank, step)
    grad = model.norm.weight.grad
    model.norm.weight.grad = None if rank == step % 2 or grad is None else grad * 2.0


def swapped(model: Net, optimizer: Any, rank: int, step: int) -> None:
    plain(model, optimizer, rank, step)
    first, second = model.blocks[0].weight, model.blocks[1].weight
    first.grad, second.grad = second.grad, first.grad


def discarded(model: Net, optimizer: Any, rank: int, step: int) -> None:
    model(tokens(rank, step, 1)).backward()
    optimizer.zero_grad(set_to_none=step % 2 == 0)
    plain(model, optimizer, rank, step)


def clipped(model: Net, optimizer: Any, rank: int, step: int) -> None:
    plain(model, optimizer, rank, step)
    optimizer.clip_grad_norm(0.05)


def asked_for_its_norm(model: Net, optimizer: Any, rank: int, step: int) -> None:
    plain(model, optimizer, rank, step)
    optimizer.grad_norm()


def kept(model: Net, optimizer: Any, rank: int, step: int) -> None:
    before = model.blocks[0].weight.grad
    optimizer.zero_grad()
    plain(model, optimizer, rank, step)
    if before is not None:
        assert model.blocks[1].weight.grad is not None
        model.blocks[1].weight.grad += before  # what an older step made


PROGRAMS: dict[str, Program] = {
    function.__name__: function
    for function in (
        plain,
        twice,
        no_sync,
        on_one_rank,
        without_backward,
        two_losses,
        checkpointed,
        scaled,
        scaled_by_data,
        replaced,
        swapped,
        discarded,
        clipped,
        asked_for_its_norm,
        kept,
    )
}

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
) -> tuple[list[Tensor], int, list[str]]:
    """Train by a program a step; return parameters, buckets sent early, and collectives."""
    rank = dist.get_rank()
    comm = LazyCommunicator(post, rank, world_size, seed)
    model = Net(dtype)
    options = {"process_group": comm, "bucket_cap_mb": 0.004, "kernel": "eager", **sharding}
    optimizer = build(model.named_parameters(), lr=0.01, sharding=options)
    early = count_early(optimizer)
    for step, name in enumerate(names):
        model.with_sometimes, model.reentrant = False, None
        PROGRAMS[name](model, optimizer, rank, step)
        optimizer.step()
        optimizer.zero_grad()
    return [param.detach().clone() for param in model.parameters()], sum(early), comm.log


def count_early(optimizer: Any) -> list[bool]:
    """Return a list that grows by a True for every bucket that leaves under backward."""
    sends = optimizer._grads._sends
    original, found = sends._send_early, []

    def counted(**kwargs: Any) -> bool:
        found.append(original(**kwargs))
        return bool(found[-1])

    sends._send_early = counted
    return found


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


@pytest.mark.parametrize(
    "sharding",
    [
        {"grad_sync_dtype": torch.bfloat16},
        {"grad_sync_dtype": torch.float16},
        {"clip_grad_norm": 0.1},
    ],
    ids=["bf16", "fp16", "clip"],
)
def test_every_wire(sharding: dict[str, Any]) -> None:
    """Sums in another dtype, and a clip in step()."""
    names = ["plain", "no_sync", "scaled", "plain"]
    assert_same(run(2, names, {**ON, **sharding}), run(2, names, {**OFF, **sharding}))


def check_schedule(seed: int) -> None:
    """A random program on a random schedule of deliveries, against no overlap."""
    rng = random.Random(seed)
    world_size = rng.choice([2, 2, 3])
    names = [rng.choice(list(PROGRAMS)) for _ in range(rng.randrange(2, 6))]
    build = rng.choice(list(OPTIMIZERS.values()))
    sharding = {"bucket_cap_mb": rng.choice([0.002, 0.004, 0.01, 1.0])}
    found = run(world_size, names, {**ON, **sharding}, build, seed=seed)
    assert_same(found, run(world_size, names, {**OFF, **sharding}, build))


@pytest.mark.parametrize("chunk", range(25))
def test_random_schedules(chunk: int) -> None:
    """Completions come late and in any order: the same bits, no deadlock, nothing stale."""
    for seed in range(40 * chunk, 40 * chunk + 40):
        check_schedule(seed)


def test_collectives() -> None:
    """B reduce-scatters in the order of backward, one small all-reduce, B gathers in forward's."""
    for _, num_early, log in run(2, ["plain"] * 3, ON):
        last = log[log.index(next(line for line in log if "round 2" in line)) :]
        kinds = [line.split(" of ")[0] for line in last]
        buckets = kinds.count("reduce_scatter")
        assert buckets > 4
        assert kinds == (
            ["reduce_scatter"] * buckets + ["all_reduce by max"] + ["all_gather"] * buckets
        )
        places = [int(line.split("bucket ")[1].split(",")[0]) for line in last[:buckets]]
        assert places == list(range(buckets))
        assert num_early == 2 * buckets  # not in the first step, which waits for all gradients


def test_what_is_sent_twice_is_not_sent_early_for_long(caplog: pytest.LogCaptureFixture) -> None:
    """After three such steps all ranks stop alike, and a line says how to help."""
    found = run(2, ["twice"] * 6, ON)
    assert_same(found, run(2, ["twice"] * 6, OFF))
    for _, _, log in found:
        again = [line for line in log if "attempt 1" in line]
        assert [any(f"round {number}" in line for line in again) for number in range(1, 6)] == (
            [True] * 3 + [False] * 2
        )
        assert not any("round 4" in line for line in log)
    assert "no_sync()" in caplog.text


# Who reads a parameter that is under way


def functional(model: Net) -> Tensor:
    params = dict(model.named_parameters())
    result: Tensor = torch.func.functional_call(model, params, (tokens(0, 9),))
    return result


def functional_grad(model: Net) -> Tensor:
    def loss(params: dict[str, Tensor]) -> Tensor:
        result: Tensor = torch.func.functional_call(model, params, (tokens(0, 9),))
        return result

    grads: dict[str, Tensor] = torch.func.grad(loss)(dict(model.named_parameters()))
    return grads["blocks.0.weight"]


def saved(model: Net) -> Tensor:
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    return total(torch.load(file).values())


def saved_alone(model: Net) -> Tensor:
    file = io.BytesIO()
    torch.save(model.blocks[0].weight, file)
    file.seek(0)
    found: Tensor = torch.load(file, weights_only=False)
    return found.sum()


def averaged(model: Net) -> Tensor:
    means = [torch.zeros_like(param) for param in model.parameters()]
    torch._foreach_lerp_(means, list(model.parameters()), 0.5)
    return total(means)


def second_optimizer(model: Net) -> Tensor:
    params = list(model.parameters())
    for param in params:
        param.grad = torch.ones_like(param)
    torch.optim.SGD(params, lr=0.5, foreach=True).step()
    return total(params)


def scripted(model: Net) -> Tensor:
    script = torch.jit.script(model.blocks[0])
    result: Tensor = script(torch.ones(1, 32))
    return result


def address(model: Net) -> Tensor:
    weight = model.blocks[0].weight
    memory = (ctypes.c_char * (4 * weight.numel())).from_address(weight.data_ptr())
    return torch.frombuffer(bytearray(memory), dtype=torch.float32).sum()


def total(values: Any) -> Tensor:
    return torch.stack([value.detach().double().sum() for value in values]).sum()


READERS: dict[str, Callable[[Net], Any]] = {
    "forward": lambda model: model(tokens(0, 9)),
    "evaluation": lambda model: torch.no_grad()(model.eval())(tokens(0, 9)),
    "param": lambda model: model.blocks[0].weight.sum(),
    "data": lambda model: model.blocks[0].weight.data.sum(),
    "detach": lambda model: model.blocks[0].weight.detach().sum(),
    "numpy": lambda model: torch.tensor(model.blocks[0].weight.detach().numpy().sum()),
    "item": lambda model: torch.tensor(model.blocks[0].weight[0, 0].item()),
    "list": lambda model: torch.tensor(model.blocks[0].weight.tolist()),
    "dlpack": lambda model: torch.from_dlpack(model.blocks[0].weight.detach()).sum(),
    "iteration": lambda model: torch.stack([row.sum() for row in model.blocks[0].weight]),
    "view of another module": lambda model: model.embedding.weight.t() @ torch.ones(40),
    "state_dict": lambda model: total(model.state_dict().values()),
    "deepcopy": lambda model: total(copy.deepcopy(model).parameters()),
    "copy of a parameter": lambda model: copy.deepcopy(model.blocks[0].weight).sum(),
    "vector": lambda model: nn.utils.parameters_to_vector(model.parameters()).sum(),
    "functional_call": functional,
    "torch.func.grad": functional_grad,
    "torch.save": saved,
    "torch.save of one": saved_alone,
    "EMA": averaged,
    "second optimizer": second_optimizer,
    "TorchScript": scripted,
    "address": address,
}


def read(
    post: Post, lock: Any, name: str, sharding: Mapping[str, Any]
) -> tuple[Tensor, bool, list[type]]:
    """Return what a reader finds after two steps, whether all was under way, and types after it."""
    comm = LazyCommunicator(post, dist.get_rank(), 2)
    model = Net()
    options = {"process_group": comm, "bucket_cap_mb": 0.004, "kernel": "eager", **sharding}
    optimizer = ShardedAdamW(model.named_parameters(), lr=0.1, sharding=options)
    for step in range(2):
        plain(model, optimizer, dist.get_rank(), step)
        optimizer.step()
        optimizer.zero_grad()
    under_way = all(type(param) is ParamUnderWay for param in model.parameters())
    dist.barrier()
    with lock:  # one rank after the other: modules' hook is the process's
        found = READERS[name](model).detach().clone()
    dist.barrier()
    optimizer.synchronize()
    return found, under_way, [type(param) for param in model.parameters()]


@pytest.mark.parametrize("name", READERS)
def test_nobody_reads_what_has_not_arrived(name: str) -> None:
    """Every way to a parameter waits for it; what has not arrived is NaN here."""
    for (found, under_way, types), (expected, _, _) in zip(
        run_threads(2, read, Post(), threading.Lock(), name, ON),
        run_threads(2, read, Post(), threading.Lock(), name, OFF),
        strict=True,
    ):
        assert under_way
        assert torch.equal(found, expected), (found, expected)
        assert set(types) == {nn.Parameter}


def hold(post: Post, keep: str) -> tuple[bool, Tensor, Tensor]:
    """Keep a tensor that shares memory with a parameter over a step; return what it then shows."""
    comm = LazyCommunicator(post, dist.get_rank(), 2)
    model = Net()
    options = {"process_group": comm, "bucket_cap_mb": 0.004, "kernel": "eager", **ON}
    optimizer = ShardedAdamW(model.named_parameters(), lr=0.1, sharding=options)
    weight = model.blocks[0].weight
    holders: dict[str, Callable[[], Any]] = {
        "data": lambda: weight.data,
        "state_dict": lambda: model.state_dict()["blocks.0.weight"],
        "row": lambda: weight.detach()[3],
        "numpy": lambda: weight.detach().numpy(),
    }
    held = holders[keep]()
    plain(model, optimizer, dist.get_rank(), 0)
    optimizer.step()
    is_under_way = type(weight) is ParamUnderWay
    seen = torch.as_tensor(held).clone()
    expected = weight.detach()[3] if keep == "row" else weight.detach()
    return is_under_way, seen, expected.clone()


@pytest.mark.parametrize("keep", ["data", "state_dict", "row", "numpy"])
def test_memory_that_somebody_else_has(keep: str) -> None:
    """step() waits where another tensor has a parameter's memory, for that tells nobody."""
    for is_under_way, seen, expected in run_threads(2, hold, Post(), keep):
        assert not is_under_way
        assert torch.equal(seen, expected)


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
        found[collectives] = (any(early), type(model.norm.weight) is ParamUnderWay)
        optimizer.synchronize()
    return found


def test_defaults() -> None:
    """Overlap is where bytes move while a rank computes: sockets, not the memory of one host."""
    comm = communicator_for("alone", torch.device("cpu"))
    assert comm.progress == "when waited for"
    for found in run_procs(2, choices):
        assert found["pairwise"] == (True, True)
        assert found["native"] == (False, False)
        assert found["auto"] in [(False, False), (True, True)]  # by what this system allows
