"""Loss scaling whose overflow decision is the same on every rank.

[Note: gradient scalers] torch.amp.GradScaler hands an optimizer with ``_step_supports_amp_scaling``
two attributes and leaves the rest to its step(): ``found_inf``, whether this rank saw a non-finite
gradient, and ``grad_scale``, what the gradients still have to be divided by (None after unscale_).
The ranks agree on both in one all-reduce: a step is skipped by all or by none. Equal scales are
undone in the kernel, after the sum; scales may differ where each rank runs a plain scaler, which
lowers its own scale only, and are then undone before the sum. Frameworks read the same attribute,
[Note: who unscales] in optim/compat.py.
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


class ScaledStep(NamedTuple):
    """What the ranks agreed to do in a step under a gradient scaler."""

    skip: bool
    inverse: Tensor | None  # () fp32, 1 / grad_scale; None where there is nothing to undo
    is_equal: bool  # whether all ranks have the same scale


UNSCALED = ScaledStep(skip=False, inverse=None, is_equal=True)
"""A step without a gradient scaler, over which the ranks need not agree."""


def agree_on_step(comm: Communicator, found_inf: Tensor, grad_scale: Tensor | None) -> ScaledStep:
    """Return what all ranks do in a step under a scaler. Collective; waits for the device.

    Args:
        found_inf: 0 if this rank's gradients are finite.
        grad_scale: what they still have to be divided by; None for nothing.
    """
    scale = torch.ones_like(found_inf) if grad_scale is None else grad_scale
    flags = torch.stack([found_inf.reshape(()), scale.reshape(()), -scale.reshape(())]).float()
    comm.world.all_reduce(flags, "max").wait()
    any_found, largest, smallest = flags.tolist()
    inverse = None if grad_scale is None else grad_scale.double().reciprocal().float().reshape(())
    return ScaledStep(skip=any_found != 0, inverse=inverse, is_equal=largest == -smallest)


class Overflow(NamedTuple):
    """Where a skipped step had its first non-finite gradient."""

    name: str  # of the first such parameter, in order of registration
    rank: int  # the lowest with a non-finite gradient of that parameter


@dataclass
class OverflowReport:
    """Finds out which gradient made the ranks skip a step, logs it and keeps it."""

    comm: Communicator  # the ranks that skip together
    enabled: bool  # if not, nothing is looked at or communicated; equal on all ranks
    last: Overflow | None = None  # of the last step that was skipped

    def note(self, grads: Sequence[tuple[str, Tensor | None]], device: torch.device) -> None:
        """Look for the overflow in ``grads``, (name, gradient of this rank) of every parameter.

        Collective, for all ranks know that they skip: one all-reduce of one number on ``device``,
        also by a rank that has no gradient.
        """
        if not self.enabled:
            return
        everyone = self.comm.world
        present = [(index, grad) for index, (_, grad) in enumerate(grads) if grad is not None]
        first = len(grads)
        if present:
            bad = torch.stack([~torch.isfinite(grad).all() for _, grad in present]).tolist()
            first = next((present[i][0] for i, is_bad in enumerate(bad) if is_bad), first)
        # The smallest is that of the first parameter, and of the lowest rank that it is bad on.
        code = -(first * everyone.world_size + everyone.rank)
        key = torch.tensor([code], dtype=torch.int32, device=device)
        everyone.all_reduce(key, "max").wait()
        param, rank = divmod(-int(key), everyone.world_size)
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
    """A torch.amp.GradScaler whose scale and skipped steps are the same on all ranks.

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
        self._agreed: Tensor | None = None  # (2,): the smallest scale and age on any rank

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
        self._take_agreed()
        return super().scale(outputs)

    @untraced
    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Update the scale, as torch's scaler does, from one that all ranks have.

        Args:
            new_scale: the next scale; None: torch's rule makes it.
        """
        self._take_agreed()
        super().update(new_scale)

    @untraced
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the scale and its age, as torch's scaler does.

        Args:
            state_dict: of state_dict().
        """
        self._agreed = None
        super().load_state_dict(state_dict)

    def _take_agreed(self) -> None:
        """Have the scale and age that the ranks agreed on when they looked at gradients last.

        They differ where a step failed on some ranks only, after which these did not update theirs.
        """
        agreed, self._agreed = self._agreed, None
        if agreed is not None:
            scale, age = self._check_scale_growth_tracker("update")
            scale.copy_(agreed[0])
            age.copy_(agreed[1])

    def _check_scale_growth_tracker(self, funcname: str) -> tuple[Tensor, Tensor]:
        """Return the scale and its age, also of a rank that has not scaled any loss yet.

        The others wait for it in the step; torch's scaler would end it by an assertion.
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
        # torch allows fp16 where it only looks, and leaves the scale to step(). Shards come first:
        # they take a gradient that is still in p.grad, as of a param that has just been unfrozen,
        # and torch would unscale it there a first time.
        reach = getattr(optimizer, "_unscale_shards", None)
        of_shards = None if reach is None else reach(None if allow_fp16 else inv_scale)
        found = super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        device = found_inf.device
        # A rank without any gradient has found nothing, and must take part all the same.
        total = torch.zeros(1, dtype=torch.float32, device=device)
        for value in [*found.values(), *([] if of_shards is None else [of_shards])]:
            total += value.to(device)
        own = self._check_scale_growth_tracker("step")
        told = torch.cat([total, *(-value.float().reshape(1).to(device) for value in own)])
        comm = communicator_for(self._process_group, device, "native")
        with comm.session.region("unscaling by ShardedGradScaler"):
            comm.all_reduce(told, "max").wait()
        self._agreed = -told[1:]
        return {device: told[0].clamp(max=1.0)}
