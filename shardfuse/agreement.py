"""Ranks compare what they are about to do, so that a mismatch is an error and not a hang.

Only all_reduce(MAX) on int32 and all_gather are used: every backend has them, HCCL included. MAX of
a value and of its negative tells whether all ranks hold the same one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch

from shardfuse.comm import Communicator

_TEXT_NBYTES = 768
_NUM_WORDS = 8


def agree(
    comm: Communicator,
    device: torch.device,
    entries: Sequence[str],
    error: Exception | None,
    *,
    to: str = "build the optimizer",
) -> None:
    """Return if no rank has an error and all ranks hold the same entries; else raise on all ranks.

    Every rank of ``comm`` must call it. ``entries`` are short texts, each naming the object that it
    describes; the first that differs is quoted. ``error`` is what already went wrong on this rank,
    ``to`` what it failed to do.

    Raises:
        Exception: ``error``, on the ranks that have one.
        RuntimeError: another rank has an error.
        ValueError: the entries differ.
    """
    comm = comm.world
    if comm.world_size == 1:
        if error is not None:
            raise error
        return
    words = _words("\n".join(entries), _NUM_WORDS)
    failed, *extremes = _maximum(comm, device, [int(error is not None), *_both([len(entries)])])
    if failed:
        texts = gather_errors(comm, device, error)
        if error is not None:
            raise error
        others = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(texts) if text)
        raise RuntimeError(f"Another rank failed to {to}. {others}")
    num_common = -extremes[1]
    if extremes[0] == num_common and _first_difference(comm, device, words) is None:
        return
    hashes = [_words(entry, 1)[0] for entry in entries[:num_common]]
    first = _first_difference(comm, device, hashes)
    first = num_common if first is None else first
    mine = entries[first] if first < len(entries) else "nothing more"
    texts = _gather_text(comm, device, mine)
    listing = "; ".join(f"rank {rank} has {text}" for rank, text in enumerate(texts))
    raise ValueError(
        f"Ranks disagree about the optimizer, first at entry {first}: {listing}. Give every rank "
        "the same parameters, in the same order, with the same groups and options."
    )


def gather_checksums(comm: Communicator, device: torch.device, word: int) -> list[int]:
    """Return the number of every rank of ``comm``, by one all-reduce. Each is of 24 bits."""
    words = [0] * comm.world_size
    words[comm.rank] = word
    return _maximum(comm, device, words)


def gather_errors(comm: Communicator, device: torch.device, error: Exception | None) -> list[str]:
    """Return what went wrong on every rank, empty where nothing did. Collective."""
    mine = "" if error is None else f"{type(error).__name__}: {error}"
    return _gather_text(comm, device, mine)


def on_rank(comm: Communicator) -> str:
    """Return how an error that only this rank may have begins; empty where there is one rank."""
    return "" if comm.world_size == 1 else f"[rank {comm.world.rank}] "


def _both(values: list[int]) -> list[int]:
    return values + [-value for value in values]


def _words(text: str, count: int) -> list[int]:
    """Return ``count`` hash words of 24 bits, which are exact in any number format."""
    digest = hashlib.sha256(text.encode()).digest()
    return [int.from_bytes(digest[3 * i : 3 * i + 3], "little") for i in range(count)]


def _maximum(comm: Communicator, device: torch.device, values: list[int]) -> list[int]:
    tensor = torch.tensor(values, dtype=torch.int32, device=device)
    comm.all_reduce(tensor, "max").wait()
    result: list[int] = tensor.tolist()
    return result


def _first_difference(comm: Communicator, device: torch.device, values: list[int]) -> int | None:
    """Return the first index at which ranks hold different values; None if there is none."""
    extremes, count = _maximum(comm, device, _both(values)), len(values)
    return next((i for i in range(count) if extremes[i] != -extremes[count + i]), None)


def _gather_text(comm: Communicator, device: torch.device, text: str) -> list[str]:
    """Return every rank's text, cut to a fixed length."""
    raw = text.encode()[:_TEXT_NBYTES].ljust(_TEXT_NBYTES, b"\0")
    mine = torch.tensor(list(raw), dtype=torch.int32, device=device)
    everyone = torch.empty(comm.world_size * _TEXT_NBYTES, dtype=torch.int32, device=device)
    comm.all_gather(everyone, mine).wait()
    rows = everyone.reshape(comm.world_size, _TEXT_NBYTES).tolist()
    return [bytes(row).rstrip(b"\0").decode(errors="replace") for row in rows]
