"""LAMB: exact trust ratios over tensors cut across ranks, in every variant."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardfuse.optim.npu import NpuFusedLamb
from tests.support.harness import run_threads
from tests.support.models import MIXED, Entry, rank_grads
from tests.support.oracles import LambOracle
from tests.support.runs import (
    TOLERANCE,
    Case,
    check_follows_oracle,
    check_is_unsharded,
    max_relative_error,
    train_oracle,
    train_rank,
)

pytestmark = pytest.mark.timeout(60)


VARIANTS = ["npu", "apex", "nvlamb", "google", "paddle", "deepspeed"]
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "decay": {"weight_decay": 0.1},
    "adam": {"adam": True, "weight_decay": 0.1},
    "global-norm": {"use_global_grad_norm": True, "weight_decay": 0.1},
    "global-norm-5": {"use_global_grad_norm": True, "max_grad_norm": 5.0},
    "global-norm-unreached": {"use_global_grad_norm": True, "max_grad_norm": 1e6},
    "bias-correction": {"bias_correction": True},
    "no-bias-correction": {"bias_correction": False},
    "clamp-2": {"clamp_value": 2.0},
    "no-clamp": {"clamp_value": math.inf},
    "bounded-ratio": {"min_coeff": 0.5, "max_coeff": 2.0},
    "correction-outside": {"bias_correction": "outside"},
    "always-adapt": {"always_adapt": True},
    "adapt-decayed": {"always_adapt": False, "weight_decay": 0.1},
    "no-decay-names": {"weight_decay": 0.1, "exclude_from_weight_decay": [r"^dense\.", "scale"]},
    "no-adapt-names": {"exclude_from_layer_adaptation": ["embedding", r"bias$"]},
    "no-names": {"exclude_from_weight_decay": [], "exclude_from_layer_adaptation": []},
}


def make_case(variant: str, options: Mapping[str, Any], **changes: Any) -> Case:
    given = {"lr": 0.05, "betas": (0.9, 0.99), "variant": variant, **options}
    return Case(NpuFusedLamb, given, LambOracle, named=True, **changes)


CASES = {
    f"{variant}-{key}": make_case(variant, options)
    for variant in VARIANTS
    for key, options in OPTIONS.items()
}
# Group 1 without decay while group 0 has one: the variants differ in whose ratio is 1.
for _variant in VARIANTS:
    CASES[f"{_variant}-undecayed-group"] = make_case(
        _variant, {"weight_decay": 0.1}, overrides=({}, {"weight_decay": 0.0, "eps": 1e-3})
    )


# Torch_npu's own variant at every world size; what the others switch is independent of it.
@pytest.mark.parametrize(
    ("name", "world_size"),
    [(n, w) for n in CASES for w in (1, 2, 3) if w == 3 or n.startswith("npu-")],
)
def test_follows_the_oracle(name: str, world_size: int) -> None:
    """25 sharded steps stay within rounding of the float64 per-tensor reference."""
    check_follows_oracle(CASES[name], world_size)


@pytest.mark.parametrize("bucket_cap_mb", [0.01, 25])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("variant", VARIANTS)
def test_sharded_is_unsharded(variant: str, world_size: int, bucket_cap_mb: float) -> None:
    """On integer gradients sharding moves LAMB by no more than another order of summation."""
    case = CASES[f"{variant}-global-norm"]
    check_is_unsharded(case, world_size, bucket_cap_mb, bitwise=False)


def test_cases_differ() -> None:
    """The options make the oracle go elsewhere, so that agreeing with it says something."""
    ends = {}
    for name in ("decay", "adam", "global-norm", "bias-correction", "clamp-2", "no-clamp"):
        ends[name] = train_oracle(CASES[f"npu-{name}"], "floats", 3, 1)
    for variant in VARIANTS:
        ends[variant] = train_oracle(CASES[f"{variant}-undecayed-group"], "floats", 3, 1)
    start = CASES["npu-plain"].param_set().values()
    different = {
        (a, b) for a in ends for b in ends if max_relative_error(ends[a], ends[b], start) > 1e-3
    }
    # apex and Paddle are the same algorithm where no parameter is excluded by hand.
    same = {(a, b) for a in ends for b in ends} - different - {(a, a) for a in ends}
    assert same == {("apex", "paddle"), ("paddle", "apex")}


def test_large_tensor_norm() -> None:
    """A norm over two thousand blocks keeps fp32's digits: the ratio is right to 1e-6."""
    entries = (Entry("table.weight", (2_100_000,)), Entry("small.weight", (10,)))
    case = make_case("apex", {"weight_decay": 0.1}, entries=entries, overrides=({},))
    ranks = run_threads(3, train_rank, case, "floats", 2)
    expected = train_oracle(case, "floats", 2, 3)
    start = case.param_set().values()
    assert max_relative_error(ranks[0], expected, start) < TOLERANCE


def test_zero_norms_take_ratio_one() -> None:
    """A zero tensor with a gradient takes the plain step; one without movement stays finite."""
    entries = (Entry("zero.weight", (3000,), init=0.0), Entry("one.weight", (5,), init=1.0))
    case = make_case("npu", {"eps": 0.0}, entries=entries, overrides=({},))

    def train() -> list[torch.Tensor]:
        params = case.param_set()
        optimizer = case.build(params, {"kernel": "eager"})
        params.assign([torch.ones(3000), torch.zeros(5)])
        optimizer.step()
        return params.values()

    for moved, unmoved in run_threads(2, train):
        step = 0.05 * 0.1 / math.sqrt(0.01)
        torch.testing.assert_close(moved, torch.full((3000,), -step), rtol=TOLERANCE, atol=0.0)
        assert torch.equal(unmoved, torch.ones(5))


def test_unused_and_frozen_stay() -> None:
    """A parameter with no gradient on any rank keeps its bits though weight decay is on."""
    case = CASES["npu-decay"]
    before = case.param_set().values()
    after = run_threads(3, train_rank, case, "floats", 3)[1]
    for entry, old, new in zip(MIXED, before, after, strict=True):
        untouched = entry.role in ("unused", "frozen") or old.numel() == 0
        assert torch.equal(old, new) == untouched, entry.name


def test_google_needs_names() -> None:
    """Exclusion by name refuses parameters without names and says how to give them."""
    params = [torch.nn.Parameter(torch.ones(3))]
    with pytest.raises(ValueError, match="named_parameters"):
        NpuFusedLamb(params, variant="google")
    with pytest.raises(ValueError, match="named_parameters"):
        NpuFusedLamb(params, exclude_from_weight_decay=["bias"])
    NpuFusedLamb(
        params,
        variant="google",
        exclude_from_weight_decay=[],
        exclude_from_layer_adaptation=[],
    )


def train_for_ratios(case: Case) -> dict[str, float]:
    """Return the trust ratios of the third step."""
    params = case.param_set()
    optimizer = case.build(params, {"kernel": "eager", "bucket_cap_mb": 0.04})
    assert optimizer.trust_ratios() == {}
    for step in range(3):
        world_size, rank = dist.get_world_size(), dist.get_rank()
        params.assign(rank_grads("floats", world_size, rank, step, case.entries))
        optimizer.step()
    return optimizer.trust_ratios()


@pytest.mark.parametrize("variant", VARIANTS)
def test_trust_ratios_are_those_of_the_oracle(variant: str) -> None:
    """Every rank reports the ratio of every parameter, by name, as the reference took it."""
    case = make_case(variant, {"weight_decay": 0.1})
    taken: dict[str, float] = {}

    class Recording(LambOracle):
        def ratio(self, group: Any, param: Any, direction: Any, decay: float) -> float:
            taken[param.name] = super().ratio(group, param, direction, decay)
            return taken[param.name]

    train_oracle(replace(case, oracle=Recording), "floats", 3, 3)
    ranks = run_threads(3, train_for_ratios, case)
    assert len(taken) > 5
    for ratios in ranks:
        assert ratios == ranks[0]
        for name, expected in taken.items():
            assert ratios[name] == pytest.approx(expected, rel=1e-5)


def decay_by(decays: Sequence[float]) -> list[list[float]]:
    """Return the ratios of steps with these decays, as both places tell them."""
    weight = torch.nn.Parameter(torch.full((60, 10), 2.0))
    optimizer = NpuFusedLamb([weight], lr=0.1, weight_decay=0.1, variant="apex")
    found = []
    for decay in decays:
        optimizer.param_groups[0]["weight_decay"] = decay
        weight.grad = torch.ones(60, 10)
        norms = optimizer.watch_step()
        optimizer.step()
        assert norms.ratio is not None
        found += [norms.ratio.tolist(), list(optimizer.trust_ratios().values())]
    return found


def test_trust_ratios_are_those_of_the_last_step() -> None:
    """Without a decay this variant takes none: it told those of the last step that had one."""
    for first, told, second, told_second in run_threads(2, decay_by, (0.1, 0.0)):
        assert first == told != [1.0]
        assert second == told_second == [1.0]
    for found in run_threads(2, decay_by, (0.0, 0.0)):
        assert found == [[1.0]] * 4
