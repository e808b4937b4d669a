"""Loss curves of a small GPT: every method trains, and the page says how far the curves differ."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from launch.bench import bert
from launch.bench.__main__ import main
from launch.bench.bench_curves import (
    BASELINE,
    BERT_PART,
    EQUAL,
    GPT_PART,
    RATES,
    curve,
    largest_differences,
    summary,
)
from launch.bench.report import read_csv

pytestmark = [
    pytest.mark.timeout(280),
    pytest.mark.cpu_only("its processes are told nothing of it"),
]


@pytest.mark.exhaustive
@pytest.mark.timeout(900)
def test_every_method_trains(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Methods of AdamW's rule follow DDP with torch's AdamW from the same weights and batches."""
    assert main(["curves", "--quick", "--out", str(tmp_path)]) == 0, capsys.readouterr().out
    rows = read_csv(tmp_path / "curves.csv")
    assert [row["method"] for row in rows] == [*EQUAL, *bert.METHODS, *RATES]
    for row in rows:
        losses = [loss for _, loss in curve(row)]
        assert losses[-1] < losses[0], row["method"]
    for part in (GPT_PART, BERT_PART):
        own = [row for row in rows if row["part"] == part]
        assert own[0]["method"] == BASELINE
        assert largest_differences(own, part)[0] < 3e-3  # of the bf16 wire
        exact = [row for row in own if "bf16" not in row["method"]]
        assert largest_differences(exact, part)[0] < 1e-5
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def run(part: str, method: str, seed: int, losses: list[float], lr: float = 1.0) -> dict[str, Any]:
    points = " ".join(f"{step}:{loss}" for step, loss in enumerate(losses, 1))
    names = {"part": part, "size": "tiny", "method": method, "lr": lr, "seed": float(seed)}
    return {**names, "note": "", "loss": losses[-1], "curve": points}


def test_curves_are_compared_with_another_seed() -> None:
    rows = [
        run("equal rates", BASELINE, 0, [3.0, 2.0]),
        run("equal rates", BASELINE, 1, [3.1, 2.0]),
        run("equal rates", "AdamW, near", 0, [3.05, 2.0]),
        run("equal rates", "AdamW, far", 0, [3.0, 2.2]),
    ]
    assert largest_differences(rows) == (pytest.approx(0.2), pytest.approx(0.1))
    assert [target.is_met for target in summary(rows).targets] == [True, False]


def test_the_best_rate_is_shown_with_its_seeds() -> None:
    rows = [
        run("tuned", "one", 0, [3.0], lr=1.0),
        run("tuned", "one", 0, [2.0], lr=2.0),
        run("tuned", "one", 1, [2.4], lr=2.0),
    ]
    (line,) = summary(rows).tables[0].rows
    assert list(line) == ["one", "3.0000 (1), 2.0000 (2)", "2.2000 \u00b1 0.2000 (2 seeds)"]
