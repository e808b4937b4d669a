"""StepMonitor: norms, trust ratios and clips of every n-th step, and a diagnosis of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from math import isclose
from statistics import median
from typing import Any

import torch
from torch import Tensor

from shardfuse.engine.step_norms import StepNorms
from shardfuse.optim.base import ShardedOptimizer
from shardfuse.rules.lamb import LambSwitches
from shardfuse.runtime import copy_to_host

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
    """Share of elements that changed in the fp32 master, not in the parameter; 0 for fp32."""


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


_NUM_EXAMINED = 10
"""Records in a row that have to show the same."""

_NEARLY_ALL = 0.9
_NEARLY_NOTHING_MOVES = 0.99


class NormDiagnostics:
    """Finds faults in the latest records.

    Args:
        switches: LAMB's, with the bounds of trust ratios; None: another rule.
    """

    def __init__(self, switches: LambSwitches | None) -> None:
        self._switches = switches
        self._ends = () if switches is None else (switches.min_coeff, switches.max_coeff)
        self._records: deque[StepRecord] = deque(maxlen=_NUM_EXAMINED)
        self._reported: set[str] = set()

    def add(self, record: StepRecord) -> None:
        """Add a record."""
        self._records.append(record)

    def new_findings(self) -> list[str]:
        """Return the faults that were not returned before."""
        if len(self._records) < _NUM_EXAMINED:
            return []
        new = [(kind, text) for kind, text in self._findings() if kind not in self._reported]
        self._reported |= {kind for kind, _ in new}
        return [text for _, text in new]

    def _findings(self) -> Iterator[tuple[str, str]]:
        last = f"in each of the last {_NUM_EXAMINED} watched steps"
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
        """Return the share of trust ratios, among those other than 1, that are at a bound."""
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
    """Return the smallest vanished share among the tensors that had an update."""
    shares = [norms.vanished for norms in record.tensors.values() if norms.update > 0]
    return min(shares, default=0.0)


@dataclass
class _PendingRecord:
    """A step's numbers while they are copied to the host."""

    step: int
    lr: float | None
    norms: StepNorms
    values: Tensor  # (1 + 5 or 4, num_params): the clip, and the norms
    copied: torch.Event | None  # None: the copy is complete

    @property
    def is_ready(self) -> bool:
        return self.copied is None or self.copied.query()


class StepMonitor:
    """Watch every ``every``-th step of an optimizer; see ``ShardedOptimizer.watch_step()``.

        monitor = StepMonitor(optimizer, every=50)
        for batch in batches:
            loss(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
            for record in monitor.take():
                print(record.step, record.grad_norm, record.clip)
        monitor.close()

    Build it on all ranks with the same arguments. All ranks get the same records, once they are
    copied to the host: nothing waits for the device. ``warnings()`` explains faults of
    them. After an error that a loop has caught, the next step is watched, and every ``every``-th
    one from there.

    Args:
        optimizer: the optimizer to watch.
        every: steps between two watched steps; the first watched step is number ``every``.
        first_step: number of steps that a resumed run made before.

    Raises:
        ValueError: ``every`` is below 1.
        TypeError: the optimizer is not one of shardfuse's.
        RuntimeError: DeepSpeed shards the parameters.
    """

    def __init__(self, optimizer: ShardedOptimizer, every: int = 50, first_step: int = 0) -> None:
        if every < 1:
            raise ValueError(f"Invalid every: {every}. Must be at least 1.")
        given: Any = optimizer
        if not isinstance(given, ShardedOptimizer):
            kind = type(given).__name__
            raise TypeError(f"StepMonitor watches shardfuse's optimizers, got {kind}.")
        optimizer._refuse_if_external("StepMonitor")
        self._optimizer = optimizer
        self._every = every
        self._step = first_step
        self._due = first_step + every - first_step % every  # the next step to watch
        self._was_restarted = False
        optimizer.communicator.session.on_restart(self._restart)
        self._watched: tuple[int, float | None, StepNorms] | None = None
        self._pending: deque[_PendingRecord] = deque()
        self._diagnostics = NormDiagnostics(getattr(optimizer._rule, "switches", None))
        before = optimizer.register_step_pre_hook(self._before)
        after = optimizer.register_step_post_hook(self._after)
        self._hooks = before, after

    def take(self) -> Iterator[StepRecord]:
        """Yield the records that are ready since the last call, oldest first. Local."""
        while self._pending and self._pending[0].is_ready:
            record = self._read(self._pending.popleft())
            self._diagnostics.add(record)
            yield record

    def warnings(self) -> list[str]:
        """Return the faults in the latest records, each fault once. Local.

        Faults are trust ratios that are bounded in nearly all tensors, a clip that is always
        active, and updates that vanish in the rounding of parameters.
        """
        return self._diagnostics.new_findings()

    def close(self) -> list[StepRecord]:
        """Stop watching; wait for the remaining records and return them. Local."""
        for hook in self._hooks:
            hook.remove()
        for record in self._pending:
            if record.copied is not None:
                record.copied.synchronize()
        return list(self.take())

    def _before(self, *_: Any) -> None:
        self._optimizer._refuse_if_external("StepMonitor")  # DeepSpeed may have taken over since
        self._after()  # again: torch skips post hooks if an earlier one fails
        self._step += 1
        with self._optimizer.communicator.session.reports_errors("step()"):
            pass  # restarts the thread that an error has ended, which may fail on this rank
        if self._was_restarted:
            # After an error, ranks may disagree by one step. All of them restart the period here.
            self._was_restarted, self._due = False, self._step
        if self._step >= self._due:  # later than due if a gradient scaler skipped the step
            self._watched = self._step, self._lr(), self._optimizer.watch_step()

    def _restart(self) -> None:
        self._was_restarted = True

    def _lr(self) -> float | None:
        lr = self._optimizer.param_groups[0]["lr"]
        on_device = isinstance(lr, Tensor) and lr.device.type != "cpu"
        return None if on_device else float(lr)

    def _after(self, *_: Any) -> None:
        if self._watched is None or not self._watched[2].has_stepped:
            return
        step, lr, norms = self._watched
        self._watched = None
        self._due += self._every * (1 + (step - self._due) // self._every)
        rows = [norms.grad, norms.weight, norms.update, norms.vanished]
        if norms.ratio is not None:
            rows.append(norms.ratio)
        clip = torch.ones_like(rows[0]) if norms.clip is None else norms.clip.expand_as(rows[0])
        values, copied = copy_to_host(torch.stack([clip, *rows]))
        self._pending.append(_PendingRecord(step, lr, norms, values, copied))

    def _read(self, pending: _PendingRecord) -> StepRecord:
        clip, grad, weight, update, vanished, *ratio = pending.values.tolist()
        names = pending.norms.names
        # Only the parameters of that step: a group may have been added since.
        numels = [max(1, spec.numel) for spec in self._optimizer.layout.specs[: len(names)]]
        tensors = {
            name: TensorNorms(
                grad[i], weight[i], update[i], ratio[0][i] if ratio else None, vanished[i] / numel
            )
            for i, (name, numel) in enumerate(zip(names, numels, strict=True))
        }
        total = pending.values[1].double().norm().item()
        return StepRecord(pending.step, pending.lr, total, clip[0], tensors)
