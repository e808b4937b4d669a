"""A check that gradients are averaged elsewhere, where the optimizer takes them to be.

Looked at in the first two steps only, by sums of a few gradients: they are equal on all ranks where
something like DistributedDataParallel has averaged them, and hardly ever elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shardfuse.comm import Communicator

_NUM_SAMPLES = 8


@dataclass
class AveragedCheck:
    """Compares gradients of the first steps between ranks, if they are the mean already."""

    comm: Communicator  # the ranks that share the optimizer
    are_reduced: bool  # whether something else averages the gradients
    _num_seen: int = 0

    @property
    def is_over(self) -> bool:
        """Whether there is nothing more to look at."""
        return not self.are_reduced or self._num_seen > 1 or self.comm.world_size == 1

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
        return [
            f"a gradient of {name} that sums to {total} (grads_are_reduced=True is for "
            "gradients that DistributedDataParallel or the like has averaged; it is set by itself "
            "where a DistributedDataParallel holds the parameters, whose own forward must be "
            "called, then)"
            for name, total in _sample(grads)
        ]


def _sample(grads: Sequence[tuple[str, Tensor | None]]) -> list[tuple[str, str]]:
    """Return (name, sum to three digits) of a few dense gradients, evenly spaced."""
    present = [(name, g) for name, g in grads if g is not None and g.layout == torch.strided]
    step = max(1, -(-len(present) // _NUM_SAMPLES))
    return [(name, f"{float(grad.sum(dtype=torch.float32)):.3g}") for name, grad in present[::step]]
