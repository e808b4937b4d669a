"""What a gradient scaler writes to gradients that have left under backward, on a device.

Its operator counts as no write, and the host looks at no values there.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp import GradScaler

from shardfuse import ShardedAdam, ShardedGradScaler
from tests.support import placing
from tests.support.harness import run_threads
from tests.support.overlap import OFF, ON, count_early

pytestmark = pytest.mark.timeout(120)

STEPS = 5

SCALERS: dict[str, Any] = {
    "torch": lambda: GradScaler(placing.device_type(), init_scale=8.0),
    "shardfuse": lambda: ShardedGradScaler(placing.device_type(), init_scale=8.0),
}

WAYS = ("step", "unscale", "unscale and clip")


def train(kind: str, way: str, sharding: dict[str, Any]) -> tuple[list[Tensor], list[int]]:
    """Return parameters, and how many buckets had left before each step()."""
    model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(4)))
    generator = torch.Generator().manual_seed(0)  # ranks are threads
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.randn(param.shape, generator=generator) / 6)
    options = {"bucket_cap_mb": 0.004, "kernel": "eager", "collectives": "native", **sharding}
    optimizer = ShardedAdam(model.named_parameters(), lr=0.1, sharding=options)
    early, scaler, left = count_early(optimizer), SCALERS[kind](), []
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        loss = model(torch.randn(4, 32, generator=generator)).square().mean()
        before = sum(early)
        scaler.scale(loss).backward()
        left.append(sum(early) - before)
        if way != "step":
            scaler.unscale_(optimizer)
        if way == "unscale and clip":
            optimizer.clip_grad_norm(0.05)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return [param.detach().clone() for param in model.parameters()], left


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", SCALERS)
def test_nothing_that_is_still_scaled_is_used(kind: str, way: str) -> None:
    """The bits are those without overlap, from the first step on."""
    expected = run_threads(2, train, kind, way, OFF)
    for (values, left), (others, _) in zip(
        run_threads(2, train, kind, way, ON), expected, strict=True
    ):
        assert all(map(torch.equal, values, others))
        if placing.on_device():
            assert left[0] == 0
        if way == "step":
            assert all(left[1:])
        if way != "step" and kind == "torch" and placing.on_device():
            assert not any(left)


def unscale_late() -> str:
    """Return the error of a step whose scaler unscales and clips for the first time."""
    model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(4)))
    options = {"bucket_cap_mb": 0.004, "kernel": "eager", **ON}
    optimizer = ShardedAdam(model.named_parameters(), lr=0.1, sharding=options)
    scaler = GradScaler(placing.device_type(), init_scale=8.0)
    for step in range(2):
        scaler.scale(model(torch.ones(4, 32)).square().mean()).backward()
        if step:
            scaler.unscale_(optimizer)
            optimizer.clip_grad_norm(0.05)
            with pytest.raises(RuntimeError) as caught:
                scaler.step(optimizer)
            return str(caught.value)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return ""


@pytest.mark.skipif(not placing.on_device(), reason="the host sees it on the CPU")
def test_a_norm_of_scaled_gradients_is_refused() -> None:
    for text in run_threads(2, unscale_late):
        assert "shardfuse.ShardedGradScaler" in text
