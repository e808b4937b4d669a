"""Models that FSDP2 has sharded: training, counts, states, checkpoints, and what is refused."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.utils._pytree import tree_map_only

from shardfuse import (
    ShardedAdamP,
    ShardedAdamW,
    ShardedBertAdam,
    ShardedGradScaler,
    ShardedLamb,
    ShardedSGD,
)
from shardfuse.comm.session import PeerError
from shardfuse.optim import npu
from shardfuse.training import StepMonitor
from tests.support import dtensors
from tests.support.dtensors import BUILD, REDUCING, Net, fsdp_net, full, rank_grads
from tests.support.harness import run_procs
from tests.support.placing import device_type

pytestmark = [
    pytest.mark.timeout(240),
    pytest.mark.cpu_only("DTensors gather by coalesced collectives; see test_fsdp_device.py"),
]

EAGER = {"kernel": "eager"}
ALONE = {"process_group": "alone", **EAGER}


def run_steps(model: nn.Module, optimizer: Any, steps: range, accumulate: int = 1) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for step in steps:
        optimizer.zero_grad()
        for part in range(accumulate):
            model(rank_grads(step + 7 * part, rank, world_size)).backward()
        optimizer.step()


def named(model: Any) -> list[tuple[str, nn.Parameter]]:
    return list(model.named_parameters())


def values(model: nn.Module) -> list[Tensor]:
    return [full(param) for param in model.parameters()]


# Training


def train_models(num_steps: int) -> dict[str, list[Tensor]]:
    found = {}
    for name, build in BUILD.items():
        for accumulate, reshards in ((1, True), (2, False)):
            model = fsdp_net(reshard_after_forward=reshards)
            optimizer = build(named(model), sharding=EAGER)
            run_steps(model, optimizer, range(num_steps), accumulate)
            found[f"{name} x{accumulate}"] = values(model)
    return found


def train_alone(world_size: int, num_steps: int) -> dict[str, list[Tensor]]:
    found = {}
    for name, build in BUILD.items():
        for accumulate in (1, 2):
            model = Net()
            optimizer = build(named(model), sharding=ALONE)
            for step in range(num_steps):
                optimizer.zero_grad()
                for part in range(accumulate):
                    grads = [rank_grads(step + 7 * part, r, world_size) for r in range(world_size)]
                    mean = {key: sum(g[key] for g in grads) / world_size for key in grads[0]}
                    model(mean).backward()
                optimizer.step()
            found[f"{name} x{accumulate}"] = values(model)
    return found


@pytest.mark.gloo_only("torch averages by ReduceOp.AVG or coalesces, which HCCL does not")
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_every_optimizer_trains_a_model(world_size: int) -> None:
    """As one process does on the mean of all ranks' gradients: bit for bit without norms."""
    expected = train_alone(world_size, 3)
    for found in run_procs(world_size, train_models, 3, timeout=200.0):
        assert found.keys() == expected.keys()
        for name, own in found.items():
            for value, same in zip(own, expected[name], strict=True):
                if name.partition(" ")[0] in REDUCING:
                    torch.testing.assert_close(value, same, rtol=2e-6, atol=2e-6)
                else:
                    assert torch.equal(value, same), name


class Block(nn.Module):
    """A part of a transformer that tensor parallelism splits."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 14), nn.Linear(14, 8)

    def forward(self, x: Tensor) -> Tensor:
        """Return (..., 8)."""
        return x + self.down(torch.relu(self.up(self.norm(x))))


def blocks() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block(), nn.Linear(8, 5))


TENSOR_PARALLEL: dict[str, Callable[..., Any]] = {
    "lamb": lambda params, **options: ShardedLamb(
        params, lr=0.01, weight_decay=0.1, variant="nvlamb", use_global_grad_norm=True, **options
    ),
    "adamp": lambda params, **options: ShardedAdamP(params, lr=0.01, weight_decay=0.1, **options),
    "bert": lambda params, **options: ShardedBertAdam(params, lr=0.01, **options),
    "adamw": lambda params, **options: ShardedAdamW(params, lr=0.01, **options),
}


def train_tensor_parallel() -> dict[str, float]:
    """Return the greatest differences from one process; of norms, too."""
    mesh = init_device_mesh(device_type(), (2, 2), mesh_dim_names=("dp", "tp"))
    found = {}
    for name, build in TENSOR_PARALLEL.items():
        model, whole = blocks(), blocks()
        for block in list(model)[:2]:
            plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
            fully_shard(parallelize_module(block, mesh["tp"], plan), mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])
        optimizer = build(named(model), sharding=EAGER)
        reference = build(named(whole), sharding=ALONE)
        for step in range(3):
            torch.manual_seed(10 + step)
            inputs = torch.randn(2, 6, 8)
            optimizer.zero_grad()
            model(inputs[mesh.get_local_rank("dp")]).square().mean().backward()
            reference.zero_grad()
            (sum(whole(x).square().mean() for x in inputs) / 2).backward()
            norms = [float(each.clip_grad_norm(0.3)) for each in (optimizer, reference)]
            found[f"{name} norm {step}"] = abs(norms[0] / norms[1] - 1)
            optimizer.step()
            reference.step()
        pairs = zip(values(model), values(whole), strict=True)
        found[name] = max(float((a - b).abs().max()) for a, b in pairs)
    return found


@pytest.mark.gloo_only("torch averages by ReduceOp.AVG or coalesces, which HCCL does not")
def test_tensor_parallel_model() -> None:
    """2 x 2: parameters on both dimensions, or on one of them with copies along the other."""
    for found in run_procs(4, train_tensor_parallel, timeout=200.0):
        assert max(found.values()) < 1e-6, found


# Counts


def count_collectives() -> dict[tuple[str, int], int]:
    rows: dict[str, Any] = {
        "adamw": ShardedAdamW,
        "lamb": ShardedLamb,
        "adamp": ShardedAdamP,
        "bert": ShardedBertAdam,
        "lamb, global norm": lambda params, **options: ShardedLamb(
            params, use_global_grad_norm=True, **options
        ),
        "adamw, clip": lambda params, **options: ShardedAdamW(
            params, sharding={"clip_grad_norm": 1.0, **options.pop("sharding")}, **options
        ),
        "paddle, clip by tensor": lambda params, lr, **options: dtensors.paddle_lamb(
            params, **options
        ),
    }
    found = {}
    for num_tensors in (10, 1000):
        model = nn.Sequential(*(nn.Linear(3, 3, bias=False) for _ in range(num_tensors)))
        fully_shard(model)
        for name, build in rows.items():
            optimizer = build(named(model), lr=0.1, sharding={"collectives": "native", **EAGER})
            for _ in range(3):  # the first step compares options, too
                for param in model.parameters():
                    param.grad = torch.ones_like(param)
                with CommDebugMode() as mode:
                    optimizer.step()
            found[name, num_tensors] = mode.get_total_counts()
    return found


def test_collectives_do_not_grow_with_tensors() -> None:
    """None for elements, one for sums of tensors or rows, one more for a global norm."""
    expected = {
        "adamw": 0,
        "lamb": 1,
        "adamp": 1,
        "bert": 1,
        "lamb, global norm": 2,
        "adamw, clip": 1,
        "paddle, clip by tensor": 2,
    }
    for found in run_procs(2, count_collectives, timeout=200.0):
        assert found == {(n, k): count for n, count in expected.items() for k in (10, 1000)}


# States


def copied(state: Any) -> Any:
    """Return a copy: torch.optim adopts the tensors of a state dict as its own states."""
    return tree_map_only(torch.Tensor, torch.clone, state)


def move_states() -> None:
    """torch.optim.AdamW under FSDP2 and ShardedAdamW load each other's states, in all forms."""
    forms = {
        "sharded": StateDictOptions(),
        "full": StateDictOptions(full_state_dict=True),
        "flat": StateDictOptions(flatten_optimizer_state_dict=True),
    }
    for form, options in forms.items():
        theirs, ours = fsdp_net(), fsdp_net()
        their_optimizer = torch.optim.AdamW(named(theirs), lr=0.05, foreach=False)
        optimizer = ShardedAdamW(named(ours), lr=0.01, sharding=EAGER)
        run_steps(theirs, their_optimizer, range(2))
        ours.load_state_dict(theirs.state_dict())
        saved = copied(get_optimizer_state_dict(theirs, their_optimizer, options=options))
        for group in saved.get("param_groups", ()):
            group["lr"] = 0.05
        set_optimizer_state_dict(ours, optimizer, saved, options=options)
        assert optimizer.param_groups[0]["lr"] == 0.05, form
        for param, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            own, their = optimizer.state[param], their_optimizer.state[other]
            assert own.keys() == their.keys()
            for name in own:
                assert torch.equal(full(own[name]), full(their[name])), (form, name)
        run_steps(ours, optimizer, range(2, 3))
        saved = copied(get_optimizer_state_dict(ours, optimizer, options=options))
        theirs.load_state_dict(ours.state_dict())
        set_optimizer_state_dict(theirs, their_optimizer, saved, options=options)
        for param, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            for name, value in optimizer.state[param].items():
                assert torch.equal(full(value), full(their_optimizer.state[other][name]))
        run_steps(ours, optimizer, range(3, 5))
        run_steps(theirs, their_optimizer, range(3, 5))
        for a, b in zip(values(ours), values(theirs), strict=True):
            torch.testing.assert_close(a, b, rtol=2e-6, atol=2e-6)
    # By torch.optim's own methods, too.
    again = ShardedAdamW(named(ours), lr=0.05, sharding=EAGER)
    again.load_state_dict(optimizer.state_dict())
    assert float(again.state[next(ours.parameters())]["step"]) == 5


@pytest.mark.gloo_only("torch averages by ReduceOp.AVG or coalesces, which HCCL does not")
def test_states_of_torch() -> None:
    run_procs(2, move_states, timeout=200.0)


def move_first_momenta(folder: str, names: Sequence[str]) -> None:
    """The first update of a momentum is not damped, also where other parameters have had theirs."""
    for form in ("own", "sharded", "full", "flat", "files"):
        options = StateDictOptions(
            full_state_dict=form == "full", flatten_optimizer_state_dict=form == "flat"
        )
        models = [fsdp_net(names=names) for _ in range(2)]
        build = functools.partial(ShardedSGD, lr=0.1, momentum=0.9, dampening=0.3, sharding=EAGER)
        kept, moved = (build(named(model)) for model in models)
        for step in range(3):
            for model, optimizer in zip(models, (kept, moved), strict=True):
                model(rank_grads(step, dist.get_rank(), dist.get_world_size())).backward()
                if not step:
                    model.layers[0].weight.grad = None
                optimizer.grad_norm()  # compares what ranks have loaded; step() has no collective
                optimizer.step()
                optimizer.zero_grad()
            assert all(map(torch.equal, *map(values, models))), (form, step)
            saved = moved.state_dict()
            if form != "own":
                saved = get_optimizer_state_dict(models[1], moved, options=options)
            moved = build(named(models[1]))
            if form == "files":
                path = f"{folder}/{step}"
                dcp.save({"optimizer": saved}, checkpoint_id=path)
                saved = get_optimizer_state_dict(models[1], moved, options=options)
                dcp.load({"optimizer": saved}, checkpoint_id=path)
            if form == "own":
                moved.load_state_dict(saved)
            else:
                set_optimizer_state_dict(models[1], moved, copied(saved), options=options)


@pytest.mark.gloo_only("torch averages by ReduceOp.AVG or coalesces, which HCCL does not")
@pytest.mark.parametrize(("world_size", "names"), [(2, ("odd", "norm")), (3, ("few.rows",))])
def test_first_momenta(world_size: int, names: Sequence[str], tmp_path: Path) -> None:
    """Also where a rank has no element of any parameter."""
    run_procs(world_size, move_first_momenta, str(tmp_path), names)


def save_and_go_on(folder: str) -> dict[str, list[Tensor]]:
    found = {}
    for name in ("ShardedAdamW", "ShardedLamb", "ShardedSGD", "ShardedRMSpropTF"):
        model = fsdp_net()
        optimizer = BUILD[name](named(model), sharding=EAGER)
        run_steps(model, optimizer, range(2))
        state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
        if name == "ShardedLamb":
            group = dist.new_group()
            dcp.async_save(state, checkpoint_id=f"{folder}/{name}", process_group=group).result()
        else:
            dcp.save(state, checkpoint_id=f"{folder}/{name}")
        whole = [rank_grads(2, rank, 2) for rank in range(2)]
        optimizer.zero_grad()
        model({key: (whole[0][key] + whole[1][key]) / 2 for key in whole[0]}).backward()
        optimizer.step()
        found[name] = values(model)
    return found


def load_and_go_on(folder: str) -> dict[str, list[Tensor]]:
    found = {}
    for name in ("ShardedAdamW", "ShardedLamb", "ShardedSGD", "ShardedRMSpropTF"):
        model = fsdp_net()
        with torch.no_grad():
            for param in model.parameters():
                param.zero_()
        optimizer = BUILD[name](named(model), sharding=EAGER)
        own_model, own = get_state_dict(model, optimizer)
        state = {"model": own_model, "optimizer": own}
        dcp.load(state, checkpoint_id=f"{folder}/{name}")
        set_state_dict(
            model,
            optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        whole = [rank_grads(2, rank, 2) for rank in range(2)]
        optimizer.zero_grad()
        model({key: (whole[0][key] + whole[1][key]) / 2 for key in whole[0]}).backward()
        optimizer.step()
        found[name] = values(model)
    return found


@pytest.mark.gloo_only("torch averages by ReduceOp.AVG or coalesces, which HCCL does not")
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_checkpoints_reshard(world_size: int, tmp_path: Path) -> None:
    """Saved at two ranks by torch.distributed.checkpoint, loaded at 1, 2 and 3: the same bits."""
    expected = run_procs(2, save_and_go_on, str(tmp_path), timeout=200.0)[0]
    for found in run_procs(world_size, load_and_go_on, str(tmp_path), timeout=200.0):
        for name, own in found.items():
            for value, same in zip(own, expected[name], strict=True):
                if name in REDUCING:
                    torch.testing.assert_close(value, same, rtol=1e-6, atol=1e-6)
                else:
                    assert torch.equal(value, same), name


def edit_state_dicts() -> None:
    model = fsdp_net()
    optimizer = ShardedAdamW(named(model), lr=0.05, sharding=EAGER)
    run_steps(model, optimizer, range(1))
    before = values(model), full(optimizer.state[model.layers[0].weight]["exp_avg"])

    def edited(change: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
        state = optimizer.state_dict()
        change(state["state"][0])
        return state

    mesh = init_device_mesh(device_type(), (dist.get_world_size(),))
    wrong: Mapping[str, tuple[type[Exception], dict[str, Any]]] = {
        "shape": (ValueError, edited(lambda entry: entry.update(exp_avg=torch.zeros(3, 2)))),
        "is placed as": (
            ValueError,
            edited(
                lambda e: e.update(
                    exp_avg=distribute_tensor(torch.zeros(8191, 6), mesh, [Replicate()])
                )
            ),
        ),
        "has no exp_avg": (ValueError, edited(lambda entry: entry.pop("exp_avg"))),
        "would be lost": (
            ValueError,
            edited(lambda entry: entry.update(other=torch.zeros(8191, 6))),
        ),
        "whole number": (ValueError, edited(lambda entry: entry.update(step=-1))),
        "parameter groups": (ValueError, {"state": {}, "param_groups": []}),
    }
    for text, (kind, state) in wrong.items():
        with pytest.raises(kind, match=text):
            optimizer.load_state_dict(state)
    # An error on one rank alone reaches the others, and nobody has loaded anything.
    state = edited(lambda e: e.pop("exp_avg")) if dist.get_rank() == 1 else optimizer.state_dict()
    with pytest.raises(ValueError if dist.get_rank() == 1 else RuntimeError, match="no exp_avg"):
        optimizer.load_state_dict(state)
    after = values(model), full(optimizer.state[model.layers[0].weight]["exp_avg"])
    assert torch.equal(before[1], after[1])
    with pytest.raises(RuntimeError, match="nothing can be put in its place"):
        optimizer.state[model.layers[0].weight]["exp_avg"] = torch.zeros(1)
    fresh = optimizer.state_dict()
    optimizer.load_state_dict({**fresh, "state": {}})
    assert float(optimizer.state[model.layers[0].weight]["step"]) == 0
    assert not full(optimizer.state[model.layers[0].weight]["exp_avg"]).any()


@pytest.mark.gloo_only("torch averages by ReduceOp.AVG or coalesces, which HCCL does not")
def test_edited_state_dicts() -> None:
    """Each fault is named on every rank before anything is loaded."""
    run_procs(2, edit_state_dicts)


# Around the step


def go_through_features() -> None:
    rank = dist.get_rank()
    plain = Net()
    reference = ShardedLamb(named(plain), lr=0.05, sharding=ALONE)
    # Frozen, later unfrozen; absent on all ranks.
    model = fsdp_net()
    model.layers[1].weight.requires_grad_(False)
    optimizer = ShardedLamb(named(model), lr=0.05, sharding=EAGER)
    assert not optimizer.state[model.layers[1].weight]
    run_steps(model, optimizer, range(1))
    model.layers[1].weight.requires_grad_(True)
    run_steps(model, optimizer, range(1, 2))
    optimizer.zero_grad()
    model(rank_grads(2, rank, 2)).backward()
    model.layers[3].weight.grad = None
    optimizer.step()
    counts = [float(optimizer.state[layer.weight]["step"]) for layer in model.layers]
    assert counts == [3, 2, 3, 2, 3, 3, 3, 3]
    for step in range(3):
        grads = [rank_grads(step, r, 2) for r in range(2)]
        reference.zero_grad()
        plain({key: (grads[0][key] + grads[1][key]) / 2 for key in grads[0]}).backward()
        if step == 0:
            plain.layers[1].weight.grad = None
        if step == 2:
            plain.layers[3].weight.grad = None
        reference.step()
    for value, same in zip(values(model), values(plain), strict=True):
        torch.testing.assert_close(value, same, rtol=1e-6, atol=1e-6)
    # Norms of one step, and of all gradients.
    monitor = StepMonitor(optimizer, every=1)
    optimizer.zero_grad()
    model(rank_grads(3, rank, 2)).backward()
    norm = float(optimizer.grad_norm())
    by_torch = float(full(nn.utils.get_total_norm([p.grad for p in model.parameters()])))
    assert norm == pytest.approx(by_torch, rel=1e-6)
    weight = float(full(model.layers[0].weight).norm())
    assert float(optimizer.clip_grad_norm_(model.parameters(), 1.0)) == pytest.approx(norm)
    largest = max(float(full(p.grad).abs().max()) for p in model.parameters())
    found = float(optimizer.clip_grad_norm_(model.parameters(), 2.0, norm_type=math.inf))
    assert found == pytest.approx(largest / norm, rel=1e-5)
    optimizer.step()
    (record,) = monitor.close()
    assert record.tensors["layers.0.weight"].weight == pytest.approx(weight, rel=1e-6)
    ratios = optimizer.trust_ratios()
    assert record.tensors["layers.0.weight"].trust_ratio == ratios["layers.0.weight"]
    # A gradient that is changed after it was clipped.
    optimizer.zero_grad()
    model(rank_grads(3, rank, 2)).backward()
    optimizer.clip_grad_norm(1.0)
    model.layers[0].weight.grad.mul_(2)
    with pytest.raises((RuntimeError, PeerError), match="changed between"):
        optimizer.step()
    # A new group.
    extra = nn.Linear(4, 4)
    fully_shard(extra)
    optimizer.add_param_group({"params": list(extra.named_parameters()), "lr": 0.1})
    extra(torch.ones(1, 4)).sum().backward()
    before = full(extra.weight).clone()
    optimizer.zero_grad()
    extra(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    assert not torch.equal(before, full(extra.weight))
    assert "over 2 ranks" in str(optimizer.memory_summary())


@pytest.mark.gloo_only("torch averages by ReduceOp.AVG or coalesces, which HCCL does not")
def test_features() -> None:
    """Frozen and absent parameters, norms, clips, watched steps, groups."""
    run_procs(2, go_through_features)


def scale_gradients() -> None:
    for make in (ShardedGradScaler, torch.amp.GradScaler):
        model, plain = fsdp_net(), fsdp_net()
        scaler = make(device_type(), init_scale=1024.0)
        optimizer = ShardedLamb(named(model), lr=0.05, sharding={"report_overflow": True, **EAGER})
        reference = ShardedLamb(named(plain), lr=0.05, sharding=EAGER)
        for step, unscales in enumerate((True, False)):
            optimizer.zero_grad()
            scaler.scale(model(rank_grads(step, dist.get_rank(), 2))).backward()
            if unscales:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        run_steps(plain, reference, range(2))
        for value, same in zip(values(model), values(plain), strict=True):
            torch.testing.assert_close(value, same, rtol=2e-6, atol=2e-6)
        before = values(model)
        grads = rank_grads(2, dist.get_rank(), 2)
        if dist.get_rank() == 0:
            grads["head"][0, 0] = math.inf  # in the shard of one rank alone
        optimizer.zero_grad()
        scaler.scale(model(grads)).backward()
        scaler.step(optimizer)
        scaler.update()
        assert all(map(torch.equal, before, values(model)))
        assert scaler.get_scale() == 512.0
        assert optimizer.last_overflow.name == "layers.7.weight"


@pytest.mark.gloo_only("torch averages by ReduceOp.AVG or coalesces, which HCCL does not")
def test_gradient_scalers() -> None:
    """torch's and ours: an overflow in one rank's shard skips the step on all."""
    run_procs(2, scale_gradients)


def train_in_low_precision() -> None:
    low = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = fsdp_net(mp_policy=low)
    optimizer = ShardedLamb(named(model), lr=0.05, sharding=EAGER)
    run_steps(model, optimizer, range(2))
    assert {param.dtype for param in model.parameters()} == {torch.float32}
    # Parameters of lower precision have masters in fp32, as elsewhere; a loaded value wins.
    half = fsdp_net()
    half.to(torch.bfloat16)
    optimizer = ShardedAdamW(named(half), lr=0.05, sharding=EAGER)
    plain = Net().to(torch.bfloat16)
    reference = ShardedAdamW(named(plain), lr=0.05, sharding=ALONE)
    for step in range(3):
        grads = rank_grads(step, 0, 2)  # the same on both ranks: sums in bf16 are exact
        for own, each in ((optimizer, half), (reference, plain)):
            own.zero_grad()
            each(grads).backward()
            own.step()
    assert all(map(torch.equal, values(half), values(plain)))
    master = optimizer.state[half.layers[0].weight]["param"]
    assert torch.equal(full(master).to(torch.bfloat16), full(half.layers[0].weight))
    state = get_optimizer_state_dict(half, optimizer)
    again = ShardedAdamW(named(half), lr=0.05, sharding=EAGER)
    set_optimizer_state_dict(half, again, state)
    assert torch.equal(full(again.state[half.layers[0].weight]["param"]), full(master))


@pytest.mark.gloo_only("torch averages by ReduceOp.AVG or coalesces, which HCCL does not")
def test_precision() -> None:
    """fp32 parameters under a mixed precision policy; bf16 parameters with masters."""
    run_procs(2, train_in_low_precision)


# What is refused


OPTIONS: dict[str, Any] = {
    "stage": 2,
    "process_group": "alone",
    "bucket_cap_mb": 4,
    "grad_sync_dtype": torch.bfloat16,
    "param_sync_dtype": torch.bfloat16,
    "grad_sync_bits": 8,
    "param_sync_bits": 8,
    "error_feedback": False,
    "overlap_grad_sync": True,
    "overlap_param_sync": False,
    "debug_sync": True,
    "grads_are_reduced": False,
    "broadcast_params": False,
    "broadcast_buffers": False,
    "consolidate_every": 5,
}


def refuse_options() -> None:
    model = fsdp_net()
    mesh = init_device_mesh(device_type(), (1, 2))
    for name, value in {**OPTIONS, "mesh": mesh}.items():
        with pytest.raises(ValueError, match=f"Invalid {name}: .*(Remove|Set|Use)"):
            ShardedAdamW(named(model), sharding={name: value})
    known = {"clip_grad_norm": 1.0, "collectives": "native", "report_overflow": True}
    ShardedAdamW(named(model), sharding={**known, "kernel": "eager", "grads_are_reduced": True})
    plain = nn.Linear(3, 3)
    with pytest.raises(TypeError, match=r"bias.* is a plain tensor, and layers.0.* own"):
        ShardedAdamW([*named(model), ("bias", plain.bias)])
    line = init_device_mesh(device_type(), (2,))
    partial = DTensor.from_local(torch.ones(3, requires_grad=True), line, [Partial()])
    with pytest.raises(TypeError, match=r"is placed as .*to be added up"):
        ShardedAdamW([("x", nn.Parameter(partial))])
    if dist.get_rank() == 0:  # an error of one rank
        with pytest.raises(TypeError, match="is a plain tensor"):
            ShardedAdamW([*named(model), ("bias", plain.bias)])
    else:
        with pytest.raises((RuntimeError, ValueError)):
            ShardedAdamW(named(model))
    unsharded = fsdp_net(reshard_after_forward=False)
    with torch.no_grad():
        unsharded(rank_grads(0, 0, 2))
    unsharded.unshard()
    for module in unsharded.layers:
        module.unshard()
    with pytest.raises(ValueError, match=r"Call model.reshard\(\) first"):
        ShardedAdamW(unsharded)
    with pytest.raises(
        TypeError, match=r"layers.0.weight is a copy that FSDP2 .*reshard\(\) first"
    ):
        ShardedAdamW(named(unsharded))  # all of them plain: an ordinary optimizer else
    ordinary = ShardedAdamW([("bias", plain.bias)])
    with pytest.raises(ValueError, match=r"layers.0.weight is a DTensor.* its own"):
        ordinary.add_param_group({"params": named(model)})
    with pytest.raises(TypeError, match=r"layers.1.weight is a copy that FSDP2"):
        ordinary.add_param_group({"params": named(unsharded)[1:]})
    for module in unsharded.layers:
        module.reshard()
    ShardedAdamW(named(unsharded))


def leave_root_gathered() -> None:
    """The root stays gathered from forward to backward: its parameters are plain, others not."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(model[1])
    fully_shard(model)
    place = device_type()
    with torch.no_grad():
        model(torch.ones(2, 4, device=place))
    with pytest.raises(
        TypeError, match=r"0.weight and 1 more is a plain tensor.*reshard\(\) first"
    ):
        ShardedAdamW(named(model))
    model.reshard()
    optimizer = ShardedAdamW(named(model), sharding=EAGER)
    model(torch.ones(2, 4, device=place)).sum().backward()
    optimizer.step()


def offload(policy: Any) -> list[Tensor]:
    model = Net()
    for layer in model.layers:
        fully_shard(layer, offload_policy=policy)
    fully_shard(model, offload_policy=policy)
    optimizer = ShardedAdamW(named(model), lr=0.05, sharding=EAGER)
    run_steps(model, optimizer, range(2))
    return values(model)


def refuse_gathered_and_offloaded() -> None:
    leave_root_gathered()
    kept, found = offload(None), offload(CPUOffloadPolicy(pin_memory=False))
    assert all(torch.equal(a, b) for a, b in zip(kept, found, strict=True))


@pytest.mark.gloo_only("torch averages by ReduceOp.AVG or coalesces, which HCCL does not")
def test_gathered_root_and_cpu_offload() -> None:
    """Refused by name; offload from CPU to CPU trains, others: test_fsdp_device.py."""
    run_procs(2, refuse_gathered_and_offloaded)


def test_refused_options() -> None:
    """Options of what FSDP2 does, mixed parameters, and placements, each with the remedy."""
    run_procs(2, refuse_options)


def differ_on_sub_meshes() -> None:
    """Experts without a DTensor along their own dimension are no copies."""
    mesh = init_device_mesh(device_type(), (2, 2), mesh_dim_names=("dp", "ep"))
    both = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0), Replicate()])
    for differs in (False, True):
        torch.manual_seed(mesh.get_local_rank("ep") if differs else 0)
        expert = distribute_tensor(torch.randn(4, 4), mesh["dp"], [Shard(0)])
        params = [("both", nn.Parameter(both)), ("expert", nn.Parameter(expert))]
        if not differs:
            ShardedLamb(params)
            continue
        with pytest.raises(ValueError, match=r"expert is on .* an optimizer of their own"):
            ShardedLamb(params)


def test_sub_meshes_with_other_tensors() -> None:
    run_procs(4, differ_on_sub_meshes)


WORKS = "works"
REFUSED = "refused"

METHODS: dict[str, str] = {
    "accumulates_while": WORKS,
    "add_load_state_dict_post_hook": WORKS,
    "add_param_group": WORKS,
    "broadcast_buffers": REFUSED,
    "clear_grad": WORKS,
    "clear_gradients": WORKS,
    "clip_grad_norm": WORKS,
    "clip_grad_norm_": WORKS,
    "clip_grad_norm_fused_": WORKS,
    "companions": WORKS,
    "consolidate_state_dict": REFUSED,
    "get_combined_grads": REFUSED,
    "get_combined_params": REFUSED,
    "get_lr": WORKS,
    "grad_norm": WORKS,
    "grads_all_group_combined": REFUSED,
    "join_device": WORKS,
    "join_hook": REFUSED,
    "join_process_group": WORKS,
    "last_overflow": WORKS,
    "load_sharded_state_dict": REFUSED,
    "load_state_dict": WORKS,
    "memory_summary": WORKS,
    "minimize": WORKS,
    "no_sync": WORKS,
    "parts": WORKS,
    "rebind": WORKS,
    "saves_are_arranged": WORKS,
    "set_lr": WORKS,
    "set_lr_scheduler": WORKS,
    "set_state_dict": WORKS,
    "sharded_state_dict": REFUSED,
    "state": WORKS,
    "state_dict": WORKS,
    "step": WORKS,
    "synchronize": WORKS,
    "trust_ratios": WORKS,
    "watch_step": WORKS,
    "zero_grad": WORKS,
}


class _Schedule:
    def __call__(self) -> float:
        return 0.05

    def step(self) -> None:
        """Keep the rate."""


FEW = ("odd", "norm")


def call_methods() -> dict[str, str]:
    """Call every public method and read every property of all classes; return what they do."""
    found: dict[str, str] = {}
    builders = {**BUILD, **{n: getattr(npu, n) for n in dir(npu) if n.startswith("NpuFused")}}
    builders["paddle"] = dtensors.paddle_lamb
    for name, build in builders.items():
        options = {"lr": 0.05} if name.startswith("NpuFused") else {}
        model = fsdp_net(names=FEW)
        optimizer = build(named(model), sharding=EAGER, **options)
        cls = type(optimizer)
        torch_only = set(dir(torch.optim.Optimizer)) - METHODS.keys()
        for method in sorted({m for m in dir(cls) if not m.startswith("_")} - torch_only):
            if callable(getattr(cls, method)) or is_property(cls, method):
                optimizer.zero_grad()
                model(rank_grads(0, dist.get_rank(), 2)).backward()
                outcome = call(model, optimizer, method)
                assert found.setdefault(method, outcome) == outcome, (name, method, outcome)
    return found


def is_property(cls: type, name: str) -> bool:
    return isinstance(inspect.getattr_static(cls, name), property)


def call(model: Any, optimizer: Any, method: str) -> str:
    extra = nn.Linear(4, 4)
    if method == "add_param_group":
        fully_shard(extra)
    arguments: dict[str, tuple[Any, ...]] = {
        "accumulates_while": (lambda: False,),
        "add_param_group": ({"params": [("extra", extra.weight)]},),
        "broadcast_buffers": (model,),
        "clip_grad_norm": (1.0,),
        "clip_grad_norm_": ([p for g in optimizer.param_groups for p in g["params"]], 1.0),
        "clip_grad_norm_fused_": (1.0,),
        "load_sharded_state_dict": ({},),
        "load_state_dict": (optimizer.state_dict(),),
        "set_state_dict": (optimizer.state_dict(),),
        "minimize": (model(rank_grads(1, dist.get_rank(), 2)),),
        "set_lr": (0.1,),
        "set_lr_scheduler": (_Schedule(),),
    }
    try:
        member = getattr(optimizer, method)
        if callable(member) and not is_property(type(optimizer), method):
            result = member(*arguments.get(method, ()))
            if method == "no_sync":
                with result:
                    pass
    except RuntimeError as error:
        text = str(error)
        has_remedy = any(word in text for word in ("Use ", "Broadcast ", "give every"))
        return REFUSED if "DTensors (FSDP2, or tensor" in text and has_remedy else text
    optimizer.step()
    return WORKS


def test_table_of_methods() -> None:
    """Every public method of every class works, or is refused with the remedy."""
    found: dict[str, str] = {}
    for own in run_procs(2, call_methods, timeout=200.0):
        found |= own
    known = {name: value for name, value in METHODS.items() if name in found}
    assert found == known
    assert {name for name in METHODS if METHODS[name] == REFUSED} <= found.keys()


# Errors on every rank


def fail_on_one_rank() -> None:
    rank = dist.get_rank()
    model = fsdp_net()
    optimizer = ShardedLamb(named(model), lr=0.05, sharding=EAGER)
    model(rank_grads(0, rank, 2)).backward()
    kept = model.layers[1].weight.grad
    if rank == 1:
        model.layers[1].weight.grad = None
    with pytest.raises(PeerError, match=r"without a gradient: layers\.1\.weight"):
        optimizer.step()
    model.layers[1].weight.grad = kept
    if rank == 1:
        optimizer.param_groups[0]["lr"] = -1.0
    with pytest.raises(ValueError if rank == 1 else PeerError, match="Invalid learning rate"):
        optimizer.step()
    optimizer.param_groups[0]["lr"] = 0.05
    optimizer.step()
    with pytest.raises(ValueError if rank == 1 else PeerError, match="Invalid max_norm"):
        optimizer.clip_grad_norm(-1.0 if rank == 1 else 1.0)
    before = values(model)
    optimizer.step()
    assert not torch.equal(before[0], values(model)[0])


@pytest.mark.gloo_only("torch averages by ReduceOp.AVG or coalesces, which HCCL does not")
def test_errors_reach_all_ranks() -> None:
    """Gradients, hyper-parameters: the other rank is named, and training can go on."""
    run_procs(2, fail_on_one_rank)
