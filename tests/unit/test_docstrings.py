"""Every public name says what it is, and every argument of it what it takes."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

import pytest
import torch

from shardfuse.optim.compat import TorchOptions

# Each with some of what must be looked at.
MODULES = {
    "shardfuse": {"ShardedLamb", "ShardedOptimizer.synchronize", "ShardConfig.of"},
    "shardfuse.training": {"Job.steps", "StepRecord", "init_process_group"},
    "shardfuse.checkpoint": {"save", "Checkpoints.path", "DamagedCheckpoint"},
    "shardfuse.deepspeed": {"register"},
    "shardfuse.optim.npu": {"NpuFusedLamb", "_NpuFused.clip_grad_norm_fused_"},
    "shardfuse.optim.paddle": {"ClipGradByNorm", "Lamb.set_lr"},
}
TORCH = torch.optim.Optimizer
OPTIONS = set(TorchOptions.__annotations__)


def public(module: str) -> dict[str, Any]:
    """Return what a module exports, or where it has no ``__all__`` what it defines."""
    found = vars(import_module(module))
    if "__all__" in found:
        return {name: found[name] for name in found["__all__"]}
    return {
        name: value
        for name, value in found.items()
        if not name.startswith("_") and getattr(value, "__module__", None) == module
    }


def documented(module: str) -> dict[str, Callable[..., Any]]:
    """Return the public classes, functions and methods of a module, by name."""
    found: dict[str, Callable[..., Any]] = {}
    for name, value in public(module).items():
        if not getattr(value, "_is_protocol", False):
            found[name] = value
        for base in inspect.getmro(value) if inspect.isclass(value) else ():
            if base.__module__.startswith("shardfuse"):
                found |= {f"{base.__name__}.{key}": method for key, method in own_methods(base)}
    return found


def own_methods(cls: type) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Yield the public methods that are not torch's, whose arguments torch explains."""
    for key, value in vars(cls).items():
        method = getattr(value, "__func__", value)
        if key.startswith("_") or not inspect.isfunction(method):
            continue
        if not (issubclass(cls, TORCH) and hasattr(TORCH, method.__name__)):
            yield key, method


def explained(text: str) -> set[str]:
    """Return the names in the section Args."""
    section = re.search(r"^Args:\n((?:    .*\n|\n)+)", inspect.cleandoc(text) + "\n", re.MULTILINE)
    names = r"^    (\w+(?:, \w+)*): \S"
    found = re.findall(names, section[1] if section else "", flags=re.MULTILINE)
    return {name for line in found for name in line.split(", ")}


def fields_with_text(cls: type) -> set[str]:
    """Return the fields of a dataclass that a docstring follows."""
    (node,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    assert isinstance(node, ast.ClassDef)
    pairs = zip(node.body, node.body[1:], strict=False)
    return {
        first.target.id
        for first, second in pairs
        if isinstance(first, ast.AnnAssign)
        and isinstance(first.target, ast.Name)
        and isinstance(second, ast.Expr)
        and isinstance(second.value, ast.Constant)
    }


def arguments(value: Callable[..., Any]) -> tuple[set[str], set[str]]:
    """Return the names that the docstring explains, and those of the signature."""
    text = value.__doc__ or ""
    is_error = inspect.isclass(value) and issubclass(value, Exception)
    takes_words = is_error and "__init__" not in vars(value)
    wanted = set() if takes_words else set(inspect.signature(value).parameters) - {"self", "cls"}
    given = explained(text)
    if inspect.isclass(value) and hasattr(value, "__dataclass_fields__"):
        given |= fields_with_text(value)
    if given & {"torch_options"}:
        given = given - {"torch_options"} | OPTIONS
        wanted = wanted - {"torch_options"} | OPTIONS
    return given, wanted


@pytest.mark.parametrize(("module", "names"), MODULES.items())
def test_every_argument_is_explained(module: str, names: set[str]) -> None:
    """Those of the signature, no others; of everything that the module shows."""
    found = documented(module)
    assert names <= found.keys()
    for name, value in found.items():
        assert (value.__doc__ or "").strip(), name
        given, wanted = arguments(value)
        assert given == wanted, name


def test_torch_s_keywords_are_explained() -> None:
    """Where every class's docstring points to."""
    text = documented("shardfuse")["ShardedOptimizer"].__doc__ or ""
    for option in OPTIONS:
        assert f"``{option}``" in text, option


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("What it does.", set()),
        ("What it does.\n\n    Args:\n        a, b: two.\n            c: of it.\n    ", {"a", "b"}),
        ("It.\n\n    Args:\n        a: one.\n\n    Raises:\n        Error: two.\n    ", {"a"}),
    ],
)
def test_names_are_read(text: str, names: set[str]) -> None:
    """The reader of the section finds what is there."""
    assert explained(text) == names
