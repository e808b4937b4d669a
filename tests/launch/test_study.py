"""The study of optimizers over batch sizes: what it asks for, and that it goes on after any end."""

from __future__ import annotations

import csv
import json
import math
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from largebatch.design import GRID_FACTOR, METHODS, QUICK, WHOLE, Design, Trial
from largebatch.report import largest_held, make_table, write_report
from largebatch.study import Study
from pretraining.errors import UsageError

from tests.launch import jobs

pytestmark = pytest.mark.timeout(400)

SCRIPT = jobs.SCRIPT.with_name("study.py")
SMALL = Design(
    methods=("lamb-google", "adamw"),
    batches=(4, 16, 64),
    samples=256,
    seeds=3,
    extensions=2,
    options=(),
)


def best_lr(trial: Trial) -> float:
    """Return the learning rate that an imagined optimizer likes: ever larger ones, to 16."""
    return METHODS[trial.method].first_lr * 3 * min(trial.batch, 16) / 4


def imagined(trial: Trial) -> float:
    """Return a loss with one valley over the learning rate, and one for each seed and batch."""
    if trial.lr > 8 * best_lr(trial):
        return math.inf
    depth = 5.0 if trial.batch <= 16 else 5.5
    return depth + 0.1 * math.log2(trial.lr / best_lr(trial)) ** 2 + 0.01 * trial.seed


def finish(design: Design, order: random.Random) -> dict[Trial, float]:
    """Answer what is wanted, in any order, until nothing is."""
    outcomes: dict[Trial, float] = {}
    while wanted := list(design.wanted(outcomes)):
        assert len(set(wanted)) == len(wanted)
        trial = order.choice(wanted)
        outcomes[trial] = imagined(trial)
    return outcomes


def test_the_runs_do_not_depend_on_the_order_in_which_they_end() -> None:
    """So that a study may be stopped anywhere, and run on any number of cores."""
    found = [finish(SMALL, random.Random(seed)) for seed in range(5)]
    assert all(other == found[0] for other in found[1:])


def test_the_search_ends_beside_the_best_learning_rate() -> None:
    outcomes = finish(SMALL, random.Random(0))
    for method in SMALL.methods:
        searches = list(SMALL.searches(method, outcomes))
        assert [search.batch for search in searches] == list(SMALL.batches)
        for search in searches:
            assert search.best is not None
            off = abs(math.log2(search.best.lr / best_lr(search.best)))
            assert off <= math.log2(GRID_FACTOR) / 2 + 0.01
            assert not search.is_at_edge
            assert len(search.chosen()) == SMALL.seeds
        starts = [search.start for search in searches]
        best = [search.best.lr for search in searches if search.best is not None]
        assert starts[1:] == [pytest.approx(lr * 2) for lr in best[:-1]]  # sqrt(16 / 4)


def test_an_edge_is_followed_so_far_and_marked() -> None:
    without = Design.of(SMALL, {"extensions": 0})
    outcomes = finish(without, random.Random(0))
    first = next(without.searches("adamw", outcomes))
    assert len(first.rungs()) == 3
    assert first.is_at_edge
    assert "^)" in make_table(without, outcomes)


def test_what_diverges_is_worse_than_all_else() -> None:
    design = Design.of(SMALL, {"batches": [4], "methods": ["adamw"], "extensions": 1})
    outcomes: dict[Trial, float] = {}
    while wanted := list(design.wanted(outcomes)):
        outcomes[wanted[0]] = math.inf
    (search,) = design.searches("adamw", outcomes)
    assert [trial.lr for trial in outcomes if not trial.seed] == [5e-4, 1e-3, 2e-3, 2.5e-4]
    assert "diverged" in make_table(design, outcomes)
    assert largest_held([search]) is None


def test_the_table_says_up_to_where_a_loss_is_held() -> None:
    """At 64 it is a tenth higher: the largest batch within 2 % is 16."""
    outcomes = finish(SMALL, random.Random(0))
    table = make_table(SMALL, outcomes)
    rows = [line for line in table.splitlines() if line.startswith(("| lamb", "| adamw"))]
    assert len(rows) == 2
    assert all(row.endswith("| 16 |") for row in rows)
    assert "\u00b1 0.010" in rows[0]
    assert "missing" not in table
    one = dict(list(outcomes.items())[:1])
    assert "are missing" in make_table(SMALL, one)


def test_the_table_says_how_the_learning_rate_falls() -> None:
    assert "then linear to 0." in make_table(SMALL, {})
    other = Design.of(SMALL, {"options": ["--decay-power", "0.5"]})
    assert "linear" not in (table := make_table(other, {}))
    assert "--decay-power 0.5 to 0." in table


@pytest.mark.filterwarnings("error")
def test_a_report_may_be_had_at_any_time(tmp_path: Path) -> None:
    """From no run to all, the picture and the files are written."""
    outcomes = finish(SMALL, random.Random(0))
    with Study.open(tmp_path / "study", SMALL) as study:
        for number in (0, 1, 7, len(outcomes)):
            study.outcomes = dict(list(outcomes.items())[:number])
            write_report(study)
            assert len(rows_of(study.folder)) == number
            assert (study.folder / "study.png").stat().st_size > 10_000


def test_a_report_of_no_study_begins_none(tmp_path: Path) -> None:
    refused = run(tmp_path, [sys.executable, str(SCRIPT), "mistyped", "--report"])
    assert refused.returncode == 2
    assert "study.py: error: mistyped has no study" in refused.stderr
    assert not list(tmp_path.iterdir())


def test_the_page_has_what_was_measured() -> None:
    """Its table is the one of the results beside it, and nothing is missing from these."""
    folder = SCRIPT.parent
    with (folder / "results" / "study.csv").open() as file:
        outcomes = {
            Trial(row["method"], int(row["batch"]), float(row["lr"]), int(row["seed"])): float(
                row["held_out_mlm_loss"]
            )
            for row in csv.DictReader(file)
        }
    table = make_table(WHOLE, outcomes)
    assert "missing" not in table
    assert table in (folder / "study.md").read_text()


def test_designs_that_cannot_be_are_refused() -> None:
    for changes, words in (
        ({"batches": [16, 8]}, "must rise"),
        ({"batches": [12]}, "does not divide"),
        ({"samples": 0}, "at least 1"),
        ({"options": ["--lr", "1"]}, "--lr is the study's own"),
        ({"options": ["--lr=1"]}, "--lr is the study's own"),
        ({"options": ["--global-batch-size", "4"]}, "--global-batch-size is the study's own"),
        ({"options": ["--lamb-variant=apex"]}, "--lamb-variant is the study's own"),
        ({"options": ["--no-such-option"]}, "unrecognized"),
    ):
        with pytest.raises(UsageError, match=words):
            Design.of(SMALL, changes)
    for design in (WHOLE, QUICK):
        design.check()
        assert design.batches[-1] == 32 * design.batches[0]


# Real runs


def command(folder: str, text: Path) -> list[str]:
    study = [sys.executable, str(SCRIPT), folder, "--jobs", "2", "--samples", "48", "--seeds", "1"]
    study += ["--batches", "12", "--methods", "adamw", "--", "--corpus", str(text)]
    # Prepared once for all: a vocabulary that is made again may be another one.
    study += ["--data-dir", "data"]
    return [*study, "--vocab-size", "120", "--seq-len", "24", "--eval-samples", "12"]


def run(cwd: Path, arguments: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(arguments, cwd=cwd, capture_output=True, text=True, timeout=600)


def rows_of(folder: Path) -> list[dict[str, str]]:
    with (folder / "results.csv").open() as file:
        return list(csv.DictReader(file))


def wait_for_runs(process: subprocess.Popen[bytes], folder: Path, number: int) -> None:
    """Wait until so many runs have begun."""
    deadline = time.monotonic() + 300
    while len(list(folder.glob("trials/*/metrics.jsonl"))) < number:
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.timeout(1500)  # fifteen starts of Python
def test_a_study_that_is_killed_goes_on(tmp_path: Path, text_file: Path) -> None:
    """Killed with its runs, and stopped, it ends with the rows of one that was not, by one line."""
    whole = run(tmp_path, command("whole", text_file))
    assert whole.returncode == 0, whole.stdout + whole.stderr
    rows = rows_of(tmp_path / "whole")
    assert len(rows) >= 3
    assert (tmp_path / "whole" / "study.png").stat().st_size > 10_000
    assert not list(tmp_path.glob("whole/trials/*/checkpoints"))

    line, folder = command("broken", text_file), tmp_path / "broken"
    killed = subprocess.Popen(line, cwd=tmp_path, start_new_session=True)
    wait_for_runs(killed, folder, 2)
    os.killpg(killed.pid, signal.SIGKILL)
    killed.wait(60)
    stopped = subprocess.Popen(line, cwd=tmp_path)
    wait_for_runs(stopped, folder, 3)
    stopped.terminate()
    assert stopped.wait(300) == 1
    assert len(rows_of(folder)) < len(rows)
    again = run(tmp_path, line)
    assert again.returncode == 0, again.stdout + again.stderr
    assert rows_of(folder) == rows
    report = run(tmp_path, [*line[:3], "--report"])
    assert report.returncode == 0
    assert (folder / "table.md").read_text() in report.stdout


def test_a_run_that_fails_ends_the_study_with_its_words(tmp_path: Path) -> None:
    failed = run(tmp_path, command("study", tmp_path / "no-such-text"))
    assert failed.returncode == 2
    assert "adamw-12-0.0005-seed0 failed" in failed.stderr
    assert "no-such-text" in failed.stderr


def test_one_study_in_a_folder(tmp_path: Path) -> None:
    """Another design in it is refused, and a second one at the same time."""
    folder = tmp_path / "study"
    with Study.open(folder, SMALL), pytest.raises(UsageError, match="wait for it"):
        Study.open(folder, SMALL)
    with pytest.raises(UsageError, match="other options"):
        Study.open(folder, WHOLE)
    with Study.open(folder, None) as study:
        assert study.design == SMALL
    (folder / "study.json").write_text("{}")
    with pytest.raises(UsageError, match="cannot be read"):
        Study.open(folder, None)


def test_a_diverged_run_is_a_result(tmp_path: Path, text_file: Path) -> None:
    """It says so in its metrics, and the study goes on with lower learning rates."""
    folder = tmp_path / "study"
    design = Design.of(SMALL, {"methods": ["adamw"], "batches": [4], "seeds": 1})
    with Study.open(folder, design) as study:
        trial = next(iter(design.wanted({})))
        path = folder / "trials" / trial.name / "metrics.jsonl"
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps({"kind": "diverged", "step": 2, "lr": trial.lr}) + "\n")
        study.__enter__()
        assert study.outcomes == {trial: math.inf}
