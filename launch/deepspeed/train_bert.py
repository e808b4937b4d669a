"""The BERT job of launch/bert, driven by DeepSpeed's engine from a JSON file.

    torchrun --standalone --nproc-per-node 2 launch/deepspeed/train_bert.py \
        --deepspeed-config launch/deepspeed/configs/stage1_lamb.json --steps 200

The JSON decides optimizer, learning rate, batch and ZeRO stage; text, model and held-out evaluation
are those of launch/bert, and so are the options for them.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "bert"))

from pretraining.config import RunConfig, parse_config
from pretraining.errors import UsageError
from pretraining.launch import Launch, refuse

CHECKPOINT_TAG = "last"


def main(argv: Sequence[str]) -> int:
    """Run the job; return the exit code: 0, or 2 where the request cannot be met."""
    is_main = True
    try:
        launch = Launch.from_environment()
        is_main = launch.is_main
        parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__)
        parser.add_argument("--deepspeed-config", type=Path, required=True)
        parser.add_argument("--load", type=Path, help="folder of checkpoints to continue from")
        own, rest = parser.parse_known_args(argv)
        try:
            settings = json.loads(own.deepspeed_config.read_text())
        except (OSError, json.JSONDecodeError) as error:
            raise UsageError(f"--deepspeed-config {own.deepspeed_config}: {error}") from error
        rest += ["--global-batch-size", str(settings["train_batch_size"])]
        run(parse_config(rest), launch, settings, own.load)
    except UsageError as error:
        return refuse(error, is_main)
    return 0


def run(config: RunConfig, launch: Launch, settings: dict[str, Any], load: Path | None) -> None:
    """Prepare the text, train, save; every rank alike."""
    from pretraining.prepared import PreparedCorpus
    from pretraining.ranks import Ranks, choose_device
    from pretraining.session import _prepare

    device = choose_device(config.device, launch)
    os.environ.setdefault("DS_ACCELERATOR", device.type)
    os.environ.setdefault("LOCAL_RANK", str(launch.local_rank))
    ranks = Ranks(launch, device)
    corpus = PreparedCorpus.open(Path(ranks.once(lambda: _prepare(config))))
    ranks.connect(config.timeout_seconds)
    try:
        _train(config, ranks, corpus, settings, load)
    finally:
        ranks.disconnect()


def _train(
    config: RunConfig, ranks: Any, corpus: Any, settings: dict[str, Any], load: Path | None
) -> None:
    import deepspeed
    import torch
    from pretraining.evaluation import HeldOutEvaluation
    from pretraining.metrics import MetricsFile
    from pretraining.model import build_model, loss_sums
    from pretraining.optimizers import decay_groups
    from pretraining.samples import IGNORED_LABEL, SampleStream

    import shardfuse.deepspeed  # noqa: F401  (this line is all that DeepSpeed needs)

    summary = corpus.summary
    stream = SampleStream(corpus.train, summary.vocab_size, config.seq_len, config.seed)
    held_out = SampleStream(corpus.held_out, summary.vocab_size, config.seq_len, config.seed)
    evaluation = HeldOutEvaluation(held_out, config.eval_samples, 64)
    bert = build_model(
        config.model_size, summary.vocab_size, config.seq_len, config.dropout, config.seed
    )

    class PretrainingLoss(torch.nn.Module):
        """BERT with its losses: DeepSpeed's engine is called with a batch and gives the loss."""

        def __init__(self) -> None:
            super().__init__()
            self.bert = bert

        def forward(self, batch: Any, num_masked: int) -> torch.Tensor:
            losses = loss_sums(self.bert, batch)
            return losses.mlm / num_masked + losses.nsp / config.global_batch_size

    params = settings["optimizer"]["params"]
    # LAMB leaves biases and LayerNorm out by their names; the other optimizers by groups.
    groups = None if "variant" in params else decay_groups(bert, params.get("weight_decay", 0.0))
    for group in groups or ():
        group["params"] = [param for _, param in group["params"]]
    engine, *_ = deepspeed.initialize(
        model=PretrainingLoss(), model_parameters=groups, config=settings
    )
    if load is not None:
        path, _ = engine.load_checkpoint(str(load), tag=CHECKPOINT_TAG)
        if path is None:
            raise UsageError(f"--load {load}: no checkpoint named {CHECKPOINT_TAG} there")
    is_main, world_size = ranks.launch.is_main, ranks.launch.world_size
    metrics = MetricsFile(config.run_dir / "metrics.jsonl", 0) if is_main else None

    def report(record: dict[str, Any]) -> None:
        if metrics is not None:
            metrics.write(record)
            shown = {k: round(v, 5) if isinstance(v, float) else v for k, v in record.items()}
            print(*(f"{key} {value}" for key, value in shown.items()), sep="  ", flush=True)

    def evaluate(step: int) -> None:
        score = evaluation.score(bert, ranks, contextlib.nullcontext())
        report({"kind": "eval", "step": step, "mlm_loss": score.mlm_loss})

    share = config.global_batch_size // world_size
    gas = engine.gradient_accumulation_steps()
    first_step = engine.global_steps
    evaluate(first_step)
    for step in range(first_step, config.steps):
        first = ranks.launch.rank * share
        batch = stream.batch(step, range(first, first + share))
        num_masked = torch.tensor(
            float((batch.labels != IGNORED_LABEL).sum()), device=engine.device
        )
        count = max(1, int(ranks.sum_(num_masked).item()))
        total = torch.zeros((), device=engine.device)
        for micro_batch in batch.split(share // gas):
            loss = engine(micro_batch.to(engine.device), count)
            # The engine divides by the accumulation steps, the optimizer by the ranks.
            engine.backward(loss * (world_size * gas))
            engine.step()
            total += loss.detach().float()
        norm = engine.get_global_grad_norm()
        record = {"kind": "train", "step": step + 1, "loss": ranks.sum_(total).item()}
        record |= {"lr": engine.get_lr()[0], "skipped": engine.skipped_steps}
        record |= {} if norm is None else {"grad_norm": float(norm)}
        report(record)
    evaluate(config.steps)
    engine.save_checkpoint(str(config.run_dir / "checkpoints"), tag=CHECKPOINT_TAG)
    if metrics is not None:
        metrics.close()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
