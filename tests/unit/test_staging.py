"""What is kept of an input that a backend may change."""

from __future__ import annotations

import math

import pytest
import torch

from shardfuse.comm.transport import restore_if_changed


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_put_back(dtype: torch.dtype) -> None:
    """Any other bit is found, also where numbers are equal, and NaN is no change."""
    kept = torch.tensor([1.0, math.nan, -0.0, math.inf], dtype=dtype)
    input = kept.clone()
    assert not restore_if_changed(input, kept)
    input[2] = 0.0
    assert restore_if_changed(input, kept)
    assert math.copysign(1.0, float(input[2])) == -1.0
    assert not restore_if_changed(input, kept)
