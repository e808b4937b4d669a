"""Save and load a checkpoint, every rank its part; one small all-reduce commits."""

from __future__ import annotations

import functools
import os
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from shardfuse.checkpoint.beside import will_load
from shardfuse.checkpoint.errors import CheckpointError, DamagedCheckpoint
from shardfuse.checkpoint.index import (
    MANIFEST,
    METADATA,
    File,
    Manifest,
    ParamNote,
    Part,
    coverage_faults,
    item_faults,
)
from shardfuse.checkpoint.places import ranks_needed
from shardfuse.checkpoint.ranks import Ranks, check_state, tried
from shardfuse.checkpoint.replacement import (
    opened,
    prepare,
    put_in_place,
    remove,
    resolved,
    unfinished,
)
from shardfuse.checkpoint.source import Source
from shardfuse.checkpoint.state import TrainingState
from shardfuse.checkpoint.storage import (
    Copies,
    PlannedPart,
    Reading,
    dtype_named,
    metadata_of,
    pickled,
)
from shardfuse.checkpoint.whole import whole_beside
from shardfuse.comm import Communicator
from shardfuse.files import Folder, is_folder, make_folder

_ATTEMPTS = 10
"""How often a checkpoint may be replaced while ranks open it."""


class Save:
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
        copies: Copies | None = None,
    ) -> None:
        check_state(state)
        self.target = resolved(folder)
        self.ranks = Ranks(state, process_group, f"{self.target} is not saved")
        self._unfinished = unfinished(self.target)
        self._info = dict(info or {})
        self._params: dict[str, list[ParamNote]] = {}
        self._layouts: dict[str, Any] = {}
        self._rules: dict[str, str] = {}
        self._planned, self._error = tried(lambda: self._plan(state, copies))

    def _plan(self, state: Mapping[str, Any], copies: Copies | None) -> PlannedPart:
        rank = self.ranks.comm.rank
        if rank == 0:
            prepare(self.target)  # others write when all have planned
        held = TrainingState(state, rank)
        self._params = {
            key: [ParamNote(spec.name, list(spec.shape), list(spec.stride)) for spec in parts.specs]
            for key, parts in held.parts.items()
        }
        self._layouts = {key: parts.geometry() for key, parts in held.parts.items()}
        self._rules = {key: parts.rule for key, parts in held.parts.items()}
        own = held.own_keys()
        return PlannedPart(self._unfinished, rank, held.to_write(), copies, own)

    def write(self) -> tuple[int, Exception | None]:
        """Write this rank's part; return a word for it, or what went wrong. Local."""
        if self._planned is None:
            return 0, self._error
        part, error = tried(self._planned.write)
        if part is not None:
            _, error = tried(lambda: self._write_index(part))
        return (0, error) if part is None or error is not None else (_word(part.to_bytes()), None)

    def _write_index(self, part: Part) -> None:
        with make_folder(self._unfinished) as folder:
            folder.write_whole(part.name, part.to_bytes())

    def publish(self, words: list[int], then: Callable[[], None]) -> Exception | None:
        """Make a checkpoint of all parts, by their words; return what goes wrong. Of one rank."""
        manifest = Manifest(len(words), [], self._info, self._params, self._layouts)
        manifest.rules = self._rules
        error = tried(lambda: _publish(self.target, words, manifest))[1]
        return tried(then)[1] if error is None else error

    def clear(self) -> None:
        """Remove what was written and will not be published."""
        if is_folder(self._unfinished):
            remove(self._unfinished)


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
    one = Save(state, folder, process_group, info)
    comm = one.ranks.comm
    # Not of one path: hosts may mount the file system at other places.
    with one.ranks.call("checkpoint.save()", f"name = {one.target.name}"):
        word, error = one.write()
        try:
            words = one.ranks.agree(error, word)
            one.ranks.agree(one.publish(words, then) if comm.rank == 0 else None)
        except CheckpointError:
            if comm.rank == 0:
                one.clear()
            raise


def _word(data: bytes) -> int:
    """Return a number of 1 to 2**24 - 1, the same for the same data."""
    return 1 + zlib.crc32(data) % ((1 << 24) - 1)


def _publish(target: Path, words: list[int], manifest: Manifest) -> None:
    """Make a checkpoint of what all ranks have written, with a manifest that lacks the files.

    Raises:
        CheckpointError: this rank does not see all of it, or it is not whole.
        OSError: the file system refuses.
    """
    with Folder(unfinished(target), follow=False) as folder:
        _finish(folder, words, manifest)
    put_in_place(target)


def _finish(folder: Folder, words: list[int], manifest: Manifest) -> None:
    parts, files = [], manifest.files
    for rank, word in enumerate(words):
        name = Part(rank).name
        data = b""
        if folder.has_file(name):
            with folder.open(name) as file:
                data = file.read()
        if not data or _word(data) != word:
            raise CheckpointError(
                f"rank 0 does not see in {folder.path} what rank {rank} has written there; all "
                "ranks must write to one file system."
            )
        parts.append(Part.from_bytes(data, name))
        files.append(File.of(name, data))
        _check_sizes(folder, parts[-1])
    faults = coverage_faults(parts)
    if faults:
        raise CheckpointError(f"{'; '.join(faults[:5])}: ranks have saved different things.")
    manifest.kinds = {key: kind for part in parts for key, kind in part.kinds.items()}
    manifest.counts = {key: count for part in parts for key, count in part.counts.items()}
    metadata = pickled(metadata_of(parts))
    folder.write_whole(METADATA, metadata)
    files.append(File.of(METADATA, metadata))
    # What an earlier attempt has left, which may have had more ranks.
    names = {f.name for f in files} | {i.file for p in parts for i in p.items}
    for name in set(folder.names()) - names:
        folder.remove(name)
    folder.write_whole(MANIFEST, manifest.to_bytes())


def _check_sizes(folder: Folder, part: Part) -> None:
    """Raise CheckpointError unless what a rank has written is seen here in its full length."""
    ends: dict[str, int] = {}
    for item in part.items:
        ends[item.file] = max(ends.get(item.file, 0), item.start + item.length)
    for name, nbytes in ends.items():
        found = folder.size(name) if folder.has_file(name) else 0
        if found < nbytes:
            raise CheckpointError(
                f"rank 0 sees {found:,} bytes of {nbytes:,} that rank {part.rank} has written to "
                f"{folder.path / name}; all ranks must write to one file system."
            )


def load(
    state: dict[str, Any],
    folder: str | os.PathLike[str],
    *,
    process_group: Any = None,
    accept: Callable[[Mapping[str, Any]], None] = lambda info: None,
    trusted: bool = False,
    look_beside: bool = True,
) -> dict[str, Any]:
    """Load a checkpoint of save() with any number of ranks; return its ``info``. Collective.

    Every rank checks the digests of its part, and reads it. If anything is damaged for any rank,
    all raise and nothing has changed. If another process saves in its place meanwhile, all ranks
    load the old one or all the new one. Everything in ``state`` must be in the checkpoint. The
    checkpoint may have more keys, but not more of a module or an optimizer than ``state`` has. If
    the caller's own load_state_dict() raises on a rank, all raise, with models and optimizers
    already loaded.

    Args:
        state: as for save(). Objects are loaded in place, values are replaced in this dict.
        folder: the checkpoint.
        process_group: as for save().
        accept: called with the saved ``info``; raises if the checkpoint shall not be loaded.
        trusted: whether values may be of any class. Reading such values runs code from the file.
        look_beside: whether an error of damage names the newest whole checkpoint of the same run.
            To find it, all ranks read these checkpoints, each its share.

    Raises:
        DamagedCheckpoint: files differ from what was written. It names them and their contents.
        CheckpointError: there is no checkpoint, or it does not fit ``state``.
    """
    check_state(state)
    source = Path(folder).absolute()
    ranks = Ranks(state, process_group, f"{source} is not loaded")
    with ranks.call("checkpoint.load()", f"name = {source.name}"):
        build = functools.partial(_Loading, state=state, ranks=ranks, accept=accept)
        with _verified(
            ranks, source, functools.partial(build, trusted=trusted), look_beside
        ) as read:
            read.finish()
            values, error = tried(read.take_values)
        ranks.agree(error)
        state.update(values or {})
    return read.manifest.info


@contextmanager
def _verified(
    ranks: Ranks, target: Path, build: Callable[[Source], _Loading], look_beside: bool
) -> Iterator[_Loading]:
    """Give this rank's reading of the one checkpoint that all ranks have opened. Collective.

    It begins anew where another process has replaced or removed the checkpoint meanwhile.

    Raises:
        CheckpointError: as for load().
    """
    for _ in range(_ATTEMPTS):
        with ExitStack() as stack:
            source, error = tried(lambda: stack.enter_context(opened(target)))
            read = None
            if source is not None:
                read, error = tried(functools.partial(build, source))
            words = ranks.words(0 if read is None else read.manifest.word)
            if all(words) and len(set(words)) == 1:
                assert read is not None
                yield read
                return
            has_moved = source is not None and source.has_moved
            if not all(words) and 2 not in ranks.words(1 + has_moved):
                try:
                    ranks.agree(error)
                except DamagedCheckpoint as damage:
                    advice = whole_beside(ranks, target) if look_beside else ""
                    raise DamagedCheckpoint(damage.faults, advice) from error
    raise CheckpointError(
        f"{target} is not loaded: another process saved in its place {_ATTEMPTS} times while it "
        "was read. Load a copy of it, or save less often."
    )


def _room(manifest: Manifest, state: Mapping[str, Any]) -> dict[str, torch.Tensor] | None:
    """Return tensors for values that were saved as tensors; None: an early manifest, without."""
    kinds = [(key, manifest.kinds[key]) for key in state if key in manifest.kinds]
    try:
        room = {key: torch.empty(kind.shape, dtype=dtype_named(kind.dtype)) for key, kind in kinds}
    except RuntimeError as error:  # no memory for it
        raise DamagedCheckpoint(
            [f"{MANIFEST} has sizes of more than there can be: {error}"]
        ) from None
    return room if manifest.kinds else None


class _Loading:
    """One rank's reading of a checkpoint; built, it has verified and checked all that it needs."""

    def __init__(
        self,
        source: Source,
        state: Mapping[str, Any],
        ranks: Ranks,
        accept: Callable[[Mapping[str, Any]], None],
        trusted: bool,
    ) -> None:
        comm: Communicator = ranks.comm
        self.manifest = Manifest.read(source)
        accept(self.manifest.info)
        self._held = held = TrainingState(state, comm.rank)
        held.expect(self.manifest.world_size, comm.world_size)
        self._checked = held.to_check(_room(self.manifest, state))
        self._filled = held.to_fill()
        counts = held.split_counts(self._checked, self.manifest.counts)
        parts = self._planned(source, comm.rank, trusted)
        readings = (self._first, self._rest, self._last)
        items = {item for reading in readings for item in reading.items(parts)}
        source.keep(item.file for item in items)
        items |= {item for part in parts for item in part.items if item.key in part.counts}
        faults = []
        if comm.rank == 0:
            metadata = next(file for file in self.manifest.files if file.name == METADATA)
            _, damage = tried(lambda: self.manifest.read_file(source, metadata))
            faults += damage.faults if isinstance(damage, DamagedCheckpoint) else []
        faults += item_faults(source, items)
        if faults:
            raise DamagedCheckpoint(faults)
        self._first.read()
        for key, values in counts.items():
            self._checked[key] |= values
        try:
            held.check(self._checked)
        except ValueError as error:
            raise CheckpointError(f"{source.path} does not fit: {error}") from error
        self._check_order(source.path)
        read = {f"{key}.{name}" for key, values in counts.items() for name in values}
        self._check_extra(source.path, read.union(*(reading.keys for reading in readings)))

    def _planned(self, source: Source, rank: int, trusted: bool) -> list[Part]:
        """Plan what is read; return the indices for that. See [Note: few indices]."""
        manifest, held = self.manifest, self._held
        ranks = ranks_needed(manifest.layouts, manifest.world_size, held.parts, rank)
        is_enough = bool(manifest.kinds) and len(ranks) < manifest.world_size
        for only in (ranks, None) if is_enough else (None,):
            parts = manifest.parts(source, only)
            self._saved = {item.key for part in parts for item in part.items} | {*manifest.kinds}
            plan = functools.partial(Reading, source, parts, kinds=manifest.kinds)
            try:
                self._first = plan(self._checked, trusted=trusted)
                self._rest = plan(held.to_read(self._filled, self._saved))
                self._last = plan(held.to_read_after(self._saved))
            except CheckpointError as error:
                if only is None:
                    saved = self._saved | {*manifest.counts}
                    remedy = held.without_states(self._filled, saved)
                    raise CheckpointError(f"{error}{remedy}") from error
                continue
            if all(r.is_complete for r in (self._first, self._rest, self._last)):
                break
        return parts

    def _check_extra(self, source: Path, read: set[str]) -> None:
        """Raise CheckpointError where a model or an optimizer would lose what was saved of it."""
        prefixes = tuple(f"{key}." for key in self._held.whole_keys())
        extra = sorted(key for key in self._saved - read if key.startswith(prefixes))
        if extra:
            raise CheckpointError(
                f"{source} does not fit: it has {', '.join(extra[:3])}, {len(extra)} keys in all, "
                "for which there is no place here. Build the model and the optimizer that were "
                "saved; torch.distributed.checkpoint.load() loads parts of a checkpoint."
            )

    def _check_order(self, source: Path) -> None:
        """Raise CheckpointError where states lie in another order of elements than they did."""
        with_states = {k.rpartition(".")[0] for k in self._saved if not k.endswith(".step")}
        for key, parts in self._held.parts.items():
            notes = {note.name: note for note in self.manifest.params.get(key, [])}
            for spec in parts.specs:
                note = notes.get(spec.name, spec)
                order, now = (
                    [step for step, size in zip(strides, spec.shape, strict=False) if size > 1]
                    for strides in (note.stride, spec.stride)
                )
                is_same = order == now or tuple(note.shape) != tuple(spec.shape)
                if not is_same and f"{key}.state.{spec.name}" in with_states:
                    raise CheckpointError(
                        f"{source} does not fit: {spec.name} had the strides {tuple(note.stride)} "
                        f"when it was saved, and has {tuple(spec.stride)} here. Give the model the "
                        "memory format that it had, such as by model.to(memory_format="
                        "torch.channels_last), and then build the optimizer."
                    )

    def finish(self) -> None:
        """Have modules and optimizers take over what is read. Collective."""
        will_load(self._held.optimizers)
        with torch.no_grad():
            self._rest.read()
            self._held.fill_lacking(self._saved)
            self._last.read()
            self._held.take(self._checked, self._filled, self.manifest.rules)

    def take_values(self) -> dict[str, Any]:
        """Have all else take it over; return plain values. Local."""
        with torch.no_grad():
            return self._held.take_values(self._checked)
