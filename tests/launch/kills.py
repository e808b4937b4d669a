"""SIGKILLs of the BERT job at random moments, and what must be left after each."""

from __future__ import annotations

import functools
import importlib
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shardfuse.checkpoint import Checkpoints
from shardfuse.checkpoint.export import verify

MOMENTS = {
    "writing": ("shardfuse.checkpoint.storage", "_with_digests"),
    "written": ("shardfuse.checkpoint.saving", "checksum_of"),
    "publishing": ("shardfuse.checkpoint.saving", "_commit"),
    "manifest": ("shardfuse.checkpoint.saving", "_write_manifest"),
    "replacing": ("shardfuse.checkpoint.saving", "commit_staging"),
    "naming": ("shardfuse.checkpoint.folder", "recover_interrupted"),
    "clean-up": ("shardfuse.checkpoint.folder", "_remove_old_checkpoint"),
    "looking": ("shardfuse.checkpoint.integrity", "_share_faults"),
    "loading": ("shardfuse.checkpoint.loading", "_LoadOperation"),
    "reading": ("shardfuse.checkpoint.storage", "dcp_metadata"),
}
"""Functions in whose course a rank is killed."""


def at(moment: str, number: int, is_after: bool) -> None:
    """Have this process killed in its call of that number, before or right after the function."""
    module, name = MOMENTS[moment]
    original, count = getattr(importlib.import_module(module), name), 0

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        if count == number and not is_after:
            _die()
        result = original(*args, **kwargs)
        if count == number:
            _die()
        return result

    for name_of_module in ("saving", "loading", "folder", "storage", "integrity"):
        holder = importlib.import_module(f"shardfuse.checkpoint.{name_of_module}")
        if getattr(holder, name, None) is original and holder.__name__ == module:
            setattr(holder, name, wrapped)


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def draw(rng: random.Random, world_size: int) -> tuple[str, Callable[[int], object]]:
    """Return a kill, in words, and what puts it into a rank's process."""
    moment, rank = rng.choice(list(MOMENTS)), rng.randrange(world_size)
    number, is_after = rng.randrange(1, 4), rng.random() < 0.5
    text = f"rank {rank} {'after' if is_after else 'before'} {moment} {number}"
    return text, lambda own: at(moment, number, is_after) if own == rank else None


def newest(folder: Path) -> int:
    """Return the step of the newest checkpoint; AssertionError if any that is there is torn."""
    steps = Checkpoints(folder).steps()
    if not steps:
        return 0
    torn = [verdict.describe() for verdict in verify(folder) if verdict.faults]
    assert not torn, torn
    return steps[0]
