"""Run faults by collectives, optimizer and world size; print and write the table.

python -m tests.faults                    everything, about 15 minutes on two cores
python -m tests.faults --only unfreeze killed --worlds 2
python -m tests.faults --optimizers adam --worlds 16    a short table, 15 minutes
python -m tests.faults --only killed --optimizers adam --worlds 4 8 16 --repeat 20
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import math
import os
import platform
import shlex
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from tests.faults.runner import Ending, Setting, run
from tests.faults.table import FAULTS

COLLECTIVES = ("auto", "pairwise", "native")
_LATE = " late: "
MOST_SHOWN = 4
"""Ranks whose times a row shows one by one; those of more are in the form of repeated runs."""

REPEATED_HEADER = (
    "| fault | collectives | optimizer | world | runs | survivors | wrong | late "
    "| seconds to the error, median | most |\n|---|---|---|---|---|---|---|---|---|---|"
)
HEADER = (
    "| fault | collectives | optimizer | world | seconds to the error on each survivor "
    "| exit codes | what the first survivor says |\n|---|---|---|---|---|---|---|"
)


_LEGENDS = {
    False: "Its exit code comes last.",
    True: "Wrong: no error, or one that does not name the fault, or other ranks. Late: after "
    "2 s, or 2 s after the process group's timeout of 6 s where only that can tell.",
}


def row(name: str, setting: Setting, endings: list[Ending]) -> str:
    """Return a line of the table."""
    survivors = endings[:-1]
    seconds = ", ".join("-" if e.seconds is None else f"{e.seconds:.2f}" for e in survivors)
    codes = ", ".join(str(ending.exit_code) for ending in endings)
    message = (survivors[0].message or "nothing").replace("|", "/").replace("\n", " ")
    short = message if len(message) <= 160 else message[:157] + "..."
    where = f"{setting.collectives} | {setting.optimizer} | {setting.world_size}"
    return f"| {name} | {where} | {seconds} | {codes} | {short} |"


def repeated_row(
    name: str, setting: Setting, runs: list[list[Ending]], found: Sequence[str]
) -> str:
    """Return a line of the table of faults that were repeated; ``found`` is wrong with endings."""
    num_late = sum(_LATE in problem for problem in found)
    survivors = [ending for endings in runs for ending in endings[:-1]]
    known = [ending.seconds for ending in survivors if ending.seconds is not None] or [math.nan]
    seconds = f"{statistics.median(known):.2f} | {max(known):.2f}"
    where = f"{setting.collectives} | {setting.optimizer} | {setting.world_size}"
    numbers = f"{len(runs)} | {len(survivors)} | {len(found) - num_late} | {num_late}"
    return f"| {name} | {where} | {numbers} | {seconds} |"


def problems(name: str, endings: list[Ending]) -> list[str]:
    """Return what is wrong with how the ranks ended."""
    fault, bad = FAULTS[name], len(endings) - 1
    verdicts = [e.verdict(fault, bad=bad, bound_s=fault.bound_s) for e in endings]
    return [
        f"rank {rank} {verdict}: {ending.message}"
        for rank, (verdict, ending) in enumerate(zip(verdicts, endings, strict=True))
        if verdict != "ok"
    ]


def main() -> int:
    """Return the exit code: 1 if any row is silent, late or does not name the fault."""
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m tests.faults")
    parser.add_argument("--only", nargs="*", default=list(FAULTS), choices=list(FAULTS))
    parser.add_argument("--worlds", nargs="*", type=int, default=[2, 3])
    parser.add_argument("--collectives", nargs="*", default=list(COLLECTIVES))
    parser.add_argument("--optimizers", nargs="*", default=["adam", "lamb"])
    parser.add_argument("--repeat", type=int, default=1, help="runs of each; the table counts them")
    parser.add_argument("--write", type=Path, help="file for the table")
    options = parser.parse_args()
    is_short = options.repeat > 1 or max(options.worlds) > MOST_SHOWN
    header = REPEATED_HEADER if is_short else HEADER
    rows, wrong = [], 0
    settings = itertools.product(
        options.only, options.collectives, options.optimizers, options.worlds
    )
    print(header)
    for name, collectives, optimizer, world_size in settings:
        if collectives not in (FAULTS[name].only or COLLECTIVES):
            continue
        setting = Setting(collectives, optimizer, world_size)
        runs = [run(name, setting) for _ in range(options.repeat)]
        found = [problem for endings in runs for problem in problems(name, endings)]
        if is_short:
            rows.append(repeated_row(name, setting, runs, found))
        else:
            rows.append(row(name, setting, runs[0]))
        print(rows[-1], flush=True)
        for problem in found:
            print(f"WRONG: {name} {setting}: {problem}", flush=True)
        wrong += len(found)
    num_runs = len(rows) * options.repeat
    summary = f"{num_runs} runs of {len(options.only)} faults, {wrong} wrong"
    if options.write is not None:
        path = str(options.write)
        command = shlex.join("FILE" if word == path else word for word in sys.argv[1:])
        about = (
            "# Faults of one rank, and what the others learn\n\n"
            f"`python -m tests.faults {command}`, {datetime.date.today()}, torch "
            f"{torch.__version__}, Python {platform.python_version()}, {os.cpu_count()} cores. "
            f"The last rank has the fault. {_LEGENDS[is_short]}\n\n{summary}.\n\n"
        )
        options.write.write_text(about + "\n".join([header, *rows]) + "\n")
    print(summary)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
