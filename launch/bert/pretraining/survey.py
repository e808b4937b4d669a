"""The first look at a text: how much it is, what is held out, and a sample for the vocabulary."""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Sequence

from pretraining.errors import UsageError

HELD_OUT_SHARE = 0.05
MIN_DOCUMENTS = 4
"""Two held out and two to train on: a random next sentence comes from another document."""

_HASHES = 1 << 64
_CHARS_PER_WORD = 8
"""Text without spaces is taken for words of so many characters."""


def hashes_of(document: Sequence[str]) -> tuple[int, int]:
    """Return two numbers below 2**64 that depend on the text alone."""
    digest = hashlib.blake2b("\n".join(document).encode(), digest_size=16).digest()
    return int.from_bytes(digest[:8], "little"), int.from_bytes(digest[8:], "little")


def is_held_out(document: Sequence[str], cut: int) -> bool:
    """Return whether a document is held out; the same text always is, or never."""
    return len(document) >= 2 and hashes_of(document)[0] < cut


class Survey:
    """Counts documents as they go by, and keeps a sample of bounded size.

    A document is held out where its hash is below `cut`, which is a share of all hashes, and moved
    where a small text would have fewer than two documents on either side. The sample has the
    documents to train on of which a second hash is lowest, until they make up `sample_words` words.
    """

    def __init__(self, sample_words: int) -> None:
        self.num_documents = 0
        self.num_words = 0
        self._lowest: list[int] = []
        self._highest: list[int] = []
        self._sample_words = sample_words
        self._sample: list[tuple[int, int, int, str]] = []  # -second hash, words, first hash, text
        self._num_in_sample = 0

    def add(self, document: Sequence[str]) -> None:
        """Count a document."""
        text = "\n".join(document)
        num_words = len(text.split())
        self.num_documents += 1
        self.num_words += num_words
        split, priority = hashes_of(document)
        if len(document) >= 2:
            self._lowest = sorted({*self._lowest, split})[:2]
            self._highest = sorted({*self._highest, split})[-2:]
        else:
            split = _HASHES
        size = max(num_words, len(text) // _CHARS_PER_WORD)
        heapq.heappush(self._sample, (-priority, size, split, text))
        self._num_in_sample += size
        while self._num_in_sample - self._sample[0][1] >= self._sample_words:
            self._num_in_sample -= heapq.heappop(self._sample)[1]

    def cut(self) -> int:
        """Return what the hashes of held-out documents are below; raises `UsageError`."""
        num_found = len({*self._lowest, *self._highest})
        if num_found < MIN_DOCUMENTS:
            raise UsageError(
                f"--corpus: found {num_found} different documents of two or more sentences, need "
                f"at least {MIN_DOCUMENTS}; put one sentence per line and blank lines between "
                "documents"
            )
        cut = round(HELD_OUT_SHARE * _HASHES)
        return min(max(cut, self._lowest[1] + 1), self._highest[0])

    def sample(self) -> list[str]:
        """Return the sampled documents that are not held out; raises `UsageError`."""
        cut = self.cut()
        sample = [text for _, _, split, text in self._sample if split >= cut]
        if not sample:
            raise UsageError(f"--vocab-words {self._sample_words} is too few for this text")
        return sample
