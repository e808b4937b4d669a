"""plan_fsdp() against what real ranks hold and send under FSDP2."""

from __future__ import annotations

import functools
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shardfuse import ShardConfig, ShardedAdamP, ShardedAdamW, ShardedLamb, ShardedMuon
from shardfuse.plan import Budget, plan_fsdp
from shardfuse.plan.models import shapes_of_module
from tests.support.harness import run_procs

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.cpu_only("meshes of the CPU"),
    pytest.mark.gloo_only("torch's own collectives"),
]

OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "adamw": (ShardedAdamW, {}),
    "lamb": (ShardedLamb, {"use_global_grad_norm": True}),
    "adamp": (ShardedAdamP, {}),
    "muon": (ShardedMuon, {}),
}

OF_STEP = {"allreduce_": "small all-reduces", "alltoall_base_": "all-to-all of matrices"}

KINDS = {
    "_allgather_base_": "all-gather of parameters",
    "_reduce_scatter_base_": "reduce-scatter of gradients",
    "allreduce_": "sums over rows",
}


class Net(nn.Module):
    """A root with three layers: large and small shards, and rows that ranks pad."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 128)
        layers = [nn.Sequential(nn.Linear(128, 515), nn.Linear(515, 128)) for _ in range(3)]
        self.layers = nn.Sequential(*layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return (..., 128)."""
        return self.layers(self.first(x))  # type: ignore[no-any-return]


class Recorder(TorchDispatchMode):
    """Counts torch's collectives, and the bytes of their whole tensors, or of what they send."""

    def __init__(self, kinds: dict[str, str]) -> None:
        super().__init__()
        self.kinds = kinds
        self.numbers: Counter[str] = Counter()
        self.nbytes: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note a collective of c10d."""
        name = func.name().partition("::")[2]
        if func.namespace == "c10d" and name in self.kinds:
            sizes = [t.nbytes for t in tree_leaves(args) if isinstance(t, torch.Tensor)]
            self.numbers[self.kinds[name]] += 1
            self.nbytes[self.kinds[name]] += sizes[-1] if self.kinds is OF_STEP else max(sizes)
        return func(*args, **(kwargs or {}))


def train(name: str, dtype: torch.dtype, travels_as: torch.dtype | None, rows: int) -> Any:
    model = Net().to(dtype)
    world_size = torch.distributed.get_world_size()
    shape = (world_size,) if rows == 1 else (rows, world_size // rows)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("rows", "shards")[-len(shape) :])
    options = {"mesh": mesh, "mp_policy": MixedPrecisionPolicy(param_dtype=travels_as)}
    for layer in model.layers:
        fully_shard(layer, **options)
    fully_shard(model, **options)
    cls, own = OPTIMIZERS[name]
    sharding = {"kernel": "eager", "collectives": "native"}
    optimizer = cls(model.named_parameters(), **own, sharding=sharding)
    for _ in range(2):
        optimizer.zero_grad()
        with Recorder(KINDS) as recorder:
            model(torch.ones(4, 16, dtype=dtype)).float().square().mean().backward()
        with Recorder(OF_STEP) as in_step:
            optimizer.step()
    summary = optimizer.memory_summary()
    return {
        "parameters": summary.param_nbytes,
        "gradients": sum(p.grad.to_local().nbytes for p in model.parameters()),
        "optimizer states and masters": summary.state_nbytes,
    }, (recorder.numbers, recorder.nbytes, in_step.numbers, in_step.nbytes)


def planned(name: str, dtype: torch.dtype, travels_as: Any, ranks: int, rows: int) -> Budget:
    cls, own = OPTIMIZERS[name]

    def build(params: Any, **options: Any) -> Any:
        return cls(params, **own, **options)

    shapes = shapes_of_module(Net().to(dtype))
    return plan_fsdp(
        shapes,
        build,
        world_size=ranks,
        num_replicas=rows,
        dtype=dtype,
        travels_as=travels_as,
        device="cpu",
    )


CASES = [
    ("adamw", torch.float32, None, 2, 1),
    ("lamb", torch.float32, torch.bfloat16, 3, 1),
    ("adamp", torch.bfloat16, None, 2, 1),
    ("adamw", torch.float32, torch.bfloat16, 4, 2),
    ("muon", torch.float32, None, 3, 1),
    ("muon", torch.float32, None, 4, 2),
]


@pytest.mark.parametrize(("name", "dtype", "travels_as", "ranks", "rows"), CASES)
def test_real_ranks(name: str, dtype: Any, travels_as: Any, ranks: int, rows: int) -> None:
    """The first rank, whose shards have no padding, holds and sends what was planned."""
    budget = planned(name, dtype, travels_as, ranks, rows)
    found = run_procs(ranks, train, name, dtype, travels_as, rows)
    memory, (numbers, nbytes, *_) = found[0]
    assert memory == budget.memory
    calls = {call.kind: call for call in budget.collectives if call.kind in KINDS.values()}
    assert numbers == {kind: call.number for kind, call in calls.items()}
    assert nbytes == {kind: call.payload_nbytes for kind, call in calls.items()}
    own = {call.kind: call for call in budget.collectives if call.kind in OF_STEP.values()}
    assert (
        sorted(own)
        == {
            "adamw": [],
            "lamb": ["small all-reduces"],
            "adamp": ["small all-reduces"],
            "muon": ["all-to-all of matrices"],
        }[name]
    )
    for kind, call in own.items():
        sent = [counts[3][kind] for _, counts in found]
        assert [counts[2][kind] for _, counts in found] == [call.number] * ranks
        # All ranks send parts of the matrices, and have the same sums.
        total = sum(sent) if name == "muon" else sent[0]
        assert total == call.payload_nbytes
        if name == "muon":
            assert call.sent_nbytes == pytest.approx(total * (ranks - 1) / ranks**2)
    layer = 2 * (128 * 515) + 515 + 128
    gathered = budget.for_a_time["forward: gathered layers"]
    item = (travels_as or dtype).itemsize
    assert gathered == pytest.approx((16 * 128 + 128 + 3 * layer) * item, rel=0.02)


def test_an_accelerator_compares_calls() -> None:
    """By 24 bytes, in a step that communicates."""
    for name, numbers in (("adamw", []), ("lamb", [(3, 24)]), ("adamp", [(2, 24)])):
        cls, own = OPTIMIZERS[name]
        build = functools.partial(cls, **own)
        shapes, found = shapes_of_module(Net()), {}
        for device in ("cpu", "npu"):
            budget = plan_fsdp(shapes, build, world_size=4, device=device)
            found[device] = [call for call in budget.collectives if call.axis == "all"]
        more = [
            (npu.number, npu.payload_nbytes - cpu.payload_nbytes)
            for cpu, npu in zip(found["cpu"], found["npu"], strict=True)
        ]
        assert more == numbers, name


def test_what_is_refused() -> None:
    def build(params: Any, **options: Any) -> Any:
        return ShardedAdamW(params, **options)

    shapes = [("layer.0.weight", (8, 4))]
    for options, text in (
        ({"world_size": 2, "sharding": ShardConfig(stage=2)}, "Invalid stage: 2 .* DTensors"),
        ({"world_size": 2, "num_replicas": 2}, "FSDP2 shards nothing"),
        ({"world_size": 3, "num_replicas": 2}, "Give a multiple"),
    ):
        with pytest.raises(ValueError, match=text):
            plan_fsdp(shapes, build, **options)
