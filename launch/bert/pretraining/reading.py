"""Read documents from files of text, a line at a time: memory does not grow with the files."""

from __future__ import annotations

import gzip
import json
import math
import re
import zlib
from collections.abc import Iterator
from typing import IO

from pretraining.corpus import Faults, Source
from pretraining.files import describe

MAX_LINE_NBYTES = 16 << 20
"""A longer line is a fault: text has line ends."""

MAX_DOCUMENT_CHARS = 1 << 20
"""What is longer goes on as another document."""

MAX_SENTENCE_CHARS = 4096
MOST_COMPRESSED = 100
UNPACKED_NBYTES = 64 << 20
"""What a .gz may be unpacked to: this, and 100 times its own size."""

PROSE_CHARS = 1000
"""A line of a .txt is one sentence; a longer one is prose, in which sentences are looked for."""

_STOP = re.compile(
    "(?:(?<=[.!?])|(?<=[.!?][\"')\\]]))\\s+(?![a-z0-9])|(?<=[\u3002\uff01\uff1f])\\s*"
)
"""Where a sentence ends; Chinese and Japanese ones need no space after it."""


def read_documents(source: Source, jsonl_key: str, faults: Faults) -> Iterator[list[str]]:
    """Yield each document as its list of sentences; what cannot be read is noted in `faults`."""
    blocks = (
        _jsonl_blocks(source, jsonl_key, faults) if source.is_jsonl else _blocks(source, faults)
    )
    document: list[str] = []
    num_chars = 0
    for block in blocks:
        for sentence in block:
            document.append(sentence)
            num_chars += len(sentence)
            if num_chars >= MAX_DOCUMENT_CHARS:
                yield document
                document, num_chars = [], 0
        if not block and document:
            yield document
            document, num_chars = [], 0
    if document:
        yield document


def _blocks(source: Source, faults: Faults) -> Iterator[list[str]]:
    """Yield the sentences of every line; an empty list ends a document."""
    for _, line in _lines(source, faults):
        text = line.strip()
        yield sentences_of(text) if len(text) > PROSE_CHARS else [text] if text else []


def _jsonl_blocks(source: Source, key: str, faults: Faults) -> Iterator[list[str]]:
    for number, line in _lines(source, faults):
        line = line.strip()
        if not line:
            continue
        try:
            text = _text_of(line, key)
        except (ValueError, RecursionError) as error:
            faults.add(f"{source.path}, line {number}: {error}")
            continue
        for paragraph in text.splitlines():
            if paragraph.strip():
                yield sentences_of(paragraph)
        yield []


def _text_of(line: str, key: str) -> str:
    """Return the text of a line of JSON; raises `ValueError`."""
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"it is no JSON ({error.msg}, character {error.pos + 1})") from error
    if not isinstance(record, dict) or not isinstance(record.get(key), str):
        raise ValueError(f"it is no JSON object with text under {key!r} (see --jsonl-key)")
    text: str = record[key]
    text.encode()  # half a surrogate pair is no text
    return text


def sentences_of(prose: str) -> list[str]:
    """Split prose where sentences end, and what is then too long where words do."""
    sentences = []
    for part in _STOP.split(prose):
        rest = part.strip()
        while len(rest) > MAX_SENTENCE_CHARS:
            cut = rest.rfind(" ", 1, MAX_SENTENCE_CHARS)
            cut = cut if cut > 0 else MAX_SENTENCE_CHARS
            sentences.append(rest[:cut].rstrip())
            rest = rest[cut:].lstrip()
        if rest:
            sentences.append(rest)
    return sentences


def _lines(source: Source, faults: Faults) -> Iterator[tuple[int, str]]:
    """Yield numbered lines that are UTF-8; a file that breaks off is a fault as well."""
    number = 0
    try:
        with _open(source) as file:
            most = _most_nbytes(source)
            while line := file.readline(MAX_LINE_NBYTES):
                _check_nbytes(file, most)
                number += 1
                if len(line) == MAX_LINE_NBYTES and not line.endswith(b"\n"):
                    faults.add(
                        f"{source.path}, line {number} is longer than {MAX_LINE_NBYTES:,} bytes"
                    )
                    _skip_line(file, most)
                    continue
                try:
                    yield number, line.decode("utf-8-sig" if number == 1 else "utf-8")
                except UnicodeDecodeError:
                    faults.add(f"{source.path}, line {number} is not UTF-8 text")
    except (OSError, EOFError, zlib.error) as error:
        reason = describe(error) if isinstance(error, OSError) else str(error)
        faults.add(f"{source.path}, after line {number}: {reason}")


def _open(source: Source) -> IO[bytes]:
    # gzip's file is one of bytes, which it does not say.
    return gzip.open(source.path) if source.is_gz else source.path.open("rb")  # type: ignore


def _skip_line(file: IO[bytes], most: float) -> None:
    while (rest := file.readline(MAX_LINE_NBYTES)) and not rest.endswith(b"\n"):
        _check_nbytes(file, most)


def _most_nbytes(source: Source) -> float:
    """Return how many bytes a file may be unpacked to: a byte of gzip can stand for 1,032."""
    if not source.is_gz:
        return math.inf
    return MOST_COMPRESSED * source.path.stat().st_size + UNPACKED_NBYTES


def _check_nbytes(file: IO[bytes], most: float) -> None:
    if most < math.inf and file.tell() > most:
        raise EOFError(
            f"it is compressed more than {MOST_COMPRESSED} times, as no text is; unpack it, if it "
            "is text"
        )
