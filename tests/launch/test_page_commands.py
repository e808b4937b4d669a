"""Commands of pages that need no run, device or download, as a user copies them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.timeout(280),
    pytest.mark.cpu_only("its processes are told nothing of it"),
    pytest.mark.exhaustive,
]

ROOT = Path(__file__).parents[2]
PAGES = ["shardfuse/plan/README.md", "shardfuse/doctor/README.md", "launch/bert/phases.md"]


def commands(page: str) -> list[str]:
    """Return the commands of a page's blocks, continued lines joined."""
    text = (ROOT / page).read_text().replace("\\\n", "")
    blocks = re.findall(r"^```sh\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines()]
    lines += re.findall(r"^    (python .*)$", text, flags=re.MULTILINE)
    return [line for line in lines if line.startswith("python ")]


COMMANDS = [(page, command) for page in PAGES for command in commands(page)]


def test_every_page_has_one() -> None:
    assert {page for page, _ in COMMANDS} == set(PAGES)


@pytest.mark.parametrize(("page", "command"), COMMANDS, ids=[c for _, c in COMMANDS])
def test_a_command_of_a_page_runs(page: str, command: str, tmp_path: Path) -> None:
    (tmp_path / "launch").symlink_to(ROOT / "launch")  # some write files beside it
    bin_folder = str(Path(sys.executable).parent)
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=tmp_path,
        env=os.environ
        | {"PATH": os.pathsep.join([bin_folder, os.environ["PATH"]])}
        | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout
    assert "Warning" not in done.stderr
