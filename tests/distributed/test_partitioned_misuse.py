"""Stage 2: what works on p.grad is refused or warned of, and errors reach every rank."""

from __future__ import annotations

import copy
import gc
import pickle
import re
import threading
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

from shardfuse import ShardConfig, ShardedAdamW, ShardedGradScaler, ShardedSGD
from shardfuse.optim.npu import NpuFusedAdamW
from shardfuse.optim.paddle import Lamb as PaddleLamb
from tests.distributed.test_partitioned import Sums, assert_same, seed_of
from tests.support.harness import RanksFailedError, run_procs, run_threads
from tests.support.overlap import OFF
from tests.support.placing import device_type

pytestmark = pytest.mark.timeout(120)


def make(model: nn.Module, **sharding: Any) -> ShardedAdamW:
    options = {"stage": 2, "bucket_cap_mb": 0.004, "kernel": "eager", **sharding}
    return ShardedAdamW(model.named_parameters(), lr=0.01, sharding=options)


def on_ranks(body: Callable[[Sums, Any, int], Any], world_size: int = 2) -> list[Any]:
    """Run ``body(model, optimizer, rank)`` on threads, after one backward of stage 2."""

    def run() -> Any:
        model, rank = Sums(), dist.get_rank()
        optimizer = make(model)
        loss = model(seed_of(rank, 0))
        dist.barrier()  # a forward of one thread puts the params of both back
        loss.backward()
        return body(model, optimizer, rank)

    return run_threads(world_size, run)


_ONE = threading.Lock()  # filters of warnings are the whole process's, and ranks are threads

# Reading and setting


def test_reading_says_why() -> None:
    """p.grad is None and a warning names the parameter and the remedy, until it is used."""

    def body(model: Sums, optimizer: Any, rank: int) -> None:
        param = model.items[1]
        with _ONE, warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert param.grad is None
        assert "items.1" in str(caught[0].message)
        assert "clip_grad_norm()" in str(caught[0].message)
        optimizer.step()
        with _ONE, warnings.catch_warnings():
            warnings.simplefilter("error")
            assert param.grad is None
            model.zero_grad()
            optimizer.synchronize()
            assert type(param) is nn.Parameter

    on_ranks(body)


@pytest.mark.parametrize(
    "misuse",
    [
        lambda model: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0),
        lambda model: torch.nn.utils.clip_grad_value_(model.parameters(), 1.0),
        lambda model: model.zero_grad(),
        lambda model: model.zero_grad(set_to_none=False),
        lambda model: setattr(model.items[1], "grad", None),
        lambda model: setattr(model.items[1], "grad", torch.ones(40, 60)),
    ],
    ids=["norm", "value", "zero_grad", "zero", "None", "tensor"],
)
def test_what_would_do_nothing_raises(misuse: Callable[[Sums], Any]) -> None:
    """torch's clips and a module's zero_grad() would find no gradients, and say nothing."""

    def body(model: Sums, optimizer: Any, rank: int) -> None:
        with pytest.raises(RuntimeError, match=r"items\.\d.*stage=2.*optimizer\.zero_grad"):
            misuse(model)
        optimizer.zero_grad()
        assert model.items[1].grad is None

    on_ranks(body)


def classes() -> None:
    model, rank = Sums(), dist.get_rank()
    optimizer = make(model)
    kinds: list[set[type]] = []
    seen = model.register_forward_pre_hook(
        lambda m, _: kinds.append({type(param) for param in m.parameters()})
    )
    for micro in range(2):
        model(seed_of(rank, 0, micro)).backward()
        assert type(model.items[1]) is not nn.Parameter
    seen.remove()
    assert kinds == [{nn.Parameter}] * 2
    optimizer.step()
    optimizer.synchronize()
    assert {type(param) for param in model.parameters()} == {nn.Parameter}


def test_forward_sees_plain_parameters() -> None:
    """Classes are what they were as soon as a module runs, for whatever looks at them."""
    run_procs(2, classes)


def test_copies_are_plain() -> None:
    """An EMA that copies the model between backward and step() has parameters like any other."""

    def body(model: Sums, optimizer: Any, rank: int) -> None:
        copied = copy.deepcopy(model)
        loaded = pickle.loads(pickle.dumps(model.items[1]))
        for param in [*copied.parameters(), loaded]:
            assert type(param) is nn.Parameter
            param.grad = torch.zeros_like(param)
        assert torch.equal(copied.items[1], model.items[1])
        assert copied.items[4].stride() == model.items[4].stride()
        optimizer.step()

    on_ranks(body)


def test_nothing_stays_behind() -> None:
    """An optimizer that is dropped with gradients under way leaves nothing in the process."""

    def body() -> None:
        model = Sums()
        optimizer = make(model)
        model(0).backward()
        optimizer.zero_grad()
        arenas = [weakref.ref(shard.arena.data) for shard in optimizer._grads._flats.values()]
        gc.collect()
        gc.disable()
        try:
            del optimizer
            assert all(arena() is None for arena in arenas)
        finally:
            gc.enable()
        model(0).backward()
        assert model.items[1].grad is not None

    run_threads(2, body)


# Scalers


def scaled_run(stage: int, scaler_class: Any, *, unscales: bool) -> list[Tensor]:
    """Train under a scaler; in the third step one rank overflows."""
    model, rank = Sums(), dist.get_rank()
    sharding = {**OFF, "stage": stage, "report_overflow": True}
    optimizer = make(model, **sharding)
    scaler = scaler_class(device_type(), init_scale=1024.0, growth_interval=2)
    for step in range(5):
        loss = model(seed_of(rank, step))
        if step == 2 and rank == 1:
            loss = loss + (model.items[3] * float("inf")).sum()
        scaler.scale(loss).backward()
        if unscales:
            scaler.unscale_(optimizer)
            optimizer.clip_grad_norm(3.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if step == 2:
            assert optimizer.last_overflow is not None
            assert optimizer.last_overflow.name == "items.3"
    return [*(p.detach().clone() for p in model.parameters()), torch.tensor(scaler.get_scale())]


@pytest.mark.parametrize("unscales", [False, True], ids=["step", "unscale_"])
def test_sharded_scaler(unscales: bool) -> None:
    """Unscaling, clipping, skipping and the scale itself are those of stage 1."""
    runs = [
        run_threads(2, lambda stage=stage: scaled_run(stage, ShardedGradScaler, unscales=unscales))
        for stage in (1, 2)
    ]
    assert_same(runs[1], runs[0])
    assert float(runs[1][0][-1]) == 1024.0 * 2 / 2 * 2


@pytest.mark.parametrize("unscales", [False, True], ids=["step", "unscale_"])
def test_another_scaler_is_refused(unscales: bool) -> None:
    """torch's own sees no gradients at all, and would never find an overflow."""
    with pytest.raises(RanksFailedError, match=r"Use shardfuse\.ShardedGradScaler"):
        run_threads(2, lambda: scaled_run(2, torch.amp.GradScaler, unscales=False))


# What cannot be


def test_join_is_refused() -> None:
    def body(model: Sums, optimizer: Any, rank: int) -> None:
        optimizer.step()
        with pytest.raises(RuntimeError, match=r"Join with stage=2.*Use stage=1"):
            Join([optimizer])

    on_ranks(body)


def test_combined_gradients_are_refused() -> None:
    def body() -> None:
        model = Sums()
        optimizer = NpuFusedAdamW(model.parameters(), sharding={"stage": 2})
        model(dist.get_rank()).backward()
        with pytest.raises(RuntimeError, match=r"no combined gradients with stage=2"):
            optimizer.get_combined_grads()

    run_threads(2, body)


def wrapped(is_resumed: bool) -> None:
    model = nn.Linear(8, 8)
    start = ShardedSGD(model.parameters(), lr=0.1, momentum=0.9, sharding={"stage": 2})
    model(torch.ones(2, 8)).sum().backward()
    start.step()
    start.consolidate_state_dict(to=None)
    if not is_resumed:
        wrapper = DistributedDataParallel(model)
        with pytest.raises(RuntimeError, match=r"DistributedDataParallel.*without the wrapper"):
            ShardedSGD(model.parameters(), lr=0.1, sharding={"stage": 2})
        return
    optimizer = ShardedSGD(model.parameters(), lr=0.1, sharding={"stage": 2})
    optimizer.load_state_dict(start.state_dict())
    del start
    wrapper = DistributedDataParallel(model)
    wrapper(torch.ones(2, 8)).sum().backward()
    with pytest.raises(RuntimeError, match=r"DistributedDataParallel.*without the wrapper"):
        optimizer.step()


@pytest.mark.parametrize("is_resumed", [False, True], ids=["new", "resumed"])
def test_a_wrapped_model_is_refused(is_resumed: bool) -> None:
    run_procs(2, wrapped, is_resumed)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stage": 3}, "Use 1, or 2"),
        ({"stage": True}, "Use 1, or 2"),
        ({"stage": "2"}, "Use 1, or 2"),
        ({"stage": 2, "grads_are_reduced": True}, "grads_are_reduced=True"),
    ],
)
def test_invalid_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ShardConfig(**options)


# Ranks that do not do the same


def cleared_on_one() -> None:
    model, rank = Sums(), dist.get_rank()
    optimizer = make(model, bucket_cap_mb=1.0)
    model(seed_of(rank, 0)).backward()
    if rank == 0:
        optimizer.zero_grad()
    model(seed_of(rank, 1)).backward()
    with pytest.raises(RuntimeError, match="cleared gradients in flight at different times"):
        optimizer.step()
    optimizer.zero_grad()
    model(seed_of(rank, 2)).backward()
    optimizer.step()


def test_clearing_on_one_rank_alone_is_told() -> None:
    """Gradients of two batches are never mixed in silence."""
    run_procs(2, cleared_on_one)


def cleared_before_step(collectives: str) -> str:
    model, rank = Sums(), dist.get_rank()
    optimizer = make(model, collectives=collectives)
    model(seed_of(rank, 0)).backward()
    if rank == 0:
        optimizer.zero_grad()
    try:
        optimizer.step()
    except RuntimeError as error:
        return str(error)
    return "no error"


@pytest.mark.cpu_only("nothing tells that a device waits, until the group's timeout")
@pytest.mark.parametrize("collectives", ["auto", "pairwise", "native"])
def test_clearing_on_one_rank_before_its_step_is_told(collectives: str) -> None:
    """That rank sends once more what the others have had; one waited for the other's memory."""
    for text in run_procs(2, cleared_before_step, collectives, timeout=60):
        words = "in another collective", "zero_grad() at the same place", "make the same calls"
        assert any(word in text for word in words), text


def backward_and_step(model: Sums, optimizer: Any, table: nn.Embedding | None) -> None:
    loss = model(0)
    if table is not None:
        loss = loss + table(torch.arange(3)).sum()
    loss.backward()
    optimizer.step()


def sparse_on_one() -> tuple[list[Tensor], list[Tensor]]:
    """Fail under backward on one rank, begin anew, and return what two steps then give."""
    rank = dist.get_rank()
    results = []
    for fails in (False, True):
        model, table = Sums(), nn.Embedding(9, 5, sparse=True)
        with torch.no_grad():
            table.weight.fill_(0.5)
        optimizer = ShardedAdamW(
            [*model.parameters(), table.weight],
            lr=0.01,
            sharding={"stage": 2, "bucket_cap_mb": 0.004, "kernel": "eager"},
        )
        model(seed_of(rank, 0)).backward()
        optimizer.step()
        if fails:
            with pytest.raises(RuntimeError, match=r"is sparse|rank 1 failed"):
                backward_and_step(model, optimizer, table if rank == 1 else None)
            with pytest.raises(RuntimeError, match=r"Call zero_grad\(\)|failed in step"):
                optimizer.step()
            optimizer.zero_grad()
            table.weight.grad = None
        for step in (2, 3):
            model(seed_of(rank, step)).backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append([param.detach().clone() for param in model.parameters()])
    return results[0], results[1]


@pytest.mark.gloo_only("an aborted communicator is of no more use")
@pytest.mark.parametrize("repeat", range(2))
def test_an_error_under_backward_reaches_all(repeat: int) -> None:
    """Both ranks hear of it; after zero_grad() training goes on as if it had not been."""
    for found, expected in run_procs(2, sparse_on_one):
        assert_same([found], [expected])


def more_backwards_on_one(collectives: str, num: int, clears: bool) -> str:
    model, rank = Sums(), dist.get_rank()
    optimizer = make(model, collectives=collectives, bucket_cap_mb=1.0 if clears else 0.004)
    model(seed_of(rank, 0)).backward()
    optimizer.step()
    optimizer.zero_grad()
    try:
        for micro in range(num if rank == 0 else 1):
            model(seed_of(rank, 1, micro)).backward()
        if clears:
            optimizer.zero_grad()
            model(seed_of(rank, 2)).backward()
            optimizer.clip_grad_norm(1.0)
        optimizer.step()
    except RuntimeError as error:
        return str(error)
    return "no error"


@pytest.mark.cpu_only("where waits do not block the host, step() may send zeros for the others")
@pytest.mark.parametrize(("num", "clears"), [(3, False), (2, True)])
@pytest.mark.parametrize("collectives", ["auto", "pairwise", "native"])
def test_more_backwards_on_one_rank_are_an_error(collectives: str, num: int, clears: bool) -> None:
    """Both hear of it in seconds: one would wait under backward, the other in step()."""
    if clears and collectives == "native":
        pytest.skip("gloo ends a process that gets another size")
    for text in run_procs(2, more_backwards_on_one, collectives, num, clears, timeout=60):
        expected = "Run as many backward|make the same calls|run the same number|in another collect"
        assert re.search(expected, text), text


def minimize(stage: int) -> Tensor:
    """Run the second backward by minimize() alone."""
    param = nn.Parameter(torch.linspace(1.0, 2.0, 600))
    optimizer = PaddleLamb(0.1, parameters=[param], sharding={"stage": stage})
    for is_done in (True, False):
        loss = param.square().sum() * (1 + dist.get_rank())
        if is_done:
            loss.backward()  # type: ignore[no-untyped-call]
        optimizer.minimize(loss)
        optimizer.clear_grad()
    return param.detach().clone()


def test_minimize_of_paddle_after_a_backward() -> None:
    """It ran backward again, for p.grad was None, and so had none to run through."""
    for found, expected in zip(
        run_threads(2, minimize, 2), run_threads(2, minimize, 1), strict=True
    ):
        assert torch.equal(found, expected)
