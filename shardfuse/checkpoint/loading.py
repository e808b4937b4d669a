"""Load a checkpoint with any number of ranks: each rank reads its own shards, verified first.

[Note: index selection] The index file of each saving rank lists the fragments that this rank wrote.
For thousands of ranks all index files together take gigabytes. Which rank wrote which elements
follows from the layout in the manifest, which is a few integers. So each loading rank reads the
index files of the ranks whose shards overlap its own, plus every W-th of the rest, so that some
rank verifies each byte. If entries are missing then (replicas wrote the data, or a module is loaded
without its optimizer), the rank reads all index files.
"""

from __future__ import annotations

import functools
import os
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from shardfuse.checkpoint.collective import CheckpointGroup, catch, check_state
from shardfuse.checkpoint.index import (
    MANIFEST,
    METADATA,
    CheckpointError,
    CheckpointReader,
    DamagedCheckpoint,
    Manifest,
    ShardIndex,
    entry_faults,
)
from shardfuse.checkpoint.integrity import name_intact_sibling
from shardfuse.checkpoint.replacement import open_checkpoint
from shardfuse.checkpoint.saving import notify_before_load
from shardfuse.checkpoint.state import TrainingState
from shardfuse.checkpoint.storage import SavedEntries, ShardReader, dtype_from_name
from shardfuse.comm import Communicator
from shardfuse.engine.sharded_state import LocalCheckpointState
from shardfuse.runtime import paused_gc

_MAX_ATTEMPTS = 10
"""How often a checkpoint may be replaced while ranks open it."""


@paused_gc()
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

    Each rank verifies the digests of its shards and reads them. If any rank finds damage, all ranks
    raise, and nothing has changed. If another process replaces the checkpoint meanwhile, all ranks
    load the old one or all the new one. Everything in ``state`` must be in the checkpoint. The
    checkpoint may have more keys, but not more of a module or an optimizer than ``state`` has. If
    the caller's own load_state_dict() raises on a rank, all ranks raise, with models and optimizers
    already loaded.

    Args:
        state: as for save(). Objects are loaded in place, values are replaced in this dict.
        folder: the checkpoint.
        process_group: as for save().
        accept: called with the saved ``info``; raises if the checkpoint must not be loaded.
        trusted: whether values may be of any class. Unpickling them runs code from the file.
        look_beside: whether an error of damage names the newest intact checkpoint of the same run.
            To find it, all ranks verify those checkpoints, each its share.

    Raises:
        DamagedCheckpoint: files differ from the saved ones; the error names files and contents.
        CheckpointError: there is no checkpoint, or it does not fit ``state``.
    """
    check_state(state)
    source = Path(folder).absolute()
    ranks = CheckpointGroup(state, process_group, f"{source} is not loaded")
    with ranks.region("checkpoint.load()", f"name = {source.name}"):
        build = functools.partial(_LoadOperation, state=state, ranks=ranks, accept=accept)
        with _open_same_checkpoint(
            ranks, source, functools.partial(build, trusted=trusted), look_beside
        ) as operation:
            operation.finish()
            values, error = catch(operation.load_values)
        ranks.agree(error)
        state.update(values or {})
    return operation.manifest.info


@contextmanager
def _open_same_checkpoint(
    ranks: CheckpointGroup,
    target: Path,
    build: Callable[[CheckpointReader], _LoadOperation],
    look_beside: bool,
) -> Iterator[_LoadOperation]:
    """Yield this rank's verified load of the checkpoint that all ranks have opened. Collective.

    Starts over if another process has replaced or removed the checkpoint meanwhile: then the ranks
    have opened different ones, or none.

    Raises:
        CheckpointError: as for load().
    """
    for _ in range(_MAX_ATTEMPTS):
        with ExitStack() as stack:
            source, error = catch(lambda: stack.enter_context(open_checkpoint(target)))
            operation = None
            if source is not None:
                operation, error = catch(functools.partial(build, source))
            # 0 reports an error of this rank. Equal checksums: all ranks opened one checkpoint.
            checksums = ranks.gather_numbers(
                0 if operation is None else operation.manifest.checksum
            )
            if all(checksums) and len(set(checksums)) == 1:
                assert operation is not None
                yield operation
                return
            was_replaced = source is not None and source.was_replaced
            # An error counts only if no rank's checkpoint was replaced meanwhile.
            if not all(checksums) and 2 not in ranks.gather_numbers(1 + was_replaced):
                try:
                    ranks.agree(error)
                except DamagedCheckpoint as damage:
                    advice = name_intact_sibling(ranks, target) if look_beside else ""
                    raise DamagedCheckpoint(damage.faults, advice) from error
    raise CheckpointError(
        f"{target} is not loaded: another process saved in its place {_MAX_ATTEMPTS} times while "
        "it was read. Load a copy of it, or save less often."
    )


def _allocate_values(
    manifest: Manifest, state: Mapping[str, Any]
) -> dict[str, torch.Tensor] | None:
    """Return tensors for saved tensor values; None for an early manifest without shapes."""
    tensors = [(key, manifest.tensors[key]) for key in state if key in manifest.tensors]
    try:
        values = {
            key: torch.empty(tensor.shape, dtype=dtype_from_name(tensor.dtype))
            for key, tensor in tensors
        }
    except RuntimeError as error:  # no memory for it
        raise DamagedCheckpoint(
            [f"{MANIFEST} has sizes of more than there can be: {error}"]
        ) from None
    return values if manifest.tensors else None


class _LoadOperation:
    """The load on one rank. The constructor verifies and checks everything and changes nothing.

    The state is read in three parts: staged copies, which are checked first; live tensors of
    modules and optimizers, in place; and fp32 masters that are saved under another key.
    """

    def __init__(
        self,
        source: CheckpointReader,
        state: Mapping[str, Any],
        ranks: CheckpointGroup,
        accept: Callable[[Mapping[str, Any]], None],
        trusted: bool,
    ) -> None:
        comm: Communicator = ranks.comm
        self.manifest = Manifest.read(source)
        accept(self.manifest.info)
        self._objects = objects = TrainingState(state, comm.rank)
        objects.check_world_size(self.manifest.world_size, comm.world_size)
        values, counts = _allocate_values(self.manifest, state), self.manifest.counts
        self._staged = objects.staged_copies(values, counts)
        indices = self._plan(source, comm.rank, trusted)
        entries = {entry for reader in self._readers for entry in reader.entries()}
        # Verified and read by the same descriptors; see [Note: open by descriptor].
        source.keep_open(entry.file for entry in entries)
        entries |= {
            entry for index in indices for entry in index.entries if entry.key in index.counts
        }
        faults = []
        if comm.rank == 0:
            metadata = next(file for file in self.manifest.files if file.name == METADATA)
            _, damage = catch(lambda: self.manifest.read_file(source, metadata))
            faults += damage.faults if isinstance(damage, DamagedCheckpoint) else []
        faults += entry_faults(source, entries)
        if faults:
            raise DamagedCheckpoint(faults)
        # Only copies so far. Live tensors are written by finish(), once all ranks have verified.
        self._staged_reader.read()
        for key, known in objects.known_counts(counts).items():
            self._staged[key] |= known
        try:
            self._checked = objects.check(self._staged)
        except ValueError as error:
            raise CheckpointError(f"{source.path} does not fit: {error}") from error
        self._check_order(source.path)
        read = self._live_keys.union(
            objects.master_keys(), *(reader.keys for reader in self._readers)
        )
        self._check_extra(source.path, read)

    @property
    def _readers(self) -> tuple[ShardReader, ShardReader, ShardReader]:
        return self._staged_reader, self._live_reader, self._master_reader

    def _plan(self, source: CheckpointReader, rank: int, trusted: bool) -> list[ShardIndex]:
        """Plan all reads; return the indices they need. See [Note: index selection]."""
        manifest, objects = self.manifest, self._objects
        ranks = ranks_to_read(manifest.layouts, manifest.world_size, objects.parts, rank)
        may_suffice = bool(manifest.tensors) and len(ranks) < manifest.world_size
        for subset in (ranks, None) if may_suffice else (None,):
            indices = manifest.read_indices(source, subset)
            saved = SavedEntries(indices, manifest.tensors)
            self._saved = set(saved.keys)
            shapes = {key: meta.shape for key, meta in saved.tensors.items()}
            objects.set_saved_shapes(shapes)
            plan = functools.partial(ShardReader, source, saved)
            try:
                expected = objects.group_lists()
                self._staged_reader = plan(self._staged, trusted=trusted, expected=expected)
                self._live_reader = plan(objects.select_saved(objects.live_tensors(), self._saved))
                self._master_reader = plan(objects.master_reads(self._saved))
                self._live_keys = objects.check_shapes(shapes)
            except CheckpointError as error:
                if subset is None:
                    remedy = objects.advice_on_unfrozen(self._saved | {*manifest.counts})
                    raise CheckpointError(f"{error}{remedy}") from error
                continue
            if all(reader.is_complete for reader in self._readers):
                break
        return indices

    def _check_extra(self, source: Path, read: set[str]) -> None:
        """Raise CheckpointError if saved keys of a model or an optimizer would be dropped."""
        prefixes = tuple(f"{key}." for key in self._objects.complete_keys())
        extra = sorted(key for key in self._saved - read if key.startswith(prefixes))
        if extra:
            raise CheckpointError(
                f"{source} does not fit: it has {', '.join(extra[:3])}, {len(extra)} keys in all, "
                "for which there is no place here. Build the model and the optimizer that were "
                "saved; torch.distributed.checkpoint.load() loads parts of a checkpoint."
            )

    def _check_order(self, source: Path) -> None:
        """Raise CheckpointError if a param's states were saved in another order of elements."""
        for key, parts in self._objects.parts.items():
            metas = {meta.name: meta for meta in self.manifest.params.get(key, [])}
            for spec in parts.specs:
                meta = metas.get(spec.name, spec)
                if len(spec.shape) < 2:  # one order
                    continue
                order, now = (
                    [step for step, size in zip(strides, spec.shape, strict=False) if size > 1]
                    for strides in (meta.stride, spec.stride)
                )
                is_same = order == now or tuple(meta.shape) != tuple(spec.shape)
                if not is_same and self._has_states(f"{key}.state.{spec.name}"):
                    raise CheckpointError(
                        f"{source} does not fit: {spec.name} had the strides {tuple(meta.stride)} "
                        f"when it was saved, and has {tuple(spec.stride)} here. Give the model the "
                        "memory format that it had, such as by model.to(memory_format="
                        "torch.channels_last), and then build the optimizer."
                    )

    def _has_states(self, prefix: str) -> bool:
        """Return whether states of a param are saved, other than its step."""
        keys = (key.rpartition(".") for key in self._saved)
        return any(head == prefix and name != "step" for head, _, name in keys)

    def finish(self) -> None:
        """Read into modules and optimizers. Collective."""
        notify_before_load(self._objects.optimizers)  # before any live tensor is overwritten
        with torch.no_grad():
            self._live_reader.read()
            # Masters from the params just read; then those that another key has, which are exact.
            self._objects.fill_missing_masters(self._saved)
            self._master_reader.read()
            self._objects.load_optimizers(self._staged, self._checked, self.manifest.rules)

    def load_values(self) -> dict[str, Any]:
        """Load everything else; return the values that replace the caller's. Local."""
        with torch.no_grad():
            return self._objects.load_values(self._staged)


def ranks_overlapping(
    geometry: Sequence[Mapping[str, Any]],
    ranges: Iterable[tuple[str, int, int]],
    saved_by: int = 1 << 32,
) -> set[int]:
    """Return the ranks that wrote any element of ``ranges``.

    Args:
        geometry: LocalCheckpointState.geometry() of the ranks that saved.
        ranges: LocalCheckpointState.ranges() of this rank.
        saved_by: number of ranks that saved.

    Raises:
        LookupError, TypeError, ValueError, ArithmeticError: ``geometry`` has another form.
    """
    flats = {name: flat for flat in geometry for name in flat["slots"]}
    found: set[int] = set()
    for name, start, numel in ranges:
        if name not in flats:
            continue
        buckets = flats[name]["buckets"]
        at = flats[name]["slots"][name] + start
        end = at + numel
        index = bisect_right(buckets, at, key=lambda bucket: bucket[0]) - 1
        while at < end:
            first, shard_numel, num_ranks = buckets[index]
            stop = min(end, first + shard_numel * num_ranks)
            if not first <= at < stop:
                raise ValueError(f"bucket {index} does not hold element {at:,}")
            last = (stop - 1 - first) // shard_numel
            if last >= saved_by:
                raise ValueError(f"bucket {index} is of {last + 1:,} ranks, of {saved_by:,}")
            found |= set(range((at - first) // shard_numel, last + 1))
            at, index = stop, index + 1
    return found


def ranks_to_read(
    layouts: Mapping[str, Any], saved_by: int, parts: Mapping[str, LocalCheckpointState], rank: int
) -> set[int]:
    """Return the ranks that wrote the indices for this rank to read: needed, or to verify.

    The first rank's index has everything that is not sharded.
    """
    world_size = max((each.comm.world_size for each in parts.values()), default=1)
    found = {0, *range(rank, saved_by, world_size)}
    try:
        for key, each in parts.items():
            found |= ranks_overlapping(layouts.get(key, ()), each.ranges(), saved_by)
    except (LookupError, TypeError, ValueError, ArithmeticError) as error:
        raise DamagedCheckpoint(
            [f"its layouts are not as shardfuse writes them: {error}"]
        ) from None
    return found
