"""The files of a checkpoint: their format, how they are read, and how damage is found.

FOLDER/
    __3_0.distcp     what rank 3 wrote, in the format of torch.distributed.checkpoint
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
import json
import math
import re
import secrets
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch

from shardfuse.files import DIGEST_LEN, FolderHandle, describe_os_error, digest_of, digests_in


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read; raised on all ranks, and nothing was changed."""


class DamagedCheckpoint(CheckpointError):
    """Files of a checkpoint differ from what was written.

    Args:
        faults: what is damaged, each with its file, key and place.
        advice: what to do, such as the name of a whole checkpoint.
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
"""Files kept open; a process may have 1,024."""

_NOT_A_FOLDER = (errno.ENOTDIR, errno.ENAMETOOLONG, errno.ELOOP)


class CheckpointReader:
    """The folder of a checkpoint, open; also a context manager, which closes it.

    Args:
        path: the folder.

    Raises:
        CheckpointError: there is none, or it cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._kept: dict[str, BinaryIO] = {}
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
    def has_moved(self) -> bool:
        """Whether ``path`` names another checkpoint by now, or none."""
        return not self.folder.is_at(self.path)

    def __enter__(self) -> CheckpointReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the folder and its files."""
        for file in self._kept.values():
            file.close()
        self._kept.clear()
        self.folder.close()

    def keep(self, names: Iterable[str]) -> None:
        """Open files that will be read more than once, and keep them open."""
        for name in sorted(set(names) - set(self._kept))[: _MAX_OPEN_FILES - len(self._kept)]:
            with suppress(OSError):  # told by whoever reads it
                self._kept[name] = self.folder.open(name)

    @contextmanager
    def opened(self, name: str) -> Iterator[BinaryIO]:
        """Give a file to be read. OSError: it cannot be."""
        if name in self._kept:
            yield self._kept[name]
            return
        with self.folder.open(name) as file:
            yield file

    def read(self, name: str, nbytes: int | None, most: int) -> bytes:
        """Return the contents of a file.

        Args:
            name: of the file.
            nbytes: length that it must have; None: any.
            most: length that it must not exceed.

        Raises:
            DamagedCheckpoint: it is not there, has another length, or cannot be read.
        """
        place = f"{self.name}/{name}"
        try:
            with self.opened(name) as file:
                size = file.seek(0, 2)
                if nbytes is not None and size != nbytes:
                    raise DamagedCheckpoint([f"{place} has {size:,} bytes of {nbytes:,}"])
                if size > most:
                    raise DamagedCheckpoint([f"{place} has {size:,} bytes, of at most {most:,}"])
                file.seek(0)
                return file.read(size)
        except FileNotFoundError:
            raise DamagedCheckpoint([f"{place} is missing"]) from None
        except OSError as error:
            raise DamagedCheckpoint([f"{place} cannot be read ({error.strerror})"]) from None


FORMAT = 1
MANIFEST = "manifest.json"
METADATA = ".metadata"

_MAX_READ_NBYTES = 1 << 28
"""Of a file that is read as a whole. Python needs some eight times as much memory for it."""

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
"""What reading JSON of another form raises."""


def _as_int(value: Any, least: int = 0, most: int = _MAX_INT) -> int:
    """Return an integer of JSON; ValueError where it is something else, or out of bounds."""
    if type(value) is not int or not least <= value <= most:
        raise ValueError(f"{str(value)[:40]!r} is no whole number from {least:,} to {most:,}")
    return value


def _as_ints(values: Any) -> tuple[int, ...]:
    if type(values) is not list:
        raise ValueError(f"{str(values)[:40]!r} is no list")
    return tuple(map(_as_int, values))


def _as_file_name(name: Any) -> str:
    """Return the name of a file of the folder; ValueError where it leads elsewhere."""
    if type(name) is not str or not _FILE_NAME.fullmatch(name):
        raise ValueError(f"{str(name)[:40]!r} is no name of a file in the folder")
    return name


def _as_dict(value: Any) -> dict[str, Any]:
    if type(value) is not dict:
        raise ValueError(f"{str(value)[:40]!r} is no object")
    return value


_STEP_NAME = re.compile(r"step-(0|[1-9][0-9]{0,14})")

NO_STEP = (1 << 48) - 1
"""More than every number of steps."""


def step_in_name(name: str) -> int | None:
    """Return the number of steps that the folder of a run's checkpoint is named for, or None."""
    found = _STEP_NAME.fullmatch(name)
    return int(found[1]) if found and int(found[1]) < NO_STEP - 1 else None


KeyPath = Sequence[str | int]
"""Where a value lies in nested dicts and lists."""


class IndexEntry(NamedTuple):
    """One fragment of one state of one parameter, or one value that is not a tensor."""

    key: str
    offsets: tuple[int, ...] | None  # of the first element in the tensor; None: not a tensor
    sizes: tuple[int, ...]
    file: str
    start: int
    length: int
    digest: str

    def describe(self) -> str:
        """Return how a person would call it."""
        place = "" if not self.offsets else f" from {list(self.offsets)} on, {list(self.sizes)}"
        return f"{self.key}{place} in {self.file}"


class TensorMeta(NamedTuple):
    """Dtype and full shape of the tensor of one key."""

    dtype: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        """Return the text that errors have; users may search for it."""
        return f"Kind(dtype={self.dtype!r}, shape={self.shape!r})"

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype.itemsize


def _as_tensors(content: Any) -> dict[str, TensorMeta]:
    kinds = {
        key: TensorMeta(dtype, _as_ints(shape)) for key, (dtype, shape) in _as_dict(content).items()
    }
    for key, kind in kinds.items():
        _as_int(len(kind.shape), most=_MAX_DIMS)
        if not isinstance(getattr(torch, str(kind.dtype), None), torch.dtype):
            raise ValueError(f"{key} has no dtype of torch, but {str(kind.dtype)[:40]!r}")
        _as_int(math.prod(kind.shape))
    return kinds


def _as_counts(content: Any) -> dict[str, int]:
    return {key: _as_int(count) for key, count in _as_dict(content).items()}


def _as_entry(content: Any, kinds: Mapping[str, TensorMeta]) -> IndexEntry:
    """Read one item of JSON; ValueError where it does not fit the tensor that it is a part of."""
    key, offsets, sizes, file, start, length, digest = content
    item = IndexEntry(
        key,
        None if offsets is None else _as_ints(offsets),
        _as_ints(sizes),
        _as_file_name(file),
        _as_int(start),
        _as_int(length),
        str(digest),
    )
    if item.offsets is None:
        return item
    shape = kinds[item.key].shape
    if not len(item.offsets) == len(item.sizes) == len(shape):
        raise ValueError(f"{item.describe()} has other dimensions than its tensor")
    if any(o + n > end for o, n, end in zip(item.offsets, item.sizes, shape, strict=True)):
        raise ValueError(f"{item.describe()} is not inside of its tensor")
    if math.prod(item.sizes) * kinds[item.key].itemsize > item.length:
        raise ValueError(f"{item.describe()} has more elements than bytes")
    return item


@dataclass
class ShardIndex:
    """What one rank has written."""

    rank: int
    entries: list[IndexEntry] = field(default_factory=list)
    tensors: dict[str, TensorMeta] = field(default_factory=dict)
    paths: dict[str, KeyPath] = field(default_factory=dict)  # of keys in the nested state
    counts: dict[str, int] = field(default_factory=dict)  # integers of no dimension: steps

    @property
    def name(self) -> str:
        """Name of the file that says so."""
        return f"part-{self.rank}.json"

    def to_bytes(self) -> bytes:
        """Return the contents of its file."""
        # The format's keys are older than the names of the fields.
        content = {
            "rank": self.rank,
            "items": self.entries,
            "kinds": self.tensors,
            "paths": self.paths,
            "counts": self.counts,
        }
        return encode_with_digest(content)

    @classmethod
    def from_bytes(cls, data: bytes, name: str) -> ShardIndex:
        """Read what to_bytes() returned; DamagedCheckpoint where it is something else."""
        content = decode_with_digest(data, name)
        with _reports_other_form(name):
            tensors = _as_tensors(content["kinds"])
            entries = [_as_entry(entry, tensors) for entry in content["items"]]
            paths = {key: _as_key_path(path) for key, path in _as_dict(content["paths"]).items()}
            counts = _as_counts(content.get("counts", {}))
            return cls(_as_int(content["rank"]), entries, tensors, paths, counts)


def _as_key_path(path: Any) -> KeyPath:
    if type(path) is not list or not all(type(step) in (int, str) for step in path):
        raise ValueError(f"{str(path)[:40]!r} is no place in nested dicts and lists")
    return [_as_int(step) if type(step) is int else step for step in path]


@contextmanager
def _reports_other_form(name: str) -> Iterator[None]:
    """Raise DamagedCheckpoint where JSON, whose digest is right, has another form."""
    try:
        yield
    except _OTHER_FORM_ERRORS as error:
        text = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise DamagedCheckpoint([f"{name} is not as shardfuse writes it: {text[:200]}"]) from None


class FileRecord(NamedTuple):
    """A file that is read as a whole."""

    name: str
    nbytes: int
    digest: str

    @classmethod
    def of(cls, name: str, data: bytes) -> FileRecord:
        """Return what ``data`` is written as."""
        return cls(name, len(data), digest_of(data))


class ParamMeta(NamedTuple):
    """A parameter of an optimizer, of whose states (numel,) is all that is known of their shape."""

    name: str
    shape: list[int]
    stride: list[int]  # in elements; states lie in this order


@dataclass
class Manifest:
    """What makes a folder a checkpoint."""

    world_size: int
    files: list[FileRecord]
    info: dict[str, Any]
    """What the user noted: values that JSON has."""
    params: dict[str, list[ParamMeta]] = field(default_factory=dict)
    """Of each optimizer, by its key: its parameters in the order of their numbers."""
    layouts: dict[str, Any] = field(default_factory=dict)
    """Of each optimizer, by its key: Parts.geometry()."""
    rules: dict[str, str] = field(default_factory=dict)
    """Of each optimizer, by its key: Parts.rule. Not there in early ones."""
    tensors: dict[str, TensorMeta] = field(default_factory=dict)
    """Of all ranks' indices."""
    counts: dict[str, int] = field(default_factory=dict)
    """Of all ranks' indices."""
    checksum: int = field(default=0, compare=False)
    """Of 24 bits, the same for the same manifest; not saved."""

    def to_bytes(self) -> bytes:
        """Return the contents of its file."""
        content = {
            "format": FORMAT,
            "world_size": self.world_size,
            "files": self.files,
            "info": self.info,
            "params": self.params,
            "layouts": self.layouts,
            "rules": self.rules,
            "kinds": self.tensors,
            "counts": self.counts,
        }
        return encode_with_digest(content)

    @classmethod
    def read(cls, source: CheckpointReader) -> Manifest:
        """Return the manifest of a checkpoint.

        Raises:
            CheckpointError: the folder is none, or of a later format.
            DamagedCheckpoint: it is damaged.
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
                FileRecord(_as_file_name(file), _as_int(nbytes, most=_MAX_READ_NBYTES), str(digest))
                for file, nbytes, digest in content["files"]
            ]
            held = cls(_as_int(content["world_size"], 1), files, _as_dict(content["info"]))
            expected = {METADATA, *(ShardIndex(rank).name for rank in range(len(files) - 1))}
            if {file.name for file in files} != expected or held.world_size != len(files) - 1:
                raise ValueError(f"its files are not those of {held.world_size:,} ranks")
            for key, notes in _as_dict(content["params"]).items():
                held.params[key] = [_as_param_meta(note) for note in notes]
            # Not there in the first ones of this format: then all parts are read.
            held.layouts = _as_dict(content.get("layouts", {}))
            held.rules = {k: str(rule) for k, rule in _as_dict(content.get("rules", {})).items()}
            held.counts = _as_counts(content.get("counts", {}))
            held.tensors = _as_tensors(content.get("kinds", {}))
        held.checksum = 1 + zlib.crc32(data) % ((1 << 24) - 1)
        return held

    def read_file(self, source: CheckpointReader, file: FileRecord) -> bytes:
        """Return the contents of one of its files; DamagedCheckpoint where they are others."""
        data = source.read(file.name, file.nbytes, _MAX_READ_NBYTES)
        if digest_of(data) != file.digest:
            raise DamagedCheckpoint([f"{source.name}/{file.name} is damaged"])
        return data

    def read_indices(
        self, source: CheckpointReader, ranks: Collection[int] | None = None
    ) -> list[ShardIndex]:
        """Return what ``ranks`` have written; None: all.

        Raises:
            DamagedCheckpoint: some are damaged; all of these are named.
        """
        parts, faults = [], []
        names = None if ranks is None else {ShardIndex(rank).name for rank in ranks}
        for file in self.files:
            if file.name == METADATA or (names is not None and file.name not in names):
                continue
            try:
                data = self.read_file(source, file)
                part = ShardIndex.from_bytes(data, f"{source.name}/{file.name}")
                faults += self._differences(source, part, file)
                parts.append(part)
            except DamagedCheckpoint as damage:
                faults += damage.faults
        if ranks is None and not faults:
            faults += coverage_faults(parts)
        if faults:
            raise DamagedCheckpoint(faults)
        return parts

    def _differences(
        self, source: CheckpointReader, part: ShardIndex, file: FileRecord
    ) -> list[str]:
        """Return how what a rank says of its tensors differs from what the manifest says."""
        name = f"{source.name}/{file.name}"
        if part.name != file.name:
            return [f"{name} is of rank {part.rank}"]
        kinds = part.tensors.items() if self.tensors else ()
        return [
            f"{name} has {key} as {kind}, the manifest as {self.tensors.get(key)}"
            for key, kind in kinds
            if self.tensors.get(key) != kind
        ]


def _as_param_meta(content: Any) -> ParamMeta:
    """Read the note of a parameter; ValueError unless it is dense, as parameters are."""
    name, shape, stride = content
    note = ParamMeta(str(name), [*_as_ints(shape)], [*_as_ints(stride)])
    expected = 1
    if 0 not in note.shape:
        for step, size in sorted(zip(note.stride, note.shape, strict=True)):
            if size > 1 and step != expected:
                raise ValueError(f"{note.name} has the strides {note.stride} at {note.shape}")
            expected *= size
    _as_int(expected)
    return note


def find_checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints in ``folder/step-N`` or ``folder/*/step-N``, the newest first.

    The second is how a run's folder has them, such as RUN/checkpoints/step-N.
    """
    paths = (path.parent for way in ("", "*/") for path in folder.glob(f"{way}step-*/{MANIFEST}"))
    found = [(step, path) for path in paths if (step := step_in_name(path.name)) is not None]
    return [path for _, path in sorted(found, reverse=True)]


def entry_faults(source: CheckpointReader, items: Iterable[IndexEntry]) -> list[str]:
    """Return which of ``items`` are not as they were written, by file, key and place."""
    by_file: dict[str, list[IndexEntry]] = {}
    for item in items:
        by_file.setdefault(item.file, []).append(item)
    faults: list[str] = []
    for name, members in sorted(by_file.items()):
        place = f"{source.name}/{name}"
        try:
            faults += _file_faults(source, name, sorted(members, key=lambda item: item.start))
        except FileNotFoundError:
            faults.append(f"{place} is missing")
        except OSError as error:
            faults.append(f"{place} cannot be read ({error.strerror})")
    return faults


def _file_faults(source: CheckpointReader, name: str, items: Sequence[IndexEntry]) -> Iterator[str]:
    """Yield what is damaged in one file; what is cut off, as one."""
    with source.opened(name) as file:
        nbytes = file.seek(0, 2)
        whole = max(item.start + item.length for item in items)
        lost = [item for item in items if item.start + item.length > nbytes]
        there = [item for item in items if item.start + item.length <= nbytes]
        digests = digests_in(file, [(item.start, item.length) for item in there])
        for item, digest in zip(there, digests, strict=True):
            if digest != item.digest:
                yield f"{item.describe()} of {source.name} is damaged"
    if lost:
        more = f" and {len(lost) - 1} more" if len(lost) > 1 else ""
        yield (
            f"{source.name}/{name} has {nbytes:,} bytes of at least {whole:,}: "
            f"{lost[0].describe()}{more} cannot be read"
        )


def length_faults(
    source: CheckpointReader, parts: Iterable[ShardIndex], *, is_exact: bool = False
) -> list[str]:
    """Return which files end before their last item, or, if ``is_exact``, after it.

    No digest is of what comes after it.
    """
    ends: dict[str, int] = {}
    for item in (item for part in parts for item in part.entries):
        ends[item.file] = max(ends.get(item.file, 0), item.start + item.length)
    faults = []
    for name, end in sorted(ends.items()):
        if source.folder.has_file(name):  # else that is told by who reads it
            more = source.folder.size(name) - end
            if more < 0 and not is_exact:
                faults.append(f"{source.name}/{name} has {end + more:,} bytes of at least {end:,}")
            elif more > 0 and is_exact:
                faults.append(f"{source.name}/{name} has {more:,} bytes that nobody has saved")
    return faults


def coverage_faults(parts: Iterable[ShardIndex]) -> list[str]:
    """Return which tensors are not there as a whole, or which ranks have as different ones."""
    kinds: dict[str, TensorMeta] = {}
    boxes: dict[str, list[tuple[Sequence[int], Sequence[int]]]] = {}
    faults = []
    for part in parts:
        for key, kind in part.tensors.items():
            if kinds.setdefault(key, kind) != kind:
                faults.append(f"{key} is {kind} on rank {part.rank} and {kinds[key]} on another")
        for item in part.entries:
            if item.offsets is not None:
                boxes.setdefault(item.key, []).append((item.offsets, item.sizes))
    for key, kind in kinds.items():
        found = boxes.get(key, [])
        count, numel = sum(math.prod(sizes) for _, sizes in found), math.prod(kind.shape)
        if count != numel:
            faults.append(f"{key} has {count:,} elements of {numel:,}")
        elif not are_same_elements(found, [((0,) * len(kind.shape), kind.shape)]):
            faults.append(f"{key} has some elements twice and lacks others")
    return faults


def are_same_elements(
    boxes: Iterable[tuple[Sequence[int], Sequence[int]]],
    others: Iterable[tuple[Sequence[int], Sequence[int]]],
) -> bool:
    """Return whether two lists of (offsets, sizes) have the same elements, each as often.

    Each element, at (i, j, ...), stands for the product x**i * y**j * ..., so that a list stands
    for a polynomial, and a box for a product of geometric series. Both are evaluated at one random
    point of a field of 2**127 - 1 elements: different ones are equal there with a probability
    below 2**-60 (Schwartz-Zippel lemma). It takes the same time for every form of boxes.
    """
    bases = [secrets.randbelow(_PRIME - 2) + 2 for _ in range(_MAX_DIMS)]

    def value(boxes: Iterable[tuple[Sequence[int], Sequence[int]]]) -> int:
        total = 0
        for offsets, sizes in boxes:
            product = 1
            for x, first, size in zip(bases, offsets, sizes, strict=False):
                # The series is this divided by x - 1, as on the other side.
                series = pow(x, size, _PRIME) - 1
                product = product * pow(x, first, _PRIME) * series % _PRIME
            total += product
        return total % _PRIME

    return value(boxes) == value(others)


_PRIME = (1 << 127) - 1
_MAX_DIMS = 64
"""Of a tensor of torch."""


def encode_with_digest(content: Mapping[str, Any]) -> bytes:
    """Return ``content`` as JSON with a digest of its own text."""
    text = json.dumps(content, separators=(",", ":")).encode()
    return b'{"digest":"%s","content":%s}\n' % (digest_of(text).encode(), text)


def decode_with_digest(data: bytes, name: str) -> dict[str, Any]:
    """Return what was sealed; DamagedCheckpoint naming ``name`` where a byte is another."""
    start, end = b'{"digest":"', b"}\n"
    text = data[len(start) + DIGEST_LEN + len('","content":') : -len(end)]
    if data != b'%s%s","content":%s%s' % (start, digest_of(text).encode(), text, end):
        raise DamagedCheckpoint([f"{name} is damaged"])
    with _reports_other_form(name):
        return _as_dict(json.loads(text))
