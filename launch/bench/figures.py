"""The figures that README names, computed anew from the rows of the results.

``python -m launch.bench report`` writes results/figures.md: each figure with the words around it in
README, and with the command, date and commit of its rows. Tests compare both pages with the rows.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from launch.bench.bench_curves import BERT_PART, GPT_PART, largest_differences
from launch.bench.options import Row
from launch.bench.report import Table, measured, middle, read_csv
from shardfuse.__main__ import main

PAGE = "figures.md"
_GIB = 1 << 30
_PLANNED = "python -m shardfuse plan --model {} --world-size {} --device cuda --dtype bf16"
MODELS = {("1.3b", 8): "1.3 B parameters, 8 ranks", ("1.3b", 64): "1.3 B, 64 ranks"}
MODELS |= {("7b", 8): "7 B, 8 ranks", ("7b", 64): "7 B, 64 ranks"}
"""Rows of README's table of memory."""


class Figure(NamedTuple):
    """Words of README with figures in them, and the rows that they come from."""

    text: str
    rows: Sequence[Row]


def figures(out: Path) -> list[Figure]:
    """Return the measured figures of README, from the CSV files in ``out``."""
    rows = {part: measured(read_csv(out / f"{part}.csv")) for part in ("links", "step", "curves")}
    links, step = rows["links"], rows["step"]
    between = {
        key: _of(links, method="shardfuse adam", rate=key[0], world_size=key[1])
        for key in (("1gbit", 2), ("4gbit", 2), ("1gbit", 3))
    }
    ratio = {key: f"{middle(found, 'ratio'):.2f}" for key, found in between.items()}
    own, ddp = (
        _of(step, method=name)
        for name in ("shardfuse adam, real backward", "DDP + torch Adam fused")
    )
    sockets = _of(step, method="shardfuse adam, sockets only")
    no_views = _of(step, method="DDP + torch Adam fused, gradients no views")
    peak, peak_ddp, peak_copies = (middle(found, "peak_p") for found in (own, ddp, no_views))
    of_ddp, of_ddp_sockets = (
        middle(found, "ratio") / middle(ddp, "ratio") for found in (own, sockets)
    )
    worst, noise = largest_differences(rows["curves"])
    return [
        Figure(
            f"at 1 Gbit/s a training step takes {ratio['1gbit', 2]} of DDP's time",
            between["1gbit", 2],
        ),
        Figure(f"at 4 Gbit/s {ratio['4gbit', 2]}", between["4gbit", 2]),
        Figure(f"at 1 Gbit/s it takes {ratio['1gbit', 3]}", between["1gbit", 3]),
        Figure(f"take {of_ddp:.2f} of DDP's time", [*own, *ddp]),
        Figure(f"by sockets {of_ddp_sockets:.2f}", [*sockets, *ddp]),
        Figure(f"{peak:.2f} times the parameters' bytes, DDP {peak_ddp:.2f}", [*own, *ddp]),
        Figure(f"({peak_copies:.2f} without", no_views),
        Figure(
            f"differ by at most {worst:.4f} nats from DDP's, another seed by {noise:.2f}",
            _of(rows["curves"], part=GPT_PART),
        ),
        *_of_bert(rows["curves"]),
    ]


def _of_bert(rows: Sequence[Row]) -> list[Figure]:
    """Return the figure of the BERT job's curves, if they have been measured."""
    own = [row for row in rows if row["part"] == BERT_PART and "AdamW" in row["method"]]
    worst, noise = largest_differences(rows, BERT_PART)
    text = f"in two phases by at most {worst:.4f}, another seed by {noise:.3f}"
    return [Figure(text, own)] if own else []


def _of(rows: Sequence[Row], **wanted: Any) -> list[Row]:
    found = [row for row in rows if all(row[key] == value for key, value in wanted.items())]
    if not found:
        raise ValueError(f"No row with {wanted}. Measure it first.")
    return found


def memory_rows() -> Iterator[list[str]]:
    """Yield the rows of README's table of memory, as planned: GiB of one rank at its peak."""
    for (model, ranks), label in MODELS.items():
        first, second, fsdp = (
            _planned(model, ranks, *options)
            for options in ((), ("--sharding", '{"stage": 2}'), ("--fsdp",))
        )
        published = first["published"]
        nbytes = [
            published["replicated (DDP)"],
            first["peak_nbytes"],
            published["ZeRO-1"],
            second["peak_nbytes"],
            published["ZeRO-2"],
            fsdp["peak_nbytes"],
        ]
        yield [label, *(f"{value / _GIB:.1f}" for value in nbytes)]


@functools.lru_cache
def _planned(model: str, ranks: int, *options: str) -> Mapping[str, Any]:
    command = _PLANNED.format(model, ranks).split()[3:]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        code = main([*command, *options, "--json"])
    if code != 0:
        raise RuntimeError(f"{command} ended with {code}")
    found: Mapping[str, Any] = json.loads(printed.getvalue())
    return found


def make_page(out: Path) -> str:
    """Return the page of figures."""
    header = ["in README", "command", "date", "commit"]
    lines = [
        [figure.text, *("; ".join(_all(figure.rows, key)) for key in ("command", "date", "commit"))]
        for figure in figures(out)
    ]
    planned = [
        [" / ".join(row), f"`{_PLANNED.format(*key)}`, with `--sharding` and `--fsdp`"]
        for key, row in zip(MODELS, memory_rows(), strict=True)
    ]
    parts = [
        "# Figures of README",
        "",
        "Written by `python -m launch.bench report` from the results in this folder, which name "
        "the hardware and versions. Tests compare README with it.",
        "",
        str(Table("Measured", header, lines)),
        str(Table("Planned, on any machine", ["row of README's table", "command"], planned)),
    ]
    return "\n".join(parts)


def _all(rows: Sequence[Row], key: str) -> list[str]:
    shown = "`{}`" if key == "command" else "{}"
    return [shown.format(value) for value in dict.fromkeys(str(row[key]) for row in rows)]
