"""A stand-in for torch_npu.npu.amp.GradScaler on the CPU, after torch_npu 2.14's protocol.

Written from what that class reads and calls; nothing of it is copied or imported. What the tests
rely on is marked with the attribute of the optimizer it goes by:

* ``unscale_()`` of an optimizer with ``is_fused_optimizer`` walks ``grads_all_group_combined``, not
  ``p.grad``, after ``_maybe_init_combined_params_and_grads()`` if ``is_params_grads_combined`` is
  False. A dynamic scaler checks for non-finite values and unscales in place, a static one only
  multiplies.
* ``step()`` of an optimizer with ``_step_supports_amp_scaling`` passes on everything, itself as
  ``grad_scaler`` included, and does nothing else.
* ``update()`` of a dynamic scaler lowers the scale if ``_has_overflow``, which is one flag for all
  optimizers. Ranks are never compared, as on chips with INF/NAN mode (910B and later).
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState


def _fresh_state() -> dict[str, Any]:
    return {"stage": OptState.READY, "found_inf_per_device": {}}


class NpuScaler:
    """Scales losses and unscales the combined gradients of fused optimizers."""

    def __init__(
        self, init_scale: float = 64.0, growth_interval: int = 1000, dynamic: bool = True
    ) -> None:
        self._scale = torch.tensor(init_scale)
        self._dynamic = dynamic
        self._growth_interval = growth_interval
        self._good_steps = 0
        self._has_overflow = False
        self._per_optimizer_states: dict[int, dict[str, Any]] = defaultdict(_fresh_state)

    def get_scale(self) -> float:
        """Return the present scale."""
        return float(self._scale)

    def scale(self, loss: Tensor) -> Tensor:
        """Return the scaled loss."""
        return loss * self._scale

    def unscale_(self, optimizer: Any) -> None:
        """Divide this rank's gradients by the scale, noting whether all are finite."""
        state = self._per_optimizer_states[id(optimizer)]
        if state["stage"] is not OptState.READY:
            raise RuntimeError("unscale_() has been called already.")
        inverse, found = self._scale.reciprocal(), torch.zeros(())
        assert optimizer.is_fused_optimizer
        if not optimizer.is_params_grads_combined:
            optimizer._maybe_init_combined_params_and_grads()
        with torch.no_grad():
            for grads in optimizer.grads_all_group_combined:
                if grads is None:
                    continue
                if not self._dynamic:
                    grads.mul_(inverse)
                    continue
                torch._amp_foreach_non_finite_check_and_unscale_([grads], found, inverse)
                if found.item() > 0:
                    self._has_overflow = True
        if self._has_overflow:
            found += 1
        state["found_inf_per_device"] = {found.device: found}
        state["stage"] = OptState.UNSCALED

    def step(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        """Hand the step over to an optimizer that knows scalers."""
        state = self._per_optimizer_states[id(optimizer)]
        if state["stage"] is OptState.STEPPED:
            raise RuntimeError("step() has been called already.")
        assert optimizer._step_supports_amp_scaling
        result = optimizer.step(*args, **kwargs, grad_scaler=self)
        state["stage"] = OptState.STEPPED
        return result

    def update(self) -> None:
        """Lower the scale after an overflow, raise it after enough steps without one."""
        if self._dynamic and self._has_overflow:
            self._scale *= 0.5
            self._good_steps = 0
        elif self._dynamic:
            self._good_steps += 1
            if self._good_steps == self._growth_interval:
                self._scale *= 2.0
                self._good_steps = 0
        self._has_overflow = False
        self._per_optimizer_states = defaultdict(_fresh_state)
