"""Begin with the weights of a transformers checkpoint."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import BertConfig, BertForPreTraining

from pretraining.config import RunConfig
from pretraining.errors import UsageError
from pretraining.model import build_model
from pretraining.plan import say
from pretraining.ranks import Ranks

_HEADS = re.compile(r"cls\.|bert\.pooler\.")
"""What is drawn anew where a checkpoint lacks it."""

_NO_WEIGHTS = re.compile(r"(.*\.)?(position|token_type)_ids")
"""Buffers that older checkpoints have."""

_MOST_NAMED = 6


def new_model(config: RunConfig, vocab_size: int) -> BertForPreTraining:
    """Build the model of a run on the CPU, with weights drawn from its seed."""
    if not config.architecture:
        return build_model(
            config.model_size, vocab_size, config.max_seq_len, config.dropout, config.seed
        )
    settings = BertConfig(
        **config.architecture,
        hidden_dropout_prob=config.dropout,
        attention_probs_dropout_prob=config.dropout,
        attn_implementation="sdpa",
    )
    torch.manual_seed(config.seed)
    return BertForPreTraining(settings)


def take_weights(model: BertForPreTraining, config: RunConfig, ranks: Ranks) -> None:
    """Give rank 0 the weights of --init-from, unless a checkpoint of the run has others.

    It alone reads the folder, and says what it lacks; the optimizer, when it is built, gives its
    weights to all. Collective.
    """
    if config.init_from is None:
        return
    folder = config.init_from
    has_saved = bool(config.resume) and any((config.run_dir / "checkpoints").glob("step-*"))
    ranks.once(lambda: has_saved or _load(model, folder, config.seed))


def keep_quiet() -> None:
    """Have transformers show neither reports nor bars: what matters is said here."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


def _load(model: BertForPreTraining, folder: Path, seed: int) -> bool:
    """Copy a checkpoint's weights into the model, and return False; raises `UsageError`."""
    keep_quiet()
    torch.manual_seed(seed)
    try:
        loaded, found = BertForPreTraining.from_pretrained(
            str(folder),
            config=model.config,
            local_files_only=True,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    except Exception as error:
        # safetensors, pickle and transformers have errors of their own each.
        reason = " ".join(str(error).split())[:200]
        raise UsageError(
            f"--init-from: the weights in {folder} cannot be read ({reason}); restore them"
        ) from error
    _check(found, folder)
    for name, param in loaded.named_parameters():
        if not param.isfinite().all():
            raise UsageError(f"--init-from: {folder}: {name} is not finite; restore the weights")
    model.load_state_dict(loaded.state_dict())
    say(f"weights: those of {folder}")
    if found["missing_keys"]:
        names = ", ".join(sorted(found["missing_keys"]))
        say(f"weights that it lacks are drawn anew: {names}")
    return False


def _check(found: dict[str, Any], folder: Path) -> None:
    """Raise `UsageError` for weights that are another model's."""
    unexpected = [key for key in found["unexpected_keys"] if not _NO_WEIGHTS.fullmatch(key)]
    missing = [key for key in found["missing_keys"] if not _HEADS.match(key)]
    shapes = [
        f"{key} of {tuple(theirs)}, not {tuple(ours)}"
        for key, theirs, ours in found["mismatched_keys"]
    ]
    if shapes:
        raise UsageError(
            f"--init-from: {folder} has {_some(shapes)}, which its config.json says; "
            "the files are not of one checkpoint"
        )
    if unexpected:
        raise UsageError(
            f"--init-from: {folder} has {_some(unexpected)}, which BertForPreTraining has not; "
            "save the encoder alone (model.bert.save_pretrained)"
        )
    if missing:
        raise UsageError(f"--init-from: {folder} lacks {_some(missing)}; it is no whole BERT")


def _some(names: Iterable[str]) -> str:
    listed = sorted(names)
    more = ", ..." if len(listed) > _MOST_NAMED else ""
    return ", ".join(listed[:_MOST_NAMED]) + more
