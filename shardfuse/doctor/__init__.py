"""Whether a host, and all ranks of a launch together, can train: ``python -m shardfuse doctor``."""

from shardfuse.doctor.command import examine
from shardfuse.doctor.host import Finding

__all__ = ["Finding", "examine"]
