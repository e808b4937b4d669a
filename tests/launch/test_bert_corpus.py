"""Text in, documents out: reading files, collecting docstrings, preparing token arrays."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
from pretraining import docstrings
from pretraining.corpus import check_corpus_file, corpus_digest, read_documents
from pretraining.docstrings import Source, build_docstring_corpus, docstring_sentences
from pretraining.errors import UsageError
from pretraining.prepared import (
    SPECIAL_TOKENS,
    DocumentSet,
    PreparedCorpus,
    prepare_corpus,
)
from tokenizers import BertWordPieceTokenizer

from tests.launch.conftest import NUM_DOCUMENTS, make_documents


def test_documents_end_at_blank_lines_and_at_a_file_s_end(tmp_path: Path) -> None:
    """Runs of blank lines count once, and surrounding space is dropped."""
    first, second = tmp_path / "a.txt", tmp_path / "b.txt"
    first.write_text("\n  one.  \ntwo.\n\n \t\n\nthree.")
    second.write_text("four.\n")
    assert list(read_documents([first, second])) == [["one.", "two."], ["three."], ["four."]]


def test_the_digest_follows_contents_and_order(tmp_path: Path) -> None:
    """Moving a line from one file to the next is another text, although the bytes are the same."""
    paths = [tmp_path / name for name in ("a", "b", "c", "d")]
    for path, text in zip(paths, ("x\n", "y\nz\n", "x\ny\n", "z\n"), strict=True):
        path.write_text(text)
    a, b, c, d = paths
    copy = tmp_path / "copy"
    copy.write_text("x\n")
    assert corpus_digest([a, b]) == corpus_digest([copy, b])
    assert len({corpus_digest(pair) for pair in ([a, b], [b, a], [c, d])}) == 3


def test_a_file_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    """The message names the file."""
    path = tmp_path / "latin.txt"
    path.write_bytes("caf\xe9\n".encode("latin-1"))
    with pytest.raises(UsageError, match=r"latin\.txt is not UTF-8"):
        list(read_documents([path]))


@pytest.mark.parametrize("kind", ["missing", "empty", "folder"])
def test_an_unusable_file_is_refused_before_anything_starts(tmp_path: Path, kind: str) -> None:
    """A missing file, an empty one and a folder each give their own message."""
    path = tmp_path / "text.txt"
    if kind == "empty":
        path.touch()
    elif kind == "folder":
        path.mkdir()
    with pytest.raises(UsageError, match="is empty" if kind == "empty" else "is not a file"):
        check_corpus_file(path, "name an existing text file")


DOCSTRING = """Return the *size* of ``queue``, see :class:`~queue.Queue`. It may be out of date.

    >>> size(Queue())
    printed output of this example

    The following code is never shown to the reader::

        code = must(not_be, part_of) + the_text

    Text after the code block comes back.

    ======  ======
    col1    col2
    ======  ======

    Args:
        queue (Queue): the queue whose items are counted,
            over two lines of text.
        block: whether to wait for the lock.

    Short one.

    .. note:: Notes are kept as ordinary text.

    ```
    fenced code is dropped as well
    ```
"""


def test_docstrings_become_plain_sentences() -> None:
    """Doctests, code, tables and headings go; markup is stripped; wrapped lines are joined."""
    assert docstring_sentences(DOCSTRING) == [
        "Return the size of queue, see queue.Queue.",
        "It may be out of date.",
        "The following code is never shown to the reader:",
        "Text after the code block comes back.",
        "queue (Queue): the queue whose items are counted, over two lines of text.",
        "block: whether to wait for the lock.",
        "Notes are kept as ordinary text.",
    ]


MODULE = '''"""The module has its own text. It has two sentences here."""
raise SystemExit("a corpus must never import what it reads")

class Thing:
    """A thing is described like this. A thing can be used."""

    def method(self):
        """Methods belong to the document of their class."""

def alone():
    """This function has only one sentence."""

def twin():
    """A thing is described like this. Twins share their first sentence with the class."""
'''


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Source]:
    folder = tmp_path / "sources"
    folder.mkdir()
    texts = {
        "a.py": MODULE,
        "broken.py": 'def f(:\n    """Not Python at all, sorry."""',
        "b.py": MODULE,
    }
    for name, text in texts.items():
        (folder / name).write_text(text)
    found = [Source(folder / name, f"site/{name}", len(text)) for name, text in texts.items()]
    monkeypatch.setattr(docstrings, "python_sources", lambda: found)
    return found


def test_the_docstring_corpus_has_one_document_per_definition(
    sources: list[Source], tmp_path: Path
) -> None:
    """Repeated sentences appear once, lone sentences join the one before, bad files are skipped."""
    path = build_docstring_corpus(tmp_path / "data", max_words=10_000)
    assert list(read_documents([path])) == [
        ["The module has its own text.", "It has two sentences here."],
        [
            "A thing is described like this.",
            "A thing can be used.",
            "Methods belong to the document of their class.",
            "This function has only one sentence.",
        ],
        ["Twins share their first sentence with the class."],
    ]


def test_the_docstring_corpus_is_built_once_and_stops_at_its_word_limit(
    sources: list[Source], tmp_path: Path
) -> None:
    """A second call finds the file by what the sources are; another limit is another file."""
    path = build_docstring_corpus(tmp_path, max_words=10_000)
    before = path.stat().st_mtime_ns
    assert build_docstring_corpus(tmp_path, max_words=10_000) == path
    assert path.stat().st_mtime_ns == before
    short = build_docstring_corpus(tmp_path, max_words=11)
    assert len(short.read_text().split()) == 11
    assert sorted(p.name for p in tmp_path.glob("*docstrings*")) == sorted([path.name, short.name])


def test_the_standard_library_comes_first_and_in_a_fixed_order() -> None:
    """The listing is the same twice, and torch follows the standard library."""
    labels = [source.label for source in docstrings.python_sources()]
    assert labels == [source.label for source in docstrings.python_sources()]
    assert len(set(labels)) == len(labels)
    num_standard = sum(label.startswith("stdlib/") for label in labels)
    assert num_standard > 100
    assert all(label.startswith("stdlib/") for label in labels[:num_standard])
    assert labels[num_standard].startswith("site/torch/")


def _sentences(documents: DocumentSet) -> list[list[list[int]]]:
    starts = documents.sentence_starts
    texts = [documents.tokens[a:b].tolist() for a, b in itertools.pairwise(starts)]
    return [texts[a:b] for a, b in itertools.pairwise(documents.document_starts)]


def test_prepared_tokens_are_the_text(corpus: PreparedCorpus, text_file: Path) -> None:
    """Every document is found once, in order, in exactly one of the two sets."""
    tokenizer = BertWordPieceTokenizer(str(corpus.folder / "vocab.txt"))
    assert [tokenizer.token_to_id(token) for token in SPECIAL_TOKENS] == [0, 1, 2, 3, 4]
    assert corpus.summary.vocab_size == tokenizer.get_vocab_size()
    expected = [
        [tokenizer.encode(sentence, add_special_tokens=False).ids for sentence in document]
        for document in make_documents()
    ]
    train, held_out = _sentences(corpus.train), _sentences(corpus.held_out)
    assert len(held_out) == corpus.summary.num_held_out_documents == round(0.05 * NUM_DOCUMENTS)
    is_train = [document in train for document in expected]
    assert train == list(itertools.compress(expected, is_train))
    assert held_out == [d for d, in_train in zip(expected, is_train, strict=True) if not in_train]
    num_words = sum(len(text.split()) for document in make_documents() for text in document)
    assert corpus.summary.num_words == num_words


def test_the_vocabulary_has_seen_no_held_out_text(tmp_path: Path) -> None:
    """Letters used only in held-out documents are unknown."""
    path = tmp_path / "text.txt"
    letters = [chr(ord("a") + i) for i in range(20)]
    path.write_text("\n\n".join(f"{c * 3} {c * 2}\n{c * 4}" for c in letters))
    corpus = PreparedCorpus.open(prepare_corpus([path], tmp_path, 200, lambda line: None))
    assert corpus.held_out.num_documents == 2
    assert set(corpus.held_out.tokens.tolist()) == {SPECIAL_TOKENS.index("[UNK]")}
    assert SPECIAL_TOKENS.index("[UNK]") not in corpus.train.tokens


def test_prepared_text_is_cached_by_contents_and_vocabulary_size(
    text_file: Path, tmp_path: Path
) -> None:
    """The second call builds nothing, whatever the file's name; nothing unfinished is left."""
    said: list[str] = []
    folder = prepare_corpus([text_file], tmp_path / "data", 100, said.append)
    assert len(said) == 3
    copy = tmp_path / "copy.txt"
    copy.write_bytes(text_file.read_bytes())
    assert prepare_corpus([copy], tmp_path / "data", 100, said.append) == folder
    assert len(said) == 3
    other = prepare_corpus([copy], tmp_path / "data", 90, said.append)
    assert sorted((tmp_path / "data").iterdir()) == sorted([folder, other])
    assert np.load(folder / "train" / "tokens.npy").dtype == np.uint16


def test_too_few_documents_are_refused(tmp_path: Path) -> None:
    """Three documents of two sentences cannot be split; nothing is left in the data folder."""
    path = tmp_path / "text.txt"
    path.write_text("a b.\nc d.\n\n" * 3 + "only one.\n\n" * 9)
    with pytest.raises(UsageError, match="found 3 documents of two or more sentences"):
        prepare_corpus([path], tmp_path / "data", 100, lambda line: None)
    assert not (tmp_path / "data").exists()
