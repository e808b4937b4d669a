"""Draw BERT samples: sentence pairs with dynamic masking.

[Note: one sequence of samples]
Sample `index` of the global batch of `step` is a pure function of (seed, step, index): its own
random generator is seeded with these three. A rank takes a slice of the indices, so the global
batch is the same for every world size and every resumed run, with no sampler state to save.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from pretraining.shards import DocumentSet, Shard, TokenArray
from pretraining.wordpiece import TRAINED, SpecialIds

MASKED_SHARE = 0.15
MASK_TOKEN_SHARE = 0.8
RANDOM_TOKEN_SHARE = 0.1
RANDOM_NEXT_SHARE = 0.5
NUM_PAIR_TOKENS = 3
"""[CLS] A [SEP] B [SEP]"""

IGNORED_LABEL = -100

IntArray = npt.NDArray[np.int64]


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
        if device.type == "cpu":
            return self
        # The host would wait for the device to read memory that is not pinned.
        return Batch(*(tensor.pin_memory().to(device, non_blocking=True) for tensor in self))

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
    special: SpecialIds = TRAINED

    @property
    def num_slots(self) -> int:
        return num_masked(self.seq_len - NUM_PAIR_TOKENS)

    def batch(self, step: int, indices: Sequence[int]) -> Batch:
        """Build the samples `indices` of the global batch of `step`."""
        num, seq_len, num_slots = len(indices), self.seq_len, self.num_slots
        special = self.special
        input_ids = np.full((num, seq_len), special.pad, dtype=np.int64)
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
            ids[0], ids[stop_first], ids[stop] = special.cls, special.sep, special.sep
            ids[1:stop_first], ids[stop_first + 1 : stop] = pair.first, pair.second
            token_type_ids[row, stop_first + 1 : stop + 1] = 1
            attention_mask[row, : stop + 1] = 1
            is_random_next[row] = pair.is_random_next
            masked = mask_tokens(ids, self.vocab_size, rng, special)
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


@functools.lru_cache
def _ordinary(vocab_size: int, special: SpecialIds) -> tuple[npt.NDArray[np.bool_], IntArray]:
    """Return which ids are of ordinary tokens, (vocab_size,), and the list of them."""
    is_ordinary = np.ones(vocab_size, dtype=np.bool_)
    is_ordinary[list(special)] = False
    return is_ordinary, np.flatnonzero(is_ordinary)


def mask_tokens(
    ids: IntArray, vocab_size: int, rng: np.random.Generator, special: SpecialIds = TRAINED
) -> Masked:
    """Mask 15 % of the ordinary tokens of `ids` (seq_len,), updated in place.

    80 % of them become [MASK], 10 % a random ordinary token, 10 % stay as they are.
    """
    is_ordinary, ordinary = _ordinary(vocab_size, special)
    candidates = np.flatnonzero(is_ordinary[ids])
    count = min(num_masked(len(candidates)), len(candidates))
    positions = np.sort(rng.choice(candidates, size=count, replace=False))
    labels = ids[positions]
    fate = rng.random(count)
    replacement = ordinary[rng.integers(len(ordinary), size=count)]
    replacement[fate < MASK_TOKEN_SHARE] = special.mask
    keep = fate >= MASK_TOKEN_SHARE + RANDOM_TOKEN_SHARE
    replacement[keep] = labels[keep]
    ids[positions] = replacement
    return Masked(positions, labels)


class _Window(NamedTuple):
    """Successive sentences of one document."""

    shard: Shard
    starts: IntArray  # of its sentences in the shard's tokens, and where the last one ends
    document: range  # the document's sentences, counted through all shards


def draw_pair(documents: DocumentSet, max_tokens: int, rng: np.random.Generator) -> Pair:
    """Draw a sentence pair of 2 to `max_tokens` tokens; B follows A or is from another document."""
    window = _draw_window(documents, max_tokens, rng)
    tokens, starts = window.shard.tokens, window.starts
    split = int(starts[rng.integers(1, len(starts) - 1)])
    first = tokens[starts[0] : split]
    is_random_next = bool(rng.random() < RANDOM_NEXT_SHARE)
    if is_random_next:
        second = _draw_other(documents, window.document, max(1, max_tokens - len(first)), rng)
    else:
        second = tokens[split : starts[-1]]
    num_first, num_second = _fit_pair(len(first), len(second), max_tokens)
    return Pair(_cut(first, num_first, rng), _cut(second, num_second, rng), is_random_next)


def _draw_window(documents: DocumentSet, max_tokens: int, rng: np.random.Generator) -> _Window:
    """Draw two or more successive sentences of one document, about `max_tokens` tokens."""
    while True:
        number = int(rng.integers(documents.num_sentences))
        shard, sentence = documents.place(number)
        document = shard.sentences_beside(sentence)
        if len(document) >= 2:
            break
    starts = shard.starts_of(document)
    own = sentence - document.start
    stop = int(np.searchsorted(starts, starts[own] + max_tokens))
    stop = max(min(stop, len(document)), own + 1)
    # Near the document's end the window grows backwards, so that it is not mostly padding.
    start = int(np.searchsorted(starts, starts[stop] - max_tokens))
    start = min(start, own)
    if stop - start < 2:
        start, stop = (start, stop + 1) if stop < len(document) else (start - 1, stop)
    first = number - own
    return _Window(shard, starts[start : stop + 1], range(first, first + len(document)))


def _draw_other(
    documents: DocumentSet, document: range, num_tokens: int, rng: np.random.Generator
) -> TokenArray:
    """Return up to `num_tokens` tokens from a random sentence of another document onwards."""
    number = int(rng.integers(documents.num_sentences - len(document)))
    number += len(document) * (number >= document.start)
    shard, sentence = documents.place(number)
    starts = shard.starts_of(range(sentence, shard.sentences_beside(sentence).stop))
    return shard.tokens[starts[0] : min(int(starts[-1]), int(starts[0]) + num_tokens)]


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
