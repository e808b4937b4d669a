"""The edits of the page on moving a script, applied to the scripts of tests/launch/moving."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "shardfuse" / "optim" / "moving.md"
SCRIPTS = Path(__file__).with_name("moving")

_SECTION = re.compile(r"<!-- moving: (\S+\.py) -->\n(.*?)<!-- moving: end -->", re.DOTALL)
_DIFF = re.compile(r"^```diff\n(.*?)^```", re.MULTILINE | re.DOTALL)


class Move(NamedTuple):
    """A script of the folder, and the hunks of one section of the page."""

    script: str
    hunks: list[list[str]]


def moves() -> list[Move]:
    """Return the sections of the page in their order."""
    return [
        Move(script, [hunk for diff in _DIFF.findall(text) for hunk in _hunks(diff)])
        for script, text in _SECTION.findall(PAGE.read_text())
    ]


def _hunks(diff: str) -> list[list[str]]:
    """Return the lines of a diff between lines of an ellipsis."""
    hunks: list[list[str]] = [[]]
    for line in diff.splitlines():
        if line.strip() == "...":
            hunks.append([])
        else:
            hunks[-1].append(line)
    return hunks


def edited(move: Move) -> str:
    """Return the script with all hunks applied.

    Raises:
        ValueError: the lines that a hunk keeps or removes stand nowhere in the script, or twice.
    """
    lines = (SCRIPTS / move.script).read_text().splitlines()
    for hunk in move.hunks:
        old = [line[1:] for line in hunk if line[:1] in (" ", "-", "")]
        places = [
            place
            for place in range(len(lines) - len(old) + 1)
            if _is_at(lines[place : place + len(old)], old)
        ]
        if len(places) != 1:
            raise ValueError(f"{move.script} has these lines in {len(places)} places: {old}")
        place = places[0]
        depth = _depth(lines[place]) - _depth(old[0])
        new = [" " * depth + line[1:] for line in hunk if line[:1] in (" ", "+", "")]
        lines[place : place + len(old)] = [line.rstrip() for line in new]
    return "\n".join(lines) + "\n"


def _is_at(lines: list[str], old: list[str]) -> bool:
    """Return whether lines are those of a hunk, all of them as much further to the right."""
    depth = _depth(lines[0]) - _depth(old[0])
    return depth >= 0 and lines == [(" " * depth + line).rstrip() for line in old]


def _depth(line: str) -> int:
    return len(line) - len(line.lstrip())
