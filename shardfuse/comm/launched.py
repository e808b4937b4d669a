"""Whether a launcher has started several of this process, none of which is told of the others."""

from __future__ import annotations

import os
from collections.abc import Mapping

_COUNTS = {
    "SLURM_STEP_NUM_TASKS": "srun",  # of the step: SLURM_NTASKS is the job's, also in its script
    "OMPI_COMM_WORLD_SIZE": "mpirun",
    "PMI_SIZE": "mpiexec",
}


def launched_apart(environment: Mapping[str, str] = os.environ) -> str | None:
    """Return what has started how many, where torchrun, or what does as it does, was not between.

    That sets WORLD_SIZE, or RANK.
    """
    if "WORLD_SIZE" in environment or "RANK" in environment:
        return None
    for name, launcher in _COUNTS.items():
        text = environment.get(name, "")
        if text.isdecimal() and int(text) > 1:
            return f"{launcher} has started {text} processes ({name}), and WORLD_SIZE is not set"
    return None
