"""launch/acceptance: on two CPU ranks by its script, and what its rows say of made-up findings."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import launch.acceptance.__main__ as acceptance
from launch.acceptance import rows
from launch.acceptance.__main__ import main, read
from launch.acceptance.ranks import QUICK, own_checks
from launch.bench import environment
from shardfuse.doctor import Finding
from shardfuse.doctor.checks import CHECKS
from tests.support import npu

REPOSITORY = Path(__file__).parents[2]
CPU = torch.device("cpu")
HARDWARE = {row.name for row in rows.ROWS if row.needs}

pytestmark = pytest.mark.timeout(120)


def script(
    name: str, *options: str, timeout: float = 100, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run a script of launch/."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(
        ["bash", str(REPOSITORY / "launch" / name), *options],
        env=os.environ | {"PATH": path, "OMP_NUM_THREADS": "1"} | variables,
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout,
    )


def stand_in(folder: Path) -> dict[str, str]:
    """Return variables by which torch loads the stand-in npu, as it loads torch_npu."""
    package = folder / "path" / "stand_in_npu-0.dist-info"
    package.mkdir(parents=True)
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: stand-in-npu\nVersion: 0\n")
    (package / "entry_points.txt").write_text(
        "[torch.backends]\nstand_in = tests.support.npu.autoload:load\n"
    )
    return {"PYTHONPATH": os.pathsep.join([str(package.parent), str(REPOSITORY)])}


@pytest.mark.skipif(shutil.which("g++") is None, reason="a C++ compiler builds the stand-in")
@pytest.mark.timeout(300)
def test_the_stand_in_is_built_once_where_torch_loads_it(tmp_path: Path) -> None:
    """The process that compiles it imports torch, too, and must not build it in turn."""
    pytest.importorskip("ninja")
    environment = os.environ | stand_in(tmp_path) | {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    environment.pop(npu.LIBRARY_VARIABLE, None)
    result = subprocess.run(
        [sys.executable, "-c", "import torch; print(torch.ones(3, device='npu').sum().item())"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )
    assert result.stdout == "3.0\n", result.stderr
    (built,) = (tmp_path / "cache" / "shardfuse-tests").iterdir()
    assert built.suffix == ".so"


def check_report(path: Path, kind: str = "cpu") -> dict[str, Any]:
    """Every row is there; those that only hardware can fill are not called right."""
    report: dict[str, Any] = json.loads(path.read_text())
    assert [row["name"] for row in report["rows"]] == [row.name for row in rows.ROWS]
    for key in ("hardware", "versions", "date", "command", "commit"):
        assert report[key], key
    assert report["versions"]["torch"] == torch.__version__
    assert {"torch_npu", "cann", "driver"} <= report["versions"].keys()
    assert (report["device"], report["on_hardware"], report["world"]) == (kind, False, 2)
    for row in report["rows"]:
        assert row["needs_hardware"] == (row["name"] in HARDWARE)
        if row["needs_hardware"]:
            assert row["verdict"] == "not run", row
            assert row["text"].startswith("needs "), row
    return report


@pytest.mark.skipif(shutil.which("g++") is None, reason="a C++ compiler builds the stand-in")
@pytest.mark.timeout(580)
def test_quick_on_the_stand_in(tmp_path: Path) -> None:
    """With params and collectives on a device that is none: nothing fails, no row of hardware's."""
    pytest.importorskip("ninja")
    report_file = tmp_path / "report.json"
    result = script(
        "npu/acceptance.sh",
        "--quick",
        timeout=570,
        DEVICE="npu",
        NPROC="2",
        REPORT=str(report_file),
        **stand_in(tmp_path),
        **{npu.LIBRARY_VARIABLE: npu.build()},  # once, not by each rank
    )
    assert result.returncode == 0, result.stdout + result.stderr
    report = check_report(report_file, "npu")
    assert "a stand-in for an NPU" in report["hardware"]
    assert "on npu:0" in result.stdout + result.stderr  # where the BERT job says that its model is
    verdicts = {row["name"]: row["verdict"] for row in report["rows"]}
    assert verdicts.pop(rows.BERT) == "not run"  # a few steps are not a hundred
    assert verdicts.pop("order of a step") == "warning"  # torch's profiler knows no such device
    assert {verdicts[name] for name in verdicts.keys() - HARDWARE} == {"ok"}, report


@pytest.mark.timeout(580)
def test_quick_on_two_ranks(tmp_path: Path) -> None:
    """The whole command, with small sizes: a report, a trace and a table; exit code 0."""
    report_file = tmp_path / "results" / "report.json"
    result = script(
        "npu/acceptance.sh",
        "--quick",
        timeout=570,
        DEVICE="cpu",
        NPROC="2",
        REPORT=str(report_file),
    )
    assert result.returncode == 0, result.stdout + result.stderr
    report = check_report(report_file)
    verdicts = {row["name"]: row["verdict"] for row in report["rows"]}
    assert verdicts.pop(rows.BERT) == "not run"  # a few steps are not a hundred
    assert {verdicts[name] for name in verdicts.keys() - HARDWARE} == {"ok"}, report
    values = {row["name"]: row["values"] for row in report["rows"]}
    assert len(values["bandwidth"]) == len(values[rows.MISALIGNED]) == 4
    assert values["memory against the plan"]["held_nbytes"] > 0
    assert values["update against copy"]["shares"].keys() == {"adam", "lamb"}
    assert values["step against DDP"]["ratio"] > 0
    assert values["bucket sizes"]["ms"].keys() == {"auto", *map(str, QUICK.caps)}
    assert values[rows.HANG]["events"][0]["text"] == "waits"
    assert len(values["order of a step"]["reduced"]) > 1
    assert values[rows.BERT]["first_loss"] > 0
    assert json.loads(report_file.with_suffix(".trace.json").read_text())["traceEvents"]
    assert all(name in result.stdout for name in verdicts)


@pytest.mark.timeout(580)
def test_whole_on_two_ranks(tmp_path: Path) -> None:
    """As a user runs it, with the sizes of a CPU: BERT learns."""
    report_file = tmp_path / "report.json"
    result = script(
        "gpu/acceptance.sh", timeout=570, DEVICE="cpu", NPROC="2", REPORT=str(report_file)
    )
    assert result.returncode == 0, result.stdout + result.stderr
    report = check_report(report_file)
    right = {row["name"]: row for row in report["rows"] if not row["needs_hardware"]}
    assert {row["verdict"] for row in right.values()} == {"ok"}
    assert right[rows.BERT]["values"]["steps"] == 100


def living(word: str) -> list[str]:
    """Return the command lines of processes that have ``word`` in them."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            line = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
            found += [line] if word in line else []
    return found


def test_nothing_is_left_after_a_signal(tmp_path: Path) -> None:
    """SIGTERM to the command ends torchrun and the ranks, too."""
    command = [sys.executable, "-m", "launch.acceptance", "--device", "cpu", "--quick"]
    process = subprocess.Popen(
        [*command, "--report", str(tmp_path / "report.json")],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None
    assert "ranks" in process.stdout.readline()
    assert len(living(str(tmp_path))) > 2
    process.terminate()
    process.communicate(timeout=60)
    assert process.returncode == 143
    assert living(str(tmp_path)) == []


def test_ranks_that_take_too_long_are_ended(tmp_path: Path) -> None:
    """A report all the same: one row has failed, and says why."""
    report_file = tmp_path / "report.json"
    result = script(
        "gpu/acceptance.sh", "--limit-s", "2", DEVICE="cpu", NPROC="2", REPORT=str(report_file)
    )
    assert result.returncode == 1
    report = json.loads(report_file.read_text())
    verdicts = [row["verdict"] for row in report["rows"]]
    assert verdicts.count("ok") == 0
    assert verdicts[0] == "failed"
    assert "had not come to its end" in report["rows"][0]["text"]
    assert set(verdicts[1:-1]) == {"not run"}
    assert living(str(tmp_path)) == []


def test_a_report_makes_the_code_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next one names the same commit, without the "+" of changed files."""
    monkeypatch.setattr(environment, "ROOT", tmp_path)
    author = ["-c", "user.name=a", "-c", "user.email=a@b"]
    for command in (["init", "-q"], [*author, "commit", "-q", "--allow-empty", "-m", "one"]):
        subprocess.run(["git", "-C", str(tmp_path), *command], check=True)
    before = environment.commit()
    assert re.fullmatch(r"[0-9a-f]{7,}", before)
    for folder in ("npu", "gpu", "bench"):
        (tmp_path / "launch" / folder / "results").mkdir(parents=True)
        (tmp_path / "launch" / folder / "results" / "2026-11-25.json").write_text("{}")
    assert environment.commit() == before
    (tmp_path / "launch" / "npu" / "a2.sh").write_text("")
    assert environment.commit() == f"{before}+"


def test_wrong_use(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """What cannot be done is one line."""
    assert main(["--device", "npu"]) == 2
    assert "torch finds no npu here, but cpu" in capsys.readouterr().err
    assert main(["--device", "cpu", "--nproc-per-node", "0"]) == 2
    assert "at least 1" in capsys.readouterr().err
    (tmp_path / "file").write_text("")
    for place, words in ((tmp_path, "a folder; name a file"), (tmp_path / "file" / "x", "in the")):
        assert main(["--device", "cpu", "--quick", "--limit-s", "1", "--report", str(place)]) == 2
        assert words in capsys.readouterr().err  # before all rows, not after them
    for limit in ("nan", "inf", "0", "-1"):
        with pytest.raises(SystemExit, match="2"):
            main(["--device", "cpu", "--limit-s", limit])
        assert f"{limit} is no number of seconds" in capsys.readouterr().err
    (tmp_path / "x.json").write_text("[]")
    assert main(["--markdown", str(tmp_path / "x.json")]) == 2
    assert "no report of acceptance" in capsys.readouterr().err


# What rows say


def found(**changes: Finding) -> dict[str, Finding]:
    """Return a good finding for every row, but for ``changes`` by the row's name."""
    return {row.name: Finding(row.name, "ok", "good") for row in rows.ROWS} | changes


def verdicts(filled: list[rows.Filled]) -> dict[str, str]:
    return {row.name: row.verdict for row in filled}


def test_without_hardware_its_rows_are_not_run() -> None:
    """Unless one has failed: that is news wherever it happens."""
    broken = Finding("bandwidth", "failed", "broken")
    slow = Finding("update against copy", "warning", "slow")
    filled = rows.fill(found(bandwidth=broken) | {slow.name: slow}, kind=None, reason="no reason")
    assert {name for name, verdict in verdicts(filled).items() if verdict == "not run"} == (
        HARDWARE - {"bandwidth"}
    )
    assert verdicts(filled)["bandwidth"] == "failed"


@pytest.mark.parametrize(
    ("kind", "others"),
    [
        ("npu", {"backward as a CUDA graph"}),
        ("cuda", {"torch_npu and CANN", "formats", "NPU settings", "room for communicators"}),
    ],
)
def test_each_kind_of_hardware_has_its_rows(kind: str, others: set[str]) -> None:
    filled = verdicts(rows.fill(found(), kind=kind, reason="no reason"))
    assert {name for name, verdict in filled.items() if verdict == "not run"} == others
    assert {filled[name] for name in filled.keys() - others} == {"ok"}


def test_the_first_row_that_is_missing_has_failed() -> None:
    some = found()
    del some["optimizers"], some["save and load"]
    filled = rows.fill(some, kind="npu", reason="exit code -9")
    assert verdicts(filled)["optimizers"] == "failed"
    assert next(row.text for row in filled if row.name == "optimizers") == "exit code -9"
    assert verdicts(filled)["save and load"] == "not run"


def test_rows_are_all_that_is_checked() -> None:
    """No check is without a row, none is left over."""
    before = {"ranks", "torch", "torch_npu and CANN", "environment", "process group"}
    own = own_checks(QUICK, CPU, None)
    assert before | {*CHECKS, *own, rows.HANG, rows.BERT} == {row.name for row in rows.ROWS}
    assert [row.name for row in rows.ROWS if row.name in own] == list(own)


def test_read(tmp_path: Path) -> None:
    """Of ranks that were ended: findings, and no facts."""
    assert read(tmp_path / "nothing") == ({}, {})
    file = tmp_path / "found.jsonl"
    file.write_text(json.dumps(Finding("ranks", "ok", "two").to_json()) + "\n")
    assert read(file) == ({"ranks": Finding("ranks", "ok", "two")}, {})


# README's table


def report_of(kind: str) -> dict[str, Any]:
    return {
        "device": kind,
        "on_hardware": True,
        "quick": False,
        "hardware": "8 x made up",
        "world": 8,
        "date": "2026-11-23",
        "commit": "abc",
        "command": "python -m launch.acceptance",
        "rows": rows.to_json(rows.fill(found(), kind=kind, reason="")),
    }


def test_readme_has_the_table_of_the_reports_that_are_there(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["--markdown"]) == 0
    table = capsys.readouterr().out
    text = (REPOSITORY / "launch" / "acceptance" / "README.md").read_text()
    match = re.search(r"<!-- acceptance -->\n\n(.*?)\n<!-- acceptance -->", text, re.DOTALL)
    assert match is not None
    assert match[1] == table, "python -m launch.acceptance --markdown prints that table"


def test_a_report_fills_its_column(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "npu.json"
    path.write_text(json.dumps(report_of("npu")))
    assert main(["--markdown", str(path)]) == 0
    table = capsys.readouterr().out
    assert f"| optimizers | ok: good | {rows.EMPTY} |" in table
    assert "| backward as a CUDA graph | - |" in table
    assert "| formats | ok: good | - |" in table
    assert "8 x made up, 8 ranks, 2026-11-23, abc" in table


def test_the_newest_reports_that_lie_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of each folder, and no traces."""
    monkeypatch.setattr(acceptance, "LAUNCH", tmp_path)
    for folder, kind, date in (
        ("npu", "npu", "2026-11-23"),
        ("npu", "npu", "2026-12-01"),
        ("gpu", "cuda", "2026-11-24"),
    ):
        results = tmp_path / folder / "results"
        results.mkdir(parents=True, exist_ok=True)
        (results / f"{date}.json").write_text(json.dumps({**report_of(kind), "date": date}))
        (results / f"{date}.trace.json").write_text("{}")
    assert main(["--markdown"]) == 0
    table = capsys.readouterr().out
    assert "| optimizers | ok: good | ok: good |" in table
    assert "2026-12-01" in table
    assert "2026-11-24" in table
    assert "2026-11-23" not in table


@pytest.mark.parametrize("change", [{"on_hardware": False}, {"quick": True}, {"device": "cpu"}])
def test_a_rehearsal_fills_none(
    change: Mapping[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "report.json"
    path.write_text(json.dumps({**report_of("npu"), **change}))
    assert main(["--markdown", str(path)]) == 2
    assert "it fills no column" in capsys.readouterr().err
