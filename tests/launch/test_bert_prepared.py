"""Text prepared in shards: what is in them, and when they are made anew."""

from __future__ import annotations

import gzip
import json
import random
import resource
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from pretraining import building, prepared
from pretraining.errors import UsageError
from pretraining.launch import Launch
from pretraining.plan import _open_same
from pretraining.prepared import PreparedCorpus
from pretraining.samples import SampleStream
from pretraining.shards import open_shard
from pretraining.survey import Survey
from pretraining.wordpiece import SPECIAL_TOKENS, Encoder, dtype_of
from tokenizers import BertWordPieceTokenizer, Tokenizer, models, pre_tokenizers

from tests.launch.texts import (
    check_text,
    have_small_shards,
    make_documents,
    prepare,
    sentences_in,
)

pytestmark = pytest.mark.timeout(120)


@pytest.mark.parametrize("processes_from", [2, 10**9], ids=["by others", "alone"])
def test_prepared_tokens_are_the_text(
    text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, processes_from: int
) -> None:
    """In shards, each of whole documents, whoever has encoded them."""
    have_small_shards(monkeypatch, processes_from=processes_from)
    corpus = PreparedCorpus.open(prepare([text_file], tmp_path))
    assert len(corpus.train.shards) == 4
    check_text(corpus)


def test_formats_mix(text_file: Path, corpus: PreparedCorpus, tmp_path: Path) -> None:
    """The same documents from four files of all kinds; a file that is no text is counted."""
    texts = make_documents()
    parts = [texts[number * 15 : number * 15 + 15] for number in range(4)]
    plain = ["\n\n".join("\n".join(document) for document in part).encode() for part in parts]
    lines = [
        "".join(json.dumps({"text": "\n".join(document)}) + "\n" for document in part).encode()
        for part in parts
    ]
    folder = tmp_path / "corpus"
    folder.mkdir()
    (folder / "0.txt").write_bytes(plain[0])
    (folder / "1.jsonl").write_bytes(lines[1])
    (folder / "2.txt.gz").write_bytes(gzip.compress(plain[2]))
    (folder / "3.jsonl.gz").write_bytes(gzip.compress(lines[3]))
    (folder / "4.txt").write_bytes(b"\xff\n")
    (folder / "5.doc").write_bytes(b"?")
    said: list[str] = []
    mixed = PreparedCorpus.open(prepare([folder], tmp_path / "data", say=said.append))
    check_text(mixed)
    assert mixed.summary.num_held_out_documents == corpus.summary.num_held_out_documents
    assert f"text: 2 faults passed over, the first: {folder / '5.doc'} has none of" in said[-1]
    with pytest.raises(UsageError, match=r"5\.doc has none of .* drop --strict"):
        prepare([folder], tmp_path / "data", is_strict=True)
    (folder / "5.doc").unlink()
    # It is prepared already, with the fault that was found then.
    with pytest.raises(UsageError, match=r"4\.txt, line 1 is not UTF-8 .* drop --strict"):
        prepare([folder], tmp_path / "data", is_strict=True)


def test_a_sentence_s_ids_are_those_of_its_words(corpus: PreparedCorpus, tmp_path: Path) -> None:
    """For all characters that the tokenizer treats in ways of its own."""
    vocabulary = tmp_path / "vocab.txt"
    pieces = [*"abcdefgss\u00df\u4f60\u597d.,'", "##a", "##b", "the", "cat", "##s"]
    vocabulary.write_text("\n".join(dict.fromkeys([*SPECIAL_TOKENS, *pieces])))
    tokenizer = BertWordPieceTokenizer(str(vocabulary), lowercase=True)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    encoder = Encoder(tmp_path / "tokenizer.json", cut=0)
    odd = (
        "\u00e4\u0301\u0300\u00df\u1e9e\u0130\u4f60\u597d\u3000\u00a0\u200b\t\x1c\x00\x7f.,'\u0345"
    )
    rng = random.Random(0)
    for _ in range(300):
        words = ["".join(rng.choices("abcdefgTHE" + odd, k=rng.randint(0, 4))) for _ in range(9)]
        sentence = " ".join([*words, "the cats", "\u0301 a", "x" * 150])
        (ids,) = (encoder.encode([[sentence]])["train"].tokens,)
        expected = tokenizer.encode(sentence, add_special_tokens=False).ids
        assert np.frombuffer(ids, dtype=np.uint16).tolist() == expected, ascii(sentence)


def test_sentences_are_encoded_whole_where_words_do_not_stand_alone(tmp_path: Path) -> None:
    """A tokenizer that is given may look beyond a space, as one of SentencePiece does."""
    scores = [
        ("<unk>", 0.0),
        ("\u2581the", -1.0),
        ("\u2581cat", -1.0),
        ("\u2581the\u2581cat", -0.5),
    ]
    tokenizer = Tokenizer(models.Unigram(scores, unk_id=0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(split=False)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    encoder = Encoder(tmp_path / "tokenizer.json", cut=0)
    ids = encoder.encode([["the cat"]])["train"].tokens
    assert np.frombuffer(ids, dtype=np.uint16).tolist() == [3]


def test_samples_do_not_depend_on_shards_or_ranks(
    text_file: Path, corpus: PreparedCorpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One shard or four, one rank or two: bit for bit the same global batch."""

    def same_vocabulary(texts: object, vocab_size: int, folder: Path) -> None:
        for name in ("vocab.txt", "tokenizer.json"):
            shutil.copy(corpus.folder / name, folder)

    monkeypatch.setattr(building, "train_vocabulary", same_vocabulary)
    have_small_shards(monkeypatch)
    several = PreparedCorpus.open(prepare([text_file], tmp_path))
    assert len(several.train.shards) == 4
    vocab_size = corpus.summary.vocab_size
    whole = SampleStream(corpus.train, vocab_size, 32, seed=3).batch(5, range(64))
    stream = SampleStream(several.train, vocab_size, 32, seed=3)
    halves = [stream.batch(5, range(32)), stream.batch(5, range(32, 64))]
    for expected, *parts in zip(whole, *halves, strict=True):
        assert torch.equal(torch.cat(parts), expected)


def test_the_vocabulary_has_seen_no_held_out_text(tmp_path: Path) -> None:
    """Letters used only in held-out documents are unknown."""
    path = tmp_path / "text.txt"
    letters = [chr(ord("a") + i) for i in range(20)]
    path.write_text("\n\n".join(f"{c * 3} {c * 2}\n{c * 4}" for c in letters))
    corpus = PreparedCorpus.open(prepare([path], tmp_path, 200))
    assert corpus.held_out.num_documents >= 2
    held_out, train = (d.shards[0].tokens.tolist() for d in (corpus.held_out, corpus.train))
    assert set(held_out) == {SPECIAL_TOKENS.index("[UNK]")}
    assert SPECIAL_TOKENS.index("[UNK]") not in train


def test_repeated_documents_are_all_held_out_or_none(tmp_path: Path) -> None:
    """Copies of a text are not on both sides."""
    path = tmp_path / "text.txt"
    path.write_text("\n\n".join("\n".join(document) for document in make_documents() * 3) + "\n")
    corpus = PreparedCorpus.open(prepare([path], tmp_path))
    train, held_out = sentences_in(corpus.train), sentences_in(corpus.held_out)
    assert len(held_out) % 3 == 0
    assert not [document for document in held_out if document in train]


def test_the_vocabulary_is_of_a_sample(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many words as asked for, and one document more at most; not always the first ones."""
    path = tmp_path / "text.txt"
    documents = [f"word{number} a b c d\ne f g h i" for number in range(1000)]
    path.write_text("\n\n".join(documents))
    seen: list[str] = []
    train = building.train_vocabulary

    def spying(texts: list[str], vocab_size: int, folder: Path) -> None:
        seen.extend(texts)
        train(texts, vocab_size, folder)

    monkeypatch.setattr(building, "train_vocabulary", spying)
    prepare([path], tmp_path, vocab_words=500)
    assert 40 <= len(seen) <= 51  # of 10 words; some of them held out
    assert set(seen) <= set(documents)
    assert documents.index(max(seen, key=documents.index)) > 500


def test_a_sample_that_is_all_held_out_is_refused() -> None:
    """Of one word, it is a single document, which may be to train on or not."""
    with pytest.raises(UsageError, match="--vocab-words 1 is too few for this text"):
        _sample_texts_of_four(100)


def _sample_texts_of_four(num_texts: int) -> None:
    for text in range(num_texts):
        survey = Survey(1)
        for number in range(4):
            survey.add([f"one {text} {number}", "two"])
        assert len(survey.sample()) == 1


# When it is made anew.


def test_prepared_text_is_used_again(
    text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By contents and vocabulary size, whatever the file's name; nothing is read or written."""
    said: list[str] = []
    data = tmp_path / "data"
    folder = prepare([text_file], data, 100, said.append)
    before = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert sorted(path.name for path in before) == [
        "index.json",
        "shard-00000.bin",
        "sources.json",
        "token_counts.npy",
        "tokenizer.json",
        "vocab.txt",
    ]
    assert "prepared before" not in "".join(said)
    copy = tmp_path / "copy.txt"
    copy.write_bytes(text_file.read_bytes())
    assert prepare([copy], data, 100, said.append) == folder
    assert said[-1] == f"text: prepared before in {folder}"
    monkeypatch.setattr("pretraining.corpus.sha256", None)  # not needed: it is known
    assert prepare([text_file], data, 100, said.append) == folder
    assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == before
    monkeypatch.undo()
    other = prepare([copy], data, 90)
    assert sorted(data.iterdir()) == sorted([data / ".lock", folder, other])


@pytest.mark.parametrize("place", ["tokens", "starts"])
def test_a_shard_that_has_changed_is_refused(place: str, text_file: Path, tmp_path: Path) -> None:
    """A flipped token, or starts out of order, in a file of the same size."""
    folder = prepare([text_file], tmp_path)
    PreparedCorpus.open(folder, is_read=True)
    info = json.loads((folder / "index.json").read_text())["shards"][0]
    path = folder / info["file"]
    data = bytearray(path.read_bytes())
    if place == "tokens":
        data[0] ^= 1
    else:
        shard = open_shard(folder, info, dtype_of(100))["train"]
        starts = shard.sentence_starts[:4].tobytes()
        at = data.index(starts)
        data[at + 4 : at + 12] = starts[8:12] + starts[4:8]
    path.write_bytes(data)
    PreparedCorpus.open(folder)  # what is mapped is not read
    with pytest.raises(UsageError, match=r"shard-00000\.bin is damaged.*remove it"):
        PreparedCorpus.open(folder, is_read=True)
    launch = Launch(rank=0, local_rank=0, world_size=1, is_distributed=False)
    with pytest.raises(UsageError, match=r"shard-00000\.bin is damaged"):
        _open_same(folder, PreparedCorpus.open(folder).summary.digest, launch)


@pytest.mark.parametrize("change", ["text", "words", "key"])
def test_other_text_and_options_are_prepared_anew(
    text_file: Path, tmp_path: Path, change: str
) -> None:
    """What decides the shards is in the folder's name."""
    path = tmp_path / "text.txt"
    shutil.copy(text_file, path)
    options: dict[str, object] = {"words": {"vocab_words": 99}, "key": {"jsonl_key": "x"}}.get(
        change, {}
    )
    folder = prepare([path], tmp_path)
    if change == "text":
        path.write_text(path.read_text().replace("cat", "cow"))
    assert prepare([path], tmp_path, **options) != folder


def test_another_text_is_refused_before_it_is_prepared(text_file: Path, tmp_path: Path) -> None:
    """A run that is continued names the digest of its own."""
    options = {"paths": [text_file], "vocab_size": 120, "vocab_words": 99}
    with pytest.raises(UsageError, match=r"--resume: the run was made with another text"):
        prepared.prepare_corpus(
            prepared.TextOptions(**options),  # type: ignore[arg-type]
            tmp_path / "data",
            print,
            expected="0123456789ab-120-0123456789ab",
        )
    assert not (tmp_path / "data").exists()


def test_too_few_documents_are_refused(tmp_path: Path) -> None:
    """Three documents of two sentences cannot be split; copies do not count."""
    path = tmp_path / "text.txt"
    texts = [f"a b {number}.\nc d.\n\n" for number in (1, 2, 3)]
    path.write_text("".join(texts * 3) + "only one.\n\n" * 9)
    with pytest.raises(UsageError, match="found 3 different documents of two or more sentences"):
        prepare([path], tmp_path / "data")
    assert [path.name for path in (tmp_path / "data").iterdir()] == [".lock"]


def test_sentences_without_words_are_left_out(tmp_path: Path) -> None:
    """They have no tokens; where too few documents are left, that is said."""
    path = tmp_path / "text.txt"
    texts = [f"a b {number}.\n\u200b\nc d.\n\n" for number in range(9)]
    path.write_text("".join(texts))
    corpus = PreparedCorpus.open(prepare([path], tmp_path))
    lengths = np.diff(corpus.train.shards[0].document_starts).tolist()
    assert lengths == [2] * corpus.train.num_documents
    path.write_text("".join(f"a b {number}.\n\u200b\n\n" for number in range(9)))
    with pytest.raises(UsageError, match="too few documents have two sentences with words"):
        prepare([path], tmp_path)


def test_text_that_changes_while_it_is_prepared_is_refused(
    text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another document appears between the two times that it is read."""
    path = tmp_path / "text.txt"
    shutil.copy(text_file, path)
    train = building.train_vocabulary

    def changing(texts: list[str], vocab_size: int, folder: Path) -> None:
        train(texts, vocab_size, folder)
        path.write_text(path.read_text() + "\nOne more.\n")

    monkeypatch.setattr(building, "train_vocabulary", changing)
    with pytest.raises(UsageError, match="the text changed while it was prepared; start again"):
        prepare([path], tmp_path / "data")
    assert [path.name for path in (tmp_path / "data").iterdir()] == [".lock"]


def test_as_many_files_may_be_open_as_there_are_shards(
    text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit is often 1,024, and a shard is open as long as it is mapped."""
    have_small_shards(monkeypatch)
    folder = prepare([text_file], tmp_path)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (200, before[1]))
        PreparedCorpus.open(folder)
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == 4 + 256
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
