"""What is built of this tree, as someone who installs it meets it: a wheel in a fresh environment.

Left out where the packages of the extra ``dev`` are not installed.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from collections.abc import Mapping
from email import message_from_bytes
from html.parser import HTMLParser
from pathlib import Path
from typing import NamedTuple

import pytest

import shardfuse
from tests.test_docs import code_blocks

pytest.importorskip("build.env")  # not a folder of that name
pytestmark = pytest.mark.timeout(280)

ROOT = Path(__file__).parents[2]
USER = """
import torch
from shardfuse import ShardConfig, ShardedAdam
from shardfuse.checkpoint import Checkpoints

model = torch.nn.Linear(3, 2)
config: ShardConfig = ShardConfig(bucket_cap_mb=4)
optimizer: torch.optim.Optimizer = ShardedAdam(model.parameters(), sharding=config)
steps: list[int] = Checkpoints("run").steps()
ShardConfig(stage="one")
"""


class Built(NamedTuple):
    """What was built, and an environment that the wheel is installed into."""

    wheel: Path
    sdist: Path
    python: Path


def clean(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return an environment that leads to no other copy of the package."""
    return {k: v for k, v in environ.items() if k not in ("PYTHONPATH", "MYPYPATH")}


def run(cwd: Path, *command: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        list(map(str, command)),
        cwd=cwd,
        env=clean(),
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """Build the sdist of the tree without git, the wheel of the sdist, and install that one."""
    folder = tmp_path_factory.mktemp("built")
    tree, dist = folder / "tree", folder / "dist"
    ignored = ("build", "dist", "runs", "*.egg-info", "__pycache__", ".*_cache", ".git", ".venv")
    shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(*ignored))
    result = run(folder, sys.executable, "-m", "build", "--outdir", dist, tree)
    assert result.returncode == 0, result.stdout + result.stderr
    (wheel,), (sdist,) = dist.glob("*.whl"), dist.glob("*.tar.gz")
    venv.create(folder / "env", with_pip=True, symlinks=True)
    (site,) = (folder / "env").glob("lib/python*/site-packages")
    # torch is large, and is there already.
    paths = {sysconfig.get_path(name) for name in ("purelib", "platlib")}
    paths |= {entry for entry in sys.path if entry.endswith("site-packages")}
    (site / "others.pth").write_text("\n".join(sorted(paths)))
    python = folder / "env" / "bin" / "python"
    pip = ("-m", "pip", "install", "--no-deps", "--no-index", "--ignore-installed", wheel)
    result = run(folder, python, *pip)
    assert result.returncode == 0, result.stderr
    return Built(wheel, sdist, python)


def metadata(built: Built) -> tuple[dict[str, str], str]:
    """Return the wheel's metadata and the text of its page."""
    with zipfile.ZipFile(built.wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        message = message_from_bytes(archive.read(name))
    payload = message.get_payload(decode=True)
    assert isinstance(payload, bytes)
    return dict(message.items()), payload.decode()


def test_what_the_archives_hold(built: Built) -> None:
    """Types, notes, license; every module; and in the sdist what builds it."""
    modules = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "shardfuse").rglob("*")
        if path.suffix in (".py", ".typed", ".md")
    }
    with zipfile.ZipFile(built.wheel) as archive:
        held = set(archive.namelist())
    assert {"shardfuse/py.typed", "shardfuse/README.md"} <= modules <= held
    assert {name for name in held if ".dist-info/" not in name} == modules
    assert any(name.endswith("/LICENSE") for name in held)
    with tarfile.open(built.sdist) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    others = ["README.md", "LICENSE", "CHANGELOG.md", "CONTRIBUTING.md", ".ci/backend.py"]
    assert modules | {"setup.cfg", "pyproject.toml", *others} <= held


def test_the_version_is_one(built: Built) -> None:
    """In the metadata, the module and the changelog; written down in one place."""
    headers, _ = metadata(built)
    assert headers["Version"] == shardfuse.__version__
    assert f"\n## [{shardfuse.__version__}]" in (ROOT / "CHANGELOG.md").read_text()
    quoted = f'"{shardfuse.__version__}"'
    files = [path for path in (ROOT / "shardfuse").rglob("*.py") if quoted in path.read_text()]
    assert files == [ROOT / "shardfuse" / "version.py"]
    assert shardfuse.__version__ not in (ROOT / "setup.cfg").read_text()


class _Targets(HTMLParser):
    """Gathers what a page links to and shows, and the places in it."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str | None] = []
        self.places: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [value for name, value in attrs if name in ("href", "src")]
        self.places |= {f"#{value}" for name, value in attrs if name == "id"}


def test_the_page_is_rendered_without_broken_links(built: Built) -> None:
    """By what index pages are rendered with; nothing but links goes from README."""
    markdown = pytest.importorskip("readme_renderer.markdown")
    headers, text = metadata(built)
    assert headers["Description-Content-Type"] == "text/markdown"
    page = markdown.render(text)
    assert page is not None
    readme = (ROOT / "README.md").read_text()
    assert page.count("<table") == len(re.findall("(?m)^\\|---", readme)) > 2
    targets = _Targets()
    targets.feed(page)
    assert targets.found
    for target in targets.found:
        assert target is not None
        assert target in targets.places or re.match("https?://", target), target
    assert re.findall("(?ms)^```.*?^```", text) == re.findall("(?ms)^```.*?^```", readme)
    assert re.findall("(?m)^#+ .*$", text) == re.findall("(?m)^#+ .*$", readme)
    # A picture and the blank line after it.
    assert len(text.splitlines()) >= len(readme.splitlines()) - 2 * readme.count("![")


def test_the_installed_package_is_the_wheel_s(built: Built, tmp_path: Path) -> None:
    result = run(tmp_path, built.python, "-c", "import shardfuse; print(shardfuse.__file__)")
    assert result.stdout.startswith(str(built.python.parents[1])), result.stdout + result.stderr


def test_its_commands_run(built: Built, tmp_path: Path) -> None:
    """The console script and the module."""
    script = built.python.parent / "shardfuse"
    result = run(tmp_path, script, "--help")
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("usage: shardfuse [-h]")
    (tmp_path / "sizes.py").write_text(
        "import torch\ndef build():\n    return torch.nn.Linear(3, 2)\n"
    )
    result = run(tmp_path, script, "compare-variants", "npu", "--model", "sizes:build")
    assert result.returncode == 0, result.stderr
    result = run(tmp_path, built.python, "-m", "shardfuse", "doctor", "--device", "cpu")
    assert result.returncode == 0, result.stdout + result.stderr


def test_it_trains(built: Built, tmp_path: Path) -> None:
    """README's first program."""
    program = code_blocks("README.md", "python")[0] + "\nprint(float(loss.detach()))\n"
    (tmp_path / "train.py").write_text(program)
    result = run(tmp_path, built.python, "-W", "error", "train.py")
    assert result.returncode == 0, result.stderr
    assert float(result.stdout) >= 0


def test_mypy_reads_its_types(built: Built, tmp_path: Path) -> None:
    """A user's file under --strict has the one error that was put there."""
    pytest.importorskip("mypy")
    (tmp_path / "train.py").write_text(USER)
    command = ("-m", "mypy", "--strict", "--python-executable", built.python, "train.py")
    result = run(tmp_path, sys.executable, *command)
    assert 'incompatible type "str"; expected "int"' in result.stdout, result.stdout
    assert "Found 1 error in 1 file" in result.stdout, result.stdout


def test_pyright_reads_its_types(built: Built, tmp_path: Path) -> None:
    """Likewise."""
    pytest.importorskip("pyright")
    pyright = (sys.executable, "-m", "pyright")
    if run(tmp_path, *pyright, "--version").returncode != 0:
        pytest.skip("pyright cannot be fetched: there is no way to npm's registry")
    (tmp_path / "train.py").write_text(USER)
    result = run(tmp_path, *pyright, "--pythonpath", built.python, "train.py")
    assert "1 error, 0 warnings" in result.stdout, result.stdout
    assert 'parameter "stage"' in result.stdout, result.stdout
