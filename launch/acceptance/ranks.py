"""What every rank does: the doctor's checks, and those of this package in the same process group.

torchrun --standalone --nproc-per-node 2 -m launch.acceptance.ranks --found found.jsonl
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from launch.acceptance import numerics
from launch.acceptance.facts import versions
from launch.acceptance.order import order_of_a_step
from launch.acceptance.rows import MISALIGNED, ROWS, is_hardware
from launch.acceptance.speed import against_copy, bucket_sizes, forward_backward_graph
from launch.acceptance.steps import (
    against_ddp,
    host_synchronization,
    host_waits_by_option,
    memory,
    params_in_flight,
    peak_memory,
)
from launch.bench.environment import hardware
from shardfuse.doctor import Finding, examine
from shardfuse.doctor.checks import CHECKS, Check
from shardfuse.doctor.world import World

LIMIT_S = 60.0


@dataclass(frozen=True)
class Sizes:
    """How much each check does.

    Attributes:
        model: of launch.acceptance.model.SIZES.
        long_model: the one whose steps are timed.
        numel: of the parameters whose updates are timed.
        repeats: of what is timed.
        compiled: rules whose kernels are compiled.
        caps: sizes of buckets in MiB.
    """

    model: str
    long_model: str
    numel: int
    repeats: int
    compiled: tuple[str, ...]
    caps: tuple[float, ...]


QUICK = Sizes("tiny", "tiny", 1 << 16, 3, (), (0.02, 0.1))
ON_CPU = Sizes("33M", "tiny", 1 << 22, 2, ("AdamW",), (2, 8))
ON_DEVICE = Sizes("33M", "266M", 1 << 27, 10, ("SGD", "AdamW", "LAMB"), (25, 100, 200))


def own_checks(sizes: Sizes, device: torch.device, trace: Path | None) -> dict[str, Check]:
    """Return this package's checks by the names of their rows."""
    # Compiling takes a minute on the CPU, where the share says nothing of hardware.
    kernel = "eager" if device.type == "cpu" else "auto"
    model = sizes.model
    timed: dict[str, Any] = {"numel": sizes.numel, "repeats": sizes.repeats, "kernel": kernel}
    return {
        "bf16 params": numerics.bf16_params,
        "absent gradients": numerics.absent_gradients,
        "sharding options": numerics.options,
        "fused and compiled kernels": functools.partial(numerics.kernels, compiled=sizes.compiled),
        "order of a step": functools.partial(order_of_a_step, size=model, trace=trace),
        "memory against the plan": functools.partial(memory, size=model),
        "peak memory of a step": functools.partial(peak_memory, size=model),
        "no host synchronization": functools.partial(host_synchronization, size=model),
        "host waits by option": functools.partial(host_waits_by_option, size=model),
        "params in flight": functools.partial(params_in_flight, size=model),
        "update against copy": functools.partial(against_copy, **timed),
        "bucket sizes": functools.partial(bucket_sizes, caps=sizes.caps, **timed),
        "step against DDP": functools.partial(
            against_ddp, size=sizes.long_model, repeats=sizes.repeats
        ),
        "backward as a CUDA graph": functools.partial(forward_backward_graph, size=model),
        MISALIGNED: CHECKS[MISALIGNED],
    }


def main(argv: Sequence[str]) -> int:
    """Append each finding to a file, and print it, on the first rank."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--found", type=Path, required=True, help="a line of JSON for each finding")
    parser.add_argument("--trace", type=Path, help="where the trace of a step is left")
    parser.add_argument("--device", choices=["cpu"], help="even where there is an accelerator")
    parser.add_argument("--quick", action="store_true", help="small sizes")
    options = parser.parse_args(argv)
    rank = int(os.environ.get("RANK", "0"))
    device = World(LIMIT_S, options.device).device
    sizes = ON_DEVICE if is_hardware(device) else ON_CPU  # what stands for one has its memory, too
    checks = own_checks(QUICK if options.quick else sizes, device, options.trace)
    assert {*CHECKS, *checks} <= {row.name for row in ROWS}

    def tell(finding: Finding) -> None:
        if rank == 0:
            _append(options.found, finding.to_json())
            print(finding.describe(), flush=True)
            if finding.name == "process group" and finding.verdict == "ok":
                _append(options.found, _facts(device))

    found = examine(None, LIMIT_S, device=options.device, more=checks, tell=tell)
    return int(any(finding.verdict == "failed" for finding in found))


def _facts(device: torch.device) -> dict[str, object]:
    return {
        "device": device.type,
        "on_hardware": is_hardware(device),
        "hardware": hardware(device),
        "versions": versions(),
    }


def _append(path: Path, content: dict[str, object]) -> None:
    with path.open("a") as file:
        file.write(json.dumps(content) + "\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
