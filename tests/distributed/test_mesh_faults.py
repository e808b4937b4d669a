"""Faults of one rank in hybrid sharding: what ranks that share no axis with it are told."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardfuse import ShardConfig, ShardedAdam, ShardedLamb
from shardfuse.comm import gloo, native, session
from shardfuse.grads.full import FullGrads
from tests.distributed.test_mesh import mesh_of, train_model
from tests.support.harness import STAYING, run_procs, run_scripts
from tests.support.overlap import ON
from tests.support.placing import device_type

pytestmark = pytest.mark.timeout(150)


def fail_on_one_rank(how: str) -> str:
    params = [torch.nn.Parameter(torch.ones(3000))]
    lr = 0.2 if how == "another lr" and dist.get_rank() == 3 else 0.1
    try:
        optimizer = ShardedLamb(
            [("weight", params[0])], lr=lr, sharding={"mesh": mesh_of((2, 2)), "kernel": "eager"}
        )
        for step in range(3):
            params[0].grad = torch.ones(3000)
            if how == "raises" and step == 1 and dist.get_rank() == 3:
                params[0].grad = torch.sparse_coo_tensor(torch.tensor([[0]]), [1.0], (3000,))
            if how == "lr later" and step == 1 and dist.get_rank() == 3:
                optimizer.param_groups[0]["lr"] = 0.3
            optimizer.step()
    except (RuntimeError, ValueError) as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("how", "word"), [("another lr", "lr"), ("raises", "sparse"), ("lr later", "lr")]
)
@pytest.mark.cpu_only("where waits do not block the host, ranks hear of it in a later call")
def test_an_error_on_one_rank_reaches_all(how: str, word: str) -> None:
    """Also those that share neither row nor column with it: rank 0 and rank 3."""
    for rank, text in enumerate(run_procs(4, fail_on_one_rank, how)):
        assert word in text, f"rank {rank} has {text!r}"
        assert rank == 3 or "rank 3" in text


def differ(case: str, collectives: str) -> str:
    """Do something on rank 3 alone, which then stays; return what each rank is told."""
    mesh, is_odd = mesh_of((2, 2)), dist.get_rank() == 3
    sharding: dict[str, Any] = {"collectives": collectives, "kernel": "eager", "stage": 2}
    if case != "has a mesh" or is_odd:
        sharding["mesh"] = None if case == "has none" and is_odd else mesh
    sharding["bucket_cap_mb"] = 0.004
    if case == "has a bad option" and is_odd:
        sharding["stages"] = 2
    try:
        model = torch.nn.Sequential(*(torch.nn.Linear(40, 40) for _ in range(4)))
        optimizer = ShardedAdam(model.named_parameters(), sharding=sharding)
        if case == "fails" and is_odd:
            optimizer._grads._send_next = lambda: 1 / 0  # type: ignore[attr-defined]
        model(torch.ones(2, 40)).sum().backward()
        optimizer.step()
    except Exception as error:
        STAYING.append(error)  # its connections stay open: nothing else could tell the others
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize("collectives", ["auto", "pairwise", "native"])
@pytest.mark.parametrize(
    ("case", "word"),
    [
        ("has a mesh", "mesh"),
        ("has none", "mesh"),
        ("has a bad option", "Unknown sharding options ['stages']"),
        ("fails", "division by zero"),
    ],
)
@pytest.mark.cpu_only("where waits do not block the host, ranks hear of it in a later call")
def test_a_rank_that_differs_is_told_of_everywhere(case: str, word: str, collectives: str) -> None:
    """A mesh on one rank alone, or on all but one, and a rank that fails before or in a step."""
    for text in run_procs(4, differ, case, collectives, timeout=30):
        assert word in text


def build(case: str) -> str:
    shapes: dict[str, Any] = {"one axis": (4,), "no shards": (4, 1), "half the ranks": (2, 2)}
    if case == "another order":
        mesh = DeviceMesh(device_type(), [[0, 1], [3, 2]], mesh_dim_names=("replicate", "shard"))
    else:
        mesh = init_device_mesh(device_type(), shapes[case])
    group = dist.new_group([0, 1]) if case == "half the ranks" else None
    if group is not None and dist.get_rank() > 1:
        return "other ranks"
    sharding = {"mesh": mesh, "process_group": group}
    try:
        ShardedAdam([torch.nn.Parameter(torch.ones(3))], sharding=sharding)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("one axis", "two dimensions"),
        ("no shards", "one rank along its shard dimension"),
        ("another order", "Order the ranks of all rows alike"),
        ("half the ranks", "it has 4 ranks, the process group 2"),
    ],
)
def test_meshes_that_are_refused(case: str, message: str) -> None:
    for text in run_procs(4, build, case):
        assert message in text or text == "other ranks"


def test_options_that_are_refused() -> None:
    with pytest.raises(ValueError, match="grad_sync_bits: 8 with a mesh"):
        ShardConfig(mesh=object(), grad_sync_bits=8)


# Slow ranks


def train_slowly(sharding: dict[str, Any]) -> list[torch.Tensor]:
    """Train, impatient and slow; in two steps rank 0 has no backward and sends in step() alone."""
    for module in (session, native, gloo):
        module.PATIENCE_S = 0.01  # type: ignore[attr-defined]
    chance, send = random.Random(dist.get_rank()), FullGrads._launch

    def send_slowly(*args: Any, **options: Any) -> Any:
        time.sleep(chance.choice([0.0, 0.0, 0.03]))
        return send(*args, **options)

    FullGrads._launch = send_slowly  # type: ignore[method-assign]
    names = ["plain", "plain", "without_backward", "plain", "without_backward", "plain"]
    return train_model(names, sharding)[0]


@pytest.mark.parametrize("debug_sync", [False, True])
@pytest.mark.parametrize("collectives", ["pairwise", "native"])
def test_a_rank_that_sends_later_is_no_fault(collectives: str, debug_sync: bool) -> None:
    """Whoever waits for its gradients finds it in step(), and with fewer of them sent."""
    sharding = {**ON, "collectives": collectives, "debug_sync": debug_sync}
    assert len(run_procs(4, train_slowly, sharding)) == 4


DIES = """
import os, sys
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from shardfuse import ShardedAdam
from tests.support.harness import join_world
from tests.support.placing import device_type

rank, collectives = int(sys.argv[1]), sys.argv[3]
join_world(rank, 4, sys.argv[2])
model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(6)))
sharding = {
    "mesh": init_device_mesh(device_type(), (2, 2)),
    "collectives": collectives,
    "bucket_cap_mb": 0.004,
    "kernel": "eager",
}
optimizer = ShardedAdam(model.named_parameters(), lr=0.5, sharding=sharding)
for step in range(3):
    model(torch.ones(2, 64)).sum().backward()
    if step == 1 and rank == 3:
        os._exit(7)
    optimizer.step()
    optimizer.zero_grad()
    optimizer.synchronize()
"""


@pytest.mark.parametrize("collectives", ["auto", "pairwise", "native"])
@pytest.mark.cpu_only("where waits do not block the host, ranks hear of it in a later call")
def test_a_rank_that_dies_ends_the_step_of_all(collectives: str, tmp_path: Path) -> None:
    """Long before the group's timeout, on the rank that shares nothing with it as well."""
    ended = run_scripts(DIES, 4, tmp_path, collectives, timeout=50)
    assert [code for code, _ in ended] == [1, 1, 1, 7], ended
    for _, text in ended[:3]:
        assert "Error: [rank" in text
