"""What Python sources touch of torch_npu and of devices, and whether an inventory has it.

Inventories are those of ``torch_npu_api.py``. Sources are parsed, not run: what is found is what is
written there, whether or not a test reaches it.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch.optim.optimizer import required

_FUSED = re.compile(r"^_?npu_")
_VARIABLE = re.compile(r"\b(?:TORCH_)?HCCL_[A-Z][A-Z0-9_]+\b")


class Use(NamedTuple):
    """A name, and the call of it if it is called."""

    name: str
    call: ast.Call | None


@dataclass
class Uses:
    """What some sources touch."""

    device_module: list[Use] = field(default_factory=list)
    """Of what ``torch.get_device_module()`` returns, which is ``torch.npu`` on an NPU."""

    accelerator: list[Use] = field(default_factory=list)
    """Of ``torch.accelerator``."""

    torch_npu: list[str] = field(default_factory=list)
    """Dotted names that begin with ``torch_npu`` or ``torch.npu``, and imported modules."""

    fused: list[str] = field(default_factory=list)
    """Operators of torch_npu: ``npu_...`` of anything, ``torch.ops.npu``, and ``x.npu()``."""

    variables: list[str] = field(default_factory=list)
    """Environment variables of HCCL that strings name."""

    def read(self, source: str) -> None:
        """Add what a source touches."""
        tree = ast.parse(source)
        calls = {id(node.func): node for node in ast.walk(tree) if isinstance(node, ast.Call)}
        modules = _device_modules(tree)
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute):
                name = _dotted(node)
                self._read_attribute(node, name, Use(node.attr, calls.get(id(node))), modules)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                self.variables += _VARIABLE.findall(node.value)
                if _FUSED.match(node.value):
                    self.fused.append(node.value)
            elif isinstance(node, ast.Import | ast.ImportFrom):
                self.torch_npu += [name for name in _imported(node) if _is_torch_npu(name)]
            elif isinstance(node, ast.Call) and _dotted(node.func) == "importlib.import_module":
                loaded = str(getattr(node.args[0], "value", ""))
                self.torch_npu += [loaded] if _is_torch_npu(loaded) else []

    def _read_attribute(self, node: ast.Attribute, name: str, use: Use, modules: set[str]) -> None:
        owner = node.value
        is_module = isinstance(owner, ast.Call) and _dotted(owner.func) == "torch.get_device_module"
        if is_module or getattr(owner, "id", None) in modules:
            self.device_module.append(use)
        elif _dotted(owner) == "torch.accelerator":
            self.accelerator.append(use)
        elif _is_torch_npu(name):
            self.torch_npu.append(name)
        is_own = name.startswith(("shardfuse.", "torch_npu._C.")) or name == "torch_npu.npu"
        if (
            (_FUSED.match(use.name) and not is_own)
            or name == "torch.ops.npu"
            or (use.name == "npu" and not is_own)
        ):
            self.fused.append(name or use.name)


def _is_torch_npu(name: str) -> bool:
    return name.split(".")[0] == "torch_npu" or name.startswith("torch.npu")


def _dotted(node: ast.AST) -> str:
    """Return ``a.b.c`` of an expression of that form; nothing of another one."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        owner = _dotted(node.value)
        return f"{owner}.{node.attr}" if owner else ""
    return ""


def _imported(node: ast.Import | ast.ImportFrom) -> Iterator[str]:
    prefix = f"{node.module}." if isinstance(node, ast.ImportFrom) and node.module else ""
    yield from (prefix + alias.name for alias in node.names)


def _device_modules(tree: ast.AST) -> set[str]:
    """Return the variables that hold what ``torch.get_device_module()`` returns."""
    return {
        target.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        and isinstance(node.value, ast.Call)
        and _dotted(node.value.func) == "torch.get_device_module"
        for target in node.targets
        if isinstance(target, ast.Name)
    }


class _Names(dict[str, Any]):
    """A namespace in which what is not there is its own name."""

    def __missing__(self, name: str) -> str:
        return name


def parse(parameters: str) -> inspect.Signature:
    """Return the signature that an inventory tells; a default that is a name is a string of it."""
    namespace = _Names()
    exec(f"def told({parameters}): pass", {}, namespace)
    return inspect.signature(namespace["told"])


def takes(parameters: str, call: ast.Call) -> bool:
    """Return whether a call as it is written fits the signature that an inventory tells."""
    keywords = {word.arg: None for word in call.keywords if word.arg is not None}
    try:
        parse(parameters).bind(*call.args, **keywords)
    except TypeError:
        return False
    return True


def lacks(uses: list[Use], names: Mapping[str, str | None], module: str) -> list[str]:
    """Return a line for each use of a name that ``module`` has not, or does not call so."""
    lines = []
    for name, call in uses:
        if name not in names:
            lines.append(f"{module} has no {name}")
            continue
        parameters = names[name]
        if call is not None and parameters is not None and not takes(parameters, call):
            lines.append(f"{module}.{name}({parameters}) is called as {ast.unparse(call)}")
    return lines


def differences(name: str, theirs: Mapping[str, Any], ours: type, instance: object) -> list[str]:
    """Return a line for each thing that torch_npu's class has and ours has not, or has otherwise.

    Args:
        name: torch_npu's name of the class.
        theirs: what the inventory tells of it.
        ours: the class in its place.
        instance: one of ours.
    """
    lines = _in_signature(f"{name}.__init__", parse(theirs["init"]), inspect.signature(ours))
    for method, parameters in theirs["methods"].items():
        function = getattr(ours, method, None)
        if function is None:
            lines.append(f"{name} has no method {method}")
            continue
        own = inspect.signature(function)
        own = own.replace(parameters=list(own.parameters.values())[1:])
        lines += _in_signature(f"{name}.{method}", parse(parameters), own)
    missing = [a for a in theirs["attributes"] if not hasattr(instance, a)]
    return lines + [f"{name} has no attribute {attribute}" for attribute in missing]


def _in_signature(where: str, theirs: inspect.Signature, ours: inspect.Signature) -> list[str]:
    lines = []
    for parameter in theirs.parameters.values():
        own = ours.parameters.get(parameter.name)
        if own is None:
            lines.append(f"{where} has no parameter {parameter.name}")
            continue
        default = "required" if own.default is required else own.default
        if default != parameter.default:
            told = f"{default!r} here, {parameter.default!r} in torch_npu"
            lines.append(f"{where}: {parameter.name} is {told}")
    positional = [p.name for p in ours.parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    shared = [name for name in theirs.parameters if name in ours.parameters]
    if positional[: len(shared)] != shared:
        lines.append(f"{where} has its parameters in another order")
    return lines
