"""Drop-in for torch_npu.optim: its class names and methods, over sharded optimizers.

from shardfuse.optim.npu import NpuFusedLamb

Nothing here imports torch_npu. On 2026-11-23 tests/unit/test_torch_npu_api.py compared it with the
sources of torch_npu 2.7.1, 2.12.0, 2.13.0 and 2.14.0. It was not run on an NPU.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState

from shardfuse.engine.params import FlatState
from shardfuse.optim.algorithms import (
    ShardedAdadelta,
    ShardedAdam,
    ShardedAdamP,
    ShardedAdamW,
    ShardedBertAdam,
    ShardedRMSprop,
    ShardedRMSpropTF,
    ShardedSGD,
)
from shardfuse.optim.backend import own_layout
from shardfuse.optim.base import ShardedOptimizer
from shardfuse.optim.lamb import ShardedLamb
from shardfuse.runtime import untraced
from shardfuse.scaling import agree_on_scale

logger = logging.getLogger("shardfuse")


class _NpuFused(ShardedOptimizer):
    """The methods and attributes of torch_npu's NpuFusedOptimizerBase."""

    is_fused_optimizer = True
    """Read by torch_npu's GradScaler: unscale ``grads_all_group_combined``, not each ``p.grad``."""

    is_params_grads_combined = True
    """Read by torch_npu's GradScaler; the buffers exist from construction on."""

    _zero_is_absent = True  # [Note: absent gradients] in grads/full.py
    _padding_is_shared = False  # whether the user may have written to the params' padding

    # Gradients

    @untraced
    def zero_grad(self, set_to_none: bool = False) -> None:
        """Set the gradients to zero, or to None.

        They stay the same tensors, views of the combined gradients. If the next backward does not
        reach a parameter, step() does not change it or its moments, as if its gradient were None.
        (torch_npu updates it further. Under grads_are_reduced, DistributedDataParallel or the like
        makes the gradients, and a zero counts as a gradient.)

        Args:
            set_to_none: free them, in place of zeros.
        """
        super().zero_grad(set_to_none)

    @own_layout()
    @torch.no_grad()
    def clip_grad_norm_fused_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale the mean gradient of the next step() to a norm of at most ``max_norm``. Collective.

        The factor is ``max_norm / (norm + 1e-6)`` where that is below 1. A NaN norm does not change
        the gradients. Unlike torch_npu's method, this changes no ``p.grad``: the norm is that of
        the mean gradient over ranks, and step() clips that mean. Costs one all-reduce of a few
        floats; step() uses the gradients that this call has reduced.

        Args:
            max_norm: bound of the norm, at least 0.
            norm_type: p of the p-norm, above 0; ``math.inf`` for the largest magnitude.

        Returns:
            The norm before clipping, () fp32; 0 where no parameter has a gradient.

        Raises:
            ValueError: an argument out of range.
        """
        max_norm, norm_type = float(max_norm), float(norm_type)
        if not max_norm >= 0:
            raise ValueError(f"Invalid max_norm: {max_norm}. Must be >= 0.")
        if not norm_type > 0:
            raise ValueError(f"Invalid norm_type: {norm_type}. Must be > 0, or inf.")
        with self.communicator.session.region("clip_grad_norm_fused_()"):
            norm = self._grad_norm(max_norm) if norm_type == 2 else self._p_norm(norm_type)
        coefficient = max_norm / (norm + 1e-6)
        coefficient = torch.where(coefficient < 1, coefficient, torch.ones_like(coefficient))
        self._clip_by(coefficient)
        return norm

    # Combined tensors

    @own_layout()
    def get_combined_params(self) -> list[Tensor | None]:
        """Return the flat tensors that the parameters are views of: [fp32, fp16].

        Each holds the parameters of all groups, padded; it is None where there are none of its
        dtype. A third one is added for bf16 parameters, and further ones for groups that were added
        later. Edits reach the model and the next step(); make the same ones on every rank.
        """
        self._gather.disable_overlap()  # a read of these tensors cannot be detected
        self._padding_is_shared = True
        return list(self._buffers.combined)

    @own_layout()
    @torch.no_grad()
    def get_combined_grads(self) -> list[Tensor | None]:
        """Return the flat tensors that this rank's gradients are views of: [fp32, fp16].

        As for get_combined_params(), with the same element order, but without frozen parameters:
        parameters that are unfrozen later follow at the end. Absent gradients are zeros. Edits
        reach ``p.grad`` and the next step().

        Raises:
            RuntimeError: the gradients are reduced elsewhere (``grads_are_reduced``).
        """
        self._show_grads()
        return self._grads.combined(shared=True)

    @property
    @own_layout("torch_npu's GradScaler")
    @torch.no_grad()
    def grads_all_group_combined(self) -> list[Tensor | None]:
        """The tensors of all gradients, which torch_npu's GradScaler unscales in place."""
        self._show_grads()
        combined = self._grads.combined(shared=False)
        # torch does not count the scaler's write as one, so reduced gradients are now stale.
        self._grads.release()
        return combined

    @own_layout("torch_npu's GradScaler")
    @torch.no_grad()
    def _maybe_init_combined_params_and_grads(self) -> None:
        """Make every gradient a view of the combined ones; for torch_npu's GradScaler."""
        self._show_grads()
        self._grads.combined(shared=False)

    def _show_grads(self) -> None:
        """Record the present gradients. Collective only if parameters were just unfrozen.

        Otherwise no region is opened: entries of the next region would count as its own.
        """
        if self._check():
            with self.communicator.session.region("unfreezing, before gradients are combined"):
                self._begin()
        self._grads.freeze()

    def _check(self) -> list[FlatState]:
        if self._padding_is_shared:
            for state in self._flats:
                state.params_buffer.clear_padding()
        return super()._check()

    # The step

    @untraced
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """Update the parameters from the mean gradient over ranks. Collective.

        See ShardedOptimizer.step(). torch_npu's GradScaler passes itself as ``grad_scaler``: the
        gradients are unscaled if they are not yet, and all ranks skip the step where the gradients
        of one are not finite, with a static scale too (torch_npu would apply them).

        Args:
            closure: as in ShardedOptimizer.step().
            kwargs: ``grad_scaler`` alone.

        Raises:
            TypeError: an unknown keyword.
            RuntimeError: as ShardedOptimizer.step(); or a closure under a scaler, or
                clip_grad_norm_fused_() of gradients that were still scaled.
        """
        # No named parameter: torch.amp.GradScaler would see it in the signature, and pass itself.
        scaler = kwargs.pop("grad_scaler", None)
        if kwargs:
            raise TypeError(f"step() got an unexpected keyword argument '{next(iter(kwargs))}'.")
        with self._ends_if_it_fails(), self.communicator.session.region("step()"):
            return self._step(closure) if scaler is None else self._scaled_step(closure, scaler)

    @own_layout("torch_npu's GradScaler")
    def _scaled_step(self, closure: Callable[[], Any] | None, scaler: Any) -> Any:
        if closure is not None:
            raise RuntimeError("Closure use is not currently supported if GradScaler is enabled.")
        self._refuse_in_join("step() under a gradient scaler")
        found_inf = self._unscale(scaler)
        self._grads.flush()
        if agree_on_scale(self.communicator, found_inf, None).skip:
            # So update() lowers the scale on all ranks.
            scaler._has_overflow = True
            self._clip_coefficient = None
            self._grads.release()
            logger.info("Gradient overflow on some rank. All ranks skip this step.")
            self._after_step()
            return None
        return self._step(None)

    def _unscale(self, scaler: Any) -> Tensor:
        """Have ``scaler`` unscale this rank's gradients; return above 0 if one is not finite."""
        state = scaler._per_optimizer_states[id(self)]
        if state["stage"] is OptState.READY:
            if self._clip_coefficient is not None:
                self._clip_coefficient = None
                raise RuntimeError(
                    "The gradients that clip_grad_norm_fused_() clipped are still scaled. Call "
                    "scaler.unscale_(optimizer) before it."
                )
            scaler.unscale_(self)
        total = torch.zeros((), dtype=torch.float32, device=self._device)
        if scaler._dynamic:
            for found in state["found_inf_per_device"].values():
                total += found.to(self._device)
            return total + float(scaler._has_overflow)
        for grads in self._grads.combined(shared=False):
            if grads is not None:
                norm = torch.linalg.vector_norm(grads, math.inf, dtype=torch.float32)
                total += ~norm.isfinite()
        return total


class NpuFusedSGD(_NpuFused, ShardedSGD):
    """torch_npu.optim.NpuFusedSGD, sharded. See ShardedSGD for formula and errors.

    Args:
        params, lr, momentum, dampening, weight_decay, nesterov, sharding: as for ShardedSGD.
        torch_options: as for ShardedSGD.
    """


class NpuFusedAdam(_NpuFused, ShardedAdam):
    """torch_npu.optim.NpuFusedAdam, sharded. See ShardedAdam for formula and errors.

    Args:
        params, lr, betas, eps, weight_decay, amsgrad, sharding, torch_options: as for ShardedAdam.
    """


class NpuFusedAdamW(_NpuFused, ShardedAdamW):
    """torch_npu.optim.NpuFusedAdamW, sharded. See ShardedAdamW for formula and errors.

    Args:
        params, lr, betas, eps, weight_decay, amsgrad, sharding, torch_options: as for ShardedAdamW.
    """


class NpuFusedBertAdam(_NpuFused, ShardedBertAdam):
    """torch_npu.optim.NpuFusedBertAdam, sharded. See ShardedBertAdam for formula and errors.

    Args:
        params, lr, warmup, t_total, schedule, b1, b2, e, weight_decay: as for ShardedBertAdam.
        max_grad_norm, sharding, torch_options: as for ShardedBertAdam.
    """


class NpuFusedLamb(_NpuFused, ShardedLamb):
    """torch_npu.optim.NpuFusedLamb, sharded. See ShardedLamb for formula and errors.

    Args:
        params, lr, betas, eps, weight_decay, adam, use_global_grad_norm: as for ShardedLamb.
        variant, max_grad_norm, bias_correction, clamp_value, min_coeff: as for ShardedLamb.
        max_coeff, always_adapt, exclude_from_weight_decay: as for ShardedLamb.
        exclude_from_layer_adaptation, sharding, torch_options: as for ShardedLamb.
    """


class NpuFusedRMSprop(_NpuFused, ShardedRMSprop):
    """torch_npu.optim.NpuFusedRMSprop, sharded. See ShardedRMSprop for formula and errors.

    Args:
        params, lr, alpha, eps, weight_decay, momentum, centered, sharding: as for ShardedRMSprop.
        torch_options: as for ShardedRMSprop.
    """


class NpuFusedRMSpropTF(_NpuFused, ShardedRMSpropTF):
    """torch_npu.optim.NpuFusedRMSpropTF, sharded. See ShardedRMSpropTF for formula and errors.

    Args:
        params, lr, alpha, eps, weight_decay, momentum, centered: as for ShardedRMSpropTF.
        decoupled_decay, lr_in_momentum, sharding, torch_options: as for ShardedRMSpropTF.
    """


class NpuFusedAdadelta(_NpuFused, ShardedAdadelta):
    """torch_npu.optim.NpuFusedAdadelta, sharded. See ShardedAdadelta for formula and errors.

    Args:
        params, lr, rho, eps, weight_decay, sharding, torch_options: as for ShardedAdadelta.
    """


class NpuFusedAdamP(_NpuFused, ShardedAdamP):
    """torch_npu.optim.NpuFusedAdamP, sharded. See ShardedAdamP for formula and errors.

    Args:
        params, lr, betas, eps, weight_decay, delta, wd_ratio, nesterov: as for ShardedAdamP.
        sharding, torch_options: as for ShardedAdamP.
    """
