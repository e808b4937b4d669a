"""A run from its options to its report."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Sequence
from pathlib import Path

from pretraining.config import (
    CONFIG_FILE,
    RunConfig,
    read_stored_config,
    write_stored_config,
)
from pretraining.curves import draw_curves
from pretraining.docstrings import build_docstring_corpus
from pretraining.errors import UsageError
from pretraining.launch import Launch
from pretraining.metrics import read_records
from pretraining.prepared import PreparedCorpus, prepare_corpus
from pretraining.ranks import Ranks, StopRequest, choose_device
from pretraining.training import METRICS_FILE, Trainer

CURVES_FILE = "loss.png"


def run(config: RunConfig, launch: Launch) -> None:
    """Prepare the text, train, and report; raises `UsageError` on every rank alike."""
    started = time.monotonic()
    # Until there is something to save, Ctrl-C simply ends every rank, also one that waits in C++.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    device = choose_device(config.device, launch)
    ranks = Ranks(launch, device)
    corpus = PreparedCorpus.open(Path(ranks.once(lambda: _prepare(config))))
    ranks.connect(config.timeout_seconds)
    try:
        _train(config, ranks, corpus, started)
    finally:
        ranks.disconnect()


def _train(config: RunConfig, ranks: Ranks, corpus: PreparedCorpus, started: float) -> None:
    stop = StopRequest()
    trainer = Trainer(config, ranks, corpus)
    first_step = trainer.checkpoints.load_latest() if config.resume else 0
    is_main = ranks.launch.is_main
    if is_main:
        _introduce(trainer, corpus, first_step)
    last_step = trainer.run(first_step, stop)
    if is_main:
        _conclude(trainer, corpus, last_step, time.monotonic() - started)


def _prepare(config: RunConfig) -> str:
    """Build or find the prepared corpus and set up the run directory; rank 0 only."""
    paths: Sequence[Path] = config.corpus
    if not paths:
        _say("collecting the docstrings of the installed Python packages")
        paths = [build_docstring_corpus(config.data_dir, config.corpus_words)]
        _say(f"text: {paths[0]}")
    folder = prepare_corpus(paths, config.data_dir, config.vocab_size, _say)
    digest = PreparedCorpus.open(folder).summary.digest
    if config.resume:
        stored = read_stored_config(config.run_dir)["corpus_digest"]
        if digest != stored:
            raise UsageError(
                f"--run-dir {config.run_dir} was made with another text or vocabulary (digest "
                f"{stored}, now {digest}); restore --data-dir, or start a new run elsewhere"
            )
    else:
        config.run_dir.mkdir(parents=True, exist_ok=True)
        write_stored_config(config, paths, digest)
    return str(folder.absolute())


def _introduce(trainer: Trainer, corpus: PreparedCorpus, first_step: int) -> None:
    config, summary = trainer.config, corpus.summary
    num_params = sum(param.numel() for param in trainer.model.parameters())
    micro = trainer.micro_batches
    _say(
        f"text: {summary.num_words:,} words in {summary.num_documents:,} documents, of which "
        f"{summary.num_held_out_documents:,} are held out; vocabulary of {summary.vocab_size:,}"
    )
    _say(f"model: BERT {config.model_size}, {num_params:,} parameters, on {trainer.ranks.device}")
    _say(
        f"batch: {config.global_batch_size} samples = {trainer.ranks.launch.world_size} ranks x "
        f"{micro.number} micro-batches x {micro.size}; {config.optimizer}, {config.dtype}"
    )
    _say(f"run: {config.run_dir}, steps {first_step} to {config.steps}")


def _conclude(trainer: Trainer, corpus: PreparedCorpus, last_step: int, seconds: float) -> None:
    """Draw the curves and print what came of the run."""
    config = trainer.config
    records = read_records(config.run_dir / METRICS_FILE)
    unigram = trainer.evaluation.unigram_loss(corpus.train.tokens)
    vocab_size = corpus.summary.vocab_size
    draw_curves(
        records,
        config.run_dir / CURVES_FILE,
        unigram_loss=unigram,
        vocab_size=vocab_size,
        title=f"BERT {config.model_size}, {config.optimizer}, {last_step} steps",
    )
    scores = [record for record in records if record["kind"] == "eval"]
    first, last = scores[0], scores[-1]
    verdict = "beaten" if last["mlm_loss"] < unigram else "not beaten"
    _say("")
    _say(
        f"held-out MLM loss: {first['mlm_loss']:.4f} -> {last['mlm_loss']:.4f} nats after "
        f"{last['step']} steps (ln of the vocabulary is {math.log(vocab_size):.4f})"
    )
    _say(f"unigram entropy of the held-out masked tokens: {unigram:.4f}, {verdict}")
    _say(f"held-out accuracy: {first['mlm_accuracy']:.1%} -> {last['mlm_accuracy']:.1%}")
    _say(f"sharded: {trainer.optimizer.memory_summary()}")
    files = ", ".join([CONFIG_FILE, METRICS_FILE, CURVES_FILE, "checkpoints/"])
    _say(f"files: {config.run_dir} ({files})")
    if last_step < config.steps:
        _say(
            f"stopped and saved after step {last_step} of {config.steps} ({seconds:.0f} s); "
            f"continue with --resume --run-dir {config.run_dir}"
        )
    else:
        _say(f"done in {seconds:.0f} s")


def _say(line: str) -> None:
    print(line, flush=True)
