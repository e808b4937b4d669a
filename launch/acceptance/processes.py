"""Launches of torchrun that end in time, with all that they have started."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_GRACE_S = 45.0
"""torchrun gives its ranks 30 seconds to end, and only it knows them all."""


def torchrun(command: Sequence[str], num_ranks: int, timeout_s: float, log: Path) -> int | None:
    """Run ``command`` on so many ranks of this host; return the exit code, None after a timeout.

    What it prints goes to this process's stdout; errors go to ``log``.
    """
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    launcher += ["--nproc-per-node", str(num_ranks)]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {"OMP_NUM_THREADS": "1"} | os.environ | {"PYTHONPATH": path}
    with log.open("a") as errors:
        process = subprocess.Popen(
            [*launcher, *command], env=environment, stderr=errors, start_new_session=True
        )
        try:
            return process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None
        finally:
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a launcher that still runs, and whatever is left of its session."""
    if process.poll() is None:
        process.terminate()  # torchrun then ends its ranks
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def tail(log: Path, num_lines: int = 40) -> str:
    """Return the end of a log."""
    if not log.is_file():
        return ""
    return "\n".join(log.read_text(errors="replace").splitlines()[-num_lines:])
