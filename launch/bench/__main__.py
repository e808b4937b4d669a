"""``python -m launch.bench [PART ...]``: measure, then write CSV, Markdown and PNG.

Run from the repository's root. README.md beside this file explains the method.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

from launch.bench import (
    bench_comm,
    bench_curves,
    bench_fsdp,
    bench_growth,
    bench_links,
    bench_scaling,
    bench_step,
    bench_update,
    environment,
    figures,
    overview,
    report,
    summaries,
    trace,
)
from launch.bench.options import Options, Row, resolve_device

PARTS: dict[str, tuple[Callable[[Options], Iterator[Row]], Callable[..., report.Summary]]] = {
    "update": (bench_update.run, summaries.update),
    "comm": (bench_comm.run, summaries.comm),
    "step": (bench_step.run, summaries.step),
    "scaling": (bench_scaling.run, summaries.scaling),
    "links": (bench_links.run, summaries.links),
    "accelerator": (bench_links.run_free, summaries.free_links),
    "trace": (trace.run, summaries.trace),
    "fsdp": (bench_fsdp.run, summaries.fsdp),
    "growth": (bench_growth.run, bench_growth.summary),
    "curves": (bench_curves.run, bench_curves.summary),
}


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Return the options of a command line."""
    parser = argparse.ArgumentParser(prog="python -m launch.bench", description=__doc__)
    parser.add_argument(
        "parts",
        nargs="*",
        metavar="PART",
        help=f"any of {', '.join(PARTS)}; all if none is given; report: only write tables anew",
    )
    parser.add_argument("--rounds", type=int, help="launches of each row (default: the part's own)")
    parser.add_argument("--only", nargs="+", default=[], metavar="TEXT", help="rows with this name")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, one round: a smoke test")
    parser.add_argument("--append", action="store_true", help="keep the rows there are")
    parser.add_argument("--device", default="cpu", help="of the update part (cpu, cuda, npu)")
    parser.add_argument(
        "--out", type=Path, default=environment.ROOT / "launch" / "bench" / "results"
    )
    arguments = parser.parse_args(argv)
    unknown = set(arguments.parts) - {*PARTS, "report"}
    if unknown:
        parser.error(f"unknown part {sorted(unknown)}: use {', '.join(PARTS)} or report")
    if find_spec("matplotlib") is None:  # before anything is measured
        parser.error("matplotlib is not installed: pip install matplotlib")
    if arguments.rounds is not None and arguments.rounds < 1:
        parser.error("--rounds must be at least 1")
    try:
        resolve_device(arguments.device)
    except (ValueError, RuntimeError, ImportError) as error:
        parser.error(f"--device: {error}")
    return arguments


def main(argv: Sequence[str]) -> int:
    """Run the parts asked for; return 1 if a launch failed, else 0."""
    arguments = parse(argv)
    arguments.out.mkdir(parents=True, exist_ok=True)
    options = Options(arguments.rounds, arguments.quick, arguments.device, tuple(arguments.only))
    command = "python -m launch.bench " + shlex.join(argv)
    failed = False
    for part in arguments.parts or list(PARTS):
        if part == "report":
            for known in PARTS:
                if (arguments.out / f"{known}.csv").exists():
                    _report(known, arguments.out)
            if all((arguments.out / f"{known}.csv").exists() for known in ("step", "links")):
                overview.draw_overview(arguments.out)
                if (arguments.out / "curves.csv").exists():
                    (arguments.out / figures.PAGE).write_text(figures.make_page(arguments.out))
            continue
        failed |= _measure(part, options, arguments, command.strip())
        _report(part, arguments.out)
    return int(failed)


def _measure(part: str, options: Options, arguments: argparse.Namespace, command: str) -> bool:
    """Measure a part into its CSV, which is complete after every launch; return if any failed."""
    run, _ = PARTS[part]
    path = arguments.out / f"{part}.csv"
    where = environment.describe(resolve_device(arguments.device), command)
    rows: list[Row] = report.read_csv(path) if arguments.append and path.exists() else []
    report.check_mergeable(rows, where)
    num_old = len(rows)
    begin = time.monotonic()
    for row in run(options):
        rows.append({**row, **where})
        report.write_csv(path, rows)
        shown = ", ".join(f"{key} {value}" for key, value in row.items() if value != "")
        print(f"[{part} {time.monotonic() - begin:5.0f} s] {shown}", flush=True)
    return any(row.get("note") == "failed" for row in rows[num_old:])


def _report(part: str, out: Path) -> None:
    path = out / f"{part}.csv"
    rows = report.read_csv(path) if path.exists() else []
    if not report.measured(rows):
        print(f"{part}: no rows with numbers, no tables written", flush=True)
        return
    summary = report.save(part, rows, out, PARTS[part][1])
    for target in summary.targets:
        print(f"{'reached' if target.is_met else 'MISSED '} {target.text}: {target.measured}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
