"""Draw the loss curves of a run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from pretraining.metrics import Record

_SMOOTHING_SHARE = 0.02


def draw_curves(
    records: Sequence[Record], path: Path, *, unigram_loss: float, vocab_size: int, title: str
) -> None:
    """Write a PNG of MLM losses, in nats, over steps: training, held-out and the two baselines."""
    # Only rank 0 draws, and only now: importing pyplot takes a second or more.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    train = [(r["step"], r["mlm_loss"]) for r in records if r["kind"] == "train"]
    held_out = [(r["step"], r["mlm_loss"]) for r in records if r["kind"] == "eval"]
    if train:
        steps, losses = np.array(train).T
        axes.plot(steps, losses, color="tab:blue", alpha=0.25, linewidth=0.8)
        window = max(1, round(len(losses) * _SMOOTHING_SHARE))
        axes.plot(
            steps[(window - 1) // 2 :][: len(losses) - window + 1],
            np.convolve(losses, np.ones(window) / window, mode="valid"),
            color="tab:blue",
            label=f"training, mean of {window} steps",
        )
    if held_out:
        steps, losses = np.array(held_out).T
        axes.plot(steps, losses, "o-", color="tab:red", label=f"held out, now {losses[-1]:.2f}")
    axes.axhline(
        math.log(vocab_size),
        color="gray",
        linestyle=":",
        label=f"ln(vocabulary) {math.log(vocab_size):.2f}",
    )
    axes.axhline(
        unigram_loss, color="black", linestyle="--", label=f"unigram entropy {unigram_loss:.2f}"
    )
    axes.set(xlabel="optimizer step", ylabel="masked-token loss (nats)", title=title)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)
