"""What sharding must leave as it is in the numerics of torch_npu's optimizers: norms and their
scopes, zero norms, absent gradients, padding, moments in fp32.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardfuse.optim import npu
from tests.support.counting import counted
from tests.support.harness import run_procs, run_threads
from tests.support.models import Entry, rank_grads
from tests.support.oracles import BertAdamOracle, LambOracle
from tests.support.runs import (
    TOLERANCE,
    Case,
    assert_bitwise,
    check_follows_oracle,
    max_relative_error,
    train_oracle,
    train_rank,
)
from tests.support.upstream import FAMILY, every_optimizer, noise

pytestmark = pytest.mark.timeout(60)

every_world = pytest.mark.parametrize("world_size", [2, 3])

# Two tensors that are cut over ranks and buckets, and three that are not, in two groups.
ENTRIES = (
    Entry("embedding.weight", (100, 40)),
    Entry("dense.bias", (70,), init=0.0),
    Entry("scale", (), init=1.5),
    Entry("head.weight", (9001,), group=1),
    Entry("head.bias", (3, 5), group=1),
)


def case_of(name: str, **options: Any) -> Case:
    """Return the drop-in optimizer and its reference over ENTRIES."""
    member = FAMILY[name]
    return Case(
        getattr(npu, name),
        {**member.options, **options},
        member.oracle,
        member.oracle_options,
        entries=ENTRIES,
    )


# 1. Formulas


@every_world
@every_optimizer
def test_formulas_hold_for_cut_tensors(name: str, world_size: int) -> None:
    """25 steps end, alike on all ranks, where the float64 reference on the mean gradient does."""
    check_follows_oracle(case_of(name), world_size, bucket_cap_mb=0.02)


@every_world
@pytest.mark.parametrize("eps", [0.0, 1e-3])
def test_lamb_padding_contributes_nothing(eps: float, world_size: int) -> None:
    """Norms are those of the tensors, whose last blocks are padded; so with eps=0."""
    check_follows_oracle(case_of("NpuFusedLamb", eps=eps), world_size, bucket_cap_mb=0.02)


def lamb_of_zeros() -> list[Tensor]:
    zero, still = nn.Parameter(torch.zeros(5000)), nn.Parameter(torch.ones(5000))
    optimizer = npu.NpuFusedLamb([zero, still], lr=0.25, betas=(0.0, 0.0), eps=0.0)
    zero.grad, still.grad = torch.full((5000,), 3.0), torch.zeros(5000)
    optimizer.step()
    return [zero.detach().clone(), still.detach().clone()]


@every_world
def test_lamb_ratio_is_one_where_a_norm_is_zero(world_size: int) -> None:
    """A parameter of zeros moves by lr; one whose update is zero stays, and is no NaN."""
    for values in run_threads(world_size, lamb_of_zeros):
        assert_bitwise(values, [torch.full((5000,), -0.25), torch.ones(5000)])


@every_world
def test_lamb_sums_norms_in_one_all_reduce(world_size: int) -> None:
    """Two fp32 numbers per tensor, once per step, however the tensors are cut."""

    def train() -> list[Any]:
        params = case_of("NpuFusedLamb").param_set()
        optimizer: Any = case_of("NpuFusedLamb").build(
            params, {"bucket_cap_mb": 0.02, "process_group": counted()}
        )
        params.assign(rank_grads("floats", world_size, dist.get_rank(), 0, ENTRIES))
        optimizer.communicator.calls.clear()
        optimizer.step()
        return [call for call in optimizer.communicator.calls if call.op == "all_reduce"]

    for calls in run_threads(world_size, train):
        assert [(c.numel, c.dtype) for c in calls] == [(2 * len(ENTRIES), torch.float32)]


# 2. Scopes of norms


def rank_noise(shape: tuple[int, ...], seed: int, rank: int) -> Tensor:
    """Return numbers whose signs all ranks share, so that their sum keeps its digits."""
    return noise(shape, seed).sign() * noise(shape, 1000 * (rank + 1) + seed).abs()


SCOPES = {
    "lamb": (
        npu.NpuFusedLamb,
        LambOracle,
        {"lr": 0.5, "eps": 1.0, "adam": True, "use_global_grad_norm": True},
    ),
    "bert": (npu.NpuFusedBertAdam, BertAdamOracle, {"lr": 5.0, "e": 1.0, "max_grad_norm": 0.5}),
}
DTYPES = (torch.float32, torch.bfloat16, torch.float32, torch.float32)


def scoped_params() -> list[nn.Parameter]:
    shapes = ((5000,), (300,), (7, 3), (2100,))
    return [
        nn.Parameter(noise(s, i).to(d)) for i, (s, d) in enumerate(zip(shapes, DTYPES, strict=True))
    ]


def scoped_grad(param: Tensor, index: int, step: int, rank: int, scale: float) -> Tensor:
    if param.dtype != torch.float32:
        # Small integers: their sum over ranks is exact in bf16 too.
        return (scale * torch.full(param.shape, float(4 * rank + 4 * index))).to(param.dtype)
    return scale * rank_noise(tuple(param.shape), 10 * step + index, rank)


def train_scoped(name: str, scale: float) -> list[Tensor]:
    cls, _, options = SCOPES[name]
    params = scoped_params()
    groups = [{"params": params[:2]}, {"params": params[2:], "lr": 0.25 * options["lr"]}]
    sharding = {"bucket_cap_mb": 0.01, "grad_sync_dtype": torch.float32}
    optimizer: Any = cls(groups, **options, sharding=sharding)
    for step in range(3):
        grads = [scoped_grad(p, i, step, dist.get_rank(), scale) for i, p in enumerate(params)]
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad.clone()
        optimizer.step()
        assert_bitwise([p.grad for p in params], grads)
    optimizer.consolidate_state_dict(to=None)
    master = optimizer.state_dict()["state"][1]["param"]
    return [master if i == 1 else p.detach().clone() for i, p in enumerate(params)]


@every_world
@pytest.mark.parametrize("scale", [1.0, 2.0**-12], ids=["clipped", "not clipped"])
@pytest.mark.parametrize("name", SCOPES)
def test_norm_scopes(name: str, scale: float, world_size: int) -> None:
    """LAMB's norm is over all groups and dtypes, above 1; BertAdam's over a group's dtype.

    Both are norms of the mean gradient. A large eps makes steps proportional to gradients.
    """
    _, oracle_class, options = SCOPES[name]
    params = scoped_params()
    groups = [{"params": params[:2]}, {"params": params[2:], "lr": 0.25 * options["lr"]}]
    oracle = oracle_class(groups, **options)
    for step in range(3):
        means = []
        for index, param in enumerate(params):
            ranks = [scoped_grad(param, index, step, rank, scale) for rank in range(world_size)]
            means.append(torch.stack([grad.double() for grad in ranks]).mean(0))
        oracle.step([means[:2], means[2:]])
    start = [p.detach() for p in params]
    for values in run_threads(world_size, train_scoped, name, scale):
        assert max_relative_error(values, oracle.values(), start) < TOLERANCE


def clip_fused(nan: bool) -> tuple[float, list[Tensor]]:
    params = [nn.Parameter(torch.zeros(n)) for n in (5000, 7)]
    params.append(nn.Parameter(torch.zeros(900, dtype=torch.float16)))
    groups = [{"params": params[:1]}, {"params": params[1:]}]
    optimizer = npu.NpuFusedSGD(groups, lr=1.0, sharding={"bucket_cap_mb": 0.01})
    for param in params:
        param.grad = torch.full_like(param, float(2 * dist.get_rank()))
    if nan and dist.get_rank() == 1:
        params[0].grad[4999] = math.nan
    norm = optimizer.clip_grad_norm_fused_(0.5)
    optimizer.step()
    return float(norm), [p.detach().clone() for p in params]


@every_world
def test_clip_grad_norm_fused_is_over_everything(world_size: int) -> None:
    """The norm of the mean over groups and dtypes is returned, and its excess clipped."""
    mean = float(world_size - 1)
    expected = mean * math.sqrt(5907)
    step = mean * 0.5 / (expected + 1e-6)
    for norm, values in run_threads(world_size, clip_fused, False):
        assert norm == pytest.approx(expected, rel=1e-6)
        for value in values:
            rounding = 1e-6 if value.dtype == torch.float32 else 2.0**-11
            torch.testing.assert_close(
                value.double(), torch.full_like(value, -step).double(), rtol=rounding, atol=1e-7
            )


@every_world
def test_clip_grad_norm_fused_leaves_gradients_at_nan(world_size: int) -> None:
    """A NaN of one rank is the norm of all, and gradients are not scaled by it."""
    for norm, values in run_threads(world_size, clip_fused, True):
        assert math.isnan(norm)
        assert values[0][4999].isnan()
        assert torch.equal(values[0][:4999], torch.full((4999,), -float(world_size - 1)))
        assert torch.equal(values[1], torch.full((7,), -float(world_size - 1)))


# 3. Gradients


def gradients_seen(by_ddp: bool, dtype: torch.dtype, scale: float) -> dict[str, Tensor]:
    """Return what one step of SGD moves a model by, averaged by DDP or by the optimizer."""
    model = nn.Sequential(nn.Linear(50, 40), nn.Linear(40, 30)).to(dtype)
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    wrapped: Any = nn.parallel.DistributedDataParallel(model) if by_ddp else model
    cls: Any = torch.optim.SGD if by_ddp else npu.NpuFusedSGD
    optimizer = cls(model.parameters(), lr=1.0 / scale)
    inputs = noise((4, 50), dist.get_rank()).to(dtype)
    loss = (wrapped(inputs) * noise((4, 30), 10 + dist.get_rank()).to(dtype) * scale).sum()
    loss.backward()
    optimizer.step()
    return {name: param.detach().clone() for name, param in model.named_parameters()}


def compare_with_ddp(dtype: torch.dtype, scale: float) -> float:
    ours, ddp = (gradients_seen(by_ddp, dtype, scale) for by_ddp in (False, True))
    assert float(ddp["1.bias"].abs().max()) > 0
    return max(
        float((ours[k].double() - ddp[k].double()).abs().max() / max(1e-6, ddp[k].abs().max()))
        for k in ddp
    )


def ddp_differences() -> list[float]:
    """Compare fp32 gradients, and fp16 ones whose sum over ranks would pass 65504."""
    return [compare_with_ddp(torch.float32, 1.0), compare_with_ddp(torch.float16, 16384.0)]


@every_world
def test_gradients_equal_ddps(world_size: int) -> None:
    """Over gloo: bit for bit for two ranks, whose mean is exact; else within rounding."""
    for fp32, fp16 in run_procs(world_size, ddp_differences):
        assert fp32 == 0 if world_size == 2 else fp32 < 1e-6
        assert fp16 == 0 if world_size == 2 else fp16 < 4 * 2.0**-11


# 4. BertAdam's schedule


def bert_factors(warmup: float, schedule: str) -> list[float]:
    param = nn.Parameter(torch.zeros(3000))
    options = {"b1": 0.0, "b2": 0.0, "e": 0.0, "weight_decay": 0.0}
    optimizer = npu.NpuFusedBertAdam(
        [param], 1.0, warmup=warmup, t_total=5, schedule=schedule, **options
    )
    factors = []
    for step in range(6):
        if step == 4:
            optimizer.param_groups[0]["lr"] = 10.0
        before = float(param.detach()[2999])
        param.grad = torch.ones(3000)
        optimizer.step()
        factors.append(before - float(param.detach()[2999]))
    return factors


@every_world
@pytest.mark.parametrize(
    ("warmup", "schedule", "expected"),
    [
        (0.4, "warmup_linear", [0, 0.5, 1, 2 / 3, 10 / 3, 0]),
        (0.4, "warmup_constant", [0, 0.5, 1, 1, 10, 10]),
        (-1, "warmup_linear", [0.5, 0.4, 0.3, 0.2, 1.0, 0]),
    ],
)
def test_bert_adam_counts_from_zero(
    warmup: float, schedule: str, expected: list[float], world_size: int
) -> None:
    """The first update is that of step 0; the group's lr counts from the step it is set in."""
    for factors in run_threads(world_size, bert_factors, warmup, schedule):
        assert factors == pytest.approx(expected, abs=1e-5)


# 5. Momentum and decay


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("NpuFusedSGD", {"dampening": 0.5}),
        ("NpuFusedSGD", {"nesterov": True}),
        ("NpuFusedAdam", {"weight_decay": 0.3}),
        ("NpuFusedAdamW", {"weight_decay": 0.3}),
        ("NpuFusedLamb", {"weight_decay": -0.1}),
        ("NpuFusedRMSpropTF", {"decoupled_decay": True}),
    ],
    ids=str,
)
def test_first_momentum_and_decay_conventions(name: str, options: dict[str, Any]) -> None:
    """As in the reference: L2, decoupled or in the update; the first momentum is the gradient."""
    check_follows_oracle(case_of(name, **options), 2, bucket_cap_mb=0.02)


def test_bert_adam_decays_only_above_zero() -> None:
    """A negative decay is none, as upstream."""
    ends = []
    for decay in (-0.3, 0.0, 0.3):
        case = Case(
            npu.NpuFusedBertAdam,
            {"lr": 0.1, "weight_decay": decay},
            entries=ENTRIES,
            overrides=({}, {}),
        )
        ends.append(run_threads(2, train_rank, case, "floats", 3)[0])
    assert_bitwise(ends[0], ends[1])
    assert not torch.equal(ends[2][0], ends[1][0])


# 6. fp16 parameters


def train_fp16(name: str) -> tuple[list[Tensor], dict[int, Any]]:
    case = Case(getattr(npu, name), FAMILY[name].options, dtype=torch.float16, entries=ENTRIES)
    params = case.param_set()
    optimizer: Any = case.build(params, {"bucket_cap_mb": 0.01})
    for step in range(5):
        params.assign(rank_grads("integers", dist.get_world_size(), dist.get_rank(), step, ENTRIES))
        optimizer.step()
    optimizer.consolidate_state_dict(to=None)
    return params.values(), optimizer.state_dict()["state"]


@every_world
@pytest.mark.parametrize("name", ["NpuFusedLamb", "NpuFusedAdam", "NpuFusedSGD"])
def test_fp16_parameters_have_fp32_norms_and_masters(name: str, world_size: int) -> None:
    """The default: fp32 masters follow the reference, and the parameters are their casts."""
    case = Case(
        getattr(npu, name),
        FAMILY[name].options,
        FAMILY[name].oracle,
        dtype=torch.float16,
        entries=ENTRIES,
    )
    expected = train_oracle(case, "integers", 5, world_size)
    for values, state in run_threads(world_size, train_fp16, name):
        masters = [state[index]["param"] for index in range(len(ENTRIES))]
        assert max_relative_error(masters, expected, case.param_set().values()) < TOLERANCE
        assert_bitwise(values, [master.half() for master in masters])
