"""ShardedMuon: whole matrices, each transformed on one rank, equal to torch.optim.Muon."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

import shardfuse.engine.matrices
from shardfuse import ShardedMuon
from shardfuse.checkpoint import load, save
from tests.support.counting import counted
from tests.support.dtensors import full
from tests.support.harness import run_procs, run_threads
from tests.support.placing import device_type

pytestmark = [pytest.mark.timeout(180), pytest.mark.filterwarnings("ignore:Muon orthogonalises")]

EAGER = {"kernel": "eager", "bucket_cap_mb": 0.02}
STEPS = 4

SHAPES = [(96, 40), (40,), (24, 96), (24, 24), (24, 24), (1, 24), (5, 24), (7,), (64, 24)]
"""Tall, wide and square, one row, no matrix; cut anywhere by the shards."""


def new_params(shapes: list[tuple[int, ...]] = SHAPES) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    device = device_type()
    return [nn.Parameter(torch.randn(s, generator=generator).to(device)) for s in shapes]


def grads_of(shapes: list[tuple[int, ...]], step: int, rank: int, world_size: int) -> list[Tensor]:
    """Return integers whose mean over ranks is exact: multiples of world_size on the last rank."""
    generator = torch.Generator().manual_seed(100 * step)
    drawn = [[torch.randint(-8, 9, s, generator=generator) for s in shapes] for _ in range(6)]
    if rank < world_size - 1:
        return [grad.float() for grad in drawn[rank]]
    rest = [sum(grads) for grads in zip(*drawn[: world_size - 1], strict=True)]
    mean = drawn[5]  # the same at every world size
    return [
        (world_size * m - r).float() for m, r in zip(mean, rest or [0] * len(mean), strict=True)
    ]


def backward(params: list[nn.Parameter], grads: list[Tensor]) -> None:
    """Make these gradients by autograd, which hooks see."""
    loss = sum((p * g.to(p.device)).sum() for p, g in zip(params, grads, strict=True))
    assert isinstance(loss, Tensor)
    loss.backward()


def values_of(optimizer: Any, params: list[nn.Parameter]) -> list[Tensor]:
    optimizer.consolidate_state_dict(to=None)
    states = optimizer.state_dict()["state"].values()
    found = [v for state in states for v in state.values() if isinstance(v, Tensor)]
    return [p.detach().clone().cpu() for p in params] + [v.clone().cpu() for v in found]


def train(sharding: dict[str, Any], shape: tuple[int, ...] | None = None) -> list[Tensor]:
    """Train; return parameters and states."""
    mesh = {}
    if shape is not None:
        names = ("replicate", "shard")
        mesh = {"mesh": init_device_mesh(device_type(), shape, mesh_dim_names=names)}
    params = new_params()
    optimizer = ShardedMuon(params, lr=0.02, sharding={**EAGER, **sharding, **mesh})
    for step in range(STEPS):
        backward(params, grads_of(SHAPES, step, dist.get_rank(), dist.get_world_size()))
        optimizer.step()
        optimizer.zero_grad()
    return values_of(optimizer, params)


@functools.cache
def alone() -> list[Tensor]:
    found: list[Tensor] = run_procs(1, train, {})[0]
    return found


def assert_equal(found: list[Tensor], expected: list[Tensor]) -> None:
    assert len(found) == len(expected)
    assert all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(found, expected, strict=True))


def test_one_rank_is_torch() -> None:
    """Matrices, bit for bit; the others are those of ShardedAdamW, which has tests of its own."""
    params = new_params()
    matrices = [p for p in params if p.dim() == 2]
    optimizer = torch.optim.Muon(matrices, lr=0.02)
    for step in range(STEPS):
        for param, grad in zip(params, grads_of(SHAPES, step, 0, 1), strict=True):
            param.grad = grad.to(param.device)
        optimizer.step()
    found = alone()
    for index, (param, value) in enumerate(zip(params, found, strict=False)):
        assert torch.equal(param.detach().cpu(), value.cpu()) == (param.dim() == 2), index
    momenta = [optimizer.state[p]["momentum_buffer"].cpu() for p in matrices]
    assert_equal(found[len(params) : len(params) + len(matrices)], momenta)


@pytest.mark.parametrize("sharding", [{}, {"stage": 2}, {"overlap_grad_sync": True}], ids=str)
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_every_world_is_one_rank(world_size: int, sharding: dict[str, Any]) -> None:
    """Parameters and states, bit for bit."""
    for found in run_procs(world_size, train, sharding):
        assert_equal(found, alone())


def test_mesh_is_one_rank() -> None:
    """Matrices are shared out within each row of a 2 x 2 mesh."""
    for found in run_procs(4, train, {}, (2, 2)):
        assert_equal(found, alone())


def several_rounds() -> tuple[int, list[Tensor]]:
    shardfuse.engine.matrices.ROUND_NBYTES = 4096
    params = new_params()
    optimizer = ShardedMuon(params, lr=0.02, sharding={**EAGER, "process_group": counted()})
    calls: Any = optimizer.communicator
    for step in range(STEPS):
        calls.calls.clear()
        backward(params, grads_of(SHAPES, step, dist.get_rank(), dist.get_world_size()))
        optimizer.step()
        optimizer.zero_grad()
    moves = sum(call.op == "all_to_all" for call in calls.calls)
    return moves, values_of(optimizer, params)


def test_rounds_bound_the_memory_of_whole_matrices() -> None:
    """Two all-to-alls a round; the result does not depend on their number."""
    for moves, found in run_procs(2, several_rounds):
        assert moves > 2
        assert moves % 2 == 0
        assert_equal(found, alone())


def count_calls(num_matrices: int) -> list[str]:
    shapes: list[tuple[int, ...]] = [(16, 8)] * num_matrices
    params = new_params(shapes)
    optimizer = ShardedMuon(params, sharding={"process_group": counted(), "kernel": "eager"})
    calls: Any = optimizer.communicator
    for step in range(3):
        calls.calls.clear()
        backward(params, grads_of(shapes, step, dist.get_rank(), 2))
        optimizer.step()
        optimizer.zero_grad()
    return [call.op for call in calls.calls]


def test_collectives_do_not_grow_with_matrices() -> None:
    """One bucket: a reduce-scatter, two all-to-alls, an all-gather."""
    for number in (12, 300):
        for names in run_procs(2, count_calls, number):
            assert sorted(names) == ["all_gather", "all_to_all", "all_to_all", "reduce_scatter"]


def build_net() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Linear(40, 96), nn.Linear(96, 170), nn.Linear(170, 24), nn.Linear(24, 5)]
    return nn.Sequential(*layers).to(device_type())


def train_fsdp(shape: tuple[int, ...] | None) -> list[Tensor]:
    """Train by FSDP2 on a mesh, or without it for None; a large and small local shards."""
    net: Any = build_net()
    if shape is not None:
        names = ("replicate", "shard")[-len(shape) :]
        fully_shard(net, mesh=init_device_mesh(device_type(), shape, mesh_dim_names=names))
    optimizer = ShardedMuon(net, lr=0.02, sharding={"kernel": "eager"})
    for step in range(STEPS):
        shapes = [tuple(p.shape) for p in net.parameters()]
        for param, grad in zip(net.parameters(), grads_of(shapes, step, 0, 1), strict=True):
            if shape is None:
                param.grad = grad
            else:
                place = param.device_mesh, param.placements
                param.grad = torch.distributed.tensor.distribute_tensor(grad, *place)
        optimizer.step()
        optimizer.zero_grad()
    whole = [full(p) if shape is not None else p for p in net.parameters()]
    return [p.detach().clone().cpu() for p in whole]


@pytest.mark.gloo_only("torch averages by ReduceOp.AVG or coalesces, which HCCL does not")
@pytest.mark.cpu_only("FSDP2 averages by ReduceOp.AVG, which HCCL lacks; see test_fsdp_device.py")
def test_fsdp_is_one_rank() -> None:
    """FSDP2 over 2 and 3 ranks, and hybrid over 2 x 2; bit for bit."""
    expected = run_procs(1, train_fsdp, None)[0]
    for shape in ((2,), (3,), (2, 2)):
        world_size = torch.Size(shape).numel()
        for found in run_procs(world_size, train_fsdp, shape):
            assert_equal(found, expected)


def save_fsdp(folder: Path) -> list[Tensor]:
    """Save by torch's own functions after two steps; return the momentum of the first matrix."""
    net, optimizer = stepped_fsdp(2)
    model, states = get_state_dict(net, optimizer)
    dcp.save({"model": model, "optimizer": states}, checkpoint_id=folder)
    return [optimizer.state[next(net.parameters())]["momentum_buffer"].full_tensor()]


def load_fsdp(folder: Path) -> list[Tensor]:
    net, optimizer = stepped_fsdp(1)
    model, states = get_state_dict(net, optimizer)
    saved = {"model": model, "optimizer": states}
    dcp.load(saved, checkpoint_id=folder)
    set_state_dict(
        net, optimizer, model_state_dict=saved["model"], optim_state_dict=saved["optimizer"]
    )
    return [optimizer.state[next(net.parameters())]["momentum_buffer"].full_tensor()]


def stepped_fsdp(steps: int) -> tuple[nn.Module, ShardedMuon]:
    net = build_net()
    fully_shard(net)
    optimizer = ShardedMuon(net, lr=0.02)
    for _ in range(steps):
        net(torch.ones(2, 40, device=device_type())).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return net, optimizer


@pytest.mark.gloo_only("torch averages by ReduceOp.AVG or coalesces, which HCCL does not")
@pytest.mark.cpu_only("FSDP2 averages by ReduceOp.AVG, which HCCL lacks; see test_fsdp_device.py")
def test_states_of_fsdp_are_saved_by_torch(tmp_path: Path) -> None:
    """dcp.save() on two ranks and dcp.load() on three."""
    (expected, _) = run_procs(2, save_fsdp, tmp_path)
    for found in run_procs(3, load_fsdp, tmp_path):
        assert_equal(found, expected)


def sharded_by_columns() -> None:
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh(device_type(), (2,))
    weight = nn.Parameter(distribute_tensor(torch.ones(8, 8), mesh, [Shard(1)]))
    ShardedMuon([("layer.weight", weight)])


def test_other_shards_are_refused_by_name() -> None:
    with pytest.raises(Exception, match=r"layer\.weight is sharded by .*Shard\(dim=1\)"):
        run_procs(2, sharded_by_columns)


def one_lacks_gradients(absent: bool) -> list[Tensor]:
    """The second step leaves two matrices without a gradient on all ranks, one on this."""
    params = new_params()
    optimizer = ShardedMuon(params, lr=0.02, sharding=EAGER)
    for step in range(3):
        rank = dist.get_rank()
        backward(params, grads_of(SHAPES, step, rank, dist.get_world_size()))
        if step == 1:
            params[0].grad = params[3].grad = None
        if step == 1 and absent and rank == dist.get_world_size() - 1:
            params[4].grad = None
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach().clone() for p in params]


def test_absent_gradients_leave_matrices_alone() -> None:
    """On all ranks: no update, no decay of momentum, as in torch. On one rank: zero is its part."""
    expected = run_procs(1, one_lacks_gradients, False)[0]
    for found in run_procs(3, one_lacks_gradients, False):
        assert_equal(found, expected)
    found, other = run_procs(2, one_lacks_gradients, True)
    assert_equal(found, other)
    assert not torch.equal(found[4], expected[4])


def fills(absent: bool) -> tuple[list[Tensor], int]:
    """Train where fresh memory is NaN; return the parameters, and fills in the last step."""
    torch.use_deterministic_algorithms(True)
    params = new_params()
    optimizer = ShardedMuon(params, lr=0.02, sharding=EAGER)
    for step in range(3):
        backward(params, grads_of(SHAPES, step, dist.get_rank(), dist.get_world_size()))
        if absent and step == 1:
            params[0].grad = params[3].grad = None
        with Fills() as counted:
            optimizer.step()
        optimizer.zero_grad()
    return [p.detach().clone() for p in params], counted.number


class Fills(TorchDispatchMode):
    """Counts kernels that only clear memory."""

    number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += func.__name__.partition(".")[0] in ("zeros", "new_zeros", "zero_", "fill_")
        return func(*args, **(kwargs or {}))


@pytest.mark.gloo_only("ranks of HCCL clear what they compare their calls by")
@pytest.mark.cpu_only("ranks of devices clear what they compare their calls by")
def test_directions_are_not_cleared() -> None:
    """Padding is written by the first pass, and what no gradient belongs to is sent to nobody."""
    for absent in (False, True):
        expected = run_procs(1, one_lacks_gradients, False)[0] if absent else None
        for found, number in run_procs(2, fills, absent):
            assert number == 0
            if expected is not None:
                assert_equal(found, expected)


def first_half(folder: Path) -> list[Tensor]:
    params = new_params()
    optimizer = ShardedMuon(params, lr=0.02, sharding=EAGER)
    go_on(params, optimizer, range(2))
    save({"model": nn.ParameterList(params), "optimizer": optimizer}, folder)
    go_on(params, optimizer, range(2, STEPS))
    return values_of(optimizer, params)


def second_half(folder: Path, to: Path | None) -> list[Tensor]:
    params = new_params()
    optimizer = ShardedMuon(params, lr=0.02, sharding=EAGER)
    objects = {"model": nn.ParameterList(params), "optimizer": optimizer}
    load(objects, folder)
    if to is not None:
        save(objects, to)
    go_on(params, optimizer, range(2, STEPS))
    return values_of(optimizer, params)


def go_on(params: list[nn.Parameter], optimizer: Any, steps: range) -> None:
    for step in steps:
        backward(params, grads_of(SHAPES, step, dist.get_rank(), dist.get_world_size()))
        optimizer.step()
        optimizer.zero_grad()


def test_checkpoints_go_from_two_to_three_to_one(tmp_path: Path) -> None:
    """Momentum is cut anew; training goes on bit for bit."""
    first, second = tmp_path / "first", tmp_path / "second"
    for found in run_procs(2, first_half, first):
        assert_equal(found, alone())
    for found in run_procs(3, second_half, first, second):
        assert_equal(found, alone())
    assert_equal(run_procs(1, second_half, second, None)[0], alone())


def from_torch() -> None:
    params, own = new_params(), new_params()
    matrices = [p for p in params if p.dim() == 2]
    theirs = torch.optim.Muon(matrices, lr=0.02)
    mine = ShardedMuon([p for p in own if p.dim() == 2], lr=0.01, sharding=EAGER)
    shapes = [tuple(p.shape) for p in matrices]
    for step in range(3):
        if step == 2:
            mine.load_state_dict(theirs.state_dict())
            for p, q in zip(own, params, strict=True):
                p.data.copy_(q.data)
        grads = grads_of(shapes, step, 0, 1)
        for p, q, grad in zip([p for p in own if p.dim() == 2], matrices, grads, strict=True):
            p.grad, q.grad = grad.clone(), grad
        theirs.step()
        mine.step()
    for p, q in zip(own, params, strict=True):
        if p.dim() == 2:
            assert torch.equal(p, q)


def test_state_dict_of_torch_is_loaded() -> None:
    """torch.optim.Muon's states and hyper-parameters, at two ranks."""
    run_threads(2, from_torch)
