"""The architecture holds: who imports whom, how large things are, what importing does."""

from __future__ import annotations

import ast
import fnmatch
import inspect
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import shardfuse

PACKAGE = Path(shardfuse.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))


def read_arrows() -> dict[str, set[str]]:
    """Return the table of the package's README: {module or package: what it may import of ours}."""
    text = (PACKAGE / "README.md").read_text()
    text = text.split("<!-- arrows -->")[1].split("<!-- end of arrows -->")[0]
    rows = [row.strip("|").split("|") for row in text.splitlines() if row.startswith("|")]
    table: dict[str, set[str]] = {}
    for left, right in rows[2:]:
        targets = {name.strip() for name in right.split(",")} - {"nothing of ours"}
        for name in left.split(","):
            assert name.strip() not in table, f"{name} has two rows"
            table[name.strip()] = targets
    table[""] = table.pop("shardfuse")
    return table


ARROWS = read_arrows()

# Who may import a package that is not torch or of the standard library's plain kind.
ONLY_IN: dict[str, set[str]] = {
    "torch.distributed": {
        "comm.native",
        "comm.gloo",
        "checkpoint.storage",
        "fragments",
        "optim.compat",
        "training.attempts",
        "doctor.world",
    },
    "torch.distributed.checkpoint": {"checkpoint.storage", "fragments"},
    "torch_npu": set(),
    "deepspeed": {"deepspeed.peer"},
    "transformers": {"integrations"},
    "triton": set(),
    "paddle": set(),
}

MAX_FILE_LINES = 900
MAX_FUNCTION_LINES = 80
MAX_PARAMETERS = 8

# Their signatures are upstream's and cannot be shortened.
LONG_SIGNATURES = {
    "ShardedSGD.__init__",
    "ShardedAdam.__init__",
    "ShardedAdamW.__init__",
    "ShardedBertAdam.__init__",
    "ShardedLamb.__init__",
    "ShardedAdamP.__init__",
    "ShardedMuon.__init__",
    "Lamb.__init__",
    "ShardedRMSpropTF.__init__",
    "ShardedGradScaler.__init__",
}


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


def unit_of(module: str) -> str:
    """Return the row of the table that `module` belongs to: of itself or of its package."""
    unit = module
    while unit not in ARROWS:
        assert unit, f"{module} has no row in the table"
        unit = unit.rpartition(".")[0]
        assert unit, f"{module} has no row in the table"
    return unit


def imported(path: Path) -> Iterator[str]:
    """Yield the full name of every module or name that a file imports, wherever it does."""
    module = ["shardfuse", *path.relative_to(PACKAGE).parts[:-1]]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = module[: len(module) - node.level + 1] if node.level else []
            origin = ".".join([*base, *([node.module] if node.module else [])])
            yield from (f"{origin}.{alias.name}" for alias in node.names)


def own_module(name: str) -> str:
    """Return the module of shardfuse that an imported name lives in, without the prefix."""
    parts = name.split(".")[1:]
    while parts:
        base = PACKAGE.joinpath(*parts)
        if base.with_suffix(".py").is_file() or (base / "__init__.py").is_file():
            break
        parts.pop()
    return ".".join(parts)


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_arrows(path: Path) -> None:
    """A module imports only what its package's row in the README's table allows."""
    unit = unit_of(module_name(path))
    targets = {
        unit_of(own_module(name)) for name in imported(path) if name.split(".")[0] == "shardfuse"
    }
    assert targets - {unit} <= ARROWS[unit]


def test_arrows_are_all_used() -> None:
    """The table allows nothing that no module needs, so it stays the picture of the code."""
    used: dict[str, set[str]] = {unit: set() for unit in ARROWS}
    for path in FILES:
        unit = unit_of(module_name(path))
        names = [name for name in imported(path) if name.split(".")[0] == "shardfuse"]
        used[unit] |= {unit_of(own_module(name)) for name in names} - {unit}
    for unit, targets in ARROWS.items():
        assert used[unit] == targets, unit


def assert_no_cycle(arrows: dict[str, set[str]]) -> None:
    """Fail unless arrows can be laid out in one direction."""
    remaining = dict(arrows)
    while remaining:
        leaves = {unit for unit, targets in remaining.items() if not targets & remaining.keys()}
        assert leaves, f"cycle among {sorted(remaining)}"
        for leaf in leaves:
            del remaining[leaf]


def test_arrows_have_no_cycle() -> None:
    """Neither between packages nor between the modules of one."""
    assert_no_cycle(ARROWS)
    modules = {}
    for path in FILES:
        names = [name for name in imported(path) if name.split(".")[0] == "shardfuse"]
        modules[module_name(path)] = {own_module(name) for name in names} - {module_name(path)}
    assert_no_cycle(modules)


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_restricted_imports(path: Path) -> None:
    """torch.distributed and vendor packages are imported in their one place only."""
    for name in imported(path):
        for package, modules in ONLY_IN.items():
            if name == package or name.startswith(package + "."):
                assert module_name(path) in modules, f"{name} in {path.name}"


def functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.FunctionDef]]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ClassDef):
            yield from functions(node, f"{prefix}{node.name}.")
        elif isinstance(node, ast.FunctionDef):
            yield prefix + node.name, node
            yield from functions(node, f"{prefix}{node.name}.")


def code_lines(node: ast.FunctionDef) -> int:
    """Return the lines of a function without its docstring."""
    assert node.end_lineno is not None
    lines = node.end_lineno - node.lineno + 1
    if ast.get_docstring(node) is not None:
        docstring = node.body[0]
        assert docstring.end_lineno is not None
        lines -= docstring.end_lineno - docstring.lineno + 1
    return lines


def test_pytest_reaches_every_test(request: pytest.FixtureRequest) -> None:
    """No test lies in a folder that pytest skips by name ("dist" and "build" are such)."""
    patterns = request.config.getini("norecursedirs")
    root = Path(__file__).parent
    files = list(root.rglob("test_*.py"))
    assert len(files) > 10
    for path in files:
        for folder in path.relative_to(root).parts[:-1]:
            assert not any(fnmatch.fnmatch(folder, pattern) for pattern in patterns), path


SOURCES = [*FILES, *sorted(Path(__file__).parent.rglob("*.py"))]


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.stem)
def test_size_budgets(path: Path) -> None:
    """Files and functions keep to the size at which they are read as a whole."""
    text = path.read_text()
    assert len(text.splitlines()) <= MAX_FILE_LINES
    assert text.isascii()
    tree = ast.parse(text)
    for name, node in functions(tree):
        assert code_lines(node) <= MAX_FUNCTION_LINES, name
        arguments = node.args
        count = len(arguments.posonlyargs + arguments.args + arguments.kwonlyargs)
        receiver = "." in name and arguments.args and arguments.args[0].arg in ("self", "cls")
        assert count - bool(receiver) <= MAX_PARAMETERS or name in LONG_SIGNATURES, name


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_functions_are_annotated(path: Path) -> None:
    """Every argument and every result in the package has a type."""
    for name, node in functions(ast.parse(path.read_text())):
        assert node.returns is not None, name
        for argument in node.args.posonlyargs + node.args.args + node.args.kwonlyargs:
            assert argument.annotation is not None or argument.arg in ("self", "cls"), name


@pytest.mark.parametrize("name", shardfuse.__all__)
def test_public_names_are_documented(name: str) -> None:
    """Every public class, method and property has a docstring of its own."""
    public = getattr(shardfuse, name)
    assert inspect.getdoc(public)
    for key, member in vars(public).items():
        if not key.startswith("_") and (callable(member) or isinstance(member, property)):
            assert inspect.getdoc(member), f"{name}.{key}"


IMPORT_SCRIPT = """
import sys
import torch
threads = torch.get_num_threads()
import shardfuse
heavy = ["torch_npu", "deepspeed", "triton", "transformers", "tokenizers", "torch._inductor"]
heavy += ["paddle", "shardfuse.optim.paddle", "shardfuse.optim.npu"]
print([name for name in heavy if name in sys.modules])
print(torch.distributed.is_initialized(), torch.cuda.is_initialized())
print(torch.get_num_threads() == threads, torch.get_default_dtype())
print(sorted(set(shardfuse.__all__) - set(dir(shardfuse))))
"""


def test_importing_does_nothing_else() -> None:
    """A fresh import loads no vendor package, opens no device and creates no process group."""
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", IMPORT_SCRIPT],
        capture_output=True,
        text=True,
        cwd=PACKAGE.parent,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == ["[]", "False False", "True torch.float32", "[]"]


_RETIRED = """
    Sends Rounds Flights SentGrad Awaited Departure GradWire DtypeWire QuantizedWire ParamWire
    CastWire DifferenceWire Staging Parts Part Item Kind Place Piece Segment Unit Cohort Span
    BlockTable Shards GradSync PresyncedGrads PartitionedGrads FlatShard FlatGrads NOTED
    UnderBackward Taken TakenParam ParamSync ParamUnderWay Travellers Board Call Watch Mailbox
    Progress Terms Foreign Partitions Held Master note_quiet look_again doubt is_noted has_more
    dormant woken is_held is_unseen move_out lie_at is_lent set_out has_arrived epoch everyone
    laid_out_elsewhere hand_over intake levels_to_caller told_steps tried grain cohort span
    beside_training
"""
RETIRED = frozenset(_RETIRED.split())
"""Private names that engineers of DDP, FSDP or Megatron would not search for; see the glossary."""


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_no_retired_names(path: Path) -> None:
    """No function, class, argument or attribute has one of these names again."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        for field in ("name", "id", "attr", "arg"):
            found.add(str(getattr(node, field, "")).lstrip("_"))
    assert not found & RETIRED
