"""Where commands look for code: a folder of checkpoints has data, and nothing there is run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from shardfuse import __main__ as command
from shardfuse.checkpoint import save

ROOT = Path(__file__).parents[2]
PLANTED = "import pathlib\npathlib.Path('run').touch()\n"
MODEL = "import torch\ndef build():\n    return torch.nn.Linear(3, 2)\n"


@pytest.fixture
def planted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the working directory: a checkpoint, and a module beside it."""
    save({"model": torch.nn.Linear(3, 2)}, tmp_path / "saved")
    (tmp_path / "safetensors.py").write_text(PLANTED)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.timeout(120)
@pytest.mark.parametrize("start", ["console", "-m"])
def test_export_runs_nothing_of_the_folder(planted: Path, start: str) -> None:
    (planted / "bin").mkdir()
    script = planted / "bin" / "shardfuse"
    script.write_text("import sys\nfrom shardfuse.__main__ import console\nsys.exit(console())\n")
    words = [str(script)] if start == "console" else ["-m", "shardfuse"]
    result = subprocess.run(
        [sys.executable, *words, "export", "saved", "--model", "model.safetensors"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert not (planted / "run").exists(), result.stderr
    assert result.returncode == 0, result.stderr


def test_only_a_model_by_import_path_adds_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the last place."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model_of_search_path.py").write_text(MODEL)
    before = [entry for entry in sys.path if entry not in ("", str(tmp_path))]
    monkeypatch.setattr(sys, "path", list(before))
    assert command.main(["plan", "--model", "1m", "--world-size", "2", "--json"]) == 0
    assert sys.path == before
    words = ["plan", "--model", "model_of_search_path:build", "--world-size", "2", "--json"]
    assert command.main(words) == 0
    assert sys.path == [*before, str(tmp_path)]
    assert command.main(words) == 0
    assert sys.path == [*before, str(tmp_path)]


@pytest.mark.parametrize("name", ["plan", "compare-variants"])
def test_the_help_says_so(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.main([name, "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert "looked for last, in the working directory" in text
