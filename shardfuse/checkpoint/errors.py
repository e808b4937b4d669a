"""What can be wrong with a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read; raised on all ranks, and nothing was changed."""


class DamagedCheckpoint(CheckpointError):
    """Files of a checkpoint differ from what was written.

    Args:
        faults: what is damaged, each with its file, key and place.
        advice: what to do, such as the name of a whole checkpoint.
    """

    def __init__(self, faults: Sequence[str], advice: str = "") -> None:
        self.faults = list(faults)
        shown = "; ".join(self.faults[:_NUM_SHOWN])
        more = len(self.faults) - _NUM_SHOWN
        if more > 0:
            shown += f"; and {more} more"
        super().__init__(f"{shown.rstrip('.')}. {advice}".rstrip())


_NUM_SHOWN = 3
