"""Norms of the mean gradient, and clips by them."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from shardfuse.agreement import on_rank
from shardfuse.engine.step import StepEngine
from shardfuse.grads.source import GradPhase
from shardfuse.layout import BLOCK
from shardfuse.optim.torch_like import TorchLike
from shardfuse.rules.base import number
from shardfuse.untraced import untraced


class Clipped(TorchLike):
    """grad_norm() and clip_grad_norm(), which reduce the gradients and keep them for step()."""

    _engine: StepEngine

    @untraced
    @torch.no_grad()
    def grad_norm(self) -> Tensor:
        """Return the L2 norm of the mean gradient over all parameters, () fp32. Collective.

        After clip_grad_norm(), the norm is that of the clipped gradient. At stage 1 this call
        reduces the gradients, and step() reduces them again. ``clip_grad_norm(math.inf)`` also
        returns the norm, and lets step() use the reduced gradients.
        """
        self._refuse_if_foreign("grad_norm()")
        with self.communicator.session.region("grad_norm()"):
            norm = self._grad_norm()
        if self._clip_coefficient is None:
            self._grads.release()
        return norm

    def _grad_norm(self, max_norm: float | None = None) -> Tensor:
        self._refuse_in_join("The norm of the mean gradient")
        self._begin(f"max_norm = {max_norm}")
        self._refuse_changed("another norm of them")
        return self._clipped(self._engine.square_norms().sum().sqrt())

    def _p_norm(self, norm_type: float) -> Tensor:
        """Return the p-norm of the mean gradient, clipped where it is already, () fp32."""
        self._refuse_in_join("The norm of the mean gradient")
        self._begin(f"norm_type = {norm_type}")
        self._refuse_changed("another norm of them")
        self._grads.keep_reduced()
        largest = norm_type == math.inf
        total = torch.zeros(2, dtype=torch.float32, device=self._device)
        for bucket, (shard,) in self._grads.reduced():
            # By blocks, to keep fp32's digits in long sums.
            blocks = shard.view(-1, BLOCK)
            norms = torch.linalg.vector_norm(blocks, norm_type, dim=1, dtype=torch.float32)
            norms = norms * (self._grads.mean_factor(bucket.flat) or 1.0)
            if largest:
                # A maximum over ranks may lose a NaN, so that is noted beside it.
                found = [norms.nan_to_num(nan=0.0, posinf=math.inf), norms.isnan().float()]
                total = torch.maximum(total, torch.stack(found).amax(dim=1))
            else:
                total[0] += norms.pow(norm_type).sum()
        self.communicator.all_reduce(total, "max" if largest else "sum").wait()
        root = total[0] if largest else total[0].pow(1 / norm_type)
        norm = torch.where(total[1] > 0, torch.full_like(root, math.nan), root)
        return self._clipped(norm)

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

    @untraced
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
        with self.communicator.session.region("clip_grad_norm()"):
            max_norm = number(max_norm, "max_norm")
            if not max_norm > 0:
                raise ValueError(f"Invalid max_norm: {max_norm}. Must be > 0.")
            norm = self._grad_norm(max_norm)
        coefficient = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        self._clip_by(coefficient)
        return norm

    @untraced
    @torch.no_grad()
    def clip_grad_norm_(
        self,
        parameters: Tensor | Iterable[Tensor],
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> Tensor:
        """Do what torch.nn.utils.clip_grad_norm_() does under DistributedDataParallel. Collective.

        The signature is torch's, so a script needs another name only. The norm is that of the mean
        gradient over ranks, which the next step() scales by ``min(1, max_norm / (norm + 1e-6))``;
        ``p.grad`` itself is not changed. See clip_grad_norm().

        Args:
            parameters: all parameters of this optimizer, such as model.parameters().
            max_norm: bound of the norm, above 0.
            norm_type: p of the p-norm, above 0; ``math.inf`` for the largest magnitude.
            error_if_nonfinite: raise if the norm is NaN or infinite, on all ranks; waits for the
                device.
            foreach: without effect.

        Returns:
            The norm before clipping, () fp32.

        Raises:
            ValueError: an argument out of range; or other parameters than this optimizer's.
            RuntimeError: gradients changed since they were clipped before; or a norm that is not
                finite, with ``error_if_nonfinite``.
        """
        self._refuse_if_foreign("clip_grad_norm_()")
        with self.communicator.session.region("clip_grad_norm_()"):
            max_norm, norm_type = float(max_norm), float(norm_type)
            self._check_clipped(parameters)
            if not max_norm > 0:
                raise ValueError(f"Invalid max_norm: {max_norm}. Must be > 0.")
            if not norm_type > 0:
                raise ValueError(f"Invalid norm_type: {norm_type}. Must be > 0, or inf.")
            norm = self._grad_norm(max_norm) if norm_type == 2 else self._p_norm(norm_type)
            if error_if_nonfinite and not torch.isfinite(norm):
                self._grads.release()
                raise RuntimeError(
                    f"The total norm of order {norm_type} for gradients from `parameters` is "
                    f"non-finite ({float(norm)}), so it cannot be clipped. To disable this error "
                    "and scale the gradients by the non-finite norm anyway, set "
                    "`error_if_nonfinite=False`"
                )
        self._clip_by((max_norm / (norm + 1e-6)).clamp(max=1.0))
        return norm

    def _check_clipped(self, parameters: Tensor | Iterable[Tensor]) -> None:
        """Raise ValueError unless these are all trained parameters of this optimizer."""
        if isinstance(parameters, int | float):
            raise TypeError(
                "clip_grad_norm_() has the signature of torch.nn.utils: parameters come before "
                f"max_norm. Call clip_grad_norm_(model.parameters(), {parameters}) or "
                f"clip_grad_norm({parameters})."
            )
        given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        # As in torch, parameters without a gradient do not matter: a model may have frozen ones.
        trained = {id(param) for param in given if param.requires_grad}
        own = [param for group in self.param_groups for param in group["params"]]
        missing = [param for param in own if param.requires_grad and id(param) not in trained]
        if missing or len(trained - set(map(id, own))) > 0:
            kind = "lack some" if missing else "have others, too"
            raise ValueError(
                f"The parameters to clip by one norm are not those of this optimizer: they {kind}. "
                "Pass all parameters that this optimizer trains. To clip parts of a model by norms "
                "of their own, give each part an optimizer."
            )
