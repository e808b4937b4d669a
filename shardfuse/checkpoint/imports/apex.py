"""apex's FusedAdam and FusedLAMB, alone and in its FP16_Optimizer.

The form is that of apex's public source (apex/optimizers/fused_adam.py, fused_lamb.py and
apex/fp16_utils/fp16_optimizer.py): torch.optim's, with the step in the groups, counted once for all
parameters of a group; FP16_Optimizer has that under "optimizer_state_dict", and beside it the fp32
masters of each group's fp16 parameters.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shardfuse.checkpoint.errors import CheckpointError
from shardfuse.checkpoint.imports.files import interprets, read_file, some_of
from shardfuse.checkpoint.imports.states import MASTER, entry_of, fp32, group_of, plain, steps_in
from shardfuse.checkpoint.imports.torch_optim import at_key, is_state_dict, optimizer_in

logger = logging.getLogger("shardfuse")

_INNER = "optimizer_state_dict"
_MASTERS = "fp32_from_fp16"
_OF_LAMB = ("max_grad_norm", "bias_correction")


@interprets("apex's optimizers")
def read_apex(path: str | Path, key: str | None = None, *, trusted: bool = False) -> dict[str, Any]:
    """Return the state of apex's FusedAdam or FusedLAMB from a file of torch.save(). Local.

    FusedAdam's is for ShardedAdamW, or for ShardedAdam where it was built with adam_w_mode=False;
    FusedLAMB's for ShardedLamb(variant="apex"). What apex keeps outside of its files, or ours take
    from their constructor (the clipping norm of FusedLAMB), a line of the log says.

    Args:
        path: the file; it holds ``optimizer.state_dict()``, or a dict with that in it.
        key: where in the dict; as for ``read_torch``.
        trusted: see ``files.read_file``.

    Raises:
        CheckpointError: as of read_torch(); a group without a step; switches that ours lack; or
            masters that cannot be told apart.
        DamagedCheckpoint: the file cannot be read.
    """
    path = Path(path)
    found, masters = _located(read_file(path, trusted=trusted), path, key)
    state: dict[int, dict[str, Any]] = {}
    groups: list[dict[str, Any]] = []
    first = 0
    for index, group in enumerate(found["param_groups"]):
        states = [found["state"].get(param, {}) for param in group["params"]]
        where = f"group {index} in {path}"
        held = None if masters is None else _masters_of(masters, index, len(states), where)
        state |= _entries(states, steps_in(group), first, held, where)
        groups.append(_options(group, where, range(first, first + len(states))))
        first += len(states)
    return {"state": state, "param_groups": groups}


def _located(whole: Any, path: Path, key: str | None) -> tuple[Mapping[str, Any], Any]:
    """Return the optimizer's state dict, and FP16_Optimizer's masters or None."""
    if key is None and not is_state_dict(whole) and not _is_fp16(whole):
        key = "optimizer"
    found = at_key(whole, path, key)
    if not _is_fp16(found):
        return optimizer_in(whole, path, key), None
    if _MASTERS not in found:
        raise CheckpointError(
            f"{path} is of an FP16_Optimizer without {_MASTERS!r}. Only the layout of "
            f"apex.fp16_utils is known. The file has {some_of(found)}."
        )
    return optimizer_in(found[_INNER], path, None), found[_MASTERS]


def _is_fp16(found: Any) -> bool:
    return isinstance(found, Mapping) and _INNER in found


def _entries(
    states: Sequence[Mapping[str, Any]],
    step: Any,
    first: int,
    masters: Sequence[Any] | None,
    where: str,
) -> dict[int, dict[str, Any]]:
    entries = {}
    for at, held in enumerate(states):
        name = f"parameter {first + at}, of {where},"
        if held:
            if step is None and "step" not in held:
                raise CheckpointError(
                    f"{name} has states, but no step, neither with them nor in the group. It is no "
                    "file of apex's FusedAdam or FusedLAMB."
                )
            entries[first + at] = entry_of(held, step, name)
        if masters is not None:
            entry = entries.setdefault(first + at, entry_of({}, 0, name))
            entry[MASTER] = fp32(masters[at], f"The master of {name}")
    return entries


def _masters_of(masters: Any, index: int, count: int, where: str) -> Sequence[Any] | None:
    """Return the masters of a group's parameters in their order; None: it has none."""
    held = masters[index] if index < len(masters) else []
    if len(held) not in (0, count):
        raise CheckpointError(
            f"{where} has {count} parameters and {len(held)} masters, and the file does not say "
            "which belong together. Save it with the fp16 parameters in their own groups."
        )
    return held or None


def _options(group: Mapping[str, Any], where: str, numbers: Sequence[int]) -> dict[str, Any]:
    """Return a group as ours have it; FusedLAMB's keep their step, as apex's schedulers read it."""
    if "grad_averaging" not in group:
        return {**group_of(group, where), "params": list(numbers)}
    given = {key: plain(group[key]) for key in _OF_LAMB if key in group}
    logger.warning(
        "%s is FusedLAMB's: build ShardedLamb(variant='apex', use_global_grad_norm=True, %s), and "
        "with always_adapt=True where it had use_nvlamb=True.",
        where,
        ", ".join(f"{key}={value!r}" for key, value in given.items()),
    )
    options = group_of(group, where, drop=_OF_LAMB)
    step = steps_in(group)
    return {**options, **({} if step is None else {"step": int(step)}), "params": list(numbers)}
