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
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from shardfuse.checkpoint.collective import (
    CheckpointGroup,
    catch,
    check_state,
    next_sequence_number,
)
from shardfuse.checkpoint.copies import DeferredCopies, HostBuffers
from shardfuse.checkpoint.index import (
    MANIFEST,
    METADATA,
    CheckpointError,
    FileRecord,
    Manifest,
    ParamMeta,
    ShardIndex,
    checksum_of,
    coverage_faults,
    file_ends,
)
from shardfuse.checkpoint.replacement import (
    commit_staging,
    prepare_staging,
    remove_checkpoint,
    resolve_link,
    staging_path,
)
from shardfuse.checkpoint.state import TrainingState
from shardfuse.checkpoint.storage import SavedEntries, ShardWriter, dcp_metadata, pickle_metadata
from shardfuse.comm.session import PeerError, unreadable
from shardfuse.files import FolderHandle, is_folder, make_folder
from shardfuse.optim.base import ShardedOptimizer
from shardfuse.runtime import paused_gc

logger = logging.getLogger("shardfuse")

_POLL_S = 0.02


class _SaveOperation:
    """One save on one rank: planned in the constructor, then written, then committed.

    Args:
        state, folder, process_group, info: as for save().
        copies: collects fragments that may change while they are written; None: nothing changes.
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
        self._staging = staging_path(self.target)
        self._info = dict(info or {})
        self._params: dict[str, list[ParamMeta]] = {}
        self._layouts: dict[str, Any] = {}
        self._rules: dict[str, str] = {}
        self._writer, self._error = catch(lambda: self._plan(state, copies))

    def _plan(self, state: Mapping[str, Any], copies: DeferredCopies | None) -> ShardWriter:
        rank = self.ranks.comm.rank
        if rank == 0:
            # Other ranks write after region() has compared the calls of all ranks, so after this.
            prepare_staging(self.target)
        objects = TrainingState(state, rank)
        for key, parts in objects.parts.items() if rank == 0 else ():  # that rank commits
            self._params[key] = [
                ParamMeta(spec.name, list(spec.shape), list(spec.stride)) for spec in parts.specs
            ]
            self._layouts[key], self._rules[key] = parts.geometry(), parts.rule
        own_keys = objects.per_rank_keys()
        return ShardWriter(self._staging, rank, objects.to_write(), copies, own_keys)

    def write(self) -> tuple[int, Exception | None]:
        """Write this rank's shard and index; return (checksum, None) or (0, error). Local."""
        if self._writer is None:
            return 0, self._error
        index, error = catch(self._writer.write)
        if index is None:
            return 0, error
        # The index has the digests of the data file, so it comes second.
        checksum, error = catch(lambda: self._write_index(index))
        return (checksum or 0), error

    def _write_index(self, index: ShardIndex) -> int:
        """Write the index file; return its checksum."""
        data = index.to_bytes()
        with make_folder(self._staging) as folder:
            folder.write_atomically(index.name, data)
        return checksum_of(data)

    def commit(self, checksums: list[int], on_complete: Callable[[], None]) -> Exception | None:
        """Commit all ranks' shards, by checksums; return an error or None. First rank only."""
        manifest = Manifest(len(checksums), [], self._info, self._params, self._layouts)
        manifest.rules = self._rules
        error = catch(lambda: _commit(self.target, checksums, manifest))[1]
        return catch(on_complete)[1] if error is None else error

    def discard(self) -> None:
        """Remove the written files, which will not be committed."""
        if is_folder(self._staging):
            remove_checkpoint(self._staging)


def save(
    state: Mapping[str, Any],
    folder: str | os.PathLike[str],
    *,
    process_group: Any = None,
    info: Mapping[str, Any] | None = None,
    then: Callable[[], None] = lambda: None,
) -> None:
    """Write a checkpoint that any number of ranks can load. Collective.

    Each rank plans and writes its own shards of optimizer states and parameters. The only
    collective is a small all-reduce, after which all ranks know that all shards are on the disk.
    Then the first rank renames the folder. Until then, and if anything fails, the previous
    checkpoint stays. ``torch.distributed.checkpoint.load()`` can read the result, too.

    Args:
        state: {key: ShardedOptimizer, module, object with state_dict(), or value}. See
            TrainingState. Values must be the same on all ranks; the first rank's are saved.
        folder: where to save; all ranks must see it. A checkpoint there is replaced. Anything else
            there is an error, and stays.
        process_group: the ranks, if there is no ShardedOptimizer in ``state``.
        info: values of JSON types, saved as Manifest.info.
        then: called on the first rank when the checkpoint is complete.

    Raises:
        CheckpointError: on all ranks, if any rank cannot write.
    """
    save_while(_nothing, state, folder, process_group=process_group, info=info, then=then)


@paused_gc()
def save_while(
    act: Callable[[], object],
    state: Mapping[str, Any],
    folder: str | os.PathLike[str],
    *,
    process_group: Any,
    info: Mapping[str, Any] | None,
    then: Callable[[], None],
) -> None:
    """Do as save(); all ranks but the first call ``act``, which waits for no rank, meanwhile.

    They have nothing else to do while the first rank reads all indices and writes the manifest. An
    exception of ``act`` does not fail the save.
    """
    operation = _SaveOperation(state, folder, process_group, info)
    comm = operation.ranks.comm
    # The name only: hosts may mount the file system at different paths.
    with operation.ranks.region("checkpoint.save()", f"name = {operation.target.name}"):
        checksum, error = operation.write()
        try:
            # After this all-reduce the files of all ranks are on the disk.
            checksums = operation.ranks.agree(error, checksum)
            if comm.rank > 0:
                catch(act)
            operation.ranks.agree(operation.commit(checksums, then) if comm.rank == 0 else None)
        except CheckpointError:
            if comm.rank == 0:
                operation.discard()
            raise


def _nothing() -> None:
    """Do nothing."""


def _commit(target: Path, checksums: list[int], manifest: Manifest) -> None:
    """Complete the manifest, and give the checkpoint its name. First rank only.

    Raises:
        CheckpointError: this rank does not see all files, or tensors are incomplete.
        OSError: a file system operation failed.
    """
    with FolderHandle(staging_path(target), follow=False) as folder:
        _write_manifest(folder, checksums, manifest)
    commit_staging(target)


def _write_manifest(folder: FolderHandle, checksums: list[int], manifest: Manifest) -> None:
    indices, files = [], manifest.files
    for rank, checksum in enumerate(checksums):
        name = ShardIndex(rank).name
        data = b""
        if folder.has_file(name):
            with folder.open(name) as file:
                data = file.read()
        if not data or checksum_of(data) != checksum:
            raise CheckpointError(
                f"rank 0 does not see in {folder.path} what rank {rank} has written there; all "
                "ranks must write to one file system."
            )
        indices.append(ShardIndex.from_bytes(data, name))
        files.append(FileRecord.of(name, data))
        _check_visible_sizes(folder, indices[-1])
    faults = coverage_faults(indices)
    if faults:
        raise CheckpointError(f"{'; '.join(faults[:5])}: ranks have saved different things.")
    manifest.tensors = {key: tensor for index in indices for key, tensor in index.tensors.items()}
    manifest.counts = {key: count for index in indices for key, count in index.counts.items()}
    paths = {key: tuple(path) for index in indices for key, path in index.paths.items()}
    saved = SavedEntries(indices)
    metadata = pickle_metadata(dcp_metadata(saved, saved.keys, paths))
    folder.write_atomically(METADATA, metadata)
    files.append(FileRecord.of(METADATA, metadata))
    # An earlier attempt, perhaps of more ranks, may have left files.
    names = {file.name for file in files}
    names |= {entry.file for index in indices for entry in index.entries}
    for name in set(folder.names()) - names:
        folder.remove(name)
    # Last: with the manifest, the staging folder counts as a complete checkpoint.
    folder.write_atomically(MANIFEST, manifest.to_bytes())


def _check_visible_sizes(folder: FolderHandle, index: ShardIndex) -> None:
    """Raise CheckpointError unless this rank sees the full data files of another rank."""
    for name, nbytes in file_ends(index.entries).items():
        found = folder.size(name) if folder.has_file(name) else 0
        if found < nbytes:
            raise CheckpointError(
                f"rank 0 sees {found:,} bytes of {nbytes:,} that rank {index.rank} has written to "
                f"{folder.path / name}; all ranks must write to one file system."
            )


class AsyncSave:
    """A save in progress, as returned by async_save().

    Args:
        operation: the save of this rank.
        copies: copies of fragments that may change before they are written.
        on_complete: called when the checkpoint is complete.
    """

    def __init__(
        self, operation: _SaveOperation, copies: DeferredCopies, on_complete: Callable[[], None]
    ) -> None:
        self._save, self._copies, self._on_complete = operation, copies, on_complete
        self._ranks = operation.ranks
        self._error: Exception | None = None
        self._written = threading.Event()
        self._checksum = 0
        self._lacks_checksums = False  # on the first rank: the store is gone, and wait() commits
        self._is_abandoned = False  # wait() has ended: the thread stops polling the store
        self._was_waited_for = False
        self._topic = f"saves/{next_sequence_number(self._ranks.comm)}"
        self._thread = threading.Thread(target=self._run, name="shardfuse save", daemon=True)

    @property
    def extra_nbytes(self) -> int:
        """Peak memory of the copies on this rank, in bytes."""
        return self._copies.peak_nbytes

    @property
    def is_done(self) -> bool:
        """Whether this rank has finished. Local: other ranks may be slower or faster."""
        return not self._thread.is_alive()

    def wait(self) -> None:
        """Wait until the checkpoint is complete. Collective.

        Raises:
            CheckpointError: on all ranks, if any rank could not write.
        """
        if self._was_waited_for:
            return
        self._was_waited_for = True
        try:
            with self._ranks.region("checkpoint.wait()"):
                self._written.wait()  # set by the thread after this rank's last write
                checksums = self._ranks.agree(self._error, self._checksum)
                self._thread.join()  # on the first rank, the thread commits before it ends
                if self._lacks_checksums:
                    self._publish(checksums)
                self._ranks.agree(self._error)
        finally:
            self._is_abandoned = True

    def start(self) -> None:
        """Start the writing thread."""
        self._thread.start()

    def before_step(self) -> bool:
        """Copy the fragments that are not written yet, and raise an error of the save. Local.

        Returns:
            Whether the save still needs this call before later steps.

        Raises:
            CheckpointError: this rank could not write.
        """
        self._copies.copy_pending()  # step() changes the tensors once this hook returns
        if not self.is_done:
            return True
        if self._error is not None and not self._was_waited_for:
            error = CheckpointError(f"{self._save.target} is not saved: {self._error}")
            self._ranks.comm.session.fail("step()", error)
        return False

    def before_load(self) -> bool:
        """Copy the fragments that are not written yet; return as before_step(). Local."""
        self._copies.copy_pending()
        return not self._was_waited_for

    def _run(self) -> None:
        with self._copies.on_own_stream():
            self._checksum, self._error = self._write()
        comm = self._ranks.comm
        text = "" if self._error is None else f"{type(self._error).__name__}: {self._error}"
        if comm.world_size > 1:
            comm.session.publish(self._topic, json.dumps([self._checksum, text]))
        self._written.set()
        if comm.rank == 0 and self._error is None:
            try:
                self._commit_when_written()
            except PeerError as error:
                self._error = error

    def _write(self) -> tuple[int, Exception | None]:
        """Write this rank's shard as _SaveOperation.write() does, from copies."""
        checksum, error = 0, None
        if self._ranks.device.type != "cpu":
            _, error = catch(self._copies.copy)
        if error is None:
            checksum, error = self._save.write()
        _, failure = catch(self._copies.close)  # waits for copies in flight
        return (checksum, error) if failure is None else (0, error or failure)

    def _commit_when_written(self) -> None:
        """Commit once all ranks have written; runs in the first rank's thread."""
        checksums = (
            self._wait_for_checksums() if self._ranks.comm.world_size > 1 else [self._checksum]
        )
        if checksums is None:
            self._lacks_checksums = True
        elif all(checksums):
            self._publish(checksums)
        else:
            self._save.discard()

    def _publish(self, checksums: list[int]) -> None:
        self._error = self._save.commit(checksums, self._on_complete)
        if self._error is not None:
            logger.error("%s is not saved: %s", self._save.target, self._error)

    def _wait_for_checksums(self) -> list[int] | None:
        """Return the checksums of all ranks, or of some if one is 0; None if the store is gone."""
        while not self._is_abandoned:
            texts = self._ranks.comm.session.read(self._topic)
            found = [_parse_checksum(text, self._topic) for text in texts if text is not None]
            if len(found) == self._ranks.comm.world_size or 0 in found:
                return found
            if self._ranks.comm.session.is_store_gone:
                return None
            time.sleep(_POLL_S)
        return [0]


def _parse_checksum(text: str, key: str) -> int:
    """Parse the entry of a rank; raise PeerError if no rank can have published it."""
    with suppress(ValueError, TypeError, RecursionError):
        checksum, reason = json.loads(text)
        if type(checksum) is int and 0 <= checksum < 1 << 24 and isinstance(reason, str):
            return checksum
    raise unreadable(key, text)


@paused_gc()
def async_save(
    state: Mapping[str, Any],
    folder: str | os.PathLike[str],
    *,
    process_group: Any = None,
    info: Mapping[str, Any] | None = None,
    then: Callable[[], None] = lambda: None,
) -> AsyncSave:
    """Save as save() does, while training continues; return at once. Collective.

    Optimizer states and this rank's shards of the parameters do not change before the next step().
    So a thread copies and writes one piece of up to 64 MiB at a time, and the next step() first
    copies the rest. The extra memory is one piece, or at most this rank's shards if step() comes
    first (``extra_nbytes`` has the peak). On an accelerator the thread copies this rank's shards at
    once, to pinned host memory that the next save uses again and that is freed with the optimizer;
    the next step() then waits on its stream, and the host does not. (Not run on hardware.)
    Everything else, such as buffers of modules, is copied before this function returns. load() and
    load_state_dict() first copy the rest, too. Nothing else may
    change parameters or states: call wait() before you load in another way. The thread uses a core
    for one second per GB, and the time of the disk. If ranks leave no core free, training is slower
    during that time.

    A failure is raised on all ranks, by the next step() of the rank that failed or by wait(),
    whichever comes first. Call wait() before the next save, and before the process ends.

    Args:
        state, folder, process_group, info: as for save().
        then: called in the first rank's thread when the checkpoint is complete.

    Raises:
        CheckpointError: on all ranks, if one cannot start.
    """
    copies = DeferredCopies()
    operation = _SaveOperation(state, folder, process_group, info, copies)
    with operation.ranks.region("checkpoint.async_save()", f"name = {operation.target.name}"):
        saving = AsyncSave(operation, copies, then)
    copies.begin(operation.ranks.device, _buffers_for(state))
    # Registered before the thread starts: a step() right after this call must find the save.
    for value in state.values():
        if isinstance(value, ShardedOptimizer):
            register_running_save(value, saving)
    saving.start()
    return saving


_host_buffers: weakref.WeakKeyDictionary[ShardedOptimizer, HostBuffers] = (
    weakref.WeakKeyDictionary()
)


def _buffers_for(state: Mapping[str, Any]) -> HostBuffers:
    """Return the host memory of the first optimizer in ``state``, which lives as long as it."""
    for value in state.values():
        if isinstance(value, ShardedOptimizer):
            return _host_buffers.setdefault(value, HostBuffers())
    return HostBuffers()


_running_saves: weakref.WeakKeyDictionary[ShardedOptimizer, list[AsyncSave]] = (
    weakref.WeakKeyDictionary()
)


def register_running_save(optimizer: ShardedOptimizer, save: AsyncSave) -> None:
    """Call ``save.before_step()`` before step() changes ``optimizer``, and likewise for loads."""
    if optimizer not in _running_saves:
        _running_saves[optimizer] = []
        # Never removed: torch iterates over its hooks, so no hook may remove itself.
        optimizer.register_step_pre_hook(_before_step)
        optimizer.register_load_state_dict_pre_hook(_before_load)
    _running_saves[optimizer].append(save)


def notify_before_load(optimizers: Sequence[ShardedOptimizer]) -> None:
    """Let running saves of ``optimizers`` copy the state that a load will overwrite. Local."""
    for optimizer in optimizers:
        _before_load(optimizer)


def _before_load(optimizer: Any, *_: Any) -> None:
    saves = _running_saves.get(optimizer, [])
    saves[:] = [save for save in saves if save.before_load()]


def _before_step(optimizer: Any, *_: Any) -> None:
    saves = _running_saves[optimizer]
    for save in tuple(saves):
        saves.remove(save)  # before it may raise: a failure is raised once
        if save.before_step():
            saves.append(save)
