"""Files that other libraries wrote by torch.save(), read without running what they say."""

from __future__ import annotations

import argparse
import functools
import pickle
import zipfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch

from shardfuse.checkpoint.errors import CheckpointError, DamagedCheckpoint

P = ParamSpec("P")
R = TypeVar("R")

_MOST_COMPRESSED = 100
"""Times; torch.save() does not compress, and a zip file can say that a byte stands for 1,032."""

_NUM_NAMED = 20
_WRONG_FORM = (
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
    OSError,
    RuntimeError,  # of torch, and RecursionError
    TypeError,
    ValueError,
)


def interprets(kind: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Have a function raise CheckpointError where files are not of the form of ``kind``.

    What is in a file may be of any type at any place. Where that is not looked at, whatever fails
    of it says that the form is another. The function's first argument is a path.
    """

    def decorate(read: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(read)
        def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
            try:
                return read(*args, **kwargs)
            except CheckpointError:
                raise
            except _WRONG_FORM as error:
                path = args[0] if args else kwargs.get("path", kwargs.get("folder"))
                reason = (str(error).splitlines() or [""])[0][:200]
                raise CheckpointError(
                    f"{path} does not have the form of {kind} ({type(error).__name__}: {reason}). "
                    "Is it of another library or version?"
                ) from error

        return wrapped

    return decorate


def below(folder: Path, name: Any, said_by: Path) -> Path:
    """Return the path of ``name``, which a file says, in a folder.

    Raises:
        CheckpointError: it would lie elsewhere, also by a link.
    """
    path = folder / str(name)
    if ".." in Path(str(name)).parts or not path.is_relative_to(folder) or "\0" in str(name):
        raise CheckpointError(f"{said_by} names {str(name)[:80]!r}, which is not in {folder}.")
    refuse_elsewhere(path, folder)
    return path


def refuse_elsewhere(path: Path, folder: Path) -> None:
    """Raise CheckpointError where a link leads from a path in ``folder`` out of it."""
    found = path.resolve()
    if not found.is_relative_to(folder.resolve()):
        raise CheckpointError(
            f"{path} leads to {found}, which is not in {folder}. Copy what belongs to the "
            "checkpoint there."
        )


def some_of(names: Iterable[Any]) -> str:
    """Return names for an error: those of a forged file may be millions."""
    texts = sorted(str(name)[:80] for name in names)
    more = f" and {len(texts) - _NUM_NAMED} more" if len(texts) > _NUM_NAMED else ""
    return f"{texts[:_NUM_NAMED]}{more}"


class _Record:
    """Stands for an object of a class that is not imported, of which nothing is run."""

    def __init__(self, *values: Any) -> None:
        self.values = values

    def __setstate__(self, state: Any) -> None:
        self.__dict__.update(state if isinstance(state, Mapping) else {})


class _Number(int):
    """Stands for an enum of numbers."""


_APEX = ("apex.amp.scaler", "apex.fp16_utils.loss_scaler")
_DEEPSPEED = "deepspeed.runtime.fp16.loss_scaler"

# A class for each, of the same pickled form: that of the library need not be there.
_KNOWN: list[Any] = [
    (_Record, "deepspeed.utils.tensor_fragment.fragment_address"),
    (_Number, "deepspeed.runtime.zero.config.ZeroStageEnum"),
    *((_Record, f"{_DEEPSPEED}.{n}") for n in ("LossScaler", "DynamicLossScaler")),
    *((_Record, f"{_DEEPSPEED}.{n}") for n in ("LossScaleConfig", "LossScaleProfile")),
    *((_Record, f"{module}.{n}") for module in _APEX for n in ("LossScaler", "DynamicLossScaler")),
    (argparse.Namespace, "argparse.Namespace"),
]


def read_file(path: Path, *, trusted: bool) -> Any:
    """Return what torch.save() wrote, on the CPU.

    Args:
        path: the file.
        trusted: unpickle it, which runs what the file says and imports what it names. Else only
            plain data are read, and loss scalers and the like as records.

    Raises:
        CheckpointError: there is no such file; or it is not trusted, and holds objects, or data
            that are compressed more than 100 times.
        DamagedCheckpoint: the file cannot be read.
    """
    if not path.is_file():
        raise CheckpointError(f"There is no file {path}.")
    try:
        if trusted:
            return torch.load(path, map_location="cpu", weights_only=False)
        with torch.serialization.safe_globals(_KNOWN):
            _refuse_bombs(path)
            _refuse_objects(path)
            return torch.load(path, map_location="cpu", weights_only=True)
    except CheckpointError:
        raise
    except (ImportError, AttributeError) as error:
        raise CheckpointError(
            f"{path} holds objects of a library that is not installed: {error}. Install it, or "
            "read the file without trusted=True."
        ) from error
    except Exception as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        if isinstance(error, pickle.UnpicklingError) and "GLOBAL" in str(error):
            raise _objects(path, str(error).partition("GLOBAL ")[2].split()[:1]) from None
        raise DamagedCheckpoint(
            [f"{path} cannot be read ({reason})"], "Copy it again from where it was written."
        ) from error


def _refuse_bombs(path: Path) -> None:
    """Raise unless what is unpacked has a size that the file can hold, before it is given room."""
    if not zipfile.is_zipfile(path):
        return
    nbytes = path.stat().st_size
    with zipfile.ZipFile(path) as file:
        entries = file.infolist()
    stored = [e for e in entries if e.compress_type == zipfile.ZIP_STORED]
    if sum(entry.file_size for entry in stored) > nbytes:
        raise DamagedCheckpoint([f"{path} says that it holds more bytes than it has"])
    for entry in entries:
        if entry.file_size > max(_MOST_COMPRESSED * entry.compress_size, nbytes):
            raise CheckpointError(
                f"{path} has {entry.filename[:80]!r}, {entry.file_size:,} bytes that are "
                f"compressed more than {_MOST_COMPRESSED} times. torch.save() compresses nothing. "
                "If you trust whoever wrote it, read it with trusted=True (--trusted)."
            )


def _refuse_objects(path: Path) -> None:
    if zipfile.is_zipfile(path):
        found = torch.serialization.get_unsafe_globals_in_checkpoint(path)
        if found:
            raise _objects(path, sorted(found))


def _objects(path: Path, found: Sequence[str]) -> CheckpointError:
    return CheckpointError(
        f"{path} holds objects that are not plain data: {', '.join(found)}. Unpickling them runs "
        "what the file says. If you trust whoever wrote it, read it with trusted=True (--trusted)."
    )


def part_of(found: Any, path: Path, key: str) -> Any:
    """Return the value of ``key`` in what a file holds.

    Raises:
        CheckpointError: it has no such key.
    """
    if not isinstance(found, Mapping) or key not in found:
        held = f"It has {some_of(found)}." if isinstance(found, Mapping) else ""
        raise CheckpointError(f"{path} has no {key!r}, so its layout is unknown. {held}")
    return found[key]
