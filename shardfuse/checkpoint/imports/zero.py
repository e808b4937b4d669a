"""DeepSpeed's checkpoints at ZeRO stages 1 and 2.

engine.save_checkpoint(folder, tag) writes, in folder/tag, a file of each rank's partitions,
``[bf16_]zero_pp_rank_<rank>_mp_rank_00_optim_states.pt``, and one of the module,
``mp_rank_00_model_states.pt``. A group's parameters lie in one flat in the order of
``param_shapes``, each followed by ``param_alignment_paddings``; ranks hold equal parts of it in
turn. Source: runtime/zero/stage_1_and_2.py, runtime/bf16_optimizer.py and utils/zero_to_fp32.py of
deepspeed 0.19.8. DeepSpeed itself is not needed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardfuse.checkpoint.errors import CheckpointError
from shardfuse.checkpoint.imports.files import below, interprets, part_of, read_file
from shardfuse.checkpoint.imports.model_states import ModelStates, Names, arranged
from shardfuse.checkpoint.imports.states import MASTER, entry_of, fp32, group_of, steps_in

_RANK_FILE = re.compile(r"((?:bf16_|fp16_)?)zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_FP32 = "single_partition_of_fp32_groups"
_BASE = "base_optimizer_state"
_MOST_OF_A_TAG = 4096  # bytes
_MOST_RANKS = 1 << 20


class _Rank(NamedTuple):
    path: Path
    held: Mapping[str, Any]
    base: Any  # of the optimizer that DeepSpeed was given: its state dict, or states by group


@interprets("DeepSpeed's checkpoints")
def read_deepspeed(
    folder: str | Path,
    tag: str | None = None,
    names: Names | None = None,
    *,
    trusted: bool = False,
) -> dict[str, Any]:
    """Return the optimizer's state from a checkpoint of DeepSpeed's ZeRO stage 1 or 2. Local.

    Numbers follow the groups that DeepSpeed was given, without the parameters that were frozen;
    "param_names" of each group says which they are. fp32 masters come along where the module is in
    low precision. Hyper-parameters are the file's, but with ``elastic_checkpoint``, whose files
    have none. Peak memory is about three times that of the result.

    Args:
        folder: what save_checkpoint() was given, or the folder of one tag in it.
        tag: of the checkpoint; None: what the file "latest" says.
        names: of the parameters of each group of the optimizer that loads it, in its order,
            frozen ones included; a list of lists, or a list where there is one group. Needed after
            ``round_robin_gradients``, which changes the order.
        trusted: see ``files.read_file``; not needed for what DeepSpeed itself writes.

    Raises:
        CheckpointError: files of ranks are missing or of different saves; stage 3, tensor or expert
            parallelism; names that do not fit; or states that fp32 does not hold.
        DamagedCheckpoint: a file cannot be read.
    """
    folder = tag_folder(Path(folder), tag)
    model = ModelStates.read(folder, trusted=trusted)
    ranks = _read_ranks(folder, trusted)
    _check_ranks(ranks, model, folder)
    entries: dict[str, dict[str, Any]] = {}
    groups = []
    for index, shapes in enumerate(model.shapes):
        entries |= _entries(ranks, index, shapes, model)
        base = ranks[0].base
        saved = base["param_groups"][index] if isinstance(base, Mapping) else {}
        groups.append(group_of(saved, f"Group {index} in {ranks[0].path}"))
    return arranged(entries, groups, model, names)


def tag_folder(folder: Path, tag: str | None, latest: str = "latest") -> Path:
    """Return the folder of a tag: the named or newest one in ``folder``, or that itself.

    Raises:
        CheckpointError: there is none, or a file names a folder elsewhere.
    """
    if tag is None and (folder / latest).is_file():
        found = below(folder, _tag_in(folder / latest), folder / latest)
    else:
        found = folder if tag is None else folder / tag
    if not found.is_dir():
        raise CheckpointError(f"There is no folder {found}. Name the tag with tag= (--tag).")
    return found


def _tag_in(path: Path) -> str:
    with path.open("rb") as file:
        return file.read(_MOST_OF_A_TAG).decode(errors="replace").strip()


def _read_ranks(folder: Path, trusted: bool) -> list[_Rank]:
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
        held = part_of(read_file(path, trusted=trusted), path, "optimizer_state_dict")
        if int(held.get("zero_stage", 0)) > 2:
            raise CheckpointError(
                f"{path} is of ZeRO stage 3. Convert it with deepspeed.checkpoint.ds_to_universal "
                "and import that."
            )
        part_of(held, path, _FP32)
        ranks.append(_Rank(path, held, part_of(held, path, _BASE)))
    _check_world(folder, by_rank, ranks[0])
    return ranks


def _check_world(folder: Path, by_rank: Mapping[int, Path], first: _Rank) -> None:
    """Raise CheckpointError unless there is a file of each rank."""
    counts = part_of(first.held, first.path, "partition_count")
    counts = set(counts) if isinstance(counts, list | tuple) else {counts}
    if len(counts) > 1:
        raise CheckpointError(
            f"{first.path} has groups over {sorted(counts)} ranks, as with expert parallelism, "
            "which is not read."
        )
    world = counts.pop()
    if not isinstance(world, int) or not 1 <= world <= _MOST_RANKS:
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


def _check_ranks(ranks: Sequence[_Rank], model: ModelStates, folder: Path) -> None:
    """Raise CheckpointError where files do not belong together."""
    num_groups = len(model.shapes)
    if model.world_size not in (None, len(ranks)):
        raise CheckpointError(
            f"{model.path} was written by {model.world_size} ranks, the optimizer's files by "
            f"{len(ranks)}: they are of different saves."
        )
    steps = {}
    for rank in ranks:
        if not len(rank.held[_FP32]) == len(_states(rank)) == num_groups:
            raise CheckpointError(
                f"{rank.path} has {len(rank.held[_FP32])} groups, and {len(_states(rank))} with "
                f"states; {model.path} has {num_groups}. They are of different saves."
            )
        steps[rank.path.name] = [str(_step_of(rank, index)) for index in range(num_groups)]
    if len({tuple(step) for step in steps.values()}) > 1:
        raise CheckpointError(f"The files of {folder} are of different steps: {steps}.")


def _states(rank: _Rank) -> list[Mapping[str, Any]]:
    """Return the states of a rank's partitions, group by group."""
    if not isinstance(rank.base, Mapping):
        return list(rank.base)  # elastic_checkpoint
    return [
        rank.base["state"].get(param, {})
        for group in rank.base["param_groups"]
        for param in group["params"]
    ]


def _step_of(rank: _Rank, index: int) -> Any:
    """Return the step of a group, or None where it is not counted."""
    step = _states(rank)[index].get("step")
    if step is None and isinstance(rank.base, Mapping):
        step = steps_in(rank.base["param_groups"][index])
    if step is None:
        step = rank.held.get("base_optimizer_state_step")
    return float(step) if step is not None else None


def _entries(
    ranks: Sequence[_Rank], index: int, shapes: Mapping[str, torch.Size], model: ModelStates
) -> dict[str, dict[str, Any]]:
    """Return {name: entry} of one group's parameters."""
    paddings = ranks[0].held.get("param_alignment_paddings")
    after = paddings[index] if paddings else [0] * len(shapes)
    step = _step_of(ranks[0], index)
    entries = {name: entry_of({}, step, f"{name} in {ranks[0].path}") for name in shapes}
    keys = [k for k, value in _states(ranks[0])[index].items() if _is_partition(value)]
    for key in [*keys, MASTER]:
        names = [name for name in shapes if key != MASTER or model.is_low(name)]
        if not names:
            continue
        flat = _flat(ranks, index, key)
        place = 0
        needed = sum(size.numel() for size in shapes.values()) + sum(after)
        # Its end is padded, for twice the number of ranks.
        if not needed <= flat.numel() < needed + 2 * len(ranks):
            raise CheckpointError(
                f"{key} of group {index} has {flat.numel()} elements in the ranks' files of "
                f"{model.path.parent}, and {needed} by {model.path.name}. They are of different "
                "saves, or of a layout that is not known."
            )
        for (name, size), padding in zip(shapes.items(), after, strict=True):
            part = flat[place : place + size.numel()].view(size).clone()
            if name in names:
                entries[name] |= entry_of({key: part}, None, f"{name} in {ranks[0].path}")
            place += size.numel() + padding
    return entries


def _is_partition(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0


def _flat(ranks: Sequence[_Rank], index: int, key: str) -> Tensor:
    """Return one state of a group, all ranks' parts of it in turn. Only the last is padded."""
    parts = []
    for rank in ranks:
        part = rank.held[_FP32][index] if key == MASTER else _states(rank)[index].get(key)
        parts.append(fp32(part, f"{key} of group {index} in {rank.path}").reshape(-1))
    return torch.cat(parts)
