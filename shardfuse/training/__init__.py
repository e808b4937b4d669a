"""Jobs that resume when the same command starts them again, and norms of watched steps."""

from shardfuse.training.attempts import init_process_group, set_device
from shardfuse.training.job import Job, RandomState
from shardfuse.training.lock import FolderInUse, FolderLock
from shardfuse.training.monitor import StepMonitor, StepRecord, TensorNorms

__all__ = [
    "FolderInUse",
    "FolderLock",
    "Job",
    "RandomState",
    "StepMonitor",
    "StepRecord",
    "TensorNorms",
    "init_process_group",
    "set_device",
]
