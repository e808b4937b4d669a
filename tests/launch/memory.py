"""How much memory processes take that no other process shares and no file backs."""

from __future__ import annotations

import contextlib
import threading
from collections import defaultdict
from pathlib import Path

MIB = 1 << 20
_INTERVAL_S = 0.05


class MemoryWatch:
    """Notes the peak of a process and of each one below it, while its context lasts.

    `peaks` has bytes by process id, `words` what it was called with.
    """

    def __init__(self, pid: int) -> None:
        self.peaks: dict[int, int] = defaultdict(int)
        self.words: dict[int, str] = {}
        self._pid = pid
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> MemoryWatch:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._is_over.set()
        self._thread.join()

    def peaks_of(self, word: str) -> list[int]:
        """Return the peaks of processes whose command line has the word."""
        return [peak for pid, peak in self.peaks.items() if word in self.words[pid]]

    def _watch(self) -> None:
        while not self._is_over.wait(_INTERVAL_S):
            for pid in descendants(self._pid):
                with contextlib.suppress(OSError):
                    words = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
                    # It has none when it ends.
                    self.words[pid] = words or self.words.get(pid, "")
                    self.peaks[pid] = max(self.peaks[pid], anonymous_nbytes(pid))


def descendants(pid: int) -> set[int]:
    """Return a process and all that it has started, and they."""
    children = defaultdict(list)
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            # Field 4, after the parenthesised name, is the parent's id.
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
            children[parent].append(int(stat.parent.name))
    found = [pid]
    for one in found:
        found += children[one]
    return set(found)


def anonymous_nbytes(pid: int | str = "self") -> int:
    """Return what a process has in memory but for pages of files, which the system can drop."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    return 0  # it has ended
