"""The phases of a run: short sequences first, long ones afterwards, each with its own curve."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, get_args

from pretraining.errors import UsageError
from pretraining.files import blaming

Carry = Literal["weights", "moments", "all"]
DecayFrom = Literal["warmup", "start"]

RECIPES = Path(__file__).parents[1] / "recipes"
MIN_SEQ_LEN = 8
MAX_SEQ_LEN = 512
"""Positions that Google's models have."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Phase:
    """Steps with one length of sequence, one batch and one rise and fall of the learning rate."""

    seq_len: int
    steps: int
    global_batch_size: int
    micro_batch_size: int
    """Samples in one forward pass of one rank; 0 means the rank's whole share of the batch."""
    lr: float
    warmup: float
    """Share of the phase's steps in which the learning rate rises linearly."""
    decay_power: float
    warmup_from: float = 0.0
    """Share of `lr` that the rise begins at."""
    decay_from: DecayFrom = "warmup"
    """Where the decay begins: at the end of the rise, or with the phase, as if there were none."""
    carry: Carry
    """What is kept of the phase before: weights alone, moments too, or also the count of steps."""

    def __post_init__(self) -> None:
        for name in ("steps", "global_batch_size"):
            self._require(name, getattr(self, name) >= 1, "at least 1")
        for name in ("decay_power", "micro_batch_size"):
            self._require(name, getattr(self, name) >= 0, "0 or greater")
        self._require("decay_power", self.decay_power < float("inf"), "a number")
        self._require("seq_len", self.seq_len >= MIN_SEQ_LEN, f"at least {MIN_SEQ_LEN}")
        wanted = f"at most {MAX_SEQ_LEN}, the positions that BERT has"
        self._require("seq_len", self.seq_len <= MAX_SEQ_LEN, wanted)
        self._require("lr", 0 < self.lr < float("inf"), "a number greater than 0")
        self._require("warmup", 0 <= self.warmup <= 1, "a share of the steps from 0 to 1")
        self._require("warmup_from", 0 <= self.warmup_from < 1, "from 0 to below 1")
        for name, choices in (("carry", get_args(Carry)), ("decay_from", get_args(DecayFrom))):
            self._require(name, getattr(self, name) in choices, f"one of {', '.join(choices)}")

    def _require(self, name: str, is_valid: bool, wanted: str) -> None:
        if not is_valid:
            option = "--" + name.replace("_", "-")
            raise UsageError(f"{option} must be {wanted}, got {getattr(self, name)}")

    def lr_at(self, step: int) -> float:
        """Return the learning rate of the phase's `step` (from 0): a rise, then decay to 0.

        It depends on the step alone, so a resumed run needs no scheduler state.
        """
        num_warmup = round(self.warmup * self.steps)
        if step < num_warmup:
            lowest = self.lr * self.warmup_from
            return lowest + (self.lr - lowest) * (step + 1) / num_warmup
        before = num_warmup if self.decay_from == "warmup" else 0
        progress = (step - before) / max(1, self.steps - before)
        return self.lr * (1 - progress) ** self.decay_power

    def micro_batches(self, world_size: int) -> MicroBatches:
        """Split the global batch over ranks and micro-batches, or say why that cannot work."""
        size, micro = self.global_batch_size, self.micro_batch_size
        if size % world_size:
            nearest = max(1, round(size / world_size)) * world_size
            raise UsageError(
                f"--global-batch-size {size} cannot be split over {world_size} ranks; "
                f"use a multiple such as {nearest}, or another --nproc-per-node"
            )
        share = size // world_size
        micro = micro or share
        if share % micro:
            raise UsageError(
                f"--micro-batch-size {micro} does not divide a rank's {share} samples "
                f"(--global-batch-size {size} over {world_size} ranks); use a divisor of {share}"
            )
        return MicroBatches(samples_per_rank=share, size=micro, number=share // micro)


FIELDS = tuple(field.name for field in dataclasses.fields(Phase))


@dataclasses.dataclass(frozen=True)
class MicroBatches:
    """How one rank works through its share of the global batch, all in samples."""

    samples_per_rank: int
    size: int
    number: int


def spans(phases: Sequence[Phase]) -> list[range]:
    """Return the steps of each phase, counted over the whole run."""
    stops = list(itertools.accumulate(phase.steps for phase in phases))
    return [range(stop - phase.steps, stop) for phase, stop in zip(phases, stops, strict=True)]


@dataclasses.dataclass(frozen=True)
class Recipe:
    """A file of options and phases."""

    options: dict[str, Any]
    phases: tuple[dict[str, Any], ...]
    needs: tuple[str, ...]
    """Options that the user has to add."""


def read_recipe(name: str) -> Recipe:
    """Read a recipe: a JSON file, or the name of one in recipes/.

        {"about": text, "needs": [option], "options": {option: value},
         "phases": [{option of a phase: value}, ...]}

    Raises `UsageError`, which names the file, and what in it is wrong.
    """
    path = Path(name)
    if path.suffix != ".json" and (RECIPES / f"{name}.json").exists():
        path = RECIPES / f"{name}.json"
    if not path.is_file():
        known = ", ".join(sorted(recipe.stem for recipe in RECIPES.glob("*.json")))
        raise UsageError(f"--recipe: {name} is no file, and none of {known}")
    with blaming("--recipe", path):
        text = path.read_text(encoding="utf-8")
    try:
        return _parse(json.loads(text))
    except (TypeError, ValueError) as error:
        raise UsageError(f"--recipe: {path}: {error}") from error


def _parse(content: Any) -> Recipe:
    known_keys = {"about", "needs", "options", "phases"}
    if not isinstance(content, dict) or not content.keys() <= known_keys:
        raise ValueError('it must be an object of "about", "options" and "phases"')
    options, phases = content.get("options", {}), content.get("phases", [])
    if not isinstance(options, dict) or not isinstance(phases, list) or not phases:
        raise ValueError('"options" must be an object, and "phases" a list of one or more of them')
    for number, phase in enumerate(phases, start=1):
        unknown = sorted(phase.keys() - set(FIELDS)) if isinstance(phase, dict) else [str(phase)]
        if unknown:
            known = ", ".join(FIELDS)
            raise ValueError(f"phase {number} has {', '.join(unknown)}; a phase has {known}")
    inside = sorted(options.keys() & set(FIELDS))
    if inside:
        raise ValueError(f"{', '.join(inside)} belong into the phases")
    return Recipe(options, tuple(phases), tuple(content.get("needs", ())))
