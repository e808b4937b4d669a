"""Trust ratios, norms and clips of a run, as a table and as a picture."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from pretraining.kinds import KINDS, kind_of, layer_of
from pretraining.metrics import Record

Norms = dict[str, Any]
"""One tensor's, as `shardfuse.training.TensorNorms` has them."""

_CLIPPED = 0.999


def trust_ratio(norms: Norms) -> float | None:
    """Return LAMB's ratio; None for another rule, and for a tensor that takes none."""
    ratio: float | None = norms["trust_ratio"]
    return None if ratio == 1 else ratio


def relative_update(norms: Norms) -> float | None:
    """Return the norm of the update over that of the weight; None for a weight of 0."""
    return norms["update"] / norms["weight"] if norms["weight"] > 0 else None


Quantity = Callable[[Norms], float | None]


def by_kind(record: Record, quantity: Quantity) -> dict[str, list[float]]:
    """Return {kind: the quantity of each of its tensors}, of kinds that have any."""
    found: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for name, norms in record["tensors"].items():
        value = quantity(norms)
        if value is not None:
            found[kind_of(name)].append(value)
    return {kind: values for kind, values in found.items() if values}


def make_table(records: Sequence[Record]) -> str:
    """Return lines of text: for each kind, medians in the first and the last watched step."""
    first, last = records[0], records[-1]
    num_clipped = sum(record["clip"] < _CLIPPED for record in records)
    steps = f"step {first['step']} -> {last['step']}"
    lines = [
        f"{len(records)} watched steps; the gradient was clipped in {num_clipped} of them; "
        f"its norm {first['grad_norm']:.3g} -> {last['grad_norm']:.3g}",
        f"{'medians, ' + steps:32} {'trust ratio':>24} {'update / weight':>24}",
    ]
    for kind in by_kind(last, relative_update):
        cells = [_change(first, last, kind, how) for how in (trust_ratio, relative_update)]
        lines.append(f"{kind:32} {cells[0]:>24} {cells[1]:>24}")
    return "\n".join(lines)


def cost_of_watching(records: Sequence[Record]) -> str:
    """Return in words how much longer watched steps took; nothing where there is no other."""
    watched = {record["step"] for record in records if record["kind"] == "norms"}
    train = [record for record in records if record["kind"] == "train"]
    times = [r["seconds"] for r in train if r["step"] in watched]
    others = [r["seconds"] for r in train if r["step"] not in watched]
    if not times or not others:
        return ""
    more = median(times) - median(others)
    share = more * len(times) / sum(r["seconds"] for r in train)
    return (
        f"a watched step took {more * 1e3:+.1f} ms beside the {median(others) * 1e3:.1f} ms of "
        f"others (medians): {share:+.2%} of the run's time, {len(times)} of {len(train)} steps"
    )


def _change(first: Record, last: Record, kind: str, quantity: Quantity) -> str:
    values = [by_kind(record, quantity).get(kind) for record in (first, last)]
    known = [f"{median(found):.3g}" for found in values if found]
    return " -> ".join(known) if known else "-"


def draw_norms(records: Sequence[Record], path: Path, title: str) -> None:
    """Write a PNG: ratios and updates by kind, each kind's layers, gradient norm, clip and lr."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    quantity = trust_ratio if by_kind(records[-1], trust_ratio) else relative_update
    kinds = [kind for kind in by_kind(records[-1], quantity) if _layers(records[-1], kind)]
    figure = Figure(figsize=(13, 11), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title)
    above, below = figure.subfigures(2, 1, height_ratios=(3, 2))
    axes = above.subplots(2, 2)
    _draw_kinds(axes[0][0], records, trust_ratio, "trust ratio")
    _draw_kinds(axes[0][1], records, relative_update, "update / weight")
    steps = [record["step"] for record in records]
    axes[1][0].plot(steps, [record["grad_norm"] for record in records], label="gradient norm")
    axes[1][0].plot(steps, [record["clip"] for record in records], label="factor of the clip")
    axes[1][0].set(yscale="log", xlabel="optimizer step")
    axes[1][0].legend()
    axes[1][1].plot(steps, [record["lr"] or 0.0 for record in records])
    axes[1][1].set(xlabel="optimizer step", ylabel="learning rate")
    name = "trust ratio" if quantity is trust_ratio else "update / weight"
    panes = below.subplots(1, len(kinds), sharey=True, squeeze=False)[0] if kinds else ()
    for column, (axis, kind) in enumerate(zip(panes, kinds, strict=True)):
        _draw_layers(axis, records, kind, quantity)
        if column == 0:
            axis.set_ylabel(name)
            axis.legend(fontsize="x-small")
    for axis in figure.axes:
        axis.grid(alpha=0.3)
    figure.savefig(path, dpi=80)


def _draw_kinds(axes: Any, records: Sequence[Record], quantity: Quantity, name: str) -> None:
    """Draw a line for each kind, the median of its tensors, and their range around it."""
    found = [(record["step"], by_kind(record, quantity)) for record in records]
    for index, kind in enumerate(KINDS):
        rows = [(step, values[kind]) for step, values in found if kind in values]
        if not rows:
            continue
        steps = [step for step, _ in rows]
        axes.plot(steps, [median(v) for _, v in rows], color=f"C{index}", label=kind)
        low, high = [min(v) for _, v in rows], [max(v) for _, v in rows]
        axes.fill_between(steps, low, high, color=f"C{index}", alpha=0.12)
    axes.set(yscale="log", xlabel="optimizer step", ylabel=f"{name}: median and range")
    if axes.lines:
        axes.legend(fontsize="small")
    else:
        axes.text(0.5, 0.5, f"no {name}s", ha="center", transform=axes.transAxes)


def _layers(record: Record, kind: str) -> dict[int, list[str]]:
    """Return {layer: names of its tensors of a kind}."""
    found: dict[int, list[str]] = {}
    for name in record["tensors"]:
        layer = layer_of(name)
        if layer is not None and kind_of(name) == kind:
            found.setdefault(layer, []).append(name)
    return found


def _draw_layers(axes: Any, records: Sequence[Record], kind: str, quantity: Quantity) -> None:
    """Draw a line for each layer, dark for the first: the median of its tensors of a kind."""
    from matplotlib import colormaps

    layers = _layers(records[-1], kind)
    for layer, names in layers.items():
        rows = []
        for record in records:
            values = [quantity(record["tensors"][name]) for name in names]
            known = [value for value in values if value is not None]
            if known:
                rows.append((record["step"], median(known)))
        color = colormaps["viridis"](layer / max(1, len(layers) - 1) * 0.9)
        axes.plot([x for x, _ in rows], [y for _, y in rows], color=color, label=f"layer {layer}")
    axes.set(yscale="log", title=kind, xlabel="optimizer step")
