"""BertAdam's learning-rate schedules: factors of lr as functions of the fraction of training done.

Source: torch_npu's NpuFusedBertAdam, which has them from NVIDIA's BERT. All rise linearly while
``x < warmup``. Two upstream defects are mended: ``warmup_cosine`` is 0.5 * (1 + cos(pi * x)), where
upstream raises TypeError, and ``warmup_poly`` stays at 0 past ``x = 1``, where upstream computes
the root of a negative number.
"""

from __future__ import annotations

import math
from collections.abc import Callable


def warmup_cosine(x: float, warmup: float = 0.002) -> float:
    """Return x / warmup, then half a cosine from 1 to 0."""
    return x / warmup if x < warmup else 0.5 * (1.0 + math.cos(math.pi * x))


def warmup_constant(x: float, warmup: float = 0.002) -> float:
    """Return x / warmup, then 1."""
    return x / warmup if x < warmup else 1.0


def warmup_linear(x: float, warmup: float = 0.002) -> float:
    """Return x / warmup, then a straight line to 0 at x = 1.

    With ``warmup=-1`` the line starts from 1/2, as upstream's does.
    """
    return x / warmup if x < warmup else max((x - 1.0) / (warmup - 1.0), 0.0)


def warmup_poly(x: float, warmup: float = 0.002, degree: float = 0.5) -> float:
    """Return x / warmup, then (1 - x) ** degree down to 0 at x = 1."""
    return x / warmup if x < warmup else max(1.0 - x, 0.0) ** degree


SCHEDULES: dict[str, Callable[[float, float], float]] = {
    "warmup_cosine": warmup_cosine,
    "warmup_constant": warmup_constant,
    "warmup_linear": warmup_linear,
    "warmup_poly": warmup_poly,
}
