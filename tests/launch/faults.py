"""Faults of one rank, put into its forked process before the job begins there."""

from __future__ import annotations

import errno
import os
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shardfuse.checkpoint.storage import ShardWriter

Fault = Callable[[int], object]


def on_rank(rank: int, fault: Callable[[], object]) -> Fault:
    """Put a fault into one rank only."""
    return lambda own: fault() if own == rank else None


def around_save(number: int, before: Callable[[], object], after: Callable[[], object]) -> None:
    """Call `before` and `after` around this rank's writing of that number, from 1."""
    write = ShardWriter.write
    count = 0

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        if count == number:
            before()
        result = write(*args, **kwargs)
        if count == number:
            after()
        return result

    ShardWriter.write = wrapped  # type: ignore[method-assign]


def nothing() -> None:
    """Do nothing."""


def late_until(path: Path) -> None:
    """Begin once `path` is there, and a moment after."""
    deadline = time.monotonic() + 30
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.3)


def part_of_second_save(cwd: Path, rank: int, *, is_cut: bool) -> None:
    """Lose this rank's part of the second checkpoint, or its last byte, once it is written."""

    def lose() -> None:
        (part,) = cwd.glob(f"run/checkpoints/.step-*.unfinished/__{rank}_0.distcp")
        if is_cut:
            os.truncate(part, part.stat().st_size - 1)
        else:
            part.unlink()

    around_save(2, nothing, lose)


def small_files_from_second_save() -> None:
    """Let this process write no file above 200 kB from its second checkpoint on."""
    limit = (200_000, 200_000)
    around_save(2, lambda: resource.setrlimit(resource.RLIMIT_FSIZE, limit), nothing)


def small_files(nbytes: int) -> None:
    """Let this process write no file above `nbytes`."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, nbytes))


def own_run_dir(folder: Path) -> None:
    """Let this rank see another folder under the run directory's name, as on a disk of its own."""
    import pretraining.plan
    from pretraining.config import from_json

    def moved(values: dict[str, Any]) -> Any:
        return from_json(values | {"run_dir": str(folder)})

    pretraining.plan.from_json = moved


def full_at_metrics_step(step: int) -> None:
    """Have the disk full when the metrics of `step` are written."""
    from pretraining.metrics import MetricsFile

    write = MetricsFile.write

    def failing(file: MetricsFile, record: dict[str, Any]) -> None:
        if record["step"] >= step:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(file, record)

    MetricsFile.write = failing  # type: ignore[method-assign]


def slow_save(flag: Path, seconds: float) -> None:
    """Create `flag` when the first save begins, which then takes that long."""

    def begin() -> None:
        flag.touch()
        time.sleep(seconds)

    around_save(1, begin, nothing)


def own_data_dir(folder: Path) -> None:
    """Let this rank see another folder under the prepared text's name, as on a disk of its own."""
    import pretraining.plan

    open_same = pretraining.plan._open_same
    pretraining.plan._open_same = lambda path, digest, launch: open_same(folder, digest, launch)


def noting_samples(cwd: Path, rank: int) -> None:
    """Save the input of each batch to train on."""
    import numpy as np
    from pretraining.training import Trainer

    draw = Trainer._draw

    def noting(trainer: Trainer, leg: Any, step: int) -> Any:
        batch = draw(trainer, leg, step)
        np.save(cwd / f"samples-{step}-{rank}.npy", batch.input_ids.numpy())
        return batch

    Trainer._draw = noting  # type: ignore[method-assign]
