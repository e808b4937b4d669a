"""StepMonitor: norms, trust ratios and clips of every so many steps, without waiting for them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardfuse.engine.step import StepNorms
from shardfuse.optim.base import ShardedOptimizer
from shardfuse.training.records import Judge, StepRecord, TensorNorms


@dataclass
class _Coming:
    """A step's numbers on their way to the host."""

    step: int
    lr: float | None
    norms: StepNorms
    values: Tensor  # (1 + 5 or 4, num_params): the clip, and the norms
    arrived: torch.Event | None  # None: they are there

    @property
    def is_here(self) -> bool:
        return self.arrived is None or self.arrived.query()


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

    Build it on all ranks with the same arguments. All ranks get the same records, when they have
    arrived: nothing waits for the device. ``warnings()`` explains what is wrong with them. After an
    error that a loop has caught, the next step is watched, and every ``every``-th one from there.

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
        optimizer._refuse_if_foreign("StepMonitor")
        self._optimizer = optimizer
        self._every = every
        self._step = first_step
        self._due = first_step + every - first_step % every  # the next step to watch
        self._epoch = optimizer.communicator.session.generation
        self._watched: tuple[int, float | None, StepNorms] | None = None
        self._coming: deque[_Coming] = deque()
        self._judge = Judge(getattr(optimizer._rule, "switches", None))
        before = optimizer.register_step_pre_hook(self._before)
        after = optimizer.register_step_post_hook(self._after)
        self._hooks = before, after

    def take(self) -> Iterator[StepRecord]:
        """Yield the records that have arrived since the last call, oldest first. Local."""
        while self._coming and self._coming[0].is_here:
            record = self._read(self._coming.popleft())
            self._judge.add(record)
            yield record

    def warnings(self) -> list[str]:
        """Return what is wrong in the latest records taken, each fault once. Local.

        Faults are trust ratios that are bounded in nearly all tensors, a clip that is always
        active, and updates that vanish in the rounding of parameters.
        """
        return self._judge.found()

    def close(self) -> list[StepRecord]:
        """Stop watching; wait for the remaining records and return them. Local."""
        for hook in self._hooks:
            hook.remove()
        for coming in self._coming:
            if coming.arrived is not None:
                coming.arrived.synchronize()
        return list(self.take())

    def _before(self, *_: Any) -> None:
        self._optimizer._refuse_if_foreign("StepMonitor")  # DeepSpeed may have taken over since
        self._after()  # where another hook has failed
        self._step += 1
        if self._epoch != self._optimizer.communicator.session.generation:
            # After an error, before which some ranks may have made, or counted, one step more.
            self._epoch, self._due = self._optimizer.communicator.session.generation, self._step
        if self._step >= self._due:  # again after one that was skipped
            self._watched = self._step, self._lr(), self._optimizer.watch_step()

    def _lr(self) -> float | None:
        lr = self._optimizer.param_groups[0]["lr"]
        on_device = isinstance(lr, Tensor) and lr.device.type != "cpu"
        return None if on_device else float(lr)

    def _after(self, *_: Any) -> None:
        if self._watched is None or not self._watched[2].is_taken:
            return
        step, lr, norms = self._watched
        self._watched = None
        self._due += self._every * (1 + (step - self._due) // self._every)
        rows = [norms.grad, norms.weight, norms.update, norms.vanished]
        if norms.ratio is not None:
            rows.append(norms.ratio)
        clip = torch.ones_like(rows[0]) if norms.clip is None else norms.clip.expand_as(rows[0])
        values, arrived = _to_host(torch.stack([clip, *rows]))
        self._coming.append(_Coming(step, lr, norms, values, arrived))

    def _read(self, coming: _Coming) -> StepRecord:
        clip, grad, weight, update, vanished, *ratio = coming.values.tolist()
        names = coming.norms.names
        # Of the parameters that there were; a group may have been added since.
        numels = [max(1, spec.numel) for spec in self._optimizer.layout.specs[: len(names)]]
        tensors = {
            name: TensorNorms(
                grad[i], weight[i], update[i], ratio[0][i] if ratio else None, vanished[i] / numel
            )
            for i, (name, numel) in enumerate(zip(names, numels, strict=True))
        }
        total = coming.values[1].double().norm().item()
        return StepRecord(coming.step, coming.lr, total, clip[0], tensors)


def _to_host(values: Tensor) -> tuple[Tensor, torch.Event | None]:
    """Begin a copy; return where it arrives, and what tells that it has, None if it is there."""
    if values.device.type == "cpu":
        return values.clone(), None
    host = values.to("cpu", non_blocking=True)  # into pinned memory
    arrived = torch.Event(values.device)
    arrived.record()
    return host, arrived
