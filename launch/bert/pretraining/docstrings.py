"""Build a text corpus from the documentation strings of installed Python source.

Every machine that can run the job has this text: the standard library's docstrings, torch's, and
those of the other installed packages. Files are parsed, never imported.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import os
import re
import sys
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from pretraining.files import sync, unfinished
from pretraining.processes import new_pool

SKIPPED_FOLDERS = frozenset({"site-packages", "test", "tests", "testing", "idlelib", "__pycache__"})
PREFERRED_PACKAGES = ("torch", "numpy")
"""Read right after the standard library, so that the word limit never cuts them off."""

MIN_WORDS = 4
"""Sentences below this many words are headings and labels rather than text."""

MIN_LETTER_SHARE = 0.75
"""Lines with a smaller share of letters and spaces are formulas, tables or code."""

_FILES_AT_ONCE = 512
_FILES_PER_TASK = 16

_DEFINITIONS = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
_UNDERLINE = re.compile(r"^\s*([-=~^*+#|.`_\"' ])\1{2,}[-=+~| ]*$")
_FENCE = re.compile(r"^\s*(```|~~~)")
_LIST_ITEM = re.compile(r"^\s*(?:[-*+\u2022]\s+|\(?\d{1,2}[.)]\s+)")
_FIELD = re.compile(r"^\s*:(?:param|type|arg|keyword|returns?|rtype|raises?|ivar|var)\b[^:]*:\s*")
_ENTRY = re.compile(r"^\s*\*{0,2}\w[\w.*, ]{0,40}(?:\s*\([^)]*\))?\s*(?::|--)\s+(?=\S)")
_HEADING = re.compile(r"^\s*[A-Z][\w ]{0,24}:{1,2}\s*$")
_DIRECTIVE = re.compile(r"^\s*\.\.\s+([\w:-]+)::\s*(.*)$")
_ROLE = re.compile(r":[\w:]+:`~?!?([^`<]*?)(?:\s*<[^>`]*>)?`")
_EMPHASIS = re.compile(r"(?<![\w*])\*(\w[^*]*)\*(?![\w*])")
_MARKUP = re.compile(r"``|`_{0,2}|\*\*|:(?=:$)")
_SENTENCE_STOP = re.compile(r"(?<=[.!?])\s+(?=[A-Z\"'(])")
_CODE_DIRECTIVES = frozenset(
    {"code-block", "code", "math", "testcode", "testsetup", "plot", "image"}
)


class Source(NamedTuple):
    """One Python file; `label` names it the same way on every machine."""

    path: Path
    label: str
    nbytes: int


def python_sources() -> list[Source]:
    """List the standard library's and the installed packages' files in a fixed order."""
    paths = sysconfig.get_paths()
    sources = list(_walk(Path(paths["stdlib"]), "stdlib"))
    packages: dict[str, list[Source]] = {}
    for root in sorted({paths["purelib"], paths["platlib"]}):
        for source in _walk(Path(root), "site"):
            packages.setdefault(source.label.split("/")[1], []).append(source)
    names = [name for name in PREFERRED_PACKAGES if name in packages]
    names += sorted(set(packages) - set(names))
    return sources + [source for name in names for source in packages[name]]


def _walk(root: Path, prefix: str) -> Iterator[Source]:
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = sorted(name for name in subfolders if name not in SKIPPED_FOLDERS)
        for name in sorted(files):
            if name.endswith(".py"):
                path = Path(folder, name)
                label = f"{prefix}/{path.relative_to(root).as_posix()}"
                yield Source(path, label, path.stat().st_size)


def build_docstring_corpus(folder: Path, max_words: int) -> Path:
    """Write the corpus of at most about `max_words` words below `folder`, unless it is there."""
    sources = python_sources()
    folder.mkdir(parents=True, exist_ok=True)
    listing = "\n".join(f"{source.label} {source.nbytes}" for source in sources)
    key = f"{sys.version_info[:2]} {max_words}\n{listing}"
    path = folder / f"docstrings-{hashlib.sha256(key.encode()).hexdigest()[:12]}.txt"
    if path.exists():
        return path
    with unfinished(path) as temporary:
        with temporary.open("w", encoding="utf-8") as file:
            for document in _documents(sources, max_words):
                file.write("\n".join(document) + "\n\n")
        sync(temporary)
        temporary.replace(path)
    return path


def _documents(sources: list[Source], max_words: int) -> Iterator[list[str]]:
    # Overloads and copied doc-strings would otherwise put the held-out text into the training text.
    seen: set[str] = set()
    num_words = 0
    for document in _all_documents([source.path for source in sources]):
        fresh = []
        for sentence in document:
            if sentence.lower() not in seen:
                seen.add(sentence.lower())
                fresh.append(sentence)
        if fresh:
            num_words += sum(len(sentence.split()) for sentence in fresh)
            yield fresh
        if num_words >= max_words:
            return


def _all_documents(paths: list[Path]) -> Iterator[list[str]]:
    """Yield the documents of all files in order, read by a process per core."""
    with new_pool() as pool:
        for start in range(0, len(paths), _FILES_AT_ONCE):
            batch = paths[start : start + _FILES_AT_ONCE]
            for documents in pool.map(module_documents, batch, chunksize=_FILES_PER_TASK):
                yield from documents


def module_documents(path: Path) -> list[list[str]]:
    """Return a file's documents: the module's text, then one per function or class with methods.

    A function documented in one sentence continues the document before it: alone it could not make
    a sentence pair.
    """
    try:
        text = path.read_text(encoding="utf-8")
        if '"""' not in text and "'''" not in text:
            return []
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(text)
    except (OSError, SyntaxError, ValueError, RecursionError):
        return []
    documents: list[list[str]] = []
    for sentences in _tree_sentences(tree):
        if len(sentences) == 1 and documents:
            documents[-1] += sentences
        elif sentences:
            documents.append(sentences)
    return documents


def _tree_sentences(tree: ast.Module) -> Iterator[list[str]]:
    yield docstring_sentences(ast.get_docstring(tree, clean=False) or "")
    for node in tree.body:
        if isinstance(node, _DEFINITIONS):
            sentences = []
            for inner in ast.walk(node):
                if isinstance(inner, _DEFINITIONS):
                    docstring = ast.get_docstring(inner, clean=False) or ""
                    sentences += docstring_sentences(docstring)
            yield sentences


def docstring_sentences(docstring: str) -> list[str]:
    """Split a docstring into plain sentences; doctests, code, tables and markup are dropped."""
    sentences = []
    for paragraph in _paragraphs(inspect.cleandoc(docstring)):
        for sentence in _SENTENCE_STOP.split(paragraph):
            sentence = sentence.strip()
            if _is_prose(sentence):
                sentences.append(sentence)
    return sentences


def _is_prose(sentence: str) -> bool:
    letters = sum(char.isalpha() or char == " " for char in sentence)
    enough_words = len(sentence.split()) >= MIN_WORDS
    return sentence.isprintable() and enough_words and letters >= MIN_LETTER_SHARE * len(sentence)


def _paragraphs(text: str) -> Iterator[str]:
    parts: list[str] = []
    for line in _prose_lines(text):
        starts_entry = any(rule.match(line) for rule in (_LIST_ITEM, _FIELD, _ENTRY))
        if (not line or starts_entry) and parts:
            yield " ".join(parts)
            parts = []
        line = _FIELD.sub("", _LIST_ITEM.sub("", line)).strip()
        if line:
            parts.append(_MARKUP.sub("", _EMPHASIS.sub(r"\1", _ROLE.sub(r"\1", line))))
    if parts:
        yield " ".join(parts)


def _prose_lines(text: str) -> Iterator[str]:
    """Yield the lines outside doctests and code; a dropped line comes out empty."""
    in_doctest = in_fence = False
    code_indent: int | None = None
    for line in text.splitlines():
        indent = len(line) - len(line.lstrip())
        if _FENCE.match(line):
            in_fence = not in_fence
            yield ""
            continue
        if code_indent is not None and line.strip() and indent <= code_indent:
            code_indent = None
        in_doctest = bool(line.strip()) and (in_doctest or line.lstrip().startswith(">>>"))
        if in_fence or in_doctest or code_indent is not None or _UNDERLINE.match(line):
            yield ""
            continue
        directive = _DIRECTIVE.match(line)
        is_code = directive is not None and directive[1] in _CODE_DIRECTIVES
        if is_code or line.rstrip().endswith("::"):
            code_indent = indent
        if directive is not None:
            line = "" if is_code else directive[2]
        yield "" if _HEADING.match(line) else line
