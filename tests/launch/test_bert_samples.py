"""Sentence pairs, masking, and one sequence of samples for every number of ranks."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from pretraining.prepared import PreparedCorpus
from pretraining.samples import (
    IGNORED_LABEL,
    Batch,
    SampleStream,
    draw_pair,
    mask_tokens,
    num_masked,
)
from pretraining.shards import DocumentSet, Shard
from pretraining.wordpiece import SPECIAL_TOKENS, TRAINED

PAD_ID, _, CLS_ID, SEP_ID, MASK_ID = TRAINED
FIRST_ID = len(SPECIAL_TOKENS)


def _numbered_documents(sentence_lengths: list[list[int]], num_shards: int = 1) -> DocumentSet:
    """Build documents whose tokens are all different, so that a token tells where it stands."""
    shards, first = [], FIRST_ID
    for numbers in np.array_split(np.arange(len(sentence_lengths)), num_shards):
        documents = [sentence_lengths[number] for number in numbers]
        lengths = [length for document in documents for length in document]
        shards.append(
            Shard(
                tokens=np.arange(first, first + sum(lengths), dtype=np.int32),
                sentence_starts=np.cumsum([0, *lengths], dtype=np.uint32),
                document_starts=np.cumsum([0, *map(len, documents)], dtype=np.uint32),
            )
        )
        first += sum(lengths)
    return DocumentSet(shards)


LENGTHS = [[5, 9, 2], [30], [1, 1], [40, 3, 50], [7] * 12, [4, 60]]


@pytest.mark.parametrize("num_shards", [1, 3])
@pytest.mark.parametrize("max_tokens", [4, 21, 200])
def test_a_pair_is_two_runs_of_text_and_the_label_says_how_they_relate(
    max_tokens: int, num_shards: int
) -> None:
    """A and B are whole runs of tokens; B is further on in A's document, or in another one."""
    documents = _numbered_documents(LENGTHS, num_shards)
    document_of = np.repeat(np.arange(len(LENGTHS)), [sum(lengths) for lengths in LENGTHS])
    sentence_of = np.repeat(np.arange(documents.num_sentences), list(itertools.chain(*LENGTHS)))
    seen = set()
    for index in range(2000):
        pair = draw_pair(documents, max_tokens, np.random.default_rng(index))
        assert len(pair.first) >= 1
        assert len(pair.second) >= 1
        assert len(pair.first) + len(pair.second) <= max_tokens
        first, second = pair.first - FIRST_ID, pair.second - FIRST_ID
        for part in (first, second):
            assert (np.diff(part) == 1).all()
            assert len(set(document_of[part])) == 1
        if pair.is_random_next:
            assert document_of[first[0]] != document_of[second[0]]
        else:
            assert document_of[first[0]] == document_of[second[0]]
            # Cut parts keep the order, and no sentence lies on both sides of the split.
            assert sentence_of[first[-1]] < sentence_of[second[0]]
            if max_tokens == 200:
                assert second[0] == first[-1] + 1
        seen.add((document_of[first[0]], pair.is_random_next))
    # A document of one sentence cannot give A; every other one gives both kinds.
    assert seen == set(itertools.product({0, 2, 3, 4, 5}, (False, True)))


@pytest.mark.parametrize("num_shards", [2, 3, 6])
def test_pairs_do_not_depend_on_where_shards_end(num_shards: int) -> None:
    """The same draws from one shard and from several."""
    one, several = (_numbered_documents(LENGTHS, num) for num in (1, num_shards))
    for index in range(500):
        pairs = [draw_pair(d, 21, np.random.default_rng(index)) for d in (one, several)]
        assert [pair.first.tolist() for pair in pairs] == [pairs[0].first.tolist()] * 2
        assert [pair.second.tolist() for pair in pairs] == [pairs[0].second.tolist()] * 2


def test_half_of_the_pairs_are_random_and_come_from_everywhere(corpus: PreparedCorpus) -> None:
    """2,000 draws: the share is within four standard deviations of one half."""
    stream = SampleStream(corpus.train, corpus.summary.vocab_size, 32, seed=1)
    share = stream.batch(0, range(2000)).is_random_next.float().mean().item()
    assert abs(share - 0.5) < 4 * 0.5 / 2000**0.5


def test_fifteen_percent_of_the_tokens_are_masked_80_10_10() -> None:
    """Labels are the original tokens; special tokens are never chosen; the shares hold."""
    vocab_size, num_tokens = 1000, 400
    num_chosen, fates = 0, np.zeros(3)
    for seed in range(200):
        rng = np.random.default_rng(seed)
        original = rng.integers(FIRST_ID, vocab_size, size=num_tokens)
        original[[0, 100, 399]] = CLS_ID, SEP_ID, PAD_ID
        ids = original.copy()
        masked = mask_tokens(ids, vocab_size, rng)
        assert len(masked.positions) == num_masked(num_tokens - 3) == 60
        assert (np.diff(masked.positions) > 0).all()
        assert (masked.labels == original[masked.positions]).all()
        assert (masked.labels >= FIRST_ID).all()
        untouched = np.delete(np.arange(num_tokens), masked.positions)
        assert (ids[untouched] == original[untouched]).all()
        now = ids[masked.positions]
        assert ((now == MASK_ID) | (now >= FIRST_ID)).all()
        kept = now == masked.labels
        fates += [(now == MASK_ID).sum(), (~kept & (now != MASK_ID)).sum(), kept.sum()]
        num_chosen += len(now)
    assert np.abs(fates / num_chosen - [0.8, 0.1, 0.1]).max() < 0.015


def test_short_sequences_mask_at_least_one_token() -> None:
    """And one with nothing but special tokens masks none."""
    rng = np.random.default_rng(0)
    ids = np.array([CLS_ID, 50, SEP_ID, 60, SEP_ID])
    assert len(mask_tokens(ids, 100, rng).positions) == 1
    ids = np.array([CLS_ID, SEP_ID, PAD_ID])
    assert len(mask_tokens(ids, 100, rng).positions) == 0
    assert ids.tolist() == [CLS_ID, SEP_ID, PAD_ID]


def _unmasked(batch: Batch) -> torch.Tensor:
    """Put the labels back where they were masked."""
    ids = batch.input_ids.clone()
    for row, positions, labels in zip(ids, batch.positions, batch.labels, strict=True):
        is_real = labels != IGNORED_LABEL
        row[positions[is_real]] = labels[is_real]
    return ids


def test_a_batch_is_laid_out_as_bert_expects(corpus: PreparedCorpus) -> None:
    """[CLS] A [SEP] B [SEP] and padding; segment 1 is B and its [SEP]; 15 % have labels."""
    seq_len = 40
    stream = SampleStream(corpus.train, corpus.summary.vocab_size, seq_len, seed=0)
    batch = stream.batch(7, range(64))
    for row, ids in enumerate(_unmasked(batch).tolist()):
        separators = [i for i, token in enumerate(ids) if token == SEP_ID]
        first_stop, stop = separators
        length = stop + 1
        assert ids[0] == CLS_ID
        assert CLS_ID not in ids[1:]
        assert ids[length:] == [PAD_ID] * (seq_len - length)
        assert batch.attention_mask[row].tolist() == [1] * length + [0] * (seq_len - length)
        num_second = stop - first_stop
        assert batch.token_type_ids[row].tolist() == (
            [0] * (first_stop + 1) + [1] * num_second + [0] * (seq_len - length)
        )
        num_labels = int((batch.labels[row] != IGNORED_LABEL).sum())
        assert num_labels == num_masked(length - 3)
    assert batch.labels.shape == (64, num_masked(seq_len - 3))
    # Near the end of a document the window grows backwards: long sequences are the rule.
    assert batch.attention_mask.float().mean() > 0.75


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_ranks_see_slices_of_one_global_batch(corpus: PreparedCorpus, world_size: int) -> None:
    """What the ranks draw, laid end to end, is what one rank draws alone; so is each split."""
    stream = SampleStream(corpus.train, corpus.summary.vocab_size, 32, seed=3)
    share = 12 // world_size
    for step in (0, 5):
        whole = stream.batch(step, range(12))
        parts = [stream.batch(step, range(r * share, (r + 1) * share)) for r in range(world_size)]
        micro = [piece for part in parts for piece in part.split(2)]
        for pieces in (parts, micro):
            for expected, *got in zip(whole, *pieces, strict=True):
                assert torch.equal(torch.cat(got), expected)


def test_steps_seeds_and_indices_give_other_samples(corpus: PreparedCorpus) -> None:
    """Masking is dynamic: nothing repeats from step to step, seed to seed or row to row."""
    streams = [SampleStream(corpus.train, corpus.summary.vocab_size, 32, seed=s) for s in (0, 1)]
    rows = [
        tuple(row)
        for stream in streams
        for step in range(4)
        for row in stream.batch(step, range(16)).input_ids.tolist()
    ]
    assert len(set(rows)) == len(rows) == 128
