"""Single checks of launch/acceptance, with something in the place of hardware."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from launch.acceptance import bert, rows
from launch.acceptance.facts import nvidia_driver
from launch.acceptance.order import judged, profiled
from launch.acceptance.speed import as_a_graph
from launch.acceptance.steps import host_synchronization, memory
from shardfuse import ShardedAdamW
from shardfuse.comm.transport import SingleRank

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


def test_a_wait_of_the_host_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    modes: list[str] = []
    comm = SingleRank()
    good = host_synchronization(comm, CPU, size="tiny", set_mode=modes.append)
    assert (good.verdict, modes) == ("ok", ["error", "default"])
    step = ShardedAdamW.step

    def waits(self: Any, *args: Any) -> Any:
        if modes[-1] == "error":
            raise RuntimeError("called a synchronizing CUDA operation")
        return step(self, *args)

    monkeypatch.setattr(ShardedAdamW, "step", waits)
    bad = host_synchronization(comm, CPU, size="tiny", set_mode=modes.append)
    assert (bad.verdict, modes[-1]) == ("failed", "default")
    assert "test_acceptance_checks.py" in bad.text
    assert "synchronizing CUDA operation" in bad.text


def refuses(step: Callable[[], object]) -> Callable[[], object]:
    raise RuntimeError("operation not permitted when stream is capturing\nmore")


def runs_once(step: Callable[[], object]) -> Callable[[], object]:
    left = [step]
    return lambda: left.pop()() if left else None


@pytest.mark.parametrize(
    ("capture", "verdict", "words"),
    [
        (lambda step: step, "ok", "make the steps"),
        (refuses, "warning", "not possible: operation not permitted when stream is capturing"),
        (lambda step: lambda: None, "warning", "not possible: what a replay does differs"),
        (runs_once, "warning", "not possible: a second replay repeats"),
    ],
)
def test_a_graph(capture: Any, verdict: str, words: str) -> None:
    """It is one only if two replays are two steps."""
    found = as_a_graph(SingleRank(), CPU, capture=capture)
    assert found.verdict == verdict
    assert found.text.startswith(words) or words in found.text
    assert "more" not in found.text


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
