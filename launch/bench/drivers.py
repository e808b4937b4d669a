"""How a step of any optimizer is prepared, run and read; peers.py and ours.py make these."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from launch.bench.references import MakeOptimizer
from launch.bench.synthetic import Model, fill_

LR = 1e-3
BUCKET_NUMEL = (25 << 20) // 4
"""Elements of one all-reduce of DDP's default size, 25 MiB."""


class Driver(Protocol):
    """A model and its optimizer on this rank."""

    def prepare(self, step: int) -> None:
        """Make what the step finds when its clock starts."""

    def step(self) -> None:
        """Reduce gradients over ranks, update, and leave every parameter complete."""

    def values(self) -> list[Tensor]:
        """Return the full parameters in the order of the shapes. Collective."""

    def state_nbytes(self) -> int:
        """Return the bytes of optimizer state on this rank, master copies included."""


@dataclass(frozen=True)
class Method:
    """One row of a table: how to build it, what it needs, and what its result must equal."""

    name: str
    family: str
    """The rule it is compared within: adam, lamb, ..."""

    build: Callable[[Model], Driver]
    reference: MakeOptimizer
    package: str | None = None
    """Distribution that must be installed."""

    has_backward: bool = False
    """Its step contains forward and backward, to be subtracted."""

    rehearse: Callable[[Model], Driver] | None = None
    """Builds it for a tiny model, to import and compile before memory is read; None is build."""


def tensors_nbytes(tree: Any) -> int:
    """Return the bytes of all tensors with a dimension in nested dicts and lists."""
    if isinstance(tree, Tensor):
        return tree.nbytes if tree.dim() else 0
    if isinstance(tree, dict):
        return sum(tensors_nbytes(value) for value in tree.values())
    if isinstance(tree, list | tuple):
        return sum(tensors_nbytes(value) for value in tree)
    return 0


class ByHand:
    """Separate gradient tensors, set before the clock starts in autograd's order, last first.

    Args:
        model: its parameters are trained.
        run: the timed step.
        state_nbytes: bytes of optimizer state.
    """

    def __init__(
        self, model: Model, run: Callable[[], object], state_nbytes: Callable[[], int]
    ) -> None:
        self._params: list[Tensor] = list(model.parameters())
        self._rank = model.source.rank
        self._run = run
        self.state_nbytes = state_nbytes

    def _in_order(self) -> list[tuple[int, Tensor]]:
        """Return (index, parameter) in the order in which gradients are made."""
        return list(enumerate(self._params))[::-1]

    def prepare(self, step: int) -> None:
        for param in self._params:
            param.grad = None
        for index, param in self._in_order():
            param.grad = fill_(torch.empty_like(param), index, step, self._rank)

    def step(self) -> None:
        self._run()

    def values(self) -> list[Tensor]:
        return [param.detach() for param in self._params]


class FirstByHand(ByHand):
    """As ByHand, but the first parameter's gradient is made first: against the flats' order."""

    def _in_order(self) -> list[tuple[int, Tensor]]:
        return super()._in_order()[::-1]


class WithBackward:
    """Gradients come from autograd, inside the clock: for what hooks into backward.

    Args:
        model: gives the gradients.
        module: the model or its wrapper, called for the forward pass.
        optimizer: stepped after backward.
        state_nbytes: bytes of optimizer state.
    """

    def __init__(
        self, model: Model, module: nn.Module, optimizer: Any, state_nbytes: Callable[[], int]
    ) -> None:
        self._model, self._module, self._optimizer = model, module, optimizer
        self._next = 0
        self.state_nbytes = state_nbytes

    def prepare(self, step: int) -> None:
        self._optimizer.zero_grad()
        self._next = step

    def step(self) -> None:
        self._model.run_backward(self._module, self._next)
        self._optimizer.step()

    def values(self) -> list[Tensor]:
        params = (param.detach() for param in self._model.parameters())
        return [p.full_tensor() if hasattr(p, "full_tensor") else p for p in params]


class AfterBackward(WithBackward):
    """As WithBackward, but forward and backward come before the clock starts."""

    def prepare(self, step: int) -> None:
        super().prepare(step)
        self._model.run_backward(self._module, step)

    def step(self) -> None:
        self._optimizer.step()


class BucketReducer:
    """Averages gradients as DDP does: packed into a persistent buffer, 25 MiB per all-reduce.

    After it, ``p.grad`` is a view of the buffer (DDP's gradient_as_bucket_view).
    """

    def __init__(self, params: Iterable[Tensor], flat: Tensor | None = None) -> None:
        self._params = list(params)
        numel = sum(param.numel() for param in self._params)
        self.flat = torch.empty(numel) if flat is None else flat
        self._views: list[Tensor] = []
        start = 0
        for param in self._params:
            self._views.append(self.flat[start : start + param.numel()].view_as(param))
            start += param.numel()

    def __call__(self) -> None:
        world_size = dist.get_world_size()
        works = []
        ready = launched = 0
        for param, view in zip(self._params, self._views, strict=True):
            assert param.grad is not None
            torch.div(param.grad, world_size, out=view)
            param.grad = view
            ready += view.numel()
            while ready - launched >= BUCKET_NUMEL:
                part = self.flat[launched : launched + BUCKET_NUMEL]
                works.append(dist.all_reduce(part, async_op=True))
                launched += BUCKET_NUMEL
        if launched < ready:
            works.append(dist.all_reduce(self.flat[launched:ready], async_op=True))
        for work in works:
            work.wait()
