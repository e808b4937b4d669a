"""Whether gradients are averaged elsewhere, as the configuration says or does not say.

Looked at in the first two steps only, by sums of a few gradients: they are equal on all ranks where
something like DistributedDataParallel has averaged them, and hardly ever elsewhere.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from shardfuse.comm import Communicator
from shardfuse.engine.intake import levels_to_caller

_NUM_SAMPLES = 8


@dataclass
class AveragedCheck:
    """Holds the gradients of the first step against ``grads_are_reduced``."""

    comm: Communicator  # the ranks that share the optimizer
    are_reduced: bool  # what ShardConfig says
    _num_seen: int = 0

    @property
    def is_over(self) -> bool:
        """Whether there is nothing more to look at."""
        return self._num_seen > 1 or self.comm.world_size == 1

    def restart(self) -> None:
        """Look once more: an error may have kept some ranks from having looked."""
        self._num_seen = 0

    def lines(self, grads: Sequence[tuple[str, Tensor | None]]) -> list[str]:
        """Return what ranks must have in common in the first step, if gradients are reduced.

        Args:
            grads: (name, gradient on this rank) of every parameter.
        """
        self._num_seen += 1
        if self._num_seen > 1:
            return []
        sample = _sample(grads)
        if self.are_reduced:
            return [
                f"a gradient of {name} that sums to {total} (grads_are_reduced=True is for "
                "gradients that DistributedDataParallel or the like has averaged)"
                for name, total in sample
            ]
        if sample:
            self.comm.tell("sample of gradients", str(sample))
        return []

    def warn(self, params: Sequence[Tensor]) -> None:
        """Warn, in the second step and on the first rank, of a wrapper that was not declared."""
        if self._num_seen != 2 or self.are_reduced or self.comm.everyone.rank != 0:
            return
        self._num_seen += 1
        told = self.comm.told("sample of gradients")
        if None not in told and len(set(told)) == 1 and is_wrapped(params):
            warnings.warn(
                "The model is wrapped in DistributedDataParallel, which averages the gradients, "
                "and the optimizer averages them again, so everything is sent twice. Pass "
                "sharding={'grads_are_reduced': True}, or train the model without the wrapper.",
                UserWarning,
                stacklevel=levels_to_caller(),
            )


def _sample(grads: Sequence[tuple[str, Tensor | None]]) -> list[tuple[str, str]]:
    """Return (name, sum to three digits) of a few dense gradients, evenly spaced."""
    present = [(name, g) for name, g in grads if g is not None and g.layout == torch.strided]
    step = max(1, -(-len(present) // _NUM_SAMPLES))
    return [(name, f"{float(grad.sum(dtype=torch.float32)):.3g}") for name, grad in present[::step]]


def is_wrapped(params: Sequence[Tensor]) -> bool:
    """Return whether a DistributedDataParallel holds the first of ``params`` that is trained.

    By who refers to it, for the wrapper leaves no mark on a parameter. Nothing new is made to
    refer to gradients meanwhile: who holds one keeps its slot from being written.
    """
    trained = next((param for param in params if param.requires_grad), None)
    lists = [held for held in gc.get_referrers(trained) if type(held) is list]
    for owner in gc.get_referrers(*lists):
        # Not isinstance(), which asks an object for its class: some are lazy.
        is_wrapper = issubclass(type(owner), DistributedDataParallel)
        attributes = vars(owner) if is_wrapper else owner
        held = attributes.get("_module_parameters") if type(attributes) is dict else None
        if any(held is candidate for candidate in lists):
            return True
    return False
