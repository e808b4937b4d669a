"""Train a `ParamSet` for a few steps, sharded, unsharded and by an oracle, and compare."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.support.harness import run_threads
from tests.support.models import (
    GROUP_OVERRIDES,
    MIXED,
    Entry,
    GradKind,
    ParamSet,
    mean_grads,
    rank_grads,
    split_by_group,
)
from tests.support.oracles import Oracle

# fp32 rounding of 25 updates, and norms summed in another order than unsharded or in double
# precision; the parameters move by about their own size.
TOLERANCE = 1e-6
NUM_STEPS = 25


@dataclass(frozen=True)
class Case:
    """One optimizer with its options, and what else it is compared with."""

    optimizer: Callable[..., torch.optim.Optimizer]
    options: Mapping[str, Any]
    oracle: type[Oracle] | None = None
    # What the oracle takes beside `options`.
    oracle_options: Mapping[str, Any] = field(default_factory=dict)
    overrides: Sequence[Mapping[str, Any]] = GROUP_OVERRIDES
    dtype: torch.dtype = torch.float32
    entries: tuple[Entry, ...] = MIXED
    named: bool = False

    def param_set(self) -> ParamSet:
        """Return the parameters to train, equal on every call."""
        return ParamSet(self.entries, dtype=self.dtype, overrides=self.overrides)

    def build(self, params: ParamSet, sharding: Mapping[str, Any] | None) -> Any:
        """Return the optimizer over `params`."""
        groups = params.groups(named=self.named)
        return self.optimizer(groups, **self.options, sharding=sharding)


KERNELS = ("eager", "auto")
"""In-place forms, and the default: models of tests are small, and take torch's fused operators."""


def train_rank(
    case: Case, kind: GradKind, num_steps: int, sharding: Mapping[str, Any] | None = None
) -> list[Tensor]:
    """Train on this rank of the current process group; return the parameters."""
    params = case.param_set()
    optimizer = case.build(params, {"kernel": "eager", **(sharding or {})})
    for step in range(num_steps):
        params.assign(rank_grads(kind, dist.get_world_size(), dist.get_rank(), step, case.entries))
        optimizer.step()
    return params.values()


def train_unsharded(
    case: Case, kind: GradKind, num_steps: int, world_size: int, kernel: str = "eager"
) -> list[Tensor]:
    """Train the same class with no process group on the mean of what `world_size` ranks feed."""
    assert not dist.is_initialized()
    params = case.param_set()
    optimizer = case.build(params, {"kernel": kernel})
    for step in range(num_steps):
        params.assign(mean_grads(kind, world_size, step, case.entries))
        optimizer.step()
    return params.values()


def train_oracle(case: Case, kind: GradKind, num_steps: int, world_size: int) -> list[Tensor]:
    """Return the float64 parameters after the oracle's steps on the float64 mean gradients."""
    assert case.oracle is not None
    params = case.param_set()
    oracle = case.oracle(
        params.groups(), names=params.names(), **{**case.options, **case.oracle_options}
    )
    for step in range(num_steps):
        grads = mean_grads(kind, world_size, step, case.entries, case.dtype)
        oracle.step(split_by_group(case.entries, grads))
    return in_entry_order(case.entries, oracle.values())


def check_follows_oracle(case: Case, world_size: int, bucket_cap_mb: float = 0.04) -> None:
    """Fail unless 25 sharded steps end, alike on all ranks, within rounding of the oracle.

    The oracle is the float64 per-tensor reference, on the mean of the ranks' floats.
    """
    expected = train_oracle(case, "floats", NUM_STEPS, world_size)
    for kernel in KERNELS:
        sharding = {"bucket_cap_mb": bucket_cap_mb, "kernel": kernel}
        ranks = run_threads(world_size, train_rank, case, "floats", NUM_STEPS, sharding)
        assert max_relative_error(ranks[0], expected, case.param_set().values()) < TOLERANCE
        for values in ranks[1:]:
            assert_bitwise(values, ranks[0])


def check_is_unsharded(
    case: Case, world_size: int, bucket_cap_mb: float, *, bitwise: bool = True
) -> None:
    """Fail unless sharded steps on integers end where those of the same class with no group do.

    Bitwise, because the mean gradient is exact; or else within another order of summing norms.
    """
    for kernel in KERNELS:
        sharding = {"bucket_cap_mb": bucket_cap_mb, "kernel": kernel}
        ranks = run_threads(world_size, train_rank, case, "integers", 5, sharding)
        expected = train_unsharded(case, "integers", 5, world_size, kernel)
        if not bitwise:
            assert max_relative_error(ranks[0], expected, case.param_set().values()) < TOLERANCE
        for values in ranks:
            assert_bitwise(values, expected if bitwise else ranks[0])


def in_entry_order(entries: Sequence[Entry], by_group: Sequence[Tensor]) -> list[Tensor]:
    """Undo `split_by_group`: values in group order come back in the order of `entries`."""
    order = [i for group in split_by_group(entries, range(len(entries))) for i in group]
    placed: dict[int, Tensor] = dict(zip(order, by_group, strict=True))
    return [placed[i] for i in range(len(entries))]


def max_relative_error(
    actual: Sequence[Tensor], expected: Sequence[Tensor], start: Sequence[Tensor]
) -> float:
    """Return the largest over tensors of max |a - b| / max(|b|, |start|).

    Per tensor, because elements cross zero, and with the values at the start, because a tensor of
    one element does. The learning rates of the tests are so large that parameters move by about
    their own size: an error of the update is not hidden behind the value.
    """
    worst = 0.0
    for a, b, c in zip(actual, expected, start, strict=True):
        assert a.shape == b.shape
        if a.numel():
            a, b = a.cpu(), b.cpu()
            difference = (a.double() - b.double()).abs().max().item()
            # NaN compares false with everything; it must not pass.
            assert difference == difference
            scale = max(b.abs().max().item(), c.abs().max().item())
            worst = max(worst, difference / scale if scale else difference)
    return worst


def assert_bitwise(actual: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    """Fail unless all tensors are equal, element for element, and finite."""
    for index, (a, b) in enumerate(zip(actual, expected, strict=True)):
        assert a.dtype == b.dtype
        a, b = a.cpu(), b.cpu()
        assert torch.isfinite(a).all()
        assert torch.equal(a, b), f"tensor {index}: {int((a != b).sum())} of {a.numel()} differ"
