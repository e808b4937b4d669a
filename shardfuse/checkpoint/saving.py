"""Save a checkpoint: each rank writes its own shards, and the first rank commits.

[Note: no collective in the thread] An asynchronous save writes in a thread. Collectives of that
thread could interleave with those of training. So ranks communicate through the process group's
key-value store instead: each rank publishes the checksum of its index, and the first rank commits
once it has read all of them. wait() is collective, and the training thread calls it. It also
detects that a rank has died. If the store is gone, for example because torchrun's agent has died,
wait() gathers the checksums by an all-reduce, and the first rank commits then.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
import weakref
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

import torch

from shardfuse.checkpoint.collective import (
    CheckpointGroup,
    catch,
    check_state,
    next_sequence_number,
)
from shardfuse.checkpoint.index import (
    MANIFEST,
    METADATA,
    CheckpointError,
    FileRecord,
    Manifest,
    ParamMeta,
    ShardIndex,
    coverage_faults,
)
from shardfuse.checkpoint.replacement import (
    commit_staging,
    prepare_staging,
    remove_checkpoint,
    resolve_link,
    staging_path,
)
from shardfuse.checkpoint.state import TrainingState
from shardfuse.checkpoint.storage import DeferredCopies, ShardWriter, dcp_metadata, pickle_metadata
from shardfuse.comm.base import PeerError, unreadable
from shardfuse.files import FolderHandle, is_folder, make_folder
from shardfuse.optim.base import ShardedOptimizer
from shardfuse.streams import current_stream


class _SaveOperation:
    """One save of one rank: planned when built, then written, then committed.

    Args:
        state: as of save().
        folder: as of save().
        process_group, info: as of save().
        copies: of what may change while it is written; None: nothing does.
    """

    def __init__(
        self,
        state: Mapping[str, Any],
        folder: str | os.PathLike[str],
        process_group: Any = None,
        info: Mapping[str, Any] | None = None,
        copies: DeferredCopies | None = None,
    ) -> None:
        check_state(state)
        self.target = resolve_link(folder)
        self.ranks = CheckpointGroup(state, process_group, f"{self.target} is not saved")
        self._unfinished = staging_path(self.target)
        self._info = dict(info or {})
        self._params: dict[str, list[ParamMeta]] = {}
        self._layouts: dict[str, Any] = {}
        self._rules: dict[str, str] = {}
        self._planned, self._error = catch(lambda: self._plan(state, copies))

    def _plan(self, state: Mapping[str, Any], copies: DeferredCopies | None) -> ShardWriter:
        rank = self.ranks.comm.rank
        if rank == 0:
            prepare_staging(self.target)  # others write when all have planned
        held = TrainingState(state, rank)
        self._params = {
            key: [ParamMeta(spec.name, list(spec.shape), list(spec.stride)) for spec in parts.specs]
            for key, parts in held.parts.items()
        }
        self._layouts = {key: parts.geometry() for key, parts in held.parts.items()}
        self._rules = {key: parts.rule for key, parts in held.parts.items()}
        own = held.own_keys()
        return ShardWriter(self._unfinished, rank, held.to_write(), copies, own)

    def write(self) -> tuple[int, Exception | None]:
        """Write this rank's part; return a word for it, or what went wrong. Local."""
        if self._planned is None:
            return 0, self._error
        part, error = catch(self._planned.write)
        if part is not None:
            _, error = catch(lambda: self._write_index(part))
        return (
            (0, error) if part is None or error is not None else (_checksum(part.to_bytes()), None)
        )

    def _write_index(self, part: ShardIndex) -> None:
        with make_folder(self._unfinished) as folder:
            folder.write_atomically(part.name, part.to_bytes())

    def publish(self, checksums: list[int], then: Callable[[], None]) -> Exception | None:
        """Make a checkpoint of all parts, by their words; return what goes wrong. Of one rank."""
        manifest = Manifest(len(checksums), [], self._info, self._params, self._layouts)
        manifest.rules = self._rules
        error = catch(lambda: _commit(self.target, checksums, manifest))[1]
        return catch(then)[1] if error is None else error

    def clear(self) -> None:
        """Remove what was written and will not be published."""
        if is_folder(self._unfinished):
            remove_checkpoint(self._unfinished)


def save(
    state: Mapping[str, Any],
    folder: str | os.PathLike[str],
    *,
    process_group: Any = None,
    info: Mapping[str, Any] | None = None,
    then: Callable[[], None] = lambda: None,
) -> None:
    """Write a checkpoint that any number of ranks can load. Collective.

    Every rank plans and writes its part of optimizers and of their parameters. The only collective
    is a small all-reduce, by which all ranks learn that all parts are on the disk. Then the first
    rank renames the folder. Until then, and if anything fails, the previous checkpoint stays.
    ``torch.distributed.checkpoint.load()`` reads the result, too.

    Args:
        state: {key: ShardedOptimizer, module, object with state_dict(), or value}. See
            TrainingState. Values must be the same on all ranks: those of the first rank are saved.
        folder: where to save. All ranks must see it. A checkpoint there is replaced; anything
            else is left alone, and is an error.
        process_group: the ranks, if there is no ShardedOptimizer in ``state``.
        info: values of JSON's types, which are saved as Manifest.info.
        then: called on the first rank when the checkpoint is complete.

    Raises:
        CheckpointError: on all ranks, if any rank cannot write.
    """
    operation = _SaveOperation(state, folder, process_group, info)
    comm = operation.ranks.comm
    # Not of one path: hosts may mount the file system at other places.
    with operation.ranks.region("checkpoint.save()", f"name = {operation.target.name}"):
        checksum, error = operation.write()
        try:
            checksums = operation.ranks.agree(error, checksum)
            operation.ranks.agree(operation.publish(checksums, then) if comm.rank == 0 else None)
        except CheckpointError:
            if comm.rank == 0:
                operation.clear()
            raise


def _checksum(data: bytes) -> int:
    """Return a number of 1 to 2**24 - 1, the same for the same data."""
    return 1 + zlib.crc32(data) % ((1 << 24) - 1)


def _commit(target: Path, checksums: list[int], manifest: Manifest) -> None:
    """Make a checkpoint of what all ranks have written, with a manifest that lacks the files.

    Raises:
        CheckpointError: this rank does not see all of it, or it is not whole.
        OSError: the file system refuses.
    """
    with FolderHandle(staging_path(target), follow=False) as folder:
        _write_manifest(folder, checksums, manifest)
    commit_staging(target)


def _write_manifest(folder: FolderHandle, checksums: list[int], manifest: Manifest) -> None:
    parts, files = [], manifest.files
    for rank, checksum in enumerate(checksums):
        name = ShardIndex(rank).name
        data = b""
        if folder.has_file(name):
            with folder.open(name) as file:
                data = file.read()
        if not data or _checksum(data) != checksum:
            raise CheckpointError(
                f"rank 0 does not see in {folder.path} what rank {rank} has written there; all "
                "ranks must write to one file system."
            )
        parts.append(ShardIndex.from_bytes(data, name))
        files.append(FileRecord.of(name, data))
        _check_visible_sizes(folder, parts[-1])
    faults = coverage_faults(parts)
    if faults:
        raise CheckpointError(f"{'; '.join(faults[:5])}: ranks have saved different things.")
    manifest.tensors = {key: kind for part in parts for key, kind in part.tensors.items()}
    manifest.counts = {key: count for part in parts for key, count in part.counts.items()}
    metadata = pickle_metadata(dcp_metadata(parts))
    folder.write_atomically(METADATA, metadata)
    files.append(FileRecord.of(METADATA, metadata))
    # What an earlier attempt has left, which may have had more ranks.
    names = {f.name for f in files} | {i.file for p in parts for i in p.entries}
    for name in set(folder.names()) - names:
        folder.remove(name)
    folder.write_atomically(MANIFEST, manifest.to_bytes())


def _check_visible_sizes(folder: FolderHandle, part: ShardIndex) -> None:
    """Raise CheckpointError unless what a rank has written is seen here in its full length."""
    ends: dict[str, int] = {}
    for item in part.entries:
        ends[item.file] = max(ends.get(item.file, 0), item.start + item.length)
    for name, nbytes in ends.items():
        found = folder.size(name) if folder.has_file(name) else 0
        if found < nbytes:
            raise CheckpointError(
                f"rank 0 sees {found:,} bytes of {nbytes:,} that rank {part.rank} has written to "
                f"{folder.path / name}; all ranks must write to one file system."
            )


logger = logging.getLogger("shardfuse")

_POLL_S = 0.02


class AsyncSave:
    """A save in progress, as async_save() returns it.

    Args:
        one: what is saved, and where.
        copies: copies of what may change before it is written.
        then: called when the checkpoint is complete.
    """

    def __init__(
        self, operation: _SaveOperation, copies: DeferredCopies, then: Callable[[], None]
    ) -> None:
        self._save, self._copies, self._then = operation, copies, then
        self._ranks = operation.ranks
        self._begin = _record_event(operation.ranks.device)
        self._error: Exception | None = None
        self._written = threading.Event()
        self._checksum = 0
        self._lacks_checksums = False  # the first rank's: the store has not brought all words
        self._is_abandoned = False
        self._is_over = False
        self._topic = f"saves/{next_sequence_number(self._ranks.comm)}"
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
            with self._ranks.region("checkpoint.wait()"):
                self._written.wait()
                checksums = self._ranks.agree(self._error, self._checksum)
                self._thread.join()
                if self._lacks_checksums:
                    self._publish(checksums)
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
            with self._ranks.comm.call("step()"):
                raise CheckpointError(f"{self._save.target} is not saved: {self._error}")
        return False

    def before_load(self) -> bool:
        """Copy what is not written yet. Local; see before_step()."""
        self._copies.freeze()
        return not self._is_over

    def _run(self) -> None:
        with _on_device_after(self._ranks.device, self._begin):
            self._checksum, self._error = self._save.write()
            self._copies.freeze()
        comm = self._ranks.comm
        text = "" if self._error is None else f"{type(self._error).__name__}: {self._error}"
        if comm.world_size > 1:
            comm.tell(self._topic, json.dumps([self._checksum, text]))
        self._written.set()
        if comm.rank == 0 and self._error is None:
            try:
                self._commit()
            except PeerError as error:
                self._error = error

    def _commit(self) -> None:
        """Publish once all parts are written; the first rank's."""
        checksums = (
            self._wait_for_checksums() if self._ranks.comm.world_size > 1 else [self._checksum]
        )
        if checksums is None:
            self._lacks_checksums = True
        elif all(checksums):
            self._publish(checksums)
        else:
            self._save.clear()

    def _publish(self, checksums: list[int]) -> None:
        self._error = self._save.publish(checksums, self._then)
        if self._error is not None:
            logger.error("%s is not saved: %s", self._save.target, self._error)

    def _wait_for_checksums(self) -> list[int] | None:
        """Return every rank's word; a 0 among them as soon as there is one; None: no store."""
        while not self._is_abandoned:
            texts = self._ranks.comm.told(self._topic)
            told = [_parse_checksum(text, self._topic) for text in texts if text is not None]
            if len(told) == self._ranks.comm.world_size or 0 in told:
                return told
            if self._ranks.comm.is_store_gone:
                return None
            time.sleep(_POLL_S)
        return [0]


def _parse_checksum(text: str, key: str) -> int:
    """Return the word of a rank from what it told."""
    with suppress(ValueError, TypeError, RecursionError):
        checksum, reason = json.loads(text)
        if type(checksum) is int and 0 <= checksum < 1 << 24 and isinstance(reason, str):
            return checksum
    raise unreadable(key, text)


def _record_event(device: torch.device) -> Any:
    """Return an event of what this thread has launched on an accelerator; None on the CPU."""
    stream = current_stream(device)
    return None if stream is None else stream.record_event()


@contextmanager
def _on_device_after(device: torch.device, begin: Any) -> Iterator[None]:
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
    copies = DeferredCopies()
    operation = _SaveOperation(state, folder, process_group, info, copies)
    with operation.ranks.region("checkpoint.async_save()", f"name = {operation.target.name}"):
        saving = AsyncSave(operation, copies, then)
    for value in state.values():
        if isinstance(value, ShardedOptimizer):
            register_running_save(value, saving)
    saving.start()
    return saving


class RunningSave(Protocol):
    """A save that is not over."""

    def before_step(self) -> bool:
        """Copy what is left; return whether to be told again, or raise what has gone wrong."""

    def before_load(self) -> bool:
        """Copy what is left; return whether to be told again."""


_running_saves: weakref.WeakKeyDictionary[ShardedOptimizer, list[RunningSave]] = (
    weakref.WeakKeyDictionary()
)


def register_running_save(optimizer: ShardedOptimizer, save: RunningSave) -> None:
    """Have ``save`` told before step() or a load changes ``optimizer``."""
    if optimizer not in _running_saves:
        _running_saves[optimizer] = []
        # For good: torch iterates over these hooks, so that none may remove itself.
        optimizer.register_step_pre_hook(_before_step)
        optimizer.register_load_state_dict_pre_hook(_before_load)
    _running_saves[optimizer].append(save)


def notify_before_load(optimizers: Sequence[ShardedOptimizer]) -> None:
    """Tell the saves of ``optimizers`` that these are to be loaded. Local."""
    for optimizer in optimizers:
        _before_load(optimizer)


def _before_load(optimizer: Any, *_: Any) -> None:
    saves = _running_saves.get(optimizer, [])
    saves[:] = [save for save in saves if save.before_load()]


def _before_step(optimizer: Any, *_: Any) -> None:
    saves = _running_saves[optimizer]
    for save in tuple(saves):
        saves.remove(save)  # before it raises: it does so once
        if save.before_step():
            saves.append(save)
