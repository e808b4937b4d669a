"""Read text: one sentence per line, blank lines between documents."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from pretraining.errors import UsageError
from pretraining.files import blaming, sha256


def check_corpus_file(path: Path, remedy: str) -> None:
    """Raise `UsageError` for a file that is missing or empty; reads no contents."""
    if not path.is_file():
        raise UsageError(f"--corpus: {path} is not a file; {remedy}")
    if path.stat().st_size == 0:
        raise UsageError(f"--corpus: {path} is empty; it needs one sentence per line")


def corpus_digest(paths: Sequence[Path]) -> str:
    """Return a short digest of the files' contents in the order given."""
    digest = hashlib.sha256()
    for path in paths:
        with blaming("--corpus", path):
            digest.update(sha256(path))
    return digest.hexdigest()[:12]


def read_documents(paths: Sequence[Path]) -> Iterator[list[str]]:
    """Yield each document as its list of sentences; a file's end also ends a document."""
    for path in paths:
        document: list[str] = []
        try:
            with blaming("--corpus", path), path.open(encoding="utf-8") as file:
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
