"""The shape of the model: one of Google's sizes, or that of a transformers checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from pretraining.errors import UsageError
from pretraining.files import blaming


class ModelSize(NamedTuple):
    """One of Google's shapes; a head is 64 wide, the inner layer four times the hidden one."""

    num_layers: int
    hidden_size: int


MODEL_SIZES = {
    "tiny": ModelSize(2, 128),
    "mini": ModelSize(4, 256),
    "small": ModelSize(4, 512),
    "base": ModelSize(12, 768),
    "large": ModelSize(24, 1024),
}
HEAD_WIDTH = 64
NUM_SEGMENTS = 2

Architecture = dict[str, Any]
"""What a checkpoint's config.json says of the shape, and of what is computed."""

_COUNTS = {
    "vocab_size": 30522,
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "max_position_embeddings": 512,
    "type_vocab_size": 2,
}
_OTHERS = {
    "hidden_act": "gelu",
    "initializer_range": 0.02,
    "layer_norm_eps": 1e-12,
    "pad_token_id": 0,
}
"""With the values that they have where a config.json lacks them."""

_SAME_AS_OURS = {
    "is_decoder": False,
    "add_cross_attention": False,
    "position_embedding_type": "absolute",
    "tie_word_embeddings": True,
}
"""What another value of would be another model."""


def read_architecture(folder: Path) -> Architecture:
    """Read the config.json of a transformers checkpoint; raises `UsageError`."""
    if not folder.is_dir():
        raise UsageError(
            f"--init-from: {folder} is not a folder; a name of a hub is not downloaded here: "
            f"do that first (hf download {folder} --local-dir DIR) and give DIR"
        )
    path = folder / "config.json"
    if not path.is_file():
        raise UsageError(
            f"--init-from: {folder} has no config.json; name a folder that save_pretrained wrote"
        )
    with blaming("--init-from", path):
        text = path.read_text(encoding="utf-8", errors="replace")
    try:
        found = json.loads(text)
    except ValueError as error:
        raise UsageError(f"--init-from: {path} is damaged ({error}); restore it") from error
    if not isinstance(found, dict) or found.get("model_type") != "bert":
        kind = found.get("model_type") if isinstance(found, dict) else None
        raise UsageError(
            f"--init-from: {path} is of model_type {kind}; only bert is pretrained here"
        )
    return _checked(found, path)


def _checked(found: dict[str, Any], path: Path) -> Architecture:
    for name, wanted in _SAME_AS_OURS.items():
        if found.get(name, wanted) != wanted:
            raise UsageError(f"--init-from: {path} has {name} {found[name]}; it must be {wanted}")
    architecture = {name: found.get(name, usual) for name, usual in {**_COUNTS, **_OTHERS}.items()}
    for name in _COUNTS:
        if type(architecture[name]) is not int or architecture[name] < 1:
            raise UsageError(f"--init-from: {path} has {name} {architecture[name]}; restore it")
    if architecture["type_vocab_size"] < NUM_SEGMENTS:
        raise UsageError(
            f"--init-from: {path} has type_vocab_size {architecture['type_vocab_size']}; "
            f"pairs of sentences need {NUM_SEGMENTS}"
        )
    return architecture


def size_name(architecture: Architecture) -> str:
    """Return Google's name of a shape, or layers x width."""
    shape = ModelSize(architecture["num_hidden_layers"], architecture["hidden_size"])
    names = [name for name, size in MODEL_SIZES.items() if size == shape]
    return names[0] if names else f"{shape.num_layers}x{shape.hidden_size}"
