"""Rows become tables: medians, targets met or missed, merging."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from launch.bench import report, summaries
from launch.bench.__main__ import main

WHERE = {"date": "d", "commit": "c", "hardware": "h", "versions": "v", "command": "x"}


def step_row(method: str, ratio: float, **other: Any) -> dict[str, Any]:
    numbers = {
        "family": "lamb" if "LAMB" in method or "lamb" in method else "adam",
        "shapes": "bert-base",
        "numel": 100,
        "world_size": 2,
        "note": "",
        "step_ms": 10 * ratio,
        "peak_p": 3.1,
        "state_p": 1.0,
        "sent_p": 1.0,
    }
    return {"method": method, "ratio": ratio, **numbers, **other, **WHERE}


def met(summary: report.Summary) -> dict[str, bool]:
    return {target.text: target.is_met for target in summary.targets}


def test_median_and_spread_over_launches() -> None:
    """A cell is the median of the launches, with their range."""
    rows = [step_row("shardfuse adam", ratio) for ratio in (1.4, 1.1, 1.2)]
    summary = summaries.step(rows)
    assert summary.tables[0].rows[0][:2] == ["shardfuse adam", "1.20 (1.10-1.40)"]
    assert met(summary)["Adam, ratio <= 1.2"]


def test_targets_are_missed_where_a_peer_is_faster() -> None:
    """Being ahead is measured against the fastest peer of the same rule."""
    rows = [
        step_row("shardfuse adam", 1.25),
        step_row("shardfuse adam, real backward", 1.3, peak_p=3.3),
        step_row("DDP", 1.1),
        step_row("other", 5.0),
        step_row("shardfuse lamb", 1.4),
        step_row("replicated LAMB", 3.0),
    ]
    outcome = met(summaries.step(rows))
    assert outcome == {
        "Adam, ratio <= 1.2": False,
        "LAMB, ratio <= 1.5": True,
        "adam: ratio below that of every other, DDP being the next": False,
        "lamb: ratio below that of every other, replicated LAMB being the next": True,
        "Adam, peak memory in P (real backward) <= 3.2": False,
    }


@pytest.mark.parametrize(("sent", "is_met"), [(1.005, True), (1.5, False), (0.5, False)])
def test_bytes_sent_are_held_against_their_formula(sent: float, is_met: bool) -> None:
    """More than 2 (W-1)/W P is missed, and so is less: it was not counted then."""
    summary = summaries.step([step_row("shardfuse adam, sockets only", 1.0, sent_p=sent)])
    assert summary.targets[-1].is_met == is_met


def test_update_targets_are_shares_of_the_triad() -> None:
    """Adam needs 0.9 and to be faster than torch's fused one."""

    def row(method: str, step_ms: float, share: float) -> dict[str, Any]:
        numbers = {"numel": 100, "step_ms": step_ms, "share": share, "gb_per_s": 1.0}
        return {"method": method, "family": "adam", "triad_gb_per_s": 30.0, **numbers}

    rows = [row("shardfuse adam, compile", 2.0, 0.89), row("torch Adam, fused", 3.0, 0.6)]
    assert list(met(summaries.update(rows)).values()) == [False, True]


def test_tensor_target_compares_most_with_fewest() -> None:
    """10,000 tensors against 10 of the same launch, whatever lies between; the middle launch."""

    def launch(index: int, **step_ms: float) -> list[dict[str, Any]]:
        same = {"axis": "tensors", "method": "shardfuse adam", "numel": 1e6, "ratio": 1.0}
        return [
            {**same, "round": index, "tensors": name.removeprefix("x"), "step_ms": value}
            for name, value in step_ms.items()
        ]

    slow, odd = launch(0, x10=20.0, x1000=90.0, x10000=25.8), launch(1, x10=10.0, x10000=30.0)
    assert list(met(summaries.scaling(slow + odd + launch(2, x10=10.0, x10000=12.9))).values()) == [
        True
    ]
    assert list(met(summaries.scaling(slow + odd + launch(2, x10=9.9, x10000=12.9))).values()) == [
        False
    ]


def links_row(method: str, rate: str, ratio: float, **other: Any) -> dict[str, Any]:
    numbers = {"world_size": 2.0, "numel": 100.0, "sent_p": 1.0, "peak_p": 4.0, "loss": 9.0}
    times = {"step_s": 2 * ratio, "exposed_s": 2 * ratio - 1.0, "ratio": ratio}
    return {"method": method, "rate": rate, "note": "", **numbers, **times, **other, **WHERE}


def test_links_targets_are_of_two_hosts_and_one_rate() -> None:
    """Medians over rounds; three hosts have a table and no target."""
    rows = [
        links_row("DDP + torch Adam fused", "1gbit", 1.0),
        *(links_row("shardfuse adam", "1gbit", ratio) for ratio in (0.7, 0.8, 0.9)),
        links_row("shardfuse lamb", "1gbit", 0.95),
        links_row("shardfuse adam", "4gbit", 0.95),
        links_row("shardfuse adam", "1gbit", 2.0, world_size=3.0),
        {"method": "peer", "rate": "1gbit", "world_size": 2.0, "note": "failed", **WHERE},
    ]
    summary = summaries.links(rows)
    assert met(summary) == {
        "shardfuse adam at 1gbit, step of DDP + torch Adam fused <= 0.85": True,
        "shardfuse adam at 1gbit, exposed time at most 0.5 of DDP's": False,
        "shardfuse lamb at 1gbit, step of DDP + torch Adam fused <= 0.9": False,
        "shardfuse adam at 4gbit, step of DDP + torch Adam fused <= 0.95": True,
    }
    titles = ["1gbit, 2 hosts", "4gbit, 2 hosts", "1gbit, 3 hosts", "Without numbers"]
    assert [table.title for table in summary.tables] == titles
    fastest = summary.tables[0].rows[0]
    assert fastest[:4] == [
        "shardfuse adam",
        "1.60 (1.40-1.80)",
        "0.60 (0.40-0.80)",
        "0.80 (0.70-0.90)",
    ]


def test_trace_adds_up_its_lanes() -> None:
    """Spans are drawn by lane, in the order of the lanes."""
    same = {"method": "shardfuse adam", "rate": "1gbit", "note": "", **WHERE}
    times = [("step", 5.0, 2.0), ("forward", 0.0, 1.0), ("forward", 9.0, 1.5)]
    rows = [{**same, "lane": lane, "start_ms": start, "ms": ms} for lane, start, ms in times]
    summary = summaries.trace(rows)
    assert summary.tables[0].rows[0] == ["forward", "2", "2.5"]
    assert summary.panels[0].spans["forward"] == [(0.0, 1.0), (9.0, 1.5)]
    assert next(iter(summary.panels[0].spans)) == "forward"


def test_csv_keeps_rows_of_different_columns(tmp_path: Path) -> None:
    """A row without numbers has empty cells; provenance comes last and stays text."""
    rows = [step_row("a", 1.5), {"method": "b", "note": "not installed", **WHERE, "commit": "123"}]
    report.write_csv(tmp_path / "step.csv", rows)
    back = report.read_csv(tmp_path / "step.csv")
    assert back[0]["ratio"] == 1.5
    assert back[1]["ratio"] == ""
    assert back[1]["commit"] == "123"
    assert list(back[0])[-len(WHERE) :] == list(WHERE)


def test_report_is_written_from_the_csv_alone(tmp_path: Path) -> None:
    """Tables come from all rows there are; what gave no numbers is listed with the reason."""
    absent = {"method": "peer", "note": "not installed", **WHERE}
    report.write_csv(tmp_path / "step.csv", [step_row("shardfuse adam", 1.0), absent])
    assert main(["report", "--out", str(tmp_path)]) == 0
    text = (tmp_path / "step.md").read_text()
    assert "| shardfuse adam | 1.00 |" in text
    assert "| peer | not installed |" in text
    assert (tmp_path / "step.png").exists()


def test_rows_of_another_machine_are_not_merged() -> None:
    """Appending to results of other hardware or versions is refused; another commit is not."""
    report.check_mergeable([step_row("a", 1.0)], {**WHERE, "commit": "other"})
    for key in ("hardware", "versions"):
        with pytest.raises(ValueError, match=f"have {key}"):
            report.check_mergeable([step_row("a", 1.0)], {**WHERE, key: "other"})
