"""What a training job needs to be started again by the line that started it."""

from shardfuse.training.attempts import init_process_group
from shardfuse.training.job import Job
from shardfuse.training.lock import FolderInUse, FolderLock
from shardfuse.training.random_state import RandomState

__all__ = ["FolderInUse", "FolderLock", "Job", "RandomState", "init_process_group"]
