"""Checks of a host and of all ranks of a launch: ``python -m shardfuse doctor``."""

from shardfuse.doctor.command import examine
from shardfuse.doctor.host import Finding

__all__ = ["Finding", "examine"]
