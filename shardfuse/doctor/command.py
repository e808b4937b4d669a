"""``python -m shardfuse doctor``, alone or under torchrun."""

from __future__ import annotations

import argparse
import functools
import json
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Literal, TextIO

from shardfuse.comm import communicator_for
from shardfuse.doctor.checks import CHECKS, FULL_CHECKS, Check
from shardfuse.doctor.host import (
    Finding,
    Verdict,
    check_environment,
    check_versions,
    installed_version,
)
from shardfuse.doctor.world import CONNECT_REMEDY, World

_MAX_S = 1e8
"""Three years; longer timeouts overflow."""


def seconds(text: str) -> float:
    """Parse an option's seconds, for argparse."""
    value = float(text)
    if not 0 < value <= _MAX_S:
        raise argparse.ArgumentTypeError(f"{text} is no number of seconds above 0")
    return value


def add_options(command: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    command.add_argument("--json", action="store_true", help="print JSON, for scripts")
    command.add_argument("--backend", help="of the process group; that of the device, if left out")
    command.add_argument(
        "--limit-s",
        type=seconds,
        default=60.0,
        help="seconds for each thing (default: %(default)s)",
    )
    command.add_argument("--device", choices=["cpu"], help="even where there is an accelerator")
    command.add_argument(
        "--full", action="store_true", help="bandwidth at 200 MiB, too; on accelerators always"
    )


def run(arguments: argparse.Namespace) -> int:
    """Print the findings on the first rank; return 1 if a check failed."""
    with _private_stdout() as out:
        return _run(arguments, out)


@contextmanager
def _private_stdout() -> Iterator[TextIO]:
    """Yield standard output, and redirect output of libraries to standard error meanwhile.

    gloo of torch 2.9 prints there, which would break --json.
    """
    if sys.stdout is not sys.__stdout__ or sys.stdout is None:  # the caller has replaced it
        yield sys.stdout
        return
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with os.fdopen(os.dup(kept), "w") as out:
            yield out
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def _run(arguments: argparse.Namespace, out: TextIO) -> int:
    found: list[Finding] = []

    def end() -> None:
        text = f"nothing has come back on rank {world.rank} for {3 * arguments.limit_s:.0f} s"
        name = "process group" if len(found) < 5 else "a check after the last one"
        found.append(Finding(name, "failed", text, CONNECT_REMEDY))
        _show(found, out, as_json=arguments.json)
        os._exit(1)  # a wait for the store's socket cannot be interrupted otherwise

    checks = FULL_CHECKS if arguments.full else CHECKS
    world = World(arguments.limit_s, arguments.device)
    with _InactivityTimer(3 * arguments.limit_s, end) as watched:
        for finding in _findings(world, arguments.backend, checks):
            found.append(finding)
            watched.restart()
    if world.rank == 0 or not world.has_joined:
        _show(found, out, as_json=arguments.json)
    return int(any(finding.verdict == "failed" for finding in found))


_OF_ASCEND = ("torch_npu and CANN", "formats", "NPU settings", "room for communicators")
"""Checks that are printed only where torch_npu is installed; JSON always has them."""


def _show(found: Sequence[Finding], out: TextIO, *, as_json: bool) -> None:
    if as_json:
        text = json.dumps([finding.to_json() for finding in found])
    else:
        has_npu = installed_version("torch-npu") or installed_version("torch_npu")
        shown = (f for f in found if has_npu or f.name not in _OF_ASCEND)
        text = "\n".join(finding.describe() for finding in shown)
    print(text, file=out, flush=True)


def examine(
    backend: str | None = None,
    limit_s: float = 60.0,
    *,
    device: Literal["cpu"] | None = None,
    more: Mapping[str, Check] | None = None,
    tell: Callable[[Finding], None] = lambda finding: None,
) -> list[Finding]:
    """Return all findings. Collective if a launcher has started several ranks.

    Args:
        backend: backend of the process group; None: that of the device.
        limit_s: seconds for each thing that ranks wait for.
        device: "cpu" to ignore an accelerator.
        more: checks that follow the doctor's own, in the same process group; one with the name of
            a check of the doctor replaces it, at its place in ``more``. With this argument all
            checks that can run do so, also after a failed one.
        tell: called with each finding as it comes.
    """
    found: list[Finding] = []
    later = more or {}
    checks = {name: check for name, check in CHECKS.items() if name not in later} | {**later}
    for finding in _findings(
        World(limit_s, device), backend, checks, continue_after_failure=more is not None
    ):
        found.append(finding)
        tell(finding)
    return found


class _InactivityTimer:
    """Calls ``end`` in a thread if restart() is not called for so many seconds."""

    def __init__(self, limit_s: float, end: Callable[[], None]) -> None:
        self._limit_s, self._end = limit_s, end
        self._timer: threading.Timer | None = None

    def __enter__(self) -> _InactivityTimer:
        self.restart()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def restart(self) -> None:
        """Restart the timer."""
        self._stop()
        self._timer = threading.Timer(self._limit_s, self._end)
        self._timer.daemon = True
        self._timer.start()

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()


def _findings(
    world: World,
    backend: str | None,
    checks: Mapping[str, Check],
    *,
    continue_after_failure: bool = False,
) -> Iterator[Finding]:
    met = world.join()
    if not world.has_joined:
        yield from (*check_versions(), *check_environment(), met)
        return
    with world.cleanup():
        yield world.run_on_all_ranks("ranks", lambda: met)
        for name in ("torch", "torch_npu and CANN", "environment"):
            yield world.run_on_all_ranks(name, functools.partial(_local_finding, name))
        found = world.run_on_all_ranks("process group", lambda: _connect(world, backend))
        yield found
        has_group, is_well = found.verdict != "failed", found.verdict != "failed"
        for name, check in checks.items():
            if not has_group or not (world.is_consistent if continue_after_failure else is_well):
                text = "there is no process group, or an earlier check has broken it"
                yield Finding(name, "not run", text)
                continue
            comm = communicator_for(None, world.device)
            found = world.run_on_all_ranks(name, functools.partial(check, comm, world.device))
            is_well &= found.verdict != "failed"
            yield found


def _connect(world: World, backend: str | None) -> Finding:
    taken = world.select_device()
    return taken if taken.verdict == "failed" else world.connect(backend)


def _local_finding(name: str) -> Finding:
    """Return the finding of that name on this rank; "environment" merges several."""
    if name != "environment":
        return next(finding for finding in check_versions() if finding.name == name)
    wrong = check_environment()
    if not wrong:
        return Finding(name, "ok", "nothing in it is in the way")
    text = "; ".join(finding.text for finding in wrong)
    verdict: Verdict = "failed" if any(f.verdict == "failed" for f in wrong) else "warning"
    return Finding(name, verdict, text, " ".join(finding.remedy for finding in wrong))
