"""Read text: one sentence per line, blank lines between documents."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from pretraining.errors import UsageError

_READ_NBYTES = 1 << 20


def check_corpus_files(paths: Sequence[Path]) -> None:
    """Raise `UsageError` for a file that is missing, unreadable or empty; reads no contents."""
    for path in paths:
        if not path.is_file():
            raise UsageError(f"--corpus: {path} is not a file; name an existing text file")
        if path.stat().st_size == 0:
            raise UsageError(f"--corpus: {path} is empty; it needs one sentence per line")


def corpus_digest(paths: Sequence[Path]) -> str:
    """Return a short digest of the files' contents in the order given."""
    digest = hashlib.sha256()
    for path in paths:
        with path.open("rb") as file:
            file_digest = hashlib.sha256()
            while block := file.read(_READ_NBYTES):
                file_digest.update(block)
        digest.update(file_digest.digest())
    return digest.hexdigest()[:12]


def read_documents(paths: Sequence[Path]) -> Iterator[list[str]]:
    """Yield each document as its list of sentences; a file's end also ends a document."""
    for path in paths:
        document: list[str] = []
        try:
            with path.open(encoding="utf-8") as file:
                for line in file:
                    if line.strip():
                        document.append(line.strip())
                    elif document:
                        yield document
                        document = []
        except UnicodeDecodeError as error:
            raise UsageError(f"--corpus: {path} is not UTF-8 text; convert it first") from error
        if document:
            yield document
