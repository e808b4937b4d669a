"""One rank's part of a checkpoint, planned alone, in the format of torch.distributed.checkpoint.

[Note: no planning collective] torch's own planners gather the plans of all ranks, to find out what
is saved twice and where everything will lie. Here nothing is saved twice by construction: fragments
do not overlap, and what all ranks have alike is the first one's to write. So each rank plans alone,
through the same SavePlanner and StorageWriter, and what it has written it says in a file of its
own. Loading plans alone in torch, too, once it knows what lies where.
"""

from __future__ import annotations

import copy
import io
import pickle
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import (
    FileSystem,
    FileSystemReader,
    FileSystemWriter,
    _StorageInfo,
    _StoragePrefix,
)
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType

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
    """Return the dtype that is called so, without "torch."."""
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype), name
    return dtype


class _FolderFileSystem(FileSystem):
    """Opens files of a folder for torch's reader and writer, as ``Folder`` does.

    Args:
        folder: the folder, or the checkpoint in it that is read; None: nothing is opened yet.
    """

    def __init__(self, folder: FolderHandle | CheckpointReader | None = None) -> None:
        self._folder = folder

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        name = Path(path).name
        if isinstance(self._folder, CheckpointReader):
            with self._folder.open(name) as file:
                yield file
        else:
            assert self._folder is not None
            with self._folder.create(name) as file:
                yield file

    def mkdir(self, path: Any) -> None:
        pass  # it is there, or is made when files are written

    def exists(self, path: Any) -> bool:
        return False  # nothing that torch asks for


class _SavePlanner(DefaultSavePlanner):
    """Plans what this rank writes, without the others; see [Note: no planning collective]."""

    def __init__(self, rank: int, copies: DeferredCopies | None, own: Iterable[str]) -> None:
        super().__init__()
        self._rank = rank
        self._own = tuple(f"{key}." for key in own)
        self._copies = copies
        self._places: dict[Any, MetadataIndex] = {}
        self._first: dict[MetadataIndex, MetadataIndex] = {}

    def set_up_planner(self, state_dict: Any, *args: Any, **kwargs: Any) -> None:
        super().set_up_planner(state_dict, *args, **kwargs)
        for key, value in self.state_dict.items():
            # Of a class of torch's own: DTensor, ShardedTensor.
            if hasattr(value, "placements") or hasattr(value, "local_shards"):
                raise CheckpointError(
                    f"{key} is a {type(value).__name__}, and no rank knows which part of it others "
                    "hold. Save it with torch.distributed.checkpoint.save()."
                )
        if self._rank > 0:
            held = self.state_dict.items()
            self.state_dict = {
                k: v for k, v in held if isinstance(v, FragmentTensor) or k.startswith(self._own)
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
            place = (live.data_ptr(), live.device, live.dtype, live.shape, live.stride())
            first = self._places.setdefault(place, item.index) if live.numel() else item.index
            self._first[item.index] = first
            is_part = isinstance(self.state_dict[item.index.fqn], FragmentTensor)
            if self._copies is not None and is_part and first == item.index:
                self._copies.add(item.index, live)
        return plan

    def first_of(self, item: Any) -> MetadataIndex:
        """Return the item that has the memory of ``item``: tied parameters are written once."""
        index: MetadataIndex = item.index
        return self._first.get(index, index)

    def is_first(self, item: Any) -> bool:
        """Return whether that is ``item``."""
        return bool(self.first_of(item) == item.index)

    def resolve_data(self, write_item: Any) -> Any:
        is_part = isinstance(self.state_dict[write_item.index.fqn], FragmentTensor)
        if self._copies is not None and is_part:
            return self._copies.take(write_item.index)
        return super().resolve_data(write_item)


class _FileSystemWriter(FileSystemWriter):
    """Lets errors of the file system through as they are."""

    def write_data(self, plan: Any, planner: Any) -> Any:
        try:
            return super().write_data(plan, planner)
        except RuntimeError as error:
            # torch's zip writer only reports that it is not where it should be.
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise


class DeferredCopies:
    """Fragments copied one by one as they are written, or all that are left, when they may change.

    [Note: what may change] States and a rank's own part of the parameters stay as they are from one
    step() to the next. So they need not be copied when a save begins: each is copied when its turn
    to be written comes, and what has not had its turn when step() begins is copied then.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._left: dict[MetadataIndex, Tensor] = {}
        self._copied: dict[MetadataIndex, Tensor] = {}
        self.most_nbytes = 0

    def add(self, index: MetadataIndex, live: Tensor) -> None:
        """Have a fragment copied."""
        self._left[index] = live

    def take(self, index: MetadataIndex) -> Tensor:
        """Return the copy of a fragment, once."""
        with self._lock:
            if index in self._left:
                self._copy(index)
            return self._copied.pop(index)

    def freeze(self) -> None:
        """Copy all that is left; after this it may change."""
        with self._lock:
            for index in list(self._left):
                self._copy(index)

    def _copy(self, index: MetadataIndex) -> None:
        self._copied[index] = self._left.pop(index).to("cpu", copy=True)
        nbytes = sum(tensor.nbytes for tensor in self._copied.values())
        self.most_nbytes = max(self.most_nbytes, nbytes)


class ShardWriter:
    """What ``rank`` writes of a nested ``state`` into ``folder``, planned when it is built.

    Args:
        folder: is created when it is written.
        rank: names the file.
        state: nested dicts of what is live.
        copies: of its fragments; with these write() may run beside training, and everything else is
            copied at once.
        own: keys of what this rank writes although it is no fragment, whichever rank it is.

    Raises:
        CheckpointError: a value of a kind that cannot be saved.
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
        self._planner, self._writer = _SavePlanner(rank, copies, own), _FileSystemWriter(folder)
        self._writer.fs = _FolderFileSystem()
        self._writer.set_up_storage_writer(rank == 0)
        self._planner.set_up_planner(dict(state), self._writer.storage_meta(), rank == 0)
        plan = self._writer.prepare_local_plan(self._planner.create_local_plan())
        self._items = plan.items
        held = self._planner.state_dict
        self._counts = {
            key: int(value.pieces[0].data)
            for key, value in held.items()
            if isinstance(value, FragmentTensor) and value.dtype == torch.int64
            if not value.dim() and value.pieces
        }
        plan = replace(plan, items=[item for item in plan.items if self._planner.is_first(item)])
        self._plan = replace(plan, storage_data=_StoragePrefix(f"__{rank}_"))

    def write(self) -> ShardIndex:
        """Write it, and return what that was; OSError where the file system refuses."""
        with make_folder(self._folder) as folder:
            return self._write(folder)

    def _write(self, folder: FolderHandle) -> ShardIndex:
        self._writer.fs = _FolderFileSystem(folder)
        written = self._writer.write_data(self._planner.finish_plan(self._plan), self._planner)
        written.wait()
        paths: dict[str, Any] = {k: list(v) for k, v in self._planner.mappings.items()}
        part = ShardIndex(self._rank, paths=paths, counts=self._counts)
        places = {result.index: result.storage_data for result in written.value()}
        for planned in self._items:
            data, key = planned.tensor_data, planned.index.fqn
            info = places[self._planner.first_of(planned)]
            offsets: tuple[int, ...] | None = None
            sizes: tuple[int, ...] = ()
            if data is not None:
                offsets, sizes = tuple(data.chunk.offsets), tuple(data.chunk.sizes)
                dtype = str(data.properties.dtype).removeprefix("torch.")
                part.tensors[key] = TensorMeta(dtype, tuple(data.size))
            item = IndexEntry(key, offsets, sizes, info.relative_path, info.offset, info.length, "")
            part.entries.append(item)
        part.entries.sort(key=lambda item: item.start)
        part.entries = _with_digests(folder, part.entries)
        return part


def _with_digests(folder: FolderHandle, items: list[IndexEntry]) -> list[IndexEntry]:
    """Return the items, which one file holds, with the digests of what has been written."""
    if not items:
        return []
    ranges = [(item.start, item.length) for item in items]
    with folder.open(items[0].file) as file:
        digests = list(digests_in(file, ranges))
    return [item._replace(digest=found) for item, found in zip(items, digests, strict=True)]


def dcp_metadata(
    indices: Iterable[ShardIndex], others: Mapping[str, TensorMeta] | None = None
) -> Metadata:
    """Return what torch.distributed.checkpoint has in ``.metadata``.

    Args:
        parts: what ranks have written.
        others: of tensors that other ranks may have.
    """
    tensors = {key: _tensor_metadata(tensor) for key, tensor in (others or {}).items()}
    storage: dict[MetadataIndex, Any] = {}
    paths: dict[str, Any] = {}
    for part in indices:
        paths.update((key, tuple(path)) for key, path in part.paths.items())
        for key, tensor in part.tensors.items():
            tensors.setdefault(key, _tensor_metadata(tensor))
        for item in part.entries:
            if item.offsets is None:
                index = MetadataIndex(item.key)
                tensors[item.key] = BytesStorageMetadata()
            else:
                offsets, sizes = torch.Size(item.offsets), torch.Size(item.sizes)
                index = MetadataIndex(item.key, offsets)
                tensors[item.key].chunks.append(ChunkStorageMetadata(offsets, sizes))
            storage[index] = _StorageInfo(item.file, item.start, item.length)
    metadata = Metadata(tensors, planner_data=paths, storage_data=storage)
    if hasattr(metadata, "version"):  # not in torch 2.7
        metadata.version = "1.0.0"
    return metadata


def _tensor_metadata(tensor: TensorMeta) -> Any:
    properties = TensorProperties(dtype=dtype_from_name(tensor.dtype))
    return TensorStorageMetadata(properties, torch.Size(tensor.shape), [])


def pickle_metadata(metadata: Metadata) -> bytes:
    """Return the contents of ``.metadata``."""
    return pickle.dumps(metadata)


class _LoadPlanner(DefaultLoadPlanner):
    """Loads values that are not tensors only if they are plain data, unless told otherwise."""

    def __init__(self, trusted: bool) -> None:
        super().__init__()
        self._trusted = trusted

    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        if not self._trusted:
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


class ShardReader:
    """What this rank reads into a nested ``state``, planned when it is built.

    Args:
        source: the checkpoint.
        parts: what its ranks have written.
        state: filled in place by read(): tensors are overwritten, other values replaced.
        trusted: whether values may be of any class, which runs code of the file's.
        kinds: of all tensors of the checkpoint, where ``parts`` are not all.

    Raises:
        CheckpointError: the checkpoint lacks something that ``state`` has, or has it in another
            shape.
    """

    keys: set[str]
    """What it reads."""

    def __init__(
        self,
        source: CheckpointReader,
        indices: Iterable[ShardIndex],
        state: dict[str, Any],
        *,
        trusted: bool = False,
        tensors: Mapping[str, TensorMeta] | None = None,
    ) -> None:
        metadata = dcp_metadata(indices, tensors)
        self._source = source
        self._planner, self._reader = _LoadPlanner(trusted), FileSystemReader(source.path)
        self._reader.fs = _FolderFileSystem(source)
        self._reader.set_up_storage_reader(metadata, True)
        self._planner.set_up_planner(state, metadata, True)
        try:
            plan = self._planner.create_local_plan()
        except (RuntimeError, ValueError) as error:
            raise CheckpointError(f"{source.path} does not fit: {error}") from error
        self._plan = self._planner.finish_plan(self._reader.prepare_local_plan(plan))
        self.keys = set(self._planner.state_dict)

    @property
    def is_complete(self) -> bool:
        """Whether what was given of the checkpoint has every element of what it reads."""
        read: dict[str, list[Any]] = {}
        for item in self._plan.items:
            if item.type == LoadItemType.TENSOR:
                read.setdefault(item.dest_index.fqn, []).append(_filled_box(item))
        return all(
            are_same_elements(read.get(key, ()), _held_boxes(value))
            for key, value in self._planner.state_dict.items()
            if isinstance(value, Tensor)
        )

    def items(self, indices: Iterable[ShardIndex]) -> list[IndexEntry]:
        """Return what read() will read of ``parts``, and tensors without elements."""
        wanted = {item.storage_index for item in self._plan.items}
        return [
            item
            for part in indices
            for item in part.entries
            if MetadataIndex(item.key, item.offsets) in wanted
            or (0 in item.sizes and item.key in self.keys)
        ]

    def read(self) -> None:
        """Read the files into the state.

        Raises:
            CheckpointError: a value is more than plain data.
            DamagedCheckpoint: what lies in the files is not what their index says.
            OSError: they cannot be read.
        """
        try:
            self._reader.read_data(self._plan, self._planner).wait()
        except (CheckpointError, OSError):
            raise
        except Exception as error:  # of torch.load(), which has many
            text = " ".join(f"{type(error).__name__}: {error}".split())[:200]
            name = self._source.name
            raise DamagedCheckpoint([f"{name} is not what its index says: {text}"]) from error


def _filled_box(item: Any) -> tuple[Sequence[int], Sequence[int]]:
    """Return (offsets, sizes) of what one item of a plan to load fills in a whole tensor."""
    first = item.dest_index.offset or (0,) * len(item.lengths)
    return [a + b for a, b in zip(first, item.dest_offsets, strict=True)], item.lengths


def _held_boxes(value: Tensor) -> list[tuple[Sequence[int], Sequence[int]]]:
    """Return (offsets, sizes) of what of a whole tensor is here."""
    if isinstance(value, FragmentTensor):
        return [(piece.offsets, piece.data.shape) for piece in value.pieces]
    return [((0,) * value.dim(), value.shape)]
