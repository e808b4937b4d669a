"""Show what a run's steps did: trust ratios, norms, clips.

    python launch/bert/report.py runs/bert-001

Writes norms.png into the run's folder, and prints a table. For a run that goes on, too.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from pretraining.errors import UsageError, not_installed
from pretraining.files import blaming
from pretraining.launch import refuse
from pretraining.metrics import METRICS_FILE, read_records
from pretraining.norm_curves import cost_of_watching, draw_norms, make_table

PICTURE_FILE = "norms.png"


def main(argv: Sequence[str]) -> int:
    """Write the picture and print the table; return the exit code, 2 where there is no run."""
    parser = argparse.ArgumentParser(prog="report.py", description=__doc__.split("\n")[0])
    parser.add_argument("run", type=Path, help="the folder of a run")
    run: Path = parser.parse_args(argv).run
    try:
        _report(run)
    except UsageError as error:
        return refuse(error, None, "report.py")
    except ModuleNotFoundError as error:
        return refuse(not_installed(error), None, "report.py")
    return 0


def _report(run: Path) -> None:
    path = run / METRICS_FILE
    if not path.is_file():
        raise UsageError(f"{path} is not there; name the folder of a run")
    with blaming("run", path):
        records = read_records(path)
    norms = [record for record in records if record["kind"] == "norms"]
    if not norms:
        raise UsageError(f"{path} has no norms yet; a run with --norms-every notes them")
    print(make_table(norms))
    print(cost_of_watching(records))
    for record in records:
        if record["kind"] == "warning":
            print(f"warning after {record['step']} steps: {record['text']}")
    with blaming("run", run / PICTURE_FILE):
        draw_norms(norms, run / PICTURE_FILE, title=str(run))
    print(f"files: {run / PICTURE_FILE}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
