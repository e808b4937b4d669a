"""What the rows of each part come to: tables, what was to be reached, and panels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from launch.bench.options import Row
from launch.bench.plots import Panel
from launch.bench.report import (
    Summary,
    Table,
    Target,
    groups,
    measured,
    middle,
    spread,
    values,
)
from launch.bench.timing import median
from launch.bench.trace import LANES
from launch.bench.training import ADAM, DDP, FEW_BITS, LAMB

ADAM_LIMIT = 1.2
LAMB_LIMIT = 1.5
PEAK_LIMIT = 3.2
ENGINE_FACTOR = 3.0
UPDATE_LIMITS = {"adam": 0.9, "lamb": 0.8}
TENSORS_LIMIT = 1.3
LINK_LIMITS = [
    ("1gbit", ADAM, 0.85),
    ("1gbit", LAMB, 0.9),
    ("1gbit", f"{ADAM}, bf16 wire", 0.7),
    ("4gbit", ADAM, 0.95),
    ("200mbit", ADAM, 1.0),
]
"""Rate, method, and the most that its step may take between two hosts, in steps of DDP."""

FEW_BITS_LIMIT = 1 / 3
"""The most that a step with few bits may take at 200 Mbit/s, in steps with all of them."""

EXPOSED_LIMIT = 0.5
_MILLION = 1e6

FSDP_LIMITS = (
    ("ShardedAdamW", "torch AdamW, foreach", 0.6),
    ("ShardedLamb", "LAMB by tensors", 0.6),
    ("ShardedMuon", "torch Muon", 0.8),
    ("ShardedMuon", "torch Muon, replicated", 0.65),
    ("ShardedMuon, stage 1", "torch Muon, replicated", 0.65),
)
"""(ours, theirs, how much of theirs a step may take)."""


def _own(rows: Sequence[Row], method: str) -> list[Row]:
    return [row for row in measured(rows) if row["method"] == method]


def _below(text: str, rows: Sequence[Row], key: str, limit: float) -> list[Target]:
    """Return the target "median of ``key`` <= ``limit``"; none where nothing was measured."""
    if not values(rows, key):
        return []
    return [Target(f"{text} <= {limit}", spread(rows, key), middle(rows, key) <= limit)]


def _not_measured(rows: Sequence[Row]) -> list[list[str]]:
    """Return (method, note) of methods that gave no numbers in at least one launch."""
    found = {(str(row["method"]), str(row["note"])) for row in rows if row.get("note")}
    return [list(pair) for pair in sorted(found)]


def step(rows: Sequence[Row]) -> Summary:
    """Return the table of steps: one line per method, fastest first."""
    good = measured(rows)
    by_method = groups(good, "method")
    order = sorted(by_method, key=lambda key: middle(by_method[key], "ratio"))
    lines = []
    for key in order:
        same = by_method[key]
        lines.append(
            [
                str(key[0]),
                spread(same, "ratio"),
                f"{middle(same, 'step_ms'):.1f}",
                spread(same, "peak_p"),
                f"{middle(same, 'state_p'):.2f}",
                f"{middle(same, 'sent_p'):.3f}",
                str(len(same)),
            ]
        )
    header = [
        "method",
        "ratio to all-reduce",
        "ms",
        "peak memory P",
        "state P",
        "sent P",
        "launches",
    ]
    tables = [Table("Steps", header, lines)]
    if _not_measured(rows):
        tables.append(Table("Without numbers", ["method", "why"], _not_measured(rows)))
    panels = [
        Panel(
            "time of a step, median and range of launches",
            "in units of one flat all-reduce of the parameters",
            bars={str(key[0]): values(by_method[key], "ratio") for key in order},
            limit=ADAM_LIMIT,
        ),
        Panel(
            "peak memory of a rank above its start",
            "in units of the parameters' bytes P",
            bars={str(key[0]): values(by_method[key], "peak_p") for key in order},
            limit=PEAK_LIMIT,
        ),
    ]
    shapes = ", ".join(
        f"{name} ({numel / _MILLION:.2f} M fp32 parameters, {int(world)} ranks)"
        for name, numel, world in groups(good, "shapes", "numel", "world_size")
    )
    method = (
        f"{shapes}, gloo on loopback, one thread a rank. Ratio: median step over the median flat "
        "all-reduce of as many floats in the same launch; median (min-max) of launches. Gradients "
        "are separate tensors before the clock starts, except where the name says DDP, FSDP2 or "
        "real backward: there forward and backward run inside it and the same pass without "
        "optimizer or wrapper is subtracted. Peak memory counts parameters and gradients; set by "
        "hand, gradients exist beside the buffer they are packed into, so memory as in training "
        "is that of the rows with a real backward."
    )
    return Summary("Optimizer steps", method, tables, _step_targets(rows), panels)


def _step_targets(rows: Sequence[Row]) -> list[Target]:
    adam, lamb = _own(rows, "shardfuse adam"), _own(rows, "shardfuse lamb")
    targets = _below("Adam, ratio", adam, "ratio", ADAM_LIMIT)
    targets += _below("LAMB, ratio", lamb, "ratio", LAMB_LIMIT)
    for family, mine in (("adam", adam), ("lamb", lamb)):
        others = [
            row
            for row in measured(rows)
            if row["family"] == family and not str(row["method"]).startswith("shardfuse")
        ]
        if not mine or not others:
            continue
        by_method = groups(others, "method")
        best = min(by_method, key=lambda key: middle(by_method[key], "ratio"))
        rival = middle(by_method[best], "ratio")
        ours = middle(mine, "ratio")
        text = f"{family}: ratio below that of every other, {best[0]} being the next"
        targets.append(Target(text, f"{ours:.2f} against {rival:.2f}", ours < rival))
    zero, engine = (
        _own(rows, name)
        for name in ("DeepSpeed ZeRO-1 Adam fused", "shardfuse adam, DeepSpeed stage 0")
    )
    if zero and engine:
        factor = middle(zero, "ratio") / middle(engine, "ratio")
        text = f"Adam by DeepSpeed's engine: stage 0 >= {ENGINE_FACTOR:g} x faster than its ZeRO-1"
        targets.append(Target(text, f"{factor:.2f}", factor >= ENGINE_FACTOR))
    backward = _own(rows, "shardfuse adam, real backward")
    targets += _below("Adam, peak memory in P (real backward)", backward, "peak_p", PEAK_LIMIT)
    sockets = _own(rows, "shardfuse adam, sockets only")
    if sockets:
        world_size = float(sockets[0]["world_size"])
        due = 2 * (world_size - 1) / world_size
        sent = middle(sockets, "sent_p")
        text = f"bytes a rank sends over sockets in a step, in P: 2 (W-1)/W = {due:.2f} within 1 %"
        targets.append(Target(text, f"{sent:.4f}", abs(sent - due) <= 0.01 * due))
    return targets


def update(rows: Sequence[Row]) -> Summary:
    """Return the table of updates on one rank: one line per optimizer, by rule."""
    good = measured(rows)
    by_method = groups(good, "family", "method")
    order = sorted(by_method, key=lambda key: (key[0], middle(by_method[key], "step_ms")))
    lines = [
        [
            str(key[1]),
            spread(by_method[key], "step_ms"),
            f"{middle(by_method[key], 'gb_per_s'):.1f}",
            spread(by_method[key], "share"),
            str(len(by_method[key])),
        ]
        for key in order
    ]
    header = ["update", "ms", "GB/s", "share of triad", "launches"]
    tables = [Table("Updates", header, lines)]
    if _not_measured(rows):
        tables.append(Table("Without numbers", ["method", "why"], _not_measured(rows)))
    targets = []
    for family, limit in UPDATE_LIMITS.items():
        mine = _own(rows, f"shardfuse {family}, compile")
        if mine:
            share = middle(mine, "share")
            text = f"{family}: share of the triad bandwidth >= {limit}"
            targets.append(Target(text, spread(mine, "share"), share >= limit))
    mine, fused = _own(rows, "shardfuse adam, compile"), _own(rows, "torch Adam, fused")
    if mine and fused:
        pair = middle(mine, "share"), middle(fused, "share")
        text = "adam: faster than torch.optim.Adam(fused=True), share of the triad"
        targets.append(Target(text, f"{pair[0]:.2f} against {pair[1]:.2f}", pair[0] > pair[1]))
    panel = Panel(
        "rate of an update by the bytes that must move",
        "share of the triad bandwidth",
        bars={str(key[1]): values(by_method[key], "share") for key in order},
        limit=1.0,
    )
    numel = ", ".join(f"{key[0] / _MILLION:.2f} M" for key in groups(good, "numel"))
    method = (
        f"{numel} fp32 elements in 64 tensors, one process, one thread (or one accelerator), "
        f"gradients in place. Triad: {spread(good, 'triad_gb_per_s', 1)} GB/s, each update's share "
        "by what alternated with it. Bytes per element: SGD with momentum 20, Adam and AdamW 28, "
        "BertAdam 32 (its norm), LAMB 40. Median (min-max) of launches."
    )
    return Summary("Updates on one rank", method, tables, targets, [panel])


def comm(rows: Sequence[Row]) -> Summary:
    """Return a table of collectives per world size."""
    good = measured(rows)
    tables, panels = [], []
    for (world,), same in sorted(groups(good, "world_size").items(), key=str):
        largest = max(row["numel"] for row in same)
        lines = []
        for (name,), ours in groups(same, "collective").items():
            by_size = groups(ours, "numel")
            sizes = sorted(by_size)
            cells = [spread(by_size[size], "ratio") for size in sizes]
            last = by_size[sizes[-1]]
            cells += [f"{middle(last, 'ms'):.1f}", f"{middle(last, 'sent_p'):.3f}"]
            lines.append([str(name), *cells])
        labels = [f"{key[0] / _MILLION:.2f} M" for key in sorted(groups(same, "numel"))]
        header = ["collective", *labels, f"ms at {labels[-1]}", "sent P"]
        tables.append(Table(f"{int(world)} ranks, ratio to all-reduce", header, lines))
        at_largest = [row for row in same if row["numel"] == largest]
        panels.append(
            Panel(
                f"{int(world)} ranks, {labels[-1]} floats",
                "in units of one flat all-reduce",
                bars={
                    str(key[0]): values(found, "ratio")
                    for key, found in groups(at_largest, "collective").items()
                },
                limit=1.0,
            )
        )
    method = (
        "fp32 on loopback, one thread a rank; ratio to gloo's all-reduce of the same size in the "
        "same launch, median (min-max) of launches. Sent: bytes a rank writes to sockets, in units "
        "of the whole buffer, counted by the kernel; what goes by other ways is not in it."
    )
    return Summary("Collectives", method, tables, panels=panels)


def scaling(rows: Sequence[Row]) -> Summary:
    """Return a table and a panel per axis."""
    axes = {"world size": "world_size", "tensors": "tensors", "parameters": "numel"}
    tables, panels, targets = [], [], []
    for axis, column in axes.items():
        same = [row for row in measured(rows) if row["axis"] == axis]
        if not same:
            continue
        lines, curves = [], {}
        for (method,), ours in groups(same, "method").items():
            by_x = groups(ours, column)
            curves[str(method)] = [(float(x), middle(by_x[x,], "step_ms")) for (x,) in by_x]
            for (x,) in sorted(by_x):
                found = by_x[x,]
                per_million = middle(found, "step_ms") / (middle(found, "numel") / _MILLION)
                cells = [spread(found, "step_ms"), f"{per_million:.2f}", spread(found, "ratio")]
                lines.append([str(method), f"{int(x):,}", *cells, str(len(found))])
            if axis == "tensors":
                targets += _tensor_target(str(method), ours)
        header = ["method", axis, "ms", "ms per M parameters", "ratio to all-reduce", "launches"]
        tables.append(Table(f"Over {axis}", header, lines))
        panels.append(Panel(f"over {axis}", "ms per step", lines=curves, x_axis=axis))
    method = (
        "Axes are varied one at a time: ranks and tensors at equal bytes, parameters in 200 "
        "tensors on two ranks. More ranks than cores share them. Median (min-max) of launches; "
        "models of few and of many tensors take turns within each."
    )
    return Summary("Scaling of a step", method, tables, targets, panels)


def _tensor_target(method: str, rows: Sequence[Row]) -> list[Target]:
    """Compare the two ends within each launch, where they have taken turns."""
    counts = sorted(int(row["tensors"]) for row in rows)
    fewest, most = counts[0], counts[-1]
    if fewest == most:
        return []
    factors = []
    for same in groups(rows, "round").values():
        step_ms = {int(row["tensors"]): float(row["step_ms"]) for row in same}
        factors.append(step_ms[most] / step_ms[fewest])
    factor = median(factors)
    text = f"{method}: {int(most):,} tensors within {TENSORS_LIMIT} x of {int(fewest):,}"
    found = f"{factor:.2f} ({min(factors):.2f}-{max(factors):.2f})"
    return [Target(text, found, factor <= TENSORS_LIMIT)]


def links(rows: Sequence[Row]) -> Summary:
    """Return a table and a panel per rate and number of hosts, fastest first."""
    tables, panels = [], []
    for (rate, world), found in groups(measured(rows), "rate", "world_size").items():
        title = f"{rate}, {int(world)} hosts"
        by_method = groups(found, "method")
        order = sorted(by_method, key=lambda key: middle(by_method[key], "step_s"))
        tables.append(_links_table(title, {str(key[0]): by_method[key] for key in order}))
        ddp = _own(found, DDP)
        panels.append(
            Panel(
                title,
                "seconds per step; dashed: DDP",
                bars={str(key[0]): values(by_method[key], "step_s") for key in order},
                limit=middle(ddp, "step_s") if ddp else None,
            )
        )
    if _not_measured(rows):
        tables.append(Table("Without numbers", ["method", "why"], _not_measured(rows)))
    numel = ", ".join(f"{key[0] / _MILLION:.2f} M" for key in groups(measured(rows), "numel"))
    method = (
        f"A transformer of {numel} fp32 parameters; one rank and one thread per host; hosts are "
        "namespaces of one machine, and what each sends is limited to the rate. All methods of a "
        "table took turns in the same processes: a warm-up step, then steps without a barrier "
        "between them, from the end of the warm-up's step() to that of the last one. The slowest "
        "rank counts. Exposed: step less compute alone, ratio: step over that of DDP with fused "
        "Adam, both of the same round; median (min-max) of rounds. Core: seconds that all threads "
        "of a rank's process run on a core; with a core per host no step can be shorter, whatever "
        "overlaps. Sent: bytes on the interface, headers included, in units of the parameters' "
        "bytes P. Peak memory: from a launch of the method alone, with gradients and activations. "
        "Loss: of the last step, mean of ranks."
    )
    return Summary("Steps between hosts", method, tables, _links_targets(rows), panels)


def free_links(rows: Sequence[Row]) -> Summary:
    """Return links() of a model that computes elsewhere, with its own method."""
    found = links(rows)
    method = (
        "As links, but the model computes elsewhere, as on an accelerator: forward and backward of "
        "a layer take the time that they took on one core, asleep, and leave the host's cores to "
        "sockets and updates. Gradients are constants, and the loss says nothing. Host ahead: CPU "
        "time of the training thread between two layers is part of the next one's, as where the "
        "host queues kernels ahead. " + found.method
    )
    return replace(found, title="Steps between hosts, with compute elsewhere", method=method)


def _links_table(title: str, by_method: dict[str, list[Row]]) -> Table:
    lines = [
        [
            name,
            spread(same, "step_s"),
            spread(same, "exposed_s"),
            spread(same, "ratio"),
            f"{middle(same, 'core_s'):.2f}" if values(same, "core_s") else "",
            f"{middle(same, 'sent_p'):.3f}",
            f"{middle(same, 'peak_p'):.2f}" if values(same, "peak_p") else "",
            f"{middle(same[-1:], 'loss'):.3f}" if values(same, "loss") else "",
            str(len(same)),
        ]
        for name, same in by_method.items()
    ]
    header = ["method", "s per step", "exposed s", "ratio to DDP", "core s"]
    return Table(title, [*header, "sent P", "peak memory P", "loss", "rounds"], lines)


def _links_targets(rows: Sequence[Row]) -> list[Target]:
    targets = []
    between_two = [row for row in measured(rows) if row["world_size"] == 2]
    for rate, method, limit in LINK_LIMITS:
        same = [row for row in between_two if row["rate"] == rate]
        text = f"{method} at {rate}, step of DDP + torch Adam fused"
        targets += _below(text, _own(same, method), "ratio", limit)
        mine, ddp = (_own(same, name) for name in (method, DDP))
        if rate == "1gbit" and method == ADAM and mine and ddp:
            pair = middle(mine, "exposed_s"), middle(ddp, "exposed_s")
            text = f"{method} at {rate}, exposed time at most {EXPOSED_LIMIT} of DDP's"
            found = f"{pair[0]:.2f} s against {pair[1]:.2f} s"
            targets.append(Target(text, found, pair[0] <= EXPOSED_LIMIT * pair[1]))
    slow = [row for row in between_two if row["rate"] == "200mbit"]
    few, full = (_own(slow, name) for name in (FEW_BITS, ADAM))
    if few and full:
        ratio = middle(few, "step_s") / middle(full, "step_s")
        text = f"{FEW_BITS} at 200mbit, step of {ADAM}, at most {FEW_BITS_LIMIT:.2f}"
        targets.append(Target(text, f"{ratio:.2f}", ratio <= FEW_BITS_LIMIT))
    return targets


def trace(rows: Sequence[Row]) -> Summary:
    """Return how long each lane is taken, and the lanes over time."""
    good = measured(rows)
    lanes = {
        lane: [row for row in good if row["lane"] == lane] for lane in dict.fromkeys(LANES.values())
    }
    lines = [
        [lane, str(len(same)), f"{sum(values(same, 'ms')):.1f}"] for lane, same in lanes.items()
    ]
    spans = {
        lane: list(zip(values(same, "start_ms"), values(same, "ms"), strict=True))
        for lane, same in lanes.items()
    }
    names = ", ".join(f"{name} at {rate}" for name, rate in groups(good, "method", "rate"))
    method = (
        "Rank 0 of two hosts under torch.profiler: a step and the forward pass after it, after "
        "warm-up. A launch is the call that starts a collective; what is in flight has no range "
        "of its own. Ranges nest: waits and launches lie within forward, backward or step."
    )
    tables = [Table("Ranges", ["lane", "ranges", "ms together"], lines)]
    panel = Panel(names, "ms", spans=spans)
    return Summary("One step over time", method, tables, panels=[panel])


def fsdp(rows: Sequence[Row]) -> Summary:
    """Return the table of steps over DTensors: one line per method and number of tensors."""
    good = measured(rows)
    found = groups(good, "tensors", "method")
    lines = [
        [
            str(key[1]),
            f"{key[0]:.0f}",
            f"{middle(found[key], 'width'):.0f}",
            spread(found[key], "step_ms"),
            spread(found[key], "thread_ms"),
            f"{middle(found[key], 'thread_us_per_tensor'):.0f}",
            str(len(found[key])),
        ]
        for key in sorted(found, key=lambda key: (key[0], middle(found[key], "step_ms")))
    ]
    header = ["step", "tensors", "width", "ms", "ms of the thread"]
    header += ["us of the thread by tensor", "launches"]
    targets = []
    for ours, theirs, limit in FSDP_LIMITS:
        both = {key[0] for key in found if key[1] == ours} & {k[0] for k in found if k[1] == theirs}
        for most in sorted(both)[-1:]:
            ratio = middle(found[most, ours], "step_ms") / middle(found[most, theirs], "step_ms")
            text = f"{ours}: a step of {most:.0f} tensors in those of {theirs} <= {limit}"
            targets.append(Target(text, f"{ratio:.2f}", ratio <= limit))
    method = (
        "Two ranks over gloo, one thread each; local shards of DTensors and gradients alone, all "
        "optimizers in turn in the same processes (those of Muon in others). Median (min-max) of "
        "launches; each is the median of its steps on the first rank. Twelve tensors are one block "
        "of a transformer of the given width. torch Muon is torch.optim.Muon for matrices and "
        "torch.optim.AdamW for the rest: over DTensors, or replicated over whole tensors. A step "
        "of stage 1 has its reduce-scatter and all-gather, too."
    )
    panel = Panel(
        "steps over DTensors",
        "ms",
        bars={f"{key[1]}, {key[0]:.0f}": values(found[key], "step_ms") for key in found},
    )
    return Summary(
        "Steps over FSDP2's DTensors", method, [Table("Steps", header, lines)], targets, [panel]
    )
