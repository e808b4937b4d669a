"""Code that torch.compile neither traces nor compiles, and what it tells before it traces.

[Note: untraced] A compiled function may call any method of an optimizer, and torch.compile would
trace it: collectives, locks, thousands of lines. A backward that a compiled function runs reaches
the hooks on parameters, and a compiled module the hooks on modules; both would be compiled by
themselves. torch's optimizers and FSDP leave such code out by torch.compiler.disable(), and so does
this. The compiled function ends before such a call and goes on after it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

# Of torch.compiler.disable() the form that imports torch._dynamo, seconds of work, at the first
# call and not here. torch.optim.Optimizer's own methods have it.
from torch._compile import _disable_dynamo as untraced

__all__ = [
    "before_tracing",
    "caller",
    "compiling_kernels",
    "is_in_compiled",
    "stacklevel_of_caller",
    "untraced",
]

_WRAPPERS = ("torch._compile", "torch._dynamo.eval_frame")

_callbacks: list[Callable[[bool], None]] = []
_kernels_being_compiled: list[None] = []  # one entry in every block of compiling_kernels()


@contextmanager
def compiling_kernels() -> Iterator[None]:
    """Do not call the callbacks of before_tracing(): the functions compiled inside are our own."""
    _kernels_being_compiled.append(None)
    try:
        yield
    finally:
        _kernels_being_compiled.pop()


def before_tracing(callback: Callable[[bool], None]) -> None:
    """Have ``callback`` called before torch.compile traces a function, in this process.

    Its argument is whether the function was traced before.
    """
    if callback not in _callbacks:
        _callbacks.append(callback)
    compiler = sys.modules.get("torch._dynamo.callback")  # nothing is compiled without it
    if compiler is not None:
        handler = compiler.callback_handler
        if _before_compiling not in handler.start_callbacks:  # as after a reset of torch's
            handler.register_start_callback(_before_compiling)


def _before_compiling(*args: Any) -> None:
    if _kernels_being_compiled:
        return
    of = args[0] if args else None
    trigger = getattr(of, "callback_trigger", None)
    if trigger is not None and trigger.name != "DYNAMO":
        return  # a backward, say, is traced with its forward and compiled when it is run
    is_again = not str(getattr(of, "compile_id", None)).endswith("/0")
    for callback in _callbacks:
        callback(is_again)


def is_in_compiled() -> bool:
    """Return whether a compiled function calls the method of ours that asks; not: is the method."""
    frame: FrameType | None = sys._getframe(1)
    is_called = False
    while frame is not None:
        name = str(frame.f_globals.get("__name__"))
        if name == "torch._dynamo.eval_frame" and frame.f_code.co_name == "compile_wrapper":
            return is_called
        is_called |= not name.startswith(("shardfuse.", "torch."))
        frame = frame.f_back
    return False


def caller(depth: int) -> FrameType:
    """Return the frame ``depth`` above that of the function that asks, without untraced()'s own."""
    frame: FrameType | None = sys._getframe(1)
    assert frame is not None
    while depth > 0 and frame.f_back is not None:
        frame = frame.f_back
        depth -= frame.f_globals.get("__name__") not in _WRAPPERS
    return frame


def stacklevel_of_caller() -> int:
    """Return the stacklevel, for a warning, of the first frame outside of shardfuse and torch.

    torch wraps methods of shardfuse. The level counts from the function that calls this.
    """
    frame: FrameType
    frame, level = sys._getframe(1), 1
    ours = ("shardfuse.", "torch.")
    while frame.f_back and str(frame.f_globals.get("__name__")).startswith(ours):
        frame, level = frame.f_back, level + 1
    return level
