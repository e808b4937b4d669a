"""Which ranks have a gradient for which parameter may be anything, and change with every step."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import init_device_mesh

from shardfuse import ShardedAdam, ShardedGradScaler, ShardedLamb, ShardedSGD
from shardfuse.optim.npu import NpuFusedAdam
from tests.support.harness import run_procs, run_threads
from tests.support.npu_scaler import NpuScaler
from tests.support.overlap import OFF, ON, Net, count_early, tokens
from tests.support.placing import device_type
from tests.support.runs import assert_bitwise, max_relative_error

pytestmark = pytest.mark.timeout(60)

NUM_STEPS = 6
SIZES = [(1,), (1024,), (3500,), (17, 40), (), (9000,), (0,), (1025,)]


def make_params(seed: int, dtype: torch.dtype) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(s, generator=generator).to(dtype)) for s in SIZES]


def grads_of(seed: int, step: int, rank: int, world_size: int) -> list[Tensor | None]:
    """Return integer gradients, multiples of the world size, zeros among them; half are None."""
    chance = random.Random(1000 * seed + 10 * step + rank)
    generator = torch.Generator().manual_seed(1000 * seed + 10 * step + rank)
    grads: list[Tensor | None] = []
    for size in SIZES:
        grad = torch.randint(-1, 2, size, generator=generator) * float(world_size)
        grads.append(grad if chance.random() < 0.5 else None)
    return grads


def mean_of(seed: int, step: int, world_size: int) -> list[Tensor | None]:
    columns = zip(*(grads_of(seed, step, r, world_size) for r in range(world_size)), strict=True)
    means: list[Tensor | None] = []
    for column in columns:
        present = [grad for grad in column if grad is not None]
        means.append(torch.stack(present).sum(0) / world_size if present else None)
    return means


def train(
    cls: Any, options: dict[str, Any], seed: int, world_size: int, dtype: torch.dtype
) -> list[Tensor]:
    """Train on this rank, or unsharded on the mean where there is no process group."""
    params = make_params(seed, dtype)
    sharding = {"kernel": "eager", "bucket_cap_mb": random.Random(seed).choice([0.01, 0.03, 25])}
    optimizer = cls(params, **options, sharding=sharding)
    for step in range(NUM_STEPS):
        if dist.is_initialized():
            grads = grads_of(seed, step, dist.get_rank(), world_size)
        else:
            grads = mean_of(seed, step, world_size)
        for param, grad in zip(params, grads, strict=True):
            param.grad = None if grad is None else grad.to(dtype)
        optimizer.step()
    return [param.detach().clone() for param in params]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("seed", range(8))
def test_any_rank_may_lack_any_gradient(seed: int, world_size: int, dtype: torch.dtype) -> None:
    """Steps, moments and values follow the unsharded run on the mean, bit for bit."""
    for cls, options in (
        (ShardedAdam, {"lr": 0.1, "weight_decay": 0.1}),
        (ShardedSGD, {"lr": 0.1, "momentum": 0.5, "dampening": 0.5}),
    ):
        expected = train(cls, options, seed, world_size, dtype)
        for values in run_threads(world_size, train, cls, options, seed, world_size, dtype):
            assert_bitwise(values, expected)


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("seed", range(6))
def test_lamb_too(seed: int, world_size: int) -> None:
    """LAMB's norms and its step-dependent bias correction see the same parameters as unsharded."""
    options = {"lr": 0.1, "variant": "apex", "weight_decay": 0.1, "use_global_grad_norm": True}
    expected = train(ShardedLamb, options, seed, world_size, torch.float32)
    start = [param.detach() for param in make_params(seed, torch.float32)]
    ranks = run_threads(world_size, train, ShardedLamb, options, seed, world_size, torch.float32)
    for values in ranks:
        # Another order of summation in the norms.
        assert max_relative_error(values, expected, start) < 1e-6
        assert_bitwise(values, ranks[0])


def go_back_after_a_step(sharding: dict[str, Any]) -> None:
    """Of three factors the first two have gradients when a step is made; on rank 1, the first."""
    used, partly, unused = (nn.Parameter(torch.ones(1000)) for _ in range(3))
    optimizer = ShardedAdam([used, partly, unused], lr=0.1, sharding=sharding)
    stale, fresh = (used * used).sum(), (unused * unused).sum()
    (used.sum() + (partly.sum() if dist.get_rank() == 0 else 0.0)).backward()
    optimizer.step()
    assert torch.equal(used.detach(), partly.detach())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        stale.backward()
    fresh.backward()


@pytest.mark.parametrize("sharding", [{}, {"stage": 2}, {"param_sync_dtype": torch.bfloat16}])
def test_graphs_of_before_a_step_are_refused_as_by_torch(sharding: dict[str, Any]) -> None:
    """Backward took the new values of parameters for those that forward had used."""
    run_threads(2, go_back_after_a_step, sharding)


def lack_after_zeros(sharding: dict[str, Any]) -> list[float]:
    """Set gradients to zero, then to None, and have no more of one of them."""
    params = [nn.Parameter(torch.ones(numel)) for numel in (3000, 7, 700)]
    options = {"kernel": "eager", "bucket_cap_mb": 0.004, **sharding}
    optimizer = ShardedSGD(params, lr=0.5, momentum=0.5, sharding=options)
    found = []
    for step in range(3):
        for param in params if step == 0 else (params[0], params[2]):
            param.sum().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        for param in params:
            param.grad = None
        found.append(params[1].detach()[0].item())
    return found


@pytest.mark.parametrize("sharding", [{}, {"overlap_grad_sync": True}])
def test_8_bits_of_none_after_zeros(sharding: dict[str, Any]) -> None:
    """Zeros in the padding of its block made it a gradient: its momentum went on."""
    for found in run_threads(2, lack_after_zeros, {"grad_sync_bits": 8, **sharding}):
        assert found == [0.5, 0.5, 0.5]


# Where collectives run in the order of launches, and gradients leave under backward


class Loop:
    """Trains by steps in which a rank has no backward, or none that sends: another one each time.

    Args:
        sharding: of the optimizer.
        shape: of a mesh over all ranks.
        cls: of the optimizer.
        lacks: what such a rank does not have: "backward", "sync", or "hooks", as it sets gradients.
    """

    num_steps = 6

    def __init__(
        self, sharding: dict[str, Any], shape: Any, cls: Any = ShardedAdam, lacks: str = "backward"
    ) -> None:
        options = {"collectives": "native", "bucket_cap_mb": 0.004, "kernel": "eager", **sharding}
        if shape is not None:
            options["mesh"] = init_device_mesh(device_type(), shape)
        self.rank, self.lacks = dist.get_rank(), lacks
        self.model = Net()
        self.model.blocks[1].requires_grad_(False)
        self.late = [nn.Parameter(torch.ones(numel)) for numel in (3000, 700)]
        self.optimizer = cls(self.model.named_parameters(), lr=0.01, sharding=options)
        self.early = [] if sharding.get("stage") == 2 else count_early(self.optimizer)

    def backward(self, step: int, scale: Callable[[Tensor], Tensor] = lambda loss: loss) -> bool:
        """Return whether this rank has gradients now."""
        loss = scale(self.model(tokens(self.rank, step)))
        if step % 3 == self.rank and self.lacks == "backward":
            return False
        if step % 3 == self.rank and self.lacks == "hooks":
            for param in self.optimizer.param_groups[0]["params"]:
                param.grad = torch.full_like(param, 0.5) if param.requires_grad else None
        elif step % 3 == self.rank:
            with self.optimizer.no_sync():
                loss.backward()
        else:
            loss.backward()
        return True

    def end(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def result(self) -> tuple[list[Tensor], int]:
        """Return the parameters, and how many buckets have left before a call needed them."""
        params = [*self.model.parameters(), *self.late]
        return [param.detach().clone() for param in params], sum(self.early)


def under_a_scaler(sharding: Any, shape: Any, lacks: str, scaler: Any, unscales: bool) -> Any:
    cls = NpuFusedAdam if isinstance(scaler, NpuScaler) else ShardedAdam
    loop = Loop(sharding, shape, cls, lacks)
    for step in range(loop.num_steps):
        has = loop.backward(step, scaler.scale)
        if step == 3 and loop.rank == 1:
            loop.model.blocks[0].weight.grad.fill_(torch.inf)  # type: ignore[union-attr]
        if unscales:
            scaler.unscale_(loop.optimizer)
        scaler.step(loop.optimizer)
        loop.optimizer.zero_grad()
        if has or type(scaler) is not GradScaler:  # torch's own asks for gradients on every rank
            scaler.update()
    return loop.result()


def by_sharded_scaler(sharding: Any, shape: Any) -> Any:
    scaler = ShardedGradScaler(device_type(), init_scale=8.0)
    return under_a_scaler(sharding, shape, "backward", scaler, False)


def by_sharded_scaler_at_once(sharding: Any, shape: Any) -> Any:
    scaler = ShardedGradScaler(device_type(), init_scale=8.0)
    return under_a_scaler(sharding, shape, "sync", scaler, True)


def by_scaler_of_torch(sharding: Any, shape: Any) -> Any:
    return under_a_scaler(sharding, shape, "sync", GradScaler(device_type(), 8.0), False)


def by_scaler_of_torch_npu(sharding: Any, shape: Any) -> Any:
    return under_a_scaler(sharding, shape, "backward", NpuScaler(8.0), False)


def clipping(sharding: Any, shape: Any) -> Any:
    loop = Loop(sharding, shape)
    scaler = ShardedGradScaler(device_type(), init_scale=8.0)
    for step in range(loop.num_steps):
        loop.backward(step, scaler.scale)
        scaler.unscale_(loop.optimizer)
        loop.optimizer.clip_grad_norm(0.05)
        scaler.step(loop.optimizer)
        scaler.update()
        loop.optimizer.zero_grad()
    return loop.result()


def unfreezing(sharding: Any, shape: Any) -> Any:
    loop = Loop(sharding, shape)
    for step in range(loop.num_steps):
        loop.model.blocks[1].requires_grad_(step > 2)
        loop.backward(step)
        loop.end()
    return loop.result()


def adding(sharding: Any, shape: Any) -> Any:
    loop = Loop(sharding, shape)
    for step in range(loop.num_steps):
        if step == 2:
            loop.optimizer.add_param_group({"params": [("between steps", loop.late[0])]})
        loop.backward(step)
        if step == 3:
            loop.optimizer.add_param_group({"params": [("after a backward", loop.late[1])]})
        for param in loop.late if step > 3 else ():
            param.grad = torch.full_like(param, float(loop.rank + step))
        loop.end()
    return loop.result()


def joining(sharding: Any, shape: Any) -> Any:
    loop = Loop(sharding, shape)
    loop.backward(2)
    loop.end()
    for epoch in range(2):
        with Join([loop.optimizer]):
            for step in range(2, 4 + loop.rank):
                loop.backward(10 * epoch + step)
                loop.end()
        loop.backward(30 + epoch)
        loop.end()
    return loop.result()


LOOPS = [
    by_sharded_scaler,
    by_sharded_scaler_at_once,
    by_scaler_of_torch,
    by_scaler_of_torch_npu,
    clipping,
    unfreezing,
    adding,
    joining,
]


@pytest.mark.parametrize(("world_size", "shape"), [(2, None), (3, None), (4, (2, 2))])
@pytest.mark.parametrize("backend", [None, "hccl"])
@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
def test_ranks_launch_in_one_order(
    loop: Callable[..., Any], backend: str | None, world_size: int, shape: Any
) -> None:
    """A rank that has sent nothing under backward sends before any other message: the same bits."""
    expected = run_procs(world_size, loop, OFF, shape, backend=backend, timeout=25)
    found = run_procs(world_size, loop, ON, shape, backend=backend, timeout=25)
    for (values, num_early), (others, none_early) in zip(found, expected, strict=True):
        assert_bitwise(values, others)
        assert num_early > 0 == none_early


@pytest.mark.parametrize("collectives", ["auto", "native"])
def test_a_group_joins_at_stage_2(collectives: str) -> None:
    """There, too, before and after a backward that one rank lacks: as at stage 1."""
    sharding = {**OFF, "collectives": collectives}
    expected = run_procs(2, adding, sharding, None, timeout=25)
    found = run_procs(2, adding, {**sharding, "stage": 2}, None, timeout=25)
    for (values, _), (others, _) in zip(found, expected, strict=True):
        assert_bitwise(values, others)


def sending(lacks: str, is_scaled: bool) -> list[int]:
    """Return how often each bucket left."""
    loop = Loop(ON, None, lacks=lacks)
    scaler = ShardedGradScaler(device_type(), init_scale=8.0, enabled=is_scaled)
    grads, numbers = loop.optimizer._grads, []
    launch = grads._launch

    def counted(index: int, **options: Any) -> Any:
        numbers.append(index)
        return launch(index, **options)

    grads._launch = counted
    for step in range(loop.num_steps):
        loop.backward(step, scaler.scale)
        scaler.step(loop.optimizer)
        scaler.update()
        loop.optimizer.zero_grad()
    return [numbers.count(place) for place in range(len(grads._states))]


@pytest.mark.parametrize(
    ("lacks", "is_scaled"),
    [("backward", False), ("backward", True), ("sync", True), ("hooks", False)],
)
def test_what_is_sent_late_is_sent_once(lacks: str, is_scaled: bool) -> None:
    """As it is when it leaves: nobody can change it before it is used."""
    for numbers in run_procs(2, sending, lacks, is_scaled, backend="hccl", timeout=25):
        assert set(numbers) == {Loop.num_steps}
