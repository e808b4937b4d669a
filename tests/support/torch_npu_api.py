"""What wheels of torch_npu and torch have under the names that shardfuse leans on.

    python -m tests.support.torch_npu_api WHEEL...

writes ``tests/unit/torch_npu_api/<package>-<version>.json`` for each wheel. A wheel is read, parsed
and never imported, so that neither CANN nor a device is needed. Names, parameters and defaults are
taken, no other text of the sources. A signature is what stands between the brackets of a
``def``, without annotations and ``self``.
"""

from __future__ import annotations

import ast
import copy
import hashlib
import json
import re
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent.parent / "unit" / "torch_npu_api"

VERSIONS = ("2.7.1", "2.12.0", "2.13.0", "2.14.0")
"""Those whose wheels' inventories are there."""

NAMES = (
    "torch_npu.get_npu_format",
    "torch_npu._C._npu_getOption",
    "torch_npu.profiler",
)
"""What shardfuse asks of the package; an inventory has those that the wheel's own code reads."""

_VARIABLE = re.compile(rb"(?<![A-Z_])(?:TORCH_)?HCCL_[A-Z][A-Z0-9_]+")

Definition = ast.FunctionDef | ast.ClassDef


class Wheel:
    """The Python modules of a wheel, parsed when they are asked for."""

    def __init__(self, path: Path) -> None:
        self.name = path.name
        self.digest = hashlib.sha256(path.read_bytes()).hexdigest()
        self._files = zipfile.ZipFile(path)
        self._names = set(self._files.namelist())
        self._trees: dict[str, ast.Module] = {}

    def read(self, name: str) -> bytes:
        """Return a file of the wheel; nothing where it has none of that name."""
        return self._files.read(name) if name in self._names else b""

    def module_file(self, module: str) -> str | None:
        """Return where ``package.module`` lies, or None where the wheel has none."""
        base = module.replace(".", "/")
        return next((f for f in (f"{base}.py", f"{base}/__init__.py") if f in self._names), None)

    def tree(self, file: str) -> ast.Module:
        """Return the syntax of a file."""
        if file not in self._trees:
            self._trees[file] = ast.parse(self.read(file))
        return self._trees[file]

    def sources(self, containing: bytes) -> Iterator[ast.Module]:
        """Yield the syntax of every Python file that has these bytes."""
        for file in sorted(self._names):
            if file.endswith(".py") and containing in self.read(file):
                yield self.tree(file)

    def find(
        self, module: str, name: str, seen: tuple[str, ...] = ()
    ) -> tuple[str, Definition] | None:
        """Return (module, definition) of what ``name`` is in ``module``, through its imports."""
        file = self.module_file(module)
        if file is None or module in seen:  # modules may import each other
            return None
        origins = []
        for node in self.tree(file).body:
            if isinstance(node, Definition) and node.name == name:
                return module, node
            if isinstance(node, ast.ImportFrom) and node.level:
                package = module.split(".")
                if file.endswith("__init__.py"):
                    package.append("")
                origin = ".".join([*package[: -node.level], *filter(None, [node.module])])
                for alias in node.names:
                    if alias.name == "*" or name == (alias.asname or alias.name):
                        origins.append((origin, name if alias.name == "*" else alias.name))
        found = (self.find(origin, known, (*seen, module)) for origin, known in reversed(origins))
        return next(filter(None, found), None)

    def constants(self, module: str) -> dict[str, ast.expr]:
        """Return {name: value} of what a module sets to a literal."""
        file = self.module_file(module)
        assert file is not None
        return {
            target.id: node.value
            for node in self.tree(file).body
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
            for target in node.targets
            if isinstance(target, ast.Name)
        }

    def exported(self, module: str) -> list[str]:
        """Return the names in a module's ``__all__``."""
        file = self.module_file(module)
        assert file is not None, f"{self.name} has no {module}"
        for node in self.tree(file).body:
            if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
                return sorted(ast.literal_eval(node.value))
        raise AssertionError(f"{module} has no __all__")


def signature(
    node: ast.AST, constants: dict[str, ast.expr] | None = None, *, is_method: bool = False
) -> str | None:
    """Return the parameters of a function or of a class's constructor; None where it has none.

    Args:
        node: the definition.
        constants: what names stand for in defaults.
        is_method: the first parameter is left out.
    """
    if isinstance(node, ast.ClassDef):
        makers = [n for n in _functions(node) if n.name in ("__init__", "__new__")]
        return signature(makers[0], constants, is_method=True) if makers else None
    assert isinstance(node, ast.FunctionDef)
    arguments = copy.deepcopy(node.args)
    known = constants or {}
    arguments.defaults = [known.get(getattr(d, "id", ""), d) for d in arguments.defaults]
    rest = [a for a in (arguments.vararg, arguments.kwarg) if a is not None]
    for argument in [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, *rest]:
        argument.annotation = None
    if is_method:
        (arguments.posonlyargs or arguments.args).pop(0)
    return ast.unparse(arguments)


def _functions(node: ast.ClassDef) -> list[ast.FunctionDef]:
    return [child for child in node.body if isinstance(child, ast.FunctionDef)]


def _assigned_to_self(node: ast.AST) -> set[str]:
    """Return the names that are set by ``self.name = ...``."""
    return {
        child.attr
        for child in ast.walk(node)
        if isinstance(child, ast.Attribute)
        and isinstance(child.ctx, ast.Store)
        and getattr(child.value, "id", None) == "self"
    }


def read_from(node: ast.AST, name: str) -> set[str]:
    """Return the attributes that are read from the variable ``name``, or asked for by hasattr()."""
    found = set()
    for child in ast.walk(node):
        if isinstance(child, ast.Attribute) and getattr(child.value, "id", None) == name:
            found.add(child.attr)
        if isinstance(child, ast.Call) and getattr(child.func, "id", None) == "hasattr":
            asked, attribute = child.args
            if getattr(asked, "id", None) == name:
                found.add(ast.literal_eval(attribute))
    return found


def _optimizer(wheel: Wheel, name: str) -> dict[str, Any]:
    """Return constructor, public methods and public attributes, those of bases of theirs too."""
    methods: dict[str, str | None] = {}
    attributes: set[str] = set()
    init = None
    found = wheel.find("torch_npu.optim", name)
    while found is not None:
        module, node = found
        assert isinstance(node, ast.ClassDef)
        constants = wheel.constants(module)
        init = init or signature(node, constants)
        for function in _functions(node):
            if function.name == "__init__":
                attributes |= {a for a in _assigned_to_self(function) if not a.startswith("_")}
            elif not function.name.startswith("_"):
                methods.setdefault(function.name, signature(function, constants, is_method=True))
        found = wheel.find(module, getattr(node.bases[0], "id", ""))
    return {"init": init, "methods": methods, "attributes": sorted(attributes)}


def _scaler(wheel: Wheel) -> dict[str, list[str]]:
    """Return what the gradient scaler has, and what it reads from optimizers."""
    found = wheel.find("torch_npu.npu.amp.grad_scaler", "GradScaler")
    assert found is not None
    node = found[1]
    assert isinstance(node, ast.ClassDef)
    keys = {
        child.slice.value
        for child in ast.walk(node)
        if isinstance(child, ast.Subscript)
        and getattr(child.value, "id", None) == "optimizer_state"
        and isinstance(child.slice, ast.Constant)
    }
    return {
        "attributes": sorted(_assigned_to_self(node) | {f.name for f in _functions(node)}),
        "reads_of_optimizers": sorted(read_from(node, "optimizer")),
        "state_keys": sorted(keys),
    }


def _backend_methods(wheel: Wheel) -> list[str]:
    """Return the methods of the HCCL backend that torch_npu's own Python code calls."""
    return sorted(
        {
            node.attr
            for tree in wheel.sources(b"_get_backend(")
            for node in ast.walk(tree)
            if isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Call)
            and getattr(node.value.func, "attr", None) == "_get_backend"
        }
    )


def _read_by_itself(wheel: Wheel, name: str) -> bool:
    """Return whether the wheel's own Python code reads ``name``, dotted, or has it as a module."""
    return wheel.module_file(name) is not None or any(
        isinstance(node, ast.Attribute) and ast.unparse(node) == name
        for tree in wheel.sources(name.encode())
        for node in ast.walk(tree)
    )


def _registered(wheel: Wheel, function: str) -> list[str]:
    """Return the names that torch_npu registers with torch by calls of ``function``."""
    return sorted(
        {
            str(node.args[0].value)
            for tree in wheel.sources(function.encode())
            for node in ast.walk(tree)
            if isinstance(node, ast.Call)
            and getattr(node.func, "attr", None) == function
            and node.args
            and isinstance(node.args[0], ast.Constant)
        }
    )


def _signatures(wheel: Wheel, module: str) -> dict[str, str | None]:
    """Return {public name: signature}, None for what is no function or class."""
    found = {name: wheel.find(module, name) for name in wheel.exported(module)}
    return {name: None if at is None else signature(at[1]) for name, at in found.items()}


def _of_torch_npu(wheel: Wheel) -> dict[str, Any]:
    library = wheel.read("torch_npu/lib/libtorch_npu.so")
    return {
        "optimizers": {n: _optimizer(wheel, n) for n in wheel.exported("torch_npu.optim")},
        "npu": _signatures(wheel, "torch_npu.npu"),
        "names": [name for name in NAMES if _read_by_itself(wheel, name)],
        "scaler": _scaler(wheel),
        "backend_methods": _backend_methods(wheel),
        "device_modules": _registered(wheel, "_register_device_module"),
        "backends": _registered(wheel, "register_backend"),
        "variables": sorted({name.decode() for name in _VARIABLE.findall(library)}),
    }


def _of_torch(wheel: Wheel) -> dict[str, Any]:
    file = wheel.module_file("torch.accelerator")
    assert file is not None
    return {
        "accelerator": _signatures(wheel, "torch.accelerator"),
        "asks_of_device_module": sorted(read_from(wheel.tree(file), "mod")),
    }


def read_wheel(path: Path) -> dict[str, Any]:
    """Return the inventory of a wheel of torch_npu or torch."""
    wheel = Wheel(path)
    package, version = path.name.split("-")[:2]
    content = _of_torch_npu(wheel) if package == "torch_npu" else _of_torch(wheel)
    about = {"package": package, "version": version.split("+")[0]}
    return {**about, "wheel": wheel.name, "sha256": wheel.digest, **content}


def inventory(package: str, version: str) -> Any:
    """Return the inventory of a package, "torch_npu" or "torch", that is kept."""
    return json.loads((FOLDER / f"{package}-{version}.json").read_text())


def main(paths: list[str], folder: Path = FOLDER) -> None:
    """Write the inventory of each wheel into ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in map(Path, paths):
        inventory = read_wheel(path)
        name = f"{inventory['package']}-{inventory['version']}.json"
        (folder / name).write_text(json.dumps(inventory, indent=1, sort_keys=True) + "\n")
        print(f"{name}: {path.name}")


if __name__ == "__main__":
    main(sys.argv[1:])
