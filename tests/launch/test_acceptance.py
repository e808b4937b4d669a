"""launch/acceptance: on two CPU ranks by its script, and what its rows say of made-up findings."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from launch.acceptance import bert, rows
from launch.acceptance.__main__ import main, read
from launch.acceptance.order import judged
from launch.acceptance.ranks import QUICK, own_checks
from launch.acceptance.speed import as_a_graph
from launch.acceptance.steps import host_synchronization
from shardfuse import ShardedAdamW
from shardfuse.comm.base import SingleRank
from shardfuse.doctor import Finding
from shardfuse.doctor.checks import CHECKS

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


def test_quick_on_two_ranks(tmp_path: Path) -> None:
    """The whole command, with small sizes: a report, a trace and a table; exit code 0."""
    report_file = tmp_path / "results" / "report.json"
    result = script(
        "npu/acceptance.sh", "--quick", DEVICE="cpu", NPROC="2", REPORT=str(report_file)
    )
    assert result.returncode == 0, result.stdout + result.stderr
    report = check_report(report_file)
    verdicts = {row["name"]: row["verdict"] for row in report["rows"]}
    assert verdicts.pop(rows.BERT) == "not run"  # a few steps are not a hundred
    assert {verdicts[name] for name in verdicts.keys() - HARDWARE} == {"ok"}, report
    values = {row["name"]: row["values"] for row in report["rows"]}
    assert len(values["bandwidth"]) == 8
    assert values["memory against the plan"]["held_nbytes"] > 0
    assert values["update against copy"]["shares"].keys() == {"adam", "lamb"}
    assert values["step against DDP"]["ratio"] > 0
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


def test_wrong_use(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """What cannot be done is one line."""
    assert main(["--device", "npu"]) == 2
    assert "torch finds no npu here, but cpu" in capsys.readouterr().err
    assert main(["--device", "cpu", "--nproc-per-node", "0"]) == 2
    assert "at least 1" in capsys.readouterr().err
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
        ("npu", {"step as a CUDA graph"}),
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
    assert before | {*CHECKS, *own, rows.BERT} == {row.name for row in rows.ROWS}
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
    text = (REPOSITORY / "README.md").read_text()
    match = re.search(r"<!-- acceptance -->\n\n(.*?)\n<!-- acceptance -->", text, re.DOTALL)
    assert match is not None
    assert match[1] == table, "python -m launch.acceptance --markdown prints README's table"


def test_a_report_fills_its_column(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "npu.json"
    path.write_text(json.dumps(report_of("npu")))
    assert main(["--markdown", str(path)]) == 0
    table = capsys.readouterr().out
    assert f"| optimizers | ok: good | {rows.EMPTY} |" in table
    assert "| step as a CUDA graph | - |" in table
    assert "| formats | ok: good | - |" in table
    assert "8 x made up, 8 ranks, 2026-11-23, abc" in table


@pytest.mark.parametrize("change", [{"on_hardware": False}, {"quick": True}, {"device": "cpu"}])
def test_a_rehearsal_fills_none(
    change: Mapping[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "report.json"
    path.write_text(json.dumps({**report_of("npu"), **change}))
    assert main(["--markdown", str(path)]) == 2
    assert "it fills no column" in capsys.readouterr().err


# Single checks


def event(name: str, start: float, length: float = 1.0, tid: int = 1) -> dict[str, Any]:
    return {"name": name, "ts": start, "dur": length, "tid": tid, "ph": "X"}


GOOD = [
    event("shardfuse::reduce_scatter b0", 0),
    event("shardfuse::reduce_scatter b1", 1),
    event("shardfuse::wait_reduce_scatter", 2),
    event("aten::addcdiv_", 4),
    event("shardfuse::all_gather b0", 5),
    event("shardfuse::wait_reduce_scatter", 6),
    event("aten::addcdiv_", 8),
    event("shardfuse::all_gather b1", 9),
]


def test_order_is_right() -> None:
    found = judged(GOOD, is_reduced=True, device=CPU)
    assert (found.verdict, found.values) == ("ok", {"reduced": [0, 1], "gathered": [0, 1]})
    assert judged([], is_reduced=False, device=CPU).verdict == "not run"


@pytest.mark.parametrize(
    ("events", "words"),
    [
        ([*GOOD[:6], GOOD[7]], "bucket 1 is not reduced, then updated"),
        ([*GOOD[:3], *GOOD[4:]], "bucket 0 is not reduced, then updated"),
        (GOOD[:7], "buckets [0, 1] are reduced, [0] gathered"),
        ([event("shardfuse::all_gather b0", -1), *GOOD[:4], *GOOD[5:]], "bucket 0 is not"),
        ([*GOOD[:6], event("aten::addcdiv_", 8, tid=2), GOOD[7]], "bucket 1 is not"),
        ([], "buckets [] are reduced"),
    ],
)
def test_order_is_wrong(events: list[dict[str, Any]], words: str) -> None:
    found = judged(events, is_reduced=True, device=CPU)
    assert found.verdict == "failed"
    assert words in found.text


def test_order_on_a_device() -> None:
    """The device's own collectives are looked for, too."""
    cuda = torch.device("cuda", 0)
    assert judged(GOOD, is_reduced=True, device=cuda).verdict == "warning"
    kernels = [event("ncclDevKernel_ReduceScatter_Sum_f32", 3), event("hcom_allGather_", 9)]
    found = judged([*GOOD, *kernels], is_reduced=True, device=cuda)
    assert found.verdict == "ok"
    assert found.values["on the device"] == [kernel["name"] for kernel in kernels]


def test_a_wait_of_the_host_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    modes: list[str] = []
    comm = SingleRank()
    good = host_synchronization(comm, CPU, size="tiny", set_mode=modes.append)
    assert (good.verdict, modes) == ("ok", ["error", "default"])
    step = ShardedAdamW.step

    def waits(self: Any, *args: Any) -> Any:
        if modes[-1] == "error":
            raise RuntimeError("called a synchronizing CUDA operation")
        return step(self, *args)

    monkeypatch.setattr(ShardedAdamW, "step", waits)
    bad = host_synchronization(comm, CPU, size="tiny", set_mode=modes.append)
    assert (bad.verdict, modes[-1]) == ("failed", "default")
    assert "test_acceptance.py" in bad.text
    assert "synchronizing CUDA operation" in bad.text


def refuses(step: Callable[[], object]) -> Callable[[], object]:
    raise RuntimeError("operation not permitted when stream is capturing\nmore")


def runs_once(step: Callable[[], object]) -> Callable[[], object]:
    left = [step]
    return lambda: left.pop()() if left else None


@pytest.mark.parametrize(
    ("capture", "verdict", "words"),
    [
        (lambda step: step, "ok", "make the steps"),
        (refuses, "warning", "not possible: operation not permitted when stream is capturing"),
        (lambda step: lambda: None, "warning", "not possible: what a replay does differs"),
        (runs_once, "warning", "not possible: a second replay repeats"),
    ],
)
def test_a_graph(capture: Any, verdict: str, words: str) -> None:
    """It is one only if two replays are two steps."""
    found = as_a_graph(SingleRank(), CPU, capture=capture)
    assert found.verdict == verdict
    assert found.text.startswith(words) or words in found.text
    assert "more" not in found.text


@pytest.mark.parametrize(
    ("losses", "last", "verdict"),
    [([7.6, 6.1], 100, "ok"), ([7.6, 7.5], 100, "failed"), ([7.6], 40, "failed")],
)
def test_bert(losses: list[float], last: int, verdict: str) -> None:
    records = [{"kind": "eval", "step": 0, "mlm_loss": loss} for loss in losses]
    records.insert(1, {"kind": "train", "step": last})
    assert bert.judged(records, 100).verdict == verdict


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5, 8, 16, 64])
def test_bert_has_samples_for_all_ranks(num_ranks: int) -> None:
    """launch/bert accepts the command."""
    from pretraining.config import check_options

    command = bert.command(num_ranks, steps=1, work=Path("work"), words=20_000)
    check_options(command[1:], num_ranks)
