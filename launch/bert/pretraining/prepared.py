"""Turn text into a WordPiece vocabulary and token arrays, cached on disk.

    <data dir>/prepared-<corpus digest>-<vocabulary size>/
        vocab.txt                 trained on the training documents only
        summary.json              PreparedSummary
        train/    tokens.npy  sentence_starts.npy  document_starts.npy
        held_out/ the same

The folder appears by one rename, so a reader finds it complete or not at all.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tokenizers import BertWordPieceTokenizer

from pretraining.corpus import corpus_digest, read_documents
from pretraining.errors import UsageError
from pretraining.files import sync_tree, unfinished

SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
PAD_ID, UNK_ID, CLS_ID, SEP_ID, MASK_ID = range(len(SPECIAL_TOKENS))

HELD_OUT_SHARE = 0.05
MIN_DOCUMENTS = 4
"""Two held out and two to train on: a random next sentence comes from another document."""

MIN_VOCAB_SIZE = 64
_ENCODE_BATCH = 8192


@dataclasses.dataclass(frozen=True)
class DocumentSet:
    """Token ids of documents, laid end to end; opened as read-only memory maps.

    tokens            | d0s0 | d0s1   | d0s2 | d1s0    | d1s1 |   (num_tokens,) integers
    sentence_starts   0      ^        ^      ^         ^      ^   (num_sentences + 1,) tokens
    document_starts   0                      ^                ^   (num_documents + 1,) sentences
    """

    tokens: npt.NDArray[np.integer]
    sentence_starts: npt.NDArray[np.int64]
    document_starts: npt.NDArray[np.int64]

    @property
    def num_documents(self) -> int:
        return len(self.document_starts) - 1

    @property
    def num_sentences(self) -> int:
        return len(self.sentence_starts) - 1

    @classmethod
    def open(cls, folder: Path) -> DocumentSet:
        names = [field.name for field in dataclasses.fields(cls)]
        maps = (np.load(folder / f"{name}.npy", mmap_mode="r") for name in names)
        # Same memory without np.memmap's cost per slice, which would double the sampling time.
        documents = cls(*(np.asarray(array).view(np.ndarray) for array in maps))
        ends = documents.sentence_starts[-1], documents.document_starts[-1]
        if ends != (len(documents.tokens), documents.num_sentences):
            raise ValueError(f"the arrays of {folder} are not of one text")
        return documents

    def save(self, folder: Path) -> None:
        folder.mkdir()
        for field in dataclasses.fields(self):
            np.save(folder / f"{field.name}.npy", getattr(self, field.name))


@dataclasses.dataclass(frozen=True)
class PreparedSummary:
    """What was prepared; `digest` identifies text and vocabulary together."""

    digest: str
    vocab_size: int
    num_words: int
    num_documents: int
    num_held_out_documents: int


@dataclasses.dataclass(frozen=True)
class PreparedCorpus:
    """A training set, a held-out set of other documents, and the vocabulary of both."""

    folder: Path
    summary: PreparedSummary
    train: DocumentSet
    held_out: DocumentSet

    @classmethod
    def open(cls, folder: Path) -> PreparedCorpus:
        """Open what `prepare_corpus` built; raises `UsageError` where that is damaged."""
        try:
            summary = PreparedSummary(**json.loads((folder / "summary.json").read_text()))
            train, held_out = (DocumentSet.open(folder / name) for name in ("train", "held_out"))
        except (OSError, ValueError, TypeError, EOFError, IndexError) as error:
            raise UsageError(
                f"--data-dir: {folder} cannot be read ({' '.join(str(error).split())}); "
                "remove it, and a new run prepares the text again"
            ) from error
        return cls(folder, summary, train, held_out)


def prepare_corpus(
    paths: Sequence[Path], data_dir: Path, vocab_size: int, say: Callable[[str], None]
) -> Path:
    """Return the prepared folder of `paths`, building it unless it is cached in `data_dir`.

    `say` is given one line per finished stage.
    """
    folder = data_dir / f"prepared-{corpus_digest(paths)}-{vocab_size}"
    if folder.exists():
        return folder
    counts = [(len(doc), sum(len(text.split()) for text in doc)) for doc in read_documents(paths)]
    is_held_out = _choose_held_out([num_sentences for num_sentences, _ in counts])
    data_dir.mkdir(parents=True, exist_ok=True)
    with unfinished(folder) as temporary:
        temporary.mkdir()
        tokenizer = _train_vocabulary(_select(read_documents(paths), ~is_held_out), vocab_size)
        _save_vocabulary(tokenizer, temporary)
        say(f"vocabulary: {tokenizer.get_vocab_size():,} WordPiece tokens")
        for name, wanted in (("train", ~is_held_out), ("held_out", is_held_out)):
            documents = _encode(tokenizer, _select(read_documents(paths), wanted))
            documents.save(temporary / name)
            say(f"{name}: {documents.num_documents:,} documents, {len(documents.tokens):,} tokens")
        # Ties between word pieces are broken at random: one text may give two vocabularies.
        vocabulary = hashlib.sha256((temporary / "vocab.txt").read_bytes()).hexdigest()[:12]
        summary = PreparedSummary(
            digest=f"{folder.name.removeprefix('prepared-')}-{vocabulary}",
            vocab_size=tokenizer.get_vocab_size(),
            num_words=sum(num_words for _, num_words in counts),
            num_documents=len(counts),
            num_held_out_documents=int(is_held_out.sum()),
        )
        (temporary / "summary.json").write_text(json.dumps(dataclasses.asdict(summary), indent=2))
        _publish(temporary, folder)
    return folder


def _save_vocabulary(tokenizer: BertWordPieceTokenizer, folder: Path) -> None:
    try:
        tokenizer.save_model(str(folder))
    except Exception as error:
        # It has one class for all errors, and the system's message as text.
        raise OSError(str(error)) from error


def _publish(temporary: Path, folder: Path) -> None:
    sync_tree(temporary)
    try:
        temporary.rename(folder)
    except OSError:
        # Another job prepared the same corpus meanwhile; its folder is as good as ours.
        if not folder.exists():
            raise


def _choose_held_out(sentence_counts: Sequence[int]) -> npt.NDArray[np.bool_]:
    """Mark the held-out documents; the choice depends on the corpus alone, not on the seed."""
    pairable = np.flatnonzero(np.asarray(sentence_counts, dtype=np.int64) >= 2)
    if len(pairable) < MIN_DOCUMENTS:
        raise UsageError(
            f"--corpus: found {len(pairable)} documents of two or more sentences, need at least "
            f"{MIN_DOCUMENTS}; put one sentence per line and blank lines between documents"
        )
    num_held_out = max(MIN_DOCUMENTS // 2, round(HELD_OUT_SHARE * len(pairable)))
    chosen = np.random.default_rng(0).permutation(pairable)[:num_held_out]
    is_held_out = np.zeros(len(sentence_counts), dtype=np.bool_)
    is_held_out[chosen] = True
    return is_held_out


def _select(documents: Iterable[list[str]], wanted: npt.NDArray[np.bool_]) -> Iterator[list[str]]:
    return itertools.compress(documents, wanted)


def _train_vocabulary(documents: Iterable[list[str]], vocab_size: int) -> BertWordPieceTokenizer:
    tokenizer = BertWordPieceTokenizer(lowercase=True)
    tokenizer.train_from_iterator(
        itertools.chain.from_iterable(documents),
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        limit_alphabet=min(1000, vocab_size // 2),
        show_progress=False,
    )
    return tokenizer


def _encode(tokenizer: BertWordPieceTokenizer, documents: Iterable[list[str]]) -> DocumentSet:
    dtype = np.uint16 if tokenizer.get_vocab_size() <= 1 << 16 else np.int32
    tokens: list[npt.NDArray[np.integer]] = []
    sentence_lengths: list[int] = []
    document_lengths: list[int] = []
    for batch in _batches(documents, _ENCODE_BATCH):
        sentences = [sentence for document in batch for sentence in document]
        encoded = tokenizer.encode_batch(sentences, add_special_tokens=False)
        tokens += [np.asarray(item.ids, dtype=dtype) for item in encoded]
        sentence_lengths += [len(item.ids) for item in encoded]
        document_lengths += [len(document) for document in batch]
    return DocumentSet(
        tokens=np.concatenate(tokens),
        sentence_starts=np.cumsum([0, *sentence_lengths], dtype=np.int64),
        document_starts=np.cumsum([0, *document_lengths], dtype=np.int64),
    )


def _batches(documents: Iterable[list[str]], num_documents: int) -> Iterator[list[list[str]]]:
    iterator = iter(documents)
    while batch := list(itertools.islice(iterator, num_documents)):
        yield batch
