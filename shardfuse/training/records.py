"""What a watched step is told as, and what is wrong with several of them, in words."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from math import isclose
from statistics import median
from typing import Any

from shardfuse.rules.lamb import LambSwitches

_CLIP_OPEN = 0.999
"""A factor above this clips nothing."""


@dataclass(frozen=True)
class TensorNorms:
    """Norms of one parameter in one step: L2, over all ranks."""

    grad: float
    """Norm of the mean gradient, before clips."""
    weight: float
    """Norm of the weights before the step."""
    update: float
    """Norm of the change that the step made, learning rate included."""
    trust_ratio: float | None
    """LAMB's trust ratio, 1 if it took none; None for another rule."""
    vanished: float
    """Share of elements whose fp32 master moved while the rounded parameter did not; 0 for fp32."""


@dataclass(frozen=True)
class StepRecord:
    """One watched step."""

    step: int
    """Number of the step() call, from 1; if a gradient scaler skipped it, that of the next one."""
    lr: float | None
    """Learning rate of the first group; None if it is a tensor on a device."""
    grad_norm: float
    """L2 norm of the mean gradient over all parameters, before clips."""
    clip: float
    """Smallest factor of a global clip or a group's clip; 1 without a clip."""
    tensors: dict[str, TensorNorms]
    """Norms of each parameter, by name."""

    @property
    def is_clipped(self) -> bool:
        """Whether a clip scaled gradients."""
        return self.clip < _CLIP_OPEN

    def to_json(self) -> dict[str, Any]:
        """Return the record in JSON's types."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> StepRecord:
        """Return the record that to_json() has converted.

        Args:
            values: the result of to_json().

        Raises:
            TypeError, KeyError: ``values`` is something else.
        """
        tensors = {name: TensorNorms(**norms) for name, norms in values["tensors"].items()}
        return cls(**{**values, "tensors": tensors})


_NUM_JUDGED = 10
"""Records in a row that have to show the same."""

_NEARLY_ALL = 0.9
_NEARLY_NOTHING_MOVES = 0.99


class Judge:
    """Looks at the latest records.

    Args:
        switches: of LAMB, whose bounds tell which ratios are bounded.
    """

    def __init__(self, switches: LambSwitches | None) -> None:
        self._switches = switches
        self._ends = () if switches is None else (switches.min_coeff, switches.max_coeff)
        self._records: deque[StepRecord] = deque(maxlen=_NUM_JUDGED)
        self._told: set[str] = set()

    def add(self, record: StepRecord) -> None:
        """Take note of a record."""
        self._records.append(record)

    def found(self) -> list[str]:
        """Return what was not told before."""
        if len(self._records) < _NUM_JUDGED:
            return []
        new = [(kind, text) for kind, text in self._judge() if kind not in self._told]
        self._told |= {kind for kind, _ in new}
        return [text for _, text in new]

    def _judge(self) -> Iterator[tuple[str, str]]:
        last = f"in each of the last {_NUM_JUDGED} watched steps"
        if min(map(self._bounded_share, self._records)) >= _NEARLY_ALL:
            assert self._switches is not None
            yield (
                "bounded",
                f"At least {_NEARLY_ALL:.0%} of the trust ratios were at a bound {last}: "
                f"clamp_value={self._switches.clamp_value:g} of the weight norm, or min_coeff="
                f"{self._switches.min_coeff:g}, max_coeff={self._switches.max_coeff:g}. They no "
                "longer follow the weights. Widen the bounds, or choose a variant without bounds.",
            )
        if all(record.is_clipped for record in self._records):
            factor = median(record.clip for record in self._records)
            yield (
                "clipped",
                f"The gradient was clipped {last}, by a median factor of {factor:.2g}: all steps "
                "have gradients of the same norm, whatever the batch is. Raise the bound, unless "
                "this is intended.",
            )
        if min(map(_vanished_share, self._records)) >= _NEARLY_NOTHING_MOVES:
            yield (
                "vanished",
                f"At least {_NEARLY_NOTHING_MOVES:.0%} of the updates of low-precision tensors "
                f"vanished in their rounding {last}. The fp32 masters keep them, and parameters "
                "move when they add up. But if this continues, raise the learning rate, or keep "
                "parameters in fp32.",
            )

    def _bounded_share(self, record: StepRecord) -> float:
        """Return the share of the trust ratios, where one is taken, that are at a bound."""
        switches = self._switches
        if switches is None:
            return 0.0
        bounded = num_adapted = 0
        for norms in record.tensors.values():
            if norms.trust_ratio in (None, 1):
                continue
            num_adapted += 1
            ends = (isclose(norms.trust_ratio, end, rel_tol=1e-6) for end in self._ends)
            bounded += norms.weight > switches.clamp_value or any(ends)
        return bounded / num_adapted if num_adapted else 0.0


def _vanished_share(record: StepRecord) -> float:
    """Return the smallest share that vanished of a tensor that was to move."""
    shares = [norms.vanished for norms in record.tensors.values() if norms.update > 0]
    return min(shares, default=0.0)
