"""The order of a step, looked at in a profiler's trace."""

from __future__ import annotations

import json
import re
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity

from launch.acceptance.model import batch_of, bucket_mib, sharded
from shardfuse.comm import Communicator
from shardfuse.doctor import Finding

Event = dict[str, Any]

_WARM_UP = 3
_LAUNCH = re.compile(r"shardfuse::(reduce_scatter|all_gather) b(\d+)$")
_WAIT = "shardfuse::wait_reduce_scatter"
_ON_DEVICE = re.compile(r"(?i)reduce_?scatter|all_?gather")
_REMEDY = "Report this with the trace: it is a fault of shardfuse."


def order_of_a_step(
    comm: Communicator, device: torch.device, *, size: str, trace: Path | None
) -> Finding:
    """Each bucket is reduced, then updated, then gathered.

    Args:
        trace: where the first rank leaves its trace, for chrome://tracing.
    """
    training, optimizer = sharded(device, size, bucket_cap_mb=bucket_mib(size))
    batches = [batch_of(comm, device, size, step) for step in range(_WARM_UP + 1)]
    for batch in batches[:_WARM_UP]:
        training.step(batch)

    def step() -> None:
        training.step(batches[_WARM_UP])
        optimizer.synchronize()

    with tempfile.TemporaryDirectory(prefix="shardfuse-trace-") as folder:
        path = Path(folder) / "trace.json"
        if comm.rank == 0 and trace is not None:
            path = trace
        events = profiled(step, device, path)
    return judged(events, is_reduced=comm.world_size > 1, device=device)


def profiled(step: Callable[[], None], device: torch.device, path: Path) -> list[Event]:
    """Run a step under the device's profiler; return what the trace at ``path`` has then."""
    torch_npu = sys.modules.get("torch_npu")
    if device.type == "npu" and torch_npu is not None:  # not run on hardware
        module, kinds = torch_npu.profiler, ["CPU", "NPU"]
    else:
        module, kinds = torch.profiler, ["CPU", "CUDA"] if device.type == "cuda" else ["CPU"]
    activity = getattr(module, "ProfilerActivity", ProfilerActivity)
    with module.profile(activities=[getattr(activity, kind) for kind in kinds]) as profiler:
        step()
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
    profiler.export_chrome_trace(str(path))
    content = json.loads(path.read_text(errors="replace"))
    events: list[Event] = content if isinstance(content, list) else content["traceEvents"]
    return [event for event in events if event.get("ph") == "X"]


def judged(events: Sequence[Event], *, is_reduced: bool, device: torch.device) -> Finding:
    """Return what a trace says of the order.

    Args:
        events: complete ones ("ph": "X"), with "name", "ts" and "dur" in microseconds.
        is_reduced: whether there are other ranks; one alone launches no collectives.
    """
    events = sorted(events, key=lambda event: float(event["ts"]))
    launches: dict[str, dict[int, Event]] = {"reduce_scatter": {}, "all_gather": {}}
    for event in events:
        match = _LAUNCH.match(event["name"])
        if match:
            launches[match[1]].setdefault(int(match[2]), event)
    if not is_reduced:
        return Finding("", "not run", "one rank reduces and gathers nothing")
    reduced, gathered = launches["reduce_scatter"], launches["all_gather"]
    if not reduced or reduced.keys() != gathered.keys():
        text = f"buckets {sorted(reduced)} are reduced, {sorted(gathered)} gathered"
        return Finding("", "failed", text, _REMEDY)
    wrong = [b for b in reduced if not _is_updated_between(events, reduced[b], gathered[b])]
    values: dict[str, Any] = {"reduced": list(reduced), "gathered": list(gathered)}
    if wrong:
        text = f"bucket {wrong[0]} is not reduced, then updated, then gathered"
        return Finding("", "failed", text, _REMEDY, values)
    text = f"{len(reduced)} buckets: each is reduced, updated, gathered"
    if device.type == "cpu":
        return Finding("", "ok", text, values=values)
    kernels = [e["name"] for e in events if _ON_DEVICE.search(e["name"]) and _is_on_device(e)]
    values["on the device"] = kernels
    if not kernels:
        remedy = "Look at the trace; the profiler has named no collective of the device's."
        return Finding("", "warning", f"{text}; no collective of the device's", remedy, values)
    return Finding("", "ok", f"{text}; {len(kernels)} collectives on the device", values=values)


def _is_updated_between(events: Sequence[Event], reduced: Event, gathered: Event) -> bool:
    """Return whether operators run after the last wait for a sum and before the gather begins."""
    start = float(gathered["ts"])
    waits = [
        float(event["ts"]) + float(event["dur"])
        for event in events
        if event["name"].startswith(_WAIT) and float(event["ts"]) < start
    ]
    if not waits or float(reduced["ts"]) >= start:
        return False
    return any(
        waits[-1] <= float(event["ts"]) < start
        for event in events
        if event.get("tid") == gathered.get("tid") and not event["name"].startswith("shardfuse::")
    )


def _is_on_device(event: Event) -> bool:
    return not event["name"].startswith(("shardfuse::", "c10d::", "aten::", "record_param"))
