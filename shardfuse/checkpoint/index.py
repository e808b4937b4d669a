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
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from shardfuse.checkpoint.errors import CheckpointError, DamagedCheckpoint
from shardfuse.files import DIGEST_LEN, digest_of, digests_in

FORMAT = 1
MANIFEST = "manifest.json"
METADATA = ".metadata"

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


def _kinds(content: Mapping[str, Any]) -> dict[str, Kind]:
    return {key: Kind(dtype, tuple(shape)) for key, (dtype, shape) in content.items()}


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
        items = [
            Item(key, None if offsets is None else tuple(offsets), tuple(sizes), *rest)
            for key, offsets, sizes, *rest in content["items"]
        ]
        kinds = _kinds(content["kinds"])
        return cls(content["rank"], items, kinds, content["paths"], content.get("counts", {}))


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

    def to_bytes(self) -> bytes:
        """Return the contents of its file."""
        return sealed({"format": FORMAT, **vars(self)})

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Return the manifest of a checkpoint.

        Raises:
            CheckpointError: the folder is none, or of a later format.
            DamagedCheckpoint: it is damaged.
        """
        try:
            data = (folder / MANIFEST).read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            if not folder.is_dir():
                raise CheckpointError(f"There is no checkpoint {folder}.") from None
            inside = checkpoints_in(folder)
            if inside:
                names = ", ".join(str(path.relative_to(folder)) for path in reversed(inside))
                raise CheckpointError(
                    f"{folder} is a folder of checkpoints. Name one: {names}. The newest is "
                    f"{inside[0]}."
                ) from None
            raise DamagedCheckpoint(
                [f"{folder.name}/{MANIFEST} is missing"],
                "If shardfuse has not saved it, torch.distributed.checkpoint.load() may read it.",
            ) from None
        content = unsealed(data, f"{folder.name}/{MANIFEST}")
        if content["format"] > FORMAT:
            raise CheckpointError(
                f"{folder} has format {content['format']}; this version reads {FORMAT}. Upgrade."
            )
        files = [File(*file) for file in content["files"]]
        params = {key: [ParamNote(*n) for n in notes] for key, notes in content["params"].items()}
        held = cls(content["world_size"], files, content["info"], params)
        # Not there in the first ones of this format: then all parts are read.
        held.layouts = content.get("layouts", {})
        held.rules = content.get("rules", {})
        held.counts = content.get("counts", {})
        held.kinds = _kinds(content.get("kinds", {}))
        return held

    def read_file(self, folder: Path, file: File) -> bytes:
        """Return the contents of one of its files; DamagedCheckpoint where they are others."""
        name = f"{folder.name}/{file.name}"
        try:
            data = (folder / file.name).read_bytes()
        except FileNotFoundError:
            raise DamagedCheckpoint([f"{name} is missing"]) from None
        if len(data) != file.nbytes:
            raise DamagedCheckpoint([f"{name} has {len(data):,} bytes of {file.nbytes:,}"])
        if digest_of(data) != file.digest:
            raise DamagedCheckpoint([f"{name} is damaged"])
        return data

    def parts(self, folder: Path, ranks: Collection[int] | None = None) -> list[Part]:
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
                data = self.read_file(folder, file)
                parts.append(Part.from_bytes(data, f"{folder.name}/{file.name}"))
            except DamagedCheckpoint as damage:
                faults += damage.faults
        if faults:
            raise DamagedCheckpoint(faults)
        return parts


def checkpoints_in(folder: Path) -> list[Path]:
    """Return the checkpoints in ``folder/step-N`` or ``folder/*/step-N``, the newest first.

    The second is how a run's folder has them, such as RUN/checkpoints/step-N.
    """
    paths = (path.parent for way in ("", "*/") for path in folder.glob(f"{way}step-*/{MANIFEST}"))
    found = [path for path in paths if path.name.removeprefix("step-").isdecimal()]
    return sorted(
        found, key=lambda path: (int(path.name.removeprefix("step-")), path), reverse=True
    )


def item_faults(folder: Path, items: Iterable[Item]) -> list[str]:
    """Return which of ``items`` are not as they were written, by file, key and place."""
    by_file: dict[str, list[Item]] = {}
    for item in items:
        by_file.setdefault(item.file, []).append(item)
    faults: list[str] = []
    for name, members in sorted(by_file.items()):
        try:
            faults += _faults_in(folder, name, sorted(members, key=lambda item: item.start))
        except FileNotFoundError:
            faults.append(f"{folder.name}/{name} is missing")
        except OSError as error:
            faults.append(f"{folder.name}/{name} cannot be read ({error.strerror})")
    return faults


def _faults_in(folder: Path, name: str, items: Sequence[Item]) -> Iterator[str]:
    """Yield what is damaged in one file; what is cut off, as one."""
    path = folder / name
    digests = digests_in(path, [(item.start, item.length) for item in items])
    lost = []
    for item, digest in zip(items, digests, strict=True):
        if not digest:
            lost.append(item)
        elif digest != item.digest:
            yield f"{item.describe()} of {folder.name} is damaged"
    if lost:
        more = f" and {len(lost) - 1} more" if len(lost) > 1 else ""
        nbytes, whole = path.stat().st_size, items[-1].start + items[-1].length
        yield (
            f"{folder.name}/{name} has {nbytes:,} bytes of at least {whole:,}: "
            f"{lost[0].describe()}{more} cannot be read"
        )


def coverage_faults(parts: Iterable[Part]) -> list[str]:
    """Return which tensors are not there as a whole, or which ranks have as different ones."""
    kinds: dict[str, Kind] = {}
    counts: dict[str, int] = {}
    faults = []
    for part in parts:
        for key, kind in part.kinds.items():
            if kinds.setdefault(key, kind) != kind:
                faults.append(f"{key} is {kind} on rank {part.rank} and {kinds[key]} on another")
        for item in part.items:
            if item.offsets is not None:
                counts[item.key] = counts.get(item.key, 0) + math.prod(item.sizes)
    for key, kind in kinds.items():
        numel = math.prod(kind.shape)
        if counts.get(key, 0) != numel:
            faults.append(f"{key} has {counts.get(key, 0):,} elements of {numel:,}")
    return faults


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
    content: dict[str, Any] = json.loads(text)
    return content
