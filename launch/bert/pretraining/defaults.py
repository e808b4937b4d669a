"""What a recipe, and a checkpoint to begin with, put in place of the options' defaults."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from pretraining.architecture import read_architecture, size_name
from pretraining.errors import UsageError
from pretraining.parser import given, option
from pretraining.phases import FIELDS, read_recipe

OF_PHASES = tuple(name for name in FIELDS if name != "micro_batch_size")


def take_architecture(parser: argparse.ArgumentParser, argv: Sequence[str]) -> None:
    """Have the sizes of a checkpoint be the parser's defaults, unless they are contradicted."""
    folder = parser.parse_args(argv).init_from
    if folder is None:
        return
    architecture = read_architecture(folder)
    size, vocab_size = size_name(architecture), architecture["vocab_size"]
    both = sorted(given(argv) & {"model_size", "vocab_size"})
    if both:
        raise UsageError(
            f"{', '.join(map(option, both))} cannot be given beside --init-from: {folder} is BERT "
            f"{size} with a vocabulary of {vocab_size}; drop it"
        )
    recipe = parser.parse_args(argv).recipe
    wanted = read_recipe(recipe).options.get("model_size", size) if recipe else size
    if wanted != size:
        raise UsageError(
            f"--init-from: {folder} is BERT {size}, --recipe {recipe} is of BERT {wanted}; "
            "name a checkpoint of that size, or copy the recipe"
        )
    parser.set_defaults(architecture=architecture, model_size=size, vocab_size=vocab_size)


def phases_of(
    name: str, parser: argparse.ArgumentParser, argv: Sequence[str]
) -> Sequence[dict[str, Any]]:
    """Return a recipe's phases, and have its options be the parser's defaults."""
    recipe = read_recipe(name)
    actions = {action.dest: action for action in parser._actions}
    for key, value in recipe.options.items():
        if key not in actions:
            raise UsageError(f"--recipe: {name} has {key}, which is no option; see --help")
        choices = actions[key].choices
        if choices is not None and value not in choices:
            wanted = ", ".join(map(str, choices))
            raise UsageError(f"--recipe: {name}: {key} must be one of {wanted}, got {value}")
        if not _is_of(actions[key], value):
            raise UsageError(
                f"--recipe: {name}: {key} must be {_kind(actions[key])}, got {value!r}"
            )
    for number, phase in enumerate(recipe.phases, start=1):
        for key in phase.keys() & actions.keys():
            if not _is_one(actions[key], phase[key]):
                kind = _kind(actions[key], is_one=True)
                raise UsageError(
                    f"--recipe: {name}: {key} of phase {number} must be {kind}, got {phase[key]!r}"
                )
    refuse_flags(argv, f"of the phases of {name}")
    parser.set_defaults(**recipe.options)
    arguments = parser.parse_args(argv)
    missing = [need for need in recipe.needs if getattr(arguments, need, None) is None]
    if missing and arguments.dry_run is None:
        raise UsageError(f"--recipe {name} needs {', '.join(map(option, missing))}; see README.md")
    return recipe.phases


def _kind(action: argparse.Action, *, is_one: bool = False) -> str:
    """Return what an option's value must be in JSON."""
    one = {int: "a whole number", float: "a number"}.get(action.type, "a text")  # type: ignore
    if action.nargs == 0:
        return "true or false"
    return one if is_one or action.nargs not in (2, "+") else f"a list, each {one}"


def _is_of(action: argparse.Action, value: Any) -> bool:
    """Return whether a value is of an option's kind. The parser sees to a text's contents."""
    if action.nargs == 0:
        return isinstance(value, bool)
    if action.nargs in (2, "+"):
        is_all = isinstance(value, list) and all(_is_one(action, one) for one in value)
        return is_all and (action.nargs == "+" or len(value) == action.nargs)
    return value == action.default or isinstance(value, str) or _is_one(action, value)


def _is_one(action: argparse.Action, value: Any) -> bool:
    wanted: Any = {int: int, float: int | float}.get(action.type, str)  # type: ignore
    return isinstance(value, wanted) and not isinstance(value, bool)


def refuse_flags(argv: Sequence[str], whose: str) -> None:
    """Raise `UsageError` for options of a phase, of which there are several."""
    both = given(argv) & set(OF_PHASES)
    if both:
        names = ", ".join(map(option, sorted(both)))
        raise UsageError(f"{names} cannot be given beside phases: each is {whose}; copy the recipe")
