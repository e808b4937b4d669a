"""Whether shardfuse works on this host's accelerators: ``python -m launch.acceptance``.

Runs the doctor, this package's checks, a rank that hangs and 100 steps of launch/bert on all
devices, writes a report in JSON, and prints it as a table. Under ten minutes. Exit code 1 where
anything has failed.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from launch.acceptance import bert, hang, rows
from launch.acceptance.processes import ROOT, tail, torchrun
from launch.bench.environment import commit
from shardfuse.doctor import Finding
from shardfuse.doctor.command import seconds
from shardfuse.files import describe_os_error

LAUNCH = ROOT / "launch"
_CPU_RANKS = 2
_BERT_SHARE_S = 240.0
"""Of the limit, what the BERT job is left with at least."""


class WrongUse(Exception):
    """What cannot be done, and what to do instead."""


def main(argv: Sequence[str] | None = None) -> int:
    """Return 0; 1 where a row has failed; 2 for a request that cannot be met."""
    options = _parser().parse_args(argv)
    try:
        if options.markdown is not None:
            print(rows.markdown(_reports(options.markdown)), end="")
            return 0
        report = make(options)
    except WrongUse as error:
        print(f"acceptance: error: {error}", file=sys.stderr)
        return 2
    return int(any(row["verdict"] == "failed" for row in report["rows"]))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m launch.acceptance", description=__doc__)
    parser.add_argument(
        "--device", choices=["auto", "cpu", "cuda", "npu"], default="auto", help="%(default)s"
    )
    parser.add_argument("--nproc-per-node", type=int, help="all devices; on the CPU two ranks")
    parser.add_argument(
        "--report", type=Path, default=Path("runs/acceptance.json"), help="%(default)s"
    )
    parser.add_argument("--quick", action="store_true", help="small sizes, to try the program")
    parser.add_argument("--limit-s", type=seconds, default=540.0, help="in all (%(default)s)")
    parser.add_argument(
        "--markdown",
        nargs="*",
        type=Path,
        metavar="REPORT",
        help="print README's table with these reports; none: with the newest in results/",
    )
    return parser


def make(options: argparse.Namespace) -> dict[str, Any]:
    """Run everything; write and return the report.

    Raises:
        WrongUse: there is no such device, or not as many; or no place for the report.
    """
    kind, num_ranks = _devices(options.device, options.nproc_per_node)
    _check_place(options.report)
    deadline = time.monotonic() + options.limit_s
    with tempfile.TemporaryDirectory(prefix="shardfuse-acceptance-") as folder:
        work = Path(folder)
        found, facts, reason = _examined(kind, num_ranks, options, work, deadline)
        found[rows.HANG] = Finding(rows.HANG, "not run", "the ranks did not come so far")
        if len(found) > len(rows.ROWS) - 2:
            left_s = max(1.0, deadline - time.monotonic())
            found[rows.HANG] = hang.run(
                num_ranks,
                kind,
                is_hardware=bool(facts.get("on_hardware")),
                timeout_s=left_s,
                work=work,
            )
            print(found[rows.HANG].describe(), flush=True)
        found[rows.BERT] = bert.run(
            num_ranks,
            is_cpu=kind == "cpu",
            quick=options.quick,
            timeout_s=max(1.0, deadline - time.monotonic()),
            work=work,
        )
        for name, log in ((rows.HANG, "hang.log"), (rows.BERT, "bert.log")):
            if found[name].verdict == "failed":
                print(tail(work / log), file=sys.stderr)
    filled = rows.fill(found, kind=kind if facts.get("on_hardware") else None, reason=reason)
    report = {
        "device": kind,
        "on_hardware": False,
        "hardware": "unknown: the ranks did not come to tell",
        "versions": {},
        **facts,
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        "command": " ".join(["python -m launch.acceptance", shlex.join(_arguments(options))]),
        "commit": commit(),
        "world": num_ranks,
        "quick": options.quick,
        "rows": rows.to_json(filled),
    }
    options.report.write_text(json.dumps(report, indent=1) + "\n")
    print(f"\n{rows.describe(filled)}\n\nreport: {options.report}", flush=True)
    return report


def _check_place(report: Path) -> None:
    """Raise WrongUse where the report could not be written, which comes after all that it tells."""
    try:
        report.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise WrongUse(f"--report {report}: {describe_os_error(error)}") from error
    if report.is_dir():
        raise WrongUse(f"--report {report}: it is a folder; name a file in it")
    if not os.access(report if report.exists() else report.parent, os.W_OK):
        raise WrongUse(f"--report {report}: it cannot be written; name another file")


def _examined(
    kind: str, num_ranks: int, options: argparse.Namespace, work: Path, deadline: float
) -> tuple[dict[str, Finding], dict[str, Any], str]:
    """Return findings by name, facts of this host, and why any finding is missing."""
    told, log = work / "found.jsonl", work / "ranks.log"
    trace = options.report.with_suffix(".trace.json")
    command = ["-m", "launch.acceptance.ranks", "--found", str(told), "--trace", str(trace)]
    command += ["--quick"] if options.quick else []
    command += ["--device", "cpu"] if kind == "cpu" else []
    limit_s = max(1.0, deadline - time.monotonic() - min(_BERT_SHARE_S, options.limit_s / 2))
    code = torchrun(command, num_ranks, limit_s, log)
    reason = f"the ranks ended before it, exit code {code}"
    if code is None:
        reason = f"the ranks had not come to its end after {limit_s:.0f} s"
    found, facts = read(told)
    if len(found) < len(rows.ROWS) - 2:
        print(tail(log), file=sys.stderr)
    return found, facts, reason


def read(told: Path) -> tuple[dict[str, Finding], dict[str, Any]]:
    """Return findings by name, and facts, of the lines that the first rank wrote."""
    lines = told.read_text().splitlines() if told.is_file() else []
    contents = [json.loads(line) for line in lines]
    findings = [Finding(**content) for content in contents if "verdict" in content]
    facts = [content for content in contents if "verdict" not in content]
    return {finding.name: finding for finding in findings}, facts[-1] if facts else {}


def _devices(wanted: str, num_ranks: int | None) -> tuple[str, int]:
    """Return the kind of device, and the number of ranks."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    there = "cpu" if accelerator is None else accelerator.type
    kind = there if wanted == "auto" else wanted
    if kind not in (there, "cpu"):
        raise WrongUse(
            f"torch finds no {kind} here, but {there}. Install its driver and, for an NPU, "
            "torch-npu and CANN; --device cpu tries the program without any."
        )
    if num_ranks is not None and num_ranks < 1:
        raise WrongUse(f"--nproc-per-node must be at least 1, got {num_ranks}")
    if kind == "cpu":
        return kind, num_ranks or _CPU_RANKS
    number = torch.accelerator.device_count()
    if num_ranks is not None and num_ranks > number:
        raise WrongUse(f"--nproc-per-node {num_ranks}: this host shows {number} {kind} devices")
    return kind, num_ranks or number


def _arguments(options: argparse.Namespace) -> list[str]:
    given = ["--device", options.device]
    if options.nproc_per_node is not None:
        given += ["--nproc-per-node", str(options.nproc_per_node)]
    return [*given, *(["--quick"] if options.quick else [])]


def _reports(paths: Sequence[Path]) -> dict[str, rows.Report]:
    """Return reports by kind of device; of none given, the newest that lie in the repository."""
    chosen = list(paths)
    if not chosen:
        files = [path for kind in ("npu", "gpu") for path in (LAUNCH / kind / "results").glob("*")]
        chosen = sorted(p for p in files if p.suffix == ".json" and ".trace" not in p.suffixes)
    reports: dict[str, rows.Report] = {}
    for path in chosen:
        try:
            report: rows.Report = json.loads(path.read_text())
            kind = report["device"]
            is_whole = report["on_hardware"] and not report["quick"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise WrongUse(f"{path} is no report of acceptance: {error}") from error
        if not is_whole or kind not in rows.COLUMNS:
            how = "with --quick" if report["quick"] else f"on {kind}, without hardware"
            raise WrongUse(f"{path} was made {how}: it fills no column")
        reports[kind] = report
    return reports


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # not before all that it started
    sys.exit(main())
