"""A parameter that is unfrozen is unscaled once by ShardedGradScaler, at both stages."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardfuse import ShardedAdamW, ShardedGradScaler
from tests.support.harness import run_procs

pytestmark = pytest.mark.timeout(60)


def largest_error(stage: int, clips: bool) -> float:
    """Return the largest difference to torch's AdamW; a weight is frozen in steps 2 and 3."""
    torch.manual_seed(0)
    model, reference = (nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)) for _ in "ab")
    reference.load_state_dict(model.state_dict())
    sharding = {"stage": stage, "kernel": "eager", "bucket_cap_mb": 0.001}
    optimizer = ShardedAdamW(model.named_parameters(), lr=0.01, eps=1e-4, sharding=sharding)
    plain = torch.optim.AdamW(reference.parameters(), lr=0.01, eps=1e-4)
    scaler = ShardedGradScaler("cpu", init_scale=64.0)
    error = 0.0
    for step in range(6):
        for one in (model, reference):
            one[0].weight.requires_grad_(not 2 <= step < 4)
        inputs = [torch.full((2, 6), 1.0 + rank + 0.5 * step) for rank in range(2)]
        scaler.scale(model(inputs[dist.get_rank()]).square().mean()).backward()
        scaler.unscale_(optimizer)
        loss = torch.stack([reference(each).square().mean() for each in inputs]).mean()
        loss.backward()
        if clips:
            optimizer.clip_grad_norm(0.1)
            nn.utils.clip_grad_norm_(reference.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        plain.step()
        plain.zero_grad()
        pairs = zip(model.parameters(), reference.parameters(), strict=True)
        error = max([error, *(float((a - b).detach().abs().max()) for a, b in pairs)])
    return error


@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("stage", [1, 2])
def test_unscaled_once(stage: int, clips: bool) -> None:
    assert max(run_procs(2, largest_error, stage, clips)) < 1e-6
