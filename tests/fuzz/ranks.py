"""The gradients of all ranks in one process, and their mean."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tests.fuzz.local import LocalModel
from tests.fuzz.program import Op, Program, Spec

GROWTH_INTERVAL = 3
INITIAL_SCALE = 8.0


class InvalidProgramError(Exception):
    """The program asks for what has no exact answer; the generator must not make such ones."""


class Scale:
    """A rank's torch.amp.GradScaler: its scale and when it grows."""

    def __init__(self) -> None:
        self.value, self._good = INITIAL_SCALE, 0

    def update(self, found: bool) -> None:
        """Halve after an overflow, double after GROWTH_INTERVAL steps without."""
        self._good = 0 if found else self._good + 1
        if found:
            self.value *= 0.5
        elif self._good == GROWTH_INTERVAL:
            self.value, self._good = self.value * 2.0, 0


class AllRanks:
    """A model for every rank; parameters have one order on all."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.ranks = [LocalModel(program, rank) for rank in range(program.world)]
        self.names: list[str] = []
        self.specs: list[Spec] = []
        self.cleared: list[dict[str, Tensor]] = [{} for _ in self.ranks]
        self.scales = [Scale() for _ in self.ranks]

    def apply_to_ranks(self, op: Op) -> None:
        """Do on every rank what ``op`` says to gradients."""
        for model, cleared in zip(self.ranks, self.cleared, strict=True):
            for name in model.apply(op):
                cleared.pop(name, None)

    def start_scaling(self) -> None:
        """Set the loss scale of every rank."""
        for model in self.ranks:
            model.scale = INITIAL_SCALE if self.program.scaler else 1.0

    def all_have_gradients(self) -> bool:
        """Whether every rank has a gradient of some parameter."""
        grads = [[p.grad for p in model.params.values()] for model in self.ranks]
        return all(any(grad is not None for grad in own) for own in grads)

    def zero_grad(self, to_none: bool, by_model: bool) -> None:
        """Clear gradients as the optimizer, or as the model, does."""
        absent = self._zero_is_absent and not by_model
        for model, cleared in zip(self.ranks, self.cleared, strict=True):
            cleared.clear()
            for name, param in model.params.items():
                if param.grad is None:
                    continue
                if to_none:
                    param.grad = None
                else:
                    param.grad.detach().fill_(-0.0 if absent else 0.0)
                    if absent:
                        cleared[name] = param.grad

    @property
    def _zero_is_absent(self) -> bool:
        reduced = self.program.sharding.get("grads_are_reduced", False)
        return self.program.optimizer.startswith("NpuFused") and not reduced

    def reduce(self) -> None:
        """Average gradients on every rank, as DistributedDataParallel would have."""
        for name in self.names:
            params = [model.params[name] for model in self.ranks]
            present = [param.grad for param in params if param.grad is not None]
            if not present:
                continue
            mean = sum(grad.double() for grad in present) / len(params)
            for param in params:
                if param.grad is None:
                    param.grad = torch.zeros_like(param)
                param.grad.detach().copy_(mean)

    def _is_present(self, rank: int, name: str) -> bool:
        grad = self.ranks[rank].params[name].grad
        if grad is None:
            return False
        if self.cleared[rank].get(name) is not grad:
            return True
        return not bool((grad.signbit() & (grad == 0)).all())

    def means(self, factors: Sequence[float]) -> list[Tensor | None]:
        """Return the mean gradient of every parameter, fp64; each rank's times its factor."""
        result: list[Tensor | None] = []
        for name, spec in zip(self.names, self.specs, strict=True):
            grads = [
                self.ranks[rank].params[name].grad.detach().double() * factor  # type: ignore[union-attr]
                for rank, factor in enumerate(factors)
                if self._is_present(rank, name)
            ]
            if not grads:
                result.append(None)
                continue
            total = torch.stack(grads).sum(0)
            self._check_wire(total, spec)
            result.append(total / len(factors))
        return result

    def _check_wire(self, total: Tensor, spec: Spec) -> None:
        """Raise if the sum over ranks of integers does not fit the dtype it is made in."""
        wire = spec.dtype
        if not self.program.sharding.get("grads_are_reduced"):  # else nothing is sent
            wire = self.program.sharding.get("grad_sync_dtype") or wire
        if self.program.kind != "integers" or not torch.isfinite(total).all():
            return
        if wire == "float16":
            total = total / self.program.world
        rounded = total.to(getattr(torch, wire)).double()
        if not torch.equal(rounded, total):
            raise InvalidProgramError(f"the sum of {spec.name} is not exact in {wire}")

    def overflows(self, rank: int) -> bool:
        """Whether a rank has a gradient that is not finite."""
        grads = [param.grad for param in self.ranks[rank].params.values()]
        return any(grad is not None and not torch.isfinite(grad).all() for grad in grads)

    def first_overflow(self) -> tuple[str, int] | None:
        """Return the first parameter whose gradient is not finite, and the first such rank."""
        for name in self.names:
            for rank, model in enumerate(self.ranks):
                grad = model.params[name].grad
                if grad is not None and not torch.isfinite(grad).all():
                    return name, rank
        return None
