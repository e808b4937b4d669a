"""The row of a rank that does not come: the rank before it names it, and the job ends by itself.

A launch of its own, since no process group outlives it. Of all ranks only the last one stays away.

torchrun --standalone --nproc-per-node 2 -m launch.acceptance.hang --told told.jsonl
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from launch.acceptance.processes import torchrun
from launch.acceptance.rows import HANG
from shardfuse import ShardedAdamW
from shardfuse.doctor import Finding
from shardfuse.doctor.world import World

_STEPS = 2
_STEPS_ALONE = 2
"""Of the others: an error of the transport is raised in the step after the one that it ended."""

_CONNECT_S = 60.0
_NAMED_WITHIN_S = 15.0
"""After five seconds a rank asks the store, by turns."""

TIMEOUT_S = {"cuda": 20.0, "npu": 68.0}
"""Of the process group, by kind of hardware. HCCL's own cannot be less."""

_OTHER_TIMEOUT_S = 12.0
_START_S = 45.0
"""From the launch of the ranks to the hang, and from its time-out to the end of the launcher."""


def run(num_ranks: int, kind: str, *, is_hardware: bool, timeout_s: float, work: Path) -> Finding:
    """Let the last rank stay away from a step; return what the others did.

    Args:
        kind: of the device.
        is_hardware: whether it is one.
        timeout_s: for all of it.
        work: a folder for ``hang.log``.
    """
    if num_ranks == 1:
        return Finding(HANG, "not run", "one rank waits for no other")
    told = work / "hang.jsonl"
    group_s = TIMEOUT_S[kind] if is_hardware else _OTHER_TIMEOUT_S
    command = ["-m", "launch.acceptance.hang", "--told", str(told), "--timeout-s", str(group_s)]
    command += ["--device", "cpu"] if kind == "cpu" else []
    limit_s = min(timeout_s, group_s + 2 * _START_S)
    code = torchrun(command, num_ranks, limit_s, work / "hang.log")
    lines = told.read_text().splitlines() if told.is_file() else []
    return judged([json.loads(line) for line in lines], code, num_ranks, limit_s)


def judged(
    events: Sequence[dict[str, Any]], code: int | None, num_ranks: int, limit_s: float
) -> Finding:
    """Return what the ranks' events and the launcher's exit code say.

    Args:
        events: with "rank", "after_s" (since the rank waits) and "text".
        code: None: the launcher was still running after ``limit_s``.
    """
    waiting = [event for event in events if event["text"] == "waits"]
    words = f"Not seen in this call: rank {_last(num_ranks)}."
    named = [event for event in events if event["text"].endswith(words)]
    values: dict[str, Any] = {"events": list(events), "exit_code": code}
    if len(waiting) < num_ranks - 1:
        text = f"only {len(waiting)} of {num_ranks - 1} ranks came to the step, exit code {code}"
        return Finding(HANG, "failed", text, "See the errors above.", values)
    if not named or named[0]["after_s"] > _NAMED_WITHIN_S:
        text = f"no rank has named the one that stayed away within {_NAMED_WITHIN_S:.0f} s"
        remedy = "Report this. Until then, look for a hang with py-spy dump on each rank."
        return Finding(HANG, "failed", text, remedy, values)
    text = f"the rank that stayed away was named after {named[0]['after_s']:.0f} s"
    if code is None:
        remedy = (
            "A hang would hold the devices for ever. Set TORCH_NCCL_ASYNC_ERROR_HANDLING=1, or "
            "HCCL_ASYNC_ERROR_HANDLING=1 and HCCL_EXEC_TIMEOUT, and the process group's timeout."
        )
        text += f", but the job had not ended by itself after {limit_s:.0f} s"
        return Finding(HANG, "failed", text, remedy, values)
    if code == 0:
        text += ", but the job ended as if all were well"
        return Finding(HANG, "failed", text, "Report this.", values)
    return Finding(HANG, "ok", f"{text}; the job ended by itself", values=values)


def _last(num_ranks: int) -> int:
    return num_ranks - 1


class _Teller(logging.Handler):
    """Appends what this rank logs, and when, to a file."""

    def __init__(self, told: Path, rank: int) -> None:
        super().__init__(logging.WARNING)
        self._told, self._rank, self._since = told, rank, time.monotonic()

    def restart(self) -> None:
        """Count seconds from now on."""
        self._since = time.monotonic()
        self.tell("waits")

    def emit(self, record: logging.LogRecord) -> None:
        self.tell(record.getMessage())

    def tell(self, text: str) -> None:
        """Append an event."""
        event = {"rank": self._rank, "after_s": time.monotonic() - self._since, "text": text}
        with self._told.open("a") as file:
            file.write(json.dumps(event) + "\n")


def main(argv: Sequence[str]) -> int:
    """Make two steps; then the last rank sleeps, and the others go on."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--told", type=Path, required=True, help="a line of JSON for each event")
    parser.add_argument("--timeout-s", type=float, required=True, help="of the process group")
    parser.add_argument("--device", choices=["cpu"], help="even where there is an accelerator")
    options = parser.parse_args(argv)
    os.environ.setdefault("HCCL_EXEC_TIMEOUT", f"{options.timeout_s:.0f}")
    world = World(_CONNECT_S, options.device)
    for found in (world.join(), world.select_device(), world.connect(None)):
        if found.verdict == "failed":
            print(found.describe(), file=sys.stderr)
            return 1
    teller = _Teller(options.told, world.rank)
    logging.getLogger("shardfuse").addHandler(teller)
    param = nn.Parameter(torch.ones(100_000, device=world.device))
    group = dist.new_group(timeout=timedelta(seconds=options.timeout_s))
    sharding = {"process_group": group, "consolidate_every": 0}
    optimizer = ShardedAdamW([param], sharding=sharding)
    for step in range(_STEPS + _STEPS_ALONE):
        if step == _STEPS:
            if world.rank == _last(world.world_size):
                time.sleep(3600)  # the launcher ends it
            teller.restart()
        param.grad = torch.ones_like(param)
        optimizer.step()
        optimizer.synchronize()
        param.detach().sum().item()  # the host waits for the device
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
