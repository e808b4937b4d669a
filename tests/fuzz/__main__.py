"""Run random programs: ``python -m tests.fuzz --programs 1000`` or ``--seed 17``."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Sequence

from tests.fuzz.features import FEATURES
from tests.fuzz.fsdp import generate_fsdp
from tests.fuzz.generate import generate
from tests.fuzz.program import Program
from tests.fuzz.shrink import shrink
from tests.fuzz.worlds import Verdict, Worlds


def main(arguments: Sequence[str] | None = None) -> int:
    """Run programs; return 1 if any failed, else 0."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--programs", type=int, default=100, help="how many")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--seed", type=int, help="run this one and print it")
    parser.add_argument("--worlds", default="1,2,3", help="world sizes, separated by commas")
    parser.add_argument(
        "--without", default="", help=f"features to leave out: {', '.join(FEATURES)}"
    )
    parser.add_argument("--with", dest="having", default="", help="features to add")
    parser.add_argument("--optimizer", default="", help="a class, such as ShardedMuon")
    parser.add_argument("--fsdp", action="store_true", help="programs over FSDP2 models")
    parser.add_argument("--shrink", action="store_true", help="make failing programs smaller")
    parser.add_argument("--max-failures", type=int, default=20, help="stop after so many")
    given = parser.parse_args(arguments)
    worlds = tuple(int(size) for size in given.worlds.split(","))
    features = dict(FEATURES)
    for text, value in ((given.without, False), (given.having, True)):
        for name in filter(None, text.split(",")):
            if name not in features:
                parser.error(f"no feature {name!r}; there are {', '.join(features)}")
            features[name] = value
    seeds = range(given.first_seed, given.first_seed + given.programs)
    if given.seed is not None:
        seeds = range(given.seed, given.seed + 1)
    if given.fsdp:
        programs = (generate_fsdp(seed, worlds, given.optimizer) for seed in seeds)
    else:
        programs = (generate(seed, worlds, features, given.optimizer) for seed in seeds)
    with Worlds() as running:
        if given.seed is not None:
            program = next(programs)
            print(program)
            return _report([(program, running.run(program))], running, given.shrink)
        return _run_all(programs, running, given)


def _run_all(programs: object, running: Worlds, given: argparse.Namespace) -> int:
    begin = time.monotonic()
    counts: Counter[str] = Counter()
    for program in programs:  # type: ignore[attr-defined]
        verdict = running.run(program)
        counts[verdict.status] += 1
        if verdict.status == "failed":
            print(program)
            _report([(program, verdict)], running, given.shrink)
        done = sum(counts.values())
        if done % 100 == 0:
            print(f"{done} programs, {time.monotonic() - begin:.0f} s, {dict(counts)}", flush=True)
        if counts["failed"] >= given.max_failures:
            break
    print(f"{counts['refused']} refused on all ranks, {time.monotonic() - begin:.1f} s")
    print(f"{sum(counts.values())} programs, {counts['failed']} mismatches")
    return int(counts["failed"] > 0)


def _report(results: Sequence[tuple[Program, Verdict]], running: Worlds, smaller: bool) -> int:
    failed = 0
    for program, verdict in results:
        print(f"seed {program.seed}: {verdict.status}\n{verdict.text}", flush=True)
        if verdict.status != "failed":
            continue
        failed += 1
        if smaller:
            least = shrink(program, lambda other: running.run(other).status == "failed")
            print(f"smallest program that fails:\n{least}\n{running.run(least).text}", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
