"""What a check has found, and how it is told."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, get_args

Verdict = Literal["ok", "warning", "failed", "not run"]

VERDICTS = get_args(Verdict)

_MARKS = {"ok": "ok", "warning": "WARNING", "failed": "FAILED", "not run": "not run"}


@dataclass(frozen=True)
class Finding:
    """Of one check, on all ranks.

    Attributes:
        name: of the check.
        verdict: "failed": training would be wrong, or would not start.
        text: what was found.
        remedy: what to do about it; empty where there is nothing to do.
        values: what was measured.
    """

    name: str
    verdict: Verdict
    text: str
    remedy: str = ""
    values: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return it in JSON's types."""
        return asdict(self)

    def describe(self) -> str:
        """Return a line, and one for the remedy."""
        line = f"{_MARKS[self.verdict]:<8} {self.name:<26} {self.text}"
        return f"{line}\n{'':<36}-> {self.remedy}" if self.remedy else line


def merged(name: str, of_ranks: Sequence[Finding | None]) -> Finding:
    """Return the worst of what ranks have found; None: a rank has not answered."""
    silent = [rank for rank, finding in enumerate(of_ranks) if finding is None]
    if silent:
        return Finding(
            name,
            "failed",
            f"rank {', '.join(map(str, silent[:8]))} did not answer in time",
            "Look at what that rank has printed, and whether its process lives and its host can "
            "be reached.",
        )
    found = [finding for finding in of_ranks if finding is not None]
    order = ("failed", "warning", "not run", "ok")
    worst = min(found, key=lambda finding: order.index(finding.verdict))
    if worst.verdict == "ok":
        return found[0]
    by_text: dict[str, list[str]] = {}
    for rank, finding in enumerate(found):
        if finding.verdict == worst.verdict:
            by_text.setdefault(finding.text, []).append(str(rank))
    if by_text.keys() == {worst.text} and len(by_text[worst.text]) == len(found):
        return worst
    text = "; ".join(f"rank {', '.join(r[:8])}: {t}" for t, r in list(by_text.items())[:4])
    return Finding(name, worst.verdict, text, worst.remedy, worst.values)
