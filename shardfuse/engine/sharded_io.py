"""Optimizer state for torch.distributed.checkpoint: every rank its part, any world size loads."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shardfuse.engine import state_checks
from shardfuse.engine.flat_state import FlatState
from shardfuse.engine.state_io import (
    Groups,
    Held,
    agreed_steps,
    arenas_of,
    counted_groups,
    fragment_tensors,
    merged_groups,
    set_groups,
)
from shardfuse.fragments import FragmentTensor, flat_pieces
from shardfuse.layout import Bucket


def sharded(held: Held) -> dict[str, Any]:
    """Return a flat dict for torch.distributed.checkpoint whose tensors alias this rank's state.

    Collective (one small all-reduce). Keys are ``state.<param name>.<state>``; steps are tensors.
    """
    result: dict[str, Any] = dict(aliases(held.flats))
    for spec, count in zip(held.layout.specs, agreed_steps(held), strict=True):
        result[f"state.{spec.name}.step"] = torch.tensor(count)
    result["param_groups"] = saved_groups(held)
    return result


def saved_groups(held: Held) -> Groups:
    """Return the groups as they are saved: of tensors with one element, and of numpy, the number.

    torch.distributed.checkpoint does not load a number where a tensor was saved, and numpy's are
    not plain data.
    """
    return [
        {key: _number(value) for key, value in group.items()}
        for group in counted_groups(held.groups, held.rule)
    ]


def _number(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_number, value))  # betas
    is_one = isinstance(value, Tensor) and value.numel() == 1
    return value.item() if is_one else plain_number(value)


def plain_number(value: Any) -> Any:
    """Return one of numpy's numbers as Python's, which is loaded without trust; else ``value``."""
    is_numpy = type(value).__module__ == "numpy" and getattr(value, "shape", None) == ()
    return value.item() if is_numpy else value


def _as_held(new: Any, held: Any) -> Any:
    """Return ``new`` as a tensor like ``held``, if that is one with one element."""
    is_tensor = isinstance(held, Tensor) and held.numel() == 1
    return torch.full_like(held, _number(new)) if is_tensor else new


def aliases(
    flats: Sequence[FlatState], has: Callable[[Bucket], bool] = lambda bucket: True
) -> Iterator[tuple[str, FragmentTensor]]:
    """Yield (key in sharded(), this rank's state itself)."""
    for state in flats:
        for name, arena in arenas_of(state).items():
            tensors = fragment_tensors(state, arena.view, flat_pieces, has=has)
            for spec, tensor in zip(state.specs, tensors, strict=True):
                if spec.numel:
                    yield f"state.{spec.name}.{name}", tensor


def load_sharded(held: Held, state_dict: Mapping[str, Any]) -> None:
    """Take over steps, hyper-parameters, and tensors that were not filled in place when loaded.

    Raises:
        ValueError: groups that do not fit; states of parameters that are frozen here; a state is
            missing or is not of this rank's fragments. Nothing is loaded then, beyond what was
            filled in place.
    """
    flats = held.flats
    merged, counts = check(held, state_dict)
    own = dict(aliases(flats))
    for key, tensor in own.items():
        saved = state_dict.get(key)
        if not isinstance(saved, FragmentTensor) or not tensor.has_pieces_of(saved):
            raise ValueError(
                f"{key} is missing, or is not of this rank's sharded_state_dict(). Load into the "
                "dict that this optimizer returns, with torch.distributed.checkpoint.load()."
            )
    for key, tensor in own.items():
        tensor.copy_(state_dict[key])
    set_groups(held, merged, state_dict["param_groups"], counts)
    for state in flats:
        state.set_steps({slot.param: counts[slot.param] for slot in state.flat.slots})


def check(held: Held, state_dict: Mapping[str, Any]) -> tuple[Groups, dict[int, int]]:
    """Return the merged groups, and the steps, of a state dict of whose tensors only steps count.

    Raises:
        ValueError: groups that do not fit, or have other parameters; states of parameters that are
            frozen here.
    """
    saved = state_checks.saved_groups(state_dict)
    _check_members(held.groups, saved)
    specs = enumerate(held.layout.specs)
    merged = [
        {key: _as_held(value, group.get(key)) for key, value in new.items()}
        for new, group in zip(
            merged_groups(held.groups, saved, held.rule),
            held.groups,
            strict=True,
        )
    ]
    counts = {param: _count(state_dict, spec.name) for param, spec in specs}
    _check_room(held, merged, counts)
    return merged, counts


def _count(state_dict: Mapping[str, Any], name: str) -> int:
    key = f"state.{name}.step"
    if key not in state_dict:
        raise ValueError(f"The loaded state dict has no {key}. Load what sharded_state_dict() has.")
    return state_checks.count(state_dict[key], key)


def _check_members(groups: Groups, saved: Sequence[Mapping[str, Any]]) -> None:
    """Raise ValueError if a parameter would get the hyper-parameters of another group.

    States are saved by name, groups by number.
    """
    for index, (group, other) in enumerate(zip(groups, saved, strict=False)):
        moved = sorted(set(other.get("param_names", ())) - set(group.get("param_names", ())))
        if moved and "param_names" in group:
            raise ValueError(
                f"{moved[0]} was in group {index} when it was saved, and is not there now: it "
                "would train with the hyper-parameters of another group. Build the optimizer with "
                "the groups, and the order of groups, that were saved."
            )


def _check_room(held: Held, groups: Groups, steps: Mapping[int, int]) -> None:
    """Raise ValueError if an updated parameter has elements and lacks a state or master here.

    What the optimizer has no place for was not read from the checkpoint. ``groups`` are as they
    will be once it is loaded.
    """
    for state in held.flats:
        names = held.rule.state_names(groups[state.flat.group])
        lacking = [name for name in names if name not in state.states]
        if state.codec.arena is None and state.codec.key is not None:
            lacking.append(state.codec.key)
        trained = [s.param for s in state.flat.slots if s.numel and steps[s.param] > 0]
        if not lacking or not trained:
            continue
        name = held.layout.specs[trained[0]].name
        remedy = (
            f"{name} was frozen. Build while it requires a gradient, load, then freeze it."
            if state.flat.frozen
            else "the hyper-parameters were others. Build it with those of the checkpoint."
        )
        raise ValueError(
            f"The checkpoint is of an optimizer that has trained {name}, and this one has no place "
            f"for its {lacking[0]}: when this one was built, {remedy}"
        )
