"""The one exception that ends a run with a single clear line and exit code 2."""

from __future__ import annotations


class UsageError(Exception):
    """What the user asked for cannot be done; the message is one line and names the remedy.

    Every rank raises the same, and rank 0 prints it, unless it `is_local` to the rank that met it.
    """

    def __init__(self, message: str, *, is_local: bool = False) -> None:
        super().__init__(message)
        self.is_local = is_local


_EXTRAS = {
    "bert": ("transformers", "tokenizers", "matplotlib", "tqdm"),
    "bert,deepspeed": ("deepspeed",),
}


def not_installed(error: ModuleNotFoundError) -> UsageError:
    """Return what to install; raise ``error`` again if no extra of shardfuse has it."""
    module = (error.name or "").partition(".")[0]
    for extra, modules in _EXTRAS.items():
        if module in modules:
            return UsageError(f"{module} is not installed: pip install -e '.[{extra}]'")
    raise error
