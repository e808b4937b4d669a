"""Norms of the mean gradient, and clips by them."""

from __future__ import annotations

import torch
from torch import Tensor

from shardfuse.agreement import on_rank
from shardfuse.engine.step import StepEngine
from shardfuse.grads.protocol import GradPhase
from shardfuse.optim.torch_like import TorchLike


class Clipped(TorchLike):
    """grad_norm() and clip_grad_norm(), which reduce the gradients and keep them for step()."""

    _engine: StepEngine

    @torch.no_grad()
    def grad_norm(self) -> Tensor:
        """Return the L2 norm of the mean gradient over all parameters, () fp32. Collective.

        After clip_grad_norm(), the norm is that of the clipped gradient. At stage 1 this call
        reduces the gradients, and step() reduces them again. ``clip_grad_norm(math.inf)`` also
        returns the norm, and lets step() use the reduced gradients.
        """
        self._refuse_if_foreign("grad_norm()")
        with self.communicator.call("grad_norm()"):
            norm = self._grad_norm()
        if self._clip_coefficient is None:
            self._grads.release()
        return norm

    def _grad_norm(self, max_norm: float | None = None) -> Tensor:
        self._refuse_in_join("The norm of the mean gradient")
        self._begin(f"max_norm = {max_norm}")
        self._refuse_changed("another norm of them")
        return self._clipped(self._engine.square_norms().sum().sqrt())

    def _refuse_changed(self, then: str) -> None:
        """Raise RuntimeError if gradients changed since they were clipped; after _begin()."""
        if self._clip_coefficient is None or self._grads.phase is GradPhase.REDUCED:
            return
        self._clip_coefficient = None
        raise RuntimeError(
            f"{on_rank(self.communicator)}Gradients changed between clip_grad_norm() and {then}. "
            "Clip once, after the last backward() of the step and any unscale_(). To leave a step "
            "out, clear the gradients by the optimizer's zero_grad()."
        )

    def _clipped(self, norm: Tensor) -> Tensor:
        """Return the norm () that a gradient of ``norm`` has after the clips made so far."""
        return norm if self._clip_coefficient is None else norm * self._clip_coefficient

    def _clip_by(self, coefficient: Tensor) -> None:
        """Have the next step() scale the mean gradient by ``coefficient`` (), too."""
        before = self._clip_coefficient
        self._clip_coefficient = coefficient if before is None else before * coefficient

    @torch.no_grad()
    def clip_grad_norm(self, max_norm: float) -> Tensor:
        """Scale the mean gradient of the next step() to an L2 norm of at most ``max_norm``.

        Collective; call it after backward and before step(). ``p.grad`` itself is not changed.
        The factor is ``min(1, max_norm / (norm + 1e-6))``, as in torch.nn.utils. Use the function
        of torch.nn.utils only with ``grads_are_reduced``, because it sees only ``p.grad``. If a
        loop cannot call this method, pass ``ShardConfig(clip_grad_norm=)``.

        Under a gradient scaler, call ``scaler.unscale_(optimizer)`` before. A change of gradients
        after this call is an error of step(), unscale_() or the next norm; to leave a step out,
        call the optimizer's own zero_grad(). On an accelerator, changes by torch's plain GradScaler
        or by ``p.grad.data`` are not seen, and step() ignores them.

        Args:
            max_norm: bound of the norm, above 0.

        Returns:
            The norm before clipping, () fp32.

        Raises:
            ValueError: ``max_norm`` is not above 0.
            RuntimeError: gradients changed since they were clipped before.
        """
        self._refuse_if_foreign("clip_grad_norm()")
        with self.communicator.call("clip_grad_norm()"):
            if not max_norm > 0:
                raise ValueError(f"Invalid max_norm: {max_norm}. Must be > 0.")
            norm = self._grad_norm(max_norm)
        coefficient = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        self._clip_by(coefficient)
        return norm
