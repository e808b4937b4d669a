"""Ranks that are not alike find out at construction, together; parameters start out equal."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from shardfuse import ShardedAdam, ShardedLamb, ShardedSGD
from tests.support import contract, placing
from tests.support.harness import run_procs, run_threads

pytestmark = pytest.mark.timeout(60)

RUNNERS = [pytest.param(run_threads, id="threads"), pytest.param(run_procs, id="procs")]
Runner = Callable[..., list[Any]]

# Ranks that hang are ended well before pytest's own timeout.
LIMIT_S = 30.0


def standard() -> list[tuple[str, Parameter]]:
    shapes = {"in.weight": (30, 40), "in.bias": (40,), "out.weight": (40, 50), "out.bias": (50,)}
    return [(name, Parameter(torch.ones(shape))) for name, shape in shapes.items()]


def build_odd(change: str) -> ShardedAdam:
    """Build what the last rank has in mind, which is not what the others have."""
    named = standard()
    options: dict[str, Any] = {}
    if change == "shape":
        named[2] = ("out.weight", Parameter(torch.ones(50, 40)))
    elif change == "order":
        named[1], named[3] = named[3], named[1]
    elif change == "dtype":
        named[2] = ("out.weight", Parameter(torch.ones(40, 50, dtype=torch.bfloat16)))
    elif change == "fewer":
        del named[3]
    elif change == "more":
        named.append(("extra.weight", Parameter(torch.ones(2, 2))))
    elif change == "frozen":
        named[2][1].requires_grad_(False)
    elif change == "name":
        named[2] = ("output.weight", named[2][1])
    elif change == "groups":
        return ShardedAdam([{"params": named[:2]}, {"params": named[2:]}])
    elif change == "memory format":
        named[2] = ("out.weight", Parameter(torch.ones(50, 40).t()))
    else:
        assert change == "bucket"
        options = {"bucket_cap_mb": 0.01}
    return ShardedAdam(named, sharding=options)


# What the last rank does differently, and the first parameter (or option) that differs.
CHANGES = {
    "shape": "out.weight",
    "order": "in.bias",
    "dtype": "out.weight",
    "fewer": "out.bias",
    "more": "extra.weight",
    "frozen": "out.weight",
    "name": "out.weight",
    "groups": "out.weight",
    "memory format": "out.weight",
    "bucket": "bucket_cap_mb",
}


def train_once(optimizer: torch.optim.Optimizer, params: list[Parameter]) -> list[Tensor]:
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    return [param.detach().clone() for param in params]


def disagree(change: str) -> tuple[str, str]:
    """Return the kind and text of the error of this rank; then train, to show the group is fine."""
    last = dist.get_rank() == dist.get_world_size() - 1
    kind, text = "none", ""
    try:
        if last:
            build_odd(change)
        else:
            ShardedAdam(standard())
    except Exception as error:
        kind, text = type(error).__name__, str(error)
    params = [param for _, param in standard()]
    after = train_once(ShardedSGD(params, 0.5), params)
    assert all(torch.equal(value, torch.full_like(value, 0.5)) for value in after)
    return kind, text


@pytest.mark.parametrize("change", CHANGES)
def test_disagreement_is_an_error_on_every_rank(change: str) -> None:
    """All ranks raise ValueError naming the first parameter that differs; the group survives."""
    for kind, text in run_threads(3, disagree, change, timeout=LIMIT_S):
        assert kind == "ValueError"
        assert CHANGES[change] in text
        # Equal entries are listed once, however many ranks have them.
        listed = text.split("ranks 0-1 have ", 1)[1].split("; rank 2 has ", 1)[0]
        if change not in ("more", "fewer"):
            assert CHANGES[change] in listed


@pytest.mark.parametrize("change", ["shape", "order", "fewer"])
def test_disagreement_over_gloo(change: str) -> None:
    """Real processes raise as the threads do, and none hangs."""
    for kind, text in run_procs(2, disagree, change, timeout=LIMIT_S):
        assert kind == "ValueError"
        assert CHANGES[change] in text


HYPERPARAMETERS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"weight_decay": 0.1}, {"weight_decay": 0.1, "variant": "apex"}),
    ({}, {"use_global_grad_norm": True}),
    ({}, {"adam": True}),
    ({"weight_decay": 0.1}, {"weight_decay": 0.2}),
    ({}, {"betas": (0.8, 0.999)}),
    ({}, {"sharding": {"overlap_grad_sync": False}}),
    ({}, {"sharding": {"overlap_param_sync": False}}),
    ({}, {"sharding": {"debug_sync": True}}),
]


def differ_in_options(options: dict[str, Any], other: dict[str, Any]) -> str:
    try:
        ShardedLamb(standard(), **(other if dist.get_rank() == 1 else options))
    except ValueError as error:
        return str(error)
    return "none"


@pytest.mark.parametrize(("options", "other"), HYPERPARAMETERS, ids=str)
def test_hyperparameters_are_compared(options: dict[str, Any], other: dict[str, Any]) -> None:
    """Ranks with other options of the same optimizer would train apart: they raise instead."""
    texts = run_threads(2, differ_in_options, options, other, timeout=LIMIT_S)
    assert all("disagree" in text for text in texts)
    assert run_threads(2, differ_in_options, other, other, timeout=LIMIT_S) == ["none", "none"]


def fail_alone(what: str) -> tuple[str, str]:
    rank = dist.get_rank()
    named: list[tuple[str, Parameter]] = standard()
    options: dict[str, Any] = {}
    params: Any = named
    if rank == 1:
        if what == "lr":
            options["lr"] = -1.0
        elif what == "sharding":
            options["sharding"] = {"bucket_cap_mb": -1}
        elif what == "empty":
            params = []
        elif what == "float64":
            params = [*named, ("wide.weight", Parameter(torch.ones(3).double()))]
        else:
            assert what == "group"
            params = [{"params": named, "betas": (1.0, 0.9)}]
    try:
        ShardedAdam(params, **options)
    except Exception as error:
        return type(error).__name__, str(error)
    return "none", ""


ALONE: dict[str, tuple[str, str]] = {
    "lr": ("ValueError", "Invalid learning rate: -1.0"),
    "sharding": ("ValueError", "bucket_cap_mb"),
    "empty": ("ValueError", "empty parameter list"),
    "float64": ("TypeError", "wide.weight"),
    "group": ("ValueError", "Invalid beta parameter at index 0: 1.0"),
}
# Threads cover every case; processes are slow.
ALONE_CASES = [(run_threads, what) for what in ALONE] + [(run_procs, "lr"), (run_procs, "float64")]


@pytest.mark.parametrize(("run", "what"), ALONE_CASES)
def test_one_rank_fails_alone(run: Runner, what: str) -> None:
    """The rank at fault raises its own error, the others one that names the rank and quotes it."""
    kind, text = ALONE[what]
    results = run(3, fail_alone, what, timeout=LIMIT_S)
    if what == "sharding" and contract.chosen() != "gloo" and not placing.on_device():
        # It does not know how the others build. Threads of gloo do not compare; on a device, they
        # compare when this rank has failed.
        kind = "PeerError"
    assert results[1][0] == kind
    for own_kind, own_text in results:
        assert text in own_text
        assert own_kind in (kind, "RuntimeError")
    assert all("rank 1" in results[rank][1] for rank in (0, 2))


def add_group(what: str) -> tuple[str, int]:
    rank = dist.get_rank()
    params = [param for _, param in standard()]
    optimizer = ShardedSGD(params, 0.5)
    late = [Parameter(torch.full((3000,), 7.0 + rank)), Parameter(torch.ones(5))]
    if what == "shape" and rank == 1:
        late[0] = Parameter(torch.ones(3001))
    kind = "none"
    try:
        group = {"params": late, "lr": -1.0 if what == "lr" and rank == 1 else 0.25}
        optimizer.add_param_group(group)
    except Exception as error:
        kind = type(error).__name__
    members = params + (late if kind == "none" else [])
    after = train_once(optimizer, members)
    assert torch.equal(after[0], torch.full((30, 40), 0.5))
    if kind == "none":
        assert torch.equal(after[4], torch.full((3000,), 6.75))
    return kind, len(optimizer.param_groups)


def test_add_param_group() -> None:
    """A late group is broadcast and trained; one that ranks disagree about is taken back."""
    assert run_threads(3, add_group, "good") == [("none", 2)] * 3
    for what in ("shape", "lr"):
        for kind, num_groups in run_threads(3, add_group, what, timeout=LIMIT_S):
            assert kind in ("ValueError", "RuntimeError")
            assert num_groups == 1


def start_apart(ranks: list[int], broadcast: bool) -> list[Tensor] | None:
    rank = dist.get_rank()
    group = dist.new_group(ranks) if len(ranks) < dist.get_world_size() else None
    if rank not in ranks:
        return None
    params = [Parameter(torch.full(s, float(rank))) for s in [(50, 60), (), (0,), (7,)]]
    params.append(Parameter(torch.full((40,), float(rank), dtype=torch.bfloat16)))
    params.append(Parameter(torch.full((40,), float(rank)), requires_grad=False))
    sharding = {"process_group": group, "broadcast_params": broadcast}
    ShardedAdam(params, sharding=sharding)
    return [param.detach().clone() for param in params]


@pytest.mark.parametrize("run", RUNNERS)
@pytest.mark.parametrize("ranks", [[0, 1, 2], [1, 2], [2]], ids=str)
def test_parameters_come_from_the_first_rank(run: Runner, ranks: list[int]) -> None:
    """Parameters, frozen ones too, take the values of the group's first rank, not of rank 0."""
    for rank, values in enumerate(run(3, start_apart, ranks, True, timeout=LIMIT_S)):
        if rank in ranks:
            assert all(torch.equal(v, torch.full_like(v, float(ranks[0]))) for v in values)


def test_broadcast_can_be_turned_off() -> None:
    """With broadcast_params=False construction leaves every rank its own values."""
    for rank, values in enumerate(run_threads(3, start_apart, [0, 1, 2], False)):
        assert all(torch.equal(v, torch.full_like(v, float(rank))) for v in values)


def outside() -> str:
    group = dist.new_group([0])
    try:
        ShardedSGD([Parameter(torch.ones(3))], 0.1, sharding={"process_group": group})
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "none"


def test_not_a_member() -> None:
    """A rank outside the process group it names is told so; the member trains alone."""
    results = run_threads(2, outside, timeout=LIMIT_S)
    assert results[0] == "none"
    assert results[1].startswith("ValueError")


def train_in_subgroup() -> list[Tensor] | None:
    rank = dist.get_rank()
    group = dist.new_group([1, 2])
    if rank == 0:
        return None
    params = [Parameter(torch.zeros(5000)), Parameter(torch.zeros(3))]
    optimizer = ShardedSGD(params, 1.0, sharding={"process_group": group})
    for param in params:
        param.grad = torch.full_like(param, float(rank))
    optimizer.step()
    return [param.detach().clone() for param in params]


@pytest.mark.parametrize("run", RUNNERS)
def test_subgroup_averages_over_its_own_ranks(run: Runner) -> None:
    """The mean is over the sub-group's two ranks, whatever the world's size."""
    for values in run(3, train_in_subgroup, timeout=LIMIT_S)[1:]:
        assert all(torch.equal(v, torch.full_like(v, -1.5)) for v in values)


def build_of_a_set() -> tuple[str, str]:
    """Return what this rank hears where the last one gives a set, at once and in a later group."""
    first, second = ([Parameter(torch.ones(3, 2)) for _ in range(2)] for _ in range(2))
    kind: Any = set if dist.get_rank() == dist.get_world_size() - 1 else list
    with pytest.raises((TypeError, RuntimeError)) as built:
        ShardedAdam(kind(first))
    optimizer = ShardedAdam(first)
    with pytest.raises((TypeError, RuntimeError)) as added:
        optimizer.add_param_group({"params": kind(second)})
    return str(built.value), str(added.value)


@pytest.mark.parametrize("run", RUNNERS)
def test_one_rank_alone_gives_its_parameters_in_no_order(run: Runner) -> None:
    """The others, whose parameters have the same shapes, hear of it by that rank's number."""
    words = "need to be organized in ordered collections, but are a set"
    *others, last = run(3, build_of_a_set, timeout=LIMIT_S)
    assert all(text.startswith("optimizer parameters") and words in text for text in last)
    assert all("rank 2: TypeError" in text and words in text for pair in others for text in pair)
