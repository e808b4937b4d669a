"""The options that say what text there is, and how it is prepared."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

DATA_DEFAULTS: dict[str, Any] = {"vocab_words": 5_000_000, "jsonl_key": "text", "strict": False}
"""Of options that a run may not know, as it was begun before there were any."""


def add_data_options(group: argparse._ArgumentGroup) -> None:
    """Add them to a parser."""
    add = group.add_argument
    add("--corpus", type=Path, nargs="+", default=(), metavar="PATH",
        help=".txt, .jsonl, either with .gz, or folders of them; .txt: one sentence per line, "
        "blank lines between documents (default: docstrings of the installed Python packages)",
    )  # fmt: skip
    add("--jsonl-key", default=DATA_DEFAULTS["jsonl_key"], metavar="KEY",
        help="of the text in a line of .jsonl, which is a document")  # fmt: skip
    add("--strict", action="store_true",
        help="end at the first file or line that cannot be read, instead of passing it over",
    )  # fmt: skip
    add("--corpus-words", type=int, default=1_100_000, help="size of the docstring corpus")
    add("--data-dir", type=Path, default=Path("runs/data"), help="cache of prepared text")
    add("--vocab-size", type=int, default=8192, help="WordPiece vocabulary")
    add("--vocab-words", type=int, default=DATA_DEFAULTS["vocab_words"],
        help="size of the sample of the text that the vocabulary is made from")  # fmt: skip
