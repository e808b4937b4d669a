"""``python -m shardfuse doctor``, alone or under torchrun."""

from __future__ import annotations

import argparse
import functools
import json

from shardfuse.comm import communicator_for
from shardfuse.doctor.checks import CHECKS
from shardfuse.doctor.findings import Finding, Verdict
from shardfuse.doctor.versions import check_environment, check_versions
from shardfuse.doctor.world import World


def add_options(command: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    command.add_argument("--json", action="store_true", help="for scripts")
    command.add_argument("--backend", help="of the process group; that of the device, if left out")
    command.add_argument(
        "--limit-s", type=float, default=60.0, help="seconds for each thing (%(default)s)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Print what is found, on the first rank; return 1 where anything has failed."""
    findings, rank = examine(arguments.backend, arguments.limit_s)
    if rank == 0 or findings[-1].name == "ranks":
        if arguments.json:
            print(json.dumps([finding.to_json() for finding in findings]), flush=True)
        else:
            print("\n".join(finding.describe() for finding in findings), flush=True)
    return int(any(finding.verdict == "failed" for finding in findings))


def examine(backend: str | None = None, limit_s: float = 60.0) -> tuple[list[Finding], int]:
    """Return all findings, and this process's rank. Collective where a launcher started several.

    It ends, whatever ranks do: each is waited for so long.

    Args:
        backend: of the process group; None: that of the device.
        limit_s: seconds for each thing that ranks wait for.
    """
    world = World(limit_s)
    local = [*check_versions(), *check_environment()]
    met = world.meet()
    if met.verdict == "failed":
        return [*local, met], world.rank
    with world.leaving():
        findings = [world.together("ranks", lambda: met)]
        findings += [
            world.together(name, functools.partial(_local, name))
            for name in ("torch", "torch_npu and CANN", "environment")
        ]
        findings.append(world.together("process group", lambda: world.connect(backend)))
        is_connected = findings[-1].verdict == "ok"
        for name, check in CHECKS.items():
            if not is_connected:
                text = "there is no process group, or an earlier check has broken it"
                findings.append(Finding(name, "not run", text))
                continue
            comm = communicator_for(None, world.device)
            findings.append(world.together(name, functools.partial(check, comm, world.device)))
            is_connected = findings[-1].verdict != "failed"
    return findings, world.rank


def _local(name: str) -> Finding:
    """Return the finding of that name on this rank; what is not found is right."""
    found = {finding.name: finding for finding in [*check_versions(), *check_environment()]}
    if name in found:
        return found[name]
    wrong = [finding for finding in check_environment() if finding.verdict != "ok"]
    if not wrong:
        return Finding(name, "ok", "nothing in it is in the way")
    text = "; ".join(finding.text for finding in wrong)
    verdict: Verdict = "failed" if any(f.verdict == "failed" for f in wrong) else "warning"
    return Finding(name, verdict, text, " ".join(finding.remedy for finding in wrong))
