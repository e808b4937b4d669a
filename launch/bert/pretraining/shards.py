"""Token arrays of documents in files of bounded size, written as they come, read as memory maps.

    shard-00000.bin
        tokens of the documents to train on, tokens of those that are held out,
        sentence_starts and document_starts of the first, then of the second

A shard has whole documents. Sentences are numbered through all shards, so what is drawn by their
numbers does not depend on where a shard ends.
"""

from __future__ import annotations

import bisect
import dataclasses
import hashlib
from array import array
from collections.abc import Iterable, Mapping
from itertools import accumulate
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import numpy.typing as npt

from pretraining.files import sha256, sync, unfinished
from pretraining.wordpiece import SETS, Piece

TokenArray = npt.NDArray[np.integer]
"""Ids as they are stored: unsigned 16-bit where the vocabulary allows."""

StartArray = npt.NDArray[np.uint32]

_ALIGNMENT = 64


@dataclasses.dataclass(frozen=True)
class Shard:
    """Token ids of documents, laid end to end.

    tokens            | d0s0 | d0s1   | d0s2 | d1s0    | d1s1 |   (num_tokens,) integers
    sentence_starts   0      ^        ^      ^         ^      ^   (num_sentences + 1,) tokens
    document_starts   0                      ^                ^   (num_documents + 1,) sentences
    """

    tokens: TokenArray
    sentence_starts: StartArray
    document_starts: StartArray

    @property
    def num_sentences(self) -> int:
        return len(self.sentence_starts) - 1

    @property
    def num_documents(self) -> int:
        return len(self.document_starts) - 1

    def sentences_beside(self, sentence: int) -> range:
        """Return the sentences of the document that `sentence` is in."""
        # Not 64-bit: the whole array would be made so.
        document = np.searchsorted(self.document_starts, np.uint32(sentence), side="right")
        start, stop = (int(i) for i in self.document_starts[document - 1 : document + 1])
        return range(start, stop)

    def starts_of(self, sentences: range) -> npt.NDArray[np.int64]:
        """Return where the sentences start, and where the last one ends."""
        return self.sentence_starts[sentences.start : sentences.stop + 1].astype(np.int64)


class Place(NamedTuple):
    """A sentence in its shard."""

    shard: Shard
    sentence: int


class DocumentSet:
    """Documents of one or more shards."""

    def __init__(self, shards: Iterable[Shard]) -> None:
        self.shards = tuple(shards)
        self._first_sentences = [0, *accumulate(shard.num_sentences for shard in self.shards)]
        self.num_documents = sum(shard.num_documents for shard in self.shards)

    @property
    def num_sentences(self) -> int:
        return self._first_sentences[-1]

    @property
    def num_tokens(self) -> int:
        return sum(len(shard.tokens) for shard in self.shards)

    def place(self, sentence: int) -> Place:
        """Return where the sentence of that number is, counted through all shards."""
        number = bisect.bisect_right(self._first_sentences, sentence) - 1
        return Place(self.shards[number], sentence - self._first_sentences[number])


class _Part:
    """One set of a shard that is being written."""

    def __init__(self) -> None:
        self.sentence_starts = array("I", [0])
        self.document_starts = array("I", [0])
        self.num_pairable = 0

    def add(self, piece: Piece) -> None:
        for starts, lengths in (
            (self.sentence_starts, piece.sentence_lengths),
            (self.document_starts, piece.document_lengths),
        ):
            start = starts[-1]
            starts.extend(start + end for end in accumulate(lengths))
        self.num_pairable += sum(length >= 2 for length in piece.document_lengths)

    def counts(self) -> dict[str, int]:
        return {
            "tokens": self.sentence_starts[-1],
            "sentences": len(self.sentence_starts) - 1,
            "documents": len(self.document_starts) - 1,
            "pairable": self.num_pairable,
        }


class _Output:
    """A file in sections that start at multiples of 64 bytes; takes its digest."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._digest = hashlib.sha256()
        self.nbytes = 0

    def write(self, data: bytes) -> None:
        self._file.write(data)
        self._digest.update(data)
        self.nbytes += len(data)

    def end_section(self) -> None:
        self.write(bytes(-self.nbytes % _ALIGNMENT))

    def digest(self) -> str:
        return self._digest.hexdigest()


def write_shard(path: Path, pieces: Iterable[Mapping[str, Piece]]) -> dict[str, Any]:
    """Write a shard of all `pieces`; return what `open_shard` needs to know, in JSON's types.

    What is to train on goes to the disk at once; of the rest the tokens wait in memory.
    """
    parts = {name: _Part() for name in SETS}
    held_out: list[bytes] = []
    with unfinished(path) as temporary:
        with temporary.open("wb") as file:
            output = _Output(file)
            for piece in pieces:
                output.write(piece["train"].tokens)
                held_out.append(piece["held_out"].tokens)
                for name, part in parts.items():
                    part.add(piece[name])
            output.end_section()
            for tokens in held_out:
                output.write(tokens)
            output.end_section()
            for part in parts.values():
                for starts in (part.sentence_starts, part.document_starts):
                    output.write(starts.tobytes())
                    output.end_section()
        sync(temporary)
        temporary.replace(path)
    counts = {name: part.counts() for name, part in parts.items()}
    return {"file": path.name, "nbytes": output.nbytes, "sha256": output.digest(), **counts}


def check_shard(folder: Path, info: Mapping[str, Any]) -> None:
    """Read a shard; raise `ValueError` where it is not as it was written, and `OSError`."""
    if sha256(folder / info["file"]).hex() != info["sha256"]:
        raise ValueError(f"{info['file']} is damaged: its digest is not that of index.json")


def open_shard(folder: Path, info: Mapping[str, Any], dtype: str) -> dict[str, Shard]:
    """Map a shard; raises `ValueError` where the file is not as it was written, as far as is seen.

    A map's pages are shared by all processes that read them, and given up when memory is short.
    """
    # The same memory without np.memmap's cost per slice, which would double the sampling time.
    data = np.asarray(np.memmap(folder / info["file"], np.uint8, "r")).view(np.ndarray)
    if len(data) != info["nbytes"]:
        raise ValueError(f"{info['file']} has {len(data):,} of {info['nbytes']:,} bytes")
    start = 0

    def section(num: int, dtype: str) -> npt.NDArray[Any]:
        nonlocal start
        stop = start + num * np.dtype(dtype).itemsize
        found = data[start:stop].view(dtype)
        start = stop + -stop % _ALIGNMENT
        return found

    tokens = {name: section(info[name]["tokens"], dtype) for name in SETS}
    shards = {}
    for name in SETS:
        counts = [info[name][kind] + 1 for kind in ("sentences", "documents")]
        shards[name] = Shard(tokens[name], *(section(count, "uint32") for count in counts))
        ends = int(shards[name].sentence_starts[-1]), int(shards[name].document_starts[-1])
        if ends != (info[name]["tokens"], info[name]["sentences"]):
            raise ValueError(f"the arrays of {info['file']} are not of one text")
    return shards
