"""Region: one region as a rank runs it, its description for peers, and differences of two."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

_MAX_OPS = 100
"""Collectives of a region, the last ones, that peers can read."""


@dataclass
class Region:
    """One region, as this rank runs it."""

    number: int
    name: str
    declared: tuple[tuple[str, ...], ...] = ()
    """The entries of each declare(): a region may be made of several parts."""
    digest: int = 0  # of the last part
    ops: list[str] = field(default_factory=list)
    is_verified: bool = False
    num_verified: int = 0
    is_over: bool = False
    is_failed: bool = False

    def describe(self) -> dict[str, Any]:
        """Return the description that peers can read."""
        return {
            "number": self.number,
            "name": self.name,
            "declared": [list(entries) for entries in self.declared],
            "ops": self.ops[-_MAX_OPS:],
            "num_ops": len(self.ops),
            "num_confirmed": self.num_verified,
            "is_over": self.is_over,
        }

    def declare(self, entries: Sequence[str]) -> None:
        """Add entries that must be equal on all ranks from here on."""
        if entries:
            self.declared = (*self.declared, tuple(entries))
        self.digest = digest("\n".join((str(self.number), self.name, *entries)))
        self.is_verified = False

    def note(self, kind: str, numel: int, dtype: torch.dtype) -> int:
        """Count a collective; return the digest of its messages.

        Two ranks have the same one only if region, entries, number of the collective, kind, size
        and dtype are the same.
        """
        name = f"{kind} of {numel} {str(dtype).removeprefix('torch.')}"
        self.ops.append(name)
        return digest(f"{self.digest} {len(self.ops)} {name}")


class LabelledSends:
    """Counts the labelled reduce-scatters that this rank has launched, inside regions or not."""

    def __init__(self) -> None:
        self._last = 0, 0  # generation, and number in it
        self._num_in_flight = 0

    def _count(self, generation: int) -> int:
        # In the generation before an error, some ranks may have launched more than others.
        return self._last[1] if self._last[0] == generation else 0

    def begin(self, generation: int) -> None:
        """Count one more."""
        self._last = generation, self._count(generation) + 1

    @contextmanager
    def in_flight(self) -> Iterator[None]:
        """Hold while one is being launched or waited for."""
        self._num_in_flight += 1
        try:
            yield
        finally:
            self._num_in_flight -= 1

    def describe(self, generation: int) -> dict[str, Any]:
        """Return the description that peers can read."""
        return {"num_between": self._count(generation), "is_sending": self._num_in_flight > 0}


_KINDS = {
    "number": int,
    "name": str,
    "num_ops": int,
    "num_confirmed": int,
    "is_over": bool,
    "num_between": int,
    "is_sending": bool,
}


def parse_regions(text: str) -> list[dict[str, Any]]:
    """Return the regions that a peer has published.

    Raises:
        ValueError: no rank writes such a text.
    """
    try:
        regions = json.loads(text)
    except RecursionError as error:
        raise ValueError(str(error)) from error
    if not isinstance(regions, list) or not regions or not all(map(_is_region, regions)):
        raise ValueError("no regions")
    return regions


def _is_region(region: Any) -> bool:
    if not isinstance(region, dict):
        return False
    lists = region.get("declared"), region.get("ops")
    are_texts = all(isinstance(found, list) for found in lists) and all(
        isinstance(text, str) for found in (*(lists[0] or ()), lists[1]) for text in found or ()
    )
    return are_texts and all(isinstance(region.get(key), kind) for key, kind in _KINDS.items())


def digest(text: str) -> int:
    """Return a hash of 56 bits, the same in every process."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "little")


def summary_of(regions: list[dict[str, Any]], text: str) -> str:
    """Return the number of the last of these regions, and the digest of their text."""
    return f"{regions[-1]['number']} {digest(text)}"


def number_in(summary: str | None) -> int:
    """Return the number in a summary; -1 if there is none."""
    parts = (summary or "").split(" ")
    is_whole = len(parts) == 2 and all(part.isdecimal() and len(part) < 20 for part in parts)
    return int(parts[0]) if is_whole else -1


def compare(
    rank: int, mine: list[dict[str, Any]], peer: int, theirs: list[dict[str, Any]]
) -> str | None:
    """Return the first difference between the regions of two ranks; None if none shows yet."""
    by_number = {region["number"]: region for region in theirs}
    for region in mine:
        match = by_number.get(region["number"])
        if match is None or region["number"] == 0:
            continue
        if region["name"] != match["name"]:
            return (
                f"rank {rank} is in {region['name']}, rank {peer} in {match['name']}. Every rank "
                "has to make the same calls in the same order."
            )
        # One of them may be in a later part, about which the other shows nothing.
        for entries, others in zip(region["declared"], match["declared"], strict=False):
            if entries != others:
                return _first_different_entry(region["name"], rank, entries, peer, others)
        difference = _first_different_op(region, match)
        if difference is not None:
            number, op, other_op = difference
            return (
                f"in {region['name']}, collective {number} of rank {rank} is {op}, that of rank "
                f"{peer} is {other_op}. Every rank has to make the same calls in the same order."
            )
    return None


def find_extra_backward(
    rank: int, mine: dict[str, Any], peer: int, theirs: dict[str, Any]
) -> str | None:
    """Return that the peer sends gradients that this rank, in a region by now, will not send.

    Only the rank inside the region can tell, while it waits there: its own state is current, while
    ``theirs`` may be stale. In a step() that sends gradients itself, because this rank had no
    backward, it may launch each bucket later than a peer under backward, and more will follow. A
    rank that waits in a collective of the region has sent everything that it had to send before.
    """
    is_inside = not mine["is_over"] and len(mine["declared"]) > 0 and not mine["is_sending"]
    if not is_inside or theirs["num_between"] <= mine["num_between"]:
        return None
    if theirs["is_over"] and theirs["number"] == mine["number"] - 1:
        return (
            f"rank {rank} is in {mine['name']} while rank {peer} is under backward and has "
            "sent more gradients. Run as many backward() on every rank before each call."
        )
    done, others = (region["num_ops"] + region["num_confirmed"] for region in (mine, theirs))
    is_before = theirs["number"] == mine["number"] and others == 0 < done
    if is_before and not theirs["is_over"] and theirs["is_sending"]:
        return (
            f"rank {rank} is in {mine['name']} while rank {peer} sends more gradients in it. Run "
            "as many backward() on every rank before each call, and zero_grad() at the same place."
        )
    return None


def _first_different_op(
    mine: dict[str, Any], theirs: dict[str, Any]
) -> tuple[int, str, str] | None:
    """Return (number, mine, theirs) of the first collective of a region that is not the same."""
    ops, others = (
        dict(enumerate(region["ops"], region["num_ops"] - len(region["ops"]) + 1))
        for region in (mine, theirs)
    )
    is_over = mine["is_over"] and theirs["is_over"]
    for number in sorted(ops.keys() | others.keys() if is_over else ops.keys() & others.keys()):
        op, other = ops.get(number, "none"), others.get(number, "none")
        if op != other:
            return number, op, other
    return None


def _first_different_entry(
    name: str, rank: int, mine: Sequence[str], peer: int, theirs: Sequence[str]
) -> str:
    """Return an error text with the first entry that two ranks do not have in common."""
    only_mine = next((entry for entry in mine if entry not in theirs), "nothing of the kind")
    only_theirs = next((entry for entry in theirs if entry not in mine), "nothing of the kind")
    first, second = sorted([(rank, only_mine), (peer, only_theirs)])
    return (
        f"the ranks disagree in {name}: rank {first[0]} has {first[1]}; rank {second[0]} has "
        f"{second[1]}. Set it alike on every rank."
    )
