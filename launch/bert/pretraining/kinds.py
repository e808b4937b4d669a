"""What part of BERT a parameter is, by its name."""

from __future__ import annotations

import re

_LAYER = re.compile(r"\.layer\.(\d+)\.")

_KINDS = (
    ("bias", re.compile(r"bias$")),
    ("LayerNorm", re.compile(r"LayerNorm")),
    ("embeddings", re.compile(r"embeddings")),
    ("attention query, key", re.compile(r"attention\.self\.(query|key)\.")),
    ("attention value", re.compile(r"attention\.self\.value\.")),
    ("attention output", re.compile(r"attention\.output\.")),
    ("feed-forward in", re.compile(r"intermediate\.")),
    ("feed-forward out", re.compile(r"layer\.\d+\.output\.")),
    ("heads", re.compile(r"^(cls|bert\.pooler)\.")),
)

KINDS = (*(kind for kind, _ in _KINDS), "other")


def kind_of(name: str) -> str:
    """Return the first of KINDS that a parameter's name fits."""
    return next((kind for kind, pattern in _KINDS if pattern.search(name)), "other")


def layer_of(name: str) -> int | None:
    """Return which encoder layer, from 0, a parameter is in; None outside of all."""
    found = _LAYER.search(name)
    return int(found[1]) if found else None
