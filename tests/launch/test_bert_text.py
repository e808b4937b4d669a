"""Files and folders of text in, documents out; what cannot be read is named and passed over."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from pretraining import reading
from pretraining.corpus import Faults, TextOptions, check_corpus, corpus_key, find_sources
from pretraining.errors import UsageError
from pretraining.reading import MAX_SENTENCE_CHARS, PROSE_CHARS, read_documents, sentences_of

BAD_JSON = b'{"text": "cut o'


def _read(
    paths: Sequence[Path], *, key: str = "text", is_strict: bool = False
) -> tuple[list[list[str]], list[str]]:
    """Return the documents, and what was said of faults."""
    said: list[str] = []
    faults = Faults(said.append, is_strict=is_strict)
    sources = find_sources(paths, {}, faults)
    return [d for source in sources for d in read_documents(source, key, faults)], said


def _line(text: object) -> bytes:
    return json.dumps({"text": text}).encode() + b"\n"


# Documents and sentences.


def test_documents_end_at_blank_lines_and_at_a_file_s_end(tmp_path: Path) -> None:
    """Runs of blank lines count once, and surrounding space is dropped."""
    first, second = tmp_path / "a.txt", tmp_path / "b.txt"
    first.write_bytes(b"\xef\xbb\xbf\n  one.  \ntwo. Still two.\r\n\n \t\n\nthree.")
    second.write_text("four.\n")
    expected = [["one.", "two. Still two."], ["three."], ["four."]]
    assert _read([first, second]) == (expected, [])


def test_long_lines_are_prose(tmp_path: Path) -> None:
    """A line of a .txt is one sentence, until it is too long to be one."""
    text = 'A sentence of e.g. six words. "Another one!" And 2.5 more? ' * 20
    assert len(text) > PROSE_CHARS
    path = tmp_path / "a.txt"
    path.write_text(text + "\nShort. Kept as it is.\n")
    expected = ["A sentence of e.g. six words.", '"Another one!"', "And 2.5 more?"] * 20
    assert _read([path]) == ([[*expected, "Short. Kept as it is."]], [])


def test_sentences_of_other_scripts_and_without_end() -> None:
    """Chinese has no spaces between sentences; what never ends is cut, at a space if there is."""
    assert sentences_of("\u4f60\u597d\u3002\u518d\u89c1\uff01") == [
        "\u4f60\u597d\u3002",
        "\u518d\u89c1\uff01",
    ]
    words = "word " * 2000
    parts = sentences_of(words)
    assert " ".join(parts) == words.strip()
    assert max(map(len, parts)) <= MAX_SENTENCE_CHARS
    assert {part[:4] for part in parts} == {"word"}
    assert "".join(sentences_of("x" * 9000)) == "x" * 9000


def test_a_line_of_jsonl_is_a_document(tmp_path: Path) -> None:
    """Its paragraphs are split into sentences; blank lines in it do not end it."""
    path = tmp_path / "a.jsonl"
    path.write_bytes(_line("One. Two.\n\nThree.") + b"\n" + _line("") + _line("Four."))
    assert _read([path]) == ([["One.", "Two.", "Three."], ["Four."]], [])
    path.write_text('{"body": "One.", "text": 7}\n')
    assert _read([path], key="body") == ([["One."]], [])


def test_a_long_document_goes_on_as_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However much text has no blank line, no more than a document of it is in memory."""
    monkeypatch.setattr(reading, "MAX_DOCUMENT_CHARS", 10)
    path = tmp_path / "a.txt"
    path.write_text("123456\n" * 4 + "\nend.\n")
    assert _read([path]) == ([["123456"] * 2, ["123456"] * 2, ["end."]], [])


# Which files.


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Make a folder of all kinds of text, a link in a circle, and hidden files."""
    folder = tmp_path / "corpus"
    (folder / "b").mkdir(parents=True)
    (folder / "b" / "two.jsonl").write_bytes(_line("Two."))
    (folder / "a.txt").write_text("one.\n")
    (folder / "c.TXT.gz").write_bytes(gzip.compress(b"three.\n"))
    (folder / "d.jsonl.gz").write_bytes(gzip.compress(_line("Four.")))
    (folder / "b" / "again").symlink_to(folder)
    (folder / ".hidden.txt").write_text("never.\n")
    return folder


def test_folders_are_read_in_sorted_order_and_each_file_once(folder: Path) -> None:
    """Whatever the kind; a file that is named twice, or linked, too."""
    expected = [["one."], ["Two."], ["three."], ["Four."]]
    assert _read([folder]) == (expected, [])
    assert _read([folder / "d.jsonl.gz", folder]) == ([expected[3], *expected[:3]], [])


def test_a_file_is_one_by_whatever_path(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Relative and absolute, over another folder, and by a link: resuming has absolute paths."""
    monkeypatch.chdir(folder.parent)
    (folder / "e.txt").symlink_to(folder / "a.txt")
    expected = [["one."], ["Two."], ["three."], ["Four."]]
    paths = [Path("corpus"), folder, Path("corpus/b/../a.txt")]
    assert _read(paths) == (expected, [])
    assert _read([path.absolute() for path in paths]) == (expected, [])


def test_the_key_follows_contents_order_and_options(tmp_path: Path) -> None:
    """Moving a line to the next file is another text, although the bytes are the same."""
    paths = [tmp_path / f"{name}.txt" for name in ("a", "b", "c", "d")]
    for path, text in zip(paths, ("x\n", "y\nz\n", "x\ny\n", "z\n"), strict=True):
        path.write_text(text)
    a, b, c, d = paths
    copy = tmp_path / "copy.txt"
    copy.write_text("x\n")
    other = tmp_path / "a.jsonl"
    other.write_text("x\n")

    def key(*paths: Path, words: int = 9, name: str = "text") -> str:
        options = TextOptions(paths=paths, vocab_size=9, vocab_words=words, jsonl_key=name)
        sources = find_sources(paths, {}, Faults(print, is_strict=True))
        return corpus_key(sources, options)

    assert key(a, b) == key(copy, b)
    others = [key(b, a), key(c, d), key(other, b), key(a, b, words=8), key(a, b, name="x")]
    assert len({key(a, b), *others}) == 6


def test_files_that_were_read_before_are_known_by_size_and_time(tmp_path: Path) -> None:
    """Any change of either has it read again."""
    path = tmp_path / "a.txt"
    path.write_text("one\n")
    faults = Faults(print, is_strict=True)
    (source,) = find_sources([path], {}, faults)
    known = {(str(path), source.nbytes, source.mtime_ns): "known"}
    assert find_sources([path], known, faults)[0].digest == "known"
    os.utime(path, ns=(0, source.mtime_ns + 1))
    assert find_sources([path], known, faults)[0].digest == source.digest


@pytest.mark.parametrize("name", ["missing.txt", "missing"])
def test_a_path_that_leads_nowhere_is_refused(tmp_path: Path, name: str) -> None:
    """Before anything is read."""
    with pytest.raises(UsageError, match=f"{name} is not a file or folder; name another"):
        check_corpus([tmp_path / name], "name another")


@pytest.mark.parametrize("content", ["nothing", "others", "empty"])
def test_a_folder_with_nothing_useful_in_it_is_refused(tmp_path: Path, content: str) -> None:
    """The message says what was looked for, and the first thing that was found instead."""
    if content == "others":
        (tmp_path / "data.parquet").write_bytes(b"PAR1")
    elif content == "empty":
        (tmp_path / "empty.txt").touch()
    with pytest.raises(UsageError, match=r"no text in .*; name files, or folders") as caught:
        _read([tmp_path])
    found = {"nothing": "no files", "others": "data.parquet has none of", "empty": "is empty"}
    assert found[content] in str(caught.value)


# Faults.

FAULTS: dict[str, tuple[str, bytes, str]] = {
    "bad utf-8": ("a.txt", b"good.\ncaf\xe9.\nbetter.\n", "a.txt, line 2 is not UTF-8"),
    "long line": ("a.txt", b"good.\n" + b"x" * 200 + b"\nbetter.\n", "line 2 is longer than 100"),
    "bad json": (
        "a.jsonl",
        _line("good.") + BAD_JSON + b"\n" + _line("better."),
        "a.jsonl, line 2: it is no JSON (Unterminated string",
    ),
    "no object": ("a.jsonl", _line("good.") + b"[1]\n" + _line("better."), "line 2: it is no JSON"),
    "no key": ("a.jsonl", _line("good.") + b"{}\n" + _line("better."), "under 'text' (see --jsonl"),
    "no text": ("a.jsonl", _line("good.") + _line(7) + _line("better."), "line 2: it is no JSON"),
    "deep": ("a.jsonl", _line("good.") + b"[" * 99 + b"\n" + _line("better."), "a.jsonl, line 2: "),
    "surrogate": (
        "a.jsonl",
        _line("good.") + b'{"text": "\\ud800"}\n' + _line("better."),
        "surrogates not allowed",
    ),
    "cut gz": ("a.txt.gz", gzip.compress(b"good.\nbetter.\n")[:-6], "a.txt.gz, after line "),
    "no gz": ("a.txt.gz", b"good.\nbetter.\n", "a.txt.gz, after line 0: "),
}


@pytest.mark.parametrize("kind", FAULTS)
def test_a_fault_is_named_and_the_rest_goes_on(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line with file and line; with --strict it is the error."""
    monkeypatch.setattr(reading, "MAX_LINE_NBYTES", 100)
    name, data, message = FAULTS[kind]
    (tmp_path / name).write_bytes(data)
    (tmp_path / "z.txt").write_text("last.\n")
    documents, said = _read([tmp_path])
    sentences = [sentence for document in documents for sentence in document]
    if "gz" not in kind:
        assert sentences == ["good.", "better.", "last."]
    assert sentences[-1] == "last."
    (line,) = said
    assert line.startswith(f"warning: --corpus: {tmp_path / name}")
    assert message in line
    assert line.endswith("; passed over")
    with pytest.raises(UsageError) as caught:
        _read([tmp_path], is_strict=True)
    assert message in str(caught.value)
    assert str(caught.value).endswith("; mend it, or drop --strict to go on without it")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("bomb", [b"a b.\n" * 400_000, b"x" * 2_000_000], ids=["lines", "one line"])
def test_a_gz_that_unpacks_to_too_much_is_left(
    tmp_path: Path, bomb: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A byte can stand for 1,032; text does not come near to the bound, and is read."""
    monkeypatch.setattr(reading, "UNPACKED_NBYTES", 1000)
    monkeypatch.setattr(reading, "MAX_LINE_NBYTES", 100_000)
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"good.\n" + bomb + b"\nlast.\n"))
    (tmp_path / "z.txt.gz").write_bytes(gzip.compress(b"better.\n"))
    documents, said = _read([tmp_path])
    sentences = [sentence for document in documents for sentence in document]
    assert sentences[0] == "good."
    assert sentences[-1] == "better."
    assert "last." not in sentences
    assert "it is compressed more than 100 times" in said[-1]


def _unreadable(path: Path) -> None:
    path.symlink_to("/nowhere")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: path.with_suffix(".doc").touch(), "none of the endings .txt, .jsonl"),
        (lambda path: path.touch(), "is empty"),
        (_unreadable, "No such file"),
    ],
    ids=["ending", "empty", "unreadable"],
)
def test_a_file_that_is_of_no_use_is_named_and_the_rest_goes_on(
    tmp_path: Path, make: Callable[[Path], None], message: str
) -> None:
    """Of another kind, without contents, or not to be opened."""
    make(tmp_path / "a.txt")
    (tmp_path / "z.txt").write_text("last.\n")
    documents, said = _read([tmp_path])
    assert documents == [["last."]]
    assert len(said) == 1
    assert message in said[0]
    with pytest.raises(UsageError, match=message):
        _read([tmp_path], is_strict=True)


def test_many_faults_are_counted_and_only_the_first_are_named(tmp_path: Path) -> None:
    """A million of bad lines do not fill the terminal."""
    path = tmp_path / "a.jsonl"
    path.write_bytes((BAD_JSON + b"\n") * 100 + _line("Good."))
    said: list[str] = []
    faults = Faults(said.append, is_strict=False)
    (source,) = find_sources([path], {}, faults)
    assert list(read_documents(source, "text", faults)) == [["Good."]]
    assert faults.num == 100
    assert f"{path}, line 1: " in faults.first
    assert len(said) == 20
    assert said[-1].endswith("more of them are counted only")
