"""Texts to be prepared: a small one, and some of any size; what is to come of them."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pretraining import building, processes
from pretraining.corpus import TextOptions
from pretraining.data_options import DATA_DEFAULTS
from pretraining.prepared import PreparedCorpus, prepare_corpus
from pretraining.shards import DocumentSet
from pretraining.wordpiece import SPECIAL_TOKENS
from tokenizers import BertWordPieceTokenizer

WORDS_AT_ONCE = 200_000
NEW_WORD_SHARE = 0.005


SUBJECTS = (
    "the cat",
    "a dog",
    "the old man",
    "my sister",
    "every bird",
    "the red ship",
    "a small tree",
)
VERBS = ("sees", "likes", "carries", "follows", "forgets", "finds", "hears")
OBJECTS = (
    "the house",
    "a river",
    "some bread",
    "the king",
    "an apple",
    "the long road",
    "its mother",
)
PLACES = ("in the morning", "near the sea", "behind the wall", "without a word", "at night")

NUM_DOCUMENTS = 60


def make_documents() -> list[list[str]]:
    """Write documents of 2 to 7 sentences from a small grammar."""
    rng = random.Random(0)

    def sentence() -> str:
        return " ".join(rng.choice(words) for words in (SUBJECTS, VERBS, OBJECTS, PLACES)) + "."

    return [[sentence() for _ in range(rng.randint(2, 7))] for _ in range(NUM_DOCUMENTS)]


def prepare(
    paths: Sequence[Path],
    data_dir: Path,
    vocab_size: int = 120,
    say: Callable[[str], object] = len,
    **options: Any,
) -> Path:
    """Prepare text as the job does without other options."""
    defaults = {"vocab_words": DATA_DEFAULTS["vocab_words"], **options}
    wanted = TextOptions(paths=paths, vocab_size=vocab_size, **defaults)
    return prepare_corpus(wanted, data_dir, say)  # type: ignore[arg-type]


def flat_sentences(documents: DocumentSet) -> list[list[int]]:
    """Return the ids of every sentence."""
    return [sentence for document in sentences_in(documents) for sentence in document]


def sentences_in(documents: DocumentSet) -> list[list[list[int]]]:
    found = []
    for shard in documents.shards:
        texts = [shard.tokens[a:b].tolist() for a, b in itertools.pairwise(shard.sentence_starts)]
        found += [texts[a:b] for a, b in itertools.pairwise(shard.document_starts.tolist())]
    return found


def have_small_shards(monkeypatch: pytest.MonkeyPatch, *, processes_from: int = 10**9) -> None:
    """Have a small text be of several shards, which this process encodes up to a number of pieces.

    A child process that is forked has this, too.
    """
    monkeypatch.setattr(building, "PIECE_CHARS", 1000)
    monkeypatch.setattr(building, "PIECES_PER_SHARD", 3)
    monkeypatch.setattr(processes, "FEWEST_ITEMS", processes_from)


def check_text(corpus: PreparedCorpus) -> None:
    """Every document is found once, in order, in exactly one of the two sets."""
    tokenizer = BertWordPieceTokenizer(str(corpus.folder / "vocab.txt"))
    assert [tokenizer.token_to_id(token) for token in SPECIAL_TOKENS] == [0, 1, 2, 3, 4]
    assert corpus.summary.vocab_size == tokenizer.get_vocab_size()
    expected = [
        [tokenizer.encode(sentence, add_special_tokens=False).ids for sentence in document]
        for document in make_documents()
    ]
    train, held_out = sentences_in(corpus.train), sentences_in(corpus.held_out)
    assert len(held_out) == corpus.summary.num_held_out_documents >= 2
    is_train = [document in train for document in expected]
    assert train == list(itertools.compress(expected, is_train))
    assert held_out == [d for d, in_train in zip(expected, is_train, strict=True) if not in_train]
    assert corpus.summary.num_documents == len(expected)
    num_words = sum(len(text.split()) for document in make_documents() for text in document)
    assert corpus.summary.num_words == num_words
    counts = np.bincount(list(itertools.chain(*itertools.chain(*train))))
    assert corpus.token_counts[: len(counts)].tolist() == counts.tolist()
    assert len(corpus.token_counts) == corpus.summary.vocab_size


def write_text(path: Path, nbytes: int, words: Sequence[str], seed: int) -> None:
    """Write a .txt or .jsonl of exactly `nbytes`, of words drawn from `words`.

    Some are new ones of six random letters, so that no table of all words stays small.
    """
    is_jsonl = path.suffix == ".jsonl"
    num_left = nbytes
    with path.open("w", encoding="ascii") as file:
        for sentences in _documents(words, seed):
            text = "\n".join(sentences) + "\n\n"
            if is_jsonl:
                text = json.dumps({"id": num_left, "text": " ".join(sentences)}) + "\n"
            if len(text) + 1000 > num_left:
                break
            file.write(text)
            num_left -= len(text)
        # What is left is one line, and the end of it.
        rest = "The end of it all is here. " * (1 + num_left // 27)
        if is_jsonl:
            rest = json.dumps({"id": 0, "text": rest[: num_left - 24]})
        file.write(rest[: num_left - 1].ljust(num_left - 1) + "\n")


def _documents(words: Sequence[str], seed: int) -> Iterator[list[str]]:
    rng = np.random.default_rng(seed)
    vocabulary = np.array(words, dtype=object)
    letters = np.array(list("abcdefghijklmnopqrstuvwxyz"), dtype="U1")
    while True:
        drawn = vocabulary[rng.integers(len(vocabulary), size=WORDS_AT_ONCE)]
        places = np.flatnonzero(rng.random(WORDS_AT_ONCE) < NEW_WORD_SHARE)
        drawn[places] = letters[rng.integers(26, size=(len(places), 6))].view("U6").ravel()
        text = drawn.tolist()
        lengths = rng.integers(5, 30, size=WORDS_AT_ONCE)
        start, document, size = 0, [], int(rng.integers(1, 30))
        for length in lengths.tolist():
            if start + length > WORDS_AT_ONCE:
                break
            document.append(" ".join(text[start : start + length]).capitalize() + ".")
            start += length
            if len(document) == size:
                yield document
                document, size = [], int(rng.integers(1, 30))
