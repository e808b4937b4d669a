"""Shards with gaps, sub-meshes, gradients elsewhere or absent, refused and unfrozen params."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from shardfuse import ShardedLamb, ShardedSGD
from shardfuse.comm.session import PeerError
from tests.support.harness import run_procs

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.cpu_only("meshes of the CPU"),
    pytest.mark.gloo_only("DTensor's own collectives"),
]


def sharded(full: Tensor, mesh: object, *placements: object) -> nn.Parameter:
    return nn.Parameter(distribute_tensor(full, mesh, list(placements)))


def give(param: nn.Parameter, full: Tensor) -> None:
    """Give a parameter its gradient."""
    param.grad = distribute_tensor(full, param.device_mesh, param.placements)


def on_two_ranks() -> None:
    mesh = init_device_mesh("cpu", (2,))
    with_gaps = torch.ones(4, 8)[:, :4]
    gaps = nn.Parameter(DTensor.from_local(with_gaps, mesh, [Shard(1)], run_check=False))
    with pytest.raises(TypeError, match=r"local tensor with gaps.*contiguous"):
        ShardedSGD([gaps], lr=1.0)

    # Of six parameters four lack a gradient, one of them another on each rank.
    params = [sharded(torch.ones(4, 4), mesh, Shard(0)) for _ in range(6)]
    optimizer = ShardedLamb(params, lr=0.1, weight_decay=0.1)
    for number in (5, 4 if mesh.get_rank() else 3):
        give(params[number], torch.ones(4, 4))
    before = [p.to_local().clone() for p in params]
    with pytest.raises(PeerError, match="without a gradient"):
        optimizer.step()
    assert all(torch.equal(p.to_local(), b) for p, b in zip(params, before, strict=True))

    first, frozen = (sharded(torch.ones(4, 4), mesh, Shard(0)) for _ in range(2))
    frozen.requires_grad_(False)
    second = ShardedSGD([first, frozen], lr=1.0)
    frozen.requires_grad_(True)
    give(frozen, torch.ones(4, 4))
    second.zero_grad()
    assert frozen.grad is None


def test_on_two_ranks() -> None:
    run_procs(2, on_two_ranks, timeout=100.0)


def on_four_ranks() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    fulls = [torch.randn(8, 4) for _ in range(3)]

    def made() -> list[nn.Parameter]:
        return [
            sharded(fulls[0], mesh, Shard(0), Shard(1)),
            sharded(fulls[1], mesh["dp"], Shard(0)),
            sharded(fulls[2], mesh["tp"], Shard(0)),
        ]

    # Both sub-meshes have two ranks, and each shard's copies are on other ranks.
    params = made()
    optimizer = ShardedSGD(params, lr=1.0)
    grads = [torch.randn(8, 4) * scale for scale in (1, 2, 3)]
    for param, grad in zip(params, grads, strict=True):
        give(param, grad)
    whole = torch.cat([grad.flatten() for grad in grads])
    torch.testing.assert_close(optimizer.clip_grad_norm_(params, 1e9), whole.norm())
    found = optimizer.clip_grad_norm_(params, 1e9, norm_type=1.0)
    torch.testing.assert_close(found, whole.abs().sum())

    optimizer.zero_grad()
    for param, grad in zip(params, grads, strict=True):
        give(param, grad)
    wrong = distribute_tensor(grads[1], mesh["tp"], [Shard(0)])
    params[1].grad = wrong  # torch looks at shapes and not at meshes
    with pytest.raises((RuntimeError, PeerError), match="The gradient of"):
        optimizer.step()

    # A refused group leaves the optimizer as it was.
    (param, *_) = made()
    optimizer = ShardedSGD([param], lr=1.0)
    other = sharded(fulls[1], mesh["dp"], Replicate())
    with torch.no_grad():
        other.to_local().fill_(float(mesh.get_rank()))
    with pytest.raises(ValueError, match="optimizer of their own"):
        optimizer.add_param_group({"params": [other]})
    give(param, grads[0])
    optimizer.step()
    torch.testing.assert_close(param.full_tensor(), fulls[0] - grads[0])


def test_on_four_ranks() -> None:
    run_procs(4, on_four_ranks, timeout=100.0)
