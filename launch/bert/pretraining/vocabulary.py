"""The tokenizer of a run: trained on its text, or that of a transformers checkpoint."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

from tokenizers import BertWordPieceTokenizer, Tokenizer

from pretraining.errors import UsageError
from pretraining.files import as_os_error, sync_tree, unfinished
from pretraining.wordpiece import SpecialIds

TOKENIZER_FOLDER = "tokenizer"
"""In a run directory: what AutoTokenizer reads."""

_FILES = ("tokenizer.json", "vocab.txt")
_DECIDES_IDS = ("normalizer", "pre_tokenizer", "model")


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """A tokenizer that is given, with what identifies it."""

    tokenizer: Tokenizer
    special: SpecialIds
    digest: str


def read_vocabulary(folder: Path, num_rows: int) -> Vocabulary:
    """Read the tokenizer of a transformers folder whose model has so many rows for tokens.

    Raises `UsageError`.
    """
    tokenizer = _load(folder)
    ids = [getattr(tokenizer, f"{name}_token_id") for name in SpecialIds._fields]
    if None in ids or len(set(ids)) < len(ids):
        raise UsageError(
            f"--init-from: the tokenizer in {folder} lacks one of [PAD], [UNK], [CLS], [SEP], "
            "[MASK], which pretraining needs; name the tokenizer of a BERT"
        )
    backend = tokenizer.backend_tokenizer
    # As it was saved it may cut sentences off at the length of a sequence.
    backend.no_truncation()
    backend.no_padding()
    num_tokens = backend.get_vocab_size()
    if num_tokens > num_rows:
        raise UsageError(
            f"--init-from: the tokenizer in {folder} has {num_tokens} tokens, the model a "
            f"vocabulary of {num_rows}; they are not of one checkpoint"
        )
    settings = json.loads(backend.to_str())
    text = json.dumps([ids, *(settings[name] for name in _DECIDES_IDS)], sort_keys=True)
    digest = hashlib.sha256(text.encode()).hexdigest()[:12]
    return Vocabulary(backend, SpecialIds(*ids), digest)


def _load(folder: Path) -> Any:
    """Return a transformers tokenizer, which has a `backend_tokenizer`."""
    # Only now: it takes seconds, and a vocabulary that is trained needs none.
    from transformers import AutoTokenizer

    # Where there is no file, AutoTokenizer makes up a vocabulary of five tokens.
    if not any((folder / name).is_file() for name in _FILES):
        raise UsageError(f"--init-from: {folder} has no {' and no '.join(_FILES)}; add one of them")
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    except Exception as error:
        # The readers behind it have one class of error each.
        reason = " ".join(str(error).split())[:200]
        raise UsageError(
            f"--init-from: the tokenizer in {folder} cannot be read ({reason}); restore it"
        ) from error
    if getattr(tokenizer, "backend_tokenizer", None) is None:
        raise UsageError(f"--init-from: the tokenizer in {folder} is no WordPiece of BERT's")
    return tokenizer


def keep_tokenizer(run_dir: Path, source: Path, max_length: int) -> None:
    """Have a run's folder hold its tokenizer, so that an export needs nothing else.

    Args:
        run_dir: where the folder is, or is written, whole or not at all.
        source: a transformers folder, or one with the vocab.txt of a trained tokenizer alone.
        max_length: tokens of the longest sequence that the model takes.
    """
    folder = run_dir / TOKENIZER_FOLDER
    if folder.exists():
        return
    from transformers import BertTokenizerFast

    if (source / "config.json").exists():
        tokenizer = _load(source)
    else:
        trained = BertWordPieceTokenizer(str(source / "vocab.txt"), lowercase=True)
        backend = Tokenizer.from_str(trained.to_str())
        tokenizer = BertTokenizerFast(tokenizer_object=backend, do_lower_case=True)
    tokenizer.model_max_length = max_length
    with unfinished(folder) as temporary:
        with as_os_error():
            tokenizer.save_pretrained(str(temporary))
        sync_tree(temporary)
        temporary.rename(folder)
