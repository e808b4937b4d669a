"""A clock for steps that a host may launch ahead of the device."""

from __future__ import annotations

from collections.abc import Callable

import torch

from launch.bench.timing import time_ms


def mean_ms(run: Callable[[], object], repeats: int, device: torch.device) -> float:
    """Return the milliseconds of one of ``repeats`` runs in a row; the host waits at the end only.

    So it is the device's time, unless the host takes longer to launch.
    """

    def run_all() -> None:
        for _ in range(repeats):
            run()

    return time_ms(run_all, device) / repeats
