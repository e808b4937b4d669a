"""The BERT job of launch/bert, driven by DeepSpeed's engine from a JSON file.

    torchrun --standalone --nproc-per-node 2 launch/deepspeed/train_bert.py \
        --deepspeed-config launch/deepspeed/configs/stage1_lamb.json --steps 200

The JSON decides optimizer, learning rate, batch and ZeRO stage; text, model and held-out evaluation
are those of launch/bert, and so are the options for them.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "bert"))

from pretraining.config import RunConfig, check_options
from pretraining.errors import UsageError, not_installed
from pretraining.files import blaming, describe, sync_tree, unfinished, write_whole
from pretraining.launch import Launch, refuse

CHECKPOINT_TAG = "last"


def main(argv: Sequence[str]) -> int:
    """Run the job; return the exit code: 0, or 2 where the request cannot be met."""
    launch: Launch | None = None
    try:
        launch = Launch.from_environment()
        parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__)
        parser.add_argument("--deepspeed-config", type=Path, required=True)
        parser.add_argument("--load", type=Path, help="folder of checkpoints to continue from")
        own, rest = parser.parse_known_args(argv)
        settings = read_settings(own.deepspeed_config)
        rest += ["--global-batch-size", str(settings["train_batch_size"])]
        for option in ("--recipe", "--dry-run", "--init-from"):
            if any(word.partition("=")[0] == option for word in rest):
                raise UsageError(f"{option} is of launch/bert/pretrain.py; drop it here")
        check_options(rest, launch.world_size)
        run(rest, launch, settings, own.load)
    except UsageError as error:
        return refuse(error, launch, Path(__file__).name)
    except ModuleNotFoundError as error:
        return refuse(not_installed(error), launch, Path(__file__).name)
    return 0


class _Report:
    """The metrics file and the lines that rank 0 prints; on the others nothing is opened."""

    def __init__(self, path: Path) -> None:
        self.fault: UsageError | None = None
        self._path = path
        self._metrics: Any = None

    def open(self) -> None:
        """Open the metrics file; raises `UsageError`."""
        from pretraining.metrics import MetricsFile

        with blaming("--run-dir", self._path):
            self._metrics = MetricsFile(self._path, 0, 1)

    def add(self, record: dict[str, Any]) -> None:
        """Write and print a record; a file that takes no more is noted as `fault`."""
        if self._metrics is None:
            return
        try:
            with blaming("--run-dir", self._path):
                self._metrics.write(record)
        except UsageError as error:
            self.fault = self.fault or error
        shown = {k: round(v, 5) if isinstance(v, float) else v for k, v in record.items()}
        print(*(f"{key} {value}" for key, value in shown.items()), sep="  ", flush=True)

    def close(self) -> None:
        """Close the file; raises the fault."""
        self._metrics.close()
        if self.fault is not None:
            raise self.fault


def read_settings(path: Path) -> dict[str, Any]:
    """Return the JSON file's contents; raises `UsageError`."""
    try:
        settings: Any = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UsageError(f"--deepspeed-config {path}: {error}") from error
    try:
        if settings["train_batch_size"] and settings["optimizer"]["params"]:
            return dict(settings)
    except (KeyError, TypeError, ValueError):
        pass
    raise UsageError(
        f"--deepspeed-config {path} must have train_batch_size and an optimizer with params"
    )


def run(argv: Sequence[str], launch: Launch, settings: dict[str, Any], load: Path | None) -> None:
    """Prepare the text, train, save; every rank alike."""
    from pretraining.plan import make_plan
    from pretraining.ranks import Ranks
    from pretraining.rundir import RunLock

    if "--resume" in argv:
        raise UsageError("--resume is not for this job; name a folder with --load")
    if find_spec("deepspeed") is None:  # before the text is prepared
        raise not_installed(ModuleNotFoundError(name="deepspeed"))
    ranks = Ranks(launch)
    with RunLock() as lock:
        plan = make_plan(argv, ranks, lock)
        os.environ.setdefault("DS_ACCELERATOR", plan.device.type)
        os.environ.setdefault("LOCAL_RANK", str(launch.local_rank))
        ranks.connect(plan.device, plan.config.timeout_seconds)
        try:
            _train(plan.config, ranks, plan.corpus, settings, load)
        finally:
            ranks.disconnect()


def _load(engine: Any, folder: Path, ranks: Any) -> None:
    """Continue from the checkpoint that a run left in `folder`."""

    def check() -> None:
        if not (folder / CHECKPOINT_TAG).is_dir():
            raise UsageError(f"--load {folder}: no checkpoint named {CHECKPOINT_TAG} there")

    ranks.together(check)
    try:
        path, _ = engine.load_checkpoint(str(folder), tag=CHECKPOINT_TAG)
    except Exception as error:
        # One rank's part may be damaged: this rank has to say so, as the others wait for it.
        reason = " ".join(str(error).split())[:200]
        text = f"--load {folder}: {type(error).__name__}: {reason}; load another checkpoint"
        raise UsageError(text, is_local=True) from error
    if path is None:
        raise UsageError(f"--load {folder}: no checkpoint named {CHECKPOINT_TAG} there")


def _save(engine: Any, run_dir: Path, ranks: Any) -> None:
    """Save into RUN/checkpoints, which is there once every rank's files are. Collective."""
    target = run_dir / "checkpoints"
    with blaming("--run-dir", run_dir), unfinished(target) as own_name:
        temporary = run_dir / ranks.once(lambda: own_name.name)
        files = _NotedFiles(engine.checkpoint_engine)
        try:
            engine.save_checkpoint(str(temporary), tag=CHECKPOINT_TAG, save_latest=False)
        except OSError as error:
            raise UsageError(f"--run-dir {run_dir}: {describe(error)}", is_local=True) from error
        sizes = ranks.gather(files.sizes)
        ranks.once(lambda: _publish(temporary, target, sizes))


def _publish(temporary: Path, target: Path, sizes: list[dict[str, int]]) -> None:
    with blaming("--run-dir", target.parent):
        for path, nbytes in (item for of_rank in sizes for item in of_rank.items()):
            if not os.path.exists(path) or os.path.getsize(path) != nbytes:
                name = os.path.basename(path)
                raise UsageError(f"{name} is missing; all ranks must write to one --run-dir")
        write_whole(temporary / "latest", CHECKPOINT_TAG)
        sync_tree(temporary)
        temporary.rename(target)


class _NotedFiles:
    """Notes what DeepSpeed's checkpoint engine writes, and the errors.

    DeepSpeed has barriers after the write: with an error raised there, the other ranks would wait.
    """

    def __init__(self, checkpoint_engine: Any) -> None:
        self._paths: list[str] = []
        self._error: Exception | None = None
        self._save = checkpoint_engine.save
        checkpoint_engine.save = self._note

    def _note(self, state_dict: Any, path: Any) -> Any:
        self._paths.append(str(path))
        try:
            return self._save(state_dict, path)
        except (OSError, RuntimeError) as error:
            self._error = error

    def sizes(self) -> dict[str, int]:
        """Return the bytes of each file of this rank; raises `UsageError` for an error noted."""
        if self._error is not None:
            raise UsageError(f"the checkpoint could not be written: {_reason(self._error)}")
        return {path: os.path.getsize(path) for path in self._paths}


def _reason(error: Exception) -> str:
    if isinstance(error, OSError):
        return describe(error)
    # torch's zip writer only reports that it is not where it should be.
    text = " ".join(str(error).split())
    return describe(OSError(f"torch could not write a file to its end ({text})"))


def _train(
    config: RunConfig, ranks: Any, corpus: Any, settings: dict[str, Any], load: Path | None
) -> None:
    import deepspeed
    import torch
    from pretraining.evaluation import HeldOutEvaluation
    from pretraining.model import build_model, loss_sums
    from pretraining.optimizers import decay_groups
    from pretraining.samples import IGNORED_LABEL, SampleStream

    import shardfuse.deepspeed  # noqa: F401  (this line is all that DeepSpeed needs)

    summary, phase = corpus.summary, config.phases[0]
    stream = SampleStream(corpus.train, summary.vocab_size, phase.seq_len, config.seed)
    held_out = SampleStream(corpus.held_out, summary.vocab_size, phase.seq_len, config.seed)
    evaluation = HeldOutEvaluation(held_out, config.eval_samples, 64)
    bert = build_model(
        config.model_size, summary.vocab_size, phase.seq_len, config.dropout, config.seed
    )

    class PretrainingLoss(torch.nn.Module):
        """BERT with its losses: DeepSpeed's engine is called with a batch and gives the loss."""

        def __init__(self) -> None:
            super().__init__()
            self.bert = bert

        def forward(self, batch: Any, num_masked: int) -> torch.Tensor:
            losses = loss_sums(self.bert, batch)
            return losses.mlm / num_masked + losses.nsp / phase.global_batch_size

    params = settings["optimizer"]["params"]
    # LAMB leaves biases and LayerNorm out by their names; the other optimizers by groups.
    groups = (
        None
        if "variant" in params
        else decay_groups(bert.named_parameters(), params.get("weight_decay", 0.0))
    )
    for group in groups or ():
        group["params"] = [param for _, param in group["params"]]
    engine, *_ = deepspeed.initialize(
        model=PretrainingLoss(), model_parameters=groups, config=settings
    )
    if load is not None:
        _load(engine, load, ranks)
    world_size = ranks.launch.world_size
    report = _Report(config.run_dir / "metrics.jsonl")
    ranks.once(report.open)

    def evaluate(step: int) -> None:
        score = evaluation.score(bert, ranks, contextlib.nullcontext())
        report.add({"kind": "eval", "step": step, "mlm_loss": score.mlm_loss})

    share = phase.global_batch_size // world_size
    gas = engine.gradient_accumulation_steps()
    first_step = engine.global_steps
    evaluate(first_step)
    last_step = first_step
    for step in range(first_step, config.steps):
        first = ranks.launch.rank * share
        batch = stream.batch(step, range(first, first + share))
        num_masked = float((batch.labels != IGNORED_LABEL).sum())
        counts = torch.tensor([num_masked, report.fault is not None], device=engine.device)
        total_masked, num_faults = ranks.sum_(counts).tolist()
        if num_faults:
            break
        count = max(1, int(total_masked))
        total = torch.zeros((), device=engine.device)
        for micro_batch in batch.split(share // gas):
            loss = engine(micro_batch.to(engine.device), count)
            # The engine divides by the accumulation steps, the optimizer by the ranks.
            engine.backward(loss * (world_size * gas))
            engine.step()
            total += loss.detach().float()
        norm = engine.get_global_grad_norm()
        record = {"kind": "train", "step": step + 1, "loss": ranks.sum_(total).item()}
        record |= {"lr": engine.get_lr()[0], "skipped": engine.skipped_steps}
        record |= {} if norm is None else {"grad_norm": float(norm)}
        report.add(record)
        last_step = step + 1
    evaluate(last_step)
    _save(engine, config.run_dir, ranks)
    ranks.once(report.close)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
