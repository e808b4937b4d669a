"""A skipped step: which parameter on which rank made all ranks skip it, and what that costs."""

from __future__ import annotations

import logging
import math
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp import GradScaler

from shardfuse import ShardedAdam, ShardedGradScaler, ShardedLamb, ShardedSGD
from tests.support.counting import Call, counted
from tests.support.harness import run_procs, run_threads
from tests.support.placing import device_type
from tests.support.runs import assert_bitwise

pytestmark = pytest.mark.timeout(60)

SCALERS = [GradScaler, ShardedGradScaler]
# Nothing is saved: 0 leaves out the line about that, which the first test of a process would get.
REPORT = {"report_overflow": True, "bucket_cap_mb": 0.01, "consolidate_every": 0}
NAMES = ["first", "second", "third"]
SIZES = {"first": (3000,), "second": (40, 50), "third": (5,)}

# {rank: {name: a value of its gradient}}, the step that is skipped, and what is to be reported.
Overflows = dict[int, dict[str, float]]
CASES: dict[str, tuple[Overflows, tuple[str, int]]] = {
    "inf": ({1: {"second": math.inf}}, ("second", 1)),
    "nan": ({2: {"first": math.nan}}, ("first", 2)),
    "minus-inf": ({0: {"third": -math.inf}}, ("third", 0)),
    "first-parameter": ({0: {"third": math.inf}, 2: {"second": math.inf}}, ("second", 2)),
    "lowest-rank": ({2: {"second": math.nan}, 1: {"second": math.inf}}, ("second", 1)),
    "all": ({rank: dict.fromkeys(NAMES, math.inf) for rank in range(3)}, ("first", 0)),
}


def build(cls: Any = ShardedSGD, **options: Any) -> tuple[dict[str, nn.Parameter], Any]:
    """Return parameters by name, the middle one in a group of its own, and their optimizer."""
    params = {name: nn.Parameter(torch.ones(size)) for name, size in SIZES.items()}
    groups = [{"params": [(name, params[name])]} for name in NAMES]
    return params, cls(groups, lr=0.5, sharding=REPORT, **options)


def backward(
    params: dict[str, nn.Parameter], scaler: GradScaler, overflows: dict[str, float]
) -> None:
    """Accumulate scaled gradients of ones, with the given value as the last element of some."""
    loss = torch.zeros(())
    for name, param in params.items():
        factor = torch.ones_like(param)
        if name in overflows:
            factor.view(-1)[-1] = overflows[name]
        loss = loss + (param * factor).sum()
    scaler.scale(loss).backward()


def train(
    scaler_class: Any, overflows: Overflows, unscale: bool, num_steps: int = 3
) -> tuple[list[Any], list[list[Tensor]]]:
    """Train; the second step overflows. Return last_overflow and the values after every step."""
    params, optimizer = build()
    scaler = scaler_class(device_type(), init_scale=8.0, growth_interval=100)
    reports, values = [], []
    for step in range(num_steps):
        backward(params, scaler, overflows.get(dist.get_rank(), {}) if step == 1 else {})
        if unscale:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        reports.append(optimizer.last_overflow)
        values.append([param.detach().clone() for param in params.values()])
    return reports, values


@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.parametrize("scaler_class", SCALERS)
@pytest.mark.parametrize("name", CASES)
def test_names_parameter_and_rank(
    name: str, scaler_class: Any, unscale: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Every rank logs and keeps the first parameter that overflowed and the lowest such rank."""
    overflows, expected = CASES[name]
    with caplog.at_level(logging.WARNING, "shardfuse"):
        results = run_threads(3, train, scaler_class, overflows, unscale)
    for reports, values in results:
        # It stays until another step is skipped.
        assert reports == [None, expected, expected]
        assert_bitwise(values[1], values[0])
        assert not torch.equal(values[2][0], values[1][0])
    records = [record for record in caplog.records if record.name == "shardfuse"]
    assert len(records) == 3
    for record in records:
        assert record.levelno == logging.WARNING
        assert f"the gradient of {expected[0]} is not finite" in record.getMessage()
        assert f"on rank {expected[1]} (" in record.getMessage()


@pytest.mark.parametrize("scaler_class", SCALERS)
def test_over_gloo(scaler_class: Any) -> None:
    """Real processes find the same, and none hangs."""
    for reports, _ in run_procs(3, train, scaler_class, CASES["lowest-rank"][0], False):
        assert tuple(reports[1]) == CASES["lowest-rank"][1]


def test_one_rank() -> None:
    """Without a process group it works too."""
    params, optimizer = build(ShardedAdam)
    scaler = GradScaler(device_type(), init_scale=8.0)
    backward(params, scaler, {"third": math.inf, "second": math.nan})
    scaler.step(optimizer)
    assert optimizer.last_overflow == ("second", 0)


def test_rank_without_gradients() -> None:
    """A rank that has no gradient at all learns which one overflowed elsewhere."""

    def skip() -> Any:
        params, optimizer = build()
        scaler = ShardedGradScaler(device_type(), init_scale=8.0)
        if dist.get_rank() == 1:
            backward(params, scaler, {"third": math.inf})
        else:
            scaler.scale(torch.ones(()))
        scaler.step(optimizer)
        return optimizer.last_overflow

    assert run_threads(2, skip) == [("third", 1)] * 2


def test_reduced_gradients() -> None:
    """Averaged gradients overflow on all ranks alike: the report names the first rank."""

    def skip() -> Any:
        param = nn.Parameter(torch.ones(3000))
        sharding = {"report_overflow": True, "grads_are_reduced": True}
        optimizer = ShardedSGD([("w", param)], 0.1, sharding=sharding)
        scaler = ShardedGradScaler(device_type(), init_scale=8.0)
        scaler.scale((param * math.inf).sum()).backward()
        scaler.step(optimizer)
        assert torch.equal(param.detach(), torch.ones(3000))
        return optimizer.last_overflow

    assert run_threads(2, skip) == [("w", 0)] * 2


def test_survives_a_new_group() -> None:
    """What was noted outlives add_param_group(), and the new parameters are looked at."""

    def skip_twice() -> list[Any]:
        params, optimizer = build()
        scaler = ShardedGradScaler(device_type(), init_scale=8.0)
        overflows = {"second": math.inf} if dist.get_rank() == 1 else {}
        backward(params, scaler, overflows)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        params["added"] = nn.Parameter(torch.ones(70))
        optimizer.add_param_group({"params": [("added", params["added"])]})
        reports = [optimizer.last_overflow]
        backward(params, scaler, {"added": math.nan} if dist.get_rank() == 0 else {})
        scaler.step(optimizer)
        return [*reports, optimizer.last_overflow]

    assert run_threads(2, skip_twice) == [[("second", 1), ("added", 0)]] * 2


def test_gradients_changed_after_unscaling(caplog: pytest.LogCaptureFixture) -> None:
    """Where the non-finite gradient is gone by step(), the log says that, on all ranks."""

    def change() -> Any:
        params, optimizer = build()
        scaler = ShardedGradScaler(device_type(), init_scale=8.0)
        backward(params, scaler, {"third": math.inf})
        scaler.unscale_(optimizer)
        params["third"].grad = torch.ones(5)
        scaler.step(optimizer)
        return optimizer.last_overflow

    with caplog.at_level(logging.WARNING, "shardfuse"):
        assert run_threads(2, change) == [None, None]
    assert caplog.text.count("no gradient is non-finite now") == 2


def calls_of_steps(scaler_class: Any, report: bool) -> list[Counter[Call]]:
    """Return the optimizer's collectives of a normal step and of a skipped one, in this order."""
    params = {name: nn.Parameter(torch.ones(size)) for name, size in SIZES.items()}
    sharding = {**REPORT, "report_overflow": report, "process_group": counted()}
    optimizer = ShardedLamb(list(params.items()), lr=0.1, sharding=sharding)
    scaler = scaler_class(device_type(), init_scale=8.0)
    counts = []
    for overflows in ({}, {"second": math.inf}):
        backward(params, scaler, overflows if dist.get_rank() == 1 else {})
        optimizer.communicator.calls.clear()
        scaler.step(optimizer)
        counts.append(Counter(optimizer.communicator.calls))
        scaler.update()
        optimizer.zero_grad()
    return counts


@pytest.mark.parametrize("scaler_class", SCALERS)
def test_costs_nothing_in_a_normal_step(scaler_class: Any) -> None:
    """A normal step has the same collectives with the report; a skipped one has one int more."""
    flags = Call("all_reduce", 3, torch.float32)
    with_report = run_threads(2, calls_of_steps, scaler_class, True)
    without = run_threads(2, calls_of_steps, scaler_class, False)
    for (normal, skipped), (plain_normal, plain_skipped) in zip(with_report, without, strict=True):
        assert normal == plain_normal
        assert normal[flags] == 1
        assert sum(normal.values()) > 3
        assert plain_skipped == Counter([flags])
        assert skipped == Counter([flags, Call("all_reduce", 1, torch.int32)])


def test_off_by_default(caplog: pytest.LogCaptureFixture) -> None:
    """Without the option a skip is silent and leaves nothing."""
    param = nn.Parameter(torch.ones(3))
    optimizer = ShardedSGD([param], 0.1)
    scaler = GradScaler(device_type())
    with caplog.at_level(logging.WARNING, "shardfuse"):
        scaler.scale((param * math.inf).sum()).backward()
        scaler.step(optimizer)
    assert optimizer.last_overflow is None
    assert not caplog.records


def test_ranks_must_agree_on_reporting() -> None:
    """If one rank would look and another not, building fails on all instead of a later hang."""

    def build_differently() -> str:
        sharding = {"report_overflow": dist.get_rank() == 0}
        try:
            ShardedSGD([nn.Parameter(torch.ones(3))], 0.1, sharding=sharding)
        except ValueError as error:
            return str(error)
        return "none"

    assert all("report_overflow" in text for text in run_threads(2, build_differently))


def test_the_option_is_a_bool() -> None:
    """Another type is refused by name."""
    with pytest.raises(TypeError, match="report_overflow"):
        ShardedSGD([nn.Parameter(torch.ones(3))], 0.1, sharding={"report_overflow": 1})


STATIC_SCALE = 1024.0


def train_static(scaler_class: Any, cls: Any, overflow_at: int | None) -> dict[str, Any]:
    """Train under a scale that never changes; a step that overflows is left out of the count."""
    params, optimizer = build(cls)
    scaler = scaler_class(device_type(), init_scale=STATIC_SCALE)
    num_steps = 3 if overflow_at is None else 4
    for step in range(num_steps):
        overflows = {"second": math.inf} if step == overflow_at and dist.get_rank() == 1 else {}
        backward(params, scaler, overflows)
        scaler.step(optimizer)
        scaler.update(STATIC_SCALE)  # torch's way to a scale of one's own
        assert scaler.get_scale() == STATIC_SCALE
        optimizer.zero_grad()
    optimizer.consolidate_state_dict(to=None)
    state = optimizer.state_dict()["state"]
    return {
        "values": [param.detach().clone() for param in params.values()],
        "states": [entry[key] for entry in state.values() for key in sorted(entry)],
        "overflow": optimizer.last_overflow,
    }


@pytest.mark.parametrize("run", [run_threads, run_procs])
@pytest.mark.parametrize("scaler_class", SCALERS)
@pytest.mark.parametrize("cls", [ShardedAdam, ShardedLamb])
def test_static_scale(cls: Any, scaler_class: Any, run: Any) -> None:
    """An overflow on one rank is skipped by all, and the rest is the run without that step."""
    results = run(2, train_static, scaler_class, cls, 1)
    reference = run(2, train_static, scaler_class, cls, None)[0]
    for result in results:
        assert tuple(result["overflow"]) == ("second", 1)
        assert_bitwise(result["values"], reference["values"])
        assert len(result["states"]) == len(reference["states"]) > 0
        for ours, theirs in zip(result["states"], reference["states"], strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    assert reference["overflow"] is None


def clip_under_other_scales() -> str:
    params, optimizer = build()
    scaler = GradScaler(device_type(), init_scale=8.0 * (1 + dist.get_rank()))
    backward(params, scaler, {})
    before = [param.detach().clone() for param in params.values()]
    optimizer.clip_grad_norm(1.0)
    try:
        scaler.step(optimizer)
    except RuntimeError as error:
        unchanged = zip(params.values(), before, strict=True)
        assert all(torch.equal(param, value) for param, value in unchanged)
        return str(error)
    return "no error"


def test_clipping_gradients_of_different_scales_is_refused() -> None:
    """Sums of gradients that each rank scaled by its own factor are not stepped with, anywhere."""
    for message in run_threads(2, clip_under_other_scales):
        assert "different loss scales" in message


def train_without_a_loss_at_first(unscale: bool) -> tuple[list[float], float]:
    """Train two steps, in the first of which rank 1 has no loss; return a value and the scale."""
    params, optimizer = build()
    scaler = ShardedGradScaler(device_type(), init_scale=8.0, growth_interval=2)
    for step in range(2):
        if step or dist.get_rank() != 1:
            backward(params, scaler, {})
        if unscale:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return [param.detach().view(-1)[0].item() for param in params.values()], scaler.get_scale()


@pytest.mark.parametrize("unscale", [False, True])
def test_a_rank_without_a_loss_in_the_first_step(unscale: bool) -> None:
    """It takes part; by torch's own assertion it would leave the others waiting."""
    for values, scale in run_procs(2, train_without_a_loss_at_first, unscale):
        assert (values, scale) == ([1 - 0.25 - 0.5] * 3, 16.0)
