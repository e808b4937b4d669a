"""`pip install -e .`: a user's type checker finds the package and its types."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(240)

ROOT = Path(__file__).parents[2]
USER = """
import shardfuse
from shardfuse import ShardConfig
reveal_type(ShardConfig().bucket_cap_mb)
shardfuse.ShardConfig(stage="one")
"""


def build_editable(project: Path, site: Path) -> None:
    """Put into ``site`` what pip would for an editable install of a copy of this tree."""
    for name in ("setup.cfg", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, project)
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "shardfuse", project / "shardfuse", ignore=ignored)
    code = "import sys; from setuptools.build_meta import build_editable as b; b(sys.argv[1])"
    wheels = project / "wheels"
    wheels.mkdir()
    command = [sys.executable, "-W", "ignore", "-c", code, str(wheels)]
    subprocess.run(command, cwd=project, capture_output=True, check=True)
    (wheel,) = wheels.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)


def test_type_checkers_find_an_editable_install(tmp_path: Path) -> None:
    """mypy, on a file in another folder and for another environment, sees the package's types."""
    pytest.importorskip("mypy")
    pytest.importorskip("setuptools", minversion="64")
    project, user = tmp_path / "project", tmp_path / "user"
    project.mkdir()
    user.mkdir()
    venv.create(tmp_path / "env", symlinks=True)
    (site,) = (tmp_path / "env").glob("lib/python*/site-packages")
    build_editable(project, site)
    (user / "train.py").write_text(USER)
    python = tmp_path / "env" / "bin" / "python"
    result = subprocess.run(
        [sys.executable, "-m", "mypy", "--python-executable", str(python), "train.py"],
        cwd=user,
        env={k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "MYPYPATH")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert 'Revealed type is "float |' in result.stdout.replace("builtins.", ""), result.stdout
    assert "import-untyped" not in result.stdout
    assert "import-not-found" not in result.stdout
    assert 'incompatible type "str"; expected "int"' in result.stdout
