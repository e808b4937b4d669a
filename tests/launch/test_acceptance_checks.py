"""Single checks of launch/acceptance, with something in the place of hardware."""

from __future__ import annotations

import itertools
import json
import re
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from launch.acceptance import bert, hang, numerics, rows, steps
from launch.acceptance.facts import nvidia_driver
from launch.acceptance.model import replicated, sharded
from launch.acceptance.order import judged, profiled
from launch.acceptance.speed import bucket_sizes, forward_backward_graph
from launch.acceptance.steps import host_synchronization, host_waits_by_option, memory
from shardfuse import ShardedAdamW
from shardfuse.checkpoint import AsyncSave
from shardfuse.comm.transport import AsyncModel, SingleRank
from shardfuse.doctor import checks
from shardfuse.engine import gather, kernels
from shardfuse.plan.budget import CountingCommunicator

CPU = torch.device("cpu")


def event(name: str, start: float, length: float = 1.0, tid: int = 1) -> dict[str, Any]:
    return {"name": name, "ts": start, "dur": length, "tid": tid, "ph": "X"}


GOOD = [
    event("shardfuse::reduce_scatter b0", 0),
    event("shardfuse::reduce_scatter b1", 1),
    event("shardfuse::wait_reduce_scatter", 2),
    event("aten::addcdiv_", 4),
    event("shardfuse::all_gather b0", 5),
    event("shardfuse::wait_reduce_scatter", 6),
    event("aten::addcdiv_", 8),
    event("shardfuse::all_gather b1", 9),
]


def test_order_is_right() -> None:
    found = judged(GOOD, is_reduced=True, device=CPU)
    assert (found.verdict, found.values) == ("ok", {"reduced": [0, 1], "gathered": [0, 1]})
    assert judged([], is_reduced=False, device=CPU).verdict == "not run"


@pytest.mark.parametrize(
    ("events", "words"),
    [
        ([*GOOD[:6], GOOD[7]], "bucket 1 is not reduced, then updated"),
        ([*GOOD[:3], *GOOD[4:]], "bucket 0 is not reduced, then updated"),
        (GOOD[:7], "buckets [0, 1] are reduced, [0] gathered"),
        ([event("shardfuse::all_gather b0", -1), *GOOD[:4], *GOOD[5:]], "bucket 0 is not"),
        ([*GOOD[:6], event("aten::addcdiv_", 8, tid=2), GOOD[7]], "bucket 1 is not"),
        ([], "buckets [] are reduced"),
    ],
)
def test_order_is_wrong(events: list[dict[str, Any]], words: str) -> None:
    found = judged(events, is_reduced=True, device=CPU)
    assert found.verdict == "failed"
    assert words in found.text


def test_order_on_a_device() -> None:
    """The device's own collectives are looked for, too."""
    cuda = torch.device("cuda", 0)
    assert judged(GOOD, is_reduced=True, device=cuda).verdict == "warning"
    kernels = [event("ncclDevKernel_ReduceScatter_Sum_f32", 3), event("hcom_allGather_", 9)]
    found = judged([*GOOD, *kernels], is_reduced=True, device=cuda)
    assert found.verdict == "ok"
    assert found.values["on the device"] == [kernel["name"] for kernel in kernels]


NPU: Any = SimpleNamespace(type="npu")  # torch knows the name only where torch_npu gives it


def test_a_trace_of_torch_npu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its profiler is asked for the NPU; its file is a list, and its times are text."""
    asked: list[Any] = []

    class Profile:
        def __init__(self, activities: list[str]) -> None:
            asked.extend(activities)

        def __enter__(self) -> Profile:
            return self

        def __exit__(self, *_: object) -> None:
            asked.append("over")

        def export_chrome_trace(self, path: str) -> None:
            events = [{**e, "ts": str(e["ts"]), "dur": str(e["dur"])} for e in GOOD]
            Path(path).write_text(json.dumps([*events, {"name": "process", "ph": "M"}]))

    kinds = SimpleNamespace(CPU="cpu", NPU="npu")
    profiler = SimpleNamespace(profile=Profile, ProfilerActivity=kinds)
    monkeypatch.setitem(sys.modules, "torch_npu", SimpleNamespace(profiler=profiler))
    monkeypatch.setattr(torch.accelerator, "synchronize", asked.append)
    events = profiled(lambda: asked.append("step"), NPU, tmp_path / "trace.json")
    assert asked == ["cpu", "npu", "step", NPU, "over"]
    assert judged(events, is_reduced=True, device=CPU).verdict == "ok"


@pytest.mark.parametrize(("factor", "verdict"), [(1.05, "ok"), (1.3, "warning"), (0.7, "warning")])
def test_memory_is_what_the_device_counts(
    factor: float, verdict: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Above what was there before; a tenth off the plan is a warning."""
    planned = memory(SingleRank(), CPU, size="tiny").values["planned_nbytes"]
    counts = [1000, 1000 + round(factor * planned)]
    monkeypatch.setattr(torch.cpu, "memory_allocated", lambda d: counts.pop(0), raising=False)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda device: None)
    found = memory(SingleRank(), CPU, size="tiny")
    assert (found.verdict, found.values["held_nbytes"]) == (verdict, round(factor * planned))


def test_driver_of_a_gpu(tmp_path: Path) -> None:
    path = tmp_path / "version"
    assert nvidia_driver(path) is None
    path.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19\n")
    assert nvidia_driver(path) == "535.104.05"


def test_what_stands_for_an_npu_is_no_hardware(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that is called npu, without the package that drives one."""
    assert not rows.is_hardware(CPU)
    assert not rows.is_hardware(NPU)
    monkeypatch.setattr(rows, "installed_version", {"torch-npu": "2.12.0"}.get)
    assert rows.is_hardware(NPU)


def synchronizing() -> None:
    warnings.warn("called a synchronizing CUDA operation", UserWarning, stacklevel=1)


@pytest.mark.parametrize(
    ("check", "verdict"), [(host_synchronization, "failed"), (host_waits_by_option, "warning")]
)
def test_a_wait_of_the_host_is_found(
    check: Any, verdict: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All waits of a step are shown with their places, for each option; the mode is set back."""
    modes: list[str] = []
    good = check(SingleRank(), CPU, size="tiny", set_mode=modes.append)
    assert (good.verdict, modes) == ("ok", ["warn", "default"] * (len(modes) // 2))
    step = ShardedAdamW.step

    def waits(self: Any, *args: Any) -> Any:
        for _ in range(2 * (modes[-1] == "warn")):
            synchronizing()
        return step(self, *args)

    monkeypatch.setattr(ShardedAdamW, "step", waits)
    bad = check(SingleRank(), CPU, size="tiny", set_mode=modes.append)
    assert (bad.verdict, modes[-1]) == (verdict, "default")
    assert "2 times, at test_acceptance_checks.py:" in bad.text
    assert check(SingleRank(), CPU, size="tiny").verdict == "not run"


def test_one_agreement_of_ranks_is_no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where gradients leave during backward, ranks agree once a step."""
    planned = SimpleNamespace(overlaps=(True, False))
    monkeypatch.setattr(steps, "plan", lambda *args, **options: planned)
    step = ShardedAdamW.step
    numbers, modes = [0], ["default"]

    def waits(self: Any, *args: Any) -> Any:
        for _ in range(numbers[-1] * (modes[-1] == "warn")):
            synchronizing()
        return step(self, *args)

    monkeypatch.setattr(ShardedAdamW, "step", waits)
    for number, verdict in ((1, "ok"), (2, "failed")):
        numbers.append(number)
        found = host_synchronization(SingleRank(), CPU, size="tiny", set_mode=modes.append)
        assert found.verdict == verdict


@pytest.mark.parametrize(
    ("progress", "waits", "verdict"),
    [
        (AsyncModel.UNORDERED, False, "ok"),
        (AsyncModel.UNORDERED, True, "warning"),
        (AsyncModel.BLOCKING, False, "not run"),
    ],
)
def test_steps_that_wait_for_their_params(
    progress: AsyncModel, waits: bool, verdict: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    comm = CountingCommunicator(2, progress)
    monkeypatch.setattr(
        steps, "sharded", lambda *args, **o: sharded(*args, process_group=comm, **o)
    )
    if waits:  # as if other code had a view of a parameter
        monkeypatch.setattr(gather, "is_shared", lambda param: True)
    found = steps.params_in_flight(comm, CPU, size="tiny")
    assert found.verdict == verdict, found.text
    if verdict != "not run":
        assert f"in {0 if waits else 10} of 10 steps" in found.text


# Numbers


def numbers_of(check: Any, **options: Any) -> Any:
    return check(SingleRank(), CPU, **options)


def test_numbers_are_right() -> None:
    for check in (numerics.bf16_params, numerics.absent_gradients, numerics.options):
        assert numbers_of(check).verdict == "ok"


def test_a_master_that_loses_its_low_half(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a compiler makes it that compares without rounding."""

    def loses(p: torch.Tensor, low: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        return low.to(p.dtype) if out is None else out.copy_(low)

    monkeypatch.setattr(kernels, "_with_edits", loses)
    found = numbers_of(numerics.bf16_params)
    assert found.verdict == "failed"
    assert re.match(r"(\d+) of \1 cases differ", found.text)
    assert "rounded otherwise" in found.text or "more than one rounding" in found.text


def test_a_param_without_a_gradient_that_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if its gradient were zero: weight decay moves it."""
    step = ShardedAdamW.step

    def fills(self: Any, *args: Any) -> Any:
        for group in self.param_groups:
            for param in group["params"]:
                if param.numel() == 3 and param.dtype == torch.bfloat16:
                    param.grad = torch.zeros_like(param)
        return step(self, *args)

    monkeypatch.setattr(ShardedAdamW, "step", fills)
    found = numbers_of(numerics.absent_gradients)
    assert found.verdict == "failed"
    assert "2 of 8 cases differ; AdamW bfloat16, stage 1: param 4, which has no" in found.text


def test_an_option_that_changes_a_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(numerics.OPTIONS, "clip", ({"clip_grad_norm": 1.0}, 1e-30))
    found = numbers_of(numerics.options)
    assert found.verdict == "ok"  # the reference clips, too
    reference = numerics.reference
    monkeypatch.setattr(
        numerics,
        "reference",
        lambda case, comm: reference(numerics.Case(case.rule), comm),
    )
    found = numbers_of(numerics.options)
    assert found.verdict == "failed"
    assert "1 of 7 cases differ; clip: param 0 is off by" in found.text


@pytest.mark.parametrize("is_right", [True, False])
def test_kernels_that_are_not_eager(is_right: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What calls itself compiled is compared; a compiler that fails is a warning."""
    run = kernels.Kernels._run_compiled

    def uncompiled(self: Any, function: Any, flags: Any, h: Any, scale: Any, tile: Any) -> bool:
        function(self._rule, flags, h, scale, tile)
        if not is_right:
            tile.p.mul_(1.001)
        return True

    monkeypatch.setattr(kernels.Kernels, "_run_compiled", uncompiled)
    found = numbers_of(numerics.kernels, compiled=["AdamW"])
    assert found.verdict == ("ok" if is_right else "failed")
    wanted = "2 compile" if is_right else r"2 of \d+ cases differ; AdamW"
    assert re.search(wanted, found.text)
    monkeypatch.setattr(kernels.Kernels, "_run_compiled", run)

    def fails(*args: Any, **options: Any) -> Any:
        raise torch._dynamo.exc.InternalTorchDynamoError("no compiler")

    monkeypatch.setattr(torch, "compile", lambda function, **options: fails)
    found = numbers_of(numerics.kernels, compiled=["AdamW"])
    assert found.verdict == "warning"
    assert "no compiled kernel: torch.compile failed" in found.text


# Saves and sums, of the doctor


def test_a_save_beside_steps_that_has_later_values(monkeypatch: pytest.MonkeyPatch) -> None:
    assert checks.async_save(SingleRank(), CPU).verdict == "ok"
    monkeypatch.setattr(AsyncSave, "before_step", lambda self: True)  # nothing is copied in time
    monkeypatch.setattr(AsyncSave, "start", lambda self: None)
    wait = AsyncSave.wait

    def late(self: Any) -> None:
        self._thread.start()
        wait(self)

    monkeypatch.setattr(AsyncSave, "wait", late)
    found = checks.async_save(SingleRank(), CPU)
    assert (found.verdict, found.text) == ("failed", "parameters in it are not those of its start")


def test_sums_that_depend_on_the_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Integers do not show it; random numbers do."""
    comm = SingleRank()
    assert checks.sums(comm, CPU).verdict == "ok"
    sent, count = comm.reduce_scatter, itertools.count()

    def reordered(whole: torch.Tensor, *args: Any, **options: Any) -> Any:
        is_odd = next(count) % 2
        total = (whole + 1e4 * is_odd) - 1e4 * is_odd
        return sent(total, *args, **options)

    monkeypatch.setattr(comm, "reduce_scatter", reordered)
    found = checks.sums(comm, CPU)
    assert (found.verdict, found.text) == ("failed", "two equal sums differ")


# Buckets, peaks and DDP


def alone_as_two() -> Any:
    """Return one rank that says it is the first of two: it sums and sends nothing."""
    return CountingCommunicator(2, AsyncModel.ORDERED)


def test_bucket_sizes_make_one_result(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"caps": (0.02, 0.1), "numel": 1 << 14, "repeats": 2, "kernel": "eager"}
    found = bucket_sizes(alone_as_two(), CPU, **sizes)
    assert found.verdict == "ok"
    assert found.values["ms"].keys() == {"auto", "0.02", "0.1"}
    assert found.text.endswith(f"the best: {found.values['best']}")
    step = ShardedAdamW.step

    def wrong(self: Any, *args: Any) -> Any:
        if self._config.bucket_cap_mb == 0.1:
            self.param_groups[0]["params"][0].data.mul_(1.5)
        return step(self, *args)

    monkeypatch.setattr(ShardedAdamW, "step", wrong)
    found = bucket_sizes(alone_as_two(), CPU, **sizes)
    assert found.verdict == "failed"
    assert "parameters with buckets of 0.1 MiB differ" in found.text


@pytest.mark.parametrize(("factor", "verdict"), [(1.0, "ok"), (2.5, "warning"), (0.5, "warning")])
def test_peak_memory(factor: float, verdict: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Far above or below the plan is a warning; a device that does not count is not asked."""
    planned = memory(SingleRank(), CPU, size="tiny").values["planned_nbytes"]
    assert steps.peak_memory(SingleRank(), CPU, size="tiny").verdict == "not run"
    for name, value in (
        ("memory_allocated", lambda device: 1000),
        ("reset_peak_memory_stats", lambda device: None),
        ("max_memory_allocated", lambda device: 1000 + round(factor * planned)),
    ):
        monkeypatch.setattr(torch.cpu, name, value, raising=False)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda device: None)
    monkeypatch.setattr(steps, "_temporaries", lambda planned: 0)
    found = steps.peak_memory(SingleRank(), CPU, size="tiny")
    assert (found.verdict, found.values["peak_nbytes"]) == (verdict, round(factor * planned))


@pytest.mark.parametrize("is_right", [True, False])
def test_losses_beside_ddp(is_right: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A training that is fast and wrong has failed."""
    monkeypatch.setattr(steps, "replicated", lambda comm, *args: replicated(SingleRank(), *args))
    monkeypatch.setattr(steps, "sharded", lambda *args: sharded(*args, process_group=SingleRank()))
    if not is_right:
        monkeypatch.setattr(ShardedAdamW, "step", lambda self: None)
    found = steps.against_ddp(alone_as_two(), CPU, size="tiny", repeats=3)
    assert (found.verdict == "failed") != is_right
    assert ("where DDP has" in found.text) != is_right


# Graphs


def refuses(backward: Callable[[], object]) -> Callable[[], object]:
    raise RuntimeError("operation not permitted when stream is capturing\nmore")


def captured(backward: Callable[[], object]) -> Callable[[], object]:
    """Return what replays a backward as a graph does: into the same memory, without Python."""
    assert backward.__closure__ is not None
    cells = {type(c.cell_contents).__name__: c.cell_contents for c in backward.__closure__}
    training, batch = cells["ShardedTraining"], cells["Tensor"]
    backward()
    params = list(training.model.parameters())
    static = [param.grad for param in params]

    def replay() -> None:
        made = torch.autograd.grad(training.model(batch), params)
        for out, grad in zip(static, made, strict=True):
            out.copy_(grad)

    return replay


@pytest.mark.parametrize(
    ("capture", "verdict", "words"),
    [
        (lambda backward: backward, "ok", "make the same training"),
        (captured, "ok", "make the same training"),
        (refuses, "failed", "captured: operation not permitted when stream is capturing"),
        (lambda backward: lambda: None, "failed", "replays make other gradients"),
    ],
)
def test_a_graph(capture: Any, verdict: str, words: str) -> None:
    """It is one only if replays on new batches are the steps of a training."""
    found = forward_backward_graph(SingleRank(), CPU, size="tiny", capture=capture)
    assert (found.verdict, words in found.text, "more" in found.text) == (verdict, True, False)
    assert forward_backward_graph(SingleRank(), CPU, size="tiny").verdict == "not run"


# A hang and the BERT job


NAMED = {
    "rank": 0,
    "after_s": 5.1,
    "text": "[rank 0] step(): has waited for 5 s. Not seen in this call: rank 1.",
}
WAITS = {"rank": 0, "after_s": 0.0, "text": "waits"}


@pytest.mark.parametrize(
    ("events", "code", "verdict", "words"),
    [
        ([WAITS, NAMED], 1, "ok", "named after 5 s; the job ended by itself"),
        ([], 1, "failed", "only 0 of 1 ranks came to the step"),
        ([WAITS], 1, "failed", "no rank has named the one that stayed away"),
        ([WAITS, {**NAMED, "after_s": 40.0}], 1, "failed", "no rank has named"),
        ([WAITS, {**NAMED, "text": NAMED["text"][:-2] + "0."}], 1, "failed", "no rank has named"),
        ([WAITS, NAMED], None, "failed", "had not ended by itself after 90 s"),
        ([WAITS, NAMED], 0, "failed", "ended as if all were well"),
    ],
)
def test_a_hang(events: list[dict[str, Any]], code: int | None, verdict: str, words: str) -> None:
    found = hang.judged(events, code, 2, 90.0)
    assert found.verdict == verdict
    assert words in found.text
    assert bool(found.remedy) == (verdict != "ok")


def test_one_rank_cannot_hang(tmp_path: Path) -> None:
    assert hang.run(1, "cpu", is_hardware=False, timeout_s=1, work=tmp_path).verdict == "not run"


@pytest.mark.parametrize(
    ("losses", "last", "verdict"),
    [([7.6, 6.1], 100, "ok"), ([7.6, 7.5], 100, "failed"), ([7.6], 40, "failed")],
)
def test_bert(losses: list[float], last: int, verdict: str) -> None:
    records = [{"kind": "eval", "step": 0, "mlm_loss": loss} for loss in losses]
    records.insert(1, {"kind": "train", "step": last})
    assert bert.judged(records, 100).verdict == verdict


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5, 8, 16, 64])
def test_bert_has_samples_for_all_ranks(num_ranks: int) -> None:
    """launch/bert accepts the command."""
    from pretraining.config import check_options

    command = bert.command(num_ranks, steps=1, work=Path("work"), words=20_000)
    check_options(command[1:], num_ranks)
