"""torch_npu's crashes and its memory, a test for each."""

from __future__ import annotations

import copy
import gc
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from shardfuse.optim import npu
from tests.support.harness import run_threads
from tests.support.models import flat_buffers, lie_in
from tests.support.oracles import LambOracle
from tests.support.runs import TOLERANCE, assert_bitwise, max_relative_error
from tests.support.upstream import Twin, build, every_optimizer, noise, reference
from tests.unit.test_memory import live_nbytes

pytestmark = pytest.mark.timeout(60)

# 8. Crashes


@pytest.mark.parametrize("scale", [1.0, 1e-3], ids=["above 1", "below 1"])
def test_lamb_global_grad_norm(scale: float) -> None:
    """Above 1 gradients are divided by the norm over all groups and dtypes; p.grad is not."""
    params = [nn.Parameter(noise((700,), i).to(d)) for i, d in enumerate(3 * [torch.float32])]
    params += [nn.Parameter(noise((900,), 7).half())]
    start = [p.detach().clone() for p in params]
    groups = [{"params": params[:2]}, {"params": params[2:], "lr": 0.02}]
    # A large eps makes the update proportional to the gradient, so that the norm shows.
    options = {"lr": 0.05, "eps": 1.0, "adam": True, "use_global_grad_norm": True}
    oracle = LambOracle(groups, **options)
    optimizer = npu.NpuFusedLamb(groups, **options)
    for seed in range(3):
        grads = [(scale * noise(p.shape, 10 * seed + i)).to(p.dtype) for i, p in enumerate(params)]
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad.clone()
        optimizer.step()
        oracle.step([grads[:2], grads[2:]])
        assert_bitwise([p.grad for p in params], grads)
    master = optimizer.state_dict()["state"][3]["param"]
    values = [*(p.detach() for p in params[:3]), master]
    assert max_relative_error(values, oracle.values(), start) < TOLERANCE


def test_lamb_global_grad_norm_of_fp16_gradients_does_not_overflow() -> None:
    """A norm whose square passes 65504 divides all the same: it is summed in fp32."""
    twin = Twin("NpuFusedLamb", [(400,)], torch.float16, use_global_grad_norm=True, eps=1.0)
    for seed in range(3):
        grads = [(100 * noise((400,), seed)).half()]
        twin.model.zero_grad()
        twin.backward(grads)
        assert float(grads[0].double().pow(2).sum()) > 65504
        twin.optimizer.step()
        twin.oracle.step([grads])
    twin.check()


def schedule_factors(schedule: str, warmup: float, num_steps: int) -> list[float]:
    """Return the factors on BertAdam's learning rate with t_total=5, from how a param moves."""
    param = nn.Parameter(torch.zeros(3))
    options = {"b1": 0.0, "b2": 0.0, "e": 0.0, "weight_decay": 0.0}
    optimizer = npu.NpuFusedBertAdam(
        [param], lr=1.0, warmup=warmup, t_total=5, schedule=schedule, **options
    )
    factors = []
    for _ in range(num_steps):
        before = float(param.detach()[0])
        param.grad = torch.ones(3)
        optimizer.step()
        factors.append(before - float(param.detach()[0]))
    return factors


def test_bert_adam_warmup_cosine() -> None:
    """After the warm-up the factor is (1 + cos(pi x)) / 2."""
    expected = [0.0, 0.5, *(0.5 * (1 + math.cos(math.pi * x)) for x in (0.4, 0.6, 0.8, 1.0))]
    assert schedule_factors("warmup_cosine", 0.4, 6) == pytest.approx(expected, abs=1e-6)


def test_bert_adam_warmup_poly_past_t_total() -> None:
    """sqrt(1 - x) up to t_total, and 0 past it, where it was complex."""
    expected = [0.0, 0.5, *(math.sqrt(1 - x) for x in (0.4, 0.6, 0.8)), 0.0, 0.0, 0.0]
    assert schedule_factors("warmup_poly", 0.4, 8) == pytest.approx(expected, abs=1e-6)


@every_optimizer
def test_bf16_parameters_train(name: str) -> None:
    """Their masters follow the reference, and they are the masters' casts."""
    twin = Twin(name, dtype=torch.bfloat16)
    for seed in range(4):
        twin.step(seed)
    twin.check()


@every_optimizer
def test_fp64_is_refused_when_built(name: str) -> None:
    """Not at the first step; the error names the parameter, and the remedy it names works."""
    model = nn.Linear(3, 2, dtype=torch.float64)
    with pytest.raises(TypeError, match=r"float64 \(weight\)\. Convert the model.*float\(\)"):
        build(name, list(model.named_parameters()))
    build(name, list(model.float().named_parameters()))


@every_optimizer
def test_channels_last_parameters_train(name: str) -> None:
    """They stay channels_last, and become what the contiguous reference becomes."""
    twin = Twin(name, [(6, 5, 3, 3), (6,)])
    start = twin.params[0].detach().clone()
    param = nn.Parameter(start.contiguous(memory_format=torch.channels_last))
    optimizer = build(name, [param, twin.params[1]])
    for seed in range(3):
        grads = twin.grads(seed)
        optimizer.zero_grad()
        torch.autograd.backward([(param * grads[0]).sum(), (twin.params[1] * grads[1]).sum()])
        optimizer.step()
        twin.oracle.step([grads])
    assert param.is_contiguous(memory_format=torch.channels_last)
    values = [param.detach(), twin.params[1].detach()]
    assert max_relative_error(values, twin.oracle.values(), twin.start) < TOLERANCE


@every_optimizer
def test_closures_run_backward_and_make_the_first_gradients(name: str) -> None:
    """step(closure) enables gradients, returns the loss and applies what backward left."""
    twin = Twin(name)
    for seed in range(3):
        grads = twin.grads(seed)

        def closure(grads: Any = grads, seed: int = seed) -> float:
            twin.optimizer.zero_grad()
            twin.backward(grads)
            return 10.0 + seed

        assert twin.optimizer.step(closure) == 10.0 + seed
        twin.oracle.step([grads])
    twin.check()


@every_optimizer
def test_gradients_that_come_late(name: str) -> None:
    """A parameter whose first gradient comes after other steps is no KeyError."""
    twin = Twin(name)
    for seed in range(4):
        twin.step(seed, absent=[0, 2] if seed < 2 else [])
    twin.check()


@every_optimizer
def test_add_param_group_after_the_first_step(name: str) -> None:
    """The new group trains with its own learning rate, from its own first step."""
    twin = Twin(name, [(1500,), (6, 7)])
    late = Twin(name, [(5,)], lr=0.03)
    for seed in range(4):
        if seed == 2:
            twin.optimizer.add_param_group({"params": late.params, "lr": 0.03})
        if seed >= 2:
            grads = late.grads(seed)
            late.model.zero_grad()
            late.backward(grads)
            late.oracle.step([grads])
        twin.step(seed)
    # The step is the group's: whoever built the other optimizer of `late` did not move it.
    twin.check()
    values = [p.detach() for p in late.params]
    assert max_relative_error(values, late.oracle.values(), late.start) < TOLERANCE


@pytest.mark.parametrize("how", [copy.deepcopy, pickle.dumps], ids=["deepcopy", "pickle"])
@every_optimizer
def test_copies_of_an_optimizer_are_refused(name: str, how: Any) -> None:
    """In words and at once, not at the copy's first step; the optimizer itself goes on."""
    twin = Twin(name)
    twin.step(0)
    with pytest.raises(TypeError, match=rf"{name} cannot be pickled or deep-copied.*state_dict"):
        how(twin.optimizer)
    twin.step(1)
    twin.check()


@every_optimizer
def test_zero_grad_set_to_none(name: str) -> None:
    """Gradients become None, and what is None is left alone."""
    twin = Twin(name)
    twin.step(0)
    twin.optimizer.zero_grad(set_to_none=True)
    assert all(p.grad is None for p in twin.params)
    before = twin.values()
    twin.optimizer.step()
    assert_bitwise(twin.values(), before)
    twin.step(1)
    twin.check()


@pytest.mark.parametrize("first", ["step", "zero_grad", "clip_grad_norm_fused_"])
@every_optimizer
def test_calls_before_any_gradient_leave_no_poison(name: str, first: str) -> None:
    """They change nothing, count no step, and training then starts as usual."""
    twin = Twin(name)
    if first == "clip_grad_norm_fused_":
        assert float(twin.optimizer.clip_grad_norm_fused_(1.0)) == 0.0
    if first == "zero_grad":
        twin.optimizer.zero_grad()
    twin.optimizer.step()
    assert_bitwise(twin.values(), twin.start)
    assert twin.optimizer.state_dict()["state"] == {}
    for seed in range(3):
        twin.step(seed)
    twin.check()


@every_optimizer
def test_sparse_gradients_reach_the_friendly_error(name: str) -> None:
    """The error names the parameter and the remedy; nothing moves, and the remedy works."""
    embedding = nn.Embedding(50, 4, sparse=True)
    params = list(embedding.named_parameters())
    start = [embedding.weight.detach().clone()]
    optimizer, oracle = build(name, params), reference(name, [embedding.weight])
    tokens = torch.arange(50)
    embedding(tokens).sum().backward()
    with pytest.raises(RuntimeError, match=r"gradient of weight is sparse.*sparse=False"):
        optimizer.step()
    assert_bitwise([embedding.weight.detach()], start)
    embedding.sparse = False
    embedding.zero_grad()
    embedding(tokens).sum().backward()
    optimizer.step()
    optimizer.step()
    for _ in range(2):
        oracle.step([[torch.ones(50, 4)]])
    values = [embedding.weight.detach()]
    assert max_relative_error(values, oracle.values(), start) < TOLERANCE


# 9. Resources

# Times the parameters' bytes: torch_npu's on every rank, and how many states are divided here.
RESOURCES = {
    "NpuFusedLamb": (7, 2),
    "NpuFusedAdamP": (6, 2),
    "NpuFusedAdam": (4, 2),
    "NpuFusedSGD": (3, 1),
}
SIZES = ((300_000,), (400, 250), (70,))
NBYTES = 4 * sum(math.prod(size) for size in SIZES)
BUCKET_NBYTES = 1 << 16


def train(name: str) -> Callable[[], Any]:
    """Train two steps on this rank; return what keeps all that holds memory then, where it is."""
    params = [nn.Parameter(torch.ones(size)) for size in SIZES]
    sharding = {"bucket_cap_mb": BUCKET_NBYTES / 2**20}
    optimizer = build(name, params, sharding=sharding)
    for _ in range(2):
        optimizer.zero_grad()
        torch.autograd.backward([p.sum() for p in params])
        optimizer.step()
    return lambda: (optimizer, params)


@pytest.mark.gloo_only("where gradients overlap, each bucket in flight has a receive buffer")
@pytest.mark.parametrize("name", RESOURCES)
def test_bytes_on_each_rank(name: str) -> None:
    """Parameters and gradients once, 1 / W of the states, and a few buckets: not 3 to 7 times.

    Measured over all tensors that four ranks leave behind, not by what the optimizer says.
    """
    upstream, num_states = RESOURCES[name]
    world_size = 4
    before = live_nbytes()
    ranks = run_threads(world_size, train, name)
    held = (live_nbytes() - before) / world_size
    assert len(ranks) == world_size
    # Every tensor is padded to blocks, and a flat to the world size.
    padded = NBYTES + 4096 * (len(SIZES) + 4 * world_size)
    assert 2 * NBYTES <= held <= (2 + num_states / world_size) * padded + 4 * BUCKET_NBYTES
    assert held < (upstream - 0.5) * NBYTES


class Reads(TorchDispatchMode):
    """Keeps the values that are read back to the host."""

    def __init__(self) -> None:
        super().__init__()
        self.values: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ in ("_local_scalar_dense", "nonzero", "equal"):
            self.values.append(result)
        return result


@every_optimizer
def test_no_step_reads_a_value_back(name: str) -> None:
    """The host waits for no result, however many tensors there are; it may round its own eps."""
    twin = Twin(name, [(5,)] * 20, **({"use_global_grad_norm": True} if "Lamb" in name else {}))
    group = twin.optimizer.param_groups[0]
    eps = float(torch.tensor(group.get("eps", group.get("e", 0.0))))
    for seed in range(2):
        twin.optimizer.zero_grad()
        twin.backward(twin.grads(seed))
        with Reads() as reads:
            norm = twin.optimizer.clip_grad_norm_fused_(100.0)
            twin.optimizer.step()
        assert set(reads.values) <= {eps}
        with reads:
            assert float(norm) in reads.values  # what is read is seen


# 10. Memory of the model


@every_optimizer
def test_deleting_the_optimizer_leaves_a_healthy_model(name: str) -> None:
    """Parameters own their memory too: what is allocated next does not land in it."""
    twin = Twin(name)
    twin.step(0)
    values = twin.values()
    twin.model.zero_grad()
    del twin.optimizer
    gc.collect()
    garbage = [torch.full((4096,), math.nan) for _ in range(20)]
    assert_bitwise(twin.values(), values)
    grads = twin.grads(1)
    twin.backward(grads)
    torch.optim.SGD(twin.params, 0.5).step()
    for param, value, grad in zip(twin.params, values, grads, strict=True):
        assert torch.equal(param.detach(), value - 0.5 * grad)
    assert len(garbage) == 20


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_every_parameter_starts_aligned(dtype: torch.dtype) -> None:
    """At a multiple of 64 bytes on the CPU; of 512 elsewhere, which test_layout.py shows."""
    params = [nn.Parameter(torch.ones(n, dtype=dtype)) for n in (3, 1, 2000, 7, 1024, 1025)]
    optimizer = npu.NpuFusedAdam([{"params": params[:3]}, {"params": params[3:]}])
    torch.autograd.backward([p.sum() for p in params])
    optimizer.step()
    for tensor in [t for p in params for t in (p.detach(), p.grad)]:
        assert tensor.data_ptr() % 64 == 0
    starts = {p.data_ptr() for p in params}
    assert len(starts) == len(params)
    (buffer,) = flat_buffers(optimizer)
    assert lie_in(params, [buffer])
