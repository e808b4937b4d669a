"""The corpus of docstrings: which sentences, in which documents, of which packages."""

from __future__ import annotations

from pathlib import Path

import pytest
from pretraining import docstrings
from pretraining.docstrings import Source, build_docstring_corpus, docstring_sentences

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
    assert [text.splitlines() for text in path.read_text().strip().split("\n\n")] == [
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
