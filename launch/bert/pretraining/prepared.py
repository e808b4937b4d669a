"""Text as a WordPiece vocabulary and token arrays, prepared once, in bounded memory.

    <data dir>/prepared-<digest of files and options>-<vocabulary size, or digest of a tokenizer>/
        vocab.txt           trained on a sample of the training documents; not of a given tokenizer
        tokenizer.json      what turned words into ids
        shard-00000.bin     shards.py says what is in it
        token_counts.npy    how often each token is in the training documents
        sources.json        the files, so that they are not read again
        index.json          PreparedSummary, and the shards' lengths and digests

The folder appears by one rename, so a reader finds it complete or not at all. Until then it is
`.prepared-....unfinished`, and a job that is killed leaves whole shards there to the next one.
"""

from __future__ import annotations

import dataclasses
import json
import resource
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import BrokenExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pretraining.building import Building, PreparedSummary
from pretraining.corpus import Faults, Known, TextOptions, corpus_key, find_sources
from pretraining.errors import UsageError
from pretraining.files import sync_tree
from pretraining.shards import DocumentSet, check_shard, open_shard
from pretraining.wordpiece import SETS, dtype_of
from shardfuse.training.lock import FolderInUse, FolderLock

_PATIENCE_S = 86_400.0
_FILES_BESIDE_SHARDS = 256

Say = Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class PreparedCorpus:
    """A training set, a held-out set of other documents, and the vocabulary of both."""

    folder: Path
    summary: PreparedSummary
    train: DocumentSet
    held_out: DocumentSet
    token_counts: npt.NDArray[np.int64]
    """(vocab_size,), of the training set"""

    @classmethod
    def open(cls, folder: Path, *, is_read: bool = False) -> PreparedCorpus:
        """Open what `prepare_corpus` built; raises `UsageError` where that is damaged.

        With `is_read` every byte of the shards is compared with the digests, at about 1 GB/s. That
        is for one process of a host.
        """
        try:
            index = json.loads((folder / "index.json").read_text())
            summary = PreparedSummary(**index["summary"])
            train, held_out = _open_sets(folder, index["shards"], dtype_of(summary.vocab_size))
            counts = np.load(folder / "token_counts.npy")
            for info in index["shards"] if is_read else ():
                check_shard(folder, info)
        except (OSError, ValueError, TypeError, EOFError, LookupError) as error:
            raise UsageError(
                f"--data-dir: {folder} cannot be read ({' '.join(str(error).split())}); "
                "remove it, and a new run prepares the text again"
            ) from error
        return cls(folder, summary, train, held_out, counts)


def _open_sets(folder: Path, infos: Sequence[dict[str, Any]], dtype: str) -> list[DocumentSet]:
    """Map all shards, each of which takes one of the files that a process may have open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = len(infos) + _FILES_BESIDE_SHARDS
    if soft != resource.RLIM_INFINITY and soft < wanted:
        most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    shards = [open_shard(folder, info, dtype) for info in infos]
    return [DocumentSet(shard[name] for shard in shards) for name in SETS]


def prepare_corpus(options: TextOptions, data_dir: Path, say: Say, expected: str = "") -> Path:
    """Return the folder in which the text is prepared, after preparing it where it is not yet.

    `say` is given lines on what is found and done. `expected` is the digest of the text that a run
    was made with: another one is refused before it is prepared. Raises `UsageError`, `OSError`.
    """
    faults = Faults(say, is_strict=options.is_strict)
    sources = find_sources(options.paths, _known(data_dir), faults)
    vocabulary = options.vocab_size if options.given is None else options.given.digest
    name = f"{corpus_key(sources, options)}-{vocabulary}"
    if expected and not expected.startswith(f"{name}-"):
        raise UsageError(
            f"--resume: the run was made with another text (digest {expected}, now {name}); "
            "restore it, or start a new run elsewhere"
        )
    folder = data_dir / f"prepared-{name}"
    is_new = not folder.exists()
    if is_new:
        data_dir.mkdir(parents=True, exist_ok=True)
        with FolderLock() as lock:
            _take(lock, data_dir, say)
            is_new = not folder.exists()  # what another job did meanwhile is as good
            if is_new:
                unfinished = folder.with_name(f".{folder.name}.unfinished")
                _build(Building(unfinished, sources, options, faults, say), folder)
    if not is_new:
        summary = PreparedCorpus.open(folder).summary
        faults.count(summary.num_faults, summary.first_fault)
        say(f"text: prepared before in {folder}")
    if faults.num:
        say(f"text: {faults.num:,} faults passed over, the first: {faults.first}")
    return folder


def _take(lock: FolderLock, data_dir: Path, say: Say) -> None:
    try:
        lock.take(data_dir)
    except FolderInUse as error:
        lock.release()
        say(f"waiting for another job that prepares text: {error}")
        lock.take(data_dir, _PATIENCE_S)


def _known(data_dir: Path) -> Known:
    """Return the digests of all files that were prepared before."""
    known: dict[tuple[str, int, int], str] = {}
    for path in data_dir.glob("prepared-*/sources.json"):
        try:
            for name, nbytes, mtime_ns, digest in json.loads(path.read_text()):
                known[name, nbytes, mtime_ns] = digest
        except (OSError, ValueError, TypeError):
            continue  # it only saves reading the files
    return known


def _build(building: Building, folder: Path) -> None:
    building.folder.mkdir(exist_ok=True)
    try:
        building.run(folder.name.removeprefix("prepared-"))
        sync_tree(building.folder)
        building.folder.rename(folder)
        for path in (folder / "survey.json", *folder.glob("shard-*.json")):
            path.unlink()
    except (OSError, UsageError):
        shutil.rmtree(building.folder, ignore_errors=True)
        raise
    except BrokenExecutor as error:
        raise UsageError(
            "a process that prepares text was killed; is there enough memory? "
            "A new run goes on where this one was"
        ) from error
