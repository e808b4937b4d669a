"""What rank 0 decides for all: options, run directory, text."""

from __future__ import annotations

import dataclasses
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from pretraining.config import (
    RunConfig,
    from_json,
    parse_config,
    read_stored_config,
    to_json,
    write_stored_config,
)
from pretraining.corpus import TextOptions
from pretraining.docstrings import build_docstring_corpus
from pretraining.errors import UsageError
from pretraining.files import blaming
from pretraining.launch import Launch
from pretraining.prepared import PreparedCorpus, prepare_corpus
from pretraining.ranks import Ranks, choose_device
from pretraining.rundir import RunLock, claim
from pretraining.vocabulary import TOKENIZER_FOLDER, keep_tokenizer, read_vocabulary

_PATIENCE_S = 60.0
"""How long a restart waits for what it replaces to end."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """A run as all ranks see it; the device alone is this rank's own."""

    config: RunConfig
    corpus: PreparedCorpus
    device: torch.device


def make_plan(argv: Sequence[str], ranks: Ranks, lock: RunLock) -> Plan:
    """Decide on a run on rank 0, which then has its lock, and hear of it on the others. Collective.

    Raises `UsageError` on every rank alike.
    """
    decided = ranks.once(lambda: _decide(argv, ranks.launch, lock))
    return ranks.together(lambda: _follow(argv, decided, ranks.launch))


def _decide(argv: Sequence[str], launch: Launch, lock: RunLock) -> dict[str, Any]:
    """Prepare the text and the run directory; return what the other ranks need to know."""
    config = parse_config(argv)
    config.check_batches(launch.world_size)
    with blaming("--data-dir", config.data_dir):
        texts, folder = _prepare_text(config)
    digest = PreparedCorpus.open(folder).summary.digest
    with blaming("--run-dir", config.run_dir):
        if config.resume:
            lock.take(config.run_dir, _PATIENCE_S if config.resume == "auto" else 0.0)
            _check_same_text(config, digest)
        else:
            run_dir = claim(config.run_dir, lock, is_numbered=config.is_numbered)
            config = dataclasses.replace(config, run_dir=run_dir)
            write_stored_config(config, texts, digest)
        positions = config.architecture.get("max_position_embeddings", config.max_seq_len)
        keep_tokenizer(config.run_dir, config.init_from or folder, positions)
    place = {"corpus": str(folder.absolute()), "digest": digest}
    return {"argv": list(argv), "config": to_json(config), **place}


def _follow(argv: Sequence[str], decided: dict[str, Any], launch: Launch) -> Plan:
    if list(argv) != decided["argv"]:
        raise UsageError(
            f"started with the options {' '.join(argv)!r}, where rank 0 has "
            f"{' '.join(decided['argv'])!r}; give all ranks the same"
        )
    config = from_json(decided["config"])
    device = choose_device(config.device, launch)
    return Plan(config, _open_same(Path(decided["corpus"]), decided["digest"], launch), device)


def _open_same(folder: Path, digest: str, launch: Launch) -> PreparedCorpus:
    """Open what rank 0 has prepared, or this node's copy of it; raises `UsageError`."""
    host = socket.gethostname()
    try:
        corpus = PreparedCorpus.open(folder, is_read=launch.local_rank == 0)
    except UsageError as error:
        raise UsageError(f"on {host}: {error}") from error
    if corpus.summary.digest != digest:
        raise UsageError(
            f"on {host}: --data-dir: {folder} has other shards (digest {corpus.summary.digest}) "
            f"than rank 0's ({digest}); replace it by a copy of that"
        )
    return corpus


def _prepare_text(config: RunConfig) -> tuple[Sequence[Path], Path]:
    """Return the text files, and the folder in which they are prepared."""
    texts: Sequence[Path] = config.corpus
    if not texts:
        say("collecting the docstrings of the installed Python packages")
        texts = [build_docstring_corpus(config.data_dir, config.corpus_words)]
        say(f"text: {texts[0]}")
    vocabulary = None
    if config.init_from is not None:
        kept = config.run_dir / TOKENIZER_FOLDER
        # The folder that the run began with may be gone by now.
        source = kept if config.resume and kept.exists() else config.init_from
        vocabulary = read_vocabulary(source, config.vocab_size)
    options = TextOptions(
        paths=texts,
        vocab_size=config.vocab_size,
        vocab_words=config.vocab_words,
        jsonl_key=config.jsonl_key,
        is_strict=config.strict,
        given=vocabulary,
    )
    expected = read_stored_config(config.run_dir)["corpus_digest"] if config.resume else ""
    return texts, prepare_corpus(options, config.data_dir, say, expected)


def _check_same_text(config: RunConfig, digest: str) -> None:
    stored = read_stored_config(config.run_dir)["corpus_digest"]
    if digest != stored:
        raise UsageError(
            f"--run-dir {config.run_dir} was made with another text or vocabulary (digest "
            f"{stored}, now {digest}); restore --data-dir, or start a new run elsewhere"
        )


def say(line: str) -> None:
    """Print a line at once; for rank 0."""
    print(line, flush=True)
