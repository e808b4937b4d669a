"""README's picture: a step of each way to shard Adam, on one host and between two."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from launch.bench.options import Row
from launch.bench.plots import Panel, draw
from launch.bench.report import groups, measured, read_csv, values

PICTURE_FILE = "overview.png"
RATE = "1gbit"

# Names of the rows, and in the picture. Gradients come from a backward wherever that can be.
ONE_HOST = {
    "shardfuse adam, real backward": "shardfuse Adam",
    "DDP + torch Adam fused": "DDP + torch's fused Adam",
    "ZeroRedundancyOptimizer Adam fused": "ZeroRedundancyOptimizer",
    "FSDP2 Adam fused": "FSDP2",
    "DeepSpeed ZeRO-1 Adam fused": "DeepSpeed ZeRO-1",
    "DeepSpeed ZeRO-2 Adam fused": "DeepSpeed ZeRO-2",
}
TWO_HOSTS = {
    "compute alone": "compute alone",
    "shardfuse adam": "shardfuse Adam",
    "shardfuse adam, bf16 wire": "shardfuse Adam, bf16 wire",
    "DDP + torch Adam fused": "DDP + torch's fused Adam",
    "DDP + torch Adam fused, bf16 hook": "DDP, bf16 hook",
    "ZeroRedundancyOptimizer Adam fused": "ZeroRedundancyOptimizer",
    "FSDP2 Adam fused": "FSDP2",
    "DeepSpeed ZeRO-1 Adam fused": "DeepSpeed ZeRO-1",
    "DeepSpeed ZeRO-2 Adam fused": "DeepSpeed ZeRO-2",
}


def draw_overview(out: Path) -> None:
    """Write the picture from the rows in `out`, if both parts are there."""
    one_host, links = (read_csv(out / f"{part}.csv") for part in ("step", "links"))
    between = [row for row in links if row["rate"] == RATE and row["world_size"] == 2]
    panels = [
        Panel(
            "One host, 109 M parameters, two ranks",
            "step / all-reduce of as many floats (forward and backward are not counted)",
            bars=_bars(one_host, ONE_HOST, "ratio"),
        ),
        Panel(
            "Two hosts, 1 Gbit/s, 33 M parameters",
            "seconds for a whole training step",
            bars=_bars(between, TWO_HOSTS, "step_s"),
        ),
    ]
    rows = [*one_host[:1], *between[:1]]
    caption = "\n".join(f"{row['date']}, {row['hardware']}, {row['versions']}" for row in rows)
    draw(panels, out / PICTURE_FILE, title="Adam, fp32 parameters, gloo on CPUs", caption=caption)


def _bars(rows: Sequence[Row], names: dict[str, str], key: str) -> dict[str, list[float]]:
    by_method = groups(measured(rows), "method")
    return {
        shown: values(by_method[name,], key)
        for name, shown in names.items()
        if (name,) in by_method
    }
