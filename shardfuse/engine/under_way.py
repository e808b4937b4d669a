"""Parameters that are still on their way from other ranks, and who reads them.

[Note: under way] With overlap_param_sync, step() returns before the updated parameters of other
ranks have arrived. Until then such a parameter is of a class of its own, ParamUnderWay, whose
``__torch_function__`` torch asks before it reads the parameter in any way that Python can: an
operator, an attribute such as ``.data``, indexing, saving, ``data_ptr()``. It waits for what the
parameter lacks, makes it a Parameter again, and lets torch go on. Three ways lead around that:

* What reads memory without asking (an extension's kernels, TorchScript, compiled modules) is called
  by a module. A hook on all modules' forward, there only while something is under way, waits for
  the module's own parameters, or for all of them where Python does not see what runs.
* A tensor that shares memory with a parameter (an old ``p.data``, a state dict that was kept) tells
  nobody when it is read. Where there is one at the end of step(), step() waits for everything.
* torch.compile looks at classes, and would compile a function anew for each that it finds. Where
  one is compiled while something is under way, or calls step(), every step() waits for everything
  from then on.
* torch.func wraps tensors below Python. A module that is called with other parameters than its own
  waits for everything; a function of parameters without a module needs synchronize() before it.
"""

from __future__ import annotations

import atexit
import copy
import logging
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from shardfuse.engine.kernels import Kernels
from shardfuse.untraced import before_tracing, untraced

logger = logging.getLogger("shardfuse")

Arrive = Callable[[], None]

_ATTRIBUTES = """
    device dtype grad grad_fn is_cpu is_cuda is_leaf is_meta is_nested is_quantized is_sparse
    itemsize layout nbytes ndim output_nr requires_grad retains_grad shape _backward_hooks
    _post_accumulate_grad_hooks _version
"""
_METHODS = """
    dim element_size get_device is_contiguous is_floating_point ndimension nelement numel
    register_hook register_post_accumulate_grad_hook requires_grad_ size storage_offset stride
"""

_HARMLESS = {getattr(Tensor, name) for name in _METHODS.split()} | {
    function
    for name in _ATTRIBUTES.split()
    for kind in ("__get__", "__set__", "__delete__")
    if (function := getattr(getattr(Tensor, name), kind, None)) is not None
}
"""What tells nothing of a parameter's values."""


class ParamUnderWay(nn.Parameter):
    """What a parameter is until it has arrived; see [Note: under way]."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Have all such arguments arrive, unless ``func`` does not read them."""
        if func in _HARMLESS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        for param in list(_find(args)) + list(_find(kwargs)):
            param.arrive()
        return func(*args, **(kwargs or {}))

    def arrive(self) -> None:
        """Wait; it is a Parameter then."""
        self.__dict__["_shardfuse_arrive"]()

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Arrive, and be copied."""
        self.arrive()
        return copy.deepcopy(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Arrive, and be pickled."""
        self.arrive()
        return self.__reduce_ex__(protocol)


def _find(value: Any) -> Iterator[ParamUnderWay]:
    """Yield what is under way in nested arguments."""
    if type(value) is ParamUnderWay:
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _find(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _find(item)


def set_out(param: Tensor, arrive: Arrive) -> bool:
    """Have ``arrive`` called when ``param`` is read; return False if it is of another class."""
    if type(param) is not nn.Parameter:
        return False
    param.__dict__["_shardfuse_arrive"] = arrive
    cast(Any, param).__class__ = ParamUnderWay
    return True


def has_arrived(param: Tensor) -> None:
    """Make ``param`` a Parameter again."""
    if type(param) is ParamUnderWay:
        param.__dict__.pop("_shardfuse_arrive", None)
        cast(Any, param).__class__ = nn.Parameter


def is_shared(param: Tensor) -> bool:
    """Return whether another tensor has the memory of ``param``, which has a storage to itself."""
    count = getattr(torch._C, "_storage_Use_Count", None)
    if param.numel() == 0:
        return False
    return count is None or int(count(param.untyped_storage()._cdata)) > _NOT_SHARED


def _count_of_fresh() -> int:
    count = getattr(torch._C, "_storage_Use_Count", None)
    fresh = nn.Parameter(torch.empty(1))
    fresh.data = torch.empty(1)
    return 0 if count is None else int(count(fresh.untyped_storage()._cdata))


_NOT_SHARED = _count_of_fresh()


class Travellers:
    """All in this process that have something under way."""

    def __init__(self) -> None:
        self._waits: weakref.WeakSet[Any] = weakref.WeakSet()
        self._hook: Any = None
        self.are_compiled = False
        """Whether a function was compiled that would else have read something under way."""

    def add(self, sync: Any) -> None:
        """Note that ``sync``, which has a finish(), has something under way."""
        self._waits.add(sync)
        if self._hook is None:
            self._hook = nn.modules.module.register_module_forward_pre_hook(_before_forward)
        before_tracing(_before_compiling)

    def compiling(self) -> None:
        """Wait for everything, and have nothing be under way from now on."""
        if self._waits and not self.are_compiled:
            self.are_compiled = True
            logger.warning(
                "torch.compile has compiled a function while parameters were under way, or one "
                "that calls step(). From now on step() waits for them (overlap_param_sync), "
                "because compiled functions may read them. To overlap, compile modules, not "
                "functions."
            )
        self.finish()

    def discard(self, sync: Any) -> None:
        """Note that it has nothing more."""
        self._waits.discard(sync)
        if not self._waits and self._hook is not None:
            self._hook.remove()
            self._hook = None

    def finish(self) -> None:
        """Wait for everything."""
        for sync in list(self._waits):
            sync.finish()


TRAVELLERS = Travellers()
atexit.register(TRAVELLERS.finish)


def _before_compiling(_: bool) -> None:
    """Wait for what a compiled function reads; of another class it would be compiled anew."""
    if not Kernels.are_compiling:  # which read nothing that is under way
        TRAVELLERS.compiling()


@untraced
def _before_forward(module: nn.Module, _: Any) -> None:
    """Wait for what ``module`` may read without torch's asking."""
    if _is_opaque(module):
        TRAVELLERS.finish()
        for param in module.parameters():
            if type(param) is ParamUnderWay:
                param.arrive()  # of what was lost
        return
    for param in [param for param in module._parameters.values() if param is not None]:
        if type(param) is ParamUnderWay:
            param.arrive()
        elif type(param) is not nn.Parameter:
            TRAVELLERS.finish()  # as torch.func.functional_call() puts in their place
            return


def _is_opaque(module: nn.Module) -> bool:
    """Return whether what ``module`` runs is not seen by Python."""
    if isinstance(module, torch.jit.ScriptModule):
        return True
    return "_orig_mod" in module._modules or module._compiled_call_impl is not None
