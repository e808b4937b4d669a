"""A WordPiece vocabulary, and documents as its token ids.

Processes that encode import this, and no torch, which would take them seconds and 200 MB.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tokenizers import BertWordPieceTokenizer, Tokenizer

from pretraining.survey import is_held_out

SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


class SpecialIds(NamedTuple):
    """Ids of the tokens that are not text."""

    pad: int
    unk: int
    cls: int
    sep: int
    mask: int


TRAINED = SpecialIds(*range(len(SPECIAL_TOKENS)))
"""Of a vocabulary that is trained here."""

TOKENIZER_FILE = "tokenizer.json"
"""Beside the shards: what they were encoded with."""

SETS = ("train", "held_out")

MOST_WORDS_KEPT = 200_000


class Piece(NamedTuple):
    """Some documents of one set, on their way into a shard."""

    tokens: bytes
    sentence_lengths: Sequence[int]
    document_lengths: Sequence[int]


def train_vocabulary(texts: Iterable[str], vocab_size: int, folder: Path) -> None:
    """Write vocab.txt and TOKENIZER_FILE.

    Ties are broken at random, so one text may give two vocabularies.

    Raises `OSError`.
    """
    tokenizer = BertWordPieceTokenizer(lowercase=True)
    tokenizer.train_from_iterator(
        texts,
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        limit_alphabet=min(1000, vocab_size // 2),
        show_progress=False,
    )
    try:
        tokenizer.save_model(str(folder))
        vocabulary = BertWordPieceTokenizer(str(folder / "vocab.txt"), lowercase=True)
        vocabulary.save(str(folder / TOKENIZER_FILE))
    except Exception as error:
        # It has one class for all errors, and the system's message as text.
        raise OSError(str(error)) from error


def dtype_of(vocab_size: int) -> str:
    """Return the type that ids are stored in."""
    return "uint16" if vocab_size <= 1 << 16 else "int32"


class _WordIds(dict[str, bytes]):
    """Ids of words as they are stored, kept for the next time: most words are frequent ones.

    BERT's tokenizers look at no character beyond a space, so a sentence's ids are those of its
    words. Of another one that was given, whole sentences are encoded.
    """

    def __init__(self, tokenizer: Path) -> None:
        self._tokenizer = Tokenizer.from_file(str(tokenizer))
        before = json.loads(self._tokenizer.to_str())["pre_tokenizer"] or {}
        self.is_by_word = before.get("type") == "BertPreTokenizer"
        self._dtype = dtype_of(self._tokenizer.get_vocab_size())
        self.nbytes_per_id = np.dtype(self._dtype).itemsize

    def __missing__(self, word: str) -> bytes:
        if len(self) >= MOST_WORDS_KEPT:
            self.clear()
        encoding = self._tokenizer.encode(word, add_special_tokens=False)
        ids = np.asarray(encoding.ids, dtype=self._dtype).tobytes()
        self[word] = ids
        return ids


class Encoder:
    """Turns documents into pieces of shards, each document into one of its set."""

    def __init__(self, tokenizer: Path, cut: int) -> None:
        self._ids = _WordIds(tokenizer)
        self._cut = cut

    def encode(self, documents: Iterable[Sequence[str]]) -> dict[str, Piece]:
        """Return a piece of each set; sentences without tokens are left out."""
        tokens: dict[str, list[bytes]] = {name: [] for name in SETS}
        sentence_lengths = {name: array("I") for name in SETS}
        document_lengths = {name: array("I") for name in SETS}
        ids_of, width = self._ids.__getitem__, self._ids.nbytes_per_id
        for document in documents:
            name = "held_out" if is_held_out(document, self._cut) else "train"
            if self._ids.is_by_word:
                found = [b"".join(map(ids_of, sentence.split(" "))) for sentence in document]
            else:
                found = [ids_of(sentence) for sentence in document]
            found = [ids for ids in found if ids]
            if found:
                tokens[name] += found
                sentence_lengths[name].extend(len(ids) // width for ids in found)
                document_lengths[name].append(len(found))
        return {
            name: Piece(b"".join(tokens[name]), sentence_lengths[name], document_lengths[name])
            for name in SETS
        }


_encoder: Encoder | None = None
"""Of a process that encodes for another one."""


def be_encoder(tokenizer: Path, cut: int) -> None:
    """Make this process ready for `encode`."""
    global _encoder
    _encoder = Encoder(tokenizer, cut)


def encode(documents: Sequence[Sequence[str]]) -> dict[str, Piece]:
    """Return what this process's encoder makes of documents."""
    assert _encoder is not None
    return _encoder.encode(documents)
