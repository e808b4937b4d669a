"""What a checkpoint's own files say: which fragment lies where, and what its digest is.

FOLDER/
    __3_0.distcp     what rank 3 wrote, in the format of torch.distributed.checkpoint
    part-3.json      which fragments these are: key, place in the tensor, place in the file, digest
    .metadata        the same of all ranks, pickled, for torch.distributed.checkpoint.load()
    manifest.json    the digests of .metadata and of every part-*.json; written last

Both JSON files begin with the digest of the rest of their text. So every byte of every file is
under a digest that is under the manifest's.
"""

from __future__ import annotations

import json
import math
import re
import secrets
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from shardfuse.checkpoint.errors import CheckpointError, DamagedCheckpoint
from shardfuse.checkpoint.source import Source
from shardfuse.files import DIGEST_LEN, digest_of, digests_in

FORMAT = 1
MANIFEST = "manifest.json"
METADATA = ".metadata"

_MOST_NBYTES = 1 << 28
"""Of a file that is read as a whole. Python needs some eight times as much memory for it."""

_MOST = 1 << 62
_PLAIN = re.compile(r"(?!\.{1,2}$)[^/\0]{1,255}")
_LEGIBLE = (
    AttributeError,
    IndexError,
    KeyError,
    OverflowError,
    RecursionError,
    TypeError,
    ValueError,
)
"""What reading JSON of another form raises."""


def _number(value: Any, least: int = 0, most: int = _MOST) -> int:
    """Return an integer of JSON; ValueError where it is something else, or out of bounds."""
    if type(value) is not int or not least <= value <= most:
        raise ValueError(f"{str(value)[:40]!r} is no whole number from {least:,} to {most:,}")
    return value


def _numbers(values: Any) -> tuple[int, ...]:
    if type(values) is not list:
        raise ValueError(f"{str(values)[:40]!r} is no list")
    return tuple(map(_number, values))


def _plain(name: Any) -> str:
    """Return the name of a file of the folder; ValueError where it leads elsewhere."""
    if type(name) is not str or not _PLAIN.fullmatch(name):
        raise ValueError(f"{str(name)[:40]!r} is no name of a file in the folder")
    return name


def _dict(value: Any) -> dict[str, Any]:
    if type(value) is not dict:
        raise ValueError(f"{str(value)[:40]!r} is no object")
    return value


_STEP = re.compile(r"step-(0|[1-9][0-9]{0,14})")

NO_STEP = (1 << 48) - 1
"""More than every number of steps."""


def step_of(name: str) -> int | None:
    """Return the number of steps that the folder of a run's checkpoint is named for, or None."""
    found = _STEP.fullmatch(name)
    return int(found[1]) if found and int(found[1]) < NO_STEP - 1 else None


Place = Sequence[str | int]
"""Where a value lies in nested dicts and lists."""


class Item(NamedTuple):
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


class Kind(NamedTuple):
    """What the tensor of a key is as a whole."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype.itemsize


def _kinds(content: Any) -> dict[str, Kind]:
    kinds = {key: Kind(dtype, _numbers(shape)) for key, (dtype, shape) in _dict(content).items()}
    for key, kind in kinds.items():
        _number(len(kind.shape), most=_MOST_DIMS)
        if not isinstance(getattr(torch, str(kind.dtype), None), torch.dtype):
            raise ValueError(f"{key} has no dtype of torch, but {str(kind.dtype)[:40]!r}")
        _number(math.prod(kind.shape))
    return kinds


def _counts(content: Any) -> dict[str, int]:
    return {key: _number(count) for key, count in _dict(content).items()}


def _item(content: Any, kinds: Mapping[str, Kind]) -> Item:
    """Read one item of JSON; ValueError where it does not fit the tensor that it is a part of."""
    key, offsets, sizes, file, start, length, digest = content
    item = Item(
        key,
        None if offsets is None else _numbers(offsets),
        _numbers(sizes),
        _plain(file),
        _number(start),
        _number(length),
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
class Part:
    """What one rank has written."""

    rank: int
    items: list[Item] = field(default_factory=list)
    kinds: dict[str, Kind] = field(default_factory=dict)
    paths: dict[str, Place] = field(default_factory=dict)  # of keys in the nested state
    counts: dict[str, int] = field(default_factory=dict)  # integers of no dimension: steps

    @property
    def name(self) -> str:
        """Name of the file that says so."""
        return f"part-{self.rank}.json"

    def to_bytes(self) -> bytes:
        """Return the contents of its file."""
        return sealed(vars(self))

    @classmethod
    def from_bytes(cls, data: bytes, name: str) -> Part:
        """Read what to_bytes() returned; DamagedCheckpoint where it is something else."""
        content = unsealed(data, name)
        with _legible(name):
            kinds = _kinds(content["kinds"])
            items = [_item(item, kinds) for item in content["items"]]
            paths = {key: _path(path) for key, path in _dict(content["paths"]).items()}
            counts = _counts(content.get("counts", {}))
            return cls(_number(content["rank"]), items, kinds, paths, counts)


def _path(path: Any) -> Place:
    if type(path) is not list or not all(type(step) in (int, str) for step in path):
        raise ValueError(f"{str(path)[:40]!r} is no place in nested dicts and lists")
    return [_number(step) if type(step) is int else step for step in path]


@contextmanager
def _legible(name: str) -> Iterator[None]:
    """Raise DamagedCheckpoint where JSON, whose digest is right, has another form."""
    try:
        yield
    except _LEGIBLE as error:
        text = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise DamagedCheckpoint([f"{name} is not as shardfuse writes it: {text[:200]}"]) from None


class File(NamedTuple):
    """A file that is read as a whole."""

    name: str
    nbytes: int
    digest: str

    @classmethod
    def of(cls, name: str, data: bytes) -> File:
        """Return what ``data`` is written as."""
        return cls(name, len(data), digest_of(data))


class ParamNote(NamedTuple):
    """A parameter of an optimizer, of whose states (numel,) is all that is known of their shape."""

    name: str
    shape: list[int]
    stride: list[int]  # in elements; states lie in this order


@dataclass
class Manifest:
    """What makes a folder a checkpoint."""

    world_size: int
    files: list[File]
    info: dict[str, Any]
    """What the user noted: values that JSON has."""
    params: dict[str, list[ParamNote]] = field(default_factory=dict)
    """Of each optimizer, by its key: its parameters in the order of their numbers."""
    layouts: dict[str, Any] = field(default_factory=dict)
    """Of each optimizer, by its key: Parts.geometry()."""
    rules: dict[str, str] = field(default_factory=dict)
    """Of each optimizer, by its key: Parts.rule. Not there in early ones."""
    kinds: dict[str, Kind] = field(default_factory=dict)
    """Of all parts."""
    counts: dict[str, int] = field(default_factory=dict)
    """Of all parts."""
    word: int = field(default=0, compare=False)
    """Of 24 bits, the same for the same manifest; not saved."""

    def to_bytes(self) -> bytes:
        """Return the contents of its file."""
        return sealed({"format": FORMAT, **{k: v for k, v in vars(self).items() if k != "word"}})

    @classmethod
    def read(cls, source: Source) -> Manifest:
        """Return the manifest of a checkpoint.

        Raises:
            CheckpointError: the folder is none, or of a later format.
            DamagedCheckpoint: it is damaged.
        """
        name = f"{source.name}/{MANIFEST}"
        if MANIFEST not in source.folder.names():
            inside = checkpoints_in(source.path)
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
        data = source.read(MANIFEST, None, _MOST_NBYTES)
        content = unsealed(data, name)
        with _legible(name):
            version = _number(content["format"])
            if version > FORMAT:
                raise CheckpointError(
                    f"{source.path} has format {version}; this version reads {FORMAT}. Upgrade."
                )
            files = [
                File(_plain(file), _number(nbytes, most=_MOST_NBYTES), str(digest))
                for file, nbytes, digest in content["files"]
            ]
            held = cls(_number(content["world_size"], 1), files, _dict(content["info"]))
            expected = {METADATA, *(Part(rank).name for rank in range(len(files) - 1))}
            if {file.name for file in files} != expected or held.world_size != len(files) - 1:
                raise ValueError(f"its files are not those of {held.world_size:,} ranks")
            for key, notes in _dict(content["params"]).items():
                held.params[key] = [_note(note) for note in notes]
            # Not there in the first ones of this format: then all parts are read.
            held.layouts = _dict(content.get("layouts", {}))
            held.rules = {k: str(rule) for k, rule in _dict(content.get("rules", {})).items()}
            held.counts = _counts(content.get("counts", {}))
            held.kinds = _kinds(content.get("kinds", {}))
        held.word = 1 + zlib.crc32(data) % ((1 << 24) - 1)
        return held

    def read_file(self, source: Source, file: File) -> bytes:
        """Return the contents of one of its files; DamagedCheckpoint where they are others."""
        data = source.read(file.name, file.nbytes, _MOST_NBYTES)
        if digest_of(data) != file.digest:
            raise DamagedCheckpoint([f"{source.name}/{file.name} is damaged"])
        return data

    def parts(self, source: Source, ranks: Collection[int] | None = None) -> list[Part]:
        """Return what ``ranks`` have written; None: all.

        Raises:
            DamagedCheckpoint: some are damaged; all of these are named.
        """
        parts, faults = [], []
        names = None if ranks is None else {Part(rank).name for rank in ranks}
        for file in self.files:
            if file.name == METADATA or (names is not None and file.name not in names):
                continue
            try:
                data = self.read_file(source, file)
                part = Part.from_bytes(data, f"{source.name}/{file.name}")
                faults += self._differences(source, part, file)
                parts.append(part)
            except DamagedCheckpoint as damage:
                faults += damage.faults
        if ranks is None and not faults:
            faults += coverage_faults(parts)
        if faults:
            raise DamagedCheckpoint(faults)
        return parts

    def _differences(self, source: Source, part: Part, file: File) -> list[str]:
        """Return how what a rank says of its tensors differs from what the manifest says."""
        name = f"{source.name}/{file.name}"
        if part.name != file.name:
            return [f"{name} is of rank {part.rank}"]
        kinds = part.kinds.items() if self.kinds else ()
        return [
            f"{name} has {key} as {kind}, the manifest as {self.kinds.get(key)}"
            for key, kind in kinds
            if self.kinds.get(key) != kind
        ]


def _note(content: Any) -> ParamNote:
    """Read the note of a parameter; ValueError unless it is dense, as parameters are."""
    name, shape, stride = content
    note = ParamNote(str(name), [*_numbers(shape)], [*_numbers(stride)])
    expected = 1
    if 0 not in note.shape:
        for step, size in sorted(zip(note.stride, note.shape, strict=True)):
            if size > 1 and step != expected:
                raise ValueError(f"{note.name} has the strides {note.stride} at {note.shape}")
            expected *= size
    _number(expected)
    return note


def checkpoints_in(folder: Path) -> list[Path]:
    """Return the checkpoints in ``folder/step-N`` or ``folder/*/step-N``, the newest first.

    The second is how a run's folder has them, such as RUN/checkpoints/step-N.
    """
    paths = (path.parent for way in ("", "*/") for path in folder.glob(f"{way}step-*/{MANIFEST}"))
    found = [(step, path) for path in paths if (step := step_of(path.name)) is not None]
    return [path for _, path in sorted(found, reverse=True)]


def item_faults(source: Source, items: Iterable[Item]) -> list[str]:
    """Return which of ``items`` are not as they were written, by file, key and place."""
    by_file: dict[str, list[Item]] = {}
    for item in items:
        by_file.setdefault(item.file, []).append(item)
    faults: list[str] = []
    for name, members in sorted(by_file.items()):
        place = f"{source.name}/{name}"
        try:
            faults += _faults_in(source, name, sorted(members, key=lambda item: item.start))
        except FileNotFoundError:
            faults.append(f"{place} is missing")
        except OSError as error:
            faults.append(f"{place} cannot be read ({error.strerror})")
    return faults


def _faults_in(source: Source, name: str, items: Sequence[Item]) -> Iterator[str]:
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


def end_faults(source: Source, parts: Iterable[Part], *, is_exact: bool = False) -> list[str]:
    """Return which files end before their last item, or, if ``is_exact``, after it.

    No digest is of what comes after it.
    """
    ends: dict[str, int] = {}
    for item in (item for part in parts for item in part.items):
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


def coverage_faults(parts: Iterable[Part]) -> list[str]:
    """Return which tensors are not there as a whole, or which ranks have as different ones."""
    kinds: dict[str, Kind] = {}
    boxes: dict[str, list[tuple[Sequence[int], Sequence[int]]]] = {}
    faults = []
    for part in parts:
        for key, kind in part.kinds.items():
            if kinds.setdefault(key, kind) != kind:
                faults.append(f"{key} is {kind} on rank {part.rank} and {kinds[key]} on another")
        for item in part.items:
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
    bases = [secrets.randbelow(_PRIME - 2) + 2 for _ in range(_MOST_DIMS)]

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
_MOST_DIMS = 64
"""Of a tensor of torch."""


def sealed(content: Mapping[str, Any]) -> bytes:
    """Return ``content`` as JSON with a digest of its own text."""
    text = json.dumps(content, separators=(",", ":")).encode()
    return b'{"digest":"%s","content":%s}\n' % (digest_of(text).encode(), text)


def unsealed(data: bytes, name: str) -> dict[str, Any]:
    """Return what was sealed; DamagedCheckpoint naming ``name`` where a byte is another."""
    start, end = b'{"digest":"', b"}\n"
    text = data[len(start) + DIGEST_LEN + len('","content":') : -len(end)]
    if data != b'%s%s","content":%s%s' % (start, digest_of(text).encode(), text, end):
        raise DamagedCheckpoint([f"{name} is damaged"])
    with _legible(name):
        return _dict(json.loads(text))
