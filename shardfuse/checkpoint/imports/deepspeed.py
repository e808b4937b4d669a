"""DeepSpeed's checkpoints: ZeRO stages 1 and 2, and universal checkpoints. DeepSpeed is not needed.

engine.save_checkpoint(folder, tag) writes into folder/tag one file per rank with its partitions,
``[bf16_]zero_pp_rank_<rank>_mp_rank_00_optim_states.pt``, and one file of the module,
``mp_rank_00_model_states.pt``. The parameters of a group lie in one flat buffer in the order of
``param_shapes``, each followed by ``param_alignment_paddings`` elements. Ranks hold equal
partitions of it, in rank order. Source: runtime/zero/stage_1_and_2.py, runtime/bf16_optimizer.py
and utils/zero_to_fp32.py of deepspeed 0.19.8.

deepspeed.checkpoint.ds_to_universal writes ``zero/<parameter>/<state>.pt``, each
{"param": whole tensor}, with the fp32 weights as "fp32" and the step as a number;
``zero/optimizer_state.pt`` with the groups; and the module's file of the checkpoint that was
converted. Source: checkpoint/ds_to_universal.py and checkpoint/universal_checkpoint.py of the same.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardfuse.checkpoint.imports.torch_optim import (
    LOW_PRECISION,
    expects_form,
    group_options,
    group_step,
    param_entry,
    path_inside,
    read_file,
    refuse_outside,
    require_key,
    to_fp32,
)
from shardfuse.checkpoint.index import MASTER, CheckpointError

MODEL_FILE = "mp_rank_00_model_states.pt"

ParamNames = Sequence[str] | Sequence[Sequence[str]]
"""Parameter names: one list per group, or a list for a single group."""


@dataclass
class ModelStates:
    """Contents of ``mp_rank_00_model_states.pt``: order, shapes and dtypes of parameters.

    Args:
        path: path of the file.
        shapes: trained parameters of each group, in the order of the group's flat buffer.
        dtypes: dtypes of the module's tensors.
        world_size: number of ranks that saved; None: the file does not say.
        is_round_robin: whether round_robin_gradients has changed the order of parameters.
        is_cut: whether there are more such files, as with tensor or pipeline parallelism.
    """

    path: Path
    shapes: list[dict[str, torch.Size]]
    dtypes: dict[str, torch.dtype]
    world_size: int | None
    is_round_robin: bool
    is_cut: bool

    @classmethod
    def read(cls, folder: Path, *, trusted: bool) -> ModelStates:
        """Read the file in a checkpoint's folder.

        Raises:
            CheckpointError: there is none, or it lacks the shapes of parameters.
            DamagedCheckpoint: it cannot be read.
        """
        path = folder / MODEL_FILE
        if not path.is_file() and any(folder.glob("zero_pp_rank_*_model_states.pt")):
            raise CheckpointError(
                f"{folder} is of ZeRO stage 3. Convert it with "
                "deepspeed.checkpoint.ds_to_universal and import that."
            )
        contents = read_file(path, trusted=trusted)
        shapes = require_key(contents, path, "param_shapes")
        if not shapes:
            raise CheckpointError(
                f"{path} has no param_shapes: it was not saved at ZeRO stage 1 or 2."
            )
        module = contents.get("module") or {}
        world_size = contents.get("dp_world_size")
        if not isinstance(world_size, int | None):
            raise CheckpointError(f"{path} has a dp_world_size that is no number.")
        config = contents.get("ds_config")
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
        """Return whether a parameter is in low precision and thus has an fp32 master."""
        return self.dtypes.get(name, torch.bfloat16) in LOW_PRECISION


def to_torch_form(
    entries: Mapping[str, dict[str, Any]],
    groups: Sequence[Mapping[str, Any]],
    model: ModelStates,
    names: ParamNames | None,
) -> dict[str, Any]:
    """Return {name: entry} in torch.optim's form, in the order of ``names`` or of the files.

    Raises:
        CheckpointError: names are needed, or do not fit.
    """
    if names is None and (model.is_round_robin or model.is_cut):
        raise CheckpointError(
            f"{model.path.parent} does not have parameters in the order of the optimizer's groups "
            "(round_robin_gradients, or several files of the module). Give names= (--names): a "
            f"list for each group, such as {[list(group)[:2] for group in model.shapes]}."
        )
    named = [list(group) for group in model.shapes] if names is None else _as_groups(names)
    _check_names(named, model)
    state: dict[int, dict[str, Any]] = {}
    arranged_groups, number = [], 0
    for options, members in zip(groups, named, strict=True):
        numbers = range(number, number + len(members))
        state |= {i: entries[n] for i, n in zip(numbers, members, strict=True) if entries.get(n)}
        arranged_groups.append({**options, "param_names": members, "params": list(numbers)})
        number += len(members)
    return {"state": state, "param_groups": arranged_groups}


def _as_groups(names: ParamNames) -> list[list[str]]:
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
    """Raise CheckpointError unless each group has the checkpoint's parameters, plus frozen ones."""
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


_RANK_FILE = re.compile(r"((?:bf16_|fp16_)?)zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_ZERO_MASTERS = "single_partition_of_fp32_groups"
_BASE_STATE = "base_optimizer_state"
_MAX_TAG_NBYTES = 4096  # bytes
_MAX_RANKS = 1 << 20


class _RankFile(NamedTuple):
    path: Path
    contents: Mapping[str, Any]
    base: Any  # of the optimizer that DeepSpeed was given: its state dict, or states by group


@expects_form("DeepSpeed's checkpoints")
def read_deepspeed(
    folder: str | Path,
    tag: str | None = None,
    names: ParamNames | None = None,
    *,
    trusted: bool = False,
) -> dict[str, Any]:
    """Return the optimizer's state from a checkpoint of DeepSpeed's ZeRO stage 1 or 2. Local.

    Numbers follow the groups that DeepSpeed got, without frozen parameters; "param_names" of each
    group has their names. fp32 masters are included if the module is in low precision.
    Hyper-parameters are the file's; files of ``elastic_checkpoint`` have none. Peak
    memory is about three times that of the result.

    Args:
        folder: the folder passed to save_checkpoint(), or the folder of one tag in it.
        tag: tag of the checkpoint; None: as the file "latest" says.
        names: parameters of each group of the optimizer that loads the state, in its order, with
            frozen ones; a list of lists, or a list if there is one group. Needed after
            ``round_robin_gradients``, which changes the order.
        trusted: see ``torch_optim.read_file``; files that DeepSpeed itself writes do not need it.

    Raises:
        CheckpointError: files of ranks are missing or of different saves; stage 3, tensor or expert
            parallelism; names that do not fit; or states that fp32 cannot hold.
        DamagedCheckpoint: a file cannot be read.
    """
    folder = tag_folder(Path(folder), tag)
    model = ModelStates.read(folder, trusted=trusted)
    ranks = _read_ranks(folder, trusted)
    _check_same_save(ranks, model, folder)
    entries: dict[str, dict[str, Any]] = {}
    groups = []
    for index, shapes in enumerate(model.shapes):
        entries |= _group_entries(ranks, index, shapes, model)
        base = ranks[0].base
        saved = base["param_groups"][index] if isinstance(base, Mapping) else {}
        groups.append(group_options(saved, f"Group {index} in {ranks[0].path}"))
    return to_torch_form(entries, groups, model, names)


def tag_folder(folder: Path, tag: str | None, latest: str = "latest") -> Path:
    """Return the folder of a tag: the given one, the latest, or ``folder`` itself.

    Raises:
        CheckpointError: there is none, or a file names one elsewhere.
    """
    if tag is None and (folder / latest).is_file():
        found = path_inside(folder, _read_tag(folder / latest), folder / latest)
    else:
        found = folder if tag is None else folder / tag
    if not found.is_dir():
        raise CheckpointError(f"There is no folder {found}. Name the tag with tag= (--tag).")
    return found


def _read_tag(path: Path) -> str:
    with path.open("rb") as file:
        return file.read(_MAX_TAG_NBYTES).decode(errors="replace").strip()


def _read_ranks(folder: Path, trusted: bool) -> list[_RankFile]:
    found = [(m, path) for path in folder.iterdir() if (m := _RANK_FILE.fullmatch(path.name))]
    if not found:
        raise CheckpointError(
            f"{folder} has no file *zero_pp_rank_*_optim_states.pt: it is no checkpoint of "
            "DeepSpeed's ZeRO stages 1 and 2, or its optimizer states were left out."
        )
    if {int(match[3]) for match, _ in found} != {0}:
        raise CheckpointError(
            f"{folder} is of tensor parallelism (mp_rank_01). Convert it with "
            "deepspeed.checkpoint.ds_to_universal and import that."
        )
    if len({match[1] for match, _ in found}) > 1:
        raise CheckpointError(
            f"{folder} has files of two saves, with and without bf16_. Remove those of the older."
        )
    by_rank = {int(match[2]): path for match, path in found}
    ranks = []
    for number in sorted(by_rank):
        path = by_rank[number]
        contents = require_key(read_file(path, trusted=trusted), path, "optimizer_state_dict")
        if int(contents.get("zero_stage", 0)) > 2:
            raise CheckpointError(
                f"{path} is of ZeRO stage 3. Convert it with deepspeed.checkpoint.ds_to_universal "
                "and import that."
            )
        require_key(contents, path, _ZERO_MASTERS)
        ranks.append(_RankFile(path, contents, require_key(contents, path, _BASE_STATE)))
    _check_world(folder, by_rank, ranks[0])
    return ranks


def _check_world(folder: Path, by_rank: Mapping[int, Path], first: _RankFile) -> None:
    """Raise CheckpointError unless there is one file per rank."""
    counts = require_key(first.contents, first.path, "partition_count")
    counts = set(counts) if isinstance(counts, list | tuple) else {counts}
    if len(counts) > 1:
        raise CheckpointError(
            f"{first.path} has groups over {sorted(counts)} ranks, as with expert parallelism, "
            "which is not read."
        )
    world = counts.pop()
    if not isinstance(world, int) or not 1 <= world <= _MAX_RANKS:
        raise CheckpointError(f"{first.path} has a partition_count that is no number of ranks.")
    missing = sorted(set(range(world)) - by_rank.keys())
    if missing:
        pattern = first.path.name.replace("rank_0_", "rank_<rank>_", 1)
        raise CheckpointError(
            f"{folder} was written by {world} ranks, and has no {pattern} of ranks {missing[:20]}. "
            "Copy the files of all ranks there."
        )
    if len(by_rank) > world:
        more = [by_rank[rank].name for rank in sorted(by_rank) if rank >= world]
        raise CheckpointError(
            f"{folder} was written by {world} ranks, but has {', '.join(more)}, of another save. "
            "Remove them, if they are older."
        )


def _check_same_save(ranks: Sequence[_RankFile], model: ModelStates, folder: Path) -> None:
    """Raise CheckpointError if files are of different saves."""
    num_groups = len(model.shapes)
    if model.world_size not in (None, len(ranks)):
        raise CheckpointError(
            f"{model.path} was written by {model.world_size} ranks, the optimizer's files by "
            f"{len(ranks)}: they are of different saves."
        )
    steps = {}
    for rank in ranks:
        num_flats, num_states = len(rank.contents[_ZERO_MASTERS]), len(_partition_states(rank))
        if not num_flats == num_states == num_groups:
            raise CheckpointError(
                f"{rank.path} has {num_flats} groups, and {num_states} with "
                f"states; {model.path} has {num_groups}. They are of different saves."
            )
        steps[rank.path.name] = [str(_group_step_of(rank, index)) for index in range(num_groups)]
    if len({tuple(step) for step in steps.values()}) > 1:
        raise CheckpointError(f"The files of {folder} are of different steps: {steps}.")


def _partition_states(rank: _RankFile) -> list[Mapping[str, Any]]:
    """Return the states of a rank's partitions, by group."""
    if not isinstance(rank.base, Mapping):
        return list(rank.base)  # elastic_checkpoint
    return [
        rank.base["state"].get(param, {})
        for group in rank.base["param_groups"]
        for param in group["params"]
    ]


def _group_step_of(rank: _RankFile, index: int) -> Any:
    """Return the step of a group, or None if the optimizer does not count steps."""
    step = _partition_states(rank)[index].get("step")
    if step is None and isinstance(rank.base, Mapping):
        step = group_step(rank.base["param_groups"][index])
    if step is None:
        step = rank.contents.get("base_optimizer_state_step")
    return float(step) if step is not None else None


def _group_entries(
    ranks: Sequence[_RankFile], index: int, shapes: Mapping[str, torch.Size], model: ModelStates
) -> dict[str, dict[str, Any]]:
    """Return {name: entry} of one group's parameters."""
    paddings = ranks[0].contents.get("param_alignment_paddings")
    after = paddings[index] if paddings else [0] * len(shapes)
    step = _group_step_of(ranks[0], index)
    entries = {name: param_entry({}, step, f"{name} in {ranks[0].path}") for name in shapes}
    keys = [k for k, value in _partition_states(ranks[0])[index].items() if _is_partition(value)]
    for key in [*keys, MASTER]:
        names = [name for name in shapes if key != MASTER or model.is_low(name)]
        if not names:
            continue
        flat = _join_partitions(ranks, index, key)
        place = 0
        needed = sum(size.numel() for size in shapes.values()) + sum(after)
        # DeepSpeed pads the end to a multiple of twice the number of ranks.
        if not needed <= flat.numel() < needed + 2 * len(ranks):
            raise CheckpointError(
                f"{key} of group {index} has {flat.numel()} elements in the ranks' files of "
                f"{model.path.parent}, and {needed} by {model.path.name}. They are of different "
                "saves, or of a layout that is not known."
            )
        for (name, size), padding in zip(shapes.items(), after, strict=True):
            part = flat[place : place + size.numel()].view(size).clone()
            if name in names:
                entries[name] |= param_entry({key: part}, None, f"{name} in {ranks[0].path}")
            place += size.numel() + padding
    return entries


def _is_partition(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0


def _join_partitions(ranks: Sequence[_RankFile], index: int, key: str) -> Tensor:
    """Return one state of a group, the ranks' partitions in order. Only the last is padded."""
    parts = []
    for rank in ranks:
        part = (
            rank.contents[_ZERO_MASTERS][index]
            if key == MASTER
            else _partition_states(rank)[index].get(key)
        )
        parts.append(to_fp32(part, f"{key} of group {index} in {rank.path}").reshape(-1))
    return torch.cat(parts)


_UNIVERSAL_MASTER = "fp32"


@expects_form("DeepSpeed's universal checkpoints")
def read_deepspeed_universal(
    folder: str | Path,
    tag: str | None = None,
    names: ParamNames | None = None,
    *,
    trusted: bool = False,
) -> dict[str, Any]:
    """Return the optimizer's state from a universal checkpoint of DeepSpeed. Local.

    It may be of any number of data- or tensor-parallel ranks, and of stage 1 or 2. Order,
    "param_names", masters and arguments are those of read_deepspeed(); without a tag the file
    "latest_universal" names it.

    Nothing outside of the folder of the tag is read, also not by links.

    Raises:
        CheckpointError: a file is missing, or is elsewhere; names that do not fit; a tensor of
            another shape; states that fp32 cannot hold; or it was made with round_robin_gradients,
            for which DeepSpeed 0.19.8 assigns states to other parameters.
        DamagedCheckpoint: a file cannot be read.
    """
    folder = tag_folder(Path(folder), tag, "latest_universal")
    for path in (folder / "zero", folder / MODEL_FILE, folder / "zero" / "optimizer_state.pt"):
        refuse_outside(path, folder)
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
    groups = require_key(common, common_path, "param_groups")
    if len(groups) != len(model.shapes):
        raise CheckpointError(
            f"{common_path} has {len(groups)} groups, {model.path} has {len(model.shapes)}."
        )
    entries = {}
    for group, shapes in zip(groups, model.shapes, strict=True):
        for name in shapes:
            place = path_inside(zero, name, model.path)
            entries[name] = _read_param_folder(
                place, zero, group_step(group), model.is_low(name), trusted
            )
        _check_param_files({name: entries[name] for name in shapes}, shapes, zero, model)
    options = [group_options(g, f"Group {i} in {common_path}") for i, g in enumerate(groups)]
    return to_torch_form(entries, options, model, names)


def _check_param_files(
    entries: Mapping[str, Mapping[str, Any]],
    shapes: Mapping[str, torch.Size],
    zero: Path,
    model: ModelStates,
) -> None:
    """Raise CheckpointError if a parameter lacks a file, or has a tensor of another shape."""
    keys = {key for entry in entries.values() for key in entry if key not in ("step", MASTER)}
    for name, entry in entries.items():
        for key in sorted(keys):
            if key not in entry:
                raise CheckpointError(
                    f"{zero / name} has no {key}.pt, which others have. Convert it again."
                )
            # With tensor parallelism the module's file has a slice of the tensor.
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


def _read_param_folder(
    folder: Path, zero: Path, step: Any, is_low: bool, trusted: bool
) -> dict[str, Any]:
    """Return the entry of one parameter from its folder."""
    states: dict[str, Any] = {}
    if not folder.is_dir():
        raise CheckpointError(f"{folder.parent} has no folder {folder.name}, a trained parameter.")
    for path in sorted(folder.glob("*.pt")):
        if path.stem == _UNIVERSAL_MASTER and not is_low:
            continue
        refuse_outside(path, zero)
        value = read_file(path, trusted=trusted)
        if path.stem == "step":
            states["step"] = value
        else:
            states[MASTER if path.stem == _UNIVERSAL_MASTER else path.stem] = require_key(
                value, path, "param"
            )
    if is_low and MASTER not in states:
        raise CheckpointError(f"{folder} has no {_UNIVERSAL_MASTER}.pt.")
    if "step" not in states and step is None:
        raise CheckpointError(
            f"{folder} has no step.pt, and the groups have no step, so the number of its updates "
            "is unknown."
        )
    return param_entry(states, step, f"{folder}")
