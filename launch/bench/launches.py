"""Starts the ranks of one launch as fresh processes and collects what they measured.

    run_ranks("launch.bench.bench_step:measure", {"shapes": "bert-tiny", ...}, world_size=2)

calls ``measure(**arguments)`` on every rank, in a gloo group on loopback (one rank: no group), with
one thread each. With ``hosts`` rank i runs on host i, and what ranks send goes over their links.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from launch.bench.environment import ROOT
from launch.bench.hosts import Hosts

_POLL_S = 0.05
_GRACE_S = 10.0
_LOG_TAIL = 4000


class LaunchError(RuntimeError):
    """A rank failed or took too long; the message has the end of every rank's output."""


def run_ranks(
    target: str,
    arguments: dict[str, Any],
    *,
    world_size: int,
    timeout_s: float = 600.0,
    hosts: Hosts | None = None,
) -> list[Any]:
    """Return what ``target`` (module:function) returned on every rank, in rank order.

    Raises:
        LaunchError: see there. No process is left behind.
    """
    with tempfile.TemporaryDirectory(prefix="shardfuse-bench-") as folder:
        work = Path(folder)
        (work / "arguments.json").write_text(json.dumps(arguments))
        processes = [_start(target, work, rank, world_size, hosts) for rank in range(world_size)]
        try:
            codes = _wait(processes, time.monotonic() + timeout_s)
        finally:
            for process in processes:
                if process.poll() is None:
                    process.kill()
                process.wait()
        if any(code != 0 for code in codes):
            logs = (
                f"[rank {rank}, exit {codes[rank]}]\n" + _tail(work / f"{rank}.log")
                for rank in range(world_size)
            )
            raise LaunchError(f"{target} with {arguments} failed:\n" + "\n".join(logs))
        return [json.loads((work / f"{rank}.json").read_text()) for rank in range(world_size)]


def _start(
    target: str, work: Path, rank: int, world_size: int, hosts: Hosts | None
) -> subprocess.Popen[bytes]:
    environment = {
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "OMP_NUM_THREADS": "1",
        # gloo would otherwise ask the network which interface the host name belongs to.
        "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"),
        # DeepSpeed builds with the ninja beside this Python, also where no venv is activated.
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]),
        "DS_ACCELERATOR": "cpu",
        **({} if hosts is None else hosts.environment(rank)),
    }
    prefix = [] if hosts is None else hosts.command(rank)
    with (work / f"{rank}.log").open("wb") as log:
        return subprocess.Popen(
            [*prefix, sys.executable, "-m", "launch.bench.rank", target, str(work)],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
        )


def _wait(processes: list[subprocess.Popen[bytes]], deadline: float) -> list[int | None]:
    """Wait until all have ended, one has failed and the others had a moment, or the deadline."""
    while True:
        codes = [process.poll() for process in processes]
        if all(code is not None for code in codes) or time.monotonic() > deadline:
            return codes
        if any(code not in (None, 0) for code in codes):
            deadline = min(deadline, time.monotonic() + _GRACE_S)
        time.sleep(_POLL_S)


def _tail(log: Path) -> str:
    return log.read_text(errors="replace")[-_LOG_TAIL:]
