"""A study on its way: a folder of runs, each a pretrain.py of its own.

runs/study/
    study.json              the design
    data/                   the text, prepared once
    trials/adamw-16-0.001-seed0/    a run directory, and what the run printed in `log`
    table.md  results.csv  study.png
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from pretraining.errors import UsageError
from pretraining.files import blaming, write_whole
from pretraining.metrics import METRICS_FILE, read_records
from pretraining.rundir import CONFIG_FILE

from largebatch.design import WHOLE, Design, Trial
from shardfuse.training.job import StopSignals
from shardfuse.training.lock import FolderInUse, FolderLock

PRETRAIN = Path(__file__).parents[1] / "pretrain.py"
DESIGN_FILE = "study.json"

_POLL_S = 0.2
_PATIENCE_S = 3600.0
"""How long a run of a study that was killed may go on by itself."""


class Study:
    """A design, the folder of its runs, and what came of those that have ended."""

    def __init__(self, folder: Path, design: Design, lock: FolderLock) -> None:
        self.folder = folder
        self.design = design
        self.outcomes: dict[Trial, float] = {}
        self._lock = lock
        self._running: dict[Trial, subprocess.Popen[bytes]] = {}
        self._faults: list[str] = []

    @classmethod
    def open(cls, folder: Path, asked: Design | None) -> Study:
        """Open a study that is there, or begin one; raises `UsageError`.

        Args:
            folder: of the study.
            asked: for None the one that is there goes on, or the whole one begins.
        """
        lock = FolderLock()
        with blaming("folder", folder):
            folder.mkdir(parents=True, exist_ok=True)
            try:
                lock.take(folder)
                return cls(folder, _agreed(folder, asked), lock)
            except FolderInUse as error:
                lock.release()
                raise UsageError(f"{error}; wait for it, or name another folder") from error
            except BaseException:
                lock.release()
                raise

    def __enter__(self) -> Study:
        self._collect()
        return self

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def run(self, jobs: int, ranks: int) -> bool:
        """Run what is wanted, some at a time; return whether all is done, False if told to stop.

        Raises `UsageError` where a run fails for another reason than its learning rate.
        """
        stop = StopSignals((signal.SIGINT, signal.SIGTERM))
        stop.install()
        is_ending = False
        while True:
            self._reap()
            if (stop.is_requested or self._faults) and not is_ending:
                is_ending = True
                for process in self._running.values():
                    process.terminate()  # it saves, and ends
            if not is_ending:
                self._start_some(jobs, ranks)
            if not self._running:
                break
            time.sleep(_POLL_S)
        if self._faults:
            raise UsageError("; ".join(self._faults))
        return not stop.is_requested

    def _collect(self) -> None:
        """Read what has ended before."""
        while True:
            missing = [t for t in self.design.wanted(self.outcomes) if t not in self.outcomes]
            found = {trial: self._outcome(trial) for trial in missing}
            known = {trial: loss for trial, loss in found.items() if loss is not None}
            if not known:
                return
            self.outcomes |= known

    def _start_some(self, jobs: int, ranks: int) -> None:
        # The first run prepares the text, for all.
        if self._text_options() is None:
            jobs = 1
        for trial in self.design.wanted(self.outcomes):
            if len(self._running) >= jobs:
                return
            if trial not in self._running:
                self._start(trial, ranks)

    def _start(self, trial: Trial, ranks: int) -> None:
        folder = self._folder(trial)
        if (folder / METRICS_FILE).exists():
            with FolderLock() as lock:  # perhaps a study that was killed left it running
                lock.take(folder, _PATIENCE_S)
            if self._note(trial):
                return
        command = [sys.executable, str(PRETRAIN)]
        if ranks > 1:
            torchrun = ["-m", "torch.distributed.run", "--standalone"]
            command[1:1] = [*torchrun, "--nproc-per-node", str(ranks)]
        command += ["--run-dir", str(folder), "--resume", "auto"]
        command += [*(self._text_options() or self._data_dir()), *self.design.arguments(trial)]
        environment = {"OMP_NUM_THREADS": "1", **os.environ}
        log = self.folder / "trials" / f"{trial.name}.log"
        with blaming("folder", log):
            log.parent.mkdir(exist_ok=True)
            with log.open("ab") as file:
                self._running[trial] = subprocess.Popen(
                    command, stdout=file, stderr=subprocess.STDOUT, env=environment
                )

    def _reap(self) -> None:
        for trial, process in list(self._running.items()):
            if process.poll() is None:
                continue
            del self._running[trial]
            if self._note(trial) or process.returncode == 0:
                continue  # 0: it was told to stop
            log = self.folder / "trials" / f"{trial.name}.log"
            lines = log.read_text(errors="replace").strip().splitlines() or ["it printed nothing"]
            self._faults.append(f"{trial.name} failed: {lines[-1]} (all of it: {log})")

    def _note(self, trial: Trial) -> bool:
        """Take the result of a run that has ended; return whether it has one."""
        loss = self._outcome(trial)
        if loss is None:
            return False
        self.outcomes[trial] = loss
        shutil.rmtree(self._folder(trial) / "checkpoints", ignore_errors=True)
        print(f"{len(self.outcomes)} runs: {trial.name}: {loss:.4f} nats", flush=True)
        return True

    def _outcome(self, trial: Trial) -> float | None:
        """Return a run's held-out loss, in nats, inf where it diverged, None before its end."""
        steps = self.design.samples // trial.batch
        for record in reversed(read_records(self._folder(trial) / METRICS_FILE)):
            if record["kind"] == "diverged":
                return math.inf
            if record["kind"] == "eval" and record["step"] == steps:
                return float(record["mlm_loss"])
        return None

    def _folder(self, trial: Trial) -> Path:
        return self.folder / "trials" / trial.name

    def _text_options(self) -> list[str] | None:
        """Return the options that give a run the text of the first, or None before that."""
        if "--corpus" in self.design.options:
            return self._data_dir()
        for metrics in sorted(self.folder.glob(f"trials/*/{METRICS_FILE}")):
            stored = json.loads((metrics.parent / CONFIG_FILE).read_text())
            return [*self._data_dir(), "--corpus", *stored["corpus"]]
        return None

    def _data_dir(self) -> list[str]:
        if "--data-dir" in self.design.options:
            return []
        return ["--data-dir", str(self.folder / "data")]


def _agreed(folder: Path, asked: Design | None) -> Design:
    """Return the design of the study in `folder`, which `asked` becomes where there is none."""
    path = folder / DESIGN_FILE
    if not path.exists():
        design = asked or WHOLE
        write_whole(path, json.dumps(dataclasses.asdict(design), indent=2) + "\n")
        return design
    design = _read_design(path)
    if asked not in (None, design):
        raise UsageError(
            f"{folder} is a study of other options; give none to go on with it, or name another "
            "folder"
        )
    return design


def _read_design(path: Path) -> Design:
    try:
        values = json.loads(path.read_text())
        return Design(**{k: tuple(v) if isinstance(v, list) else v for k, v in values.items()})
    except (TypeError, ValueError) as error:
        raise UsageError(f"{path} cannot be read ({error}); restore it from a copy") from error
