"""Save beside training: a thread writes, and the first rank's commits.

[Note: no collective in a thread] Collectives of a thread could cross those of training. So ranks
tell each other through the process group's key-value store: each the word of its part, and the
first rank, once it has all of them, what came of it. wait() is collective, and made by the thread
that trains: it notices a rank that has died, too. If the store is gone, as after the death of
torchrun's agent, wait() collects the words.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import torch

from shardfuse.checkpoint.beside import watch
from shardfuse.checkpoint.errors import CheckpointError
from shardfuse.checkpoint.ranks import next_number
from shardfuse.checkpoint.saving import Save
from shardfuse.checkpoint.storage import Copies
from shardfuse.comm.session import PeerError, unreadable
from shardfuse.optim.base import ShardedOptimizer
from shardfuse.streams import current_stream

logger = logging.getLogger("shardfuse")

_POLL_S = 0.02


class AsyncSave:
    """A save in progress, as async_save() returns it.

    Args:
        one: what is saved, and where.
        copies: copies of what may change before it is written.
        then: called when the checkpoint is complete.
    """

    def __init__(self, one: Save, copies: Copies, then: Callable[[], None]) -> None:
        self._save, self._copies, self._then = one, copies, then
        self._ranks = one.ranks
        self._begin = _now(one.ranks.device)
        self._error: Exception | None = None
        self._written = threading.Event()
        self._word = 0
        self._is_unheard = False  # the first rank's: the store has not brought all words
        self._is_abandoned = False
        self._is_over = False
        self._topic = f"saves/{next_number(self._ranks.comm)}"
        self._thread = threading.Thread(target=self._run, name="shardfuse save", daemon=True)

    @property
    def extra_nbytes(self) -> int:
        """Largest number of bytes of copies that this rank held at once."""
        return self._copies.most_nbytes

    @property
    def is_done(self) -> bool:
        """Whether this rank has finished. Local: other ranks may be slower or faster."""
        return not self._thread.is_alive()

    def wait(self) -> None:
        """Return when the checkpoint is complete. Collective.

        Raises:
            CheckpointError: on all ranks, if any could not write.
        """
        if self._is_over:
            return
        self._is_over = True
        try:
            with self._ranks.call("checkpoint.wait()"):
                self._written.wait()
                words = self._ranks.agree(self._error, self._word)
                self._thread.join()
                if self._is_unheard:
                    self._publish(words)
                self._ranks.agree(self._error)
        finally:
            self._is_abandoned = True

    def start(self) -> None:
        """Begin to write."""
        self._thread.start()

    def before_step(self) -> bool:
        """Copy what is not written yet; raise what has gone wrong. Local.

        Returns:
            Whether there may be more to copy, or to raise.

        Raises:
            CheckpointError: this rank could not write.
        """
        self._copies.freeze()
        if not self.is_done:
            return True
        if self._error is not None and not self._is_over:
            with self._ranks.comm.session.region("step()"):
                raise CheckpointError(f"{self._save.target} is not saved: {self._error}")
        return False

    def before_load(self) -> bool:
        """Copy what is not written yet. Local; see before_step()."""
        self._copies.freeze()
        return not self._is_over

    def _run(self) -> None:
        with _beside(self._ranks.device, self._begin):
            self._word, self._error = self._save.write()
            self._copies.freeze()
        comm = self._ranks.comm
        text = "" if self._error is None else f"{type(self._error).__name__}: {self._error}"
        if comm.world_size > 1:
            comm.session.publish(self._topic, json.dumps([self._word, text]))
        self._written.set()
        if comm.rank == 0 and self._error is None:
            try:
                self._commit()
            except PeerError as error:
                self._error = error

    def _commit(self) -> None:
        """Publish once all parts are written; the first rank's."""
        words = self._await_words() if self._ranks.comm.world_size > 1 else [self._word]
        if words is None:
            self._is_unheard = True
        elif all(words):
            self._publish(words)
        else:
            self._save.clear()

    def _publish(self, words: list[int]) -> None:
        self._error = self._save.publish(words, self._then)
        if self._error is not None:
            logger.error("%s is not saved: %s", self._save.target, self._error)

    def _await_words(self) -> list[int] | None:
        """Return every rank's word; a 0 among them as soon as there is one; None: no store."""
        while not self._is_abandoned:
            texts = self._ranks.comm.session.read(self._topic)
            told = [_word_in(text, self._topic) for text in texts if text is not None]
            if len(told) == self._ranks.comm.world_size or 0 in told:
                return told
            if self._ranks.comm.session.is_store_gone:
                return None
            time.sleep(_POLL_S)
        return [0]


def _word_in(text: str, key: str) -> int:
    """Return the word of a rank from what it told."""
    with suppress(ValueError, TypeError, RecursionError):
        word, reason = json.loads(text)
        if type(word) is int and 0 <= word < 1 << 24 and isinstance(reason, str):
            return word
    raise unreadable(key, text)


def _now(device: torch.device) -> Any:
    """Return an event of what this thread has launched on an accelerator; None on the CPU."""
    stream = current_stream(device)
    return None if stream is None else stream.record_event()


@contextmanager
def _beside(device: torch.device, begin: Any) -> Iterator[None]:
    """Have this thread use ``device``, after ``begin``, and not wait for what training launches.

    A thread begins with the first device of the host, which is another rank's, and with the stream
    that training uses: torch's writer waits for it. (Not run on hardware.)
    """
    if begin is None:
        yield
        return
    module = torch.get_device_module(device)
    module.set_device(device)
    stream = module.Stream(device)
    stream.wait_event(begin)
    with module.stream(stream):
        yield


def async_save(
    state: Mapping[str, Any],
    folder: str | os.PathLike[str],
    *,
    process_group: Any = None,
    info: Mapping[str, Any] | None = None,
    then: Callable[[], None] = lambda: None,
) -> AsyncSave:
    """Save as save() does, while training continues; return at once. Collective.

    Optimizer states and this rank's part of the parameters do not change before the next step().
    So a thread copies and writes one fragment at a time, and the next step() first copies the rest.
    The extra memory is one fragment, or at most this rank's part if step() comes first
    (``extra_nbytes`` says how much it was). Everything else, such as buffers of modules, is copied
    at once. A load, by load() or load_state_dict(), first copies the rest, too. Nothing else may
    change parameters or states: call wait() before you load in another way. The thread uses a core
    for one second per GB, and the time of the disk. If ranks leave no core free, training is slower
    during that time.

    A failure is raised on all ranks, by the next step() of the rank that failed or by wait(),
    whichever comes first. Call wait() before the next save, and before the process ends.

    Args:
        state, folder, process_group, info: as for save().
        then: called in the thread of the first rank when the checkpoint is complete.

    Raises:
        CheckpointError: on all ranks, if one cannot start.
    """
    copies = Copies()
    one = Save(state, folder, process_group, info, copies)
    with one.ranks.call("checkpoint.async_save()", f"name = {one.target.name}"):
        saving = AsyncSave(one, copies, then)
    for value in state.values():
        if isinstance(value, ShardedOptimizer):
            watch(value, saving)
    saving.start()
    return saving
