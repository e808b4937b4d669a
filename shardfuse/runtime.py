"""torch's runtime: code that torch.compile leaves out, frames of callers, streams of a device.

[Note: untraced] A compiled function may call any method of an optimizer, and torch.compile would
trace it: collectives, locks, thousands of lines. A backward that a compiled function runs reaches
the hooks on parameters, and a compiled module the hooks on modules; both would be compiled by
themselves. torch's optimizers and FSDP leave such code out by torch.compiler.disable(), and so does
this. The compiled function ends before such a call and goes on after it.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import FrameType
from typing import Any

import torch
from torch import Tensor

# Of torch.compiler.disable() the form that imports torch._dynamo, seconds of work, at the first
# call and not here. torch.optim.Optimizer's own methods have it.
from torch._compile import _disable_dynamo as untraced

__all__ = [
    "Streams",
    "before_tracing",
    "caller",
    "compiling_kernels",
    "copy_to_host",
    "current_stream",
    "is_in_compiled",
    "new_stream",
    "on_stream",
    "paused_gc",
    "stacklevel_of_caller",
    "untraced",
]

_WRAPPERS = ("torch._compile", "torch._dynamo.eval_frame")

_callbacks: list[Callable[[bool], None]] = []
_kernels_being_compiled: list[None] = []  # one entry in every block of compiling_kernels()


@contextmanager
def paused_gc() -> Iterator[None]:
    """Run no cyclic garbage collection inside; also a decorator.

    For code that allocates several objects per tensor and frees few: each collection visits all
    objects of the process, so it took more than half of the time of 2,000 tensors.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


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


# Streams of a device


def current_stream(device: torch.device) -> Any:
    """Return the current stream of this thread; None on the CPU, which has none."""
    if device.type == "cpu":
        return None
    return torch.get_device_module(device).current_stream(device)


def copy_to_host(values: Tensor) -> tuple[Tensor, torch.Event | None]:
    """Start a copy to the host; return it, and an event of its end, or None if it is complete."""
    if values.device.type == "cpu":
        return values.clone(), None
    host = values.to("cpu", non_blocking=True)  # asynchronous, into pinned memory
    copied = torch.Event(values.device)
    copied.record()
    return host, copied


def new_stream(device: torch.device) -> Any:
    """Return a new stream of ``device``, which is not the CPU."""
    return torch.get_device_module(device).Stream(device)


def on_stream(stream: Any) -> AbstractContextManager[Any]:
    """Have this thread launch on ``stream``; None: on the one that it is on."""
    if stream is None:
        return nullcontext()
    context: AbstractContextManager[Any] = torch.get_device_module(stream.device).stream(stream)
    return context


class Streams:
    """The streams on which the current backward makes gradients, until something waits for them.

    Autograd runs a node, and the hook of a gradient, on the stream of the node's forward. It joins
    all streams when the backward ends. A bucket that is sent before has to wait for the streams of
    its gradients.
    """

    def __init__(self) -> None:
        self._device = torch.device("cpu")
        self._noted: list[Any] = []
        self._are_several = False  # whether there ever was more than one

    def note(self, device: torch.device) -> None:
        """Note that a gradient was made on the current stream."""
        self._device, stream = device, current_stream(device)
        if stream is not None and stream not in self._noted:
            self._noted.append(stream)
            self._are_several |= len(self._noted) > 1

    def join(self) -> None:
        """Have the current stream wait for the others, and stand for them."""
        if not self._noted:
            return
        current = current_stream(self._device)
        for stream in self._noted:
            if stream != current:
                current.wait_stream(stream)
        self._noted = [current]

    def end(self) -> None:
        """Join them, as at the end of a backward, also of one that has failed; forget them."""
        self.join()
        self._noted.clear()

    def hold(self, grad: Tensor) -> None:
        """Keep the memory of ``grad`` as it is until the current stream has read it.

        It belongs to the stream that it was made on, which would use it again at once.
        """
        if self._are_several:
            grad.record_stream(current_stream(grad.device))
