"""What the command line asks of a part."""

from __future__ import annotations

import importlib
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

Row = dict[str, Any]
Item = TypeVar("Item")


@dataclass(frozen=True)
class Options:
    """Rounds (None: the part's own number), smoke-test sizes, device, and a filter of rows."""

    rounds: int | None = None
    quick: bool = False
    device: str = "cpu"
    only: tuple[str, ...] = ()

    def wants(self, name: str) -> bool:
        """Return whether a row of this name is asked for: any of ``only`` is part of it."""
        return not self.only or any(part.lower() in name.lower() for part in self.only)

    def num_rounds(self, default: int) -> int:
        """Return the launches of each row."""
        return self.rounds or (1 if self.quick else default)


def interleaved(items: Sequence[Item], rounds: int) -> Iterator[tuple[int, Item]]:
    """Yield (round, item): all items in every round, in an order shuffled anew."""
    for index in range(rounds):
        order = list(items)
        random.Random(index).shuffle(order)
        for item in order:
            yield index, item


def resolve_device(name: str) -> torch.device:
    """Return the device called ``name``.

    Raises:
        ValueError: this machine has none of its kind.
    """
    device = torch.device(name)
    if device.type != "cpu":
        if device.type == "npu":
            importlib.import_module("torch_npu")
        if not torch.get_device_module(device).is_available():
            raise ValueError(f"Invalid device: {name}. This machine has none; use --device cpu.")
    return device
