"""Parameters that are still on their way from other ranks, and who reads them.

[Note: in flight] With overlap_param_sync, step() returns before the updated parameters of other
ranks have arrived. Until then such a parameter is of a class of its own, PendingParam, whose
``__torch_function__`` torch asks before it reads the parameter in any way that Python can: an
operator, an attribute such as ``.data``, indexing, saving, ``data_ptr()``. It waits for what the
parameter lacks, makes it a Parameter again, and lets torch go on. Three ways lead around that:

* What reads memory without asking (an extension's kernels, TorchScript, compiled modules) is called
  by a module. A hook on all modules' forward, there only while something is in flight, waits for
  the module's own parameters, or for all of them where Python does not see what runs.
* A tensor that shares memory with a parameter (an old ``p.data``, a state dict that was kept) tells
  nobody when it is read. Where there is one at the end of step(), step() waits for everything.
* torch.compile looks at classes, and would compile a function anew for each that it finds. Where
  one is compiled while something is in flight, or calls step(), every step() waits for everything
  from then on.
* torch.func wraps tensors below Python. A module that is called with other parameters than its own
  waits for everything, and vmap() asks a parameter for its dim(), which waits.
* A few functions of torch take a tensor without asking its class (_NEVER_ASK). torch has no hook
  for them, so they are replaced, only while something is in flight, by ones that wait.

shardfuse/optim/README.md lists the readers that nobody sees: kernels of extensions.

[Note: locks] Any thread may read a parameter in flight, also while another one is in step() or
backward. The thread that waits holds the lock of that optimizer's ParamSync until the parameter is
of its own class again. LOCK guards the classes and the registry of this process, and nobody waits
for a collective with it: the peer may be a thread of this process, as in tests. A thread takes LOCK
after the lock of a ParamSync, never before. A child that is forked has no connection to other
ranks: os.fork() waits for everything first, and holds all these locks, so that step() in another
thread puts nothing in flight meanwhile. If that wait fails, reading is an error in the child too.
"""

from __future__ import annotations

import atexit
import copy
import functools
import logging
import os
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any, cast

import torch
from torch import Tensor, nn

from shardfuse.engine.kernels import Kernels
from shardfuse.untraced import before_tracing, untraced

logger = logging.getLogger("shardfuse")

Arrive = Callable[[], None]

LOCK = threading.RLock()
"""Held while the class of a parameter, or what is under way, changes; see [Note: locks]."""

_ATTRIBUTES = """
    device dtype grad grad_fn is_cpu is_cuda is_leaf is_meta is_nested is_quantized is_sparse
    itemsize layout nbytes ndim output_nr requires_grad retains_grad shape _backward_hooks
    _post_accumulate_grad_hooks _version
"""
_METHODS = """
    element_size get_device is_contiguous is_floating_point ndimension nelement numel
    register_hook register_post_accumulate_grad_hook requires_grad_ size storage_offset stride
"""

_HARMLESS = {getattr(Tensor, name) for name in _METHODS.split()} | {
    function
    for name in _ATTRIBUTES.split()
    for kind in ("__get__", "__set__", "__delete__")
    if (function := getattr(getattr(Tensor, name), kind, None)) is not None
}
"""What tells nothing of a parameter's values."""


class PendingParam(nn.Parameter):
    """What a parameter is until it has arrived; see [Note: in flight]."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Have all such arguments arrive, unless ``func`` does not read them."""
        if func in _HARMLESS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        found = [*_find(args), *_find(kwargs)]
        for param in found:
            arrive(param)
        if not found:
            # It is in a container that only func can open, such as an iterator, which would be
            # empty for func; or another thread's wait has brought it meanwhile.
            REGISTRY.finish()
        return func(*args, **(kwargs or {}))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Arrive, and be copied."""
        arrive(self)
        return copy.deepcopy(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Arrive, and be pickled."""
        arrive(self)
        return self.__reduce_ex__(protocol)


def _find(value: Any) -> Iterator[Tensor]:
    """Yield what is under way in nested arguments; leave iterators as they are."""
    if type(value) is PendingParam:
        yield value
    elif isinstance(value, list | tuple | set | frozenset | deque):
        for item in value:
            yield from _find(item)
    elif isinstance(value, dict):
        for item in (*value, *value.values()):
            yield from _find(item)


def arrive(param: Tensor) -> None:
    """Wait for ``param`` if it is under way; it is a Parameter then.

    Several parameters of one bucket arrive together, and other threads wait as well. So this may
    be called for what has been a Parameter again since the caller looked.
    """
    with LOCK:
        if type(param) is not PendingParam:
            return
        wait = param.__dict__.get("_shardfuse_arrive")
        if wait is None:  # as made by type(param)(data), of values that were read
            mark_ready(param)
            return
    wait()


def mark_pending(param: Tensor, arrive: Arrive) -> bool:
    """Have ``arrive`` called when ``param`` is read; return False if it is of another class.

    The caller holds LOCK.
    """
    if type(param) is not nn.Parameter:
        return False
    param.__dict__["_shardfuse_arrive"] = arrive
    cast(Any, param).__class__ = PendingParam
    return True


def mark_ready(param: Tensor) -> None:
    """Make ``param`` a Parameter again. The caller holds LOCK."""
    if type(param) is PendingParam:
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


_NEVER_ASK = [
    ("torch", "to_dlpack"),
    ("torch.utils.dlpack", "to_dlpack"),
    ("torch._functorch.eager_transforms", "_wrap_for_grad"),  # grad(), vjp(), jvp() and the like
    ("torch._C.ScriptFunction", "__call__"),
    ("torch._C.ScriptMethod", "__call__"),
]


def _waiting(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``function``, which reads its arguments, as one that waits for them."""

    @functools.wraps(function)
    def wait_and_call(*args: Any, **kwargs: Any) -> Any:
        for param in [*_find(args), *_find(kwargs)]:
            arrive(param)
        return function(*args, **kwargs)

    return wait_and_call


class _Replaced:
    """Has those of torch's functions that never ask wait, from start() to stop()."""

    def __init__(self) -> None:
        self._originals: list[tuple[Any, str, Any]] = []
        self._made: dict[tuple[str, str], Any] = {}  # once: step() pays for nothing twice

    def start(self) -> None:
        for path, name in _NEVER_ASK:
            module, _, attribute = path.rpartition(".")
            owner: Any = sys.modules.get(path) or getattr(sys.modules.get(module), attribute, None)
            original = vars(owner).get(name) if owner is not None else None
            if original is not None:
                self._originals.append((owner, name, original))
                made = self._made.get((path, name))
                if made is None or made.__wrapped__ is not original:
                    made = self._made[path, name] = _waiting(original)
                setattr(owner, name, made)

    def stop(self) -> None:
        for owner, name, original in self._originals:
            setattr(owner, name, original)
        self._originals.clear()


class PendingRegistry:
    """All in this process that have something under way."""

    def __init__(self) -> None:
        self._waits: weakref.WeakSet[Any] = weakref.WeakSet()
        self._hook: Any = None
        self._replaced = _Replaced()
        self._held: list[Any] = []  # whose locks are held during a fork
        self.are_compiled = False
        """Whether a function was compiled that would else have read something under way."""

    def add(self, sync: Any) -> None:
        """Note that ``sync``, which has an arrive_all(), has something under way.

        The caller holds LOCK.
        """
        self._waits.add(sync)
        if self._hook is None:
            self._hook = nn.modules.module.register_module_forward_pre_hook(_before_forward)
            self._replaced.start()
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
        with LOCK:
            self._waits.discard(sync)
            if not self._waits and self._hook is not None:
                self._hook.remove()
                self._hook = None
                self._replaced.stop()

    def finish(self) -> None:
        """Wait for everything."""
        with LOCK:
            waiting = list(self._waits)
        for sync in waiting:
            sync.arrive_all()

    def before_fork(self) -> None:
        """Wait for everything, and hold all locks until after_fork()."""
        while True:
            LOCK.acquire()
            new = [sync for sync in self._waits if sync not in self._held]
            if not new:
                return
            LOCK.release()
            for sync in new:
                sync.lock.acquire()
                self._held.append(sync)
                with suppress(Exception):  # an error is for those who read, here and in the child
                    sync.arrive_all()

    def after_fork(self) -> None:
        """Go on, in the parent and in the child."""
        LOCK.release()
        while self._held:
            self._held.pop().lock.release()


REGISTRY = PendingRegistry()
atexit.register(REGISTRY.finish)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=REGISTRY.before_fork,
        after_in_parent=REGISTRY.after_fork,
        after_in_child=REGISTRY.after_fork,
    )


def _before_compiling(_: bool) -> None:
    """Wait for what a compiled function reads; of another class it would be compiled anew."""
    if not Kernels.are_compiling:  # which read nothing that is under way
        REGISTRY.compiling()


@untraced
def _before_forward(module: nn.Module, _: Any) -> None:
    """Wait for what ``module`` may read without torch's asking."""
    if _is_opaque(module):
        REGISTRY.finish()
        for param in module.parameters():
            arrive(param)  # of what was lost
        return
    for param in [param for param in module._parameters.values() if param is not None]:
        if type(param) is PendingParam:
            arrive(param)
        elif type(param) is not nn.Parameter:
            REGISTRY.finish()  # as torch.func.functional_call() puts in their place
            return


_FASTER_WITHOUT_OVERRIDES = (
    nn.MultiheadAttention,
    nn.TransformerEncoderLayer,
    nn.TransformerEncoder,
)
"""In evaluation these take another path, of other rounding, where a tensor has torch functions."""


def _is_opaque(module: nn.Module) -> bool:
    """Return whether Python does not see what ``module`` runs, or that asks for the class."""
    if isinstance(module, torch.jit.ScriptModule):
        return True
    if not module.training and isinstance(module, _FASTER_WITHOUT_OVERRIDES):
        return True
    return "_orig_mod" in module._modules or module._compiled_call_impl is not None
