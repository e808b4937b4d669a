"""DeepSpeed's bing_bert: the two JSON files that its options name."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from pretraining.errors import UsageError
from pretraining.translation import Notes, Values, model_options, read_json, read_rows

_ONE_BIT = "no 1-bit compression here; `--sharding '{\"grad_sync_bits\": 8}'` sends fewer bits"
_OPTIMIZERS = {
    "Lamb": ("lamb", ""),
    "OneBitLamb": ("lamb", _ONE_BIT),
    "Adam": ("adamw", ""),
    "AdamW": ("adamw", ""),
    "OneBitAdam": ("adamw", _ONE_BIT),
    "ZeroOneAdam": ("adamw", _ONE_BIT),
}

ENGINE = read_rows("deepspeed_config")
_OF_ONE_BIT = {
    *("freeze_step", "cuda_aware", "comm_backend_name", "coeff_beta", "factor_max", "factor_min"),
    *("factor_threshold", "var_freeze_step", "var_update_scaler", "local_step_scaler"),
    "local_step_clipper",
}
_OPAQUE = ("zero_optimization", "sparse_attention", "progressive_layer_drop")
_EXPERIMENT = {
    *("name", "bert_token_file", "bert_model_file", "bert_model_config", "data"),
    *("mixed_seq_training", "validation"),
}
_SCHEDULE = {
    *("num_epochs", "warmup_proportion", "learning_rate", "num_workers", "async_worker"),
    *("decay_rate", "decay_step", "total_training_steps", "weight_decay"),
}
_UNCASED_VOCABULARY = 30528
_SCHEDULES = {
    "LE": "a linear rise, then an exponential decay",
    "EE": "a quadratic rise, then an exponential decay",
    "EP": "a rise of the power 1.5, then a quadratic decay",
}


def convert_deepspeed(
    theirs: argparse.Namespace, gpus: int | None, notes: Notes
) -> tuple[Values, Values]:
    """Return (options of the run, options of the phase)."""
    experiment = read_json("--config-file", theirs.config_file)
    _refuse_unknown(experiment, _EXPERIMENT, "--config-file")
    schedule = experiment.get("mixed_seq_training", {}).get(str(theirs.max_seq_length))
    if schedule is None:
        raise UsageError(f"--config-file has no mixed_seq_training of {theirs.max_seq_length}")
    _refuse_unknown(schedule, _SCHEDULE, "mixed_seq_training")
    _tell_of_their_ways(experiment, theirs, notes)
    engine = _engine(read_json("--deepspeed_config", theirs.deepspeed_config), notes)
    is_limited = theirs.max_steps < 2**63 - 1
    steps = theirs.max_steps if is_limited else schedule["total_training_steps"]
    if not is_limited:
        notes.tell("steps", "total_training_steps; theirs end with num_epochs shards of their data")
    dtype = next((name for name in ("fp16", "bf16") if engine[f"{name}.enabled"]), "fp32")
    if dtype != "fp16":
        notes.change("learning_rate", "without fp16 theirs stays at optimizer.params.lr")
    options: Values = {
        "run_dir": theirs.output_dir,
        **model_options(experiment.get("bert_model_config", {}), notes),
        "vocab_size": _UNCASED_VOCABULARY,
        **_optimizer(engine, notes),
        "weight_decay": schedule.get("weight_decay", 0.01),
        "max_grad_norm": engine["gradient_clipping"],
        "dtype": dtype,
        "seed": theirs.seed,
        "log_every": theirs.print_steps,
    }
    phase: Values = {
        "seq_len": theirs.max_seq_length,
        "steps": steps,
        "global_batch_size": engine["train_batch_size"],
        "lr": schedule["learning_rate"] + theirs.lr_offset,
        "warmup": round(schedule["warmup_proportion"] * schedule["total_training_steps"]) / steps,
        "decay_power": 1.0,
    }
    if engine["train_micro_batch_size_per_gpu"]:
        phase["micro_batch_size"] = engine["train_micro_batch_size_per_gpu"]
    return options, phase


def _tell_of_their_ways(
    experiment: Mapping[str, Any], theirs: argparse.Namespace, notes: Notes
) -> None:
    """Note what is always so there, and not here."""
    notes.change("pre_layernorm", "their model normalizes before each layer, BERT after it")
    form = _SCHEDULES.get(theirs.lr_schedule, _SCHEDULES["LE"])
    notes.change("lr_schedule", f"{form}; here a linear rise to the peak, then a linear decay to 0")
    notes.tell("pooler", "theirs is not trained, ours is")
    if "uncased" not in str(experiment.get("bert_token_file")):
        notes.change("bert_token_file", "not an uncased vocabulary; begin with --init-from")


def _engine(config: Mapping[str, Any], notes: Notes) -> Values:
    """Return the settings by their dotted names, with DeepSpeed's defaults; judges each."""
    rows = {row.name: row for row in ENGINE}
    found: Values = {}
    for name, value in _dotted(config):
        if name.removeprefix("optimizer.params.") in _OF_ONE_BIT:
            continue
        if name not in rows:
            raise UsageError(f"--deepspeed_config has {name}, which no table here knows; remove it")
        found[name] = value
        if value != rows[name].default:
            notes.judge(rows[name], value)
    if not found.get("train_batch_size"):
        raise UsageError("--deepspeed_config has no train_batch_size; add it")
    return {name: found.get(name, row.default) for name, row in rows.items()}


def _dotted(config: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    pairs: list[tuple[str, Any]] = []
    for key, value in config.items():
        name = prefix + key
        if isinstance(value, dict) and name not in _OPAQUE:
            pairs += _dotted(value, f"{name}.")
        else:
            pairs.append((name, value))
    return pairs


def _optimizer(engine: Mapping[str, Any], notes: Notes) -> Values:
    kind = engine["optimizer.type"]
    if kind not in _OPTIMIZERS:
        known = ", ".join(_OPTIMIZERS)
        raise UsageError(f"--deepspeed_config: optimizer.type {kind} is none of {known}")
    name, difference = _OPTIMIZERS[kind]
    if difference:
        notes.change("optimizer.type", f"{kind}: {difference}")
    options: Values = {"optimizer": name}
    is_corrected = engine["optimizer.params.bias_correction"]
    if name == "lamb":
        options["lamb_variant"] = "deepspeed"
        if not is_corrected:
            notes.change(
                "optimizer.params.bias_correction", "LAMB corrects bias here, as is usual there"
            )
    elif not is_corrected:
        options["optimizer"] = "bertadam"
    betas = engine["optimizer.params.betas"] or [0.9, 0.999]
    return options | {"betas": betas, "eps": engine["optimizer.params.eps"]}


def _refuse_unknown(content: Mapping[str, Any], known: set[str], where: str) -> None:
    unknown = sorted(content.keys() - known)
    if unknown:
        raise UsageError(f"{where} has {', '.join(unknown)}, which no table here knows; remove it")
