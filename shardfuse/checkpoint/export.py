"""Checkpoints for other readers: full tensors, and reports for people and scripts."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardfuse.checkpoint.folder import Checkpoints
from shardfuse.checkpoint.index import (
    MANIFEST,
    MASTER,
    CheckpointError,
    CheckpointReader,
    DamagedCheckpoint,
    IndexEntry,
    Manifest,
    ParamMeta,
    ShardIndex,
    TensorMeta,
    entry_faults,
    find_checkpoints,
    length_faults,
)
from shardfuse.checkpoint.integrity import verify_share
from shardfuse.checkpoint.replacement import open_checkpoint
from shardfuse.checkpoint.storage import SavedEntries, ShardReader, dtype_from_name
from shardfuse.files import describe_os_error


def read_model(folder: str | Path, key: str = "model") -> dict[str, Tensor]:
    """Return a module's ``state_dict()`` of full CPU tensors, without extra state. Local.

    Peak memory is that of the result and one fragment.

    Args:
        folder: the checkpoint.
        key: key of the module in the saved state.

    Raises:
        DamagedCheckpoint: files differ from the saved ones.
        CheckpointError: there is no checkpoint, or it has no such key.
    """
    with open_checkpoint(Path(folder).absolute()) as files:
        return _read_model(_FullTensorReader(files), key)


def _read_model(source: _FullTensorReader, key: str) -> dict[str, Tensor]:
    prefix = f"{key}."
    wanted = {
        k.removeprefix(prefix): tensor
        for k, tensor in source.tensors.items()
        if k.startswith(prefix)
    }
    if not wanted:
        raise CheckpointError(f"{source.path} has no module {key!r}. It has {source.keys}.")
    model = {
        name: torch.empty(tensor.shape, dtype=dtype_from_name(tensor.dtype))
        for name, tensor in wanted.items()
    }
    source.read({key: model})
    return model


def read_optimizer(folder: str | Path, key: str = "optimizer") -> dict[str, Any]:
    """Return an optimizer's full state in the form of torch.optim's ``state_dict()``. Local.

    {"state": {number: {"step", "exp_avg", ...}}, "param_groups": [...]}: fp32 CPU tensors of the
    parameters' shapes; steps as fp32 tensors (). The fp32 master of a parameter in low precision
    is there as "param". Peak memory is that of the result and one fragment.

    Args:
        folder: the checkpoint.
        key: key of the optimizer in the saved state.

    Raises:
        DamagedCheckpoint: files differ from the saved ones.
        CheckpointError: there is no checkpoint, or it has no such optimizer.
    """
    with open_checkpoint(Path(folder).absolute()) as files:
        return _read_optimizer(_FullTensorReader(files), key)


def _read_optimizer(source: _FullTensorReader, key: str) -> dict[str, Any]:
    params = source.manifest.params.get(key)
    if params is None:
        raise CheckpointError(f"{source.path} has no optimizer {key!r}. It has {source.keys}.")
    flat: dict[str, Any] = {}
    for name, tensor in source.tensors.items():
        if name.startswith(f"{key}.state."):
            flat[name.removeprefix(f"{key}.")] = torch.empty(
                tensor.shape, dtype=dtype_from_name(tensor.dtype)
            )
    groups = source.groups(key)
    source.read({key: {**flat, "param_groups": groups}})
    by_param: dict[str, dict[str, Tensor]] = {}
    for name, tensor in flat.items():
        param, _, state_name = name.removeprefix("state.").rpartition(".")
        by_param.setdefault(param, {})[state_name] = tensor
    state: dict[int, dict[str, Any]] = {}
    try:
        for group in groups:
            members = [(number, params[number]) for number in group["params"]]
            state |= _group_states(members, by_param)
    except (LookupError, TypeError, RuntimeError) as error:
        raise DamagedCheckpoint(
            [f"{source.path.name} has states of other params: {error}"]
        ) from None
    return {"state": state, "param_groups": groups}


def _group_states(
    params: Sequence[tuple[int, ParamMeta]], states: Mapping[str, Mapping[str, Tensor]]
) -> dict[int, dict[str, Any]]:
    """Return one group's entries, from {name of a param: {state: (numel,), or its shape}}."""
    names = {name for _, meta in params for name in states.get(meta.name, ())}
    entries = {}
    for number, meta in params:
        own = states[meta.name]
        step = int(own["step"])
        tensors = {}
        for name in sorted(names - {"step"}):
            tensor = own.get(name)
            if tensor is not None:
                if tensor.numel() != math.prod(meta.shape):
                    raise LookupError(f"{name} of {meta.name} has {tensor.numel():,} elements")
                if tuple(tensor.shape) == tuple(meta.shape):  # else in storage order
                    ordered = torch.empty_strided(meta.shape, meta.stride, dtype=tensor.dtype)
                    tensors[name] = ordered.copy_(tensor)
                else:
                    tensors[name] = tensor.as_strided(meta.shape, meta.stride)
            elif 0 in meta.shape and name != MASTER:  # states without elements are not saved
                tensors[name] = torch.zeros(meta.shape)
        if step > 0 or MASTER in tensors:
            entries[number] = {"step": torch.tensor(float(step)), **tensors}
    return entries


class _FullTensorReader:
    """Reads full tensors of a checkpoint on one process."""

    def __init__(self, source: CheckpointReader) -> None:
        self._source, self.path = source, source.path
        self.manifest = Manifest.read(source)
        self._indices: list[ShardIndex] = self.manifest.read_indices(source)
        faults = length_faults(source, self._indices)  # before tensors of these sizes are allocated
        if faults:
            raise DamagedCheckpoint(faults)
        self.tensors = {
            key: tensor for index in self._indices for key, tensor in index.tensors.items()
        }
        self.keys = sorted({entry.key.partition(".")[0] for entry in self._entries()})

    def _entries(self) -> list[IndexEntry]:
        return [entry for index in self._indices for entry in index.entries]

    def groups(self, key: str) -> list[dict[str, Any]]:
        """Return param_groups with placeholders, which read() fills."""
        groups: list[dict[str, Any]] = []
        paths_by_key = {k: path for index in self._indices for k, path in index.paths.items()}
        paths = {tuple(paths_by_key.get(entry.key, ())) for entry in self._entries()}
        own = [path[2:] for path in paths if path[:2] == (key, "param_groups")]
        # In order of indices, because _make_room() appends to lists.
        for path in sorted(own, key=lambda path: [(type(s) is str, s) for s in path]):
            try:
                _make_room(groups, path)
            except (IndexError, KeyError, TypeError) as error:
                raise DamagedCheckpoint(
                    [f"{self._source.name} has a value at {path} of {key}: {error}"]
                ) from None
        return groups

    def read(self, state: dict[str, Any]) -> None:
        """Verify and read the entries of ``state``."""
        reader = ShardReader(self._source, SavedEntries(self._indices), state)
        entries = reader.entries()
        self._source.keep_open(entry.file for entry in entries)
        faults = entry_faults(self._source, entries)
        if faults:
            raise DamagedCheckpoint(faults)
        reader.read()


def _make_room(holder: Any, path: Any) -> None:
    """Add a placeholder at ``path`` in nested dicts and lists."""
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
    """Write tensors as safetensors, or by torch.save() if the name ends in ``.pt``.

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


_NUM_SHOWN = 30


@dataclass
class KeySummary:
    """Summary of one key of a checkpoint."""

    key: str
    dtype: str  # empty for a value that is not a tensor
    shape: tuple[int, ...]
    num_fragments: int
    nbytes: int  # in files


@dataclass
class CheckpointSummary:
    """Summary of a checkpoint."""

    folder: str
    world_size: int
    info: Mapping[str, Any]
    nbytes: int
    held: list[KeySummary]

    def to_json(self) -> dict[str, Any]:
        """Return the contents in JSON types."""
        return asdict(self)

    def describe(self) -> str:
        """Return a table to print."""
        lines = [
            f"{self.folder}",
            f"saved by {self.world_size} ranks, {self.nbytes:,} bytes, {len(self.held)} keys",
            *(f"{name}: {value}" for name, value in self.info.items()),
            "",
            f"{'bytes':>15}  {'fragments':>9}  {'dtype':<9} {'shape':<18} key",
        ]
        for summary in self.held[:_NUM_SHOWN]:
            shape = str(list(summary.shape)) if summary.dtype else ""
            lines.append(
                f"{summary.nbytes:>15,}  {summary.num_fragments:>9}  {summary.dtype or 'value':<9} "
                f"{shape:<18} {summary.key}"
            )
        if len(self.held) > _NUM_SHOWN:
            lines.append(f"... and {len(self.held) - _NUM_SHOWN} more; --json has all")
        return "\n".join(lines)


def inspect(folder: Path) -> CheckpointSummary:
    """Summarize a checkpoint, largest key first; reads no tensor data.

    Raises:
        DamagedCheckpoint: the manifest or an index is damaged.
        CheckpointError: there is no checkpoint.
    """
    with open_checkpoint(folder) as source:
        manifest = Manifest.read(source)
        indices = manifest.read_indices(source)
        files = {entry.file for index in indices for entry in index.entries}
        files |= {MANIFEST, *(file.name for file in manifest.files)}
        nbytes = sum(source.folder.size(n) for n in files if source.folder.has_file(n))
    summary = _summarize(indices)
    return CheckpointSummary(str(folder), manifest.world_size, manifest.info, nbytes, summary)


def _summarize(indices: Iterable[ShardIndex]) -> list[KeySummary]:
    found: dict[str, KeySummary] = {}
    for index in indices:
        for entry in index.entries:
            tensor = index.tensors.get(entry.key, TensorMeta("", ()))
            summary = found.setdefault(entry.key, KeySummary(entry.key, *tensor, 0, 0))
            summary.num_fragments += 1
            summary.nbytes += entry.length
    return sorted(found.values(), key=lambda summary: (-summary.nbytes, summary.key))


@dataclass
class Verdict:
    """Result of verify() for one checkpoint."""

    folder: str
    faults: list[str]

    def describe(self) -> str:
        """Return lines to print."""
        if not self.faults:
            return f"{self.folder}: whole"
        return "\n".join([f"{self.folder}: DAMAGED", *(f"  {fault}" for fault in self.faults)])


def verify(folder: Path) -> list[Verdict]:
    """Verify every byte of a checkpoint, or of all checkpoints of a run, newest first.

    Raises:
        CheckpointError: ``folder`` is neither.
    """
    try:
        steps = Checkpoints(folder).steps()
        folders = [Checkpoints(folder).path(step) for step in steps]
        if not folders and not os.path.exists(folder / MANIFEST):
            folders = find_checkpoints(folder)  # in the folder of a run
        if not folders and not any(folder.glob("*.json")):
            raise CheckpointError(f"There is no checkpoint in {folder}.")
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be read: {describe_os_error(error)}.") from None
    except ValueError as error:  # a NUL byte
        raise CheckpointError(f"{str(folder)!r} is no name of a folder: {error}.") from None
    folders = folders or [folder]
    return [Verdict(str(path), verify_share(path)) for path in folders]
