"""Whole tensors of a checkpoint, in the formats that others read."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardfuse.checkpoint.errors import CheckpointError, DamagedCheckpoint
from shardfuse.checkpoint.index import Item, Manifest, ParamNote, Part, end_faults, item_faults
from shardfuse.checkpoint.replacement import opened
from shardfuse.checkpoint.source import Source
from shardfuse.checkpoint.storage import Reading, dtype_named

_MASTER = "param"
"""State key of the fp32 master of a parameter in low precision."""


def read_model(folder: str | Path, key: str = "model") -> dict[str, Tensor]:
    """Return a module's ``state_dict()`` of whole CPU tensors, without extra state. Local.

    Peak memory is that of the result and one fragment.

    Args:
        folder: the checkpoint.
        key: of the module in what was saved.

    Raises:
        DamagedCheckpoint: what is read is not as it was written.
        CheckpointError: there is no checkpoint, or nothing of that key in it.
    """
    with opened(Path(folder).absolute()) as files:
        return _model_of(_Whole(files), key)


def _model_of(source: _Whole, key: str) -> dict[str, Tensor]:
    prefix = f"{key}."
    wanted = {
        k.removeprefix(prefix): kind for k, kind in source.kinds.items() if k.startswith(prefix)
    }
    if not wanted:
        raise CheckpointError(f"{source.path} has no module {key!r}. It has {source.keys}.")
    model = {
        name: torch.empty(kind.shape, dtype=dtype_named(kind.dtype))
        for name, kind in wanted.items()
    }
    source.read({key: model})
    return model


def read_optimizer(folder: str | Path, key: str = "optimizer") -> dict[str, Any]:
    """Return the state of an optimizer as torch.optim's ``state_dict()`` has it, whole. Local.

    {"state": {number: {"step", "exp_avg", ...}}, "param_groups": [...]}: CPU tensors of the
    parameters' shapes, fp32; steps as fp32 tensors (). What sharded ones keep of parameters in
    low precision is there as "param" (the fp32 master). Peak memory is that of the result and one
    fragment.

    Args:
        folder: the checkpoint.
        key: of the optimizer in what was saved.

    Raises:
        DamagedCheckpoint: what is read is not as it was written.
        CheckpointError: there is no checkpoint, or no optimizer of that key in it.
    """
    with opened(Path(folder).absolute()) as files:
        return _optimizer_of(_Whole(files), key)


def _optimizer_of(source: _Whole, key: str) -> dict[str, Any]:
    notes = source.manifest.params.get(key)
    if notes is None:
        raise CheckpointError(f"{source.path} has no optimizer {key!r}. It has {source.keys}.")
    flat: dict[str, Any] = {}
    for name, kind in source.kinds.items():
        if name.startswith(f"{key}.state."):
            flat[name.removeprefix(f"{key}.")] = torch.empty(
                kind.shape, dtype=dtype_named(kind.dtype)
            )
    groups = source.groups(key)
    source.read({key: {**flat, "param_groups": groups}})
    state: dict[int, dict[str, Any]] = {}
    try:
        for group in groups:
            state |= _states_of([(number, notes[number]) for number in group["params"]], flat)
    except (LookupError, TypeError, RuntimeError) as error:
        raise DamagedCheckpoint(
            [f"{source.path.name} has states of other params: {error}"]
        ) from None
    return {"state": state, "param_groups": groups}


def _states_of(
    params: Sequence[tuple[int, ParamNote]], flat: Mapping[str, Tensor]
) -> dict[int, dict[str, Any]]:
    """Return the entries of one group's parameters, from {"state.<name>.<state>": (numel,)}."""
    names = {key.rpartition(".")[2] for _, note in params for key in _keys_of(note, flat)}
    entries = {}
    for number, note in params:
        step = int(flat[f"state.{note.name}.step"])
        tensors = {}
        for name in sorted(names - {"step"}):
            tensor = flat.get(f"state.{note.name}.{name}")
            if tensor is not None:
                if tensor.numel() != math.prod(note.shape):
                    raise LookupError(f"{name} of {note.name} has {tensor.numel():,} elements")
                tensors[name] = tensor.as_strided(note.shape, note.stride)
            elif 0 in note.shape and name != _MASTER:  # of nothing, nothing is saved
                tensors[name] = torch.zeros(note.shape)
        if step > 0 or _MASTER in tensors:
            entries[number] = {"step": torch.tensor(float(step)), **tensors}
    return entries


def _keys_of(note: ParamNote, flat: Mapping[str, Tensor]) -> list[str]:
    prefix = f"state.{note.name}."
    return [key for key in flat if key.startswith(prefix) and "." not in key[len(prefix) :]]


class _Whole:
    """A checkpoint that is read as a whole."""

    def __init__(self, source: Source) -> None:
        self._source, self.path = source, source.path
        self.manifest = Manifest.read(source)
        self._parts: list[Part] = self.manifest.parts(source)
        faults = end_faults(source, self._parts)  # before there is room for what they promise
        if faults:
            raise DamagedCheckpoint(faults)
        self.kinds = {key: kind for part in self._parts for key, kind in part.kinds.items()}
        self.keys = sorted({item.key.partition(".")[0] for item in self._items()})

    def _items(self) -> list[Item]:
        return [item for part in self._parts for item in part.items]

    def groups(self, key: str) -> list[dict[str, Any]]:
        """Return param_groups of the right form, to be filled."""
        groups: list[dict[str, Any]] = []
        places = {k: path for part in self._parts for k, path in part.paths.items()}
        paths = {tuple(places.get(item.key, ())) for item in self._items()}
        own = [path[2:] for path in paths if path[:2] == (key, "param_groups")]
        # Numbers in order, so that lists grow by one.
        for path in sorted(own, key=lambda path: [(type(s) is str, s) for s in path]):
            try:
                _grow(groups, path)
            except (IndexError, KeyError, TypeError) as error:
                raise DamagedCheckpoint(
                    [f"{self._source.name} has a value at {path} of {key}: {error}"]
                ) from None
        return groups

    def read(self, state: dict[str, Any]) -> None:
        """Fill ``state``."""
        reading = Reading(self._source, self._parts, state)
        items = reading.items(self._parts)
        self._source.keep(item.file for item in items)
        faults = item_faults(self._source, items)
        if faults:
            raise DamagedCheckpoint(faults)
        reading.read()


def _grow(holder: Any, path: Any) -> None:
    """Make room in nested dicts and lists for a value at ``path``."""
    for at, following in zip(path, [*path[1:], None], strict=True):
        empty: Any = 0 if following is None else [] if isinstance(following, int) else {}
        if isinstance(holder, list):
            if at > len(holder):
                raise IndexError(f"there is none at {len(holder)} before it")
            if at == len(holder):
                holder.append(type(empty)() if following is not None else 0)
        elif at not in holder:
            holder[at] = empty
        holder = holder[at]


def write_model(model: Mapping[str, Tensor], path: str | Path) -> None:
    """Write whole tensors as safetensors, or by torch.save() where the name ends in ``.pt``.

    Raises:
        CheckpointError: the package safetensors is not installed.
    """
    if Path(path).suffix == ".pt":
        torch.save(dict(model), path)
        return
    try:
        from safetensors.torch import save_file
    except ImportError:
        raise CheckpointError(
            "safetensors is not installed: pip install safetensors, or name a file *.pt."
        ) from None
    save_file({name: tensor.contiguous() for name, tensor in model.items()}, path)
