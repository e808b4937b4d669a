"""Checkpoints that any number of ranks can load, with a digest of every byte."""

from shardfuse.checkpoint.folder import Checkpoints
from shardfuse.checkpoint.index import CheckpointError, DamagedCheckpoint
from shardfuse.checkpoint.loading import load
from shardfuse.checkpoint.saving import AsyncSave, async_save, save
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
