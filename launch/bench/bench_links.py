"""Whole training steps between hosts whose links are slow, all methods in the same processes.

One launch per table. Its methods take turns: a warm-up step, then steps that follow each other
without a barrier. The clock runs from the end of the warm-up's step() to the end of the last: what
the former left in flight is inside, what the latter leaves is not, as in any long run. Peak
memory comes from short launches of one method each, for in shared processes it has no owner.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor

from launch.bench.environment import version_of
from launch.bench.hosts import Hosts, reason_unavailable, sent_nbytes
from launch.bench.launches import LaunchError, run_ranks
from launch.bench.options import Options, Row, interleaved
from launch.bench.report import groups
from launch.bench.timing import PeakMemory, time_ms
from launch.bench.training import ADAM, COMPUTE, DDP, METHODS, Training, built
from launch.bench.transformer import ELSEWHERE, HOST_AHEAD, SIZES, Size, make_batch, numel_of

ROUNDS = 3
STEPS = 10
WARM_UP = 1
SETTLE = 2
"""Steps after a method has been built, in which it compiles and allocates."""

REQUIRED = (COMPUTE, DDP)
"""What every table has, for the others are held against them."""

_MODULE = "launch.bench.bench_links"
_TIMEOUT_S = 3 * 3600.0
_FAILED = re.compile(r"\[method (.+?) failed\]")


@dataclass(frozen=True)
class Table:
    """Hosts, what each may send, and whether the model computes on the host's cores.

    With ``host_is_ahead`` it computes elsewhere, and the host launches layers ahead.
    """

    rate: str
    num_hosts: int
    is_elsewhere: bool = False
    host_is_ahead: bool = False

    @property
    def link(self) -> str:
        """The column "rate" of its rows."""
        return self.rate + (HOST_AHEAD if self.host_is_ahead else "")

    def __str__(self) -> str:
        return f"{self.link}, {self.num_hosts} hosts"


QUICK_TABLE = Table("1gbit", 2)
TABLES = [Table("200mbit", 2), QUICK_TABLE, Table("4gbit", 2), Table("1gbit", 3)]
FREE_TABLES = [
    Table("1gbit", 2, is_elsewhere=True),
    Table("1gbit", 2, is_elsewhere=True, host_is_ahead=True),
    Table("4gbit", 2, is_elsewhere=True),
]


def measure(methods: Sequence[str], size: str, num_rounds: int, num_steps: int) -> Row:
    """Run on every rank: return a row per turn, and each method's checksum of parameters."""
    trainings: dict[str, Training] = {}
    for name in methods:
        with _naming(name):
            trainings[name] = built(name, size)
            _steps(trainings[name], SIZES[size], range(SETTLE))
    turns = []
    for index, name in interleaved(methods, num_rounds):
        first = SETTLE + index * (WARM_UP + num_steps)
        with _naming(name):
            row = _turn(trainings[name], SIZES[size], first, num_steps)
        turns.append({"method": name, "round": index, **row})
    checksums = {}
    for name, training in trainings.items():
        with _naming(name):
            checksums[name] = training.checksum()
    return {"turns": turns, "checksums": checksums, "param_nbytes": 4 * numel_of(SIZES[size])}


def measure_peak(method: str, size: str) -> int:
    """Run on every rank: return the bytes that building a method and its steps take at most."""
    rehearsal = built(method, "tiny", rehearsal=True)
    _steps(rehearsal, SIZES["tiny"], range(SETTLE))
    del rehearsal
    memory = PeakMemory()
    training = built(method, size)
    _steps(training, SIZES[size], range(SETTLE))
    return memory.nbytes()


def _turn(training: Training, size: Size, first: int, num_steps: int) -> Row:
    """Return times of steps after a warm-up, and the bytes sent per step of both."""
    rank = dist.get_rank()
    warm_up = [make_batch(size, first + step, rank) for step in range(WARM_UP)]
    batches = [make_batch(size, first + WARM_UP + step, rank) for step in range(num_steps)]
    losses: list[Tensor] = []

    def run() -> None:
        losses.extend(training.step(batch) for batch in batches)

    dist.barrier()
    before = sent_nbytes()
    for batch in warm_up:
        training.step(batch)
    core_before = time.process_time()
    step_s = time_ms(run) / 1e3 / num_steps
    core_s = (time.process_time() - core_before) / num_steps
    training.finish()
    dist.barrier()  # what this rank sent has left it, for the others have it
    sent = (sent_nbytes() - before) / (WARM_UP + num_steps)
    return {"step_s": step_s, "core_s": core_s, "sent_nbytes": sent, "loss": losses[-1].item()}


def _steps(training: Training, size: Size, steps: range) -> None:
    for step in steps:
        training.step(make_batch(size, step, dist.get_rank()))
    training.finish()


@contextmanager
def _naming(method: str) -> Iterator[None]:
    """Start together, and say whose the error is if there is one."""
    dist.barrier()
    try:
        yield
    except Exception as error:
        raise RuntimeError(f"[method {method} failed] {error}") from error


def failed_method(output: str) -> str | None:
    """Return the method that a launch's output says has failed; None if it says nothing."""
    # Tracebacks show the line of code as well.
    found = [name for name in _FAILED.findall(output) if name in METHODS]
    return found[0] if found else None


def combine(ranks: Sequence[Row]) -> list[Row]:
    """Return a row per turn: of the slowest rank, against others of the same round.

    Methods whose ranks ended with different parameters have a note in place of numbers.
    """
    rows = []
    for turns in zip(*(rank["turns"] for rank in ranks), strict=True):
        rows.append(
            {
                "method": turns[0]["method"],
                "round": turns[0]["round"],
                "note": "",
                "step_s": max(turn["step_s"] for turn in turns),
                "core_s": max(turn["core_s"] for turn in turns),
                "sent_p": max(turn["sent_nbytes"] for turn in turns) / ranks[0]["param_nbytes"],
                "loss": sum(turn["loss"] for turn in turns) / len(turns),
            }
        )
    for same in groups(rows, "round").values():
        _compare({row["method"]: row for row in same})
    differing = {
        name
        for name in ranks[0]["checksums"]
        if len({rank["checksums"][name] for rank in ranks}) > 1
    } - {COMPUTE}
    for name in differing:
        print(f"{name}: ranks ended with different parameters", flush=True)
    return [
        {"method": row["method"], "round": row["round"], "note": "failed"}
        if row["method"] in differing
        else {key: round(value, 4) if type(value) is float else value for key, value in row.items()}
        for row in rows
    ]


def _compare(by_method: dict[str, Row]) -> None:
    """Complete the rows of one round."""
    compute_s, ddp_s = (by_method[name]["step_s"] for name in REQUIRED)
    for name, row in by_method.items():
        if name == COMPUTE:
            del row["loss"]  # it trains nothing
        else:
            row["ratio"] = row["step_s"] / ddp_s
            row["exposed_s"] = row["step_s"] - compute_s


def wanted(options: Options, tables: Sequence[Table] = TABLES) -> tuple[list[Table], list[str]]:
    """Return tables and methods: where a text of ``only`` is part of one, only such ones.

    Texts choose tables or methods; what no text is about is not limited. The methods that others
    are held against always run.
    """
    chosen = [table for table in tables if options.only and options.wants(str(table))]
    named = [name for name in METHODS if options.only and options.wants(name)]
    named = named or [name for name, method in METHODS.items() if method.is_default]
    names = [name for name in METHODS if name in named or name in REQUIRED]
    quick = QUICK_TABLE if QUICK_TABLE in tables else tables[0]
    return chosen or ([quick] if options.quick else list(tables)), names


def run_free(options: Options) -> Iterator[Row]:
    """Yield rows as run() does, of a model that leaves the host's cores free."""
    yield from run(options, FREE_TABLES)


def run(options: Options, choice: Sequence[Table] = TABLES) -> Iterator[Row]:
    """Yield a row per table, method and round."""
    reason = reason_unavailable()
    if reason is not None:
        yield {"method": "all", "note": f"not measured: {reason}"}
        return
    tables, names = wanted(options, choice)
    here = [name for name in names if _is_installed(name)]
    peaks: dict[int, Row] = {}
    for table in tables:
        facts = _facts(table, options)
        for name in names:
            if name not in here:
                yield {**facts, "method": name, "note": "not installed"}
        if table.num_hosts not in peaks:
            peaks[table.num_hosts] = {} if table.is_elsewhere else _peaks(here, table, options)
        for row in _launch(table, here, options):
            peak_p = peaks[table.num_hosts].get(row["method"], "")
            yield {**facts, **row, **({} if row["note"] else {"peak_p": peak_p})}


def _is_installed(method: str) -> bool:
    package = METHODS[method].package
    return package is None or version_of(package) is not None


def _size(table: Table, options: Options) -> str:
    name = "tiny" if options.quick else "33M"
    name += ELSEWHERE if table.is_elsewhere else ""
    return name + (HOST_AHEAD if table.host_is_ahead else "")


def _facts(table: Table, options: Options) -> Row:
    numel = numel_of(SIZES[_size(table, options)])
    return {"rate": table.link, "world_size": table.num_hosts, "numel": numel}


def _launch(table: Table, methods: Sequence[str], options: Options) -> Iterator[Row]:
    """Yield the rows of one table; a method that fails is left out of a second launch."""
    arguments: dict[str, Any] = {
        "methods": list(methods),
        "size": _size(table, options),
        "num_rounds": options.num_rounds(ROUNDS),
        "num_steps": 2 if options.quick else STEPS,
    }
    try:
        yield from combine(_on_hosts("measure", arguments, table.num_hosts, table.rate))
    except LaunchError as error:
        print(error, flush=True)
        failed = failed_method(str(error))
        lost = methods if failed not in methods or failed in REQUIRED else [failed]
        for name in lost:
            yield {"method": name, "note": "failed"}
        left = [name for name in methods if name not in lost]
        if left:
            yield from _launch(table, left, options)


def _peaks(methods: Sequence[str], table: Table, options: Options) -> Row:
    """Return the peak memory of each method in units of the parameters' bytes, links unlimited."""
    peaks: Row = {}
    size = _size(table, options)
    for name in methods:
        if options.quick and name != ADAM:
            continue
        arguments = {"method": name, "size": size}
        try:
            found = _on_hosts("measure_peak", arguments, table.num_hosts, None)
        except LaunchError as error:
            print(error, flush=True)
            continue
        peaks[name] = round(max(found) / (4 * numel_of(SIZES[size])), 3)
    return peaks


def _on_hosts(function: str, arguments: Row, num_hosts: int, rate: str | None) -> list[Any]:
    with Hosts(num_hosts, rate) as hosts:
        return run_ranks(
            f"{_MODULE}:{function}",
            arguments,
            world_size=num_hosts,
            timeout_s=_TIMEOUT_S,
            hosts=hosts,
        )
