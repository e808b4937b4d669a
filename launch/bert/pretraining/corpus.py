"""The text files of a corpus: which they are, what identifies them, what is wrong with them."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from pretraining.errors import UsageError
from pretraining.files import describe, sha256
from pretraining.vocabulary import Vocabulary

ENDINGS = (".txt", ".jsonl", ".txt.gz", ".jsonl.gz")

_FORMAT = "2"
"""Of what is prepared, and of how sentences are found: what another one has made is not taken."""

_MOST_NAMED = 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextOptions:
    """What decides the prepared text, and `is_strict`, which does not."""

    paths: Sequence[Path]
    vocab_size: int
    vocab_words: int
    """Words of the training text that the vocabulary is made from, or about so many."""
    jsonl_key: str = "text"
    given: Vocabulary | None = None
    """A tokenizer in place of a vocabulary that is made."""
    is_strict: bool = False


class Faults:
    """What cannot be read: each is passed over, counted, and among the first few named.

    Where that `is_strict`, the first one is raised as `UsageError`.
    """

    def __init__(self, say: Callable[[str], None], *, is_strict: bool) -> None:
        self.num = 0
        self.first = ""
        self._say = say
        self._is_strict = is_strict

    def add(self, text: str) -> None:
        """Note one; `text` names file and line."""
        self.count(1, text)
        if self.num <= _MOST_NAMED:
            more = "; more of them are counted only" if self.num == _MOST_NAMED else ""
            self._say(f"warning: --corpus: {text}; passed over{more}")

    def count(self, num: int, first: str) -> None:
        """Note what was named by an earlier run."""
        if num and self._is_strict:
            raise UsageError(f"--corpus: {first}; mend it, or drop --strict to go on without it")
        self.num += num
        self.first = self.first or first


class Source(NamedTuple):
    """A file of text, and what it holds."""

    path: Path
    nbytes: int
    mtime_ns: int
    digest: str  # of its bytes

    @property
    def is_gz(self) -> bool:
        return self.path.name.lower().endswith(".gz")

    @property
    def is_jsonl(self) -> bool:
        return self.path.name.lower().endswith((".jsonl", ".jsonl.gz"))


Known = Mapping[tuple[str, int, int], str]
"""Digests of files that were read before, by path, size and time of change."""


def check_corpus(paths: Sequence[Path], remedy: str) -> None:
    """Raise `UsageError` for a path that leads nowhere; reads no contents."""
    for path in paths:
        if not path.exists():
            raise UsageError(f"--corpus: {path} is not a file or folder; {remedy}")


def find_sources(paths: Sequence[Path], known: Known, faults: Faults) -> list[Source]:
    """Return the text files of `paths`, those of folders in sorted order, each once.

    However often and by whatever path or link it is named: a run has absolute paths when it
    resumes, and must find the same text. Raises `UsageError` where there is none.
    """
    found = dict.fromkeys(file for path in paths for file in _files(path, faults, frozenset()))
    usable: dict[Path, Source] = {}
    for path in found:
        real = path.resolve()
        source = None if real in usable else _source(path, known, faults)
        if source is not None:
            usable[real] = source
    if not usable:
        named = ", ".join(map(str, paths))
        raise UsageError(
            f"--corpus: no text in {named} ({faults.first or 'there are no files'}); name files, "
            f"or folders of files, that end with {', '.join(ENDINGS)}"
        )
    return list(usable.values())


def _files(path: Path, faults: Faults, above: frozenset[Path]) -> Iterator[Path]:
    """Yield a file, or those below a folder, but for hidden ones; links may make circles."""
    if not path.is_dir():
        yield path
        return
    real = path.resolve()
    if real in above:
        return
    try:
        children = sorted(path.iterdir())
    except OSError as error:
        faults.add(f"{path}: {describe(error)}")
        return
    for child in children:
        if not child.name.startswith("."):
            yield from _files(child, faults, above | {real})


def _source(path: Path, known: Known, faults: Faults) -> Source | None:
    if not path.name.lower().endswith(ENDINGS):
        faults.add(f"{path} has none of the endings {', '.join(ENDINGS)}")
        return None
    try:
        stat = path.stat()
        if stat.st_size == 0:
            faults.add(f"{path} is empty")
            return None
        before = known.get((str(path.absolute()), stat.st_size, stat.st_mtime_ns))
        return Source(path, stat.st_size, stat.st_mtime_ns, before or sha256(path).hex())
    except OSError as error:
        faults.add(f"{path}: {describe(error)}")
        return None


def corpus_key(sources: Sequence[Source], options: TextOptions) -> str:
    """Return a short digest of the files' contents in their order, and of the options."""
    digest = hashlib.sha256(f"{_FORMAT} {options.vocab_words} {options.jsonl_key}\n".encode())
    for source in sources:
        digest.update(f"{source.is_jsonl} {source.is_gz} {source.digest}\n".encode())
    return digest.hexdigest()[:12]
