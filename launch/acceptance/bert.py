"""The row of the BERT job: launch/bert's own command on its own text, with few steps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from launch.acceptance.processes import ROOT, torchrun
from launch.acceptance.rows import BERT
from shardfuse.doctor import Finding

STEPS = 100
_QUICK_STEPS = 4
_LEAST_FALL = 1.0
"""Nats by which the held-out loss must fall: of 7.6, that of a guess."""

_BATCH = 48


def run(num_ranks: int, *, is_cpu: bool, quick: bool, timeout_s: float, work: Path) -> Finding:
    """Train; return what became of the held-out loss.

    Args:
        work: a folder for the run, its text and ``bert.log``.
    """
    steps = _QUICK_STEPS if quick else STEPS
    options = command(num_ranks, steps=steps, work=work, words=20_000 if quick else 200_000)
    options += ["--device", "cpu"] if is_cpu else []
    options += ["--eval-samples", "24"] if quick else []
    code = torchrun(options, num_ranks, timeout_s, work / "bert.log")
    if code != 0:
        text = f"no end after {timeout_s:.0f} s" if code is None else f"exit code {code}"
        remedy = "See the error above; a missing package: pip install -e '.[bert]'."
        return Finding(BERT, "failed", text, remedy)
    lines = (work / "run" / "metrics.jsonl").read_text().splitlines()
    return judged([json.loads(line) for line in lines], steps)


def command(num_ranks: int, *, steps: int, work: Path, words: int) -> list[str]:
    """Return launch/bert's command, for as many samples as these ranks can share."""
    batch = max(1, round(_BATCH / num_ranks)) * num_ranks
    return [
        str(ROOT / "launch" / "bert" / "pretrain.py"),
        *("--steps", str(steps), "--eval-every", str(steps), "--save-every", str(steps)),
        *("--global-batch-size", str(batch), "--corpus-words", str(words)),
        *("--vocab-size", str(min(2048, words // 50))),
        *("--data-dir", str(work / "data"), "--run-dir", str(work / "run")),
    ]


def judged(records: list[dict[str, Any]], steps: int) -> Finding:
    """Return what a run's metrics say."""
    losses = [record["mlm_loss"] for record in records if record["kind"] == "eval"]
    done = [record["step"] for record in records if record["kind"] == "train"]
    if len(losses) < 2 or not done or done[-1] != steps:
        text = f"{done[-1] if done else 0} of {steps} steps, {len(losses)} evaluations"
        return Finding(BERT, "failed", text, "See what the ranks have printed.")
    values = {"first_loss": losses[0], "last_loss": losses[-1], "steps": steps}
    text = f"held-out loss {losses[0]:.2f} -> {losses[-1]:.2f} nats after {steps} steps"
    if steps < STEPS:
        return Finding(BERT, "not run", f"a rehearsal: {text}", values=values)
    if losses[0] - losses[-1] > _LEAST_FALL:
        return Finding(BERT, "ok", text, values=values)
    return Finding(BERT, "failed", text, "It learns on CPUs: look at the rows above.", values)
