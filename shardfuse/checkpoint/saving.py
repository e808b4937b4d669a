"""Save and load a checkpoint, every rank its part; one small all-reduce commits."""

from __future__ import annotations

import functools
import os
import re
import shutil
import zlib
from collections.abc import Callable, Mapping
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
from shardfuse.files import discard, sync, write_whole

_OF_A_CHECKPOINT = re.compile(r"\.?(part-\d+\.json|__\d+_\d+\.distcp).*")
"""Names of files that a damaged one may consist of."""


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
        self.target = Path(folder).absolute()
        self.ranks = Ranks(state, process_group, f"{self.target} is not saved")
        self._unfinished = self.target.with_name(f".{self.target.name}.unfinished")
        self._info = dict(info or {})
        self._params: dict[str, list[ParamNote]] = {}
        self._layouts: dict[str, Any] = {}
        self._rules: dict[str, str] = {}
        self._planned, self._error = tried(lambda: self._plan(state, copies))

    def _plan(self, state: Mapping[str, Any], copies: Copies | None) -> PlannedPart:
        rank = self.ranks.comm.rank
        if rank == 0:
            _check_replaceable(self.target)
        held = TrainingState(state, rank)
        self._params = {
            key: [ParamNote(spec.name, list(spec.shape), list(spec.stride)) for spec in parts.specs]
            for key, parts in held.parts.items()
        }
        self._layouts = {key: parts.geometry() for key, parts in held.parts.items()}
        self._rules = {key: parts.rule for key, parts in held.parts.items()}
        self._unfinished.mkdir(parents=True, exist_ok=True)
        own = held.own_keys()
        return PlannedPart(self._unfinished, rank, held.to_write(), copies, own)

    def write(self) -> tuple[int, Exception | None]:
        """Write this rank's part; return a word for it, or what went wrong. Local."""
        if self._planned is None:
            return 0, self._error
        part, error = tried(self._planned.write)
        if part is not None:
            _, error = tried(lambda: write_whole(self._unfinished / part.name, part.to_bytes()))
        return (0, error) if part is None or error is not None else (_word(part.to_bytes()), None)

    def publish(self, words: list[int], then: Callable[[], None]) -> Exception | None:
        """Make a checkpoint of all parts, by their words; return what goes wrong. Of one rank."""
        manifest = Manifest(len(words), [], self._info, self._params, self._layouts)
        manifest.rules = self._rules
        error = tried(lambda: _publish(self._unfinished, self.target, words, manifest))[1]
        return tried(then)[1] if error is None else error

    def clear(self) -> None:
        """Remove what was written and will not be published."""
        shutil.rmtree(self._unfinished, ignore_errors=True)


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


def _check_replaceable(target: Path) -> None:
    """Raise CheckpointError if there is something that is no checkpoint: a save would remove it."""
    if not target.is_dir():
        if target.exists():
            raise CheckpointError("it is a file; name a folder.")
        return
    names = {path.name for path in target.iterdir()}
    if names & {MANIFEST, METADATA}:
        return
    others = sorted(name for name in names if not _OF_A_CHECKPOINT.fullmatch(name))
    if others:
        more = f" and {len(others) - 1} more" if others[1:] else ""
        raise CheckpointError(
            f"the folder has {others[0]}{more}, of no checkpoint, which saving would remove; name "
            "another, such as a new one inside of it."
        )


def _word(data: bytes) -> int:
    """Return a number of 1 to 2**24 - 1, the same for the same data."""
    return 1 + zlib.crc32(data) % ((1 << 24) - 1)


def _publish(unfinished: Path, target: Path, words: list[int], manifest: Manifest) -> None:
    """Make a checkpoint of what all ranks have written, with a manifest that lacks the files.

    Raises:
        CheckpointError: this rank does not see all of it, or it is not whole.
        OSError: the file system refuses.
    """
    parts, files = [], manifest.files
    for rank, word in enumerate(words):
        path = unfinished / Part(rank).name
        data = path.read_bytes() if path.exists() else b""
        if not data or _word(data) != word:
            raise CheckpointError(
                f"rank 0 does not see in {unfinished} what rank {rank} has written there; all "
                "ranks must write to one file system."
            )
        parts.append(Part.from_bytes(data, path.name))
        files.append(File.of(path.name, data))
        _check_sizes(unfinished, parts[-1])
    faults = coverage_faults(parts)
    if faults:
        raise CheckpointError(f"{'; '.join(faults[:5])}: ranks have saved different things.")
    manifest.kinds = {key: kind for part in parts for key, kind in part.kinds.items()}
    manifest.counts = {key: count for part in parts for key, count in part.counts.items()}
    metadata = pickled(metadata_of(parts))
    write_whole(unfinished / METADATA, metadata)
    files.append(File.of(METADATA, metadata))
    _remove_others(unfinished, {f.name for f in files} | {i.file for p in parts for i in p.items})
    write_whole(unfinished / MANIFEST, manifest.to_bytes())
    discard(target)
    unfinished.rename(target)
    sync(target.parent)


def _check_sizes(unfinished: Path, part: Part) -> None:
    """Raise CheckpointError unless what a rank has written is seen here in its full length."""
    ends: dict[str, int] = {}
    for item in part.items:
        ends[item.file] = max(ends.get(item.file, 0), item.start + item.length)
    for name, nbytes in ends.items():
        path = unfinished / name
        found = path.stat().st_size if path.exists() else 0
        if found < nbytes:
            raise CheckpointError(
                f"rank 0 sees {found:,} bytes of {nbytes:,} that rank {part.rank} has written to "
                f"{path}; all ranks must write to one file system."
            )


def _remove_others(folder: Path, names: set[str]) -> None:
    """Remove what an earlier attempt has left, which may have had more ranks."""
    for path in folder.iterdir():
        if path.name not in names:
            path.unlink()


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
    all raise and nothing has changed. Everything in ``state`` must be in the checkpoint. The
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
        read, error = tried(lambda: _Loading(source, state, ranks.comm, accept, trusted))
        try:
            ranks.agree(error)
        except DamagedCheckpoint as damage:
            advice = whole_beside(ranks, source) if look_beside else ""
            raise DamagedCheckpoint(damage.faults, advice) from error
        assert read is not None
        read.finish()
        values, error = tried(read.take_values)
        ranks.agree(error)
        state.update(values or {})
    return read.manifest.info


def _room(manifest: Manifest, state: Mapping[str, Any]) -> dict[str, torch.Tensor] | None:
    """Return tensors for values that were saved as tensors; None: an early manifest, without."""
    kinds = [(key, manifest.kinds[key]) for key in state if key in manifest.kinds]
    room = {key: torch.empty(kind.shape, dtype=dtype_named(kind.dtype)) for key, kind in kinds}
    return room if manifest.kinds else None


class _Loading:
    """One rank's reading of a checkpoint; built, it has verified and checked all that it needs."""

    def __init__(
        self,
        source: Path,
        state: Mapping[str, Any],
        comm: Communicator,
        accept: Callable[[Mapping[str, Any]], None],
        trusted: bool,
    ) -> None:
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
        items |= {item for part in parts for item in part.items if item.key in part.counts}
        faults = item_faults(source, items)
        if comm.rank == 0:
            metadata = next(file for file in self.manifest.files if file.name == METADATA)
            _, damage = tried(lambda: self.manifest.read_file(source, metadata))
            faults += damage.faults if isinstance(damage, DamagedCheckpoint) else []
        if faults:
            raise DamagedCheckpoint(faults)
        self._first.read()
        for key, values in counts.items():
            self._checked[key] |= values
        try:
            held.check(self._checked)
        except ValueError as error:
            raise CheckpointError(f"{source} does not fit: {error}") from error
        self._check_order(source)
        read = {f"{key}.{name}" for key, values in counts.items() for name in values}
        self._check_extra(source, read.union(*(reading.keys for reading in readings)))

    def _planned(self, source: Path, rank: int, trusted: bool) -> list[Part]:
        """Plan what is read; return the indices for that. See [Note: few indices]."""
        manifest, held = self.manifest, self._held
        ranks = ranks_needed(manifest.layouts, manifest.world_size, held.parts, rank)
        for only in (ranks, None) if manifest.kinds else (None,):
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
