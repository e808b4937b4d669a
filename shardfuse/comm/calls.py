"""One call of a rank, and what two ranks' calls differ in. No store, no transport."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

_MAX_OPS = 100
"""Collectives of a call, the last ones, that other ranks are told of."""


@dataclass
class Call:
    """One call, as this rank makes it."""

    number: int
    name: str
    declared: tuple[tuple[str, ...], ...] = ()
    """What all ranks hold in common, in the order declared: a call may be made of several parts."""
    digest: int = 0  # of the last part
    ops: list[str] = field(default_factory=list)
    is_confirmed: bool = False
    num_confirmed: int = 0
    is_over: bool = False
    is_failed: bool = False

    def describe(self) -> dict[str, Any]:
        """Return what the other ranks are told of it."""
        return {
            "number": self.number,
            "name": self.name,
            "declared": [list(lines) for lines in self.declared],
            "ops": self.ops[-_MAX_OPS:],
            "num_ops": len(self.ops),
            "num_confirmed": self.num_confirmed,
            "is_over": self.is_over,
        }

    def declare(self, lines: Sequence[str]) -> None:
        """Add what all ranks hold in common from here on."""
        if lines:
            self.declared = (*self.declared, tuple(lines))
        self.digest = digest("\n".join((str(self.number), self.name, *lines)))
        self.is_confirmed = False

    def note(self, kind: str, numel: int, dtype: torch.dtype) -> int:
        """Count a collective; return the mark of its messages.

        Equal on two ranks only if they do the same: call, lines, number of the collective in it,
        kind, size and dtype.
        """
        name = f"{kind} of {numel} {str(dtype).removeprefix('torch.')}"
        self.ops.append(name)
        return digest(f"{self.digest} {len(self.ops)} {name}")


class Sent:
    """Reduce-scatters with a label that this rank has launched, under backward or in calls."""

    def __init__(self) -> None:
        self._last = 0, 0  # epoch, and number in it
        self._num_under_way = 0

    def _count(self, epoch: int) -> int:
        """Return how many of this epoch: in the one before, some ranks may have sent more."""
        return self._last[1] if self._last[0] == epoch else 0

    def begin(self, epoch: int) -> None:
        """Count one more."""
        self._last = epoch, self._count(epoch) + 1

    @contextmanager
    def under_way(self) -> Iterator[None]:
        """Enter this while one is launched or waited for."""
        self._num_under_way += 1
        try:
            yield
        finally:
            self._num_under_way -= 1

    def describe(self, epoch: int) -> dict[str, Any]:
        """Return what the other ranks are told of it."""
        return {"num_between": self._count(epoch), "is_sending": self._num_under_way > 0}


_KINDS = {
    "number": int,
    "name": str,
    "num_ops": int,
    "num_confirmed": int,
    "is_over": bool,
    "num_between": int,
    "is_sending": bool,
}


def calls_in(text: str) -> list[dict[str, Any]]:
    """Return what another rank has told of its calls.

    Raises:
        ValueError: no rank tells such a text.
    """
    try:
        calls = json.loads(text)
    except RecursionError as error:
        raise ValueError(str(error)) from error
    if not isinstance(calls, list) or not calls or not all(map(_is_call, calls)):
        raise ValueError("no calls")
    return calls


def _is_call(call: Any) -> bool:
    if not isinstance(call, dict):
        return False
    lists = call.get("declared"), call.get("ops")
    are_texts = all(isinstance(found, list) for found in lists) and all(
        isinstance(text, str) for found in (*(lists[0] or ()), lists[1]) for text in found or ()
    )
    return are_texts and all(isinstance(call.get(key), kind) for key, kind in _KINDS.items())


def digest(text: str) -> int:
    """Return a number of 56 bits, the same in every process."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "little")


def compare(
    rank: int, mine: list[dict[str, Any]], other: int, theirs: list[dict[str, Any]]
) -> str | None:
    """Return the first thing that two ranks do differently; None if that cannot be told yet."""
    by_number = {call["number"]: call for call in theirs}
    for call in mine:
        match = by_number.get(call["number"])
        if match is None or call["number"] == 0:
            continue
        if call["name"] != match["name"]:
            return (
                f"rank {rank} is in {call['name']}, rank {other} in {match['name']}. Every rank "
                "has to make the same calls in the same order."
            )
        # One of them may be in a later part, which says nothing of the other.
        for lines, others in zip(call["declared"], match["declared"], strict=False):
            if lines != others:
                return _first_difference(call["name"], rank, lines, other, others)
        difference = _first_other_op(call, match)
        if difference is not None:
            number, op, other_op = difference
            return (
                f"in {call['name']}, collective {number} of rank {rank} is {op}, that of rank "
                f"{other} is {other_op}. Every rank has to make the same calls in the same order."
            )
    return None


def wait_for_each_other(
    rank: int, mine: dict[str, Any], other: int, theirs: dict[str, Any]
) -> str | None:
    """Return that the other sends gradients that this rank, in a call by now, will not.

    Only the rank in the call can tell, while it waits there: what it knows of itself is new, while
    ``theirs`` may be old. In a step() that sends gradients itself, as where a rank had no backward,
    it may well come later to each of them than a rank under backward: more will follow. One that
    waits in a collective of the call has sent all that it had to send before.
    """
    is_in_call = not mine["is_over"] and len(mine["declared"]) > 0 and not mine["is_sending"]
    if not is_in_call or theirs["num_between"] <= mine["num_between"]:
        return None
    if theirs["is_over"] and theirs["number"] == mine["number"] - 1:
        return (
            f"rank {rank} is in {mine['name']} while rank {other} is under backward and has "
            "sent more gradients. Run as many backward() on every rank before each call."
        )
    done, others = (call["num_ops"] + call["num_confirmed"] for call in (mine, theirs))
    is_before = theirs["number"] == mine["number"] and others == 0 < done
    if is_before and not theirs["is_over"] and theirs["is_sending"]:
        return (
            f"rank {rank} is in {mine['name']} while rank {other} sends more gradients in it. Run "
            "as many backward() on every rank before each call, and zero_grad() at the same place."
        )
    return None


def _first_other_op(mine: dict[str, Any], theirs: dict[str, Any]) -> tuple[int, str, str] | None:
    """Return (number, mine, theirs) of the first collective of a call that is not the same."""
    ops, others = (
        dict(enumerate(call["ops"], call["num_ops"] - len(call["ops"]) + 1))
        for call in (mine, theirs)
    )
    is_over = mine["is_over"] and theirs["is_over"]
    for number in sorted(ops.keys() | others.keys() if is_over else ops.keys() & others.keys()):
        op, other = ops.get(number, "none"), others.get(number, "none")
        if op != other:
            return number, op, other
    return None


def _first_difference(
    name: str, rank: int, mine: Sequence[str], other: int, theirs: Sequence[str]
) -> str:
    """Return the first line that two ranks do not have in common."""
    only_mine = next((line for line in mine if line not in theirs), "nothing of the kind")
    only_theirs = next((line for line in theirs if line not in mine), "nothing of the kind")
    first, second = sorted([(rank, only_mine), (other, only_theirs)])
    return (
        f"the ranks disagree in {name}: rank {first[0]} has {first[1]}; rank {second[0]} has "
        f"{second[1]}. Set it alike on every rank."
    )
