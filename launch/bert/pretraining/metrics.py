"""A run's metrics file, and its progress bar or plain lines."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from tqdm import tqdm

from pretraining.files import write_whole

METRICS_FILE = "metrics.jsonl"

Record = dict[str, Any]
"""One line: "kind" is "train", "eval", "norms", "warning" or "diverged"; "step" counts finished
optimizer steps."""


class MetricsFile:
    """Append-only JSONL file, written by rank 0 and flushed line by line."""

    def __init__(self, path: Path, first_step: int, num_phases: int) -> None:
        """Open `path`; records after `first_step` finished steps, of a lost try, are dropped.

        So are those of phases after the first `num_phases`, and from the start all.
        """
        earlier = read_records(path) if first_step else []
        kept = [
            record
            for record in earlier
            if record["step"] <= first_step and record.get("phase", 1) <= num_phases
        ]
        write_whole(path, "".join(json.dumps(record) + "\n" for record in kept))
        # Without a buffer: what did not fit on the disk is not tried again when it is closed.
        self._file = path.open("ab", buffering=0)

    def write(self, record: Record) -> None:
        """Append a record; raises `OSError`."""
        line = json.dumps(record).encode() + b"\n"
        while line:
            line = line[self._file.write(line) :]

    def close(self) -> None:
        self._file.close()


def read_records(path: Path) -> list[Record]:
    """Read a metrics file; a line that was cut off when its run was killed is left out."""
    if not path.exists():
        return []
    records = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            continue
        if isinstance(record, dict) and {"kind", "step"} <= record.keys():
            records.append(record)
    return records


class Progress:
    """A bar on a terminal, a line every `log_every` steps elsewhere."""

    def __init__(self, first_step: int, num_steps: int, log_every: int) -> None:
        self._num_steps = num_steps
        self._log_every = log_every
        self._first_step = first_step
        self._started = time.monotonic()
        self._bar: tqdm[Any] | None = None
        if sys.stderr.isatty():
            self._bar = tqdm(total=num_steps, initial=first_step, unit="step", dynamic_ncols=True)

    def close(self) -> None:
        """Leave the terminal as it was."""
        if self._bar is not None:
            self._bar.close()

    def advance(self, record: Record) -> None:
        """Show a "train" record."""
        shown = {
            "loss": f"{record['loss']:.4f}",
            "lr": f"{record['lr']:.2e}",
            "samples/s": f"{record['samples_per_second']:.0f}",
        }
        step = record["step"]
        if self._bar is not None:
            self._bar.set_postfix(shown, refresh=False)
            self._bar.update()
        elif step % self._log_every == 0 or step == self._num_steps:
            elapsed = time.monotonic() - self._started
            left = elapsed / (step - self._first_step) * (self._num_steps - step)
            values = "  ".join(f"{name} {value}" for name, value in shown.items())
            self.say(f"step {step}/{self._num_steps}  {values}  {left:.0f} s left")

    def say(self, line: str) -> None:
        """Print a line without breaking the bar."""
        if self._bar is not None:
            self._bar.write(line)
        else:
            print(line, flush=True)
