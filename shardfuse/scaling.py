"""Loss scaling whose overflow decision is the same on every rank."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler

from shardfuse.comm import communicator_for


class ShardedGradScaler(GradScaler):
    """torch.amp.GradScaler that skips a step on all ranks when one has a non-finite gradient.

    Gradients are local until ``step()``, so each rank sees other ones; with the plain scaler one
    rank would skip the step's collectives and the others would wait for it.

    Args:
        device: device type of the gradients, "cuda", "npu", "cpu", ...
        init_scale, growth_factor, backoff_factor, growth_interval, enabled: as in torch.
        process_group: the ranks that share the optimizer; None is the default group.
    """

    def __init__(
        self,
        device: str = "cuda",
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        *,
        process_group: Any = None,
    ) -> None:
        super().__init__(
            device, init_scale, growth_factor, backoff_factor, growth_interval, enabled
        )
        self._process_group = process_group

    def _unscale_grads_(
        self,
        optimizer: torch.optim.Optimizer,
        inv_scale: Tensor,
        found_inf: Tensor,
        allow_fp16: bool,
    ) -> dict[torch.device, Tensor]:
        """Unscale this rank's gradients; return found_inf, the maximum over all ranks.

        torch's own sharded scaler overrides the same method: unscale_() and step() both pass here.
        """
        found = super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        device = found_inf.device
        # A rank without any gradient has found nothing, and must take part all the same.
        total = torch.zeros(1, dtype=torch.float32, device=device)
        for value in found.values():
            total += value.to(device)
        communicator_for(self._process_group, device).all_reduce(total, "max").wait()
        return {device: total.clamp_(max=1.0).reshape(())}
