"""What the doctor says of versions, and of what several ranks found."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from shardfuse.doctor.host import Finding, cann_version, check_versions, merge_findings


def toolkit(folder: Path, version: str) -> dict[str, str]:
    """Return an environment in which CANN of that version is installed."""
    lies_in = folder / "aarch64-linux"  # as packages install it
    lies_in.mkdir()
    (folder / "version.info").write_text("Version=\ntimestamp=2026\n")
    (lies_in / "ascend_toolkit_install.info").write_text(
        f"package_name=Ascend-cann-toolkit\nversion={version}\narch=aarch64\n"
    )
    return {"ASCEND_TOOLKIT_HOME": str(folder)}


def test_this_machine() -> None:
    """torch of the tests, and no Ascend."""
    first, second = check_versions(environment={})
    assert first.verdict == "ok"
    assert torch.__version__.startswith(first.text)  # packages leave out "+cu130", builds do not
    assert second.verdict == "ok"
    assert "no torch_npu" in second.text


@pytest.mark.parametrize(
    ("torch_version", "npu", "cann", "verdict", "word"),
    [
        ("2.12.0", "2.12.0.post1", "9.1.RC1", "ok", "CANN 9.1.RC1"),
        ("2.7.1+cpu", "2.7.1", "9.0.0", "ok", "driver"),
        ("2.13.0", "2.12.0", "9.1.0", "failed", "another release than torch 2.13.0"),
        ("2.12.0", "2.12.0", None, "failed", "no CANN toolkit"),
        ("2.12.0", "2.12.0", "9.0.0", "warning", "is known for CANN 9.1; there is CANN 9.0.0"),
        ("2.7.1+cpu", "2.7.1.post2", "8.5.1", "ok", "CANN 8.5.1"),
        ("2.9.0", "2.9.0", "", "warning", "there is CANN of unknown version"),
        ("2.13.0", "2.13.0", "9.1.0", "warning", "no CANN release is known"),
    ],
)
def test_torch_npu(
    torch_version: str, npu: str, cann: str | None, verdict: str, word: str, tmp_path: Path
) -> None:
    """A mismatch names both sides, and what to install."""
    environment = {} if cann is None else toolkit(tmp_path, cann)
    held = {"torch": torch_version, "torch-npu": npu}
    found = check_versions(held.get, environment)[1]
    assert found.verdict == verdict
    assert word in found.text
    assert verdict == "ok" or found.remedy


@pytest.mark.parametrize(
    "name",
    ["x86_64-linux/ascend_nnae_install.info", "ascend_toolkit_install.info", "version.info"],
)
def test_where_cann_tells_its_version(name: str, tmp_path: Path) -> None:
    """By either variable; of a folder that is gone nothing is known."""
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("package_name=any\nversion=9.1.0\n")
    for variable in ("ASCEND_TOOLKIT_HOME", "ASCEND_HOME_PATH"):
        assert cann_version({variable: str(tmp_path)}) == "9.1.0"
    assert cann_version({"ASCEND_HOME_PATH": str(tmp_path / "gone")}) is None


def test_a_torch_that_is_not_tested() -> None:
    found = check_versions({"torch": "2.5.1"}.get, {})[0]
    assert found.verdict == "warning"
    assert "2.5.1 is none of the tested" in found.text


def test_the_worst_of_all_ranks_is_told() -> None:
    """With the ranks that have it; one that says nothing is worse than all."""
    right, odd = Finding("x", "ok", "right"), Finding("x", "warning", "odd", "mend it")
    wrong = Finding("x", "failed", "wrong")
    assert merge_findings("x", [right, right]) == right
    assert merge_findings("x", [right, odd, odd]).text == "rank 1, 2: odd"
    assert merge_findings("x", [odd, wrong, right]).text == "rank 1: wrong"
    assert merge_findings("x", [wrong, wrong]) == wrong
    silent = merge_findings("x", [right, None, wrong])
    assert (silent.verdict, silent.text) == ("failed", "rank 1 did not answer in time")
    assert "wrong" in wrong.describe()
    assert odd.describe().count("\n") == 1
