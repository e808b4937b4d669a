"""What rank 0 says and writes while a run goes."""

from __future__ import annotations

from pretraining.config import RunConfig
from pretraining.errors import UsageError
from pretraining.files import blaming
from pretraining.metrics import METRICS_FILE, MetricsFile, Progress, Record
from pretraining.tensorboard import TensorBoard


class Report:
    """What rank 0 says and writes while the run goes; a file that takes no more is its `fault`."""

    def __init__(self, config: RunConfig, first_step: int, num_phases: int) -> None:
        """Open the metrics file; raises `UsageError`."""
        self.fault: UsageError | None = None
        self._path = path = config.run_dir / METRICS_FILE
        self._board = TensorBoard(config.run_dir, first_step) if config.tensorboard else None
        with blaming("--run-dir", path):
            self._metrics = MetricsFile(path, first_step, num_phases)
        self._progress = Progress(first_step, config.steps, config.log_every)

    def add(self, record: Record) -> None:
        """Write and show a record; never raises."""
        try:
            with blaming("--run-dir", self._path):
                self._metrics.write(record)
                if self._board is not None:
                    self._board.add(record)
        except UsageError as error:
            self.fault = self.fault or error
        if record["kind"] == "train":
            self._progress.advance(record)
        elif record["kind"] == "warning":
            self._progress.say(f"warning after {record['step']} steps: {record['text']}")
        elif record["kind"] == "eval":
            self._progress.say(
                f"held out after {record['step']} steps: MLM loss {record['mlm_loss']:.4f}, "
                f"accuracy {record['mlm_accuracy']:.1%}, NSP loss {record['nsp_loss']:.4f}"
            )

    def close(self) -> None:
        """Close the file and the bar; raises the fault."""
        self._metrics.close()
        if self._board is not None:
            self._board.close()
        self._progress.close()
        if self.fault is not None:
            raise self.fault
