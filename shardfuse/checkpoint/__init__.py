"""Checkpoints that any number of ranks can load, with a digest of every byte."""

from shardfuse.checkpoint.asynchronous import AsyncSave, async_save
from shardfuse.checkpoint.errors import CheckpointError, DamagedCheckpoint
from shardfuse.checkpoint.folder import Checkpoints
from shardfuse.checkpoint.saving import load, save
from shardfuse.checkpoint.state import PerRank

__all__ = [
    "AsyncSave",
    "CheckpointError",
    "Checkpoints",
    "DamagedCheckpoint",
    "PerRank",
    "async_save",
    "load",
    "save",
]
