"""NVIDIA's, Google's and DeepSpeed's BERT jobs: how their options become ours.

tables/ has the options, as they were in their repositories on 2026-11-23.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from pretraining.deepspeed_settings import convert_deepspeed
from pretraining.errors import UsageError
from pretraining.translation import (
    Notes,
    Source,
    Values,
    model_options,
    read_json,
    require_positive,
    vocab_size_in,
)

_IN_BOTH = {"betas": [0.9, 0.999], "eps": 1e-6, "weight_decay": 0.01, "max_grad_norm": 1.0}


def _convert_nvidia(
    theirs: argparse.Namespace, gpus: int | None, notes: Notes
) -> tuple[Values, Values]:
    if gpus is None:
        raise UsageError("--gpus is missing: their --train_batch_size is of one GPU")
    _require_training(theirs)
    settings = read_json("--config_file", theirs.config_file)
    is_fp16 = theirs.fp16 or theirs.amp
    options: Values = {
        "run_dir": theirs.output_dir,
        **model_options(settings, notes),
        "vocab_size": 8 * -(-vocab_size_in(settings) // 8),
        "optimizer": "lamb",
        "lamb_variant": "apex",
        **_IN_BOTH,
        "dtype": "fp16" if is_fp16 else "fp32",
        "seed": theirs.seed,
        "save_every": theirs.num_steps_per_checkpoint,
        "log_every": max(1, int(theirs.log_freq)),
    }
    if theirs.allreduce_post_accumulation_fp16 and is_fp16:
        options["sharding"] = '{"grad_sync_dtype": "float16"}'
        notes.tell("fp16", "parameters are fp32 here, under autocast; theirs are fp16")
    _begin_with(theirs.init_checkpoint, options, notes)
    if theirs.resume_from_checkpoint:
        options["resume"] = "auto"
    return options, {
        "seq_len": theirs.max_seq_length,
        "steps": int(theirs.max_steps),
        "global_batch_size": theirs.train_batch_size * gpus,
        "micro_batch_size": _micro_batch_size(theirs),
        "lr": theirs.learning_rate,
        "warmup": theirs.warmup_proportion,
        "decay_power": 0.5,
        "decay_from": "start",
    }


def _micro_batch_size(theirs: argparse.Namespace) -> int:
    require_positive(gradient_accumulation_steps=theirs.gradient_accumulation_steps)
    share, rest = divmod(theirs.train_batch_size, theirs.gradient_accumulation_steps)
    if rest:
        raise UsageError(
            f"--gradient_accumulation_steps {theirs.gradient_accumulation_steps} does not divide "
            f"--train_batch_size {theirs.train_batch_size}; theirs refuses it, too"
        )
    return share


def _convert_google(
    theirs: argparse.Namespace, gpus: int | None, notes: Notes
) -> tuple[Values, Values]:
    _require_training(theirs)
    require_positive(num_train_steps=theirs.num_train_steps)
    settings = read_json("--bert_config_file", theirs.bert_config_file)
    notes.tell(
        "optimizer",
        "bertadam is their rule, but bounds the norms of decayed and of other parameters "
        "each, where they bound that of all",
    )
    options: Values = {
        "run_dir": theirs.output_dir,
        "resume": "auto",
        **model_options(settings, notes),
        "vocab_size": vocab_size_in(settings),
        "optimizer": "bertadam",
        **_IN_BOTH,
        "dtype": "fp32",
        "save_every": theirs.save_checkpoints_steps,
    }
    _begin_with(theirs.init_checkpoint, options, notes)
    return options, {
        "seq_len": theirs.max_seq_length,
        "steps": theirs.num_train_steps,
        "global_batch_size": theirs.train_batch_size,
        "lr": theirs.learning_rate,
        "warmup": theirs.num_warmup_steps / theirs.num_train_steps,
        "decay_power": 1.0,
        "decay_from": "start",
    }


def _require_training(theirs: Any) -> None:
    if not theirs.do_train:
        raise UsageError("--do_train is missing: theirs trains nothing without it")


def _begin_with(checkpoint: str | None, options: Values, notes: Notes) -> None:
    """Add --init-from for a checkpoint of theirs."""
    if checkpoint in (None, "None"):
        return
    options["init_from"] = checkpoint
    if not (Path(checkpoint) / "config.json").is_file():
        notes.tell("init_checkpoint", "--init-from takes a transformers folder; convert theirs")


_CONVERT = {"nvidia": _convert_nvidia, "google": _convert_google, "deepspeed": convert_deepspeed}
SOURCES = {name: Source.read(name, convert) for name, convert in _CONVERT.items()}
