"""What the documents promise is what CI runs and what the code does."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DOCUMENTS = [
    "README.md",
    "shardfuse/README.md",
    "launch/bert/README.md",
    "launch/deepspeed/README.md",
    "launch/npu/README.md",
    "launch/npu/mlperf_bert.md",
]


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


@pytest.mark.parametrize("document", DOCUMENTS)
def test_relative_links_exist(document: str) -> None:
    """Links between documents lead somewhere."""
    path = ROOT / document
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", path.read_text()):
        if "://" not in target:
            assert (path.parent / target).exists(), f"{document} links to {target}"
