"""The rows of a report: which there are, what of them only hardware can fill, and their table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import torch

from shardfuse.doctor import Finding
from shardfuse.doctor.host import installed_version

Needs = Literal["", "hardware", "npu", "cuda"]
Report = dict[str, Any]

MISALIGNED = "bandwidth, 4 bytes off"
HANG = "a rank that hangs"
BERT = "100 steps of a tiny BERT"
COLUMNS = {"npu": "Ascend NPU, HCCL", "cuda": "NVIDIA GPU, NCCL"}
EMPTY = "not run on hardware"
_WORDS = {"hardware": "hardware", "npu": "an Ascend NPU", "cuda": "a CUDA GPU"}
_CELL = 110
"""Characters of a cell; the report has all of the text."""


@dataclass(frozen=True)
class Row:
    """One thing that is looked at.

    Attributes:
        name: of the check; the doctor's own have the doctor's names.
        needs: "hardware": any accelerator; "npu" or "cuda": that one. Elsewhere it is not run, or
            is a rehearsal that says nothing of hardware.
    """

    name: str
    needs: Needs = ""

    def applies_to(self, kind: str) -> bool:
        """Return whether a device of that kind could fill it."""
        return self.needs in ("", "hardware", kind)


ROWS = (
    Row("ranks"),
    Row("torch"),
    Row("torch_npu and CANN", "npu"),
    Row("environment"),
    Row("process group"),
    Row("sums over ranks"),
    Row("inf and nan"),
    Row("minus zero"),
    Row("overflow of one rank"),
    Row("alignment"),
    Row("formats", "npu"),
    Row("NPU settings", "npu"),
    Row("room for communicators", "npu"),
    Row("optimizers"),
    Row("LAMB's norms"),
    Row("save and load"),
    Row("async save"),
    Row("bandwidth", "hardware"),
    Row("all-gather in place"),
    Row("bf16 params"),
    Row("absent gradients"),
    Row("sharding options"),
    Row("fused and compiled kernels", "hardware"),
    Row("order of a step"),
    Row("memory against the plan", "hardware"),
    Row("peak memory of a step", "hardware"),
    Row("no host synchronization", "hardware"),
    Row("host waits by option", "hardware"),
    Row("params in flight", "hardware"),
    Row("update against copy", "hardware"),
    Row("bucket sizes", "hardware"),
    Row("step against DDP", "hardware"),
    Row("backward as a CUDA graph", "cuda"),
    Row(MISALIGNED, "hardware"),
    Row(HANG),
    Row(BERT),
)
"""In the order in which they are filled: the doctor's, this package's, and two more launches.

After what a transport may refuse nothing more is sent.
"""


@dataclass(frozen=True)
class Filled:
    """A row of a report."""

    name: str
    verdict: str
    text: str
    remedy: str
    needs_hardware: bool
    values: dict[str, Any] = field(default_factory=dict)


def is_hardware(device: torch.device) -> bool:
    """Return whether ``device`` is an accelerator, and nothing that stands for one."""
    if device.type == "npu":
        return (installed_version("torch-npu") or installed_version("torch_npu")) is not None
    return device.type == "cuda" and torch.cuda.is_available()


def fill(found: Mapping[str, Finding], *, kind: str | None, reason: str) -> list[Filled]:
    """Return all rows.

    Args:
        found: by the name of the row.
        kind: of the accelerator; None: this is no hardware. What needs another is not run,
            whatever a rehearsal has found but a failure.
        reason: why findings are missing; the first missing one has failed so, others are not run.
    """
    filled: list[Filled] = []
    has_ended = False
    for row in ROWS:
        finding = found.get(row.name)
        if finding is None:
            finding = Finding(row.name, "failed", reason, "See what the ranks have printed.")
            if has_ended:
                finding = Finding(row.name, "not run", "the ranks ended before it")
            has_ended = True
        verdict, text, remedy = finding.verdict, finding.text, finding.remedy
        if verdict != "failed" and row.needs and (kind is None or not row.applies_to(kind)):
            needed = f"needs {_WORDS[row.needs]}"
            verdict, text, remedy = "not run", f"{needed}; here: {text}", ""
        filled.append(Filled(row.name, verdict, text, remedy, bool(row.needs), finding.values))
    return filled


def describe(rows: Sequence[Filled]) -> str:
    """Return the table that is printed."""
    lines = []
    for row in rows:
        mark = row.verdict.upper() if row.verdict in ("failed", "warning") else row.verdict
        lines.append(f"{mark:<8} {row.name:<26} {row.text}")
        if row.remedy and row.verdict != "ok":
            lines.append(f"{'':<36}-> {row.remedy}")
    return "\n".join(lines)


def to_json(rows: Sequence[Filled]) -> list[dict[str, Any]]:
    """Return rows in JSON's types."""
    return [asdict(row) for row in rows]


def markdown(reports: Mapping[str, Report]) -> str:
    """Return the table of this folder's README, a column for each kind of accelerator.

    Args:
        reports: by kind, "npu" and "cuda"; a column without one is empty.
    """
    return "\n".join(_lines(reports)) + "\n"


def _lines(reports: Mapping[str, Report]) -> Iterator[str]:
    yield f"| | {' | '.join(COLUMNS.values())} |"
    yield "|---|" + "---|" * len(COLUMNS)
    cells = {
        kind: {row["name"]: _cell(row) for row in report["rows"]}
        for kind, report in reports.items()
    }
    for row in ROWS:
        shown = [
            cells.get(kind, {}).get(row.name, EMPTY) if row.applies_to(kind) else "-"
            for kind in COLUMNS
        ]
        yield f"| {row.name} | {' | '.join(shown)} |"
    for kind, report in reports.items():
        facts = (report["hardware"], f"{report['world']} ranks", report["date"], report["commit"])
        yield ""
        yield f"{COLUMNS[kind]}: {', '.join(facts)}; `{report['command']}`."


def _cell(row: Mapping[str, Any]) -> str:
    text = f"{row['verdict']}: {row['text']}".replace("|", "/")
    return text if len(text) <= _CELL else text[: _CELL - 3] + "..."
