"""Draw BERT samples: sentence pairs with dynamic masking.

[Note: one sequence of samples]
Sample `index` of the global batch of `step` is a pure function of (seed, step, index): its own
random generator is seeded with these three. A rank takes a slice of the indices, so the global
batch is the same for every world size and every resumed run, with no sampler state to save.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from pretraining.prepared import CLS_ID, MASK_ID, PAD_ID, SEP_ID, SPECIAL_TOKENS, DocumentSet

MASKED_SHARE = 0.15
MASK_TOKEN_SHARE = 0.8
RANDOM_TOKEN_SHARE = 0.1
RANDOM_NEXT_SHARE = 0.5
NUM_PAIR_TOKENS = 3
"""[CLS] A [SEP] B [SEP]"""

IGNORED_LABEL = -100

IntArray = npt.NDArray[np.int64]
TokenArray = npt.NDArray[np.integer]
"""Ids as they are stored: unsigned 16-bit where the vocabulary allows."""


class Pair(NamedTuple):
    """Two token sequences, together at most seq_len - 3 tokens."""

    first: TokenArray
    second: TokenArray
    is_random_next: bool


class Batch(NamedTuple):
    """`num` samples of `seq_len` tokens, `num_slots` places for masked tokens in each.

    Slots are of a fixed number, so every batch has the same shapes; a slot without a masked token
    has position 0 and label IGNORED_LABEL.
    """

    input_ids: torch.Tensor  # (num, seq_len) int64
    token_type_ids: torch.Tensor  # (num, seq_len) int64
    attention_mask: torch.Tensor  # (num, seq_len) int64, 0 on padding
    positions: torch.Tensor  # (num, num_slots) int64, where the masked tokens are
    labels: torch.Tensor  # (num, num_slots) int64, the masked tokens
    is_random_next: torch.Tensor  # (num,) int64, the NSP label

    def to(self, device: torch.device) -> Batch:
        return Batch(*(tensor.to(device, non_blocking=True) for tensor in self))

    def split(self, num: int) -> list[Batch]:
        """Cut into micro-batches of `num` samples; the last one may be smaller."""
        return [Batch(*parts) for parts in zip(*(t.split(num) for t in self), strict=True)]


@dataclasses.dataclass(frozen=True)
class SampleStream:
    """An endless sequence of samples from one set of documents. [Note: one sequence of samples]"""

    documents: DocumentSet
    vocab_size: int
    seq_len: int
    seed: int

    @property
    def num_slots(self) -> int:
        return num_masked(self.seq_len - NUM_PAIR_TOKENS)

    def batch(self, step: int, indices: Sequence[int]) -> Batch:
        """Build the samples `indices` of the global batch of `step`."""
        num, seq_len, num_slots = len(indices), self.seq_len, self.num_slots
        input_ids = np.full((num, seq_len), PAD_ID, dtype=np.int64)
        token_type_ids = np.zeros((num, seq_len), dtype=np.int64)
        attention_mask = np.zeros((num, seq_len), dtype=np.int64)
        positions = np.zeros((num, num_slots), dtype=np.int64)
        labels = np.full((num, num_slots), IGNORED_LABEL, dtype=np.int64)
        is_random_next = np.zeros(num, dtype=np.int64)
        for row, index in enumerate(indices):
            rng = np.random.default_rng([self.seed, step, index])
            pair = draw_pair(self.documents, self.seq_len - NUM_PAIR_TOKENS, rng)
            stop_first, stop = len(pair.first) + 1, len(pair.first) + len(pair.second) + 2
            ids = input_ids[row]
            ids[0], ids[stop_first], ids[stop] = CLS_ID, SEP_ID, SEP_ID
            ids[1:stop_first], ids[stop_first + 1 : stop] = pair.first, pair.second
            token_type_ids[row, stop_first + 1 : stop + 1] = 1
            attention_mask[row, : stop + 1] = 1
            is_random_next[row] = pair.is_random_next
            masked = mask_tokens(ids, self.vocab_size, rng)
            positions[row, : len(masked.positions)] = masked.positions
            labels[row, : len(masked.labels)] = masked.labels
        arrays = (input_ids, token_type_ids, attention_mask, positions, labels, is_random_next)
        return Batch(*map(torch.from_numpy, arrays))


def num_masked(num_tokens: int) -> int:
    """Return how many of `num_tokens` ordinary tokens are masked; at least one."""
    return max(1, round(MASKED_SHARE * num_tokens))


class Masked(NamedTuple):
    """The tokens chosen for prediction, in order of position."""

    positions: IntArray
    labels: IntArray


def mask_tokens(ids: IntArray, vocab_size: int, rng: np.random.Generator) -> Masked:
    """Mask 15 % of the ordinary tokens of `ids` (seq_len,), updated in place.

    80 % of them become [MASK], 10 % a random ordinary token, 10 % stay as they are.
    """
    candidates = np.flatnonzero(ids >= len(SPECIAL_TOKENS))
    count = min(num_masked(len(candidates)), len(candidates))
    positions = np.sort(rng.choice(candidates, size=count, replace=False))
    labels = ids[positions]
    fate = rng.random(count)
    replacement = rng.integers(len(SPECIAL_TOKENS), vocab_size, size=count)
    replacement[fate < MASK_TOKEN_SHARE] = MASK_ID
    keep = fate >= MASK_TOKEN_SHARE + RANDOM_TOKEN_SHARE
    replacement[keep] = labels[keep]
    ids[positions] = replacement
    return Masked(positions, labels)


def draw_pair(documents: DocumentSet, max_tokens: int, rng: np.random.Generator) -> Pair:
    """Draw a sentence pair of 2 to `max_tokens` tokens; B follows A or is from another document."""
    window, document = _draw_window(documents, max_tokens, rng)
    starts = documents.sentence_starts
    split = int(rng.integers(window.start + 1, window.stop))
    first = documents.tokens[starts[window.start] : starts[split]]
    is_random_next = bool(rng.random() < RANDOM_NEXT_SHARE)
    if is_random_next:
        second = _draw_other(documents, document, max(1, max_tokens - len(first)), rng)
    else:
        second = documents.tokens[starts[split] : starts[window.stop]]
    num_first, num_second = _fit_pair(len(first), len(second), max_tokens)
    return Pair(_cut(first, num_first, rng), _cut(second, num_second, rng), is_random_next)


def _draw_window(
    documents: DocumentSet, max_tokens: int, rng: np.random.Generator
) -> tuple[range, int]:
    """Draw two or more successive sentences of one document, about `max_tokens` tokens."""
    starts = documents.sentence_starts
    while True:
        sentence = int(rng.integers(documents.num_sentences))
        document = int(np.searchsorted(documents.document_starts, sentence, side="right")) - 1
        lowest, highest = (int(i) for i in documents.document_starts[document : document + 2])
        if highest - lowest >= 2:
            break
    stop = int(np.searchsorted(starts, starts[sentence] + max_tokens))
    stop = max(min(stop, highest), sentence + 1)
    # Near the document's end the window grows backwards, so that it is not mostly padding.
    start = int(np.searchsorted(starts, starts[stop] - max_tokens))
    start = min(max(start, lowest), sentence)
    if stop - start < 2:
        start, stop = (start, stop + 1) if stop < highest else (start - 1, stop)
    return range(start, stop), document


def _draw_other(
    documents: DocumentSet, document: int, num_tokens: int, rng: np.random.Generator
) -> TokenArray:
    """Return up to `num_tokens` tokens from a random sentence of another document onwards."""
    lowest, highest = (int(i) for i in documents.document_starts[document : document + 2])
    sentence = int(rng.integers(documents.num_sentences - (highest - lowest)))
    sentence += (highest - lowest) * (sentence >= lowest)
    other = int(np.searchsorted(documents.document_starts, sentence, side="right"))
    start = int(documents.sentence_starts[sentence])
    stop = int(documents.sentence_starts[documents.document_starts[other]])
    return documents.tokens[start : min(stop, start + num_tokens)]


def _fit_pair(num_first: int, num_second: int, max_tokens: int) -> tuple[int, int]:
    """Shorten the longer sequence first, until both fit together."""
    excess = num_first + num_second - max_tokens
    if excess <= 0:
        return num_first, num_second
    if abs(num_first - num_second) >= excess:
        if num_first > num_second:
            return num_first - excess, num_second
        return num_first, num_second - excess
    return max_tokens - max_tokens // 2, max_tokens // 2


def _cut(tokens: TokenArray, num_tokens: int, rng: np.random.Generator) -> TokenArray:
    """Keep `num_tokens` successive tokens: some go from the front, the others from the back."""
    offset = int(rng.integers(len(tokens) - num_tokens + 1))
    return tokens[offset : offset + num_tokens]
