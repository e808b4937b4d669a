"""What a state dict must be before anything of it is loaded: kinds, numbers, entries, values.

A dict may have been edited by hand, or have gone through JSON. What is not right is refused here,
in words that name it, so that nothing is loaded by halves, and nothing is left out in silence.
"""

from __future__ import annotations

import reprlib
from collections.abc import Hashable, Mapping, Sequence
from copy import deepcopy
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from shardfuse.fragments import FragmentTensor
from shardfuse.rules import UpdateRule

MAX_STEP = 2**30
"""Ranks exchange counts as int32; beyond this, those of further steps might not fit."""

_EXACT = 2**24
"""Whole numbers up to this are exact in fp32."""

_WHOLE = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def count(value: Any, what: str) -> int:
    """Return a number of updates, an int, float, or one element of a tensor or array, as an int.

    Raises:
        TypeError: it is something else, text and True included.
        ValueError: below 0, fractional, NaN or beyond MAX_STEP.
    """
    number: Any = value
    if hasattr(value, "item"):
        try:
            number = value.item()
        except (TypeError, ValueError, RuntimeError):  # of several elements, or on meta
            number = None
    if isinstance(number, bool) or not issubclass(type(number), Real):
        raise TypeError(f"{what} must be a whole number, got {reprlib.repr(value)}. Correct it.")
    if not (0 <= number <= MAX_STEP and int(number) == number):
        raise ValueError(
            f"{what} must be a whole number from 0 to {MAX_STEP}, got {reprlib.repr(number)}. "
            "Correct it in the dict."
        )
    return int(number)


def saved_groups(state_dict: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the groups of a state dict, each with a list ``params``.

    Raises:
        TypeError: they are something else.
        ValueError: there are none.
    """
    groups = _part(state_dict, "param_groups")
    if not isinstance(groups, list | tuple):
        raise TypeError(
            f"param_groups of the loaded state dict must be a list, got {_kind(groups)}."
        )
    for index, group in enumerate(groups):
        if not isinstance(group, Mapping):
            raise TypeError(f"{_at(index)} must be a dict, got {_kind(group)}.")
        if not isinstance(group.get("params"), list | tuple):
            raise TypeError(
                f"{_at(index)} must have a list 'params' of the numbers of its parameters, got "
                f"{reprlib.repr(group.get('params'))}."
            )
        names = group.get("param_names", [])
        if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
            raise TypeError(
                f"param_names of {_at(index)} must be a list of names, got {reprlib.repr(names)}. "
                "Correct it, or remove the key."
            )
    return list(groups)


def check_names(groups: Sequence[Mapping[str, Any]]) -> None:
    """Raise ValueError unless each group of saved_groups() has a name for each of its params."""
    for index, group in enumerate(groups):
        names, num_params = group.get("param_names"), len(group["params"])
        if names is not None and len(names) != num_params:
            raise ValueError(
                f"param_names of {_at(index)} must be {num_params} names, one for each of its "
                f"params, got {reprlib.repr(names)}. Correct it, or remove the key."
            )


def copied(group: Mapping[str, Any], index: int) -> dict[str, Any]:
    """Return a copy of all that a saved group has beside its parameters.

    Raises:
        TypeError: something in it cannot be copied.
    """
    options = {}
    for key, value in group.items():
        if key in ("params", "param_names"):
            continue
        try:
            options[key] = deepcopy(value)  # a tensor lr is not the caller's
        except Exception as error:
            raise TypeError(
                f"{key!r} of {_at(index)} cannot be copied ({type(error).__name__}: {error}). "
                "Leave it out of the dict."
            ) from error
    return options


def check_options(rule: UpdateRule, group: Mapping[str, Any], where: str) -> None:
    """Raise as ``rule.check`` does, and say where the group is."""
    try:
        rule.check(group)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{where}: {error}") from None


def check_saved_options(rule: UpdateRule, group: Mapping[str, Any], index: int) -> None:
    """Raise as ``rule.check`` does, or if a step that the rule counts in groups is none."""
    check_options(rule, group, _at(index))
    if rule.counts_in_groups and "step" in group:
        count(group["step"], f"step of {_at(index)}")


def saved_entries(
    state_dict: Mapping[str, Any], groups: Sequence[Mapping[str, Any]], names: Sequence[str]
) -> dict[int, dict[str, Any]]:
    """Return {parameter, counted through all groups: its states} of a state dict.

    Numbers may have become text, as keys do in JSON.

    Args:
        state_dict: has the states by the numbers, or names, that ``groups`` have.
        groups: its saved_groups().
        names: of the parameters here, for messages.

    Raises:
        TypeError: the states are no dict of dicts.
        ValueError: two parameters of one number, two entries of one parameter, or an entry of none.
    """
    state = _part(state_dict, "state")
    if not isinstance(state, Mapping):
        raise TypeError(f"state of the loaded state dict must be a dict, got {_kind(state)}.")
    places: dict[Hashable, int] = {}
    for group_index, group in enumerate(groups):
        for number in group["params"]:
            if not isinstance(number, Hashable) or isinstance(number, Tensor):
                raise TypeError(
                    f"params of {_at(group_index)} must be numbers, got {reprlib.repr(number)}."
                )
            if number in places:
                raise ValueError(
                    f"loaded state dict has {number!r} twice among the params of its groups, last "
                    f"in group {group_index}. Each parameter has a number of its own, which its "
                    "states have as key."
                )
            places[number] = len(places)
    texts = {str(number): at for number, at in places.items() if isinstance(number, int)}
    entries: dict[int, dict[str, Any]] = {at: {} for at in places.values()}
    seen: dict[int, Any] = {}
    for key, entry in state.items():
        at = places.get(key, texts.get(key) if isinstance(key, str) else None)
        if at is None:
            raise ValueError(
                f"loaded state dict has states of {key!r}, which is not among the params of its "
                "groups. Give them the number of their parameter, or remove them."
            )
        if at in seen:
            raise ValueError(
                f"loaded state dict has states of {names[at]} twice, as {seen[at]!r} and as "
                f"{key!r}. Remove one of them."
            )
        if not isinstance(entry, Mapping):
            raise TypeError(f"The states of {names[at]} must be a dict, got {_kind(entry)}.")
        seen[at], entries[at] = key, dict(entry)
    return entries


def check_known(rule: UpdateRule, owner: str, entry: Mapping[Any, Any], others: set[str]) -> None:
    """Raise ValueError if an entry has a state that no optimizer of this class has."""
    known = {*rule.optional_states, *others, "step"}
    extra = [name for name, value in entry.items() if name not in known and value is not None]
    if extra:
        raise ValueError(
            f"State {extra[0]!r} of {owner} in the loaded state dict is none of "
            f"{type(rule).__name__.removesuffix('Rule')}'s and would be lost. Load the dict into "
            "the class that saved it, or remove the state from it."
        )


def check_tensor(name: str, value: Any, owner: str, shape: Sequence[int], rule: UpdateRule) -> None:
    """Raise unless a saved state is a dense tensor of a shape whose values fp32 can hold.

    NaN and infinity are values. fp64 is rounded, as by torch.

    Args:
        name: of the state.
        value: what is saved of it.
        owner: the parameter's name.
        shape: that it must have.
        rule: says which states are squares.
    """
    what = f"State {name} of {owner}"
    if not isinstance(value, Tensor):
        raise TypeError(
            f"{what} must be a tensor, got {_kind(value)}. Make it one, as by "
            f"torch.tensor(value).reshape({tuple(shape)})."
        )
    parts = [value]
    if isinstance(value, FragmentTensor):
        parts = [piece.data for piece in value.pieces]
    for is_so, kind, remedy in (
        (hasattr(value, "full_tensor"), "a DTensor", "Give what its full_tensor() returns."),
        (value.is_nested, "nested", "Make it one dense tensor of the parameter's shape."),
        (value.is_meta, "on the meta device, without values", "Load the file on the CPU."),
        (value.is_quantized, "quantized", "Give what its dequantize() returns."),
        (value.layout != torch.strided, f"{value.layout}", "Give what its to_dense() returns."),
    ):
        if is_so:
            raise TypeError(f"{what} is {kind}, and must be a plain dense tensor. {remedy}")
    if value.shape != torch.Size(shape):
        raise ValueError(
            f"{what} has shape {tuple(value.shape)}, the parameter has {tuple(shape)}."
        )
    for part in parts:
        _check_values(what, part, name in rule.squares)


def is_untouched(value: Any, initial: float) -> bool:
    """Return whether a state that check_tensor() has passed is what it was before any update."""
    if value is None:
        return True
    parts = [p.data for p in value.pieces] if isinstance(value, FragmentTensor) else [value]
    return all(bool(((part == 0) | (part == initial)).all()) for part in parts)


def _check_values(what: str, value: Tensor, is_square: bool) -> None:
    """Raise unless fp32 holds ``value``, and no average of squares is below 0."""
    is_whole = value.dtype in _WHOLE
    if not (is_whole or value.is_floating_point()):
        raise TypeError(
            f"{what} is of {value.dtype}, and states are kept in fp32. Save it again in a "
            "floating-point dtype."
        )
    if value.numel() == 0:
        return
    if is_whole:
        is_lost = int(value.min()) < -_EXACT or int(value.max()) > _EXACT
    else:
        plain = value.float()
        is_lost = value.dtype == torch.float64 and bool((plain.isinf() & ~value.isinf()).any())
        value = plain
    if is_lost:
        raise ValueError(
            f"{what} has values that fp32, in which states are kept, does not hold. Correct them "
            "in the dict."
        )
    if is_square and float(value.amin()) < 0:
        raise ValueError(f"{what} is an average of squares, and has values below 0 in the dict.")


def _part(state_dict: Any, key: str) -> Any:
    if key not in state_dict:
        raise ValueError(
            f"loaded state dict has no {key!r}, but {reprlib.repr(list(state_dict))}. Pass what "
            "state_dict() of an optimizer has returned."
        )
    return state_dict[key]


def _kind(value: Any) -> str:
    return f"{type(value).__name__} ({reprlib.repr(value)})"


def _at(index: int) -> str:
    return f"param_groups[{index}] of the loaded state dict"
