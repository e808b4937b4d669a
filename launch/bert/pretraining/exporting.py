"""Write the weights of a run's newest checkpoint as a folder that transformers reads."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoTokenizer, BertForPreTraining

from pretraining.config import RunConfig, stored_config
from pretraining.errors import UsageError
from pretraining.files import as_os_error, blaming, sync_tree, unfinished
from pretraining.pretrained import keep_quiet, new_model
from pretraining.vocabulary import TOKENIZER_FOLDER
from shardfuse.checkpoint import CheckpointError, Checkpoints
from shardfuse.checkpoint.export import read_model

_TOKEN_ROWS = "bert.embeddings.word_embeddings.weight"


@dataclasses.dataclass(frozen=True)
class Saved:
    """Weights of a run after so many steps."""

    step: int
    weights: dict[str, Tensor]


def export(run_dir: Path, out_dir: Path) -> str:
    """Write `out_dir`, whole or not at all; return a line that says what was exported.

    Raises `UsageError`.
    """
    try:
        config = stored_config(run_dir)
    except UsageError as error:
        raise UsageError(str(error).removeprefix("--resume: ")) from error
    if out_dir.exists() and (not out_dir.is_dir() or any(out_dir.iterdir())):
        raise UsageError(f"{out_dir} is not empty; name a new folder")
    tokenizer_dir = run_dir / TOKENIZER_FOLDER
    if not tokenizer_dir.is_dir():
        raise UsageError(
            f"{run_dir} has no {TOKENIZER_FOLDER}/: it is of an earlier version; "
            f"pretrain.py --resume --run-dir {run_dir} adds it"
        )
    keep_quiet()
    saved = _newest_whole(run_dir / "checkpoints")
    model = _model(config, saved.weights)
    tokenizer = AutoTokenizer.from_pretrained(str(tokenizer_dir), local_files_only=True)
    with blaming("OUT_DIR", out_dir):
        out_dir.parent.mkdir(parents=True, exist_ok=True)
        with unfinished(out_dir) as temporary:
            with as_os_error():
                model.save_pretrained(str(temporary))
                tokenizer.save_pretrained(str(temporary))
            sync_tree(temporary)
            temporary.rename(out_dir)
    at = f"step {saved.step} of {config.steps}"
    unfinished_run = "" if saved.step >= config.steps else ", a run that is not finished"
    return f"exported {run_dir} at {at}{unfinished_run}: {out_dir}"


def _newest_whole(folder: Path) -> Saved:
    """Return the weights of the newest checkpoint in which they are as they were written."""
    checkpoints = Checkpoints(folder)
    faults = []
    for step in checkpoints.steps():
        try:
            weights = read_model(checkpoints.path(step))
        except (CheckpointError, OSError) as error:
            faults.append(" ".join(str(error).split()))
            continue
        for fault in faults:
            print(f"passed over: {fault}", file=sys.stderr)
        return Saved(step, weights)
    if faults:
        raise UsageError(f"{folder} has no whole checkpoint: {faults[0]}")
    raise UsageError(f"{folder} has no checkpoint; train until the first --save-every")


def _model(config: RunConfig, weights: dict[str, Tensor]) -> BertForPreTraining:
    with torch.device("meta"):
        model = new_model(config, weights[_TOKEN_ROWS].size(0))
    model.load_state_dict(weights, strict=True, assign=True)
    model.tie_weights()
    return model
