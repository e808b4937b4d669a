"""Another tokenizer than one that is trained: what is prepared, and what is masked."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
from pretraining.prepared import PreparedCorpus
from pretraining.samples import mask_tokens
from pretraining.vocabulary import SpecialIds, keep_tokenizer, read_vocabulary
from transformers import AutoTokenizer

from tests.launch.texts import flat_sentences, prepare


def test_a_tokenizer_s_digest_is_that_of_what_decides_its_ids(
    theirs: Callable[..., Path], tmp_path: Path
) -> None:
    """Kept with the run it has the same; another vocabulary has another."""
    folder = theirs()
    given = read_vocabulary(folder, 1000)
    keep_tokenizer(tmp_path, folder, 40)
    kept = read_vocabulary(tmp_path / "tokenizer", 1000)
    assert (kept.digest, kept.special) == (given.digest, given.special)
    assert given.special == SpecialIds(0, 8, 9, 10, 11)
    path = folder / "vocab.txt"
    path.write_text(path.read_text().replace("\nz\n", "\n##z\n"))
    assert read_vocabulary(folder, 1000).digest != given.digest


def test_a_tokenizer_that_cuts_off_does_not(theirs: Callable[..., Path]) -> None:
    """As some are saved they cut at 512 tokens, and sentences may be longer."""
    folder = theirs()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.backend_tokenizer.enable_truncation(4)
    tokenizer.backend_tokenizer.enable_padding(length=7)
    tokenizer.save_pretrained(folder)
    given = read_vocabulary(folder, 1000)
    assert len(given.tokenizer.encode("the cat " * 20, add_special_tokens=False).ids) == 40
    assert len(given.tokenizer.encode("cat", add_special_tokens=False).ids) == 1


def test_text_is_prepared_with_the_given_tokenizer(
    theirs: Callable[..., Path], text_file: Path, tmp_path: Path
) -> None:
    """Another folder than that of a trained one; special ids are the checkpoint's."""
    given = read_vocabulary(theirs(), 1000)
    folder = prepare([text_file], tmp_path / "data", given=given)
    assert folder.name.endswith(given.digest)
    corpus = PreparedCorpus.open(folder)
    assert corpus.summary.special == given.special
    assert corpus.summary.vocab_size == given.tokenizer.get_vocab_size()
    sentences = [line for line in text_file.read_text().splitlines() if line]
    encoded = [given.tokenizer.encode(text, add_special_tokens=False).ids for text in sentences]
    found = [ids for part in (corpus.train, corpus.held_out) for ids in flat_sentences(part)]
    assert sorted(found) == sorted(encoded)


def test_special_tokens_in_other_places(theirs: Callable[..., Path]) -> None:
    """They frame the pair, are never masked and never replace a token."""
    special = SpecialIds(3, 8, 9, 10, 11)
    rng = np.random.default_rng(0)
    text = [0, 1, 2, 4, 5, 6, 7, 12, 13]
    seen: set[int] = set()
    for _ in range(300):
        ids = np.array([9, *text, 8, 10, 3])
        masked = mask_tokens(ids, 14, rng, special)
        assert set(masked.labels) <= set(text)
        assert (ids[0], ids[-3], ids[-2], ids[-1]) == (9, 8, 10, 3)
        seen |= set(ids[masked.positions].tolist())
    assert seen == {*text, special.mask}
