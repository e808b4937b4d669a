"""A run from its options to its report."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Sequence

from pretraining.config import RunConfig
from pretraining.curves import draw_curves
from pretraining.files import blaming
from pretraining.launch import Launch
from pretraining.metrics import METRICS_FILE, Record, read_records
from pretraining.plan import make_plan, say
from pretraining.prepared import PreparedCorpus
from pretraining.ranks import Ranks
from pretraining.rundir import CONFIG_FILE, RunLock
from pretraining.training import Trainer
from shardfuse.training.job import DEFAULT_SIGNALS, StopSignals

CURVES_FILE = "loss.png"


def run(argv: Sequence[str], launch: Launch) -> None:
    """Prepare the text, train, and report; raises `UsageError` on every rank alike."""
    started = time.monotonic()
    # Until there is something to save, Ctrl-C simply ends every rank, also one that waits in C++.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    ranks = Ranks(launch)
    with RunLock() as lock:
        plan = make_plan(argv, ranks, lock)
        ranks.connect(plan.device, plan.config.timeout_seconds)
        try:
            _train(plan.config, ranks, plan.corpus, started)
        finally:
            ranks.disconnect()


def _train(config: RunConfig, ranks: Ranks, corpus: PreparedCorpus, started: float) -> None:
    # A terminal's Ctrl-C reaches a rank twice, directly and through the launcher: noting both is
    # harmless. SIGKILL remains for a run that does not answer.
    stop = StopSignals(DEFAULT_SIGNALS)
    stop.install()
    trainer = Trainer(config, ranks, corpus)
    tell = say if ranks.launch.is_main else _keep_silent
    first_step = trainer.checkpoints.load_latest(tell) if config.resume else 0
    if ranks.launch.is_main:
        _introduce(trainer, corpus, first_step)
    last_step = trainer.run(first_step, stop)
    ranks.once(lambda: _conclude(trainer, corpus, last_step, time.monotonic() - started))
    ranks.leave()


def _keep_silent(line: str) -> None:
    """Say nothing: rank 0 does."""


def _introduce(trainer: Trainer, corpus: PreparedCorpus, first_step: int) -> None:
    config, summary = trainer.config, corpus.summary
    fsdp = ", FSDP2" if config.is_sharded_on(trainer.ranks.launch.world_size) else ""
    num_params = sum(param.numel() for param in trainer.model.parameters())
    say(
        f"text: {summary.num_words:,} words in {summary.num_documents:,} documents, of which "
        f"{summary.num_held_out_documents:,} are held out; vocabulary of {summary.vocab_size:,}"
    )
    say(f"model: BERT {config.model_size}, {num_params:,} parameters, on {trainer.ranks.device}")
    for leg in trainer.legs:
        micro, phase = leg.micro_batches, leg.phase
        which = f"phase {leg.number}, steps {leg.steps.start} to {leg.steps.stop}: "
        say(
            f"{which if len(trainer.legs) > 1 else ''}batch: {phase.global_batch_size} samples of "
            f"{phase.seq_len} tokens = {trainer.ranks.launch.world_size} ranks x "
            f"{micro.number} micro-batches x {micro.size}; {config.optimizer}, {config.dtype}{fsdp}"
        )
    say(f"run: {config.run_dir}, steps {first_step} to {config.steps}")


def _conclude(trainer: Trainer, corpus: PreparedCorpus, last_step: int, seconds: float) -> None:
    """Draw the curves and print what came of the run."""
    config = trainer.config
    records = read_records(config.run_dir / METRICS_FILE)
    unigram = trainer.legs[-1].evaluation.unigram_loss(corpus.token_counts)
    vocab_size = corpus.summary.vocab_size
    with blaming("--run-dir", config.run_dir / CURVES_FILE):
        draw_curves(
            records,
            config.run_dir / CURVES_FILE,
            unigram_loss=unigram,
            vocab_size=vocab_size,
            title=f"BERT {config.model_size}, {config.optimizer}, {last_step} steps",
        )
    say("")
    _say_scores([r for r in records if r["kind"] == "eval"], unigram, vocab_size)
    say(f"sharded: {trainer.optimizer.memory_summary()}")
    files = ", ".join([CONFIG_FILE, METRICS_FILE, CURVES_FILE, "checkpoints/"])
    say(f"files: {config.run_dir} ({files})")
    if last_step < config.steps:
        say(
            f"stopped and saved after step {last_step} of {config.steps} ({seconds:.0f} s); "
            f"continue with --resume --run-dir {config.run_dir}"
        )
    else:
        say(f"done in {seconds:.0f} s")


def _say_scores(scores: Sequence[Record], unigram: float, vocab_size: int) -> None:
    if not scores:
        say(f"{METRICS_FILE} has no held-out evaluation")
        return
    first, last = scores[0], scores[-1]
    verdict = "beaten" if last["mlm_loss"] < unigram else "not beaten"
    say(
        f"held-out MLM loss: {first['mlm_loss']:.4f} -> {last['mlm_loss']:.4f} nats after "
        f"{last['step']} steps (ln of the vocabulary is {math.log(vocab_size):.4f})"
    )
    say(f"unigram entropy of the held-out masked tokens: {unigram:.4f}, {verdict}")
    say(f"held-out accuracy: {first['mlm_accuracy']:.1%} -> {last['mlm_accuracy']:.1%}")
