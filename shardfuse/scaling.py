"""Loss scaling with the same decision about overflows on every rank.

[Note: gradient scalers] torch.amp.GradScaler sets two attributes of an optimizer that has
``_step_supports_amp_scaling``, and then calls step(). ``found_inf``: whether this rank has a
non-finite gradient. ``grad_scale``: the remaining divisor of the gradients (None after unscale_).
The ranks agree on both in one all-reduce, so all of them skip a step or none does. The kernel
undoes equal scales, after the sum. Scales may differ if each rank has a plain scaler, which lowers
only its own scale. Such scales are undone before the sum. Frameworks read the same attribute, see
[Note: unscaling] in optim/compat.py.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler

from shardfuse.comm import Communicator, communicator_for
from shardfuse.runtime import untraced

logger = logging.getLogger("shardfuse")


class GradScale(NamedTuple):
    """The decision of all ranks about the loss scale of a step, and its factors of gradients.

    Gradients are multiplied by ``before_sum()`` on each rank, and their mean by ``after_sum()``.
    The codec divides by the number of ranks; the driver applies the sign of ``maximize``.
    """

    skip: bool = False
    inverse: Tensor | None = None  # () fp32, 1 / grad_scale; None: gradients are unscaled already
    is_equal: bool = True  # whether all ranks have the same scale

    def before_sum(self) -> Tensor | None:
        """Return the factor () of this rank's gradients; None is 1."""
        return None if self.is_equal else self.inverse

    def after_sum(self, clip: Tensor | None) -> Tensor | None:
        """Return the factor () of the mean gradient, with that of a clip; None is 1."""
        if self.inverse is None or not self.is_equal:
            return clip
        return self.inverse if clip is None else clip * self.inverse


UNSCALED = GradScale()
"""Of a step without a gradient scaler, which needs no agreement."""


def agree_on_scale(comm: Communicator, found_inf: Tensor, grad_scale: Tensor | None) -> GradScale:
    """Return the decision of all ranks about a scaled step. Collective; waits for the device.

    Args:
        found_inf: 0 if this rank's gradients are finite.
        grad_scale: the remaining divisor of the gradients; None: they are unscaled.
    """
    scale = torch.ones_like(found_inf) if grad_scale is None else grad_scale
    flags = torch.stack([found_inf.reshape(()), scale.reshape(()), -scale.reshape(())]).float()
    comm.world.all_reduce(flags, "max").wait()
    any_found, largest, smallest = flags.tolist()
    inverse = None if grad_scale is None else grad_scale.double().reciprocal().float().reshape(())
    return GradScale(skip=any_found != 0, inverse=inverse, is_equal=largest == -smallest)


class Overflow(NamedTuple):
    """The first non-finite gradient of a skipped step."""

    name: str  # of the first parameter with one, in order of registration
    rank: int  # the lowest rank with a non-finite gradient of that parameter


@dataclass
class OverflowReport:
    """Finds the gradient that made the ranks skip a step, logs it, and stores it."""

    comm: Communicator  # the ranks that skip together
    enabled: bool  # if not, nothing is read or communicated; equal on all ranks
    last: Overflow | None = None  # of the last step that was skipped

    def note(self, grads: Sequence[tuple[str, Tensor | None]], device: torch.device) -> None:
        """Search ``grads``, (name, gradient of this rank) of every parameter, for the overflow.

        Collective: all ranks skip the step, and all launch one all-reduce of one number on
        ``device``, also a rank without gradients.
        """
        if not self.enabled:
            return
        world = self.comm.world
        present = [(index, grad) for index, (_, grad) in enumerate(grads) if grad is not None]
        first = len(grads)
        if present:
            bad = torch.stack([~torch.isfinite(grad).all() for _, grad in present]).tolist()
            first = next((present[i][0] for i, is_bad in enumerate(bad) if is_bad), first)
        # The smallest code is that of the first parameter, on the lowest rank with a bad gradient.
        code = -(first * world.world_size + world.rank)
        key = torch.tensor([code], dtype=torch.int32, device=device)
        world.all_reduce(key, "max").wait()
        param, rank = divmod(-int(key), world.world_size)
        self.last = Overflow(grads[param][0], rank) if param < len(grads) else None
        if self.last is None:
            logger.warning(
                "step skipped: the gradient scaler saw an overflow, but no gradient is non-finite "
                "now on any rank. Do not change gradients between unscale_() and step()."
            )
        else:
            logger.warning(
                "step skipped: the gradient of %s is not finite on rank %d (the first such "
                "parameter, on the lowest such rank)",
                self.last.name,
                rank,
            )


class ShardedGradScaler(GradScaler):
    """A torch.amp.GradScaler with the same scale and skipped steps on all ranks.

    Gradients are local until ``step()``, so ranks see different overflows. If one rank has a
    non-finite gradient, all ranks skip the step and lower their scales.

    Args:
        device: device type of the gradients, "cuda", "npu", "cpu", ...
        init_scale, growth_factor, backoff_factor, growth_interval, enabled: as in torch.
        process_group: the ranks that share the optimizer, as in ShardConfig.
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
        self._agreed: Tensor | None = None  # (2,): the smallest scale and age of all ranks

    @untraced
    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide an optimizer's gradients by the scale, as torch's scaler does.

        Args:
            optimizer: of this library, at any stage, or of torch.
        """
        super().unscale_(optimizer)

    @untraced
    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Take a step unless gradients overflow on any rank, as torch's scaler does.

        Args:
            optimizer: of this library, at any stage, or of torch.
            args, kwargs: of its step().
        """
        return super().step(optimizer, *args, **kwargs)

    @untraced
    def scale(self, outputs: Any) -> Any:
        """Scale outputs by the scale that all ranks have, as torch's scaler does.

        Args:
            outputs: tensors of any shape, or nested iterables of them.
        """
        self._apply_agreed()
        return super().scale(outputs)

    @untraced
    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Update the scale, as torch's scaler does, from one that all ranks have.

        Args:
            new_scale: the next scale; None: torch's rule makes it.
        """
        self._apply_agreed()
        super().update(new_scale)

    @untraced
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the scale and its age, as torch's scaler does.

        Args:
            state_dict: of state_dict().
        """
        self._agreed = None
        super().load_state_dict(state_dict)

    def _apply_agreed(self) -> None:
        """Set the scale and age that the ranks agreed on in the last unscaling.

        They differ between ranks if a step failed on some of them, which then did not update them.
        """
        agreed, self._agreed = self._agreed, None
        if agreed is not None:
            scale, age = self._check_scale_growth_tracker("update")
            scale.copy_(agreed[0])
            age.copy_(agreed[1])

    def _check_scale_growth_tracker(self, funcname: str) -> tuple[Tensor, Tensor]:
        """Return the scale and its age, also on a rank that has not scaled a loss yet.

        torch's scaler would raise an AssertionError there, while the peers wait in the step.
        """
        if self._scale is None:
            where = torch.empty(0, device=self._device).device
            self._lazy_init_scale_growth_tracker(where)
        return super()._check_scale_growth_tracker(funcname)

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
        # With allow_fp16 torch only searches for overflows, and step() undoes the scale. Shards are
        # unscaled first: they consume a gradient that is still in p.grad, as that of a param that
        # was just unfrozen. Otherwise torch would unscale it in p.grad, and the shard once more.
        reach = getattr(optimizer, "_unscale_shards", None)
        of_shards = None if reach is None else reach(None if allow_fp16 else inv_scale)
        found = super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        device = found_inf.device
        # A rank without gradients has found nothing, and launches the all-reduce, too.
        total = torch.zeros(1, dtype=torch.float32, device=device)
        for value in [*found.values(), *([] if of_shards is None else [of_shards])]:
            total += value.to(device)
        own = self._check_scale_growth_tracker("step")
        reduced = torch.cat([total, *(-value.float().reshape(1).to(device) for value in own)])
        comm = communicator_for(self._process_group, device, "native")
        with comm.session.region("unscaling by ShardedGradScaler"):
            comm.all_reduce(reduced, "max").wait()
        self._agreed = -reduced[1:]
        return {device: reduced[0].clamp(max=1.0)}
