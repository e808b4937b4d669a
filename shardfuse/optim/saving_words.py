"""What is said of state_dict() on one rank alone, and whether there is any need to say it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from types import CodeType, FrameType, FunctionType
from typing import Any

_ARRANGING = {
    "consolidate_on_save",
    "consolidate_state_dict",
    "get_optimizer_state_dict",
    "get_state_dict",
    "sharded_state_dict",
    "trainer_callback",
}
"""Who calls one of these saves states of all ranks, later."""

_CONSOLIDATING = ("lightning.", "lightning_fabric.", "pytorch_lightning.")
"""Callers that call consolidate_state_dict() by themselves."""

_INSTALLED = ("site-packages", "dist-packages", os.path.dirname(os.__file__))
"""In the paths of what is not the program's own."""


def remedy() -> str:
    """Return what to do first where state_dict() is called on one rank: as its callers are."""
    callers = _names_of_callers()
    if any(name.startswith("transformers.trainer") for name in callers):
        return "Pass callbacks=[shardfuse.integrations.trainer_callback()] to Trainer"
    if any(name.startswith("accelerate.") for name in callers):
        return "Call shardfuse.integrations.consolidate_on_save(accelerator) after prepare()"
    return "Call consolidate_state_dict() on all ranks before it"


def is_arranged() -> bool:
    """Return whether the program that calls will save states in a way that works.

    It does if its own code names a method for that, or shardfuse.checkpoint, or if Lightning calls.
    Code is read and not run: frames that call, and what is defined beside them and beside the main
    program. It takes milliseconds.
    """
    if "shardfuse.checkpoint" in sys.modules:
        return True
    if any(name.startswith(_CONSOLIDATING) for name in _names_of_callers()):
        return True
    return any(_ARRANGING.intersection(code.co_names) for code in _own_code())


def _callers() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def _names_of_callers() -> list[str]:
    return [str(frame.f_globals.get("__name__")) for frame in _callers()]


def _own_code() -> Iterator[CodeType]:
    """Yield the code of the program that calls: not torch's, ours, or what is installed."""
    main = sys.modules["__main__"]
    folder = os.path.dirname(os.path.abspath(getattr(main, "__file__", None) or "x"))
    spaces: dict[int, Mapping[str, Any]] = {}
    for frame in _callers():
        if _is_own(frame.f_globals):
            spaces[id(frame.f_globals)] = frame.f_globals
            yield from _nested(frame.f_code)
    for module in list(sys.modules.values()):
        space = getattr(module, "__dict__", None)
        path = space.get("__file__") if type(space) is dict else None
        if type(path) is str and path.startswith(folder + os.sep) and _is_own(space or {}):
            spaces[id(space)] = space or {}
    for space in spaces.values():
        for value in list(space.values()):
            members = [value, *vars(value).values()] if type(value) is type else [value]
            for member in members:
                if type(member) is FunctionType and member.__module__ == space.get("__name__"):
                    yield from _nested(member.__code__)


def _is_own(space: Mapping[str, Any]) -> bool:
    """Return whether a module is of the program, by the globals of it."""
    path = str(space.get("__file__", ""))
    is_ours = str(space.get("__name__")).partition(".")[0] in ("shardfuse", "torch")
    return not is_ours and not any(part in path for part in _INSTALLED)


def _nested(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _nested(constant)
