"""What the doctor says of versions, and of what several ranks found."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from shardfuse.doctor.findings import Finding, merged
from shardfuse.doctor.versions import check_versions


def toolkit(folder: Path, version: str) -> dict[str, str]:
    """Return an environment in which CANN of that version is installed."""
    (folder / "ascend_toolkit_install.info").write_text(
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
        ("2.12.0", "2.12.0", "9.0.0", "failed", "is for CANN 9.1, not 9.0.0"),
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


def test_a_torch_that_is_not_tested() -> None:
    found = check_versions({"torch": "2.5.1"}.get, {})[0]
    assert found.verdict == "warning"
    assert "2.5.1 is none of the tested" in found.text


def test_the_worst_of_all_ranks_is_told() -> None:
    """With the ranks that have it; one that says nothing is worse than all."""
    right, odd = Finding("x", "ok", "right"), Finding("x", "warning", "odd", "mend it")
    wrong = Finding("x", "failed", "wrong")
    assert merged("x", [right, right]) == right
    assert merged("x", [right, odd, odd]).text == "rank 1, 2: odd"
    assert merged("x", [odd, wrong, right]).text == "rank 1: wrong"
    assert merged("x", [wrong, wrong]) == wrong
    silent = merged("x", [right, None, wrong])
    assert (silent.verdict, silent.text) == ("failed", "rank 1 did not answer in time")
    assert "wrong" in wrong.describe()
    assert odd.describe().count("\n") == 1
