"""A small text, and the same text prepared, for all tests of the BERT job."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from pretraining.prepared import PreparedCorpus, prepare_corpus

from tests.launch import jobs

SUBJECTS = (
    "the cat",
    "a dog",
    "the old man",
    "my sister",
    "every bird",
    "the red ship",
    "a small tree",
)
VERBS = ("sees", "likes", "carries", "follows", "forgets", "finds", "hears")
OBJECTS = (
    "the house",
    "a river",
    "some bread",
    "the king",
    "an apple",
    "the long road",
    "its mother",
)
PLACES = ("in the morning", "near the sea", "behind the wall", "without a word", "at night")

NUM_DOCUMENTS = 60


def make_documents() -> list[list[str]]:
    """Write documents of 2 to 7 sentences from a small grammar."""
    rng = random.Random(0)

    def sentence() -> str:
        return " ".join(rng.choice(words) for words in (SUBJECTS, VERBS, OBJECTS, PLACES)) + "."

    return [[sentence() for _ in range(rng.randint(2, 7))] for _ in range(NUM_DOCUMENTS)]


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
    return PreparedCorpus.open(prepare_corpus([text_file], data_dir, 120, lambda line: None))


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
