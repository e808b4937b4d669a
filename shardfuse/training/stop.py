"""After which step all ranks stop.

[Note: one step to save after] Ranks are told to stop at different moments, some never. They agree
without a collective: a rank that is told after step s leaves word, "after step s + 2", before it
begins the next. Everyone looks for it after each step, and finds it in time: whoever has finished
step s + 2 has used gradients of that rank's step s + 1 at least, which came after the word. On
accelerators a host runs ahead of its device, and waits here for the step before the last.

[Note: without a store] Word is left in the process group's store, where looking takes less time
than in a file system, and in the job's folder. torchrun's agent keeps the store, and ranks that
outlive the agent look in the folder from then on. A rank whose word only the store had could not be
sure that all have read it before the agent ended.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from shardfuse.checkpoint.ranks import Ranks, next_number
from shardfuse.comm.session import unreadable

_LEAD = 2
_PREFIX = ".stop-"


class StopTogether:
    """After which step all ranks stop; see [Note: one step to save after].

    Args:
        ranks: who stops.
        folder: that all see; None: word is only in the store.
        number: of 48 bits, the same on all ranks and of no other job in the folder.
    """

    def __init__(self, ranks: Ranks, folder: Path | None = None, number: int = 0) -> None:
        self._comm = ranks.comm
        self._topic = f"stop/{next_number(ranks.comm)}"
        self._folder = folder if ranks.comm.world_size > 1 else None
        self._prefix = f"{_PREFIX}{number:012x}-"
        self._own: int | None = None

    def is_after(self, step: int, is_asked: bool) -> bool:
        """Return whether ``step`` is the last; ``is_asked``: this rank was told to stop. Local.

        Raises:
            PeerError: what is found is no word of a rank.
        """
        if is_asked and self._own is None:
            self._own = step + _LEAD
            self._leave_word(self._own)
        ends = self._told() if self._own is None else [*self._told(), self._own]
        return any(end <= step for end in ends)

    def clear(self) -> None:
        """Remove this rank's word from the folder, once all have stopped."""
        if self._folder is not None and self._own is not None:
            with suppress(OSError):
                (self._folder / f"{self._prefix}{self._own}").unlink(missing_ok=True)

    def _leave_word(self, end: int) -> None:
        if self._folder is not None:
            with suppress(OSError):  # the store may be there, and a save tells of a full disk
                (self._folder / f"{self._prefix}{end}").touch()
        self._comm.session.publish(self._topic, str(end))

    def _told(self) -> list[int]:
        texts = self._comm.session.read(self._topic)
        told = [_number(text, self._topic) for text in texts if text is not None]
        if self._folder is not None and self._comm.session.is_store_gone:
            told += [_number(text, str(self._folder)) for text in self._words_in_folder()]
        return told

    def _words_in_folder(self) -> list[str]:
        assert self._folder is not None
        with suppress(OSError):
            names = os.listdir(self._folder)
            return [n.removeprefix(self._prefix) for n in names if n.startswith(self._prefix)]
        return []


def remove_old_words(folder: Path) -> None:
    """Remove the words of jobs that were killed before they could. For whoever has the folder."""
    for path in folder.glob(f"{_PREFIX}*"):
        with suppress(OSError):
            path.unlink()


def _number(text: str, key: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 20):
        raise unreadable(key, text)
    return int(text)
