"""The training loop: one optimizer step after another, until done or asked to stop."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Iterator

import numpy as np
import torch

from pretraining.checkpoint import Checkpoints
from pretraining.config import RunConfig
from pretraining.errors import UsageError
from pretraining.evaluation import HeldOutEvaluation
from pretraining.metrics import Record
from pretraining.model import loss_sums, shard
from pretraining.optimizers import attach_backend, build_optimizer, clips_itself, set_lr
from pretraining.phases import MicroBatches, Phase, spans
from pretraining.prepared import PreparedCorpus
from pretraining.pretrained import new_model, take_weights
from pretraining.ranks import Ranks
from pretraining.reporting import Report
from pretraining.samples import IGNORED_LABEL, Batch, SampleStream
from shardfuse import ShardedGradScaler
from shardfuse.training import StepMonitor
from shardfuse.training.job import StopSignals

AUTOCAST_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}

_EVAL_BATCH_SIZE = 64
_SPEED_SMOOTHING = 0.9


@dataclasses.dataclass(frozen=True)
class Leg:
    """A phase on its way: which steps of the run it takes, on what samples."""

    number: int  # from 1
    phase: Phase
    steps: range
    micro_batches: MicroBatches
    stream: SampleStream
    evaluation: HeldOutEvaluation


@dataclasses.dataclass
class _LaunchedStep:
    """A step whose losses the device may not have computed yet."""

    record: Record
    num_masked: int
    global_batch_size: int
    values: torch.Tensor  # on the host: sums of the MLM and NSP losses, and the gradient norm
    copied: torch.Event | None  # after which `values` may be read; None: now
    started: float = 0.0  # by time.monotonic()

    def finish(self) -> Record:
        """Return the record with the losses; wait for the device if it has not come that far."""
        if self.copied is not None:
            self.copied.synchronize()
        mlm_sum, nsp_sum, *grad_norm = self.values.tolist()
        mlm_loss, nsp_loss = mlm_sum / self.num_masked, nsp_sum / self.global_batch_size
        losses = {"loss": mlm_loss + nsp_loss, "mlm_loss": mlm_loss, "nsp_loss": nsp_loss}
        norm = {"grad_norm": grad_norm[0]} if grad_norm else {}
        return {**self.record, **losses, **norm}


class Trainer:
    """Model, optimizer and data of a run, and the loop over them.

    Building one is collective, and so is every method: all ranks take the same steps.
    """

    def __init__(self, config: RunConfig, ranks: Ranks, corpus: PreparedCorpus) -> None:
        self.config = config
        self.ranks = ranks
        self.legs = list(make_legs(config, ranks.launch.world_size, corpus))
        self.model = new_model(config, corpus.summary.vocab_size).to(ranks.device).train()
        take_weights(self.model, config, ranks)
        if config.is_sharded_on(ranks.launch.world_size):
            shard(self.model, ranks.device)
        named = self.model.named_parameters()
        self.optimizer = build_optimizer(config, named, config.shard_config())
        self.scaler = ShardedGradScaler(ranks.device.type, enabled=config.dtype == "fp16")
        self.checkpoints = Checkpoints(config, self.model, self.optimizer, self.scaler)
        self._autocast = torch.autocast(
            ranks.device.type,
            dtype=AUTOCAST_DTYPES.get(config.dtype),
            enabled=config.dtype in AUTOCAST_DTYPES,
        )
        self._samples_per_second = 0.0
        self._saved_step = 0
        self._monitor: StepMonitor | None = None
        self._launched: _LaunchedStep | None = None
        self._finished = 0.0  # when the last step was, by time.monotonic()
        # Of rank 0, while it runs.
        self._report: Report | None = None

    def run(self, first_step: int, stop: StopSignals) -> int:
        """Train from `first_step` on; return how many steps are finished when it stops."""
        with self.checkpoints.saving():
            return self._run(first_step, stop)

    def _run(self, first_step: int, stop: StopSignals) -> int:
        self.ranks.once(lambda: self._open_report(first_step))
        step = self._saved_step = first_step
        if self.config.norms_every:
            self._monitor = StepMonitor(self.optimizer, self.config.norms_every, first_step)
        for leg in self.legs:
            if step < leg.steps.stop:
                step = self._run_leg(leg, step, stop)
                if step < leg.steps.stop:
                    break  # it was told to
        if step != self._saved_step:
            self._save(step)
        self._add_norms(is_last=True)
        self.ranks.once(self._close_report)
        return step

    def _run_leg(self, leg: Leg, step: int, stop: StopSignals) -> int:
        """Train from `step` on, through the phase; return how many steps are finished then."""
        config = self.config
        if step == leg.steps.start:
            # After the save at the phase before's end, so that a resumed run does this, too.
            if leg.number > 1:
                attach_backend(self.optimizer, leg.phase.carry)
            self._add(self._evaluate(leg, step))
        while step < leg.steps.stop:
            started = time.monotonic()
            batch = self._draw(leg, step)
            num_masked, is_stopping = self._agree(batch, stop)
            if is_stopping:
                break
            launched = self._train_step(leg, step, batch, num_masked)
            step += 1
            self._finish_step()  # the one before: the device computes this one meanwhile
            launched.started = started
            self._launched = launched
            is_evaluated = step % config.eval_every == 0 or step == leg.steps.stop
            is_saved = step % config.save_every == 0 or step == leg.steps.stop
            if is_evaluated or is_saved or launched.copied is None:
                self._finish_step()
            if is_evaluated:
                self._add(self._evaluate(leg, step))
            if is_saved:
                self._save(step)
        self._finish_step()
        return step

    def _finish_step(self) -> None:
        """Report the launched step, if there is one; its losses are the same on all ranks."""
        launched, self._launched = self._launched, None
        if launched is None:
            return
        record = launched.finish()
        self._check_finite(record)
        self._add_norms()
        now = time.monotonic()
        seconds, self._finished = now - max(launched.started, self._finished), now
        self._add(record | self._speed(launched.global_batch_size, seconds))

    def _save(self, step: int) -> None:
        self.checkpoints.save(step)
        self._saved_step = step

    def _open_report(self, first_step: int) -> None:
        # At a seam what has been told of the phase that begins there is told again.
        num_begun = sum(leg.steps.start < first_step for leg in self.legs)
        self._report = Report(self.config, first_step, num_begun)

    def _close_report(self) -> None:
        if self._report is not None:
            self._report.close()

    def _add(self, record: Record) -> None:
        if self._report is not None:
            self._report.add(record)

    def _add_norms(self, *, is_last: bool = False) -> None:
        """Add what has arrived of the watched steps; all of it at the end."""
        if self._monitor is None:
            return
        for record in self._monitor.close() if is_last else self._monitor.take():
            # On an accelerator it may come after the phase of its step.
            (leg,) = (leg for leg in self.legs if record.step - 1 in leg.steps)
            phase = self._phase_of(leg)
            self._add({"kind": "norms", **record.to_json(), **phase})
            for text in self._monitor.warnings():
                self._add({"kind": "warning", "step": record.step, "text": text, **phase})

    def _draw(self, leg: Leg, step: int) -> Batch:
        """Draw this rank's share of the global batch of `step`."""
        share = leg.micro_batches.samples_per_rank
        first = self.ranks.launch.rank * share
        return leg.stream.batch(step, range(first, first + share))

    def _agree(self, batch: Batch, stop: StopSignals) -> tuple[int, bool]:
        """Return the masked tokens of the global batch, and whether any rank is to stop.

        A report that cannot be written is a reason to save and stop too, while that is possible.
        """
        num_masked = int((batch.labels != IGNORED_LABEL).sum())
        has_fault = self._report is not None and self._report.fault is not None
        # On the host, which would else wait here for all that the device has yet to compute.
        values = torch.tensor([num_masked, stop.is_requested or has_fault], dtype=torch.float32)
        total, num_requests = self.ranks.sum_(values).tolist()
        return max(1, int(total)), num_requests > 0

    def _train_step(self, leg: Leg, step: int, batch: Batch, num_masked: int) -> _LaunchedStep:
        """Accumulate gradients over the micro-batches and update the parameters once.

        Losses are divided by the counts of the global batch. The optimizer takes the mean of the
        ranks' gradients, hence the factor world_size, so any split of a batch gives one gradient.
        """
        config, world_size = self.config, self.ranks.launch.world_size
        global_batch_size = leg.phase.global_batch_size
        lr = leg.phase.lr_at(step - leg.steps.start)
        set_lr(self.optimizer, lr)
        torch.manual_seed(_dropout_seed(config.seed, self.ranks.launch.rank, step))
        sums = torch.zeros(2, device=self.ranks.device)
        for micro_batch in batch.split(leg.micro_batches.size):
            with self._autocast:
                losses = loss_sums(self.model, micro_batch.to(self.ranks.device))
            loss = losses.mlm / num_masked + losses.nsp / global_batch_size
            self.scaler.scale(loss * world_size).backward()
            sums += torch.stack([losses.mlm, losses.nsp]).detach()
        grad_norm = self._clip()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        values = self.ranks.sum_(sums)
        if grad_norm is not None:
            values = torch.cat([values, grad_norm.reshape(1)])
        copied = None
        if values.device.type != "cpu":
            values = values.to("cpu", non_blocking=True)  # into pinned memory
            copied = torch.Event(self.ranks.device)
            copied.record()
        record: Record = {"kind": "train", "step": step + 1, "lr": lr}
        if self.scaler.is_enabled():
            record["loss_scale"] = self.scaler.get_scale()
        record |= self._phase_of(leg)
        return _LaunchedStep(record, num_masked, global_batch_size, values, copied)

    def _check_finite(self, record: Record) -> None:
        """Raise `UsageError` on every rank alike, after a word of it in the metrics."""
        if not math.isfinite(record["loss"]):
            self._add({"kind": "diverged", "step": record["step"], "lr": record["lr"]})
            raise UsageError(f"the loss is {record['loss']} at step {record['step']}; lower --lr")

    def _clip(self) -> torch.Tensor | None:
        """Bound the gradient norm, unless the rule does; return the norm before, () fp32."""
        if self.scaler.is_enabled():
            self.scaler.unscale_(self.optimizer)
        if clips_itself(self.config) or self.config.max_grad_norm == 0:
            return None
        return self.optimizer.clip_grad_norm(self.config.max_grad_norm)

    def _evaluate(self, leg: Leg, step: int) -> Record:
        score = leg.evaluation.score(self.model, self.ranks, self._autocast)
        record = {
            "kind": "eval",
            "step": step,
            "mlm_loss": score.mlm_loss,
            "mlm_accuracy": score.mlm_accuracy,
            "nsp_loss": score.nsp_loss,
        }
        return record | self._phase_of(leg)

    def _phase_of(self, leg: Leg) -> Record:
        """Return what a record says of its phase: its number, where there are several."""
        return {"phase": leg.number} if len(self.legs) > 1 else {}

    def _speed(self, num_samples: int, seconds: float) -> Record:
        """Return the time of a step, and the smoothed number of samples per second."""
        keep = _SPEED_SMOOTHING if self._samples_per_second else 0.0
        self._samples_per_second *= keep
        self._samples_per_second += (1 - keep) * num_samples / seconds
        return {"seconds": seconds, "samples_per_second": self._samples_per_second}


def make_legs(config: RunConfig, world_size: int, corpus: PreparedCorpus) -> Iterator[Leg]:
    """Yield the phases of a run, with their samples and evaluations."""
    vocab_size, special = corpus.summary.vocab_size, corpus.summary.special
    for number, (phase, steps) in enumerate(
        zip(config.phases, spans(config.phases), strict=True), start=1
    ):
        evaluation = HeldOutEvaluation(
            SampleStream(corpus.held_out, vocab_size, phase.seq_len, config.seed, special),
            config.eval_samples,
            min(_EVAL_BATCH_SIZE, phase.micro_batch_size or _EVAL_BATCH_SIZE),
        )
        stream = SampleStream(corpus.train, vocab_size, phase.seq_len, config.seed, special)
        yield Leg(number, phase, steps, phase.micro_batches(world_size), stream, evaluation)


def _dropout_seed(seed: int, rank: int, step: int) -> int:
    """Return a seed of its own for each rank and step, so that a resumed run drops the same."""
    return int(np.random.SeedSequence([seed, rank, step]).generate_state(1, np.uint64)[0])
