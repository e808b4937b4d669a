"""Rows into CSV, Markdown and PNG; nothing here is typed by hand.

results/PART.csv    every launch, with date, commit, hardware, versions and command
results/PART.md     tables of medians over launches, and what was to be reached
results/PART.png    the same as a picture
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launch.bench.options import Row
from launch.bench.plots import Panel, draw
from launch.bench.timing import median

ENVIRONMENT = ("date", "commit", "hardware", "versions", "command")
_MUST_AGREE = ("hardware", "versions")


@dataclass(frozen=True)
class Table:
    """A table of finished text."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]

    def __str__(self) -> str:
        lines = [self.header, ["---"] * len(self.header), *self.rows]
        body = "\n".join("| " + " | ".join(line) + " |" for line in lines)
        return f"## {self.title}\n\n{body}\n" if self.title else body + "\n"


@dataclass(frozen=True)
class Target:
    """What was to be reached, in words, what was measured, and whether it was reached."""

    text: str
    measured: str
    is_met: bool


@dataclass(frozen=True)
class Summary:
    """What a part's rows come to."""

    title: str
    method: str
    tables: Sequence[Table]
    targets: Sequence[Target] = field(default_factory=list)
    panels: Sequence[Panel] = field(default_factory=list)


def write_csv(path: Path, rows: Sequence[Row]) -> None:
    """Write all rows, with every column that any of them has, those about the machine last."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    names = [*(n for n in names if n not in ENVIRONMENT), *(n for n in names if n in ENVIRONMENT)]
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, names, restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def read_csv(path: Path) -> list[Row]:
    """Return the rows of a file; what looks like a number is one."""
    with path.open(newline="") as file:
        return [
            {key: _value(key, text) for key, text in row.items()} for row in csv.DictReader(file)
        ]


def _value(key: str, text: str) -> float | str:
    if key in ENVIRONMENT:
        return text
    try:
        return float(text)
    except ValueError:
        return text


def check_mergeable(old: Sequence[Row], environment: Row) -> None:
    """Refuse to mix rows of two machines.

    Raises:
        ValueError: hardware or versions differ from those of the rows there are.
    """
    for key in _MUST_AGREE:
        others = {row[key] for row in old} - {environment[key]}
        if others:
            raise ValueError(
                f"--append: the rows there are have {key} {sorted(others)}, this machine has "
                f"{environment[key]!r}. Choose another --out."
            )


def measured(rows: Iterable[Row]) -> list[Row]:
    """Return the rows that hold numbers."""
    return [row for row in rows if not row.get("note")]


def groups(rows: Iterable[Row], *keys: str) -> dict[tuple[Any, ...], list[Row]]:
    """Return the rows by the values of some columns, in order of appearance."""
    found: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        found.setdefault(tuple(row[key] for key in keys), []).append(row)
    return found


def values(rows: Iterable[Row], key: str) -> list[float]:
    """Return the numbers of a column."""
    return [float(row[key]) for row in rows if row.get(key, "") != ""]


def middle(rows: Iterable[Row], key: str) -> float:
    """Return the median of a column over launches; NaN where there is none."""
    found = values(rows, key)
    return median(found) if found else float("nan")


def spread(rows: Iterable[Row], key: str, digits: int = 2) -> str:
    """Return "median (min-max)" of a column over launches."""
    found = values(rows, key)
    if not found:
        return ""
    low, mid, high = (f"{f(found):.{digits}f}" for f in (min, median, max))
    return mid if len(found) == 1 else f"{mid} ({low}-{high})"


def save(part: str, rows: Sequence[Row], out: Path, summarise: Callable[..., Summary]) -> Summary:
    """Write Markdown and picture of a part next to its CSV."""
    summary = summarise(rows)
    lines = [f"# {summary.title}", "", summary.method, ""]
    for key in ENVIRONMENT:
        found = list(dict.fromkeys(str(row[key]) for row in rows))
        lines.append(f"* {key}: " + "; ".join(f"`{value}`" for value in found))
    lines += ["", f"All launches: [{part}.csv]({part}.csv).", ""]
    if summary.targets:
        reached = [
            [target.text, target.measured, "yes" if target.is_met else "**no**"]
            for target in summary.targets
        ]
        lines.append(str(Table("To be reached", ["what", "measured", "reached"], reached)))
    lines += [str(table) for table in summary.tables]
    if summary.panels:
        caption = "\n".join(str(rows[-1][key]) for key in ENVIRONMENT)
        draw(summary.panels, out / f"{part}.png", title=summary.title, caption=caption)
        lines.append(f"![{summary.title}]({part}.png)\n")
    (out / f"{part}.md").write_text("\n".join(lines))
    return summary
