"""launch/npu/mlperf_bert.md: its diffs, applied to such a script, train as the script does.

On two gloo ranks. Nothing of this was run on an NPU.
"""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

import shardfuse
from shardfuse import ShardedGradScaler
from tests.support.harness import run_procs
from tests.support.mlperf_bert import (
    PAGE,
    SCRIPT,
    AmpScaler,
    Outcome,
    Run,
    SmallBert,
    diff_of,
    patched,
    prepare,
    train,
)
from tests.support.runs import assert_bitwise, max_relative_error
from tests.support.torch_npu_api import VERSIONS, inventory
from tests.support.torch_npu_uses import parse

pytestmark = pytest.mark.timeout(120)

TOLERANCE = 1e-6
SCALE = 2.0**12
CLIPPED = 0.05 * SmallBert.LOSS


def as_it_is(run: Run, scaled: bool = False) -> Outcome:
    """Train as the script does: DDP, LAMB by tensors, amp's scaler."""
    return train(SCRIPT, run, AmpScaler(SCALE) if scaled else None)


def with_the_diff(name: str, run: Run, scaled: bool = False, transport: str = "") -> Outcome:
    """Train with a diff of the page, and the library's scaler."""
    if transport:
        sharding = {"collectives": transport}
        shardfuse.ShardedLamb = partial(shardfuse.ShardedLamb, sharding=sharding)  # type: ignore[assignment, misc]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "max_grad_norm is given without", UserWarning)
        scaler = ShardedGradScaler("cpu", init_scale=SCALE) if scaled else None
        return train(patched(SCRIPT, diff_of(name)), run, scaler)


def compare(name: str, run: Run, scaled: bool = False, tolerance: float = TOLERANCE) -> None:
    """Fail unless both end in the same params, on all ranks."""
    theirs = run_procs(2, as_it_is, run, scaled)
    ours = run_procs(2, with_the_diff, name, run, scaled)
    start = list(SmallBert(run.width).parameters())
    assert_bitwise(ours[0].params, ours[1].params)
    assert max_relative_error(ours[0].params, theirs[0].params, start) < tolerance
    assert max_relative_error(ours[0].params, start, start) > 0.1, "they have moved"
    assert ours[0].scale == ours[1].scale == theirs[0].scale


@pytest.mark.parametrize("name", ["lamb", "npu-fused-lamb"])
def test_the_diff_is_of_three_lines(name: str) -> None:
    """Three lines go and three come; all of the script is there but they."""
    diff = diff_of(name)
    assert len(diff) == 3
    kept = set(SCRIPT.splitlines()) - {old for old, _ in diff}
    assert set(patched(SCRIPT, diff).splitlines()) == kept | {new for _, new in diff}
    assert PAGE.read_text().count("```diff") == 2


@pytest.mark.parametrize(
    "run",
    [Run(), Run(bound=CLIPPED), Run(accumulation=3), Run(bound=CLIPPED, accumulation=3)],
    ids=["plain", "clipped", "accumulated", "clipped and accumulated"],
)
def test_params_are_the_same(run: Run) -> None:
    """DDP and LAMB in fp64 by tensors end where sharded LAMB does."""
    compare("lamb", run)


@pytest.mark.parametrize("accumulation", [1, 3])
def test_params_of_the_fp32_branch_are_the_same(accumulation: int) -> None:
    """NpuFusedLamb with max_grad_norm is what the script means by it."""
    compare("npu-fused-lamb", Run(allow_fp32=True, accumulation=accumulation))


@pytest.mark.parametrize("accumulation", [1, 3])
def test_params_under_a_scaler_are_the_same(accumulation: int) -> None:
    """Both skip the step in which one rank overflows, and halve the scale."""
    run = Run(accumulation=accumulation, overflow_at=2 * accumulation, num_steps=7)
    compare("lamb", run, scaled=True)
    (outcome, _) = run_procs(2, with_the_diff, "lamb", run, True)
    assert outcome.scale == SCALE / 2


def test_half_precision() -> None:
    """fp16 params with masters; DDP rounds the sum of gradients to fp16, which is the tolerance."""
    compare("lamb", Run(half=True, overflow_at=2, num_steps=7), scaled=True, tolerance=2e-3)


def test_a_scaler_and_half_precision_are_looked_at() -> None:
    """A loop without the skipped step ends elsewhere: the comparisons above see one step."""
    skipped = run_procs(2, as_it_is, Run(overflow_at=2, num_steps=7), True)[0]
    other = run_procs(2, as_it_is, Run(num_steps=7), True)[0]
    start = list(SmallBert().parameters())
    assert max_relative_error(skipped.params, other.params, start) > 0.01


@pytest.mark.gloo_only("counts bytes in sockets")
@pytest.mark.parametrize("accumulation", [1, 3])
def test_bytes_over_sockets(accumulation: int) -> None:
    """A rank sends what DDP sends for one micro-batch, norms aside, however many there are."""
    run = Run(width=400, accumulation=accumulation, num_steps=5)
    theirs = run_procs(2, as_it_is, run)
    ours = run_procs(2, with_the_diff, "lamb", run, False, "pairwise")
    numel = sum(p.numel() for p in SmallBert(run.width).parameters())
    steps = run.num_steps - 2
    assert theirs[0].nbytes > 4 * numel * steps * accumulation
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.nbytes < 1.01 * other.nbytes / accumulation


@pytest.mark.parametrize("version", VERSIONS)
def test_torch_npu_refuses_the_script_s_call(version: str) -> None:
    """Its NpuFusedLamb has no max_grad_norm, and the rest of the call fits."""
    told = parse(inventory("torch_npu", version)["optimizers"]["NpuFusedLamb"]["init"])
    told.bind([], lr=0.1, betas=(0.9, 0.999))
    with pytest.raises(TypeError, match="max_grad_norm"):
        told.bind([], lr=0.1, betas=(0.9, 0.999), max_grad_norm=65536.0)


def save_on_the_main_process(consolidated: bool) -> Any:
    """Return what state_dict() gives or raises on the first rank, after a step."""
    model, optimizer, _ = prepare(patched(SCRIPT, diff_of("lamb")), Run())
    model(torch.arange(18).reshape(2, 9)).backward()
    optimizer.step()
    if consolidated:
        optimizer.consolidate_state_dict()
    if dist.get_rank():
        return None
    try:
        return optimizer.state_dict()
    except RuntimeError as error:
        return str(error)


def test_checkpoints_need_the_fourth_line() -> None:
    """With it the main process has whole tensors; without it an error says what to call."""
    saved, _ = run_procs(2, save_on_the_main_process, True)
    shapes = {tuple(state["exp_avg"].shape) for state in saved["state"].values()}
    assert shapes == {tuple(p.shape) for p in SmallBert().parameters()}
    text, _ = run_procs(2, save_on_the_main_process, False)
    assert "consolidate_state_dict" in text


def test_a_script_without_the_line_is_told() -> None:
    """A diff that does not fit is no diff of this script."""
    with pytest.raises(AssertionError, match="from optim import Lamb"):
        patched(SCRIPT.replace("from optim", "from other"), diff_of("lamb"))
