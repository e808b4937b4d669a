"""watch_step() and StepMonitor: norms of one step, beside a step that stays what it is."""

from __future__ import annotations

import functools
import json
import math
import os
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join

from shardfuse import (
    ShardedAdam,
    ShardedAdamP,
    ShardedAdamW,
    ShardedBertAdam,
    ShardedGradScaler,
    ShardedLamb,
    ShardedSGD,
)
from shardfuse.comm.session import PeerError
from shardfuse.training import StepMonitor, StepRecord
from tests.support.counting import counted
from tests.support.harness import RanksFailedError, run_procs, run_threads
from tests.support.models import MIXED, mean_grads, rank_grads
from tests.support.runs import Case, assert_bitwise

pytestmark = pytest.mark.timeout(120)

STEP = 3  # "late" parameters have a gradient then, and those of "some" have none
NAMES = [entry.name for entry in sorted(MIXED, key=lambda entry: entry.group)]
ORDER = [index for index, _ in sorted(enumerate(MIXED), key=lambda pair: pair[1].group)]

CASES: dict[str, Case] = {
    "sgd": Case(ShardedSGD, {"lr": 0.1, "momentum": 0.9}),
    "adamw": Case(ShardedAdamW, {"lr": 0.05}),
    "maximize": Case(ShardedAdam, {"lr": 0.05, "maximize": True}),
    "bertadam": Case(ShardedBertAdam, {"lr": 0.05, "max_grad_norm": 0.1}),
    "adamp": Case(ShardedAdamP, {"lr": 0.05}),
    "lamb": Case(ShardedLamb, {"lr": 0.05, "use_global_grad_norm": True}),
    "lamb-google": Case(ShardedLamb, {"lr": 0.05, "variant": "google"}, named=True),
    "adamw-bf16": Case(ShardedAdamW, {"lr": 0.05}, dtype=torch.bfloat16),
}
SHARDINGS: dict[str, dict[str, Any]] = {
    "buckets": {"bucket_cap_mb": 0.04},
    "stage 2": {"bucket_cap_mb": 0.04, "stage": 2},
}


def train(case: Case, sharding: dict[str, Any], watches: bool) -> dict[str, Any]:
    """Make four steps, the last one watched; return what was, what is and what was noted."""
    params = case.param_set()
    options = {"kernel": "eager", **sharding, "process_group": counted()}
    optimizer = case.build(params, options)
    calls: list[Any] = optimizer.communicator.calls
    for step in range(STEP + 1):
        before = params.values()
        grads = rank_grads("floats", dist.get_world_size(), dist.get_rank(), step)
        backward(params.params, grads)
        norms = optimizer.watch_step() if watches and step == STEP else None
        calls.clear()
        optimizer.step()
        sent = Counter((call.op, call.numel) for call in calls)
        optimizer.zero_grad()
    found = {"before": before, "after": params.values(), "sent": sent}
    if norms is not None:
        rows = (norms.names, norms.grad, norms.weight, norms.update, norms.vanished, norms.ratio)
        found["norms"] = [row if isinstance(row, tuple | None) else row.cpu() for row in rows]
        found["clip"] = None if norms.clip is None else norms.clip.item()
    return found


def backward(params: list[nn.Parameter], grads: Any) -> None:
    """Have autograd set the gradients, which stage 2 takes from it."""
    pairs = [(p, g) for p, g in zip(params, grads, strict=True) if g is not None]
    torch.stack([(p.float() * g).sum() for p, g in pairs]).sum().backward()


def norm_of(values: Tensor | None) -> float:
    return 0.0 if values is None else values.double().norm().item()


@pytest.mark.parametrize("sharding", SHARDINGS)
@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("name", CASES)
def test_norms_are_those_of_whole_tensors(name: str, world_size: int, sharding: str) -> None:
    """Each is that of fp64 sums over the whole tensor, and the step is the same bit for bit."""
    case = CASES[name]
    if sharding == "stage 2" and (world_size == 1 or name == "bertadam"):
        pytest.skip("stage 2 is tested on three ranks")
    ranks = run_threads(world_size, train, case, SHARDINGS[sharding], True)
    plain = run_threads(world_size, train, case, SHARDINGS[sharding], False)
    for found, unwatched in zip(ranks, plain, strict=True):
        assert_bitwise(found["after"], unwatched["after"])
        more = found["sent"] - unwatched["sent"]
        assert more == Counter({("all_reduce", 4 * len(MIXED)): 1} if world_size > 1 else more)
        names, grad, weight, update, vanished, _ = found["norms"]
        assert list(names) == NAMES or not case.named
        wanted = mean_grads("floats", world_size, STEP, dtype=case.dtype)
        frozen = [MIXED[index].role == "frozen" for index in ORDER]
        before = [found["before"][index] for index in ORDER]
        after = [found["after"][index] for index in ORDER]
        rounds = case.dtype != torch.float32 and world_size > 1  # torch's threaded group sums so
        reference = expected([wanted[index] for index in ORDER])
        rtol = 1e-2 if rounds else 1e-6
        torch.testing.assert_close(grad.double(), reference, rtol=rtol, atol=0)
        held = [None if is_frozen else v for v, is_frozen in zip(before, frozen, strict=True)]
        if case.dtype == torch.float32:
            torch.testing.assert_close(weight.double(), expected(held), rtol=1e-6, atol=0)
            moved = [a - b for a, b in zip(after, before, strict=True)]
            torch.testing.assert_close(update.double(), expected(moved), rtol=1e-6, atol=0)
            assert not vanished.any()
        else:
            torch.testing.assert_close(weight.double(), expected(held), rtol=2e-2, atol=0)


def expected(values: list[Tensor | None]) -> Tensor:
    return torch.tensor([norm_of(value) for value in values], dtype=torch.float64)


def test_clips_are_told() -> None:
    """The factor of a global clip, or the smallest of several; none where nothing clips."""
    norms = {name: run_threads(2, train, CASES[name], {}, True)[0] for name in CASES}
    total = math.sqrt(sum(norm_of(g) ** 2 for g in mean_grads("floats", 2, STEP)))
    assert norms["lamb"]["clip"] == pytest.approx(1 / total, rel=1e-5)
    assert 0 < norms["bertadam"]["clip"] < 0.1
    assert norms["adamw"]["clip"] is None
    optioned = run_threads(2, train, CASES["adamw"], {"clip_grad_norm": 0.5}, True)[0]
    assert optioned["clip"] == pytest.approx(0.5 / total, rel=1e-5)


def test_trust_ratios_are_those_of_the_optimizer() -> None:
    for found in run_threads(2, ratios):
        assert found["noted"] == found["told"]
        assert 0 < min(found["noted"]) < max(found["noted"])


def ratios() -> dict[str, Any]:
    params = CASES["lamb"].param_set()
    optimizer = CASES["lamb"].build(params, {})
    params.assign(rank_grads("floats", 2, dist.get_rank(), 0))
    norms = optimizer.watch_step()
    assert not norms.has_stepped
    with pytest.raises(RuntimeError, match="No step"):
        norms.weight.sum()
    optimizer.step()
    assert norms.ratio is not None
    return {"noted": norms.ratio.tolist(), "told": list(optimizer.trust_ratios().values())}


def test_bf16_updates_that_vanish_are_counted() -> None:
    """A learning rate of 1e-6 moves masters and no bf16 parameter; one of 0.1 moves all."""
    for rate, share in ((1e-6, 1.0), (0.1, 0.0)):
        for record in run_threads(2, vanishing, rate):
            assert record.tensors["weight"].vanished == pytest.approx(share, abs=0.01)
            assert record.tensors["weight"].update > 0


def vanishing(rate: float) -> StepRecord:
    weight = nn.Parameter(torch.linspace(1, 2, 4000).to(torch.bfloat16))
    optimizer = ShardedAdamW([("weight", weight)], lr=rate, weight_decay=0.0)
    monitor = StepMonitor(optimizer, every=1)
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    return monitor.close()[0]


# The monitor


def judged(optimizer_class: Any, options: dict[str, Any], dtype: torch.dtype) -> list[list[str]]:
    """Return what a monitor says after each of 12 steps, all of them watched."""
    weight = nn.Parameter(torch.linspace(1, 2, 4000).to(dtype))
    optimizer = optimizer_class([("weight", weight)], **options)
    monitor = StepMonitor(optimizer, every=1)
    said = []
    for step in range(12):
        weight.grad = torch.full_like(weight, 1.0 + step)
        optimizer.step()
        if weight.device.type != "cpu":  # where records come when the device has made them
            torch.get_device_module(weight.device).synchronize()
        assert [record.step for record in monitor.take()] == [step + 1]
        said.append(monitor.warnings())
    return said


@pytest.mark.parametrize(
    ("optimizer_class", "options", "dtype", "wanted"),
    [
        (ShardedLamb, {"lr": 1e-3}, torch.float32, "clamp_value=10"),
        (ShardedLamb, {"lr": 1e-3, "clamp_value": math.inf}, torch.float32, None),
        (ShardedLamb, {"lr": 1e-3, "variant": "apex", "max_coeff": 1e-3, "weight_decay": 0.1},
         torch.float32, "max_coeff=0.001"),
        (ShardedAdamW, {"lr": 1e-3, "sharding": {"clip_grad_norm": 1.0}}, torch.float32, "clipped"),
        (ShardedAdamW, {"lr": 1e-3, "sharding": {"clip_grad_norm": 1e6}}, torch.float32, None),
        (ShardedAdamW, {"lr": 1e-7}, torch.bfloat16, "vanished"),
        (ShardedAdamW, {"lr": 1e-7}, torch.float32, None),
        (ShardedAdamW, {"lr": 1e-1}, torch.bfloat16, None),
    ],
)  # fmt: skip
def test_monitor_says_once_what_is_wrong(
    optimizer_class: Any, options: dict[str, Any], dtype: torch.dtype, wanted: str | None
) -> None:
    """After ten records that show it, and on every rank; not before, and not twice."""
    for said in run_threads(2, judged, optimizer_class, options, dtype):
        texts = [text for step in said for text in step]
        assert len(texts) == (wanted is not None)
        assert all(wanted in text for text in texts if wanted)
        assert not any(said[:9])


def monitored(every: int, first_step: int) -> list[StepRecord]:
    model = nn.Linear(30, 20)
    optimizer = ShardedLamb(model.named_parameters(), lr=0.01, use_global_grad_norm=True)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    monitor = StepMonitor(optimizer, every, first_step)
    records = []
    for _ in range(7):
        model(torch.ones(4, 30)).square().sum().backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        records += monitor.take()
    records += monitor.close()
    model(torch.ones(4, 30)).square().sum().backward()
    optimizer.step()  # closed: nothing is watched
    return [*records, *monitor.take()]


def test_monitor_watches_every_so_many_steps() -> None:
    ranks = run_threads(2, monitored, 3, 0)
    assert ranks[0] == ranks[1]
    assert [record.step for record in ranks[0]] == [3, 6]
    assert [record.lr for record in ranks[0]] == pytest.approx([0.01 / 3, 0.01 / 6])
    for record in ranks[0]:
        assert set(record.tensors) == {"weight", "bias"}
        squares = sum(norms.grad**2 for norms in record.tensors.values())
        assert record.grad_norm == pytest.approx(math.sqrt(squares))
        assert record.clip == pytest.approx(1 / record.grad_norm, rel=1e-5)
        assert record.is_clipped
        assert StepRecord.from_json(json.loads(json.dumps(record.to_json()))) == record


def test_monitor_counts_on_after_a_resume() -> None:
    assert [record.step for record in run_threads(2, monitored, 5, 101)[0]] == [105]


def test_two_that_watch_one_step_get_its_norms() -> None:
    optimizer = ShardedSGD([weight := nn.Parameter(torch.ones(3))], lr=0.1)
    monitors = [StepMonitor(optimizer, every=every) for every in (2, 1)]
    weight.grad = torch.ones(3)
    for _ in range(4):
        optimizer.step()
    assert [[r.step for r in monitor.close()] for monitor in monitors] == [[2, 4], [1, 2, 3, 4]]


def scaled() -> list[StepRecord]:
    """Three steps under a scaler, the second of which overflows."""
    weight = nn.Parameter(torch.ones(600))
    optimizer = ShardedAdam([("weight", weight)], lr=0.1)
    monitor = StepMonitor(optimizer, every=2)
    scaler = ShardedGradScaler("cpu", init_scale=1024.0)
    for step in range(3):
        scaler.scale((2 * weight).sum()).backward()
        if step == 1 and dist.get_rank() == 1:
            assert weight.grad is not None
            weight.grad[5] = math.inf
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return monitor.close()


def test_a_skipped_step_leaves_it_to_the_next() -> None:
    """Its gradient is told without the loss scale."""
    for records in run_threads(2, scaled):
        assert [record.step for record in records] == [3]
        assert records[0].grad_norm == pytest.approx(2 * math.sqrt(600))
        assert records[0].clip == 1


def failing() -> list[StepRecord]:
    """The second step fails on one rank, before it communicates; the third is made."""
    weight = nn.Parameter(torch.ones(600))
    optimizer = ShardedAdam([("weight", weight)], lr=0.1)
    monitor = StepMonitor(optimizer, every=2)

    def closure(step: int) -> None:
        optimizer.zero_grad()
        (2 * weight).sum().backward()
        if step == 1 and dist.get_rank() == 1:
            raise ArithmeticError("of this rank alone")

    for step in range(3):
        if step == 1:
            with pytest.raises((ArithmeticError, PeerError)):
                optimizer.step(functools.partial(closure, step))
        else:
            optimizer.step(functools.partial(closure, step))
    return monitor.close()


@pytest.mark.gloo_only("an aborted communicator is of no more use")
@pytest.mark.cpu_only("a rank whose host does not wait hears of another's failure a step later")
def test_a_failed_step_leaves_it_to_the_next() -> None:
    """On all ranks, whichever it failed on."""
    for records in run_procs(2, failing):
        assert [record.step for record in records] == [3]
        assert records[0].grad_norm == pytest.approx(2 * math.sqrt(600))


def one_sided() -> None:
    weight = nn.Parameter(torch.ones(600))
    optimizer = ShardedAdam([("weight", weight)], lr=0.1)
    weight.grad = torch.ones_like(weight)
    if dist.get_rank() == 1:
        optimizer.watch_step()
    optimizer.step()


def test_a_rank_that_watches_alone_is_told_on_all() -> None:
    with pytest.raises(RanksFailedError) as caught:
        run_procs(2, one_sided)
    assert len(caught.value.failures) == 2
    assert "watched" in str(caught.value)


def ending(how: str, collectives: str) -> None:
    """Rank 1 fails or dies where the ranks are about to add up what they have noted."""
    weight = nn.Parameter(torch.ones(600))
    sharding = {"collectives": collectives, "consolidate_every": 0}
    optimizer = ShardedAdam([("weight", weight)], lr=0.1, sharding=sharding)
    for _ in range(2):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
    norms = optimizer.watch_step()
    if dist.get_rank() == 1:

        def end(*_: Any) -> None:
            if how == "dies":
                os._exit(9)
            raise ArithmeticError("of this rank alone")

        norms.finish = end  # type: ignore[method-assign]
    optimizer.step()


@pytest.mark.cpu_only("where waits do not block the host, ranks hear of it in a later call")
@pytest.mark.parametrize("collectives", ["auto", "pairwise", "native"])
@pytest.mark.parametrize("how", ["fails", "dies"])
def test_a_rank_that_ends_while_norms_are_added_up(how: str, collectives: str) -> None:
    """The other one is told, and waits for no time-out."""
    with pytest.raises(RanksFailedError) as caught:
        run_procs(2, ending, how, collectives, timeout=30)
    told = caught.value.failures[0]
    assert "PeerError" in told
    assert "rank 1" in told


def joined() -> None:
    weight = nn.Parameter(torch.ones(600))
    optimizer = ShardedAdam([("weight", weight)], lr=0.1)
    with Join([optimizer]), pytest.raises(RuntimeError, match="watch_step"):
        optimizer.watch_step()


def test_misuse_is_refused() -> None:
    run_procs(2, joined)
    optimizer = ShardedAdam([nn.Parameter(torch.ones(3))], lr=0.1)
    with pytest.raises(ValueError, match="every"):
        StepMonitor(optimizer, every=0)


def test_empty_parameters_and_late_groups_have_records() -> None:
    """A record is of the parameters of its step; of no elements, none has vanished."""
    sizes = {"weight": 5, "empty": 0, "late": 3}
    named = {name: nn.Parameter(torch.ones(size)) for name, size in sizes.items()}
    late = [("late", named["late"])]
    optimizer = ShardedLamb(list(named.items())[:2], lr=0.1)
    monitor = StepMonitor(optimizer, every=1)
    for param in named.values():
        param.grad = torch.ones_like(param)
    optimizer.step()
    optimizer.add_param_group({"params": late})
    named["late"].grad = torch.ones(3)
    optimizer.step()
    first, second = monitor.close()
    assert list(first.tensors) == ["weight", "empty"]
    assert list(second.tensors) == ["weight", "empty", "late"]
    assert first.tensors["empty"].vanished == first.tensors["empty"].update == 0.0
    assert second.tensors["late"].update > 0
