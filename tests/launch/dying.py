"""What a process that encodes is made to do instead; it imports this, so there is no torch here."""

from __future__ import annotations

import os
import signal
import time


def die(documents: object) -> None:
    """End as a process does that the system kills where memory is short."""
    os.kill(os.getpid(), signal.SIGKILL)


def hang(documents: object) -> None:
    """Be busy for longer than any test."""
    time.sleep(3600)
