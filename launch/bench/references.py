"""Unsharded optimizers that results are checked against, and the NpuFusedLamb algorithm.

Written from the formulas, for checking and for comparison: plain torch, one process, no speed-ups.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from launch.bench.shapes import Shape
from launch.bench.synthetic import initial_values, mean_grad

MakeOptimizer = Callable[[list[Tensor]], Any]


class NpuLamb(torch.optim.Optimizer):
    """The algorithm of torch_npu's NpuFusedLamb: whole-buffer moments, then a loop over tensors.

    It keeps seven buffers of the parameters' size, as upstream does: parameters, gradients, two
    moments, trust ratios, and two for squares. The norms of each tensor are read on the host.
    """

    def __init__(
        self,
        params: Iterable[Tensor],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults)
        self._params: list[Tensor] = self.param_groups[0]["params"]
        numel = sum(p.numel() for p in self._params)
        device = self._params[0].device
        self.grad_flat = torch.zeros(numel, device=device)
        self._flat = torch.empty(numel, device=device)
        self.buffers = [torch.zeros(numel, device=device) for _ in range(5)]
        self._ranges: list[tuple[int, int]] = []
        start = 0
        for param in self._params:
            stop = start + param.numel()
            view = self._flat[start:stop].view_as(param)
            param.data = view.copy_(param.detach())
            self._ranges.append((start, stop))
            start = stop

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update from ``p.grad``; one that lies in ``grad_flat`` already is not copied."""
        for param, (start, stop) in zip(self._params, self._ranges, strict=True):
            assert param.grad is not None
            view = self.grad_flat[start:stop].view_as(param)
            if view.data_ptr() != param.grad.data_ptr():
                view.copy_(param.grad)
        group = self.param_groups[0]
        beta1, beta2 = group["betas"]
        exp_avg, exp_avg_sq, ratio, squares, update_squares = self.buffers
        exp_avg.mul_(beta1).add_(self.grad_flat, alpha=1 - beta1)
        exp_avg_sq.mul_(beta2).addcmul_(self.grad_flat, self.grad_flat, value=1 - beta2)
        update = exp_avg / exp_avg_sq.sqrt().add_(group["eps"])
        if group["weight_decay"] != 0:
            update.add_(self._flat, alpha=group["weight_decay"])
        squares.copy_(self._flat.pow(2))
        update_squares.copy_(update.pow(2))
        for start, stop in self._ranges:
            weight_norm = squares[start:stop].sum().sqrt().clamp(0, 10)
            update_norm = update_squares[start:stop].sum().sqrt()
            is_zero = weight_norm == 0 or update_norm == 0
            ratio[start:stop] = 1.0 if is_zero else weight_norm / update_norm
        self._flat.addcmul_(update, ratio, value=-group["lr"])


class BertAdamReference(torch.optim.Optimizer):
    """BertAdam: no bias correction, decoupled decay, gradients clipped to a norm of 1."""

    def __init__(self, params: Iterable[Tensor], lr: float, weight_decay: float = 0.01) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update every parameter from its gradient, which is clipped in place."""
        group = self.param_groups[0]
        torch.nn.utils.clip_grad_norm_(group["params"], 1.0)
        for param in group["params"]:
            state = self.state[param]
            if not state:
                state["m"], state["v"] = torch.zeros_like(param), torch.zeros_like(param)
            m, v = state["m"], state["v"]
            m.mul_(0.9).add_(param.grad, alpha=0.1)
            v.mul_(0.999).addcmul_(param.grad, param.grad, value=0.001)
            update = (m / v.sqrt().add_(1e-6)).add_(param, alpha=group["weight_decay"])
            param.sub_(update, alpha=group["lr"])


def expected_values(
    make: MakeOptimizer,
    blocks: list[list[Shape]],
    num_steps: int,
    world_size: int,
    device: torch.device,
) -> list[Tensor]:
    """Train from the initial values on the exact mean gradients, in this process alone."""
    params = [value.requires_grad_() for value in initial_values(blocks, device)]
    optimizer = make(params)
    for step in range(num_steps):
        for index, param in enumerate(params):
            param.grad = mean_grad(param.detach(), index, step, world_size)
        optimizer.step()
    return [param.detach() for param in params]


def largest_error(actual: list[Tensor], expected: list[Tensor], initial: Iterable[Tensor]) -> float:
    """Return max |actual - expected| over all tensors in units of the largest movement."""
    error = movement = 0.0
    for got, wanted, start in zip(actual, expected, initial, strict=True):
        error = max(error, float((got - wanted).abs().max()))
        movement = max(movement, float((wanted - start).abs().max()))
    return error / movement if movement else float("inf")
