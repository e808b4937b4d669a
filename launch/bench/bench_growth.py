"""How each cost grows with ranks, tensors and groups: measured to 32 ranks, counted to 4,096.

A backward that makes every gradient at once, and a step, are timed; all methods take turns in the
same processes. What a step sends, holds and asks of the store follows for any number of ranks from
the library's own plan, layout and poll schedule.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from launch.bench import shapes
from launch.bench.launches import LaunchError, run_ranks
from launch.bench.options import Options, Row, interleaved
from launch.bench.plots import Panel
from launch.bench.report import Summary, Table, Target, groups, measured, middle, spread
from launch.bench.timing import median
from shardfuse import ShardedAdam, ShardedLamb
from shardfuse.comm.polls import PollRateLimit
from shardfuse.layout import FlatLayout, ParamSpec
from shardfuse.plan.budget import plan

RANKS = (2, 4, 8, 16, 32)
TENSORS = (10, 100, 1000, 10_000, 50_000)
GROUPS = (1, 10, 100, 300)
SIMULATED_RANKS = tuple(1 << power for power in range(1, 13))
ROUNDS = 1
STEPS = 5
_WARM_UP = 2
_LR = 1e-3
_DECAY = 1 - 1e-6
_SMALL = 16
"""Elements of a tensor where their number grows."""

_FLAT_LIMIT, _LINEAR_LIMIT = 0.1, 1.0
_MANY_RANKS = 16
_MANY_GROUPS_LIMIT = 1.3
DDP = "DDP + torch foreach Adam"
ADAM = ("shardfuse Adam", "shardfuse Adam, sockets")
METHODS = {
    "ranks": (*ADAM, "shardfuse LAMB, sockets", DDP),
    "tensors": (*ADAM, DDP),
    "groups, 2 ranks": (*ADAM, DDP),
    "groups, 8 ranks": (*ADAM, DDP),
}
TIMED = ("construct_ms", "step_ms")
COUNTED = ("messages", "sent_bytes", "memory_bytes", "store_requests_per_s")
_UNITS = {"step_ms": "step, ms", "messages": "messages a step"}

# Measured


class _Spread(torch.autograd.Function):
    """A sum of nothing, whose backward gives every param a gradient of ones."""

    @staticmethod
    def forward(ctx: Any, *params: Tensor) -> Tensor:
        ctx.save_for_backward(*params)
        return torch.zeros((), requires_grad=True)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return tuple(map(torch.ones_like, ctx.saved_tensors))


class _Model(nn.Module):
    def __init__(self, count: int, numel: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.ones(numel) for _ in range(count))

    def forward(self) -> Tensor:
        return _Spread.apply(*self.weights)


def _build(method: str, model: _Model, num_groups: int) -> tuple[nn.Module, Any]:
    params = list(model.weights)
    members = [{"params": params[i::num_groups], "lr": _LR / (i + 1)} for i in range(num_groups)]
    if method == DDP:
        ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)
        return ddp, torch.optim.Adam(members, lr=_LR, foreach=True)
    how = "pairwise" if "sockets" in method else "auto"
    rule = ShardedLamb if "LAMB" in method else ShardedAdam
    return model, rule(members, lr=_LR, sharding={"collectives": how})


def measure(
    names: Sequence[str], count: int, numel: int, num_groups: int, steps: int
) -> dict[str, dict[str, float]]:
    """Return the ms of construction and of a step of this rank, by method."""
    runs, found = [], {}
    warm = [_build(name, _Model(2, _SMALL), 1) for name in names]  # imports, and meets the peers
    for name in names:
        model = _Model(count, numel)
        dist.barrier()
        start = time.perf_counter()
        runs.append((name, *_build(name, model, num_groups)))
        found[name] = {"construct_ms": (time.perf_counter() - start) * 1e3}
    warm.clear()
    times: dict[str, list[float]] = {name: [] for name in names}
    for step in range(_WARM_UP + steps):
        for name, forward, optimizer in runs:
            dist.barrier()
            start = time.perf_counter()
            forward().backward()
            for group in optimizer.param_groups:
                group["lr"] *= _DECAY  # as a schedule does, in each step
            optimizer.step()
            optimizer.zero_grad()
            if step >= _WARM_UP:
                times[name].append((time.perf_counter() - start) * 1e3)
    return {name: {**found[name], "step_ms": median(times[name])} for name in names}


def _points(quick: bool) -> list[tuple[str, int, dict[str, int]]]:
    """Return (axis, x, arguments of a launch)."""
    numel = 1 << 12 if quick else 4 << 20
    base = {"world_size": 2, "num_groups": 1}
    found = [
        ("ranks", x, {**base, "count": 200, "numel": numel // 200, "world_size": x}) for x in RANKS
    ]
    found += [("tensors", x, {**base, "count": x, "numel": _SMALL}) for x in TENSORS]
    found += [
        (axis, x, {"world_size": world_size, "count": 600, "numel": numel // 600, "num_groups": x})
        for axis, world_size in (("groups, 2 ranks", 2), ("groups, 8 ranks", 8))
        for x in GROUPS
    ]
    few = [point for point in found if point[1] <= 10 and point[2]["world_size"] == 2]
    return few if quick else found


def _launched(axis: str, x: int, arguments: dict[str, int], index: int, steps: int) -> list[Row]:
    world_size = arguments["world_size"]
    own = {key: value for key, value in arguments.items() if key != "world_size"}
    target = "launch.bench.bench_growth:measure"
    names = METHODS[axis]
    rows = [_row(axis, method, x, index) for method in names]
    try:
        ranks = run_ranks(target, {"names": names, "steps": steps, **own}, world_size=world_size)
    except LaunchError as error:
        print(error, flush=True)
        return [{**row, "note": "failed"} for row in rows]
    for row in rows:  # the slowest rank counts
        row |= {key: max(rank[row["method"]][key] for rank in ranks) for key in TIMED}
    return rows


# Counted


def _row(axis: str, method: str, x: int, index: int = 0) -> Row:
    empty = dict.fromkeys((*TIMED, *COUNTED), "")
    return {"axis": axis, "method": method, "x": x, "round": index, "note": "", **empty}


def store_requests_per_s(world_size: int) -> float:
    """Return the requests to the store in a second of one rank that has waited for long."""
    schedule = PollRateLimit(0, world_size)
    return sum(1 / limit.period_s for limit in (schedule.failures, schedule.mismatches))


def counted(name: str, rule: Callable[..., Any], world_size: int) -> Row:
    """Return what one rank sends in a step, holds, and asks, with BERT-large's shapes."""
    blocks = [shape for block in shapes.bert(24, 1024) for shape in block]
    named = [(f"p{i}", tuple(shape)) for i, shape in enumerate(blocks)]
    budget = plan(named, rule, world_size=world_size, device="cpu")
    peers = world_size - 1
    return {
        **_row("ranks, counted", name, world_size),
        "messages": peers * sum(each.number for each in budget.collectives),
        "sent_bytes": sum(each.sent_nbytes for each in budget.collectives),
        "memory_bytes": budget.total_nbytes,
        "store_requests_per_s": store_requests_per_s(world_size),
    }


def laid_out(axis: str, count: int, num_groups: int) -> Row:
    """Return the collectives' bytes and messages of one rank of eight, by the layout alone."""
    # As measured, and no multiple of a block, so that padding shows.
    world_size, numel = 8, _SMALL if axis.startswith("tensors") else (4 << 20) // 600
    specs = [
        ParamSpec(f"p{i}", (numel,), (1,), "float32", "cpu", i % num_groups) for i in range(count)
    ]
    layout = FlatLayout.build(
        specs, world_size=world_size, bucket_nbytes=8 << 20, granularity="element"
    )
    padded = sum(flat.numel for flat in layout.flats) * 4
    return {
        **_row(axis, "8 ranks", count if axis.startswith("tensors") else num_groups),
        "messages": 2 * len(layout.buckets) * (world_size - 1),
        "sent_bytes": 2 * padded * (world_size - 1) // world_size,
        "memory_bytes": 2 * padded + 2 * padded // world_size,
    }


def run(options: Options) -> Iterator[Row]:
    """Yield a row per method of every launch, and one per number of ranks of the count."""
    rules: Mapping[str, Callable[..., Any]] = {"Adam": ShardedAdam, "LAMB": ShardedLamb}
    for name, rule in rules.items() if options.wants("ranks, counted") else ():
        for world_size in SIMULATED_RANKS[: 2 if options.quick else None]:
            yield counted(name, rule, world_size)
    for count in TENSORS if options.wants("tensors, counted") else ():
        yield laid_out("tensors, counted", count, 1)
    for num_groups in GROUPS if options.wants("groups, counted") else ():
        yield laid_out("groups, counted", 600, num_groups)
    points = [point for point in _points(options.quick) if options.wants(point[0])]
    steps = 1 if options.quick else STEPS
    for index, (axis, x, arguments) in interleaved(points, options.num_rounds(ROUNDS)):
        yield from _launched(axis, x, arguments, index, steps)


# What it comes to


def exponent(points: Sequence[tuple[float, float]]) -> float:
    """Return the slope of a line through the points in logarithms, by least squares."""
    pairs = [(math.log(x), math.log(y)) for x, y in points if x > 0 and y > 0]
    mean_x = sum(x for x, _ in pairs) / len(pairs)
    mean_y = sum(y for _, y in pairs) / len(pairs)
    spread_x = sum((x - mean_x) ** 2 for x, _ in pairs)
    return sum((x - mean_x) * (y - mean_y) for x, y in pairs) / spread_x if spread_x else 0.0


def summary(rows: Sequence[Row]) -> Summary:
    """Return a table of each axis with a line per method and number, and one of exponents."""
    tables, panels, fitted, targets = [], [], [], []
    for (axis,), same in groups(measured(rows), "axis").items():
        is_counted = str(axis).endswith("counted")
        columns = COUNTED if is_counted else TIMED
        lines = []
        for (method,), own in groups(same, "method").items():
            by_x = groups(own, "x")
            for (x,) in sorted(by_x):
                cells = [_cell(by_x[x,], column) for column in columns]
                lines.append([str(method), f"{int(x):,}", *cells])
            for column in columns:
                found = [(x, one) for (x,), one in by_x.items() if _has(one, column)]
                points = [(float(x), middle(one, column)) for x, one in found]
                if len(points) > 1:
                    slope = exponent(points)
                    fitted.append([str(axis), str(method), column, f"{slope:.2f}"])
                    targets += _targets(str(axis), str(method), column, slope)
        tables.append(Table(f"Over {axis}", ["method", "number", *columns], lines))
        column = "messages" if is_counted else "step_ms"
        curves = {
            str(method): [(float(x), middle(f, column)) for (x,), f in groups(own, "x").items()]
            for (method,), own in groups(same, "method").items()
        }
        if not is_counted or axis == "ranks, counted":  # over the others nothing grows
            panels.append(Panel(f"over {axis}", _UNITS[column], lines=curves, x_axis=str(axis)))
    targets += _against_ddp([row for row in measured(rows) if row["axis"] == "ranks"])
    for axis in ("groups, 2 ranks", "groups, 8 ranks"):
        targets += _against_one_group([row for row in measured(rows) if row["axis"] == axis])
    tables.append(Table("Exponents", ["axis", "method", "cost", "exponent"], fitted))
    method = (
        "Measured: 4 M elements in 200 tensors over ranks; tensors of 16 elements, and 600 tensors "
        "in groups, on two ranks or eight. A backward that makes every gradient, and a step at new "
        "learning rates; all methods take turns in the same processes, the slowest rank counts, "
        "median of five steps. "
        "Ranks share two cores, so a step that costs each rank the same has exponent 1 over ranks. "
        "Counted, of one rank: the plan of BERT-large over sockets, or the layout alone, nothing "
        "run. Messages are those that it sends in a step, and store requests those of a long wait."
    )
    return Summary("Growth", method, tables, targets, panels)


def _has(rows: Sequence[Row], column: str) -> bool:
    return rows[0][column] != ""


def _cell(rows: Sequence[Row], column: str) -> str:
    if not _has(rows, column):
        return ""
    if column in TIMED:
        return spread(rows, column, 1)
    return f"{middle(rows, column):,.{3 if column == 'store_requests_per_s' else 0}f}"


def _targets(axis: str, method: str, column: str, slope: float) -> list[Target]:
    """Return the bound of a cost, if it has one: over ranks flat, over the others linear."""
    if axis.startswith("ranks"):
        if column not in ("sent_bytes", "memory_bytes", "store_requests_per_s"):
            return []
        limit = _FLAT_LIMIT
    elif method == DDP:
        return []
    else:
        limit = _LINEAR_LIMIT
    text = f"{axis}, {method}: exponent of {column} <= {limit}"
    slope = round(slope, 2)  # as shown: a line through rounded points may exceed 1 by a little
    return [Target(text, f"{slope:.2f}", slope <= limit)]


def _against_ddp(rows: Sequence[Row]) -> list[Target]:
    """Hold steps of many ranks against those of DDP in the same launch."""
    targets = []
    for (x,), same in groups(rows, "x").items():
        by_method = groups(same, "method")
        step_ms = {method: middle(own, "step_ms") for (method,), own in by_method.items()}
        ours = [method for method in step_ms if method != DDP]
        for method in ours if x >= _MANY_RANKS else ():
            ratio = step_ms[method] / step_ms[DDP]
            text = f"{method}, {int(x)} ranks: a step at most as long as {DDP}'s"
            targets.append(Target(text, f"{ratio:.2f}", ratio <= 1))
    return targets


def _against_one_group(rows: Sequence[Row]) -> list[Target]:
    """Hold steps of the most groups against those of one group, of the same parameters."""
    targets = []
    for (method,), own in groups(rows, "method").items():
        step_ms = {int(x): middle(same, "step_ms") for (x,), same in groups(own, "x").items()}
        if method != DDP and {GROUPS[0], GROUPS[-1]} <= step_ms.keys():
            ratio = step_ms[GROUPS[-1]] / step_ms[GROUPS[0]]
            text = (
                f"{rows[0]['axis']}, {method}: a step of {GROUPS[-1]} groups at most "
                f"{_MANY_GROUPS_LIMIT} of one of {GROUPS[0]}"
            )
            targets.append(Target(text, f"{ratio:.2f}", ratio <= _MANY_GROUPS_LIMIT))
    return targets
