"""What the documents promise is what CI runs and what the code does."""

from __future__ import annotations

import ast
import dataclasses
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

from launch.bench import figures
from shardfuse import ShardConfig
from tests.unit.test_docstrings import MODULES

ROOT = Path(__file__).parent.parent
# README.md first, then all others, wherever they lie.
_MANUALS = (
    path for name in ("shardfuse", "launch", "tests") for path in (ROOT / name).rglob("*.md")
)
DOCUMENTS = [
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    *sorted(str(path.relative_to(ROOT)) for path in _MANUALS if "results" not in path.parts),
]
README_CHARS = 8_000
PAGE_CHARS = 16_000
OPTIMIZERS = "shardfuse/optim/README.md"
ERRORS = "shardfuse/optim/errors.md"


def code_blocks(document: str, language: str) -> list[str]:
    """Return the fenced blocks of ``language`` in a document of the repository."""
    text = (ROOT / document).read_text()
    return re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("document", DOCUMENTS)
def test_python_examples_run(
    document: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every Python block of a document runs as it stands."""
    monkeypatch.chdir(tmp_path)  # one saves checkpoints
    for block in code_blocks(document, "python"):
        exec(compile(block, document, "exec"), {"__name__": "example"})


def test_readme_has_python_example() -> None:
    """The check above has something to run."""
    assert code_blocks("README.md", "python")


def test_ci_calls_readme_commands() -> None:
    """README's first two commands are those that .ci/run calls."""
    script = (ROOT / ".ci" / "run").read_text()
    main_job, tests = (block.strip() for block in code_blocks("README.md", "sh")[:2])
    assert main_job in script
    assert re.search(rf"^{re.escape(tests)}$", script, flags=re.MULTILINE)


def test_readme_is_one_that_is_read() -> None:
    """Who wants more finds it beside what it is about."""
    text = (ROOT / "README.md").read_text()
    assert len(text) <= README_CHARS
    assert max(map(len, text.splitlines())) <= 200


def anchors(path: Path) -> set[str]:
    """Return what a link may name after "#": headings, as sites make anchors of them."""
    headings = re.findall(r"^#+ (.*)$", path.read_text(), flags=re.MULTILINE)
    kept = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings)
    return {heading.replace(" ", "-") for heading in kept}


def test_ci_builds_the_api_pages_as_contributing_says() -> None:
    """By the same command, with every public module."""
    (command,) = (b for b in code_blocks("CONTRIBUTING.md", "sh") if "pdoc" in b)
    assert command in (ROOT / ".ci" / "run").read_text()
    assert {word for word in command.split() if word.startswith("shardfuse")} == set(MODULES)


@pytest.mark.parametrize("document", DOCUMENTS)
def test_relative_links_exist(document: str) -> None:
    """Links between documents lead somewhere, those to a heading to one that is there."""
    path = ROOT / document
    for link in re.findall(r"\]\(([^)]+)\)", path.read_text()):
        target, _, anchor = link.partition("#")
        if "://" in target:
            continue
        found = path.parent / target if target else path
        assert found.exists(), f"{document} links to {target}"
        if anchor:
            assert anchor in anchors(found), f"{document} links to {link}"


@pytest.mark.parametrize("document", DOCUMENTS)
def test_commands_name_files_that_are_there(document: str) -> None:
    """Scripts and modules of ours in commands exist; their options are tested where they are."""
    text = (ROOT / document).read_text()
    for script in re.findall(r"\b(?:launch|tests)/[\w/.-]+\.(?:py|sh)\b", text):
        assert (ROOT / script).exists(), f"{document} names {script}"
    for module in re.findall(r"-m ((?:launch|tests|shardfuse)[\w.]*)", text):
        place = ROOT.joinpath(*module.rstrip(".").split("."))
        assert place.is_dir() or place.with_suffix(".py").exists(), f"{document} names {module}"


def rows_of(document: str, heading: str) -> list[str]:
    """Return the first cells of the table under a heading."""
    text = (ROOT / document).read_text().split(f"\n## {heading}\n")[1].split("\n## ")[0]
    rows = [line.split("|")[1].strip() for line in text.splitlines() if line.startswith("|")]
    return rows[2:]


def test_every_option_has_a_row() -> None:
    """In the order of nothing, but each once."""
    named = [name for row in rows_of(OPTIMIZERS, "Options") for name in re.findall(r"`(\w+)`", row)]
    assert sorted(named) == sorted(field.name for field in dataclasses.fields(ShardConfig))


def texts_in(path: Path) -> Iterator[str]:
    """Yield the texts of a module, what is filled in as an ellipsis."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
        elif isinstance(node, ast.JoinedStr):
            parts = (
                part.value if isinstance(part, ast.Constant) else "..." for part in node.values
            )
            yield "".join(map(str, parts))


def test_messages_are_those_that_are_raised() -> None:
    """What is told of a message is found by who has it on the screen."""
    texts = "\n".join(
        text for path in (ROOT / "shardfuse").rglob("*.py") for text in texts_in(path)
    )
    rows = rows_of(ERRORS, "Messages and remedies")
    messages = [message for row in rows for message in row.split("`")[1::2]]
    assert len(messages) > 10
    for message in messages:
        for part in message.split("..."):
            assert part.strip() in texts, message


def test_ranks_of_a_launch_are_said_in_full() -> None:
    """torchrun of torch 2.13 takes --nproc for ambiguous."""
    for document in DOCUMENTS:
        assert "--nproc " not in (ROOT / document).read_text(), document


def prose(path: Path) -> str:
    """Return the text of a page without code, or the docstrings and comments of a module."""
    text = path.read_text()
    if path.suffix == ".md":
        return re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    documented = [node for node in ast.walk(ast.parse(text)) if isinstance(node, kinds)]
    comments = [
        token.string
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type == tokenize.COMMENT
    ]
    return "\n".join([*(ast.get_docstring(node) or "" for node in documented), *comments])


def test_the_actor_is_named() -> None:
    """A clause with a free "what" or "who" hides its subject; a name of an argument is none."""
    paths = [ROOT / document for document in DOCUMENTS]
    paths += (ROOT / "shardfuse").rglob("*.py")
    found = {
        str(path.relative_to(ROOT)): len(re.findall(r"(?i)\b(?:what|who|whoever|whom)\b", text))
        for path in paths
        if (text := re.sub(r"``what``|\bwhat:", "", prose(path)))
    }
    assert sum(found.values()) <= 20, {name: number for name, number in found.items() if number}


@pytest.mark.parametrize("document", DOCUMENTS)
def test_pages_are_short(document: str) -> None:
    """One that is longer is several; tables that a program writes are results."""
    if document != "tests/faults/results.md":
        assert len((ROOT / document).read_text()) <= PAGE_CHARS


def test_figures_of_readme_are_those_of_the_results() -> None:
    """The page of figures is written from the rows of the results, and README has each of them."""
    results = ROOT / "launch" / "bench" / "results"
    assert (results / figures.PAGE).read_text() == figures.make_page(results)
    readme = " ".join((ROOT / "README.md").read_text().split())
    for figure in figures.figures(results):
        assert figure.text in readme
    for row in figures.memory_rows():
        assert "| " + " | ".join(row) + " |" in readme
