"""Memory as upper bounds derived from dtype sizes: what is held, and what a step allocates."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shardfuse import (
    ShardedAdam,
    ShardedAdamP,
    ShardedAdamW,
    ShardedBertAdam,
    ShardedLamb,
    ShardedSGD,
)
from shardfuse.engine import kernels
from tests.support import placing
from tests.support.harness import run_procs, run_threads
from tests.support.models import flat_buffers, lie_in

pytestmark = pytest.mark.timeout(60)

BLOCK = 512
TILE_NBYTES = 4 * kernels.CPU_TILE
SIZES = [(700, 300), (300,), (50_000,), (1,), (128, 128)]
NUMEL = sum(torch.Size(size).numel() for size in SIZES)

# (class, options, fp32 states per element).
CASES: list[tuple[Callable[..., torch.optim.Optimizer], dict[str, Any], int]] = [
    (ShardedSGD, {"lr": 0.1}, 0),
    (ShardedSGD, {"lr": 0.1, "momentum": 0.9}, 1),
    (ShardedAdam, {}, 2),
    (ShardedAdamW, {"amsgrad": True}, 3),
    (ShardedBertAdam, {"lr": 0.1}, 2),
    (ShardedLamb, {"use_global_grad_norm": True}, 2),
]


def make_params(dtype: torch.dtype) -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(size, dtype=dtype)) for size in SIZES]


def storage_nbytes(tensors: list[Tensor]) -> int:
    """Return the bytes of memory behind `tensors`: of their storages, what overlaps only once."""
    storages: dict[int, int] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        start = storage.data_ptr()
        # One parameter's storage may begin where the whole buffer's does.
        storages[start] = max(storage.nbytes(), storages.get(start, 0))
    total = end = 0
    for start, nbytes in sorted(storages.items()):
        total += max(0, start + nbytes - max(start, end))
        end = max(end, start + nbytes)
    return total


def summarise(cls: Callable[..., Any], options: dict[str, Any], dtype: torch.dtype) -> Any:
    params = make_params(dtype)
    optimizer = cls(params, **options, sharding={"bucket_cap_mb": 0.25})
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    buffers = flat_buffers(optimizer)
    assert lie_in(params, buffers)
    return optimizer.memory_summary(), storage_nbytes(buffers)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize(("cls", "options", "num_states"), CASES)
def test_bytes_held(
    cls: Callable[..., Any],
    options: dict[str, Any],
    num_states: int,
    world_size: int,
    dtype: torch.dtype,
) -> None:
    """Per rank: parameters and gradients once, states and masters divided by the world size."""
    aligned = 512 if placing.on_device() else 64  # bytes
    slot = BLOCK if cls is ShardedLamb else aligned // dtype.itemsize
    padded = NUMEL + len(SIZES) * slot + world_size * BLOCK
    low = dtype != torch.float32
    per_element = 4 * (num_states + low)
    for summary, model_nbytes in run_threads(world_size, summarise, cls, options, dtype):
        assert summary.world_size == world_size
        assert NUMEL * dtype.itemsize <= summary.param_nbytes <= padded * dtype.itemsize
        assert model_nbytes == summary.param_nbytes
        states = summary.state_nbytes
        assert NUMEL * per_element <= states * world_size <= padded * per_element
        assert summary.unsharded_state_nbytes >= NUMEL * per_element
        assert summary.unsharded_state_nbytes <= padded * per_element
        # Two buckets may be in flight in each direction, and a clip keeps all reduced shards.
        staged = 4 * (0.25 * 2**20) + (padded // world_size) * dtype.itemsize
        assert NUMEL * dtype.itemsize <= summary.grad_nbytes
        assert summary.grad_nbytes <= padded * dtype.itemsize + staged
        if world_size == 1:
            assert summary.num_buckets == 1  # nothing is sent
        else:
            assert summary.num_buckets >= NUMEL * dtype.itemsize / (0.25 * 2**20)


def test_one_rank_has_small_buckets_where_temporaries_are_as_large() -> None:
    """AdamP keeps products of a bucket while it updates, so its buckets stay small."""
    summary, _ = summarise(ShardedAdamP, {}, torch.float32)
    assert summary.num_buckets >= NUMEL * 4 / (0.25 * 2**20)


class LargestAllocation(TorchDispatchMode):
    """Remember the largest storage that any operation inside the block creates."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0
        self.op = "none"

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        given = {
            t.untyped_storage().data_ptr()
            for t in tree_leaves((args, kwargs))
            if isinstance(t, Tensor)
        }
        result = func(*args, **kwargs)
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                if storage.data_ptr() not in given and storage.nbytes() > self.nbytes:
                    self.nbytes, self.op = storage.nbytes(), str(func)
        return result


def step_allocation(
    cls: Callable[..., Any], options: dict[str, Any], dtype: torch.dtype
) -> tuple[int, str]:
    """Return the largest allocation of a step after the first, and the operation that made it."""
    params = [nn.Parameter(torch.ones(1_500_000, dtype=dtype)) for _ in range(2)]
    sharding = {"bucket_cap_mb": 0.5, "kernel": "eager"}
    optimizer = cls(params, **options, sharding=sharding)
    for _ in range(2):
        for param in params:
            param.grad = torch.ones_like(param)
        with LargestAllocation() as largest:
            optimizer.step()
        optimizer.zero_grad()
    return largest.nbytes, largest.op


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize(("cls", "options", "num_states"), CASES)
def test_no_full_size_temporary(
    cls: Callable[..., Any],
    options: dict[str, Any],
    num_states: int,
    world_size: int,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A step allocates a bucket in fp32 at a time, never a copy of all parameters or gradients.

    One rank alone has no buckets: there it is an eager tile, which is larger on a device.
    """
    monkeypatch.setattr(kernels, "DEVICE_TILE", kernels.CPU_TILE)
    limit = TILE_NBYTES if world_size == 1 else 0.5 * 2**20 * 4 / dtype.itemsize
    for nbytes, op in run_threads(world_size, step_allocation, cls, options, dtype):
        assert nbytes <= limit, op


def held_in_training(cls: Callable[..., Any], bucket_cap_mb: float) -> tuple[float, int]:
    """Train two steps by real backward passes; return (bytes held + largest allocation, P)."""
    model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(16)))
    nbytes = sum(param.nbytes for param in model.parameters())
    optimizer = cls(
        model.parameters(), sharding={"bucket_cap_mb": bucket_cap_mb, "kernel": "eager"}
    )
    for _ in range(2):
        model(torch.ones(2, 512)).sum().backward()
        with LargestAllocation() as largest:
            optimizer.step()
        optimizer.zero_grad()
    held = optimizer.memory_summary()
    return held.param_nbytes + held.grad_nbytes + held.state_nbytes + largest.nbytes, nbytes


@pytest.mark.gloo_only("how the parts travel")
@pytest.mark.parametrize("cls", [ShardedAdam, ShardedLamb])
def test_peak_memory_of_two_ranks(cls: Callable[..., Any]) -> None:
    """Over gloo, 3.2 times the parameters' bytes: they, the gradients, half the states, staging.

    Buckets are a seventeenth of the model, as 25 MiB ones are of BERT-base.
    """
    for held, nbytes in run_procs(2, held_in_training, cls, 16 / 17):
        assert 3 * nbytes <= held <= 3.2 * nbytes


def test_the_probe_sees_allocations() -> None:
    """The probe of the test above reports a temporary of the size it has."""
    x = torch.ones(1000)
    with LargestAllocation() as largest:
        x.add_(1.0)
    assert largest.nbytes == 0
    with LargestAllocation() as largest:
        _ = (x + 1.0).sum()
    assert largest.nbytes == 4000


@pytest.mark.parametrize(("cls", "options", "num_states"), CASES)
def test_states_are_freed_with_the_optimizer(
    cls: Callable[..., Any], options: dict[str, Any], num_states: int
) -> None:
    """After the optimizer is gone only the flat parameter buffer is left, owned by the model."""
    params = make_params(torch.bfloat16)
    alive: list[Any] = []
    before = live_nbytes()
    optimizer: Any = cls(params, **options)
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    optimizer.zero_grad()
    held = optimizer.memory_summary()
    alive.append(weakref.ref(optimizer))
    del optimizer
    assert alive[0]() is None, "a reference cycle keeps the optimizer until the next collection"
    gc.collect()
    # The parameters have moved: their own storages are gone, the padded flat one is there.
    padding = held.param_nbytes - NUMEL * 2
    assert live_nbytes() - before <= padding + BLOCK
    assert all(torch.isfinite(p).all() for p in params)


def live_nbytes() -> int:
    """Return the bytes of all tensor storages that Python can reach."""
    gc.collect()
    return storage_nbytes([t for t in gc.get_objects() if type(t) in (Tensor, nn.Parameter)])
