"""Torch's own layers, threads and forked children read parameters right after step()."""

from __future__ import annotations

import copy
import multiprocessing
import os
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from shardfuse import ShardedAdam, ShardedSGD
from shardfuse.engine import gather as pending_params
from shardfuse.engine.gather import PendingParam
from tests.support.harness import run_procs

pytestmark = [
    pytest.mark.timeout(180),
    pytest.mark.gloo_only("params are under way over sockets only"),
    pytest.mark.cpu_only("params are under way over sockets only"),
    pytest.mark.filterwarnings("ignore"),
]


def options(stage: int, cap_mb: float = 0.02) -> dict[str, Any]:
    return {
        "stage": stage,
        "collectives": "pairwise",
        "bucket_cap_mb": cap_mb,
        "kernel": "eager",
        "overlap_param_sync": True,
    }


def in_flight(model: nn.Module) -> int:
    return sum(type(param) is PendingParam for param in model.parameters())


def total(values: Any) -> Tensor:
    return torch.stack([value.detach().double().sum() for value in values]).sum()


# One process, one reader after the other


def layer(make: Callable[[], nn.Module], *inputs: tuple[int, ...]) -> Any:
    """Return a layer and how it is called, in training and in evaluation."""

    def read(module: nn.Module) -> Tensor:
        found = []
        for mode in (True, False):
            with torch.set_grad_enabled(mode):
                output = module.train(mode)(*(torch.ones(shape) for shape in inputs))
            found.append(output[0] if isinstance(output, tuple) else output)
        return torch.stack([tensor.detach() for tensor in found])

    return make, read


def evaluated(make: Callable[[], nn.Module], *inputs: tuple[int, ...]) -> Any:
    """Return a layer that is called in evaluation first, which may take another path."""

    def read(module: nn.Module) -> Tensor:
        with torch.inference_mode():
            output = module.eval()(*(torch.ones(shape) for shape in inputs))
        module.train()
        return (output[0] if isinstance(output, tuple) else output).clone()

    return make, read


def pair() -> nn.Module:
    return nn.Sequential(nn.Linear(96, 96), nn.Linear(96, 96))


def lora(model: Any) -> Tensor:
    weight = model[0].weight
    with torch.no_grad():
        weight += model[1].weight[:, :4] @ model[1].weight[:4]
        found: Tensor = weight.clone()
        weight -= model[1].weight[:, :4] @ model[1].weight[:4]
    return found


def foreach(model: nn.Module) -> Tensor:
    means = [torch.zeros_like(param) for param in model.parameters()]
    torch._foreach_lerp_(means, list(model.parameters()), 0.3)
    sums = torch._foreach_add(means, list(model.parameters()))
    return total(sums) + total(torch._foreach_norm(list(model.parameters())))


def averaged(kind: str) -> Callable[[nn.Module], Tensor]:
    """Return an average as a library keeps it, begun at zero."""

    def read(model: nn.Module) -> Tensor:
        copied = pair()
        for param in copied.parameters():
            nn.init.zeros_(param)
        own, theirs = list(copied.parameters()), list(model.parameters())
        with torch.no_grad():
            if kind == "state dicts":
                values = model.state_dict().values()
                for mine, value in zip(copied.state_dict().values(), values, strict=True):
                    mine.lerp_(value, 0.3)
            elif kind == "foreach":
                torch._foreach_sub_(own, torch._foreach_sub(own, theirs), alpha=0.3)
            elif kind == "multi_avg_fn":
                torch.optim.swa_utils.get_ema_multi_avg_fn(0.7)(own, theirs, 1)
            else:
                for mine, param in zip(own, theirs, strict=True):
                    mine.mul_(0.7).add_(param, alpha=0.3)
        return total(own)

    return read


READERS: dict[str, Any] = {
    "MultiheadAttention": layer(
        lambda: nn.MultiheadAttention(96, 2, batch_first=True), *[(2, 5, 96)] * 3
    ),
    "encoder layer": layer(
        lambda: nn.TransformerEncoderLayer(96, 2, 64, 0.0, batch_first=True), (2, 5, 96)
    ),
    "encoder layer, evaluated": evaluated(
        lambda: nn.TransformerEncoderLayer(96, 2, 64, 0.0, batch_first=True), (2, 5, 96)
    ),
    "decoder layer": layer(
        lambda: nn.TransformerDecoderLayer(96, 2, 64, 0.0, batch_first=True), *[(2, 5, 96)] * 2
    ),
    "LSTM": layer(lambda: nn.LSTM(96, 96, 2), (3, 2, 96)),
    "GRUCell": layer(lambda: nn.GRUCell(96, 96), (3, 96), (3, 96)),
    "Bilinear": layer(lambda: nn.Bilinear(96, 96, 24), (3, 96), (3, 96)),
    "weight and bias of another module": (
        pair,
        lambda model: F.linear(torch.ones(3, 96), model[0].weight, model[0].bias),
    ),
    "merge of LoRA": (pair, lora),
    "foreach": (pair, foreach),
    "deepcopy": (pair, lambda model: total(copy.deepcopy(model).parameters())),
    **{
        f"average by {kind}": (pair, averaged(kind))
        for kind in ("state dicts", "foreach", "multi_avg_fn", "a loop")
    },
}


def read_each(stage: int) -> tuple[dict[str, str], list[str]]:
    """Return what went wrong in each reader, and those that found nothing in flight."""
    wrong: dict[str, str] = {}
    late = []
    for name, (make, read) in READERS.items():
        torch.manual_seed(0)
        model = make()
        optimizer = ShardedAdam(model.named_parameters(), lr=0.1, sharding=options(stage))
        number = 0
        for step in range(2):
            sum(param.square().sum() for param in model.parameters()).backward()
            optimizer.step()
            optimizer.zero_grad()
            number += in_flight(model)
            try:
                now = read(model).detach().clone()
            except Exception as error:
                wrong[name] = f"step {step}: {error!r}"
                now = None
            optimizer.synchronize()
            if now is not None and not torch.equal(now, read(model).detach()):
                wrong[name] = f"step {step}: stale, or of another rounding"
        if number == 0:
            late.append(name)
    return wrong, late


@pytest.mark.parametrize("stage", [1, 2])
def test_layers_and_averages(stage: int) -> None:
    """Functions that take several parameters at once, in torch's own layers and in averages."""
    for wrong, late in run_procs(2, read_each, stage, timeout=120):
        assert not wrong
        assert not late


# Threads


def read_in_threads(stage: int, num_steps: int, num_readers: int) -> tuple[int, int, list[str]]:
    """Return how many reads were stale, how many steps left something in flight, and errors.

    Half of the threads wait for the end of a step, and read what it made; the others read all the
    time, beside backward and step().
    """
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(96, 96) for _ in range(4)))
    optimizer = ShardedSGD(model.named_parameters(), lr=1e-3, sharding=options(stage))
    begin, end = threading.Barrier(num_readers + 1), threading.Barrier(num_readers + 1)
    found: list[Any] = [None] * num_readers
    errors: list[str] = []
    is_over = threading.Event()

    def note(error: BaseException) -> None:
        errors.append(f"{type(error).__name__}: {error}")

    def read(place: int) -> None:
        try:
            for _ in range(num_steps):
                begin.wait(60)
                if place % 2:
                    found[place] = [param.detach().clone() for param in model.parameters()]
                else:
                    with torch.no_grad():
                        found[place] = [model(torch.ones(1, 96))]
                end.wait(60)
        except BaseException as error:
            note(error)
            begin.abort()
            end.abort()

    def read_freely() -> None:
        try:
            while not is_over.is_set():
                with torch.no_grad():
                    model(torch.ones(1, 96))
                    torch._foreach_norm(list(model.parameters()))
                total(model.state_dict().values())
        except BaseException as error:
            note(error)

    threads = [threading.Thread(target=read, args=(i,), daemon=True) for i in range(num_readers)]
    for thread in threads:
        thread.start()
    threads.append(threading.Thread(target=read_freely, daemon=True))
    num_stale, left = 0, []
    add = pending_params.REGISTRY.add
    pending_params.REGISTRY.add = lambda sync: (left.append(sync), add(sync))  # type: ignore
    for step in range(num_steps):
        model(torch.ones(4, 96) * (step + dist.get_rank())).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        begin.wait(60)
        end.wait(60)
        if step == 0:  # its state dict shares memory with parameters, and step() may wait for them
            threads[-1].start()
        with torch.no_grad():
            output = model(torch.ones(1, 96))
        expected = [[output], [param.detach().clone() for param in model.parameters()]]
        for place, values in enumerate(found):
            num_stale += not all(map(torch.equal, values, expected[place % 2]))
    is_over.set()
    for thread in threads:
        thread.join(30)
    assert not any(thread.is_alive() for thread in threads)
    assert {type(param) for param in model.parameters()} == {nn.Parameter}
    return num_stale, len(left), errors


@pytest.mark.parametrize("num_steps", [5, pytest.param(40, id="long")])
@pytest.mark.parametrize("stage", [1, 2])
def test_threads(stage: int, num_steps: int) -> None:
    """Eight threads read what a step made, one reads all the time: no error, nothing stale."""
    for num_stale, num_in_flight, errors in run_procs(
        2, read_in_threads, stage, num_steps, 8, timeout=120
    ):
        assert (num_stale, errors) == (0, [])
        assert num_in_flight > 0


# Processes


class Held(torch.utils.data.Dataset[Tensor]):
    """A data set that has the model, as one that augments by it."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Tensor:
        return total(self.model.parameters())


def by_fork(read: Callable[[nn.Module], Tensor]) -> Callable[[nn.Module], Tensor]:
    """Return what forks a child that reads, and gives back what that found."""

    def fork(model: nn.Module) -> Tensor:
        receiver, sender = multiprocessing.Pipe(duplex=False)
        child = multiprocessing.get_context("fork").Process(
            target=lambda: sender.send(read(model).item()), daemon=True
        )
        child.start()
        try:
            assert receiver.poll(20), "the child waits"
            return torch.tensor(receiver.recv(), dtype=torch.float64)
        finally:
            child.kill()
            child.join()

    return fork


def in_workers(model: nn.Module) -> Tensor:
    loader = torch.utils.data.DataLoader(
        Held(model), num_workers=2, multiprocessing_context="fork", timeout=20
    )
    return torch.cat(list(loader)).sum()


def _double(value: Tensor) -> Tensor:
    return value.detach().double().sum()


def in_pool(model: nn.Module) -> Tensor:
    with multiprocessing.get_context("fork").Pool(2) as pool:
        # By value: torch would move the parameters into shared memory.
        return torch.stack(
            pool.map_async(_double, [p.detach().clone() for p in model.parameters()]).get(20)
        ).sum()


def by_a_thread(model: nn.Module) -> Tensor:
    found: list[Tensor] = []
    fork = by_fork(lambda model: total(model.parameters()))
    thread = threading.Thread(target=lambda: found.append(fork(model)))
    thread.start()
    thread.join(30)
    return found[0]


def after_plain_fork(model: nn.Module) -> Tensor:
    """os.fork(), and an end as of a script, which runs what waits at exit."""
    receiver, sender = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(sender, repr(total(model.parameters()).item()).encode())
        os._exit(0)
    os.close(sender)
    deadline = time.monotonic() + 20
    while os.waitpid(child, os.WNOHANG) == (0, 0):
        if time.monotonic() > deadline:
            os.kill(child, 9)
            os.waitpid(child, 0)
            raise AssertionError("the child waits")
        time.sleep(0.01)
    return torch.tensor(float(os.read(receiver, 100)), dtype=torch.float64)


FORKS: dict[str, Callable[[nn.Module], Tensor]] = {
    "parameters": by_fork(lambda model: total(model.parameters())),
    "model": by_fork(lambda model: total([model(torch.ones(1, 96))])),
    "state dict": by_fork(lambda model: total(model.state_dict().values())),
    "nothing": by_fork(lambda model: torch.ones(3).sum()),
    "workers of a DataLoader": in_workers,
    "pool": in_pool,
    "thread that forks": by_a_thread,
    "os.fork": after_plain_fork,
}


def fork_each(stage: int) -> tuple[list[str], int]:
    """Return which children read what was stale, or nothing; and how often some were in flight."""
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore  # has children
    wrong, number = [], 0
    for name, fork in FORKS.items():
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(96, 96) for _ in range(4)))
        optimizer = ShardedAdam(model.named_parameters(), lr=0.1, sharding=options(stage))
        for _ in range(2 if name == "parameters" else 1):
            model(torch.ones(4, 96)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            number += in_flight(model) > 0
            try:
                found = fork(model)
            except Exception as error:
                wrong.append(f"{name}: {error!r}")
                found = None
            optimizer.synchronize()
            if found is not None and found.item() != fork(model).item():
                wrong.append(f"{name}: stale")
    return wrong, number


@pytest.mark.parametrize("stage", [1, 2])
def test_forked_children(stage: int) -> None:
    """A child that is forked right after step() has the new parameters, and waits for nobody."""
    for wrong, number in run_procs(2, fork_each, stage, timeout=150):
        assert not wrong
        assert number > 0


COLLECTIVES: dict[str, Callable[[Tensor], Any]] = {
    "all_reduce": lambda p: dist.all_reduce(p),
    "broadcast": lambda p: dist.broadcast(p, 0),
    "all_gather": lambda p: dist.all_gather([torch.empty(96, 96) for _ in range(2)], p),
    "all_gather_into_tensor": lambda p: dist.all_gather_into_tensor(torch.empty(192, 96), p),
    "reduce": lambda p: dist.reduce(p, 0),
    "gather": lambda p: dist.gather(
        p, None if dist.get_rank() else [torch.empty(96, 96) for _ in range(2)], 0
    ),
    "scatter": lambda p: dist.scatter(torch.empty(96, 96), None if dist.get_rank() else [p, p], 0),
    "all_to_all_single": lambda p: dist.all_to_all_single(torch.empty(96, 96), p),
    "send": lambda p: dist.recv(torch.empty(96, 96), 0) if dist.get_rank() else dist.send(p, 1),
    "all_gather_object": lambda p: dist.all_gather_object([None, None], p),
    "broadcast_object_list": lambda p: dist.broadcast_object_list([p], 0),
}
"""Of torch.distributed, on the parameter itself; README names the ones that do not wait."""


def communicate() -> list[str]:
    """Return the collectives after which a parameter that they read is still in flight."""
    missed = []
    for name, run in COLLECTIVES.items():
        model = pair()
        optimizer = ShardedSGD(model.named_parameters(), lr=0.1, sharding=options(1))
        for param in model.parameters():
            param.grad = torch.ones_like(param)
        optimizer.step()
        weight = model[0].weight  # type: ignore[index]
        was_in_flight = type(weight) is PendingParam
        with torch.no_grad():
            run(weight)
        reads = dist.get_rank() == 0 or name not in ("scatter", "send", "broadcast_object_list")
        if not was_in_flight or (reads and type(weight) is PendingParam):
            missed.append(name)
        optimizer.synchronize()
        dist.barrier()
    return missed


def test_collectives_of_torch() -> None:
    """They run below Python, but ask before whether the tensor is complex or where it lies."""
    for missed in run_procs(2, communicate):
        assert not missed
