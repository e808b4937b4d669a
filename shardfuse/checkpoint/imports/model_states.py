"""What DeepSpeed's file of the module says of parameters: their order, shapes and dtypes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardfuse.checkpoint.errors import CheckpointError
from shardfuse.checkpoint.imports.files import part_of, read_file
from shardfuse.checkpoint.imports.states import LOW

MODEL_FILE = "mp_rank_00_model_states.pt"

Names = Sequence[str] | Sequence[Sequence[str]]
"""Of parameters: of each group, or of the only one."""


@dataclass
class ModelStates:
    """``mp_rank_00_model_states.pt``.

    Args:
        path: of the file.
        shapes: of the trained parameters of each group, in the order in which they lie in its flat.
        dtypes: of what the module holds.
        world_size: number of ranks that wrote the checkpoint; None: the file does not say.
        is_round_robin: whether round_robin_gradients has changed their order.
        is_cut: whether there are more such files, as with tensor parallelism and pipelines.
    """

    path: Path
    shapes: list[dict[str, torch.Size]]
    dtypes: dict[str, torch.dtype]
    world_size: int | None
    is_round_robin: bool
    is_cut: bool

    @classmethod
    def read(cls, folder: Path, *, trusted: bool) -> ModelStates:
        """Read the file of a checkpoint's folder.

        Raises:
            CheckpointError: there is none, or it does not say where parameters lie.
            DamagedCheckpoint: it cannot be read.
        """
        path = folder / MODEL_FILE
        if not path.is_file() and any(folder.glob("zero_pp_rank_*_model_states.pt")):
            raise CheckpointError(
                f"{folder} is of ZeRO stage 3. Convert it with "
                "deepspeed.checkpoint.ds_to_universal and import that."
            )
        held = read_file(path, trusted=trusted)
        shapes = part_of(held, path, "param_shapes")
        if not shapes:
            raise CheckpointError(
                f"{path} has no param_shapes: it was not saved at ZeRO stage 1 or 2."
            )
        module = held.get("module") or {}
        world_size = held.get("dp_world_size")
        if not isinstance(world_size, int | None):
            raise CheckpointError(f"{path} has a dp_world_size that is no number.")
        config = held.get("ds_config")
        zero = config.get("zero_optimization") if isinstance(config, Mapping) else None
        round_robin = bool(isinstance(zero, Mapping) and zero.get("round_robin_gradients"))
        return cls(
            path,
            [{name: torch.Size(size) for name, size in group.items()} for group in shapes],
            {name: value.dtype for name, value in module.items() if isinstance(value, Tensor)},
            world_size,
            round_robin,
            (folder / "mp_rank_01_model_states.pt").exists(),
        )

    def is_low(self, name: str) -> bool:
        """Return whether a parameter is in low precision, so that it has a master of its own."""
        return self.dtypes.get(name, torch.bfloat16) in LOW


def arranged(
    entries: Mapping[str, dict[str, Any]],
    groups: Sequence[Mapping[str, Any]],
    model: ModelStates,
    names: Names | None,
) -> dict[str, Any]:
    """Return torch.optim's form of {name: entry}, in the order of ``names`` or of the files.

    Raises:
        CheckpointError: names are needed, or do not fit.
    """
    if names is None and (model.is_round_robin or model.is_cut):
        raise CheckpointError(
            f"{model.path.parent} does not have parameters in the order of the optimizer's groups "
            "(round_robin_gradients, or several files of the module). Give names= (--names): a "
            f"list for each group, such as {[list(group)[:2] for group in model.shapes]}."
        )
    named = [list(group) for group in model.shapes] if names is None else _groups_of(names)
    _check_names(named, model)
    state: dict[int, dict[str, Any]] = {}
    arranged_groups, number = [], 0
    for options, members in zip(groups, named, strict=True):
        numbers = range(number, number + len(members))
        state |= {i: entries[n] for i, n in zip(numbers, members, strict=True) if entries.get(n)}
        arranged_groups.append({**options, "param_names": members, "params": list(numbers)})
        number += len(members)
    return {"state": state, "param_groups": arranged_groups}


def _groups_of(names: Names) -> list[list[str]]:
    if _are_strings(names):
        return [[str(name) for name in names]]
    if not isinstance(names, list | tuple) or not all(map(_are_strings, names)):
        raise CheckpointError(
            "names must be a list of parameters' names, or a list of such a list for each group."
        )
    return [list(group) for group in names]


def _are_strings(names: Any) -> bool:
    return isinstance(names, list | tuple) and all(isinstance(name, str) for name in names)


def _check_names(named: Sequence[Sequence[str]], model: ModelStates) -> None:
    """Raise CheckpointError unless each group has the checkpoint's parameters, and frozen ones."""
    if len(named) != len(model.shapes):
        raise CheckpointError(
            f"names has {len(named)} groups, {model.path} has {len(model.shapes)}: "
            f"{[list(group)[:2] for group in model.shapes]} and so on."
        )
    trained = {name for group in model.shapes for name in group}
    for index, (members, shapes) in enumerate(zip(named, model.shapes, strict=True)):
        missing = [name for name in shapes if name not in members]
        others = [name for name in members if name in trained and name not in shapes]
        unknown = [name for name in members if name not in trained and name not in model.dtypes]
        for found, text in (
            (missing, "names lacks what the checkpoint has"),
            (others, "names has what the checkpoint has in another group"),
            (unknown, "names has what the module does not have"),
        ):
            if found:
                raise CheckpointError(f"In group {index} {text}: {found[:5]} ({model.path}).")
