"""Collectives on flat tensors; nothing here knows what a parameter is."""

from shardfuse.comm.base import Communicator, Handle, SingleRank
from shardfuse.comm.process_group import ProcessGroupCommunicator, communicator_for

__all__ = ["Communicator", "Handle", "ProcessGroupCommunicator", "SingleRank", "communicator_for"]
