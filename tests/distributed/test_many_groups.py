"""Many parameter groups, as of layer-wise decay: collectives, kernels, padding, bits and states."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardfuse
from shardfuse.engine import step as driver
from shardfuse.engine import units
from shardfuse.engine.kernels import Kernels
from shardfuse.layout import BLOCK, FlatLayout, ParamSpec
from shardfuse.optim.base import ShardedOptimizer
from shardfuse.rules import Settings
from shardfuse.rules.elementwise import AdamWRule
from tests.support.harness import STAYING, run_procs

EAGER = {"kernel": "eager"}
COMPILE = {"kernel": "compile"}
AUTO: dict[str, Any] = {}
NUM_LAYERS = 20

RULES: dict[str, dict[str, Any]] = {
    "ShardedSGD": {"momentum": 0.9},
    "ShardedAdam": {},
    "ShardedAdamW": {},
    "ShardedBertAdam": {},
    "ShardedLamb": {},
    "ShardedAdamP": {},
    "ShardedRMSprop": {},
    "ShardedRMSpropTF": {},
    "ShardedAdadelta": {},
}


def layers(num_layers: int = NUM_LAYERS) -> list[list[nn.Parameter]]:
    """Return a weight and a bias for each layer, of sizes that are no multiple of a block."""
    generator = torch.Generator().manual_seed(0)
    return [
        [nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((23, 31), (31,))]
        for _ in range(num_layers)
    ]


def groups(params: list[list[nn.Parameter]], num_groups: int) -> list[dict[str, Any]]:
    """Return layer-wise rates: two groups for each layer, one with decay; or one of all."""
    if num_groups == 1:
        return [{"params": [p for pair in params for p in pair], "lr": 0.01}]
    return [
        {"params": [param], "lr": 0.01 * 0.9**index, "weight_decay": 0.0 if is_bias else 0.1}
        for index, pair in enumerate(params)
        for is_bias, param in enumerate(pair)
    ]


def set_grads(params: list[list[nn.Parameter]], step: int) -> None:
    """Set gradients that are the same on all ranks, of whole numbers: their sums are exact."""
    generator = torch.Generator().manual_seed(step)
    for param in (param for pair in params for param in pair):
        param.grad = torch.randint(-9, 10, param.shape, generator=generator).to(param.dtype)


def values(params: list[list[nn.Parameter]]) -> list[Tensor]:
    return [param.detach().clone() for pair in params for param in pair]


def train(name: str, sharding: dict[str, Any]) -> list[Tensor]:
    params = layers()
    options = {"lr": 0.01, **RULES[name]}
    optimizer = getattr(shardfuse, name)(groups(params, 40), sharding=sharding, **options)
    for step in range(4):
        set_grads(params, step)
        optimizer.param_groups[3]["lr"] = 0.02 / (step + 1)
        if step == 2:
            params[5][0].grad = None  # its steps are fewer from now on
        optimizer.step()
    return values(params)


def one_by_one(name: str) -> list[Tensor]:
    """Return the same of an optimizer for each group, each under its own numbers."""
    params = layers()
    options = {"lr": 0.01, **RULES[name]}
    cls, sharding = getattr(shardfuse, name), {**EAGER, "process_group": "alone"}
    each = [cls([group], sharding=sharding, **options) for group in groups(params, 40)]
    for step in range(4):
        set_grads(params, step)
        each[3].param_groups[0]["lr"] = 0.02 / (step + 1)
        if step == 2:
            params[5][0].grad = None
        for optimizer in each:
            optimizer.step()
    return values(params)


@pytest.mark.parametrize(
    ("name", "kernel"),
    [
        *((name, COMPILE) for name in ("ShardedAdamW", "ShardedLamb", "ShardedAdamP")),
        *((name, EAGER) for name in RULES),
        *((name, AUTO) for name in ("ShardedSGD", "ShardedAdamW")),
    ],
)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_many_groups_are_as_many_optimizers(name: str, kernel: dict[str, Any]) -> None:
    """Groups that share kernel calls have their own numbers, and equal bits over any ranks.

    So have groups that take an operator of torch's each, as on the CPU by default. Under a
    compiled kernel all groups share calls.
    """
    expected = one_by_one(name)
    alone = train(name, {**kernel, "process_group": "alone"})
    for own, other in zip(alone, expected, strict=True):
        assert torch.allclose(own, other, rtol=1e-6, atol=1e-7)
    worlds = ((2, 0.02),) if kernel is COMPILE else ((2, 25), (3, 0.02))
    for world_size, cap in worlds:
        for rank in run_procs(world_size, train, name, {**kernel, "bucket_cap_mb": cap}):
            for own, other in zip(rank, alone, strict=True):
                if name in ("ShardedLamb", "ShardedAdamP", "ShardedBertAdam"):
                    # The order of the sums is another, of norms or products.
                    assert torch.allclose(own, other, rtol=1e-6, atol=1e-7)
                else:
                    assert torch.equal(own, other)


def by_tiles(dtype: torch.dtype, are_small: bool, tile_numel: int) -> list[Tensor]:
    """Return parameters after steps where each tile's gradients become means together; 0: never."""
    driver.CPU_TILE = tile_numel
    if not are_small:
        units._SMALL_NUMEL = 0
    if tile_numel == 0:
        driver.StepDriver._shares_mean = lambda *_: False  # type: ignore[method-assign]
    params = [[nn.Parameter(param.detach().to(dtype)) for param in pair] for pair in layers()]
    members = groups(params, 40)
    for group in members[:8]:
        group |= {"lr": 0.01, "weight_decay": 0.1}  # neighbours of equal numbers are one call
    optimizer = shardfuse.ShardedAdamW(members)
    for step in range(4):
        set_grads(params, step)
        if step == 2:
            params[5][0].grad = None
        optimizer.step()
    assert len(optimizer._shards.param_sets) > 30
    assert any(own.shares_calls for own in optimizer._shards.param_sets) == are_small
    return values(params)


@pytest.mark.parametrize("are_small", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_means_by_tiles(dtype: torch.dtype, are_small: bool) -> None:
    """The size of tiles does not change a bit, also where a call is over more than one."""
    for world_size in (1, 2):
        expected = run_procs(world_size, by_tiles, dtype, are_small, 0)
        for tile_numel in (3 * BLOCK, BLOCK):
            for own, other in zip(
                run_procs(world_size, by_tiles, dtype, are_small, tile_numel), expected, strict=True
            ):
                assert all(map(torch.equal, own, other))


@pytest.mark.cpu_only("groups take an operator each there, without tiles")
@pytest.mark.parametrize(("dtype", "num_copies"), [(torch.float32, 0), (torch.bfloat16, 1)])
def test_a_gradient_that_is_the_mean_is_not_copied(
    dtype: torch.dtype, num_copies: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one rank, in the dtype of the update: operators read it where it is."""
    original, copies = driver.mean_into, []

    def counted(*args: Any) -> None:
        copies.append(args)
        original(*args)

    monkeypatch.setattr(driver, "mean_into", counted)
    params = [[nn.Parameter(param.detach().to(dtype)) for param in pair] for pair in layers()]
    optimizer = shardfuse.ShardedAdamW(groups(params, 40), sharding={"process_group": "alone"})
    set_grads(params, 0)
    optimizer.step()
    assert len(copies) == num_copies


def refused(group: int) -> tuple[str, bool]:
    """Return the error of a step whose rule refuses one group, and whether params are as before."""
    params = layers()
    optimizer = shardfuse.ShardedAdamW(groups(params, 40))
    set_grads(params, 0)
    optimizer.step()
    before, plain = values(params), AdamWRule.settings

    def settings(self: AdamWRule, own: Any, policy: str, step: int) -> Settings:
        if own is optimizer.param_groups[group]:
            raise ArithmeticError(f"no settings for group {group}")
        return plain(self, own, policy, step)

    AdamWRule.settings = settings  # type: ignore[method-assign]
    set_grads(params, 1)
    try:
        optimizer.step()
    except ArithmeticError as error:
        STAYING.append(error)
        return str(error), all(map(torch.equal, before, values(params)))
    return "nothing", False


@pytest.mark.parametrize("group", [0, 39])
def test_a_rule_refuses_a_group(group: int) -> None:
    """Every rank raises the error, whether it has elements of the group or not, and before all."""
    assert run_procs(3, refused, group) == [(f"no settings for group {group}", True)] * 3


@contextmanager
def counted(optimizer: ShardedOptimizer) -> Iterator[Counter[str]]:
    """Count kernel calls, and collectives of ``optimizer``."""
    counts: Counter[str] = Counter()
    comm: Any = optimizer.communicator

    def counting(name: str, function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            counts[name] += 1
            return function(*args, **kwargs)

        return call

    run = Kernels.run
    Kernels.run = counting("kernels", run)  # type: ignore[method-assign]
    for name in ("reduce_scatter", "all_gather", "all_reduce"):
        setattr(comm, name, counting(name, getattr(comm, name)))
    try:
        yield counts
    finally:
        Kernels.run = run  # type: ignore[method-assign]


def count(name: str, num_groups: int, sharding: dict[str, Any]) -> Counter[str]:
    if sharding == COMPILE:
        units._SMALL_NUMEL = 0  # a compiled call is of sets of any size
    params = layers(75)
    optimizer = getattr(shardfuse, name)(groups(params, num_groups), lr=0.01, sharding=sharding)
    for step in range(2):
        set_grads(params, step)
        with counted(optimizer) as counts:
            optimizer.step()
    return counts


@pytest.mark.parametrize(
    ("name", "most", "sharding"),
    [
        ("ShardedAdamW", 2, EAGER),
        ("ShardedSGD", 2, EAGER),
        ("ShardedLamb", 4, EAGER),
        pytest.param(
            *("ShardedAdamW", 2, COMPILE), marks=pytest.mark.cpu_only("the stand-in is not traced")
        ),
    ],
)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_collectives_and_kernels_do_not_grow_with_groups(
    name: str, most: int, sharding: dict[str, Any]
) -> None:
    """150 groups have the collectives of one, and a call for each math: with decay and without."""
    one, many = (run_procs(2, count, name, number, sharding)[0] for number in (1, 150))
    assert {**many, "kernels": 0} == {**one, "kernels": 0}
    assert one["reduce_scatter"] == 1
    assert many["kernels"] <= most


@pytest.mark.parametrize("world_size", [2, 8, 4096])
def test_padding_is_of_a_dtype(world_size: int) -> None:
    """A group is padded to a block at most; only the whole is padded to blocks of all ranks."""
    specs = [
        ParamSpec(f"p{i}", (4096,), (1,), "float32", "cpu", group) for i, group in pairs(600, 300)
    ]
    layout = FlatLayout.build(specs, world_size=world_size, granularity="element")
    (flat,) = layout.flats
    assert flat.numel <= 600 * 4096 + 300 * BLOCK + world_size * BLOCK
    assert len(flat.buckets) == 1


def pairs(num_params: int, num_groups: int) -> list[tuple[int, int]]:
    return [(i, i * num_groups // num_params) for i in range(num_params)]


def test_states_are_of_groups() -> None:
    """A group has the states that its own options need, although all lie in one buffer."""
    params = layers(2)
    both = [{"params": params[0], "amsgrad": True}, {"params": params[1]}]
    optimizer = shardfuse.ShardedAdam(both, lr=0.01, sharding=EAGER)
    set_grads(params, 0)
    optimizer.step()
    state = optimizer.state_dict()["state"]
    assert [("max_exp_avg_sq" in state[i]) for i in range(4)] == [True, True, False, False]
    other = shardfuse.ShardedAdam(
        [{**g, "params": p} for g, p in zip(both, layers(2), strict=True)],
        lr=0.01,
        sharding=EAGER,
    )
    other.load_state_dict(optimizer.state_dict())
    loaded = other.state_dict()["state"]
    assert {i: set(entry) for i, entry in loaded.items()} == {i: set(e) for i, e in state.items()}


def test_momentum_of_one_group_set_later() -> None:
    """Its first update begins the momentum, undamped as in torch; the other's goes on."""
    ours, theirs = layers(2), layers(2)
    options: dict[str, Any] = {"lr": 0.1, "momentum": 0.9, "dampening": 0.5}
    built = [
        cls([{"params": p[0]}, {"params": p[1], "momentum": 0.0}], **options, **more)
        for cls, p, more in (
            (shardfuse.ShardedSGD, ours, {"sharding": EAGER}),
            (torch.optim.SGD, theirs, {}),
        )
    ]
    for step in range(4):
        for optimizer, params in zip(built, (ours, theirs), strict=True):
            set_grads(params, step)
            optimizer.param_groups[1]["momentum"] = 0.9 if step > 1 else 0.0
            optimizer.step()
    for own, other in zip(values(ours), values(theirs), strict=True):
        assert torch.allclose(own, other, rtol=1e-6, atol=1e-6)
