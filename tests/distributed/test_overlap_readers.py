"""Nobody reads a parameter that is under way: every way to one waits for it."""

from __future__ import annotations

import copy
import ctypes
import functools
import io
import threading
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardfuse import ShardedAdamW, ShardedSGD
from shardfuse.engine.gather import PendingParam
from tests.support import placing
from tests.support.harness import run_procs, run_threads
from tests.support.lazy import LazyCommunicator, Post
from tests.support.overlap import OFF, ON, Net, plain, tokens

pytestmark = pytest.mark.timeout(120)


def functional(model: Net) -> Tensor:
    params = dict(model.named_parameters())
    result: Tensor = torch.func.functional_call(model, params, (tokens(0, 9),))
    return result


def functional_grad(model: Net) -> Tensor:
    batch = tokens(0, 9)

    def loss(params: dict[str, Tensor]) -> Tensor:
        result: Tensor = torch.func.functional_call(model, params, (batch,))
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
    start = weight.data_ptr()
    finish_kernels()  # the user's own kernels would be ordered behind these
    memory = (ctypes.c_char * (4 * weight.numel())).from_address(start)
    return torch.frombuffer(bytearray(memory), dtype=torch.float32).sum()


def finish_kernels() -> None:
    """Wait for a device: the stand-in's queued kernels have tensors over the parameters."""
    if placing.on_device():
        torch.accelerator.synchronize()


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


_OF_THE_HOST = pytest.mark.cpu_only("an array has no memory of a device")


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
        finish_kernels()
        optimizer.step()
        optimizer.zero_grad()
    under_way = all(type(param) is PendingParam for param in model.parameters())
    dist.barrier()
    with lock:  # one rank after the other: modules' hook is the process's
        found = READERS[name](model).detach().clone()
    dist.barrier()
    optimizer.synchronize()
    return found, under_way, [type(param) for param in model.parameters()]


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=_OF_THE_HOST) if name in ("numpy", "dlpack") else name
        for name in READERS
    ],
)
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
    is_under_way = type(weight) is PendingParam
    seen = torch.as_tensor(held).clone()
    expected = weight.detach()[3] if keep == "row" else weight.detach()
    return is_under_way, seen, expected.clone()


@pytest.mark.parametrize(
    "keep", ["data", "state_dict", "row", pytest.param("numpy", marks=_OF_THE_HOST)]
)
def test_memory_that_somebody_else_has(keep: str) -> None:
    """step() waits where another tensor has a parameter's memory, for that tells nobody."""
    for is_under_way, seen, expected in run_threads(2, hold, Post(), keep):
        assert not is_under_way
        assert torch.equal(seen, expected)


def read_compiled(is_early: bool) -> list[tuple[float, bool]]:
    """Return what a compiled function finds after each step, and whether it was under way."""
    model = nn.Sequential(nn.Linear(400, 400), nn.Linear(400, 400))
    for param in model.parameters():
        nn.init.zeros_(param)
    sharding = {"collectives": "pairwise", "bucket_cap_mb": 0.1, **ON}
    optimizer = ShardedSGD(model.named_parameters(), 1.0, sharding=sharding)
    mean = torch.compile(
        lambda: torch.stack([layer.weight.mean() for layer in model]).mean(), backend="eager"
    )
    if is_early:
        mean()
    found = []
    for _ in range(3):
        for param in model.parameters():
            param.grad = -torch.ones_like(param)
        optimizer.step()
        is_under_way = type(model[0].weight) is PendingParam
        found.append((mean().item(), is_under_way))
    return found


@pytest.mark.parametrize("is_early", [False, True])
@pytest.mark.cpu_only("torch.compile does not trace the stand-in")
def test_compiled_functions_end_the_overlap(is_early: bool) -> None:
    """torch.compile failed at the class of what was under way: in a function, no hook waited."""
    for found in run_procs(2, read_compiled, is_early):
        assert found == [(1.0, True), (2.0, False), (3.0, False)]


def step_compiled_kernels() -> list[bool]:
    """Return whether one optimizer's are under way after another's step, which compiles first."""
    model = nn.Sequential(nn.Linear(400, 400), nn.Linear(400, 400))
    sharding = {"collectives": "pairwise", "bucket_cap_mb": 0.1, "kernel": "compile", **ON}
    torch.compile = functools.partial(torch.compile, backend="eager")  # type: ignore
    one, other = (ShardedSGD(layer.named_parameters(), 1.0, sharding=sharding) for layer in model)
    found = []
    for _ in range(2):
        for param in model.parameters():
            param.grad = -torch.ones_like(param)
        one.step()
        other.step()
        found.append(type(model[0].weight) is PendingParam)
        dist.barrier()
    return found


@pytest.mark.cpu_only("torch.compile does not trace the stand-in")
def test_compiling_kernels_does_not() -> None:
    """They read nothing that is under way: overlap went, in silence, with a second optimizer."""
    for found in run_procs(2, step_compiled_kernels):
        assert found == [True, True]
