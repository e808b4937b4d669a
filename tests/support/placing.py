"""Put what tests make on the device that `pytest --device` says, and nothing of the library's.

    with placed(rank=0): ...        tensors that tests make in the block lie on that rank's device

A tensor is a test's where a test calls torch.zeros() and the like without a device, or builds a
module of torch.nn that does; it is made on the CPU and moved, so that random numbers are those of a
run on the CPU. The library's calls, and torch.optim's, are left alone: where they forget the
device, they get what they would get on an NPU, a tensor of the CPU.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors
from torch.utils._pytree import tree_leaves, tree_map_only

VARIABLE = "SHARDFUSE_TEST_DEVICE"
"""What `pytest --device` hands to the ranks."""

# What carries data of the device over the host, or is the device.
_OURS = ("tests.support.contract", "tests.support.npu.", "tests.support.placing")
_BUILT_BY_TESTS = ("tests", "launch", "__main__", "transformers")


def device_type() -> str:
    """Return the type of device that `pytest --device` chose."""
    return os.environ.get(VARIABLE, "cpu")


def on_device() -> bool:
    """Return whether that is another one than the CPU."""
    return device_type() != "cpu"


def here(value: Any) -> Any:
    """Return ``value`` with its tensors on the current device of the tests."""
    if not on_device():
        return value
    return tree_map_only(torch.Tensor, lambda tensor: tensor.to(device_type()), value)


def of_rank(rank: int, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return ``args`` with their tensors on the device of ``rank``.

    Before the rank begins: a copy from another rank's device waits for that one's stream, which may
    wait for a collective of both.
    """
    if not on_device():
        return args
    moved = []
    for value in args:
        has_tensors = any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(value))
        place = torch.device(device_type(), rank)
        moved.append(
            tree_map_only(torch.Tensor, lambda tensor: tensor.to(place), value)  # noqa: B023
            if has_tensors
            else value  # which ranks may share to write to
        )
    torch.accelerator.synchronize(rank)
    return tuple(moved)


def on_cpu(value: Any) -> Any:
    """Return ``value`` with its tensors on the CPU, as they pass between processes."""
    return tree_map_only(torch.Tensor, torch.Tensor.cpu, value) if on_device() else value


def on_host(function: Callable[..., Any]) -> Callable[..., Any]:
    """Have ``function`` make its tensors on the CPU: data that all ranks share."""

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with torch.device("cpu"):
            return function(*args, **kwargs)

    return call


@contextmanager
def placed(rank: int = 0) -> Iterator[None]:
    """Make this thread the one of ``rank``, whose device is the current one."""
    if not on_device():
        yield
        return
    from tests.support import npu

    npu.load()
    before = torch.npu.current_device()  # type: ignore[attr-defined]
    torch.npu.set_device(rank)  # type: ignore[attr-defined]
    try:
        with _Placing():
            yield
        # Process groups end after this, and with them what is under way.
        torch.npu.synchronize()  # type: ignore[attr-defined]
    finally:
        torch.npu.set_device(before)  # type: ignore[attr-defined]


class _Placing(TorchFunctionMode):  # type: ignore[misc]
    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if kwargs.get("generator") is not None and "tensor" in kwargs:  # torch.nn.init's
            args = (kwargs.pop("tensor"), *args)
        if kwargs.get("generator") is not None and args and _is_on_device(args[0]):
            return _fill_on_host(func, args, kwargs)
        if func not in _device_constructors() or kwargs.get("device") is not None:
            return func(*args, **kwargs)
        if (args and isinstance(args[0], torch.Tensor)) or not _is_a_tests(sys._getframe(1)):
            return func(*args, **kwargs)
        requires_grad = kwargs.pop("requires_grad", False)
        made = func(*args, **kwargs)
        if isinstance(kwargs.get("out"), torch.Tensor):
            return made
        return made.to(device_type()).requires_grad_(requires_grad)


def _is_on_device(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type == device_type()


def _fill_on_host(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> torch.Tensor:
    """Fill a tensor by a generator of the CPU, in place."""
    tensor: torch.Tensor = args[0]
    if kwargs["generator"].device.type != "cpu":
        filled: torch.Tensor = func(*args, **kwargs)
        return filled
    with torch.no_grad():
        return tensor.copy_(func(tensor.detach().cpu(), *args[1:], **kwargs))


def _is_a_tests(frame: Any) -> bool:
    """Return whether a test, or a module of torch.nn that it builds, makes the call."""
    while frame is not None:
        name = str(frame.f_globals.get("__name__"))
        if not name.startswith(("torch.nn.", "torch._jit_internal", "torch.overrides")):
            break
        frame = frame.f_back
    else:
        return False
    if name.startswith(_OURS):
        return False
    return name.partition(".")[0] in _BUILT_BY_TESTS or name.startswith("test_")
