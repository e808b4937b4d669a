"""Loss curves of a small GPT and of the BERT job: by DDP and torch's AdamW, and by shardfuse.

A GPT of 10.8 M is trained by every way to run AdamW, with equal rates, weights and batches, and so
is the job's BERT, in two phases. A GPT of 0.5 M is trained by AdamW, LAMB and Muon, each with its
best of five rates, and by three seeds.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any

from launch.bench import bert
from launch.bench.environment import ROOT
from launch.bench.gpt import BASELINE, BETAS, CLIP, DECAY, METHODS, SIZES
from launch.bench.launches import LaunchError, run_ranks
from launch.bench.options import Options, Row
from launch.bench.plots import Panel
from launch.bench.report import Summary, Table, Target, measured

WORLD_SIZE = 2
SEEDS = (0, 1, 2)
EQUAL_SIZE, TUNED_SIZE = "10.8 M", "0.5 M"
EQUAL = tuple(name for name in METHODS if "AdamW" in name)
"""Methods whose rule is AdamW's: their curves are to be equal."""
EQUAL_LR = 1e-3
GPT_PART, BERT_PART = "equal rates", "BERT"
RATES = {
    BASELINE: (1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2),
    "shardfuse LAMB": (5e-3, 1e-2, 2e-2, 4e-2, 8e-2),
    "shardfuse Muon": (1e-2, 2e-2, 4e-2, 8e-2, 1.6e-1),
}
"""Learning rates that are tried with the first seed. AdamW's best also serves Muon's AdamW part."""
WORDS = 1_100_000
TIMEOUT_S = 3600.0


def text() -> str:
    """Return the path of the text: documentation of the installed Python packages."""
    from pretraining.docstrings import build_docstring_corpus

    return str(build_docstring_corpus(ROOT / "runs" / "text", WORDS))


def run(options: Options) -> Iterator[Row]:
    """Yield a row per run; the tuned part chooses each method's rate from its own runs."""
    corpus = text()
    equal, tuned = ("tiny", "tiny") if options.quick else (EQUAL_SIZE, TUNED_SIZE)
    seeds = SEEDS[:1] if options.quick else SEEDS
    for method in filter(options.wants, EQUAL):
        for seed in seeds if method == BASELINE else seeds[:1]:
            yield _launch(GPT_PART, method, equal, {"lr": EQUAL_LR}, seed, corpus)
    for method in bert.METHODS:
        if options.wants(f"{BERT_PART}, {method}"):
            for seed in seeds if method == BASELINE else seeds[:1]:
                yield _launch_bert(method, seed, corpus, is_quick=options.quick)
    best = EQUAL_LR
    for method in filter(options.wants, RATES):
        found: dict[float, float] = {}
        for lr in RATES[method][: 1 if options.quick else None]:
            row = _launch("tuned", method, tuned, _rates(method, lr, best), seeds[0], corpus)
            yield row
            if row["note"] == "":
                found[lr] = row["loss"]
        if not found:
            continue
        lr = min(found, key=lambda lr: found[lr])
        for seed in seeds[1:]:
            yield _launch("tuned", method, tuned, _rates(method, lr, best), seed, corpus)
        if method == BASELINE:
            best = lr


def _rates(method: str, lr: float, adamw_lr: float) -> dict[str, float]:
    return {"lr": lr, "adamw_lr": adamw_lr} if "Muon" in method else {"lr": lr}


def _launch(
    part: str, method: str, size: str, rates: dict[str, float], seed: int, corpus: str
) -> Row:
    row: Row = {"part": part, "size": size, "method": method, "lr": rates["lr"], "seed": seed}
    arguments: dict[str, Any] = {
        "method": method,
        "size": size,
        "rates": rates,
        "seed": seed,
        "text": corpus,
    }
    try:
        found = run_ranks(
            "launch.bench.gpt:train", arguments, world_size=WORLD_SIZE, timeout_s=TIMEOUT_S
        )
    except LaunchError as error:
        print(error, file=sys.stderr)
        return {**row, "note": "failed"}
    return {**row, **_outcome(found[0])}


def _launch_bert(method: str, seed: int, corpus: str, *, is_quick: bool) -> Row:
    lr = bert.phases(bert.optimizer_of(method), is_quick=is_quick)[0]["lr"]
    row: Row = {"part": BERT_PART, "size": "1.5 M", "method": method, "lr": lr, "seed": seed}
    try:
        points = bert.train(method, seed, corpus, is_quick=is_quick, timeout_s=TIMEOUT_S)
    except LaunchError as error:
        print(error, file=sys.stderr)
        return {**row, "note": "failed"}
    return {**row, **_outcome(points)}


def _outcome(points: Sequence[Sequence[float]]) -> Row:
    curve = " ".join(f"{step}:{loss:.6f}" for step, loss in points)
    return {"note": "", "loss": points[-1][1], "curve": curve}


def curve(row: Row) -> list[tuple[float, float]]:
    """Return the (step, held-out loss) pairs of a row."""
    pairs = (point.split(":") for point in str(row["curve"]).split())
    return [(float(step), float(loss)) for step, loss in pairs]


def largest_differences(rows: Sequence[Row], part: str = GPT_PART) -> tuple[float, float]:
    """Return the largest difference from DDP's curve: of AdamW by another way, of another seed."""
    base, others = _of_part(rows, part)
    same_rule = [row for row in others if "AdamW" in row["method"]]
    return (
        max((_difference(row, base[0.0]) for row in same_rule), default=0.0),
        max((_difference(row, base[0.0]) for row in base.values()), default=0.0),
    )


def _of_part(rows: Sequence[Row], part: str) -> tuple[dict[float, Row], list[Row]]:
    """Return a part's rows: of DDP by seed, and of other methods."""
    own = [row for row in measured(rows) if row["part"] == part]
    base = {row["seed"]: row for row in own if row["method"] == BASELINE}
    return base, [row for row in own if row["method"] != BASELINE]


def _difference(one: Row, other: Row) -> float:
    """Return the largest difference of two curves."""
    pairs = zip(curve(one), curve(other), strict=True)
    return max(abs(a - b) for (_, a), (_, b) in pairs)


def summary(rows: Sequence[Row]) -> Summary:
    """Return the tables, targets and pictures of the curves."""
    good = measured(rows)
    tuned = [row for row in good if row["part"] == "tuned"]
    tables, targets, panels = [], [], []
    for part, model in ((GPT_PART, "GPT"), (BERT_PART, "BERT, two phases")):
        base, others = _of_part(rows, part)
        if base:
            title = f"{model}, {base[0.0]['size']} parameters"
            lines = [[BASELINE, f"{base[0.0]['loss']:.4f}", ""]]
            lines += [
                [row["method"], f"{row['loss']:.4f}", f"{_difference(row, base[0.0]):.5f}"]
                for row in others
            ]
            header = ["method", "held-out loss at the end", "largest difference from DDP's curve"]
            tables.append(Table(title, header, lines))
            targets += _targets(model, base, others) if len(base) > 1 else []
            shown = {row["method"]: curve(row) for row in (base[0.0], *others)}
            panels.append(_panel(title, shown, "token" if part == BERT_PART else "byte"))
    if tuned:
        lines, shown = [], {}
        for method in dict.fromkeys(row["method"] for row in tuned):
            own = [row for row in tuned if row["method"] == method]
            first = [row for row in own if row["seed"] == 0]
            best = min(first, key=lambda row: row["loss"])
            chosen = [row for row in own if row["lr"] == best["lr"]]
            losses = [row["loss"] for row in chosen]
            tried = ", ".join(f"{row['loss']:.4f} ({row['lr']:g})" for row in first)
            mean, half = sum(losses) / len(losses), (max(losses) - min(losses)) / 2
            lines.append([method, tried, f"{mean:.4f} ± {half:.4f} ({len(losses)} seeds)"])
            shown[f"{method}, rate {best['lr']:g}"] = [
                (points[0][0], sum(loss for _, loss in points) / len(points))
                for points in zip(*map(curve, chosen), strict=True)
            ]
        header = ["method", "one seed: loss (learning rate)", "the best rate: mean, half-range"]
        tables.append(Table(f"GPT, tuned, {tuned[0]['size']} parameters", header, lines))
        panels.append(_panel(f"GPT, tuned, {tuned[0]['size']} parameters, mean of seeds", shown))
    sizes = {row["size"]: SIZES[row["size"]] for row in good if row["part"] != BERT_PART}
    method_text = (
        "Two ranks over gloo on one host, one thread each. A GPT that predicts the bytes of the "
        "documentation of Python packages; every twentieth document is held out. Loss in nats per "
        f"byte. Betas {BETAS}, weight decay {DECAY}, clip {CLIP}, warm-up and cosine. "
        + " ".join(
            f"{name}: {size.layers} layers of width {size.hidden}, {size.steps} steps of "
            f"{WORLD_SIZE * size.batch * size.length} bytes."
            for name, size in sizes.items()
        )
        + " Five rates were tried for each tuned method, a factor of 2 apart."
        + (_bert_text() if any(row["part"] == BERT_PART for row in good) else "")
        + " For a seed, all methods of a part have the same weights and batches."
    )
    return Summary("Loss curves of a small GPT and of BERT", method_text, tables, targets, panels)


def _bert_text() -> str:
    phases = ", then ".join(
        f"{p['steps']} steps of {p['global_batch_size']} x {p['seq_len']} tokens at rate "
        f"{p['lr']:g}"
        for p in bert.phases("adamw", is_quick=False)
    )
    return (
        " BERT: the job of launch/bert on the same text, `tiny`, masked-token loss in nats; "
        f"{phases} (LAMB: {bert.LR['lamb']:g}, Muon: {bert.LR['muon']:g}, and half of these; not "
        "tuned). Between the phases "
        "moments are kept and their count of steps begins anew. The baseline has the job's model, "
        "samples and schedule, and DDP and torch in place of shardfuse."
    )


def _targets(model: str, base: dict[float, Row], others: Sequence[Row]) -> list[Target]:
    noise = max(_difference(row, base[0.0]) for row in base.values())
    differences = {
        row["method"]: _difference(row, base[0.0]) for row in others if "AdamW" in row["method"]
    }
    return [
        Target(
            f"{model}, {method}: the curve differs from DDP's by less than another seed's",
            f"{difference:.5f} of {noise:.5f}",
            difference < noise,
        )
        for method, difference in differences.items()
    ]


def _panel(title: str, lines: dict[str, list[tuple[float, float]]], unit: str = "byte") -> Panel:
    return Panel(
        title, f"held-out loss, nats per {unit}", lines=lines, x_axis="step", is_curve=True
    )
