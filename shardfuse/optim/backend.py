"""Optimizers whose parameters are laid out, and sharded, by somebody else."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import Any, NoReturn, Protocol

from torch import Tensor


class ExternalBackend(Protocol):
    """What an optimizer works on in place of flat buffers of its own."""

    state: Any
    """What ``optimizer.state`` is."""

    ratio: Tensor | None
    """Trust ratios (num_params,) of the last step."""

    def step(self) -> None:
        """Update what is in the optimizer's groups."""

    def collect(self) -> dict[str, Any]:
        """Return what state_dict() does."""

    def prepared(self, state_dict: Mapping[str, Any]) -> Callable[[], None]:
        """Check what load_state_dict() got; return what loads it."""

    def refuse(self, what: str) -> NoReturn:
        """Raise RuntimeError: ``what`` is not there."""


_is_elsewhere: ContextVar[bool] = ContextVar("shardfuse_laid_out_elsewhere", default=False)


@contextmanager
def external_layout() -> Iterator[None]:
    """Build optimizers that read their parameters and leave them where they are.

    Each is to be given to attach_backend() before anything else is done with it.
    """
    token = _is_elsewhere.set(True)
    try:
        yield
    finally:
        _is_elsewhere.reset(token)


def is_external_layout() -> bool:
    """Return whether external_layout() is in force."""
    return _is_elsewhere.get()


def attach_backend(optimizer: Any, backend: ExternalBackend) -> None:
    """Have a ShardedOptimizer work on ``backend``; its buffers, if it has any, are given up.

    It stays the same object, so that learning-rate schedulers made for it go on to work. The
    parameters keep their memory until their new owner moves them.
    """
    own = ("_view", "_shards", "_driver", "_kernels", "_buffers", "_grads", "_gather", "_overflows")
    for name in own:
        optimizer.__dict__.pop(name, None)
    optimizer._flats, optimizer._active = [], []
    optimizer.layout = replace(optimizer.layout, flats=())
    for group in optimizer.param_groups:
        group.pop("param_names", None)  # names of what is about to be replaced
    optimizer._external = backend
