"""What ``p.grad`` says once a gradient has left (stage 2): None, and why.

A parameter is of class TakenParam from then on until its gradient is used, or cleared, or until a
module runs forward again, so that nothing that looks at classes there (torch.compile) sees it. A
compiled function looks before any module in it runs: where one is compiled again while gradients
have left, no parameter is of that class from then on.
"""

from __future__ import annotations

import logging
import sys
import warnings
import weakref
from typing import Any, cast

from torch import Tensor, nn

from shardfuse.engine.kernels import Kernels
from shardfuse.untraced import before_tracing, untraced

logger = logging.getLogger("shardfuse")

_GRAD: Any = Tensor.grad

_SILENT = ("shardfuse.", "torch.amp.grad_scaler")
"""Who may look: they know what None means here."""

_REFUSED = ("torch.nn.utils.clip_grad", "torch.nn.modules.module")
"""Who would clip or clear nothing, and say nothing."""


class TakenParam(nn.Parameter):
    """A parameter whose gradient has left for the ranks' shards."""

    @property
    def grad(self) -> Tensor | None:
        """None, or what autograd has made since.

        Raises:
            RuntimeError: for torch's clip_grad_norm_() and zero_grad() of a module.
        """
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if caller in _REFUSED:
            raise RuntimeError(_message(self))
        if not caller.startswith(_SILENT):
            warnings.warn(_message(self), UserWarning, stacklevel=2)
        found: Tensor | None = _GRAD.__get__(self)
        return found

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if not caller.startswith(_SILENT):
            raise RuntimeError(f"p.grad cannot be set now. {_message(self)}")
        _GRAD.__set__(self, value)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        """Return a copy like any other, of which nothing has left."""
        if id(self) not in memo:
            memo[id(self)] = nn.Parameter(self.detach().clone(), self.requires_grad)
        copied: nn.Parameter = memo[id(self)]
        return copied


def _message(param: Tensor) -> str:
    return (
        f"The gradient of {param.__dict__.get('_shardfuse_name')} was sent to the ranks' shards "
        "(stage=2), so p.grad is None. Use optimizer.clip_grad_norm() or grad_norm(), "
        "optimizer.zero_grad() to clear it, or no_sync() around a backward whose gradients shall "
        "stay in p.grad. To see or edit each gradient before it is sent, use p.register_hook(), "
        "whose function gets it and may return another; or p.register_post_accumulate_grad_hook() "
        "before the optimizer is built. Or use stage=1, which keeps all gradients."
    )


class Taken:
    """The parameters of one optimizer whose gradients have left."""

    def __init__(self) -> None:
        self._params: list[Tensor] = []

    def add(self, param: Tensor, name: str) -> None:
        """Free the gradient of ``param``."""
        param.grad = None
        if type(param) is nn.Parameter and not _is_silent:  # others' classes cannot say why
            param.__dict__["_shardfuse_name"] = name
            cast(Any, param).__class__ = TakenParam
            self._params.append(param)
            _see_forward(self)

    @property
    def are_there(self) -> bool:
        """Whether there are any."""
        return any(type(param) is TakenParam for param in self._params)

    def restore(self) -> None:
        """Make them parameters like any other again."""
        for param in self._params:
            if type(param) is TakenParam:
                cast(Any, param).__class__ = nn.Parameter
                param.__dict__.pop("_shardfuse_name", None)
        self._params.clear()


_holders: weakref.WeakSet[Taken] = weakref.WeakSet()
_hooks: list[Any] = []
_is_silent = False  # whether a function was compiled that would else see them


def _see_forward(taken: Taken) -> None:
    """Have ``taken`` restored before any module runs forward."""
    _holders.add(taken)
    before_tracing(_before_compiling)
    if not _hooks:
        _hooks.append(nn.modules.module.register_module_forward_pre_hook(_before_forward))


def _before_compiling(is_again: bool) -> None:
    """Have none be seen: of another class, a function would be compiled anew."""
    global _is_silent
    if Kernels.are_compiling or not any(taken.are_there for taken in _holders):
        return
    if is_again and not _is_silent:
        _is_silent = True
        logger.warning(
            "torch.compile has compiled a function again after a backward whose gradients were "
            "sent (stage=2). From now on p.grad is None without a word about it, because compiled "
            "functions look at classes of parameters. Clip by optimizer.clip_grad_norm()."
        )
    _restore_all()


@untraced
def _before_forward(module: nn.Module, _: Any) -> None:
    _restore_all()


def _restore_all() -> None:
    for taken in list(_holders):
        taken.restore()
    _holders.clear()
    while _hooks:
        _hooks.pop().remove()
