"""Held-out loss and accuracy, and the unigram baseline that they have to beat."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

import numpy as np
import torch
from transformers import BertForPreTraining

from pretraining.model import loss_sums
from pretraining.ranks import Ranks
from pretraining.samples import IGNORED_LABEL, IntArray, SampleStream

HELD_OUT_SEED = 20_190_401
"""Fixed, so that runs with different seeds are measured on the same masked tokens."""


@dataclasses.dataclass(frozen=True)
class HeldOutScore:
    """Means over the held-out samples; losses in nats."""

    mlm_loss: float
    mlm_accuracy: float
    nsp_loss: float


class HeldOutEvaluation:
    """A fixed set of held-out samples, of which each rank scores its part."""

    def __init__(self, stream: SampleStream, num_samples: int, batch_size: int) -> None:
        self.stream = dataclasses.replace(stream, seed=HELD_OUT_SEED)
        self.num_samples = num_samples
        self.batch_size = batch_size

    @torch.no_grad()
    def score(
        self, model: BertForPreTraining, ranks: Ranks, autocast: torch.autocast
    ) -> HeldOutScore:
        """Score the model on all samples; the same on every rank. Collective."""
        rank, world_size = ranks.launch.rank, ranks.launch.world_size
        start = rank * self.num_samples // world_size
        stop = (rank + 1) * self.num_samples // world_size
        # MLM loss, NSP loss, correct, masked tokens
        sums = torch.zeros(4, device=ranks.device)
        model.eval()
        batches = list(self._ranges(start, stop))
        # Under FSDP2 a forward is collective, so each rank has as many as the one with most.
        most = math.ceil(math.ceil(self.num_samples / world_size) / self.batch_size)
        for number in range(most):
            is_own = number < len(batches)
            batch = self.stream.batch(0, batches[number] if is_own else range(1))
            batch = batch.to(ranks.device)
            with autocast:
                losses = loss_sums(model, batch)
            if not is_own:
                continue
            num_masked = (batch.labels != IGNORED_LABEL).sum()
            sums += torch.stack([losses.mlm, losses.nsp, losses.num_correct, num_masked])
        model.train()
        mlm, nsp, num_correct, num_masked = ranks.sum_(sums).tolist()
        return HeldOutScore(
            mlm_loss=mlm / num_masked,
            mlm_accuracy=num_correct / num_masked,
            nsp_loss=nsp / self.num_samples,
        )

    def unigram_loss(self, token_counts: IntArray) -> float:
        """Return the cross-entropy, in nats, of the held-out masked tokens under unigram counts.

        The counts are those of the training tokens plus one each: the loss of the best guess that
        looks at no context.
        """
        counts = token_counts + 1.0
        log_probability = np.log(counts / counts.sum())
        total, num_masked = 0.0, 0
        for samples in self._ranges(0, self.num_samples):
            batch = self.stream.batch(0, samples)
            masked = batch.labels[batch.labels != IGNORED_LABEL].numpy()
            total -= float(log_probability[masked].sum())
            num_masked += len(masked)
        return total / num_masked

    def _ranges(self, start: int, stop: int) -> Iterator[range]:
        """Yield the samples of each batch."""
        for first in range(start, stop, self.batch_size):
            yield range(first, min(first + self.batch_size, stop))
