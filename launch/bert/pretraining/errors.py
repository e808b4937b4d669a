"""The one exception that ends a run with a single clear line and exit code 2."""

from __future__ import annotations


class UsageError(Exception):
    """What the user asked for cannot be done; the message is one line and names the remedy."""
