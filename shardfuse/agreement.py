"""Ranks compare their next action, so that a mismatch is an error and not a hang.

Only all_reduce(MAX) on int32 and all_gather are used: every backend has them, HCCL included. MAX of
a value and of its negative shows whether all ranks have the same value.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch

from shardfuse.comm import Communicator

_TEXT_NBYTES = 768
_NUM_CHECKSUMS = 8


def agree(
    comm: Communicator,
    device: torch.device,
    entries: Sequence[str],
    error: Exception | None,
    *,
    to: str = "build the optimizer",
) -> None:
    """Return if no rank has an error and all ranks have the same entries; else raise on all ranks.

    Every rank of ``comm`` must call it. ``entries`` are short texts, each naming the object that it
    describes; the first that differs is quoted. ``error`` is an earlier error of this rank, ``to``
    the action that it failed to do.

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
    checksums = _checksums("\n".join(entries), _NUM_CHECKSUMS)
    flags = [int(error is not None), *_with_negatives([len(entries)])]
    failed, *extremes = _maximum(comm, device, flags)
    if failed:
        texts = gather_errors(comm, device, error)
        if error is not None:
            raise error
        others = [f"{name_spans(ranks)}: {text}" for text, ranks in group_by_text(texts) if text]
        raise RuntimeError(f"Another rank failed to {to}. {'; '.join(others)}")
    num_common = -extremes[1]
    if extremes[0] == num_common and _first_difference(comm, device, checksums) is None:
        return
    hashes = [_checksums(entry, 1)[0] for entry in entries[:num_common]]
    first = _first_difference(comm, device, hashes)
    first = num_common if first is None else first
    mine = entries[first] if first < len(entries) else "nothing more"
    texts = _gather_text(comm, device, mine)
    listing = "; ".join(
        f"{name_spans(ranks)} {'has' if len(ranks) == 1 else 'have'} {text}"
        for text, ranks in group_by_text(texts)
    )
    raise ValueError(
        f"Ranks disagree about the optimizer, first at entry {first}: {listing}. Give every rank "
        "the same parameters, in the same order, with the same groups and options."
    )


def gather_checksums(comm: Communicator, device: torch.device, checksum: int) -> list[int]:
    """Return the checksum, of 24 bits, of every rank of ``comm``. One all-reduce."""
    checksums = [0] * comm.world_size
    checksums[comm.rank] = checksum
    return _maximum(comm, device, checksums)


def broadcast_numbers(
    comm: Communicator, device: torch.device, numbers: Sequence[int], count: int
) -> list[int]:
    """Return the first rank's ``count`` numbers, of 48 bits, on all ranks. One all-reduce."""
    halves = [0] * (2 * count)
    if comm.rank == 0:
        halves = [half for number in numbers for half in divmod(number, 1 << 24)]
    found = _maximum(comm, device, halves) if count else []
    return [(high << 24) + low for high, low in zip(found[::2], found[1::2], strict=True)]


def gather_errors(comm: Communicator, device: torch.device, error: Exception | None) -> list[str]:
    """Return every rank's error as text, empty without an error. Collective."""
    mine = "" if error is None else f"{type(error).__name__}: {error}"
    return _gather_text(comm, device, mine)


def name_spans(ranks: Sequence[int]) -> str:
    """Return "rank 3", or "ranks 0-12, 14" of ascending numbers: short also for a thousand."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and spans[-1][1] == rank - 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    names = ", ".join(f"{first}-{last}" if first < last else f"{first}" for first, last in spans)
    return f"rank {names}" if len(ranks) == 1 else f"ranks {names}"


def group_by_text(texts: Sequence[str]) -> list[tuple[str, list[int]]]:
    """Return each text with the ranks that have it, in the order of the first of them."""
    found: dict[str, list[int]] = {}
    for rank, text in enumerate(texts):
        found.setdefault(text, []).append(rank)
    return list(found.items())


def on_rank(comm: Communicator) -> str:
    """Return the prefix of an error that only this rank may have; empty for one rank."""
    return "" if comm.world_size == 1 else f"[rank {comm.world.rank}] "


def _with_negatives(values: list[int]) -> list[int]:
    return values + [-value for value in values]


def _checksums(text: str, count: int) -> list[int]:
    """Return ``count`` checksums of 24 bits, which are exact in any number format."""
    digest = hashlib.sha256(text.encode()).digest()
    return [int.from_bytes(digest[3 * i : 3 * i + 3], "little") for i in range(count)]


def _maximum(comm: Communicator, device: torch.device, values: list[int]) -> list[int]:
    tensor = torch.tensor(values, dtype=torch.int32, device=device)
    comm.all_reduce(tensor, "max").wait()
    result: list[int] = tensor.tolist()
    return result


def _first_difference(comm: Communicator, device: torch.device, values: list[int]) -> int | None:
    """Return the first index at which ranks have different values; None if there is none."""
    extremes, count = _maximum(comm, device, _with_negatives(values)), len(values)
    return next((i for i in range(count) if extremes[i] != -extremes[count + i]), None)


def _gather_text(comm: Communicator, device: torch.device, text: str) -> list[str]:
    """Return every rank's text, cut to a fixed length."""
    raw = text.encode()[:_TEXT_NBYTES].ljust(_TEXT_NBYTES, b"\0")
    mine = torch.tensor(list(raw), dtype=torch.int32, device=device)
    gathered = torch.empty(comm.world_size * _TEXT_NBYTES, dtype=torch.int32, device=device)
    comm.all_gather(gathered, mine).wait()
    rows = gathered.reshape(comm.world_size, _TEXT_NBYTES).tolist()
    return [bytes(row).rstrip(b"\0").decode(errors="replace") for row in rows]
