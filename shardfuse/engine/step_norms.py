"""StepNorms: norms of gradients, weights and updates of one step, which the driver records."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from shardfuse.engine.kernels import refresh_master
from shardfuse.engine.units import UpdateUnit

_GRAD, _WEIGHT, _UPDATE, _VANISHED = range(4)


class StepNorms:
    """Norms of every parameter's gradient, weight and update in one step, over all ranks.

    All tensors are (num_params,) fp32 on the optimizer's device, in the order of ``names``. Reading
    them on the host waits for the device; see ``shardfuse.training.StepMonitor``, which does not.

    Args:
        names: of the parameters.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)
        self.ratio: Tensor | None = None
        """Trust ratios; 1 where none was taken. None for a rule without any."""
        self.inverse: Tensor | None = None
        """() of the loss scale by which gradients still had to be divided; None for 1."""
        self._clips: list[Tensor] = []
        self._parts: list[dict[int, list[Tensor]]] = [{} for _ in range(4)]
        self._totals: Tensor | None = None

    @property
    def has_stepped(self) -> bool:
        """Whether the step was made; one that a gradient scaler skips leaves it to the next."""
        return self._totals is not None

    @property
    def grad(self) -> Tensor:
        """L2 norms of the mean gradient over ranks, before clips; 0 without a gradient."""
        norms = self._sums()[_GRAD].sqrt()
        return norms if self.inverse is None else norms * self.inverse

    @property
    def weight(self) -> Tensor:
        """L2 norms before the step; 0 for a frozen parameter."""
        return self._sums()[_WEIGHT].sqrt()

    @property
    def update(self) -> Tensor:
        """L2 norms of the change by the step, learning rate included."""
        return self._sums()[_UPDATE].sqrt()

    @property
    def vanished(self) -> Tensor:
        """Elements whose fp32 master moved while the parameter, of lower precision, did not."""
        return self._sums()[_VANISHED]

    @property
    def clip(self) -> Tensor | None:
        """Smallest factor () by which a clip of several tensors' norm scaled; None without one."""
        if not self._clips:
            return None
        smallest = torch.stack(self._clips).min()
        return smallest if self.inverse is None else smallest / self.inverse

    def _sums(self) -> Tensor:
        if self._totals is None:
            raise RuntimeError("No step() was made since watch_step(). Read the norms after one.")
        return self._totals

    # Called by the driver

    def record_gradient(self, unit: UpdateUnit) -> None:
        """Record the mean gradient of ``unit``."""
        grad = unit.grad[0].float()
        for part in unit.grad[1:]:
            grad = grad + part
        self._record(_GRAD, unit, grad if unit.mean is None else grad * unit.mean)

    def record_clip(self, factor: Tensor) -> None:
        """Record a factor () by which the mean gradient is scaled for the rule."""
        self._clips.append(factor)

    @contextmanager
    def recording_update(self, unit: UpdateUnit) -> Iterator[None]:
        """Record the change of a unit inside the context."""
        assert unit.p is not None
        if unit.low is not None:
            refresh_master(unit.p, unit.low)  # edits are no part of the update
        before = unit.p.clone()
        low = None if unit.low is None else unit.low.clone()
        yield
        moved = unit.p - before
        self._record(_WEIGHT, unit, before)
        self._record(_UPDATE, unit, moved)
        if low is not None and unit.low is not None:
            self._record(_VANISHED, unit, ((moved != 0) & (unit.low == low)).float())

    def _record(self, kind: int, unit: UpdateUnit, values: Tensor) -> None:
        """Record the sum of squares of the part of each parameter in a unit's ``values``."""
        squares = values.square()
        for fragment in unit.fragments:
            start, stop = fragment.shard_start, fragment.shard_start + fragment.numel
            # By sum(), which adds up as a tree: torch.norm has fewer digits on the CPU.
            self._parts[kind].setdefault(fragment.param, []).append(squares[start:stop].sum())

    def finish(self, total: Callable[[Tensor], Tensor], device: torch.device) -> None:
        """Sum the records over ranks, by ``total``."""
        zero = torch.zeros((), device=device)
        rows = [
            [sum(parts.get(param, []), zero) for param in range(len(self.names))]
            for parts in self._parts
        ]
        self._totals = total(torch.stack([torch.stack(row) for row in rows]))
        self._parts.clear()
