"""One rank's shards in the format of torch.distributed.checkpoint (DCP), planned by it alone.

[Note: no planning collective] DCP's own planners gather the plans of all ranks, to remove
duplicates and to learn where everything is. Here there are no duplicates by construction:
fragments do not overlap, and the first rank writes everything that is equal on all ranks. So each
rank plans alone, by the same SavePlanner and StorageWriter, and lists its entries in an index
file of its own. DCP plans a load alone, too, once the metadata is known.
"""

from __future__ import annotations

import copy
import copyreg
import io
import itertools
import os
import pickle
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO

import torch
from torch import Tensor
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import (
    FileSystem,
    FileSystemReader,
    _item_size,
    _OverlappingCpuLoader,
    _SerialCpuLoader,
    _StorageInfo,
)
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, WriteItemType

from shardfuse.checkpoint.archives import SMALL_NBYTES, read_small, write_small
from shardfuse.checkpoint.copies import DeferredCopies
from shardfuse.checkpoint.index import (
    CheckpointError,
    CheckpointReader,
    DamagedCheckpoint,
    IndexEntry,
    ShardIndex,
    TensorMeta,
    are_same_elements,
)
from shardfuse.files import FolderHandle, digests_in, make_folder
from shardfuse.fragments import FragmentTensor


def dtype_from_name(name: str) -> torch.dtype:
    """Return the dtype of that name, without "torch."."""
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype), name
    return dtype


class _OpenCheckpoint(FileSystem):
    """Opens files for DCP's reader in an open checkpoint."""

    def __init__(self, source: CheckpointReader) -> None:
        self._source = source

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        with self._source.open(Path(path).name) as file:
            yield file


class _SavePlanner(DefaultSavePlanner):
    """Plans the writes of this rank, without its peers; see [Note: no planning collective]."""

    def __init__(self, rank: int, copies: DeferredCopies | None, own: Iterable[str]) -> None:
        super().__init__()
        self._rank = rank
        self._own = tuple(f"{key}." for key in own)
        self._copies = copies
        self._by_memory: dict[Any, MetadataIndex] = {}
        self._canonical: dict[MetadataIndex, MetadataIndex] = {}

    def set_up_planner(self, state_dict: Any, *args: Any, **kwargs: Any) -> None:
        super().set_up_planner(state_dict, *args, **kwargs)
        for key, value in self.state_dict.items():
            # DTensor and ShardedTensor.
            if hasattr(value, "placements") or hasattr(value, "local_shards"):
                raise CheckpointError(
                    f"{key} is a {type(value).__name__}, and no rank knows which part of it others "
                    "hold. Save it with torch.distributed.checkpoint.save()."
                )
        if self._rank > 0:
            items = self.state_dict.items()
            self.state_dict = {
                k: v for k, v in items if isinstance(v, FragmentTensor) or k.startswith(self._own)
            }
        memo: dict[int, Any] = {}  # tied tensors stay tied
        for key, value in self.state_dict.items() if self._copies is not None else ():
            if not isinstance(value, FragmentTensor):
                self.state_dict[key] = copy.deepcopy(value, memo)

    def create_local_plan(self) -> Any:
        plan = super().create_local_plan()
        for item in plan.items:
            live = self.lookup_object(item.index)
            if not isinstance(live, Tensor):
                continue
            memory = (live.data_ptr(), live.device, live.dtype, live.shape, live.stride())
            first = self._by_memory.setdefault(memory, item.index) if live.numel() else item.index
            self._canonical[item.index] = first
            is_fragment = isinstance(self.state_dict[item.index.fqn], FragmentTensor)
            if self._copies is not None and is_fragment and first == item.index:
                self._copies.add(item.index, live)
        return plan

    def canonical_index(self, item: Any) -> MetadataIndex:
        """Return the first item with the same memory: tied parameters are written once."""
        index: MetadataIndex = item.index
        return self._canonical.get(index, index)

    def is_canonical(self, item: Any) -> bool:
        """Return whether ``item`` is the one that is written."""
        return bool(self.canonical_index(item) == item.index)

    def resolve_data(self, write_item: Any) -> Any:
        is_fragment = isinstance(self.state_dict[write_item.index.fqn], FragmentTensor)
        if self._copies is not None and is_fragment:
            return self._copies.take(write_item.index)
        return super().resolve_data(write_item)


def _write_items(
    folder: FolderHandle, name: str, items: Sequence[Any], planner: _SavePlanner
) -> dict[MetadataIndex, _StorageInfo]:
    """Write a file of a plan's items as torch's FileSystemWriter does; return their places.

    Raises:
        OSError: the file system has failed.
    """
    is_bytes = [item for item in items if item.type == WriteItemType.BYTE_IO]
    loader = _loader(planner)
    for item in items:
        if item.type != WriteItemType.BYTE_IO:
            loader.add(_item_size(item), item)
    loader.start_loading()
    found = {}
    with folder.create(name) as file:
        values = itertools.chain(
            ((planner.resolve_data(item), item) for item in is_bytes), loader.values()
        )
        for value, item in values:
            start = file.tell()
            _write_value(file, value)
            found[item.index] = _StorageInfo(name, start, file.tell() - start)
        file.flush()
        os.fsync(file.fileno())
    return found


def _loader(planner: _SavePlanner) -> Any:
    """Return the reader that copies tensors to the CPU, on an accelerator ahead of the writes."""
    if torch.accelerator.is_available():
        return _OverlappingCpuLoader(planner.resolve_data, inflight_threshhold=10_000_000)
    return _SerialCpuLoader(planner.resolve_data)


def _write_value(file: BinaryIO, value: io.BytesIO | Tensor) -> None:
    if isinstance(value, io.BytesIO):
        file.write(value.getbuffer())
        return
    archive = write_small(value)
    if archive is not None:
        file.write(archive)
        return
    try:
        torch.save(value, file)
    except RuntimeError as error:
        # torch's zip writer reports only an unexpected file position; the cause is its context.
        if isinstance(error.__context__, OSError):
            raise error.__context__ from None
        raise


class ShardWriter:
    """Plans (in the constructor) and writes this rank's entries of a nested ``state``.

    Args:
        folder: created when the file is written.
        rank: part of the file name.
        state: nested dicts of live values.
        copies: collects copies of fragments. With it, write() may run while training continues, and
            the constructor copies everything else. None: write() reads the live tensors.
        own: keys of values that each rank writes although they are no fragments.

    Raises:
        CheckpointError: a value cannot be saved.
    """

    def __init__(
        self,
        folder: Path,
        rank: int,
        state: Mapping[str, Any],
        copies: DeferredCopies | None = None,
        own: Iterable[str] = (),
    ) -> None:
        self._folder, self._rank = folder, rank
        self._planner = _SavePlanner(rank, copies, own)
        self._planner.set_up_planner(dict(state), None, rank == 0)
        self._items = self._planner.create_local_plan().items
        values = self._planner.state_dict
        self._counts = {
            key: int(value.pieces[0].data)
            for key, value in values.items()
            if isinstance(value, FragmentTensor) and value.dtype == torch.int64
            if not value.dim() and value.pieces
        }

    def write(self) -> ShardIndex:
        """Write the file and return its index; raise OSError if the file system fails."""
        with make_folder(self._folder) as folder:
            return self._write(folder)

    def _write(self, folder: FolderHandle) -> ShardIndex:
        canonical = [item for item in self._items if self._planner.is_canonical(item)]
        locations = _write_items(folder, f"__{self._rank}_0.distcp", canonical, self._planner)
        own_keys = {item.index.fqn for item in self._items}
        paths: dict[str, Any] = {
            key: list(path) for key, path in self._planner.mappings.items() if key in own_keys
        }
        shard_index = ShardIndex(self._rank, paths=paths, counts=self._counts)
        for planned in self._items:
            data, key = planned.tensor_data, planned.index.fqn
            info = locations[self._planner.canonical_index(planned)]
            offsets: tuple[int, ...] | None = None
            sizes: tuple[int, ...] = ()
            if data is not None:
                offsets, sizes = tuple(data.chunk.offsets), tuple(data.chunk.sizes)
                dtype = str(data.properties.dtype).removeprefix("torch.")
                shard_index.tensors[key] = TensorMeta(dtype, tuple(data.size))
            entry = IndexEntry(
                key, offsets, sizes, info.relative_path, info.offset, info.length, ""
            )
            shard_index.entries.append(entry)
        shard_index.entries.sort(key=lambda entry: entry.start)
        shard_index.entries = _with_digests(folder, shard_index.entries)
        return shard_index


def _with_digests(folder: FolderHandle, entries: list[IndexEntry]) -> list[IndexEntry]:
    """Return the entries of one file with the digests of their written bytes."""
    if not entries:
        return []
    ranges = [(entry.start, entry.length) for entry in entries]
    with folder.open(entries[0].file) as file:
        digests = list(digests_in(file, ranges))
    return [entry._replace(digest=found) for entry, found in zip(entries, digests, strict=True)]


class SavedEntries:
    """The entries of several ranks' indices, by key.

    Args:
        indices: indices of the ranks.
        others: tensors of which other ranks may have fragments.
    """

    def __init__(
        self, indices: Iterable[ShardIndex], others: Mapping[str, TensorMeta] | None = None
    ) -> None:
        self.tensors: dict[str, TensorMeta] = dict(others or {})
        self.by_key: dict[str, list[IndexEntry]] = {}
        for index in indices:
            for key, tensor in index.tensors.items():
                self.tensors.setdefault(key, tensor)
            for entry in index.entries:
                self.by_key.setdefault(entry.key, []).append(entry)

    @property
    def keys(self) -> list[str]:
        """All keys, with or without entries."""
        return list(dict.fromkeys([*self.tensors, *self.by_key]))


def dcp_metadata(saved: SavedEntries, keys: Iterable[str], paths: Mapping[str, Any]) -> Metadata:
    """Return the contents of ``.metadata`` for torch.distributed.checkpoint.

    Args:
        saved: entries of the ranks.
        keys: those to include, if they are among ``saved``.
        paths: {key: place in the nested state}.
    """
    tensors: dict[str, Any] = {}
    storage: dict[MetadataIndex, Any] = {}
    # Equal objects are one object: pickle then writes it once.
    size, name = cache(torch.Size), cache(str)
    chunk = cache(lambda offsets, sizes: ChunkStorageMetadata(size(offsets), size(sizes)))
    properties = cache(lambda dtype: TensorProperties(dtype=dtype_from_name(dtype)))
    for key in keys:
        tensor = saved.tensors.get(key)
        if tensor is not None:
            tensors[key] = TensorStorageMetadata(properties(tensor.dtype), size(tensor.shape), [])
        for entry in saved.by_key.get(key, ()):
            if entry.offsets is None:
                index = MetadataIndex(key)
                tensors[key] = BytesStorageMetadata()
            else:
                index = MetadataIndex(key, size(entry.offsets))
                tensors[key].chunks.append(chunk(entry.offsets, entry.sizes))
            storage[index] = _StorageInfo(name(entry.file), entry.start, entry.length)
    metadata = Metadata(tensors, planner_data=paths, storage_data=storage)
    if hasattr(metadata, "version"):  # not in torch 2.7
        metadata.version = "1.0.0"
    return metadata


class _MetadataPickler(pickle.Pickler):
    """Pickles places and tensors as calls of their classes, in half of the default's time."""

    dispatch_table = copyreg.dispatch_table | {
        MetadataIndex: lambda at: (MetadataIndex, (at.fqn, at.offset, at.index)),
        _StorageInfo: lambda at: (_StorageInfo, (at.relative_path, at.offset, at.length)),
        TensorStorageMetadata: lambda it: (
            TensorStorageMetadata,
            (it.properties, it.size, it.chunks),
        ),
    }


def pickle_metadata(metadata: Metadata) -> bytes:
    """Return the bytes of ``.metadata``."""
    file = io.BytesIO()
    _MetadataPickler(file).dump(metadata)
    return file.getvalue()


class _LoadPlanner(DefaultLoadPlanner):
    """Refuses values that are not plain data, unless the file is trusted.

    Args:
        trusted: as for load().
        expected: lists of numbers and texts that the file may have, by key.
    """

    def __init__(self, trusted: bool, expected: Mapping[str, list[Any]]) -> None:
        super().__init__()
        self._trusted, self._expected = trusted, expected

    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        expected = self._expected.get(read_item.dest_index.fqn)
        is_safe = self._trusted or (expected is not None and _is_saved_as(expected, value))
        # Without code of Python's for each number or text, as of thousands of names.
        if not is_safe:
            try:
                torch.load(value, weights_only=True)
            except pickle.UnpicklingError:
                value.seek(0)
                found = torch.serialization.get_unsafe_globals_in_checkpoint(value)
                raise CheckpointError(
                    f"{read_item.storage_index.fqn} is more than plain data, it has "
                    f"{', '.join(sorted(found))}: loading it may run code from the file. If you "
                    "trust the author of the file, load with trusted=True."
                ) from None
            value.seek(0)
        super().load_bytes(read_item, value)


def _is_saved_as(value: list[Any], saved: io.BytesIO) -> bool:
    """Return whether ``saved`` is what torch.save() writes of a list of numbers and texts."""
    if not {int, str}.issuperset(map(type, value)):
        return False
    file = io.BytesIO()
    torch.save(value, file)
    return file.getbuffer() == saved.getbuffer()


class _FileSystemReader(FileSystemReader):
    """Reads small tensors without torch.load(); see [Note: small archives].

    Args:
        source: the checkpoint.
        metadata: of the checkpoint that is read.
    """

    def __init__(self, source: CheckpointReader, metadata: Metadata) -> None:
        super().__init__(source.path)
        self.fs = _OpenCheckpoint(source)
        self._source, self._metadata = source, metadata
        self.set_up_storage_reader(metadata, True)

    def read_data(self, plan: Any, planner: Any) -> Any:
        by_file: dict[str, list[Any]] = {}
        others: list[Any] = []
        for item in plan.items:
            place = self.storage_data[item.storage_index]
            is_small = item.type == LoadItemType.TENSOR and place.length < 2 * SMALL_NBYTES
            (by_file.setdefault(place.relative_path, []) if is_small else others).append(item)
        for name, items in by_file.items():
            with self._source.open(name) as file:
                others += [item for item in items if not self._read_small(file, item, planner)]
        return super().read_data(replace(plan, items=others), planner)

    def _read_small(self, file: BinaryIO, item: Any, planner: Any) -> bool:
        """Read a tensor; return False if torch.load() must."""
        stored, place = item.storage_index, self.storage_data[item.storage_index]
        tensor: Any = self._metadata.state_dict_metadata[stored.fqn]
        file.seek(place.offset)
        sizes = tuple(tensor.chunks[stored.index].sizes)
        values = read_small(file.read(place.length), tensor.properties.dtype, sizes)
        if values is None:
            return False
        part = narrow_tensor_by_index(values, item.storage_offsets, item.lengths)
        planner.resolve_tensor(item).detach().copy_(part)
        return True


class ShardReader:
    """Plans (in the constructor) and reads this rank's entries of a checkpoint into ``state``.

    Args:
        source: the checkpoint.
        saved: its entries, or those of some ranks.
        state: filled in place by read(): tensors are overwritten, other values replaced.
        trusted: whether values may be of any class, which runs code from the file.
        expected: lists of numbers and texts that the file may have, by key: to load them sooner.

    Raises:
        CheckpointError: the checkpoint lacks a key of ``state``, or has it in another shape.
    """

    keys: set[str]
    """Keys that are read."""

    def __init__(
        self,
        source: CheckpointReader,
        saved: SavedEntries,
        state: dict[str, Any],
        *,
        trusted: bool = False,
        expected: Mapping[str, list[Any]] = MappingProxyType({}),
    ) -> None:
        self._source, self._saved = source, saved
        self._planner = _LoadPlanner(trusted, expected)
        self._planner.set_up_planner(state, None, True)
        # Of the keys to read alone: a rank reads a part of them.
        metadata = dcp_metadata(saved, self._planner.state_dict, {})
        self._planner.metadata = metadata
        self._reader = _FileSystemReader(source, metadata)
        try:
            plan = self._planner.create_local_plan()
        except (RuntimeError, ValueError) as error:
            raise CheckpointError(f"{source.path} does not fit: {error}") from error
        self._plan = plan
        self.keys = set(self._planner.state_dict)

    @property
    def is_complete(self) -> bool:
        """Whether the given indices cover every element that is to be read."""
        read: dict[str, list[Any]] = {}
        for item in self._plan.items:
            if item.type == LoadItemType.TENSOR:
                read.setdefault(item.dest_index.fqn, []).append(_filled_box(item))
        return all(
            are_same_elements(read.get(key, ()), _held_boxes(value))
            for key, value in self._planner.state_dict.items()
            if isinstance(value, Tensor)
        )

    def entries(self) -> list[IndexEntry]:
        """Return the entries that read() will read, and those of tensors without elements."""
        wanted = {(i.storage_index.fqn, i.storage_index.offset) for i in self._plan.items}
        return [
            entry
            for key in self.keys
            for entry in self._saved.by_key.get(key, ())
            if (key, entry.offsets) in wanted or 0 in entry.sizes
        ]

    def read(self) -> None:
        """Read the files into the state.

        Raises:
            CheckpointError: a value is not plain data.
            DamagedCheckpoint: the data does not match its index.
            OSError: a file cannot be read.
        """
        try:
            self._reader.read_data(self._plan, self._planner).wait()
        except (CheckpointError, OSError):
            raise
        except Exception as error:  # torch.load() raises many classes for damaged data
            text = " ".join(f"{type(error).__name__}: {error}".split())[:200]
            name = self._source.name
            raise DamagedCheckpoint([f"{name} is not what its index says: {text}"]) from error


def _filled_box(item: Any) -> tuple[Sequence[int], Sequence[int]]:
    """Return (offsets, sizes) in the full tensor that one ReadItem fills."""
    first = item.dest_index.offset or (0,) * len(item.lengths)
    return [a + b for a, b in zip(first, item.dest_offsets, strict=True)], item.lengths


def _held_boxes(value: Tensor) -> list[tuple[Sequence[int], Sequence[int]]]:
    """Return (offsets, sizes) in the full tensor that this rank holds."""
    if isinstance(value, FragmentTensor):
        return [(chunk.offsets, chunk.data.shape) for chunk in value.pieces]
    return [((0,) * value.dim(), value.shape)]
