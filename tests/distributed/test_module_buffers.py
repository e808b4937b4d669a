"""A model in place of its parameters: its buffers, what is sent for them, and what is refused."""

from __future__ import annotations

import copy
import itertools
import logging
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

import shardfuse
from shardfuse.comm.session import PeerError
from shardfuse.optim import npu, paddle
from tests.support.harness import count_c10d_calls, run_procs, run_threads

pytestmark = pytest.mark.timeout(120)

CLASSES = [
    *(getattr(shardfuse, name) for name in dir(shardfuse) if name.startswith("Sharded")),
    *(getattr(npu, name) for name in dir(npu) if name.startswith("NpuFused")),
    paddle.Lamb,
]
CLASSES = [
    cls
    for cls in CLASSES
    if isinstance(cls, type)
    and issubclass(cls, shardfuse.ShardedOptimizer)
    and cls is not shardfuse.ShardedOptimizer
]


class Every(nn.Module):
    """Has buffers of every dtype and kind, and values of its own on each rank."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(rank)
        self.linear = nn.Linear(4, 4)
        self.frozen = nn.Parameter(torch.full((3,), float(rank)), requires_grad=False)
        self.norm = nn.BatchNorm1d(4)
        for dtype in (torch.float64, torch.bfloat16, torch.float16, torch.complex64):
            value = torch.randn(3, generator=generator).to(dtype)
            self.register_buffer(f"own_{dtype}".replace("torch.", ""), value)
        self.register_buffer("flags", torch.tensor([rank == 0, True, rank == 1]))
        self.register_buffer("bytes", torch.tensor([rank, 255 - rank], dtype=torch.uint8))
        self.register_buffer("scalar", torch.tensor(float(rank)))
        self.register_buffer("expanded", torch.full((1, 3), float(rank)).expand(4, -1))
        self.register_buffer("transposed", torch.full((2, 3), float(rank)).t())
        self.register_buffer("empty", torch.empty(0))
        self.register_buffer("nothing", None)
        self.register_buffer("not_saved", torch.tensor([rank]), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.linear(x)).square().mean()

    def spoil(self, rank: int) -> None:
        """Have each rank write to its buffers, and replace one."""
        for buffer in [*self.buffers()]:
            if buffer.numel() > 0 and buffer is not self.expanded:
                buffer.add_(rank) if buffer.dtype != torch.bool else buffer.logical_not_()
        self.scalar = torch.tensor(10.0 + rank)
        self.own_float64.data = torch.full((3,), 20.0 + rank, dtype=torch.float64)


def differing(model: nn.Module) -> list[str]:
    """Return the names of tensors that are not equal on all ranks."""
    named = [*model.named_parameters(), *model.named_buffers()]
    every: list[Any] = [None] * dist.get_world_size()
    # On the CPU: a rank would get its peers' tensors on their devices.
    dist.all_gather_object(every, [tensor.detach().clone().cpu() for _, tensor in named])
    pairs = zip(named, zip(*every, strict=True), strict=True)
    return [name for (name, _), values in pairs if any(not v.equal(values[0]) for v in values)]


def train_all(collectives: str, stage: int) -> None:
    rank = dist.get_rank()
    model = Every(rank)
    sharding = {"collectives": collectives, "stage": stage}
    optimizer = shardfuse.ShardedSGD(model, 0.1, sharding=sharding)
    assert differing(model) == []
    assert model.bytes[0] == 0
    for step in range(3):
        model(torch.randn(3, 4)).backward()
        model.spoil(rank)
        want = copy.deepcopy(model.state_dict())
        optimizer.step()
        optimizer.zero_grad()
        assert differing(model) == []
        if rank == 0:  # the first rank's own are as they were
            for name, buffer in model.named_buffers():
                assert name not in want or want[name].equal(buffer), (step, name)
    every: list[Any] = [None] * dist.get_world_size()
    names = [entry for group in optimizer.param_groups for entry in group["param_names"]]
    dist.all_gather_object(every, names)
    assert every[0] == [name for name, _ in model.named_parameters()]


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("collectives", ["auto", "pairwise", "native"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_all_tensors_are_equal(world_size: int, collectives: str, stage: int) -> None:
    """At construction and after every step, all are the first rank's, whatever a rank has done."""
    run_procs(world_size, train_all, collectives, stage)


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_every_class_takes_a_model(cls: Any) -> None:
    def body() -> None:
        model = Every(dist.get_rank())
        given = {"parameters" if cls is paddle.Lamb else "params": model}
        needs_lr = "SGD" in cls.__name__ or "BertAdam" in cls.__name__
        optimizer = cls(**given, **({"lr": 0.1} if needs_lr else {}))
        names = sorted(dict(model.named_parameters()))  # Muon divides them in groups
        assert sorted(n for g in optimizer.param_groups for n in g["param_names"]) == names
        model(torch.ones(2, 4) * torch.arange(4)).backward()
        optimizer.step()
        assert len(differing(model)) == 0

    run_threads(2, body)


def wrappers() -> None:
    """Names are those of the model itself, whatever wraps it."""
    wrapped: list[Callable[[nn.Module], nn.Module]] = [
        DistributedDataParallel,
        torch.compile,
        lambda model: DistributedDataParallel(torch.compile(model)),
        lambda model: torch.compile(DistributedDataParallel(model)),
    ]
    for wrap in wrapped:
        model = nn.Linear(2, 2)
        whole = wrap(model)
        optimizer = shardfuse.ShardedSGD(whole, 0.1)
        assert optimizer.param_groups[0]["param_names"] == ["weight", "bias"]
        is_averaged = wrap is not torch.compile
        assert f"grads_are_reduced={is_averaged or 'auto'!r}" in repr(optimizer)
        del optimizer, whole


def test_wrapped_models() -> None:
    run_procs(2, wrappers)


def count_collectives(has_buffers: bool, broadcast_buffers: bool) -> list[dict[str, int]]:
    counts = []

    def body() -> None:
        torch.manual_seed(0)
        norm = nn.BatchNorm1d(4, track_running_stats=has_buffers)
        model = nn.Sequential(nn.Linear(4, 4), norm)
        options = {"broadcast_buffers": broadcast_buffers}
        optimizer = shardfuse.ShardedSGD(model, 0.1, sharding=options)
        for step in range(4):
            model(torch.ones(3, 4)).sum().backward()
            if step == 3:
                dist.barrier()
                with count_c10d_calls() as calls:
                    optimizer.step()
                    dist.barrier()
                counts.append(dict(calls))
            else:
                optimizer.step()

    run_threads(2, body)
    return counts


def test_one_broadcast_for_all_buffers() -> None:
    """In a step: one, if the model has buffers and the option is on; else none."""
    for has_buffers, option, number in ((True, True, 1), (True, False, 0), (False, True, 0)):
        for calls in count_collectives(has_buffers, option):
            found = sum(count for name, count in calls.items() if "broadcast" in name)
            assert found == number * (2 if len(calls) and found > number else 1), calls


def groups_and_model() -> None:
    rank = dist.get_rank()
    model = Every(rank)
    decayed = [model.linear.weight]
    others = [model.linear.bias, *model.norm.parameters()]
    optimizer = shardfuse.ShardedAdamW(
        [{"params": decayed}, {"params": others, "weight_decay": 0.0}], lr=0.1
    )
    assert "frozen" in differing(model)
    optimizer.broadcast_buffers(model)
    assert differing(model) == []
    optimizer.broadcast_buffers(model)  # once more is no matter
    for _ in range(2):
        model(torch.randn(3, 4)).backward()
        optimizer.step()
    assert differing(model) == []


def test_groups_with_the_buffers_of_a_model() -> None:
    run_procs(2, groups_and_model)


def bad_models() -> None:
    rank = dist.get_rank()
    optimizer = shardfuse.ShardedSGD(nn.Linear(2, 2), 0.1)
    with pytest.raises((TypeError, RuntimeError), match=r"model must be a torch\.nn\.Module, got"):
        optimizer.broadcast_buffers(list(nn.Linear(2, 2).parameters()) if rank else nn.Tanh())
    for value in (torch.ones(2, 2).to_sparse(), torch.empty(2, device="meta")):
        model = nn.Linear(2, 2)
        if rank == 1:
            model.register_buffer("odd", value)
        with pytest.raises((TypeError, RuntimeError), match=r"odd is .*cannot be broadcast"):
            shardfuse.ShardedSGD(model, 0.1)
    model = nn.Linear(2, 2)
    model.register_buffer("own", torch.zeros(2 + rank))
    with pytest.raises(ValueError, match=r"Ranks disagree.*buffer own \(2,\)"):
        shardfuse.ShardedSGD(model, 0.1)
    model = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="buffers of a model are kept equal: "):
        shardfuse.ShardedSGD(model if rank == 0 else model.named_parameters(), 0.1)


def test_models_that_are_refused() -> None:
    """Of one rank alone, by an error on both."""
    run_procs(2, bad_models)


def changed_alone(collectives: str) -> str:
    model = nn.Linear(2, 2)
    model.register_buffer("own", torch.zeros(8))
    optimizer = shardfuse.ShardedSGD(model, 0.1, sharding={"collectives": collectives})
    for step in range(3):
        model(torch.ones(1, 2)).sum().backward()
        if step == 2 and dist.get_rank() == 1:
            model.own = torch.zeros(9)
        try:
            optimizer.step()
        except PeerError as error:
            return str(error)
    return ""


@pytest.mark.cpu_only("where waits do not block the host, ranks hear of it in a later call")
@pytest.mark.parametrize("collectives", ["auto", "pairwise"])
def test_a_buffer_of_another_size_on_one_rank(collectives: str) -> None:
    """An error on both ranks that names the broadcast, and no process that ends."""
    for text in run_procs(2, changed_alone, collectives):
        assert "broadcast" in text


def fails_alone(collectives: str) -> str:
    model = nn.BatchNorm1d(2)
    optimizer = shardfuse.ShardedSGD(model, 0.1, sharding={"collectives": collectives})
    for step in range(3):
        model(torch.randn(3, 2)).sum().backward()
        if step == 2 and dist.get_rank() == 1:
            model._buffers["running_mean"] = "no tensor"  # type: ignore[assignment]
        try:
            optimizer.step()
        except Exception as error:
            return str(error)
    return ""


@pytest.mark.cpu_only("where waits do not block the host, ranks hear of it in a later call")
@pytest.mark.parametrize("collectives", ["auto", "pairwise", "native"])
def test_a_rank_that_fails_as_it_sends_buffers(collectives: str) -> None:
    first, second = run_procs(2, fails_alone, collectives)
    assert "rank 1 failed in step()" in first
    assert second != ""


def join_with_buffers() -> list[float]:
    """The rank whose inputs end first is the first, whose buffers are old then."""
    rank = dist.get_rank()
    model = nn.BatchNorm1d(2, momentum=None)
    optimizer = shardfuse.ShardedSGD(model, 0.1)
    with Join([optimizer]):
        for step in range(2 if rank == 0 else 5):
            optimizer.zero_grad()
            model(torch.full((3, 2), float(step))).sum().backward()
            optimizer.step()
    assert differing(model) == []
    return model.running_mean.tolist()


def test_join() -> None:
    """Inside Join, buffers are those of a rank that still trains."""
    for mean in run_procs(2, join_with_buffers):
        assert mean == [2.0, 2.0]  # of 0, 1, 2, 3, 4


def clamp(param: Tensor) -> None:
    assert param.grad is not None
    param.grad.clamp_(-1, 1)


def quiet(collectives: str) -> list[str]:
    """Nothing is said of models whose tensors are equal, with edits by hooks and zero_grad()."""
    texts: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: texts.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("shardfuse").addHandler(handler)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for zero_by_model, set_to_none in itertools.product((False, True), repeat=2):
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 1))
            model.register_buffer("constant", torch.arange(3))
            unused = nn.Linear(2, 2)
            model.add_module("unused", unused)
            for param in model.parameters():
                param.register_hook(lambda grad: grad * 2)
                param.register_post_accumulate_grad_hook(clamp)
            params = list(model.parameters())
            sharding = {"collectives": collectives, "consolidate_every": 0}
            optimizer = shardfuse.ShardedAdamW(params, 0.1, sharding=sharding)
            scaler: Any = torch.amp.GradScaler("cpu", init_scale=4.0)
            if zero_by_model:
                scaler = shardfuse.ShardedGradScaler(device="cpu", init_scale=4.0)
            for step in range(5):
                model.train()
                x = torch.randn(3, 4)
                if step % 2:
                    with optimizer.no_sync():
                        model[2](model[1](model[0](x))).sum().backward()
                loss = model[2](model[1](model[0](x))).sum()
                if set_to_none:
                    scaler.scale(loss).backward()
                    scaler.unscale_(optimizer)
                    optimizer.clip_grad_norm_(params, 1.0)
                    scaler.step(optimizer)
                    scaler.update()
                else:
                    loss.backward()
                    optimizer.clip_grad_norm_(params, 1.0)
                    optimizer.step()
                (model if zero_by_model else optimizer).zero_grad(set_to_none=set_to_none)
        texts += [str(warning.message) for warning in caught]
    return texts


@pytest.mark.parametrize("collectives", ["auto", "pairwise"])
def test_no_false_alarm(collectives: str) -> None:
    for texts in run_procs(2, quiet, collectives):
        assert texts == []
