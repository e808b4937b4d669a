"""The training loop: one optimizer step after another, until done or asked to stop."""

from __future__ import annotations

import math
import time

import numpy as np
import torch

from pretraining.checkpoint import Checkpoints
from pretraining.config import RunConfig
from pretraining.errors import UsageError
from pretraining.evaluation import HeldOutEvaluation
from pretraining.metrics import Record, Report
from pretraining.model import build_model, loss_sums
from pretraining.optimizers import build_optimizer, clips_itself, lr_at, set_lr
from pretraining.prepared import PreparedCorpus
from pretraining.ranks import Ranks
from pretraining.samples import IGNORED_LABEL, Batch, SampleStream
from shardfuse import ShardedGradScaler
from shardfuse.training.job import Signals

AUTOCAST_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
METRICS_FILE = "metrics.jsonl"

_EVAL_BATCH_SIZE = 64
_SPEED_SMOOTHING = 0.9


class Trainer:
    """Model, optimizer and data of a run, and the loop over them.

    Building one is collective, and so is every method: all ranks take the same steps.
    """

    def __init__(self, config: RunConfig, ranks: Ranks, corpus: PreparedCorpus) -> None:
        self.config = config
        self.ranks = ranks
        self.micro_batches = config.micro_batches(ranks.launch.world_size)
        vocab_size, seq_len = corpus.summary.vocab_size, config.seq_len
        self.stream = SampleStream(corpus.train, vocab_size, seq_len, config.seed)
        self.evaluation = HeldOutEvaluation(
            SampleStream(corpus.held_out, vocab_size, seq_len, config.seed),
            config.eval_samples,
            min(_EVAL_BATCH_SIZE, config.micro_batch_size or _EVAL_BATCH_SIZE),
        )
        model = build_model(config.model_size, vocab_size, seq_len, config.dropout, config.seed)
        self.model = model.to(ranks.device).train()
        self.optimizer = build_optimizer(config, self.model)
        self.scaler = ShardedGradScaler(ranks.device.type, enabled=config.dtype == "fp16")
        self.checkpoints = Checkpoints(config, self.model, self.optimizer, self.scaler)
        self._autocast = torch.autocast(
            ranks.device.type,
            dtype=AUTOCAST_DTYPES.get(config.dtype),
            enabled=config.dtype in AUTOCAST_DTYPES,
        )
        self._samples_per_second = 0.0
        # Of rank 0, while it runs.
        self._report: Report | None = None

    def run(self, first_step: int, stop: Signals) -> int:
        """Train from `first_step` on; return how many steps are finished when it stops."""
        with self.checkpoints.saving():
            return self._run(first_step, stop)

    def _run(self, first_step: int, stop: Signals) -> int:
        config = self.config
        self.ranks.once(lambda: self._open_report(first_step))
        saved_step = first_step
        if first_step == 0:
            self._add(self._evaluate(0))
        step = first_step
        while step < config.steps:
            started = time.monotonic()
            batch = self._draw(step)
            num_masked, is_stopping = self._agree(batch, stop)
            if is_stopping:
                break
            record = self._train_step(step, batch, num_masked)
            step += 1
            self._add(self._with_speed(record, started))
            if step % config.eval_every == 0 or step == config.steps:
                self._add(self._evaluate(step))
            if step % config.save_every == 0:
                self.checkpoints.save(step)
                saved_step = step
        if step != saved_step:
            self.checkpoints.save(step)
        self.ranks.once(self._close_report)
        return step

    def _open_report(self, first_step: int) -> None:
        path = self.config.run_dir / METRICS_FILE
        self._report = Report(path, first_step, self.config.steps, self.config.log_every)

    def _close_report(self) -> None:
        if self._report is not None:
            self._report.close()

    def _add(self, record: Record) -> None:
        if self._report is not None:
            self._report.add(record)

    def _draw(self, step: int) -> Batch:
        """Draw this rank's share of the global batch of `step`."""
        share = self.micro_batches.samples_per_rank
        first = self.ranks.launch.rank * share
        return self.stream.batch(step, range(first, first + share))

    def _agree(self, batch: Batch, stop: Signals) -> tuple[int, bool]:
        """Return the masked tokens of the global batch, and whether any rank is to stop.

        A report that cannot be written is a reason to save and stop too, while that is possible.
        """
        num_masked = int((batch.labels != IGNORED_LABEL).sum())
        has_fault = self._report is not None and self._report.fault is not None
        values = torch.tensor([num_masked, stop.is_noted or has_fault], dtype=torch.float32)
        total, num_requests = self.ranks.sum_(values.to(self.ranks.device)).tolist()
        return max(1, int(total)), num_requests > 0

    def _train_step(self, step: int, batch: Batch, num_masked: int) -> Record:
        """Accumulate gradients over the micro-batches and update the parameters once.

        Losses are divided by the counts of the global batch. The optimizer takes the mean of the
        ranks' gradients, hence the factor world_size, so any split of a batch gives one gradient.
        """
        config, world_size = self.config, self.ranks.launch.world_size
        lr = lr_at(config, step)
        set_lr(self.optimizer, lr)
        torch.manual_seed(_dropout_seed(config.seed, self.ranks.launch.rank, step))
        sums = torch.zeros(2, device=self.ranks.device)
        for micro_batch in batch.split(self.micro_batches.size):
            with self._autocast:
                losses = loss_sums(self.model, micro_batch.to(self.ranks.device))
            loss = losses.mlm / num_masked + losses.nsp / config.global_batch_size
            self.scaler.scale(loss * world_size).backward()
            sums += torch.stack([losses.mlm, losses.nsp]).detach()
        grad_norm = self._clip()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        mlm_sum, nsp_sum = self.ranks.sum_(sums).tolist()
        mlm_loss, nsp_loss = mlm_sum / num_masked, nsp_sum / config.global_batch_size
        if not math.isfinite(mlm_loss + nsp_loss):
            raise UsageError(f"the loss is {mlm_loss + nsp_loss} at step {step + 1}; lower --lr")
        record: Record = {"kind": "train", "step": step + 1, "loss": mlm_loss + nsp_loss}
        record |= {"mlm_loss": mlm_loss, "nsp_loss": nsp_loss, "lr": lr}
        if grad_norm is not None:
            record["grad_norm"] = grad_norm.item()
        if self.scaler.is_enabled():
            record["loss_scale"] = self.scaler.get_scale()
        return record

    def _clip(self) -> torch.Tensor | None:
        """Bound the gradient norm, unless the rule does; return the norm before, () fp32."""
        if self.scaler.is_enabled():
            self.scaler.unscale_(self.optimizer)
        if clips_itself(self.config) or self.config.max_grad_norm == 0:
            return None
        return self.optimizer.clip_grad_norm(self.config.max_grad_norm)

    def _evaluate(self, step: int) -> Record:
        score = self.evaluation.score(self.model, self.ranks, self._autocast)
        return {
            "kind": "eval",
            "step": step,
            "mlm_loss": score.mlm_loss,
            "mlm_accuracy": score.mlm_accuracy,
            "nsp_loss": score.nsp_loss,
        }

    def _with_speed(self, record: Record, started: float) -> Record:
        """Add the time of the step and the smoothed number of samples per second."""
        seconds = time.monotonic() - started
        speed = self.config.global_batch_size / seconds
        keep = _SPEED_SMOOTHING if self._samples_per_second else 0.0
        self._samples_per_second = keep * self._samples_per_second + (1 - keep) * speed
        return record | {"seconds": seconds, "samples_per_second": self._samples_per_second}


def _dropout_seed(seed: int, rank: int, step: int) -> int:
    """Return a seed of its own for each rank and step, so that a resumed run drops the same."""
    return int(np.random.SeedSequence([seed, rank, step]).generate_state(1, np.uint64)[0])
