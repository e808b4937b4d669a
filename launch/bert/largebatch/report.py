"""The table, the CSV file and the picture of a study, also of one that is not done."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from pretraining.files import blaming, write_whole
from pretraining.parser import given

from largebatch.design import GRID_FACTOR, WARMUP, Design, Outcomes, Search
from largebatch.study import Study

TABLE_FILE, CSV_FILE, PICTURE_FILE = "table.md", "results.csv", "study.png"

TOLERANCE = 0.02
"""A batch is held where its loss is at most so much above that of the smallest batch."""


def write_report(study: Study) -> None:
    """Write the files into the study's folder, and print the table; raises `UsageError`."""
    design, outcomes = study.design, study.outcomes
    table = make_table(design, outcomes)
    with blaming("folder", study.folder):
        write_whole(study.folder / TABLE_FILE, table)
        write_whole(study.folder / CSV_FILE, _csv(outcomes))
        _draw(design, outcomes, study.folder / PICTURE_FILE)
    print(f"\n{table}\nfiles: {study.folder} ({TABLE_FILE}, {CSV_FILE}, {PICTURE_FILE})")


def make_table(design: Design, outcomes: Outcomes) -> str:
    """Return the table in Markdown: a row for each method, a column for each batch."""
    missing = sum(1 for _ in design.wanted(outcomes))
    seeds = "one seed" if design.seeds == 1 else f"mean and half-range of {design.seeds} seeds"
    is_linear = not given(design.options) & {"decay_power", "decay_from"}
    decay = "linear" if is_linear else f"by {' '.join(design.options)}"
    lines = [
        f"Held-out MLM loss in nats after {design.samples:,} samples ({seeds}), and the learning "
        f"rate. Warm-up {WARMUP:.0%} of the steps, then {decay} to 0. {len(outcomes)} runs"
        + (f"; at least {missing} are missing." if missing else "."),
        "",
        "| method | " + " | ".join(f"{batch}" for batch in design.batches) + " | held up to |",
        "|---" * (len(design.batches) + 2) + "|",
    ]
    for method in design.methods:
        searches = {search.batch: search for search in design.searches(method, outcomes)}
        cells = [_cell(searches.get(batch)) for batch in design.batches]
        held = largest_held(list(searches.values()))
        lines.append(f"| {method} | {' | '.join(cells)} | {held or '-'} |")
    lines += [
        "",
        f"Held: at most {TOLERANCE:.0%} above the method's own loss at batch {design.batches[0]}, "
        "at this batch and all below. "
        f"Learning rates were tried by factors of {GRID_FACTOR:g} with seed 0, from the best one "
        "of the batch before times the square root of their ratio; an edge was followed up to "
        f"{design.extensions} times. ^ marks one that is still the edge.",
    ]
    return "\n".join(lines) + "\n"


def largest_held(searches: Sequence[Search]) -> int | None:
    """Return the largest batch of which the loss is held, with all below; None without any."""
    held = None
    bound = math.inf
    for search in searches:
        losses = _losses(search)
        if not losses or not math.isfinite(mean(losses)) or mean(losses) > bound:
            break
        if held is None:
            bound = mean(losses) * (1 + TOLERANCE)
        held = search.batch
    return held


def _losses(search: Search) -> list[float]:
    """Return the losses at the chosen learning rate, or none while a seed is missing."""
    chosen = search.chosen()
    if any(trial not in search.outcomes for trial in chosen):
        return []
    return [search.outcomes[trial] for trial in chosen]


def _cell(search: Search | None) -> str:
    losses = _losses(search) if search is not None else []
    if search is None or search.best is None or not losses:
        return ""
    if not math.isfinite(mean(losses)):
        return "diverged"
    spread = f" ± {(max(losses) - min(losses)) / 2:.3f}" if len(losses) > 1 else ""
    edge = "^" if search.is_at_edge else ""
    return f"{mean(losses):.3f}{spread} ({search.best.lr:g}{edge})"


def _csv(outcomes: Outcomes) -> str:
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(["method", "batch", "lr", "seed", "held_out_mlm_loss"])
    for trial, loss in sorted(outcomes.items()):
        writer.writerow([trial.method, trial.batch, trial.lr, trial.seed, loss])
    return file.getvalue()


def _draw(design: Design, outcomes: Outcomes, path: Path) -> None:
    """Draw loss and learning rate over the batch, and beneath, each method's searches."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    num_methods = len(design.methods)
    figure = Figure(figsize=(max(9.0, 3.2 * num_methods), 8), layout="constrained")
    FigureCanvasAgg(figure)
    above, below = figure.subfigures(2, 1)
    loss_axes, lr_axes = above.subplots(1, 2)
    search_axes = below.subplots(1, num_methods, sharey=True, squeeze=False)[0]
    for method, axes in zip(design.methods, search_axes, strict=True):
        searches = list(design.searches(method, outcomes))
        _draw_losses(loss_axes, method, searches)
        best = [(s.batch, s.best.lr) for s in searches if s.best is not None]
        lr_axes.plot(*_columns(best), "o-", label=method)
        _draw_searches(axes, method, searches)
    search_axes[0].set_ylabel("held-out loss (nats)")
    for axes in (loss_axes, lr_axes):
        axes.set_xscale("log", base=2)
        axes.set_xticks(design.batches, [str(batch) for batch in design.batches])
        axes.set_xlabel(f"batch (samples per step; {design.samples:,} samples in all)")
        axes.grid(alpha=0.3)
        axes.legend()
    loss_axes.set(ylabel="held-out MLM loss (nats)", title="Loss at an equal number of samples")
    lr_axes.set(ylabel="learning rate that was best", title="Learning rate")
    if any(len(line.get_xdata()) for line in lr_axes.lines):
        lr_axes.set_yscale("log")
    figure.savefig(path, dpi=110)


def _draw_losses(axes: Any, method: str, searches: Sequence[Search]) -> None:
    rows = [(s.batch, losses) for s in searches if (losses := _losses(s))]
    finite = [(batch, losses) for batch, losses in rows if math.isfinite(mean(losses))]
    batches = [batch for batch, _ in finite]
    centre = [mean(losses) for _, losses in finite]
    ends = [
        [c - min(losses) for c, (_, losses) in zip(centre, finite, strict=True)],
        [max(losses) - c for c, (_, losses) in zip(centre, finite, strict=True)],
    ]
    axes.errorbar(batches, centre, yerr=ends, marker="o", capsize=3, label=method)


def _draw_searches(axes: Any, method: str, searches: Sequence[Search]) -> None:
    for search in searches:
        trials = [search.trial(rung) for rung in search.rungs()]
        tried = [(t.lr, search.outcomes[t]) for t in trials if t in search.outcomes]
        tried = [(lr, loss) for lr, loss in tried if math.isfinite(loss)]
        axes.plot(*_columns(tried), "o-", markersize=4, label=str(search.batch))
    axes.set(xlabel="learning rate", title=method)
    if any(len(line.get_xdata()) for line in axes.lines):
        axes.set_xscale("log")
        axes.xaxis.set_minor_formatter("")
    axes.grid(alpha=0.3)
    axes.legend(title="batch", fontsize="small")


def _columns(rows: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [x for x, _ in rows], [y for _, y in rows]
