"""SGD, Adam, AdamW and BertAdam: sharding changes nothing, and the rules are the published ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from shardfuse.optim.npu import NpuFusedAdam, NpuFusedAdamW, NpuFusedBertAdam, NpuFusedSGD
from tests.support.harness import run_threads
from tests.support.models import mean_grads
from tests.support.oracles import AdamOracle, BertAdamOracle, SGDOracle
from tests.support.runs import (
    NUM_STEPS,
    TOLERANCE,
    Case,
    assert_bitwise,
    check_follows_oracle,
    check_is_unsharded,
    max_relative_error,
    train_rank,
)

pytestmark = pytest.mark.timeout(60)

SGD_OPTIONS: dict[str, dict[str, Any]] = {
    "sgd": {"lr": 0.1},
    "sgd-decay": {"lr": 0.1, "weight_decay": 0.1},
    "sgd-momentum": {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1},
    "sgd-dampening": {"lr": 0.1, "momentum": 0.9, "dampening": 0.5},
    "sgd-nesterov": {"lr": 0.1, "momentum": 0.9, "nesterov": True},
}
ADAM_OPTIONS: dict[str, dict[str, Any]] = {
    "adam": {"lr": 0.1},
    "adam-decay": {"lr": 0.1, "betas": (0.8, 0.95), "eps": 1e-5, "weight_decay": 0.1},
    "adam-amsgrad": {"lr": 0.1, "amsgrad": True},
    "adam-eps0": {"lr": 0.1, "eps": 0.0},
}
BERT_OPTIONS: dict[str, dict[str, Any]] = {
    "bert": {"lr": 0.1},
    "bert-linear": {"lr": 0.1, "warmup": 0.3, "t_total": 10},
    "bert-linear-no-warmup": {"lr": 0.1, "t_total": 10},
    "bert-constant": {"lr": 0.1, "warmup": 0.3, "t_total": 10, "schedule": "warmup_constant"},
    "bert-cosine": {"lr": 0.1, "warmup": 0.3, "t_total": 10, "schedule": "warmup_cosine"},
    "bert-poly": {"lr": 0.1, "warmup": 0.3, "t_total": 10, "schedule": "warmup_poly"},
    "bert-negative-decay": {"lr": 0.1, "weight_decay": -0.1},  # none
    "bert-undecayed": {"lr": 0.1, "weight_decay": 0.0, "b1": 0.8, "b2": 0.95, "e": 1e-4},
}

SGD_CASES = {key: Case(NpuFusedSGD, o, SGDOracle) for key, o in SGD_OPTIONS.items()}
ADAM_CASES = {key: Case(NpuFusedAdam, o, AdamOracle) for key, o in ADAM_OPTIONS.items()}
ADAMW_CASES = {
    key.replace("adam", "adamw"): Case(
        NpuFusedAdamW, {"weight_decay": 0.05, **o}, AdamOracle, {"decoupled": True}
    )
    for key, o in ADAM_OPTIONS.items()
}
BERT_CASES = {
    key: Case(NpuFusedBertAdam, {**o, "max_grad_norm": -1}, BertAdamOracle)
    for key, o in BERT_OPTIONS.items()
}
CLIPPED_CASES = {
    f"{key}-clip{limit}": Case(NpuFusedBertAdam, {**o, "max_grad_norm": limit}, BertAdamOracle)
    for key, o in BERT_OPTIONS.items()
    for limit in ((1.0, 1e6) if key == "bert" else (1.0,))
}
# Group 1 has a limit of its own.
CLIPPED_CASES["bert-clip-per-group"] = Case(
    NpuFusedBertAdam,
    {"lr": 0.1},
    BertAdamOracle,
    overrides=({"max_grad_norm": 5.0}, {"max_grad_norm": 0.5, "lr": 0.05}),
)
CLIPPED_CASES["bert-clip-one-group"] = Case(
    NpuFusedBertAdam,
    {"lr": 0.1},
    BertAdamOracle,
    overrides=({"max_grad_norm": -1}, {"max_grad_norm": 0.5}),
)
UNCLIPPED_CASES = {**SGD_CASES, **ADAM_CASES, **ADAMW_CASES, **BERT_CASES}
ALL_CASES = {**UNCLIPPED_CASES, **CLIPPED_CASES}


@pytest.mark.parametrize("bucket_cap_mb", [0.01, 25])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("name", UNCLIPPED_CASES)
def test_sharded_is_unsharded(name: str, world_size: int, bucket_cap_mb: float) -> None:
    """On integer gradients every rank ends bitwise where the same class ends without a group."""
    check_is_unsharded(UNCLIPPED_CASES[name], world_size, bucket_cap_mb)


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("name", ALL_CASES)
def test_follows_the_oracle(name: str, world_size: int) -> None:
    """On float gradients 25 sharded steps stay within rounding of the float64 reference."""
    check_follows_oracle(ALL_CASES[name], world_size)


@pytest.mark.parametrize("name", CLIPPED_CASES)
def test_clipping_ranks_agree(name: str) -> None:
    """With a clip norm added up over ranks, all ranks still end with the same bits."""
    ranks = run_threads(3, train_rank, CLIPPED_CASES[name], "floats", 4, {"bucket_cap_mb": 0.01})
    for values in ranks[1:]:
        assert_bitwise(values, ranks[0])


TORCH_CASES = {
    **{key: (case, torch.optim.SGD) for key, case in SGD_CASES.items()},
    **{key: (case, torch.optim.Adam) for key, case in ADAM_CASES.items()},
    **{key: (case, torch.optim.AdamW) for key, case in ADAMW_CASES.items()},
}


def train_torch(
    case: Case, torch_class: type[torch.optim.Optimizer], world_size: int
) -> list[Tensor]:
    params = case.param_set()
    for param in params.params:
        param.data = param.data.double()
    optimizer = torch_class(params.groups(), foreach=False, **case.options)
    for step in range(NUM_STEPS):
        params.assign(mean_grads("floats", world_size, step, case.entries))
        optimizer.step()
    return params.values()


@pytest.mark.parametrize("name", TORCH_CASES)
def test_follows_torch(name: str) -> None:
    """SGD, Adam and AdamW stay within rounding of torch.optim run in double precision."""
    world_size = 3
    case, torch_class = TORCH_CASES[name]
    ranks = run_threads(world_size, train_rank, case, "floats", NUM_STEPS)
    expected = train_torch(case, torch_class, world_size)
    start = case.param_set().values()
    for values in ranks:
        assert max_relative_error(values, expected, start) < TOLERANCE


@pytest.mark.parametrize("name", ["sgd-momentum", "adam-decay", "adamw", "bert"])
def test_unused_and_frozen_stay(name: str) -> None:
    """A parameter with no gradient on any rank keeps its bits though weight decay is on."""
    case = UNCLIPPED_CASES[name]
    before = case.param_set().values()
    after = run_threads(3, train_rank, case, "floats", 3)[1]
    for entry, old, new in zip(case.entries, before, after, strict=True):
        untouched = entry.role in ("unused", "frozen") or old.numel() == 0
        assert torch.equal(old, new) == untouched, entry.name
