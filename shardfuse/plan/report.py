"""A budget as a table, as JSON's types, and as a picture."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from shardfuse.plan.budget import Budget
from shardfuse.plan.timing import Times

_MIB = 1 << 20


def to_json(budget: Budget, times: Times | None) -> dict[str, Any]:
    """Return everything that describe() says, in JSON's types and bytes and seconds."""
    found = asdict(budget)
    del found["buckets"]
    found["world_size"], found["total_nbytes"] = budget.world_size, budget.total_nbytes
    if times is not None:
        found["times"] = {**asdict(times), "exposed": times.exposed}
    return found


def describe(budget: Budget, times: Times | None) -> str:
    """Return a table for people."""
    return "\n".join([*_head(budget), "", *_memory(budget), "", *_traffic(budget), *_times(times)])


def _head(budget: Budget) -> Iterator[str]:
    ranks = f"{budget.world_size:,} ranks"
    if budget.num_replicas > 1:
        ranks += f", {budget.num_replicas:,} rows of {budget.num_shards:,} shards"
    yield f"{budget.numel:,} elements in {budget.num_params:,} parameters on {ranks}"
    padding = budget.padded_numel - budget.numel
    yield (
        f"{budget.num_buckets:,} buckets of at most {budget.bucket_nbytes / _MIB:,.1f} MiB; "
        f"padding {padding:,} elements ({padding / budget.numel:.2%})"
    )


def _memory(budget: Budget) -> Iterator[str]:
    rows = [(name, nbytes) for name, nbytes in budget.memory.items()]
    yield "Memory of one rank, without activations                MiB"
    yield from _table([*rows, ("in all", budget.total_nbytes)])
    yield ""
    yield "The same optimizer by the ZeRO paper's formulas         MiB"
    yield from _table(list(budget.published.items()))


def _table(rows: Sequence[tuple[str, int]]) -> Iterator[str]:
    for name, nbytes in rows:
        yield f"  {name:<42}{nbytes / _MIB:>14,.1f}"


def _traffic(budget: Budget) -> Iterator[str]:
    yield "Collectives of a step                  axis       number   payload MiB   sent MiB a rank"
    for call in budget.collectives:
        payload, sent = call.payload_nbytes / _MIB, call.sent_nbytes / _MIB
        yield f"  {call.kind:<35}  {call.axis:<9}{call.number:>8,}{payload:>14,.2f}{sent:>18,.2f}"
    if not budget.collectives:
        yield "  none: one rank"


def _times(times: Times | None) -> Iterator[str]:
    if times is None:
        return
    yield ""
    yield "Seconds of a step, by the speeds given (a model, see shardfuse/plan/timing.py)"
    for name, seconds in (
        ("forward and backward", times.compute),
        ("traffic alone", times.traffic),
        ("step", times.step),
        ("of it, exposed", times.exposed),
        ("step with nothing overlapped", times.without_overlap),
        ("DistributedDataParallel, replicated", times.ddp),
    ):
        yield f"  {name:<42}{seconds:>14.4f}"


def draw(budget: Budget, path: Path) -> None:
    """Draw the memory of one rank beside that of the published formulas, as a PNG.

    Raises:
        ValueError: the package matplotlib is not installed.
    """
    try:
        import matplotlib as mpl
    except ImportError:
        raise ValueError("matplotlib is not installed: pip install matplotlib.") from None
    mpl.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 3.2))
    names = [*budget.published, "shardfuse"]
    left = 0.0
    for part, nbytes in budget.memory.items():
        axes.barh(len(names) - 1, nbytes / _MIB, left=left, label=part)
        left += nbytes / _MIB
    values = [nbytes / _MIB for nbytes in budget.published.values()]
    axes.barh(range(len(values)), values, color="0.75")
    axes.set_yticks(range(len(names)), names)
    axes.set_xlabel("MiB of one rank, without activations")
    axes.set_title(f"{budget.numel:,} elements on {budget.world_size:,} ranks", fontsize=10)
    axes.legend(fontsize=7, loc="upper right", bbox_to_anchor=(1.0, 0.85))
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
