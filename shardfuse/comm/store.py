"""Requests to the store of a process group, which is one process that serves all ranks."""

from __future__ import annotations

from typing import Any

_NOTHING = "?"
"""A value that no key has."""


def peek(store: Any, key: str) -> str | None:
    """Return the text of ``key``, or None, by one request that does not wait."""
    # Where there is no such key, and the expected value is not empty, it is returned.
    text = as_text(store.compare_set(key, _NOTHING, _NOTHING))
    return None if text == _NOTHING else text


def read_all(store: Any, keys: list[str]) -> list[str]:
    """Return the texts of keys that are there."""
    if store.has_extended_api():
        return [as_text(value) for value in store.multi_get(keys)]
    return [as_text(store.get(key)) for key in keys]


def write_all(store: Any, keys: list[str], texts: list[str]) -> None:
    """Write the texts, in order."""
    if store.has_extended_api():
        store.multi_set(keys, texts)
        return
    for key, text in zip(keys, texts, strict=True):
        store.set(key, text)


def as_text(value: bytes) -> str:
    """Return a value of the store as text."""
    return value.decode(errors="replace")
