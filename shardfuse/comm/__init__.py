"""Collectives on flat tensors; nothing here knows what a parameter is."""

from shardfuse.comm.base import Communicator, Handle, SingleRank
from shardfuse.comm.choice import communicator_for, communicator_over, device_for

__all__ = [
    "Communicator",
    "Handle",
    "SingleRank",
    "communicator_for",
    "communicator_over",
    "device_for",
]
