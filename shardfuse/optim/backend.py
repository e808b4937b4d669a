"""Optimizers over parameters with an external layout: DeepSpeed or torch shards them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, cast

from torch import Tensor

from shardfuse.grads.source import ExternalGrads
from shardfuse.runtime import untraced

_P = ParamSpec("_P")
_R = TypeVar("_R")
_Method = Callable[Concatenate[Any, _P], _R]


class ExternalLayout(Protocol):
    """Parameters and states of an optimizer whose parameters are in no flat buffers of its own."""

    state: Any
    """The value of ``optimizer.state``."""

    def collect(self) -> dict[str, Any]:
        """Return the result of state_dict()."""

    def prepared(self, state_dict: Mapping[str, Any]) -> Callable[[], None]:
        """Check the argument of load_state_dict(); return the function that loads it."""

    def check_available(self, what: str) -> None:
        """Raise RuntimeError, with the remedy, if the method ``what`` is not available."""


class ExternalBackend(ExternalLayout, Protocol):
    """An ExternalLayout whose owner makes the steps, too."""

    ratio: Tensor | None
    """Trust ratios (num_params,) of the last step."""

    def step(self) -> None:
        """Update the tensors in the optimizer's groups."""


def own_layout(
    what: str | None = None, *, in_join: bool = True
) -> Callable[[_Method[_P, _R]], _Method[_P, _R]]:
    """Decorate a public method that needs this optimizer's own flat buffers; it is not traced.

    Args:
        what: the method in errors; its name and "()" by default.
        in_join: whether it may be called inside torch's Join.

    Raises:
        RuntimeError: (the method) it is not available under an external layout, or Join is entered.
    """

    def decorate(method: _Method[_P, _R]) -> _Method[_P, _R]:
        name = f"{method.__name__}()" if what is None else what

        @functools.wraps(method)
        def checked(optimizer: Any, *args: _P.args, **kwargs: _P.kwargs) -> _R:
            optimizer._refuse_if_external(name)
            if not in_join:
                optimizer._refuse_in_join(name)
            return method(optimizer, *args, **kwargs)

        return cast(_Method[_P, _R], untraced(checked))

    return decorate


_is_elsewhere: ContextVar[bool] = ContextVar("shardfuse_laid_out_elsewhere", default=False)


@contextmanager
def external_layout() -> Iterator[None]:
    """Have optimizers that are built inside read their parameters, and not move them.

    The caller passes each of them to attach_backend() before its first use.
    """
    token = _is_elsewhere.set(True)
    try:
        yield
    finally:
        _is_elsewhere.reset(token)


def is_external_layout() -> bool:
    """Return whether the caller runs inside external_layout()."""
    return _is_elsewhere.get()


def attach_backend(optimizer: Any, backend: ExternalBackend) -> None:
    """Make a ShardedOptimizer delegate to ``backend``, and free its own buffers.

    It stays the same object, because learning-rate schedulers may refer to it. The parameters keep
    their memory until the external layout moves them.
    """
    own = ("_view", "_shards", "_driver", "_kernels", "_buffers", "_gather", "_overflows")
    for name in own:
        optimizer.__dict__.pop(name, None)
    optimizer._flats, optimizer._active = [], []
    optimizer._grads = ExternalGrads()  # of no flat
    optimizer.layout = replace(optimizer.layout, flats=())
    for group in optimizer.param_groups:
        group.pop("param_names", None)  # names of parameters that a flat partition will replace
    optimizer._external = optimizer._stepped_by = backend
