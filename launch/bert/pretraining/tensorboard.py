"""The numbers of a run for TensorBoard, where that is installed."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Any

from pretraining.errors import UsageError
from pretraining.kinds import kind_of
from pretraining.metrics import Record

FOLDER = "tensorboard"


class TensorBoard:
    """Writes records as scalars into <run>/tensorboard.

    Args:
        run_dir: the run's folder.
        first_step: what an earlier try has written beyond it is hidden.

    Raises:
        UsageError: TensorBoard is not installed.
    """

    def __init__(self, run_dir: Path, first_step: int) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise UsageError(
                "--tensorboard: TensorBoard is not installed; pip install tensorboard, or drop the "
                f"option, as {run_dir / 'metrics.jsonl'} has all numbers"
            ) from error
        self._writer: Any = SummaryWriter(str(run_dir / FOLDER), purge_step=first_step + 1)

    def add(self, record: Record) -> None:
        """Write a record; raises `OSError`."""
        for tag, value in scalars_of(record).items():
            self._writer.add_scalar(tag, value, record["step"])

    def close(self) -> None:
        self._writer.close()


def scalars_of(record: Record) -> dict[str, float]:
    """Return {tag: value} of a record; norms as their medians over the tensors of a kind."""
    kind, names = record["kind"], ("loss", "mlm_loss", "nsp_loss", "mlm_accuracy")
    if kind in ("train", "eval"):
        part = "train" if kind == "train" else "held_out"
        found = {f"{part}/{name}": record[name] for name in names if name in record}
        return found | {name: record[name] for name in ("lr",) if name in record}
    if kind != "norms":
        return {}
    by_tag: dict[str, list[float]] = {}
    for name, norms in record["tensors"].items():
        part = kind_of(name)
        if norms["trust_ratio"] is not None:
            by_tag.setdefault(f"trust_ratio/{part}", []).append(norms["trust_ratio"])
        if norms["weight"] > 0:
            update = norms["update"] / norms["weight"]
            by_tag.setdefault(f"relative_update/{part}", []).append(update)
    clips = {"gradient/norm": record["grad_norm"], "gradient/clip": record["clip"]}
    return clips | {tag: median(values) for tag, values in by_tag.items()}
