"""Pictures of results: bars with spread, lines over a logarithmic axis, or spans of time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launch.bench.timing import median

_OURS = "tab:blue"
_OTHERS = "tab:gray"


@dataclass(frozen=True)
class Panel:
    """One pair of axes.

    ``bars`` maps a label to its values over launches: the bar is their median, the whisker their
    range. ``lines`` maps a label to (x, y) points, ``spans`` one to (start, length) pairs.
    ``limit`` is a bound to be drawn. Lines that are curves have linear axes and no markers.
    """

    title: str
    axis: str
    bars: Mapping[str, Sequence[float]] = field(default_factory=dict)
    lines: Mapping[str, Sequence[tuple[float, float]]] = field(default_factory=dict)
    spans: Mapping[str, Sequence[tuple[float, float]]] = field(default_factory=dict)
    x_axis: str = ""
    limit: float | None = None
    is_curve: bool = False


def draw(panels: Sequence[Panel], path: Path, *, title: str, caption: str) -> None:
    """Write a PNG of the panels, bars below one another and lines side by side."""
    # Only here: importing matplotlib takes a second and no measuring process needs it.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    has_lines = any(panel.lines for panel in panels)
    rows, columns = (1, len(panels)) if has_lines else (len(panels), 1)
    num_bars = [max(3, len(panel.bars), len(panel.spans)) for panel in panels]
    height = 4.5 if has_lines else 1.6 + 0.32 * sum(num_bars) + 0.6 * len(panels)
    figure = Figure(figsize=(4.8 * columns if has_lines else 10, height), layout="constrained")
    FigureCanvasAgg(figure)
    ratios = None if has_lines else num_bars
    grid = figure.subplots(rows, columns, squeeze=False, height_ratios=ratios)
    for axes, panel in zip(grid.flat, panels, strict=True):
        if panel.spans:
            _draw_spans(axes, panel)
        else:
            _draw_lines(axes, panel) if panel.lines else _draw_bars(axes, panel)
        axes.set_title(panel.title, fontsize=10)
        axes.grid(alpha=0.3, axis="both" if panel.lines else "x")
    figure.suptitle(title)
    figure.supxlabel(caption, fontsize=6, color="dimgray")
    figure.savefig(path, dpi=110)


def _draw_bars(axes: Any, panel: Panel) -> None:
    ordered = sorted(panel.bars.items(), key=lambda item: median(item[1]), reverse=True)
    labels = [label for label, _ in ordered]
    middles = [median(found) for _, found in ordered]
    below = [mid - min(found) for mid, (_, found) in zip(middles, ordered, strict=True)]
    above = [max(found) - mid for mid, (_, found) in zip(middles, ordered, strict=True)]
    colors = [_OURS if label.startswith("shardfuse") else _OTHERS for label in labels]
    bars = axes.barh(labels, middles, color=colors, xerr=[below, above], ecolor="black", capsize=2)
    axes.bar_label(bars, fmt="%.2f", padding=4, fontsize=8)
    axes.tick_params(axis="y", labelsize=8)
    axes.set_xlabel(panel.axis)
    axes.margins(x=0.1)
    if panel.limit is not None:
        axes.axvline(panel.limit, color="tab:red", linestyle="--", linewidth=1)


def _draw_lines(axes: Any, panel: Panel) -> None:
    for label, points in panel.lines.items():
        xs, ys = zip(*sorted(points, key=lambda point: point[0]), strict=True)
        axes.plot(xs, ys, "-" if panel.is_curve else "o-", label=label, alpha=0.8)
    if not panel.is_curve:
        axes.set_xscale("log")
        axes.set_ylim(bottom=0)
    axes.set(xlabel=panel.x_axis, ylabel=panel.axis)
    if panel.limit is not None:
        axes.axhline(panel.limit, color="tab:red", linestyle="--", linewidth=1)
    # Below the axes: no place among the lines is free for every result.
    axes.legend(fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.2))


def _draw_spans(axes: Any, panel: Panel) -> None:
    """Draw a lane per label, the first on top; an edge shows what is too short for its width."""
    for lane, spans in enumerate(panel.spans.values()):
        axes.broken_barh(spans, (lane - 0.4, 0.8), facecolor=_OURS, edgecolor="black", lw=0.5)
    axes.set_yticks(range(len(panel.spans)), list(panel.spans))
    axes.invert_yaxis()
    axes.set_xlabel(panel.axis)
