"""The BERT job in two phases, by its own command and by DDP with torch.optim.AdamW.

As a module under torchrun it is the baseline, which takes the options of pretrain.py. It has the
job's text, model, samples, schedule and evaluations; DDP and torch replace shardfuse.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from launch.bench.environment import ROOT
from launch.bench.gpt import BASELINE
from launch.bench.launches import LaunchError

BERT = ROOT / "launch" / "bert"
sys.path.insert(0, str(BERT))  # where the job finds its modules

_BF16 = '{"grad_sync_dtype": "bfloat16", "param_sync_dtype": "bfloat16"}'
METHODS: dict[str, tuple[str, ...]] = {
    BASELINE: (),
    "shardfuse AdamW": (),
    "shardfuse AdamW, bf16 wire": ("--sharding", _BF16),
    "shardfuse AdamW, stage 2": ("--sharding", '{"stage": 2}'),
    "shardfuse AdamW over FSDP2": ("--fsdp",),
    "shardfuse LAMB": ("--optimizer", "lamb"),
    "shardfuse Muon": ("--optimizer", "muon"),
}
"""Options of pretrain.py by method; the optimizer is adamw if they do not name another."""

LR = {"adamw": 5e-4, "lamb": 0.01, "muon": 0.02}
"""Of the first phase; the second has half of it.

At AdamW's default of 0.002 a difference by rounding grows tenfold in 30 steps, until runs differ as
those of other seeds do, so that their curves show nothing of the rule.
"""


def optimizer_of(method: str) -> str:
    """Return the method's value of --optimizer."""
    options = METHODS[method]
    return options[-1] if "--optimizer" in options else "adamw"


def phases(optimizer: str, *, is_quick: bool) -> list[dict[str, Any]]:
    """Return the phases of a run, as a recipe has them."""
    steps = (8, 4) if is_quick else (600, 200)
    common = {"warmup": 0.1, "decay_power": 0.5, "carry": "moments"}
    lr = LR[optimizer]
    return [
        {"seq_len": 32, "steps": steps[0], "global_batch_size": 48, "lr": lr, **common},
        {"seq_len": 128, "steps": steps[1], "global_batch_size": 24, "lr": lr / 2, **common},
    ]


def train(
    method: str, seed: int, text: str, *, is_quick: bool, timeout_s: float
) -> list[tuple[float, float]]:
    """Return (step, held-out MLM loss in nats) of a run on two ranks.

    Where the first phase ends, there are two points: for sequences of either length.

    Raises:
        LaunchError: the run failed, or took too long.
    """
    optimizer = optimizer_of(method)
    with tempfile.TemporaryDirectory(prefix="shardfuse-bench-") as folder:
        recipe, run_dir = Path(folder) / "recipe.json", Path(folder) / "run"
        recipe.write_text(json.dumps({"phases": phases(optimizer, is_quick=is_quick)}))
        program = ["-m", "launch.bench.bert"] if method == BASELINE else [str(BERT / "pretrain.py")]
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", "2", *program]
        command += ["--optimizer", optimizer, *METHODS[method], "--recipe", str(recipe)]
        command += ["--corpus", text, "--data-dir", str(ROOT / "runs" / "text")]
        command += ["--run-dir", str(run_dir), "--seed", str(seed), "--norms-every", "0"]
        command += ["--eval-every", "4" if is_quick else "40", "--eval-samples", "256"]
        _run([*command, "--save-every", "1000000", "--device", "cpu"], timeout_s)
        from pretraining.metrics import METRICS_FILE, read_records

        records = read_records(run_dir / METRICS_FILE)
    return [(r["step"], r["mlm_loss"]) for r in records if r["kind"] == "eval"]


def _run(command: Sequence[str], timeout_s: float) -> None:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    try:
        subprocess.run(
            command,
            cwd=ROOT,
            env=environment,
            timeout=timeout_s,
            check=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
    except subprocess.CalledProcessError as error:
        raise LaunchError(f"{command} failed:\n{error.stdout[-4000:]}") from error
    except subprocess.TimeoutExpired as error:
        raise LaunchError(f"{command} took longer than {timeout_s:.0f} s") from error


class _LossSums(nn.Module):
    """The model with the job's loss as its forward, which DDP wraps."""

    def __init__(self, bert: Any) -> None:
        super().__init__()
        self.bert = bert

    def forward(self, batch: Any) -> Any:
        from pretraining.model import loss_sums

        return loss_sums(self.bert, batch)


def main(argv: Sequence[str]) -> None:
    """Train the job's model by DDP and torch.optim.AdamW, and write the job's metrics file."""
    from pretraining.launch import Launch
    from pretraining.plan import make_plan
    from pretraining.ranks import Ranks
    from pretraining.rundir import RunLock

    torch.set_num_threads(1)
    ranks = Ranks(Launch.from_environment())
    with RunLock() as lock:
        plan = make_plan(argv, ranks, lock)
        ranks.connect(plan.device, plan.config.timeout_seconds)
        _train(plan, ranks)
        ranks.leave()
        ranks.disconnect()


def _train(plan: Any, ranks: Any) -> None:
    from pretraining.metrics import METRICS_FILE, MetricsFile
    from pretraining.optimizers import decay_groups, set_lr
    from pretraining.pretrained import new_model
    from pretraining.samples import IGNORED_LABEL
    from pretraining.training import make_legs

    config, rank, world_size = plan.config, ranks.launch.rank, ranks.launch.world_size
    net = _LossSums(new_model(config, plan.corpus.summary.vocab_size).train())
    model = DistributedDataParallel(net)
    groups = decay_groups(net.bert.named_parameters(), config.weight_decay)
    groups = [{**group, "params": [p for _, p in group["params"]]} for group in groups]
    optimizer = torch.optim.AdamW(groups, lr=config.phases[0].lr, betas=config.betas)
    file = MetricsFile(config.run_dir / METRICS_FILE, 0, 0) if rank == 0 else None

    def evaluate(leg: Any, step: int) -> None:
        score = leg.evaluation.score(net.bert, ranks, torch.autocast("cpu", enabled=False))
        if file is not None:
            file.write({"kind": "eval", "step": step, "mlm_loss": score.mlm_loss})

    for leg in make_legs(config, world_size, plan.corpus):
        if leg.phase.carry == "moments":
            for state in optimizer.state.values():
                state["step"].zero_()
        evaluate(leg, leg.steps.start)
        share = leg.micro_batches.samples_per_rank
        for step in leg.steps:
            set_lr(optimizer, leg.phase.lr_at(step - leg.steps.start))
            batch = leg.stream.batch(step, range(rank * share, (rank + 1) * share))
            num_masked = ranks.sum_((batch.labels != IGNORED_LABEL).sum().float())
            losses = model(batch)
            loss = losses.mlm / num_masked + losses.nsp / leg.phase.global_batch_size
            (loss * world_size).backward()  # DDP averages
            nn.utils.clip_grad_norm_(model.parameters(), config.max_grad_norm)
            optimizer.step()
            optimizer.zero_grad()
            if (step + 1) % config.eval_every == 0 or step + 1 == leg.steps.stop:
                evaluate(leg, step + 1)


if __name__ == "__main__":
    main(sys.argv[1:])
