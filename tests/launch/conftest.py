"""A small text, and the same text prepared, for all tests of the BERT job."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pretraining.prepared import PreparedCorpus

from tests.launch import jobs
from tests.launch.texts import make_documents, prepare

SMALL_MODEL = {
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 80,
    "max_position_embeddings": 40,
}
"""The shape of a checkpoint that was made elsewhere; none of ours."""


@pytest.fixture(scope="session")
def text_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("\n\n".join("\n".join(document) for document in make_documents()) + "\n")
    return path


@pytest.fixture(scope="session")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("data")


@pytest.fixture(scope="session")
def corpus(text_file: Path, data_dir: Path) -> PreparedCorpus:
    return PreparedCorpus.open(prepare([text_file], data_dir, 120))


@pytest.fixture
def inputs(text_file: Path, data_dir: Path) -> list[str]:
    """Options that name the small text and where its prepared form is shared between tests."""
    return ["--corpus", str(text_file), "--data-dir", str(data_dir)]


@pytest.fixture(scope="session")
def finished(
    tmp_path_factory: pytest.TempPathFactory, text_file: Path, corpus: PreparedCorpus
) -> Path:
    """Return the folder of a run of ten steps by two ranks, with checkpoints of steps 8 and 10."""
    cwd = tmp_path_factory.mktemp("finished")
    inputs = ["--corpus", str(text_file), "--data-dir", str(corpus.folder.parent)]
    jobs.run(cwd, [*inputs, *jobs.RUN], 2)
    return cwd / "run"


@pytest.fixture
def copied(finished: Path, tmp_path: Path) -> Path:
    shutil.copytree(finished, tmp_path / "run")
    return tmp_path / "run"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Mount a tmpfs of the size asked for; skipped where that is not allowed."""
    folder = tmp_path / "disk"
    folder.mkdir()

    def mount(size: str) -> Path:
        command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(folder)]
        if os.geteuid() or subprocess.run(command, capture_output=True, check=False).returncode:
            pytest.skip("a file system cannot be mounted here")
        return folder

    yield mount
    if os.path.ismount(folder):
        subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    """Return a vocabulary whose special tokens are not the first ones, as Google's."""
    known = sorted({word.strip(".") for doc in make_documents() for s in doc for word in s.split()})
    tokens = ["[PAD]", *known[:7], "[UNK]", "[CLS]", "[SEP]", "[MASK]", ".", *known[7:]]
    return [*tokens, *"abcdefghijklmnopqrstuvwxyz", "##s"]


@pytest.fixture
def theirs(tmp_path: Path, words: list[str]) -> Callable[..., Path]:
    """Return a function that saves a checkpoint of a class, made elsewhere, with a vocab.txt."""

    def save(cls: Any = None, **changes: Any) -> Path:
        folder = tmp_path / "theirs"
        import torch
        from transformers import BertConfig, BertForPreTraining

        cls = BertForPreTraining if cls is None else cls
        torch.manual_seed(5)
        # As many rows as padding to a multiple of 8 gives.
        settings = {"vocab_size": 8 * -(-len(words) // 8), **SMALL_MODEL, **changes}
        cls(BertConfig(**settings)).save_pretrained(folder)
        (folder / "vocab.txt").write_text("\n".join(words) + "\n")
        return folder

    return save
