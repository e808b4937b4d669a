"""Run the BERT job: its ranks as forked processes (a second each), or by its real command.

A forked rank calls the job's `main` with the environment a launcher would give it, so everything
is the real job but the interpreter's start and the imports.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import multiprocessing
import multiprocessing.process
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[2]
SCRIPT = REPOSITORY / "launch" / "bert" / "pretrain.py"

SMALL = (
    *("--vocab-size", "120", "--seq-len", "24", "--global-batch-size", "12"),
    *("--eval-samples", "12", "--eval-every", "1000", "--save-every", "1000", "--steps", "8"),
)
"""Options of a run of a second or two; later options override earlier ones."""

RUN = (*SMALL, "--steps", "10", "--save-every", "4", "--run-dir", "run")
RESUME = ("--resume", "--run-dir", "run")


@dataclasses.dataclass
class Job:
    """Forked ranks of one run, in `cwd`; each writes to its own log."""

    ranks: list[multiprocessing.process.BaseProcess]
    logs: list[Path]

    def wait(self, timeout: float = 60) -> list[int | None]:
        """Return the exit codes in rank order; ranks that outlast `timeout` seconds are killed."""
        deadline = time.monotonic() + timeout
        for rank in self.ranks:
            rank.join(max(0.0, deadline - time.monotonic()))
        codes = [rank.exitcode for rank in self.ranks]
        self.signal(signal.SIGKILL)
        return codes

    def signal(self, number: signal.Signals) -> None:
        for rank in self.ranks:
            if rank.pid is not None and rank.is_alive():
                os.kill(rank.pid, number)

    def signal_rank(self, rank: int, number: signal.Signals) -> None:
        pid = self.ranks[rank].pid
        assert pid is not None
        os.kill(pid, number)

    def output(self) -> str:
        return "".join(log.read_text() for log in self.logs)


def start(
    cwd: Path,
    arguments: Sequence[str],
    world_size: int,
    fault: Callable[[int], object] | None = None,
) -> Job:
    """Start the job's ranks in `cwd`; a world size of 0 is a process that no launcher started.

    `fault` is called with each rank's number in its process, before the job begins.
    """
    # Import once, before the fork.
    import pretraining.session  # noqa: F401

    environ = [{}]
    if world_size:
        common = {
            "WORLD_SIZE": str(world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(_free_port()),
        }
        environ = [common | {"RANK": str(r), "LOCAL_RANK": str(r)} for r in range(world_size)]
    context = multiprocessing.get_context("fork")
    logs = [cwd / f"rank-{rank}.log" for rank in range(len(environ))]
    ranks = [
        context.Process(target=_rank_main, args=(cwd, list(arguments), env, log, fault))
        for env, log in zip(environ, logs, strict=True)
    ]
    for rank in ranks:
        rank.start()
    return Job(ranks, logs)


def run(cwd: Path, arguments: Sequence[str], world_size: int, timeout: float = 60) -> str:
    """Run the job to its end; return what it printed. Raises if a rank fails."""
    job = start(cwd, arguments, world_size)
    codes = job.wait(timeout)
    assert codes == [0] * len(codes), f"exit codes {codes}\n{job.output()}"
    return job.output()


def refused(job: Job, timeout: float = 60) -> str:
    """Return the one line of a job that every rank must end with code 2."""
    codes = job.wait(timeout)
    assert codes == [2] * len(codes), f"exit codes {codes}\n{job.output()}"
    errors = [line for line in job.output().splitlines() if "error" in line.lower()]
    assert len(errors) == 1, job.output()
    assert "Traceback" not in job.output()
    assert errors[0].startswith("pretrain.py: error: ")
    return errors[0]


def _rank_main(
    cwd: Path,
    arguments: list[str],
    environ: dict[str, str],
    log: Path,
    fault: Callable[[int], object] | None,
) -> None:
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.stdout = os.fdopen(1, "w")
    sys.stderr = os.fdopen(2, "w")
    os.chdir(cwd)
    os.environ.update(environ, TOKENIZERS_PARALLELISM="false")
    warnings.resetwarnings()
    code = 1
    try:
        import pretrain
        import pretraining.launch

        # No launcher is here that would end the others once one has failed.
        pretraining.launch._SECONDS_FOR_RANK_0_TO_SPEAK = 0.1
        pretraining.launch._SECONDS_FOR_OTHERS_TO_COME = 0.1
        if fault is not None:
            fault(int(environ.get("RANK", 0)))
        code = pretrain.main(arguments)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start_command(
    cwd: Path,
    arguments: Sequence[str],
    world_size: int,
    environ: dict[str, str] | None = None,
    launching: Sequence[str] = (),
) -> subprocess.Popen[str]:
    """Start the real command: by torchrun, or by plain Python where the world size is 0."""
    launcher = [sys.executable]
    if world_size:
        launcher += ["-m", "torch.distributed.run", "--standalone"]
        launcher += ["--nproc-per-node", str(world_size), *launching]
    path = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")]))
    return subprocess.Popen(
        [*launcher, str(SCRIPT), *arguments],
        cwd=cwd,
        env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"} | (environ or {}),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def rank_of(launcher_pid: int, rank: int) -> int:
    """Return the process id of a rank started by torchrun."""
    for environ in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            # Field 4 of stat, after the parenthesised name, is the parent's id.
            parent = environ.with_name("stat").read_text().rpartition(")")[2].split()[1]
            variables = environ.read_bytes().split(b"\0")
            if int(parent) == launcher_pid and f"RANK={rank}".encode() in variables:
                return int(environ.parent.name)
    raise AssertionError(f"torchrun {launcher_pid} has no rank {rank}")


def records(run_dir: Path, kind: str) -> list[dict[str, Any]]:
    """Return the complete records of one kind in a run's metrics file."""
    path = run_dir / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    found = [json.loads(line) for line in lines if line.endswith("\n")]
    return [record for record in found if record["kind"] == kind]


def losses(run_dir: Path) -> list[float]:
    """Return the training loss of every step, after checking that each step is there once."""
    found = records(run_dir, "train")
    assert [record["step"] for record in found] == list(range(1, len(found) + 1))
    return [record["loss"] for record in found]


def wait_until(condition: Any, what: str, timeout: float = 60) -> None:
    """Poll `condition` until it holds; raise after `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, f"waited {timeout} s for {what}"
        time.sleep(0.01)


def snapshot(folder: Path) -> dict[str, bytes]:
    """Return the contents of all files below, but for the lock's."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != ".lock"]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}
