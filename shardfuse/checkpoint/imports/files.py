"""Files that other libraries wrote by torch.save(), read without running what they say."""

from __future__ import annotations

import argparse
import pickle
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from shardfuse.checkpoint.errors import CheckpointError, DamagedCheckpoint


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
        CheckpointError: there is no such file; or it holds objects, and is not trusted.
        DamagedCheckpoint: the file cannot be read.
    """
    if not path.is_file():
        raise CheckpointError(f"There is no file {path}.")
    try:
        if trusted:
            return torch.load(path, map_location="cpu", weights_only=False)
        with torch.serialization.safe_globals(_KNOWN):
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
        held = f"It has {sorted(map(str, found))}." if isinstance(found, Mapping) else ""
        raise CheckpointError(f"{path} has no {key!r}, so its layout is unknown. {held}")
    return found[key]
