"""The files of a checkpoint: their format, how they are read, and how damage is found.

FOLDER/
    __3_0.distcp     data of rank 3, in the format of torch.distributed.checkpoint
    part-3.json      index of this file: key, offsets in the tensor, range in the file, digest
    .metadata        all indices, pickled, for torch.distributed.checkpoint.load()
    manifest.json    digests of .metadata and of every part-*.json; written last

Both kinds of JSON file begin with the digest of the rest of their text. So the manifest's digest
covers every byte of every file, directly or through an index.

[Note: open by descriptor] Another process may replace, rename or remove the checkpoint at any
moment. A CheckpointReader holds the folder and its files open by descriptor, so the bytes that are
verified are those that are read. Open files stay readable after they are removed. (On NFS only if
the same host removed them.)
"""

from __future__ import annotations

import errno
import functools
import json
import math
import operator
import re
import secrets
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch

from shardfuse.files import DIGEST_LEN, FolderHandle, describe_os_error, digest_of, digests_in


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read; raised on all ranks, and nothing was changed."""


class DamagedCheckpoint(CheckpointError):
    """Files of a checkpoint differ from the saved ones.

    Args:
        faults: descriptions of the damage, each with file, key and place.
        advice: the remedy, such as the name of an intact checkpoint.
    """

    def __init__(self, faults: Sequence[str], advice: str = "") -> None:
        self.faults = list(faults)
        shown = "; ".join(self.faults[:_NUM_SHOWN])
        more = len(self.faults) - _NUM_SHOWN
        if more > 0:
            shown += f"; and {more} more"
        super().__init__(f"{shown.rstrip('.')}. {advice}".rstrip())


_NUM_SHOWN = 3


_MAX_OPEN_FILES = 256
"""Files that stay open; the usual limit of a process is 1,024 descriptors."""

_NOT_A_FOLDER = (errno.ENOTDIR, errno.ENAMETOOLONG, errno.ELOOP)


class CheckpointReader:
    """An open checkpoint folder; a context manager that closes it. See [Note: open by descriptor].

    Args:
        path: the folder.

    Raises:
        CheckpointError: the folder does not exist, or cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._open_files: dict[str, BinaryIO] = {}
        try:
            self.folder = FolderHandle(path)
        except FileNotFoundError:
            raise CheckpointError(f"There is no checkpoint {path}.") from None
        except ValueError:  # a NUL byte
            raise CheckpointError(f"{str(path)!r} is no name of a folder.") from None
        except OSError as error:
            if error.errno in _NOT_A_FOLDER:
                raise CheckpointError(f"There is no checkpoint {path}: {error.strerror}.") from None
            raise CheckpointError(f"{path} cannot be read: {describe_os_error(error)}.") from None

    @property
    def name(self) -> str:
        """Name of the folder."""
        return self.path.name

    @property
    def was_replaced(self) -> bool:
        """Whether ``path`` now names another checkpoint, or does not exist."""
        return not self.folder.is_at(self.path)

    def __enter__(self) -> CheckpointReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the folder and its files."""
        for file in self._open_files.values():
            file.close()
        self._open_files.clear()
        self.folder.close()

    def keep_open(self, names: Iterable[str]) -> None:
        """Open files that will be read more than once, and keep their descriptors."""
        for name in sorted(set(names) - set(self._open_files))[
            : _MAX_OPEN_FILES - len(self._open_files)
        ]:
            with suppress(OSError):  # the later read reports it
                self._open_files[name] = self.folder.open(name)

    @contextmanager
    def open(self, name: str) -> Iterator[BinaryIO]:
        """Yield an open file; raise OSError if it cannot be opened."""
        if name in self._open_files:
            yield self._open_files[name]
            return
        with self.folder.open(name) as file:
            yield file

    def read(self, name: str, nbytes: int | None, maximum: int) -> bytes:
        """Return the contents of a file.

        Args:
            name: name of the file.
            nbytes: expected size; None: any.
            maximum: largest size that is read.

        Raises:
            DamagedCheckpoint: the file is missing, has another size, or cannot be read.
        """
        place = f"{self.name}/{name}"
        try:
            with self.open(name) as file:
                size = file.seek(0, 2)
                if nbytes is not None and size != nbytes:
                    raise DamagedCheckpoint([f"{place} has {size:,} bytes of {nbytes:,}"])
                if size > maximum:
                    raise DamagedCheckpoint([f"{place} has {size:,} bytes, of at most {maximum:,}"])
                file.seek(0)
                return file.read(size)
        except FileNotFoundError:
            raise DamagedCheckpoint([f"{place} is missing"]) from None
        except OSError as error:
            raise DamagedCheckpoint([f"{place} cannot be read ({error.strerror})"]) from None


FORMAT = 1
MANIFEST = "manifest.json"
METADATA = ".metadata"

MASTER = "param"
"""State key of a low-precision parameter's fp32 master, in torch.optim's form."""

_MAX_READ_NBYTES = 1 << 28
"""Largest file that is read as a whole. Parsing takes about eight times as much memory."""

_MAX_INT = 1 << 62
_FILE_NAME = re.compile(r"(?!\.{1,2}$)[^/\0]{1,255}")
_OTHER_FORM_ERRORS = (
    AttributeError,
    IndexError,
    KeyError,
    OverflowError,
    RecursionError,
    TypeError,
    ValueError,
)
"""Exceptions that access to JSON of an unexpected form raises."""


def _as_int(value: Any, minimum: int = 0, maximum: int = _MAX_INT) -> int:
    """Return a JSON integer; raise ValueError for another type or a value out of bounds."""
    if type(value) is not int or not minimum <= value <= maximum:
        raise ValueError(f"{str(value)[:40]!r} is no whole number from {minimum:,} to {maximum:,}")
    return value


def _as_ints(values: Any) -> tuple[int, ...]:
    if type(values) is not list:
        raise ValueError(f"{str(values)[:40]!r} is no list")
    return tuple([_as_int(value) for value in values])


@functools.lru_cache(64)  # the entries of a file follow each other
def _as_file_name(name: Any) -> str:
    """Return a file name; raise ValueError if it would leave the folder."""
    if type(name) is not str or not _FILE_NAME.fullmatch(name):
        raise ValueError(f"{str(name)[:40]!r} is no name of a file in the folder")
    return name


def _as_dict(value: Any) -> dict[str, Any]:
    if type(value) is not dict:
        raise ValueError(f"{str(value)[:40]!r} is no object")
    return value


_STEP_NAME = re.compile(r"step-(0|[1-9][0-9]{0,14})")

NO_STEP = (1 << 48) - 1
"""Larger than every valid number of steps."""


def step_in_name(name: str) -> int | None:
    """Return N of a folder name ``step-N``; None for any other name."""
    found = _STEP_NAME.fullmatch(name)
    return int(found[1]) if found and int(found[1]) < NO_STEP - 1 else None


KeyPath = Sequence[str | int]
"""Keys and indices that lead to a value in nested dicts and lists."""


class IndexEntry(NamedTuple):
    """One stored fragment of a tensor, or one stored value that is not a tensor."""

    key: str
    offsets: tuple[int, ...] | None  # of the first element in the full tensor; None: no tensor
    sizes: tuple[int, ...]
    file: str
    start: int
    length: int
    digest: str

    def describe(self) -> str:
        """Return key, place and file for an error message."""
        place = "" if not self.offsets else f" from {list(self.offsets)} on, {list(self.sizes)}"
        return f"{self.key}{place} in {self.file}"


class TensorMeta(NamedTuple):
    """Dtype and full shape of the tensor of one key."""

    dtype: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        """Return the text that error messages have shown since the first version."""
        return f"Kind(dtype={self.dtype!r}, shape={self.shape!r})"


@functools.cache
def _itemsize(dtype: str) -> int:
    """Return the bytes of an element of a dtype of torch, by its name."""
    itemsize: int = getattr(torch, dtype).itemsize
    return itemsize


def _as_tensors(content: Any) -> dict[str, TensorMeta]:
    meta = functools.lru_cache(None, typed=True)(  # True is no 1
        lambda dtype, *shape: TensorMeta(dtype, _as_ints([*shape]))
    )
    tensors = {key: meta(dtype, *shape) for key, (dtype, shape) in _as_dict(content).items()}
    for tensor in set(tensors.values()):  # many tensors have few shapes
        _as_int(len(tensor.shape), maximum=_MAX_DIMS)
        if not isinstance(getattr(torch, str(tensor.dtype), None), torch.dtype):
            key = next(key for key, other in tensors.items() if other == tensor)
            raise ValueError(f"{key} has no dtype of torch, but {str(tensor.dtype)[:40]!r}")
        _as_int(math.prod(tensor.shape))
    return tensors


def _as_counts(content: Any) -> dict[str, int]:
    return {key: _as_int(count) for key, count in _as_dict(content).items()}


def _as_entry(content: Any, tensors: Mapping[str, TensorMeta]) -> IndexEntry:
    """Parse one entry; raise ValueError if it does not fit its tensor."""
    key, offsets, sizes, file, start, length, digest = content
    entry = IndexEntry(
        key,
        None if offsets is None else _as_ints(offsets),
        _as_ints(sizes),
        _as_file_name(file),
        _as_int(start),
        _as_int(length),
        str(digest),
    )
    if entry.offsets is None:
        return entry
    tensor = tensors[key]
    if not len(entry.offsets) == len(entry.sizes) == len(tensor.shape):
        raise ValueError(f"{entry.describe()} has other dimensions than its tensor")
    if any(map(operator.gt, map(operator.add, entry.offsets, entry.sizes), tensor.shape)):
        raise ValueError(f"{entry.describe()} is not inside of its tensor")
    if math.prod(entry.sizes) * _itemsize(tensor.dtype) > length:
        raise ValueError(f"{entry.describe()} has more elements than bytes")
    return entry


_JSON_KEYS = {"entries": "items", "tensors": "kinds"}
"""Keys of the file format that differ from the names of fields."""


def _json_fields(record: ShardIndex | Manifest) -> dict[str, Any]:
    """Return the fields of a dataclass by the keys of the file format, in their order."""
    fields = vars(record).items()
    return {_JSON_KEYS.get(name, name): value for name, value in fields if name != "checksum"}


@dataclass
class ShardIndex:
    """Index of the data file that one rank wrote."""

    rank: int
    entries: list[IndexEntry] = field(default_factory=list)
    tensors: dict[str, TensorMeta] = field(default_factory=dict)
    paths: dict[str, KeyPath] = field(default_factory=dict)  # key -> place in the nested state
    counts: dict[str, int] = field(default_factory=dict)  # 0-dim integer tensors: step counts

    @property
    def name(self) -> str:
        """Name of the index file."""
        return f"part-{self.rank}.json"

    def to_bytes(self) -> bytes:
        """Return the contents of the index file."""
        return encode_with_digest(_json_fields(self))

    @classmethod
    def from_bytes(cls, data: bytes, name: str) -> ShardIndex:
        """Parse the result of to_bytes(); raise DamagedCheckpoint for anything else."""
        content = decode_with_digest(data, name)
        with _reports_other_form(name):
            tensors = _as_tensors(content["kinds"])
            entries = [_as_entry(entry, tensors) for entry in content["items"]]
            paths = {key: _as_key_path(path) for key, path in _as_dict(content["paths"]).items()}
            counts = _as_counts(content.get("counts", {}))
            return cls(_as_int(content["rank"]), entries, tensors, paths, counts)


def _as_key_path(path: Any) -> KeyPath:
    if type(path) is list and _TEXTS.issuperset(map(type, path)):  # nearly all
        return path
    if type(path) is not list or not all(type(step) in (int, str) for step in path):
        raise ValueError(f"{str(path)[:40]!r} is no place in nested dicts and lists")
    return [_as_int(step) if type(step) is int else step for step in path]


_TEXTS = frozenset({str})


@contextmanager
def _reports_other_form(name: str) -> Iterator[None]:
    """Raise DamagedCheckpoint if JSON with a valid digest does not have the expected form."""
    try:
        yield
    except _OTHER_FORM_ERRORS as error:
        text = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise DamagedCheckpoint([f"{name} is not as shardfuse writes it: {text[:200]}"]) from None


class FileRecord(NamedTuple):
    """Name, size and digest of a file that is read as a whole."""

    name: str
    nbytes: int
    digest: str

    @classmethod
    def of(cls, name: str, data: bytes) -> FileRecord:
        """Return the record of a file with contents ``data``."""
        return cls(name, len(data), digest_of(data))


class ParamMeta(NamedTuple):
    """Name and memory layout of a parameter; its states are saved as (numel,), or in its shape."""

    name: str
    shape: list[int]
    stride: list[int]  # in elements; states are stored in this order of elements


@dataclass
class Manifest:
    """The file that makes a folder a checkpoint; written last."""

    world_size: int
    files: list[FileRecord]
    info: dict[str, Any]
    """The caller's ``info``, of JSON types."""
    params: dict[str, list[ParamMeta]] = field(default_factory=dict)
    """By key of the optimizer: its parameters, in order of their numbers."""
    layouts: dict[str, Any] = field(default_factory=dict)
    """By key of the optimizer: Parts.geometry(), from which ranks_overlapping() finds shards."""
    rules: dict[str, str] = field(default_factory=dict)
    """By key of the optimizer: Parts.rule. Early checkpoints lack it."""
    tensors: dict[str, TensorMeta] = field(default_factory=dict)
    """Of all ranks' indices."""
    counts: dict[str, int] = field(default_factory=dict)
    """Of all ranks' indices."""
    checksum: int = field(default=0, compare=False)
    """24-bit checksum of the file, by which ranks compare their manifests; not saved."""

    def to_bytes(self) -> bytes:
        """Return the contents of the manifest file."""
        return encode_with_digest({"format": FORMAT, **_json_fields(self)})

    @classmethod
    def read(cls, source: CheckpointReader) -> Manifest:
        """Read and check the manifest of a checkpoint.

        Raises:
            CheckpointError: the folder is not a checkpoint, or has a later format.
            DamagedCheckpoint: the manifest is damaged.
        """
        name = f"{source.name}/{MANIFEST}"
        if MANIFEST not in source.folder.names():
            inside = find_checkpoints(source.path)
            if inside:
                names = ", ".join(str(path.relative_to(source.path)) for path in reversed(inside))
                raise CheckpointError(
                    f"{source.path} is a folder of checkpoints. Name one: {names}. The newest is "
                    f"{inside[0]}."
                )
            raise DamagedCheckpoint(
                [f"{name} is missing"],
                "If shardfuse has not saved it, torch.distributed.checkpoint.load() may read it.",
            )
        data = source.read(MANIFEST, None, _MAX_READ_NBYTES)
        content = decode_with_digest(data, name)
        with _reports_other_form(name):
            version = _as_int(content["format"])
            if version > FORMAT:
                raise CheckpointError(
                    f"{source.path} has format {version}; this version reads {FORMAT}. Upgrade."
                )
            files = [
                FileRecord(
                    _as_file_name(file), _as_int(nbytes, maximum=_MAX_READ_NBYTES), str(digest)
                )
                for file, nbytes, digest in content["files"]
            ]
            manifest = cls(_as_int(content["world_size"], 1), files, _as_dict(content["info"]))
            expected = {METADATA, *(ShardIndex(rank).name for rank in range(len(files) - 1))}
            if {file.name for file in files} != expected or manifest.world_size != len(files) - 1:
                raise ValueError(f"its files are not those of {manifest.world_size:,} ranks")
            is_dense = functools.cache(_is_dense)
            for key, metas in _as_dict(content["params"]).items():
                manifest.params[key] = [_as_param_meta(meta, is_dense) for meta in metas]
            # The first checkpoints of this format lack these keys. Then all indices are read.
            manifest.layouts = _as_dict(content.get("layouts", {}))
            manifest.rules = {
                k: str(rule) for k, rule in _as_dict(content.get("rules", {})).items()
            }
            manifest.counts = _as_counts(content.get("counts", {}))
            manifest.tensors = _as_tensors(content.get("kinds", {}))
        manifest.checksum = checksum_of(data)
        return manifest

    def read_file(self, source: CheckpointReader, file: FileRecord) -> bytes:
        """Return the contents of a listed file; raise DamagedCheckpoint if its digest differs."""
        data = source.read(file.name, file.nbytes, _MAX_READ_NBYTES)
        if digest_of(data) != file.digest:
            raise DamagedCheckpoint([f"{source.name}/{file.name} is damaged"])
        return data

    def read_indices(
        self, source: CheckpointReader, ranks: Collection[int] | None = None
    ) -> list[ShardIndex]:
        """Return the indices that ``ranks`` wrote; None: of all ranks.

        Raises:
            DamagedCheckpoint: some are damaged; the error names all of them.
        """
        indices, faults = [], []
        names = None if ranks is None else {ShardIndex(rank).name for rank in ranks}
        for file in self.files:
            if file.name == METADATA or (names is not None and file.name not in names):
                continue
            try:
                data = self.read_file(source, file)
                index = ShardIndex.from_bytes(data, f"{source.name}/{file.name}")
                faults += self._differences(source, index, file)
                indices.append(index)
            except DamagedCheckpoint as damage:
                faults += damage.faults
        if ranks is None and not faults:
            faults += coverage_faults(indices)
        if faults:
            raise DamagedCheckpoint(faults)
        return indices

    def _differences(
        self, source: CheckpointReader, index: ShardIndex, file: FileRecord
    ) -> list[str]:
        """Return contradictions between one rank's index and the manifest."""
        name = f"{source.name}/{file.name}"
        if index.name != file.name:
            return [f"{name} is of rank {index.rank}"]
        tensors = index.tensors.items() if self.tensors else ()
        return [
            f"{name} has {key} as {tensor}, the manifest as {self.tensors.get(key)}"
            for key, tensor in tensors
            if self.tensors.get(key) != tensor
        ]


def _as_param_meta(content: Any, is_dense: Callable[..., bool]) -> ParamMeta:
    """Parse a parameter's record; raise ValueError unless _is_dense() of its shape and strides.

    Args:
        content: of the record.
        is_dense: _is_dense() with a cache: many parameters have few shapes.
    """
    name, shape, stride = content
    if not is_dense((*shape,), (*stride,)):
        raise ValueError(f"{name} has the strides {stride} at {shape}")
    return ParamMeta(str(name), shape, stride)


def _is_dense(shape: tuple[Any, ...], stride: tuple[Any, ...]) -> bool:
    """Return whether elements of these strides fill a range; raise ValueError if no integers."""
    sizes, steps = _as_ints([*shape]), _as_ints([*stride])
    expected = 1
    if 0 not in sizes:
        for step, size in sorted(zip(steps, sizes, strict=True)):
            if size > 1 and step != expected:
                return False
            expected *= size
    _as_int(expected)
    return True


def find_checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints ``folder/step-N`` and ``folder/*/step-N``, newest first.

    The second pattern finds those of a run's folder, such as RUN/checkpoints/step-N.
    """
    paths = (path.parent for way in ("", "*/") for path in folder.glob(f"{way}step-*/{MANIFEST}"))
    found = [(step, path) for path in paths if (step := step_in_name(path.name)) is not None]
    return [path for _, path in sorted(found, reverse=True)]


def entry_faults(source: CheckpointReader, entries: Iterable[IndexEntry]) -> list[str]:
    """Return the damaged ones of ``entries``, described by file, key and place."""
    by_file: dict[str, list[IndexEntry]] = {}
    for entry in entries:
        by_file.setdefault(entry.file, []).append(entry)
    faults: list[str] = []
    for name, members in sorted(by_file.items()):
        place = f"{source.name}/{name}"
        try:
            faults += _file_faults(source, name, sorted(members, key=lambda entry: entry.start))
        except FileNotFoundError:
            faults.append(f"{place} is missing")
        except OSError as error:
            faults.append(f"{place} cannot be read ({error.strerror})")
    return faults


def _file_faults(
    source: CheckpointReader, name: str, entries: Sequence[IndexEntry]
) -> Iterator[str]:
    """Yield the damaged entries of one file; all entries that are cut off yield one text."""
    with source.open(name) as file:
        nbytes = file.seek(0, 2)
        needed = max(entry.start + entry.length for entry in entries)
        lost = [entry for entry in entries if entry.start + entry.length > nbytes]
        there = [entry for entry in entries if entry.start + entry.length <= nbytes]
        digests = digests_in(file, [(entry.start, entry.length) for entry in there])
        for entry, digest in zip(there, digests, strict=True):
            if digest != entry.digest:
                yield f"{entry.describe()} of {source.name} is damaged"
    if lost:
        more = f" and {len(lost) - 1} more" if len(lost) > 1 else ""
        yield (
            f"{source.name}/{name} has {nbytes:,} bytes of at least {needed:,}: "
            f"{lost[0].describe()}{more} cannot be read"
        )


def length_faults(
    source: CheckpointReader, indices: Iterable[ShardIndex], *, is_exact: bool = False
) -> list[str]:
    """Return the files that end before their last entry or, if ``is_exact``, continue after it.

    No digest covers bytes after the last entry.
    """
    faults = []
    ends = file_ends(entry for index in indices for entry in index.entries)
    for name, end in sorted(ends.items()):
        if source.folder.has_file(name):  # entry_faults() reports a missing file
            more = source.folder.size(name) - end
            if more < 0 and not is_exact:
                faults.append(f"{source.name}/{name} has {end + more:,} bytes of at least {end:,}")
            elif more > 0 and is_exact:
                faults.append(f"{source.name}/{name} has {more:,} bytes that nobody has saved")
    return faults


def file_ends(entries: Iterable[IndexEntry]) -> dict[str, int]:
    """Return {file name: end of its last entry}."""
    ends: dict[str, int] = {}
    for entry in entries:
        ends[entry.file] = max(ends.get(entry.file, 0), entry.start + entry.length)
    return ends


def coverage_faults(indices: Iterable[ShardIndex]) -> list[str]:
    """Return the tensors that are incomplete, or differ in dtype or shape between ranks."""
    tensors: dict[str, TensorMeta] = {}
    boxes: dict[str, list[tuple[Sequence[int], Sequence[int]]]] = {}
    faults = []
    for index in indices:
        for key, tensor in index.tensors.items():
            if tensors.setdefault(key, tensor) != tensor:
                faults.append(
                    f"{key} is {tensor} on rank {index.rank} and {tensors[key]} on another"
                )
        for entry in index.entries:
            if entry.offsets is not None:
                boxes.setdefault(entry.key, []).append((entry.offsets, entry.sizes))
    whole = {t: [((0,) * len(t.shape), t.shape)] for t in set(tensors.values())}
    for key, tensor in tensors.items():
        found = boxes.get(key, [])
        if found == whole[tensor]:  # most are in one part
            continue
        count, numel = sum(math.prod(sizes) for _, sizes in found), math.prod(tensor.shape)
        if count != numel:
            faults.append(f"{key} has {count:,} elements of {numel:,}")
        elif not are_same_elements(found, whole[tensor]):
            faults.append(f"{key} has some elements twice and lacks others")
    return faults


def are_same_elements(
    boxes: Iterable[tuple[Sequence[int], Sequence[int]]],
    others: Iterable[tuple[Sequence[int], Sequence[int]]],
) -> bool:
    """Return whether two lists of (offsets, sizes) cover the same elements, each equally often.

    An element at (i, j, ...) stands for the product x**i * y**j * ..., so a list of boxes stands
    for a polynomial, and each box for a product of geometric series. Both polynomials are evaluated
    at one random point of a field of 2**127 - 1 elements, the same one in all calls of a process.
    Different ones are equal there with a probability below 2**-60 (Schwartz-Zippel lemma). The time
    does not depend on the boxes' shapes.
    """

    def value(boxes: Iterable[tuple[Sequence[int], Sequence[int]]]) -> int:
        total = 0
        for offsets, sizes in boxes:
            product = 1
            for x, first, size in zip(_random_point(), offsets, sizes, strict=False):
                # The sum of x**first ... is this / (x - 1), a factor that both sides share.
                series = pow(x, size, _PRIME) - 1
                product = product * pow(x, first, _PRIME) * series % _PRIME
            total += product
        return total % _PRIME

    one, other = (
        sorted((tuple(offsets), tuple(sizes)) for offsets, sizes in each)
        for each in (boxes, others)
    )
    return one == other or value(one) == value(other)


@functools.cache
def _random_point() -> list[int]:
    """Return a coordinate for each dimension; drawn once, because drawing takes a millisecond."""
    return [secrets.randbelow(_PRIME - 2) + 2 for _ in range(_MAX_DIMS)]


_PRIME = (1 << 127) - 1
_MAX_DIMS = 64
"""Largest number of dimensions of a tensor of torch."""


def checksum_of(data: bytes) -> int:
    """Return a 24-bit checksum that is not 0; equal for equal data."""
    return 1 + zlib.crc32(data) % ((1 << 24) - 1)


def encode_with_digest(content: Mapping[str, Any]) -> bytes:
    """Return ``content`` as JSON text that begins with the digest of the rest."""
    text = json.dumps(content, separators=(",", ":")).encode()
    return b'{"digest":"%s","content":%s}\n' % (digest_of(text).encode(), text)


def decode_with_digest(data: bytes, name: str) -> dict[str, Any]:
    """Parse the result of encode_with_digest(); raise DamagedCheckpoint if any byte differs."""
    start, end = b'{"digest":"', b"}\n"
    text = data[len(start) + DIGEST_LEN + len('","content":') : -len(end)]
    if data != b'%s%s","content":%s%s' % (start, digest_of(text).encode(), text, end):
        raise DamagedCheckpoint([f"{name} is damaged"])
    with _reports_other_form(name):
        return _as_dict(json.loads(text))
