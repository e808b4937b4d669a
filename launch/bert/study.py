"""Show what an optimizer does as the batch grows, at an equal number of samples.

    python launch/bert/study.py runs/study           # a night on two cores
    python launch/bert/study.py --quick runs/quick   # ten minutes

README.md beside this file says what is compared. Stopped or killed, the same line goes on.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from largebatch.design import METHODS, QUICK, WHOLE, Design
from largebatch.report import write_report
from largebatch.study import DESIGN_FILE, Study
from pretraining.errors import UsageError, not_installed
from pretraining.launch import refuse


def main(argv: Sequence[str]) -> int:
    """Run a study; return the exit code: 0, 1 where it was stopped, 2 where it cannot be done."""
    arguments = _parse(argv)
    try:
        if arguments.report and not (arguments.folder / DESIGN_FILE).exists():
            raise UsageError(f"{arguments.folder} has no study to report; name the folder of one")
        with Study.open(arguments.folder, _design(arguments)) as study:
            is_done = arguments.report or study.run(arguments.jobs, arguments.ranks)
            write_report(study)
    except UsageError as error:
        return refuse(error, None, "study.py")
    except ModuleNotFoundError as error:
        return refuse(not_installed(error), None, "study.py")
    return 0 if is_done else 1


def _design(arguments: argparse.Namespace) -> Design | None:
    """Return what the options ask for, or None without any: a study that is there goes on."""
    names = ("methods", "batches", "samples", "seeds", "options")
    asked = {name: getattr(arguments, name) for name in names}
    given = {name: value for name, value in asked.items() if value is not None}
    if not (given or arguments.quick):
        return None
    return Design.of(QUICK if arguments.quick else WHOLE, given)


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="study.py",
        description="Compare optimizers over batch sizes at an equal number of samples.",
        epilog="Options after -- go to pretrain.py, for every run: -- --model-size mini",
        allow_abbrev=False,
    )
    where = list(argv).index("--") if "--" in argv else len(argv)
    argv, options = argv[:where], argv[where + 1 :]
    add = parser.add_argument
    add("folder", type=Path, help="of the study; one that is there is gone on with")
    add("--quick", action="store_true", help="ten minutes: fewer samples, three batches, one seed")
    add("--methods", nargs="+", choices=METHODS, metavar="NAME",
        help=f"some of {', '.join(METHODS)} (default: all)")  # fmt: skip
    add("--batches", nargs="+", type=int, metavar="N",
        help="samples per step, rising (default: 16 and so on, doubled, to 512)")  # fmt: skip
    add("--samples", type=int, help=f"of each run (default: {WHOLE.samples})")
    add("--seeds", type=int, help=f"at the best learning rate (default: {WHOLE.seeds})")
    add("--jobs", type=int, default=os.cpu_count() or 1,
        help="runs at a time (default: this machine's cores, %(default)s)")  # fmt: skip
    add("--ranks", type=int, default=1, help="processes of each run, by torchrun (default: 1)")
    add("--report", action="store_true", help="only write the report of what is there")
    arguments = parser.parse_args(argv)
    for name in ("jobs", "ranks"):
        if getattr(arguments, name) < 1:
            parser.error(f"--{name} must be at least 1, got {getattr(arguments, name)}")
    arguments.options = tuple(options) or None
    return arguments


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
