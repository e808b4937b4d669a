"""DeepSpeed's universal checkpoints, as deepspeed.checkpoint.ds_to_universal writes them.

``zero/<parameter>/<state>.pt`` holds {"param": a whole tensor}, with the fp32 weights as "fp32" and
the step as a number; ``zero/optimizer_state.pt`` holds the groups; ``mp_rank_00_model_states.pt``
is the module's file of the checkpoint that was converted. Source: checkpoint/ds_to_universal.py and
checkpoint/universal_checkpoint.py of deepspeed 0.19.8. DeepSpeed itself is not needed.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from shardfuse.checkpoint.errors import CheckpointError
from shardfuse.checkpoint.imports.files import (
    below,
    interprets,
    part_of,
    read_file,
    refuse_elsewhere,
)
from shardfuse.checkpoint.imports.model_states import MODEL_FILE, ModelStates, Names, arranged
from shardfuse.checkpoint.imports.states import MASTER, entry_of, group_of, steps_in
from shardfuse.checkpoint.imports.zero import tag_folder

_FP32 = "fp32"


@interprets("DeepSpeed's universal checkpoints")
def read_deepspeed_universal(
    folder: str | Path,
    tag: str | None = None,
    names: Names | None = None,
    *,
    trusted: bool = False,
) -> dict[str, Any]:
    """Return the optimizer's state from a universal checkpoint of DeepSpeed's. Local.

    Of any number of ranks and tensor-parallel ones, and of stages 1 and 2. Order, "param_names",
    masters and arguments are those of read_deepspeed(); without a tag the file "latest_universal"
    names it.

    Nothing outside of the folder of the tag is read, also not by links.

    Raises:
        CheckpointError: a file is missing, or lies elsewhere; names that do not fit; a tensor of
            another shape; states that fp32 does not hold; or it was made with
            round_robin_gradients, which DeepSpeed 0.19.8 maps to other parameters' places.
        DamagedCheckpoint: a file cannot be read.
    """
    folder = tag_folder(Path(folder), tag, "latest_universal")
    for path in (folder / "zero", folder / MODEL_FILE, folder / "zero" / "optimizer_state.pt"):
        refuse_elsewhere(path, folder)
    zero = folder / "zero"
    if not zero.is_dir():
        raise CheckpointError(
            f"{folder} has no folder zero: it is no universal checkpoint. Make one with "
            "deepspeed.checkpoint.ds_to_universal, or read_deepspeed() (import deepspeed) reads "
            "stages 1 and 2 as they are."
        )
    model = ModelStates.read(folder, trusted=trusted)
    _refuse_round_robin(model)
    common_path = zero / "optimizer_state.pt"
    common = read_file(common_path, trusted=trusted)
    groups = part_of(common, common_path, "param_groups")
    if len(groups) != len(model.shapes):
        raise CheckpointError(
            f"{common_path} has {len(groups)} groups, {model.path} has {len(model.shapes)}."
        )
    entries = {}
    for group, shapes in zip(groups, model.shapes, strict=True):
        for name in shapes:
            place = below(zero, name, model.path)
            entries[name] = _entry(place, zero, steps_in(group), model.is_low(name), trusted)
        _check_group({name: entries[name] for name in shapes}, shapes, zero, model)
    options = [group_of(g, f"Group {i} in {common_path}") for i, g in enumerate(groups)]
    return arranged(entries, options, model, names)


def _check_group(
    entries: Mapping[str, Mapping[str, Any]],
    shapes: Mapping[str, torch.Size],
    zero: Path,
    model: ModelStates,
) -> None:
    """Raise CheckpointError where a parameter lacks a file, or has a tensor of another shape."""
    keys = {key for entry in entries.values() for key in entry if key not in ("step", MASTER)}
    for name, entry in entries.items():
        for key in sorted(keys):
            if key not in entry:
                raise CheckpointError(
                    f"{zero / name} has no {key}.pt, which others have. Convert it again."
                )
            # With tensor parallelism the module's file has a part.
            if not model.is_cut and entry[key].shape != shapes[name]:
                raise CheckpointError(
                    f"{zero / name / key}.pt has shape {tuple(entry[key].shape)}, the parameter "
                    f"has {tuple(shapes[name])} in {model.path}."
                )


def _refuse_round_robin(model: ModelStates) -> None:
    if model.is_round_robin:
        raise CheckpointError(
            f"{model.path} was saved with round_robin_gradients. DeepSpeed then makes universal "
            "checkpoints with parameters in each other's places. Import the original checkpoint "
            "with read_deepspeed() (import deepspeed)."
        )


def _entry(folder: Path, zero: Path, step: Any, is_low: bool, trusted: bool) -> dict[str, Any]:
    """Return one parameter's entry from its folder."""
    states: dict[str, Any] = {}
    if not folder.is_dir():
        raise CheckpointError(f"{folder.parent} has no folder {folder.name}, a trained parameter.")
    for path in sorted(folder.glob("*.pt")):
        if path.stem == _FP32 and not is_low:
            continue
        refuse_elsewhere(path, zero)
        value = read_file(path, trusted=trusted)
        if path.stem == "step":
            states["step"] = value
        else:
            states[MASTER if path.stem == _FP32 else path.stem] = part_of(value, path, "param")
    if is_low and MASTER not in states:
        raise CheckpointError(f"{folder} has no {_FP32}.pt.")
    if "step" not in states and step is None:
        raise CheckpointError(
            f"{folder} has no step.pt, and the groups have no step, so the number of its updates "
            "is unknown."
        )
    return entry_of(states, step, f"{folder}")
