"""Whole jobs on files and folders of text: by several ranks and nodes, and within their memory."""

from __future__ import annotations

import argparse
import inspect
import json
import os
import pydoc
import shutil
import subprocess
import sys
import tarfile
import typing
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from pretraining.prepared import PreparedCorpus

from tests.launch import faults, jobs
from tests.launch.faults import on_rank
from tests.launch.jobs import RUN, SMALL
from tests.launch.memory import MIB, MemoryWatch
from tests.launch.texts import make_documents, prepare, write_text

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Make a folder of text in two formats, and of a file and a line that are neither."""
    folder = tmp_path / "corpus"
    (folder / "more").mkdir(parents=True)
    documents = make_documents()
    (folder / "a.txt").write_text("\n\n".join(map("\n".join, documents[:30])) + "\n")
    lines = [json.dumps({"body": " ".join(document)}) + "\n" for document in documents[30:]]
    (folder / "more" / "b.jsonl").write_text("".join([*lines, '{"body": \n']))
    (folder / "more" / "c.csv").write_text("a,b\n")
    return folder


def _options(folder: Path) -> list[str]:
    return ["--corpus", str(folder), "--jsonl-key", "body", "--data-dir", "data"]


def test_a_folder_is_trained_on_and_what_cannot_be_read_is_named(
    tmp_path: Path, folder: Path
) -> None:
    """In warnings, and in a line that counts it; the next run does not prepare it again."""
    output = jobs.run(tmp_path, [*_options(folder), *SMALL, "--run-dir", "one"], 2)
    json_line, csv = folder / "more" / "b.jsonl, line 31: it is no JSON", folder / "more" / "c.csv"
    assert f"warning: --corpus: {json_line}" in output
    assert f"warning: --corpus: {csv} has none of the endings .txt, .jsonl" in output
    assert "text: 2 faults passed over, the first: " in output
    assert "in 60 documents" in output
    (prepared,) = (tmp_path / "data").glob("prepared-*")
    before = {path: path.stat().st_mtime_ns for path in prepared.iterdir()}
    output = jobs.run(tmp_path, [*_options(folder), *SMALL, "--run-dir", "two"], 1)
    assert f"text: prepared before in data/{prepared.name}" in output
    assert "text: 2 faults passed over" in output
    assert {path: path.stat().st_mtime_ns for path in prepared.iterdir()} == before
    # Its options come from the run.
    jobs.run(tmp_path, ["--resume", "--run-dir", "two", "--log-every", "1"], 1)
    job = jobs.start(tmp_path, ["--resume", "--run-dir", "two", "--vocab-words", "7"], 1)
    assert "was made with --vocab-words 5000000, not 7" in jobs.refused(job)


def test_strict_ends_at_the_first_fault(tmp_path: Path, folder: Path) -> None:
    """One line, exit code 2 on both ranks, and neither text nor run is left."""
    options = [*_options(folder), *RUN, "--strict"]
    assert "c.csv has none of the endings" in jobs.refused(jobs.start(tmp_path, options, 2))
    (folder / "more" / "c.csv").unlink()
    assert "b.jsonl, line 31: it is no JSON" in jobs.refused(jobs.start(tmp_path, options, 2))
    assert [path.name for path in (tmp_path / "data").iterdir()] == [".lock"]
    assert not (tmp_path / "run").exists()


def test_a_folder_without_text_is_refused(tmp_path: Path) -> None:
    """By all ranks, in one line."""
    (tmp_path / "corpus").mkdir()
    job = jobs.start(tmp_path, [*_options(tmp_path / "corpus"), *RUN], 2)
    line = jobs.refused(job)
    assert "no text in" in line
    assert "that end with .txt, .jsonl, .txt.gz, .jsonl.gz" in line


# Several ranks, several nodes.


def test_one_rank_and_two_are_given_the_same_samples(tmp_path: Path, inputs: list[str]) -> None:
    """Bit for bit, in whole jobs."""
    drawn = {}
    for world_size in (1, 2):
        cwd = tmp_path / str(world_size)
        cwd.mkdir()
        job = jobs.start(cwd, [*inputs, *RUN], world_size, partial(faults.noting_samples, cwd))
        assert job.wait() == [0] * world_size, job.output()
        drawn[world_size] = [
            np.concatenate([np.load(cwd / f"samples-{step}-{r}.npy") for r in range(world_size)])
            for step in range(10)
        ]
    for one, two in zip(drawn[1], drawn[2], strict=True):
        assert one.shape == (12, 24)
        assert (one == two).all()


def test_a_node_with_a_copy_of_the_shards_trains_with_the_others(
    tmp_path: Path, inputs: list[str], corpus: PreparedCorpus
) -> None:
    """Rank 1 sees a disk of its own."""
    copy = tmp_path / "copy"
    shutil.copytree(corpus.folder, copy)
    job = jobs.start(tmp_path, [*inputs, *RUN], 2, on_rank(1, partial(faults.own_data_dir, copy)))
    assert job.wait() == [0, 0], job.output()


@pytest.mark.parametrize("kind", ["other", "short", "missing"])
def test_a_node_with_other_shards_is_refused_by_name(
    tmp_path: Path, inputs: list[str], corpus: PreparedCorpus, text_file: Path, kind: str
) -> None:
    """Its text is another one, or a copy was cut short."""
    folder = tmp_path / "copy"
    if kind == "other":
        other = tmp_path / "other.txt"
        other.write_text(text_file.read_text().replace("cat", "cow"))
        folder = prepare([other], tmp_path / "data")
    elif kind == "short":
        shutil.copytree(corpus.folder, folder)
        os.truncate(folder / "shard-00000.bin", 3000)
    fault = on_rank(1, partial(faults.own_data_dir, folder))
    line = jobs.refused(jobs.start(tmp_path, [*inputs, *RUN], 2, fault))
    assert line.startswith(f"pretrain.py: error: on {os.uname().nodename}: --data-dir: ")
    assert line.endswith(" (rank 1)")
    messages = {
        "other": f"{folder} has other shards (digest ",
        "short": "shard-00000.bin has 3,000 of ",
        "missing": f"{folder} cannot be read",
    }
    assert messages[kind] in line


# Memory.

_SMALL_PIECES = """
def main(text, data):
    from pretraining import building
    from pretraining.prepared import PreparedCorpus
    from pretraining.samples import SampleStream
    from tests.launch.memory import anonymous_nbytes
    from tests.launch.texts import prepare

    building.PIECE_CHARS = 1 << 18
    building.PIECES_PER_SHARD = 16
    before = anonymous_nbytes()
    corpus = PreparedCorpus.open(prepare([text], data, 2000, vocab_words=50_000))
    stream = SampleStream(corpus.train, corpus.summary.vocab_size, 128, 0)
    opened = anonymous_nbytes()
    for step in range(100):
        stream.batch(step, range(20))
    print(len(corpus.train.shards), before, anonymous_nbytes() - opened)


if __name__ == "__main__":
    import sys
    from pathlib import Path

    main(*map(Path, sys.argv[1:]))
"""

GROWTH_BOUND = 36 * MIB
"""Of a process that prepares such pieces, above what it has once its imports are done."""


def _words() -> list[str]:
    """Return the words of some modules of the standard library."""
    files = [module.__file__ for module in (argparse, inspect, pydoc, subprocess, tarfile, typing)]
    words = [word for file in files for word in Path(str(file)).read_text().split()]
    return [word for word in words if word.isascii()]


@pytest.mark.timeout(280)
def test_memory_does_not_grow_with_the_text(tmp_path: Path) -> None:
    """Text of 5 MB and eight times as much: the same bound, which is below the larger one.

    A process of its own prepares it with processes that encode, and then draws samples.
    """
    script = tmp_path / "script.py"
    script.write_text(_SMALL_PIECES)
    path = os.pathsep.join([str(jobs.REPOSITORY), str(jobs.SCRIPT.parent)])
    for number, nbytes in enumerate((5_000_000, 40_000_000)):
        text = tmp_path / f"{number}.txt"
        write_text(text, nbytes, _words(), seed=number)
        command = [sys.executable, str(script), str(text), str(tmp_path / f"data-{number}")]
        with (
            subprocess.Popen(
                command, env=os.environ | {"PYTHONPATH": path}, stdout=subprocess.PIPE, text=True
            ) as process,
            MemoryWatch(process.pid) as watch,
        ):
            stdout, _ = process.communicate(timeout=200)
        assert process.returncode == 0
        num_shards, before, growth = map(int, stdout.split())
        assert growth < 2 * MIB  # of 100 batches
        encoders = watch.peaks_of("spawn_main")
        assert len(encoders) >= 1
        assert num_shards == (2, 10)[number]
        found = [watch.peaks[process.pid] - before, *encoders]
        print(nbytes, found)
        assert max(found) < GROWTH_BOUND


RANK_BOUND = 500 * MIB
ENCODER_BOUND = 100 * MIB
DISK_NBYTES = 5 << 30


@pytest.mark.timeout(3600)
def test_two_gigabytes(tmp_path: Path) -> None:
    """The real command prepares them in eight files, and two ranks train on them."""
    if shutil.disk_usage(tmp_path).free < DISK_NBYTES:
        pytest.skip(f"needs {DISK_NBYTES >> 30} GiB of disk for text and shards")
    folder = tmp_path / "corpus"
    folder.mkdir()
    try:
        for number in range(8):
            ending = "jsonl" if number % 4 == 3 else "txt"
            write_text(folder / f"{number}.{ending}", 250_000_000, _words(), seed=number)
        options = ["--corpus", "corpus", "--data-dir", "data", "--run-dir", "run", "--steps", "50"]
        process = jobs.start_command(tmp_path, options, 2)
        with MemoryWatch(process.pid) as watch:
            stdout, stderr = process.communicate(timeout=3300)
        assert process.returncode == 0, stdout + stderr
        print(stdout)
        assert "text: 2,000,000,000 bytes in 8 files" in stdout
        assert len(jobs.losses(tmp_path / "run")) == 50
        ranks = [peak for peak in watch.peaks_of("pretrain.py") if peak > 100 * MIB]
        encoders = watch.peaks_of("spawn_main")
        print([peak >> 20 for peak in ranks], [peak >> 20 for peak in encoders])
        assert max(ranks) < RANK_BOUND
        assert max(encoders) < ENCODER_BOUND
    finally:
        shutil.rmtree(folder)
        shutil.rmtree(tmp_path / "data", ignore_errors=True)
