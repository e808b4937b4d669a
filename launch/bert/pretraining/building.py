"""Prepare text in a folder, in steps of which a killed job leaves the finished ones to the next."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from pretraining.corpus import Faults, Source, TextOptions
from pretraining.errors import UsageError
from pretraining.files import sha256, sync, write_whole
from pretraining.processes import in_order
from pretraining.reading import read_documents
from pretraining.shards import write_shard
from pretraining.survey import MIN_DOCUMENTS, Survey
from pretraining.wordpiece import (
    SETS,
    TOKENIZER_FILE,
    TRAINED,
    SpecialIds,
    be_encoder,
    dtype_of,
    encode,
    train_vocabulary,
)

PIECE_CHARS = 4 << 20
"""Text that one process encodes at a time."""

PIECES_PER_SHARD = 64

_COUNTED_AT_ONCE = 1 << 20


@dataclasses.dataclass(frozen=True)
class PreparedSummary:
    """What was prepared; `digest` identifies text, options and vocabulary together."""

    digest: str
    vocab_size: int
    num_words: int
    num_documents: int
    num_held_out_documents: int
    num_faults: int
    first_fault: str
    special_ids: Sequence[int] = TRAINED

    @property
    def special(self) -> SpecialIds:
        return SpecialIds(*self.special_ids)


@dataclasses.dataclass(frozen=True)
class Building:
    """The preparation of one text in `folder`, where an earlier job may have begun it."""

    folder: Path
    sources: Sequence[Source]
    options: TextOptions
    faults: Faults
    say: Callable[[str], None]

    def run(self, name: str) -> None:
        """Do what is not done yet, under a digest that begins with `name`.

        Raises `UsageError`, `OSError`.
        """
        for path in self.folder.glob(".*.unfinished"):
            path.unlink()
        found = self._survey()
        shards = list(self._shards(found["cut"], found["num_documents"]))
        pairable = min(sum(shard[kind]["pairable"] for shard in shards) for kind in SETS)
        if pairable < MIN_DOCUMENTS // 2:
            raise UsageError("--corpus: too few documents have two sentences with words in them")
        counts = _token_counts(self.folder, shards, found["vocab_size"])
        np.save(self.folder / "token_counts.npy", counts)
        files = [[str(source.path.absolute()), *source[1:]] for source in self.sources]
        write_whole(self.folder / "sources.json", json.dumps(files))
        summary = PreparedSummary(
            digest=f"{name}-{self._digest(shards)}",
            num_held_out_documents=sum(shard["held_out"]["documents"] for shard in shards),
            **{key: value for key, value in found.items() if key != "cut"},
        )
        index = {"summary": dataclasses.asdict(summary), "shards": shards}
        write_whole(self.folder / "index.json", json.dumps(index, indent=1))
        for kind in SETS:
            num = {key: sum(s[kind][key] for s in shards) for key in ("documents", "tokens")}
            self.say(f"{kind}: {num['documents']:,} documents, {num['tokens']:,} tokens")

    def _survey(self) -> dict[str, Any]:
        """Look through the whole text and make the vocabulary, unless a killed job did."""
        path = self.folder / "survey.json"
        if path.exists():
            found: dict[str, Any] = json.loads(path.read_text())
            self.faults.count(found["num_faults"], found["first_fault"])
            self.say("going on where an earlier job was")
            return found
        nbytes = sum(source.nbytes for source in self.sources)
        self.say(f"text: {nbytes:,} bytes in {len(self.sources):,} files")
        faults = Faults(self.say, is_strict=self.options.is_strict)
        survey = Survey(self.options.vocab_words)
        for document in self._documents(faults):
            survey.add(document)
        tokenizer, special_ids = self.folder / TOKENIZER_FILE, TRAINED
        if self.options.given is None:
            train_vocabulary(survey.sample(), self.options.vocab_size, self.folder)
            sync(self.folder / "vocab.txt")
        else:
            write_whole(tokenizer, self.options.given.tokenizer.to_str())
            special_ids = self.options.given.special
        sync(tokenizer)
        found = {
            "cut": survey.cut(),
            "vocab_size": Tokenizer.from_file(str(tokenizer)).get_vocab_size(),
            "special_ids": special_ids,
            "num_words": survey.num_words,
            "num_documents": survey.num_documents,
            "num_faults": faults.num,
            "first_fault": faults.first,
        }
        self.say(f"vocabulary: {found['vocab_size']:,} WordPiece tokens")
        write_whole(path, json.dumps(found))
        self.faults.count(faults.num, faults.first)
        return found

    def _documents(self, faults: Faults) -> Iterator[list[str]]:
        for source in self.sources:
            yield from read_documents(source, self.options.jsonl_key, faults)

    def _shards(self, cut: int, num_documents: int) -> Iterator[dict[str, Any]]:
        """Yield what is to be known of each shard; those that are there are not written again."""
        done = list(self._shards_done())
        yield from done
        rest = itertools.islice(self._pieces(num_documents), len(done) * PIECES_PER_SHARD, None)
        encoded = in_order(encode, rest, be_encoder, (self.folder / TOKENIZER_FILE, cut))
        for number in itertools.count(len(done)):
            first = next(encoded, None)
            if first is None:
                return
            group = itertools.chain([first], itertools.islice(encoded, PIECES_PER_SHARD - 1))
            shard = write_shard(self.folder / f"shard-{number:05d}.bin", group)
            write_whole(self.folder / f"shard-{number:05d}.json", json.dumps(shard))
            tokens = sum(shard[kind]["tokens"] for kind in SETS)
            self.say(f"shard {number}: {tokens:,} tokens")
            yield shard

    def _shards_done(self) -> Iterator[dict[str, Any]]:
        """Yield what a killed job noted of its shards, each of which was on the disk before."""
        for number in itertools.count():
            path = self.folder / f"shard-{number:05d}.json"
            if not path.exists():
                return
            shard: dict[str, Any] = json.loads(path.read_text())
            yield shard

    def _pieces(self, num_documents: int) -> Iterator[list[list[str]]]:
        """Yield the text in lists of documents of about PIECE_CHARS together."""
        piece: list[list[str]] = []
        num_chars = 0
        # What is wrong with the text has been told.
        for document in self._documents(Faults(_say_nothing, is_strict=False)):
            num_documents -= 1
            piece.append(document)
            num_chars += sum(map(len, document))
            if num_chars >= PIECE_CHARS:
                yield piece
                piece, num_chars = [], 0
        if num_documents:
            raise UsageError("--corpus: the text changed while it was prepared; start again")
        if piece:
            yield piece

    def _digest(self, shards: Sequence[dict[str, Any]]) -> str:
        digest = hashlib.sha256()
        if self.options.given is None:  # else the name has its digest
            digest.update(sha256(self.folder / "vocab.txt"))
        for shard in shards:
            digest.update(shard["sha256"].encode())
        return digest.hexdigest()[:12]


def _say_nothing(line: str) -> None:
    """Say nothing."""


def _token_counts(
    folder: Path, shards: Sequence[dict[str, Any]], vocab_size: int
) -> npt.NDArray[np.int64]:
    """Count the tokens to train on, which a shard begins with."""
    counts = np.zeros(vocab_size, dtype=np.int64)
    for shard in shards:
        num_left = shard["train"]["tokens"]
        with (folder / shard["file"]).open("rb") as file:
            while num_left:
                part = np.fromfile(file, dtype_of(vocab_size), min(num_left, _COUNTED_AT_ONCE))
                counts += np.bincount(part, minlength=vocab_size)
                num_left -= len(part)
    return counts
