"""Collectives on flat tensors, and regions of all ranks; nothing here knows a parameter."""

from shardfuse.comm.select import (
    communicator_for,
    communicator_of,
    communicator_over,
    device_for,
)
from shardfuse.comm.transport import Communicator, Completion, SingleRank

__all__ = [
    "Communicator",
    "Completion",
    "SingleRank",
    "communicator_for",
    "communicator_of",
    "communicator_over",
    "device_for",
]
