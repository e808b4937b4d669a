"""Other jobs' options in ours: the tables' form, and what is told of what has no place here."""

from __future__ import annotations

import argparse
import dataclasses
import json
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any, NoReturn

from pretraining.architecture import HEAD_WIDTH, MODEL_SIZES, ModelSize
from pretraining.errors import UsageError
from pretraining.files import blaming
from pretraining.parser import option
from pretraining.phases import Carry, Phase

TABLES = Path(__file__).parents[1] / "tables"

Values = dict[str, Any]


class Fate(Enum):
    """What becomes of an option."""

    MAPPED = "mapped"
    TOLD = "told"  # there is none here, or it is always so; training is the same
    DATA = "data"  # files that are not read here; --corpus stands for them
    CHANGES = "changes"  # there is none here, and training is another without


@dataclasses.dataclass(frozen=True)
class Row:
    """One option of theirs."""

    names: str  # the first is the one that is told
    default: Any  # theirs; False is a flag, None a text
    fate: Fate
    ours: str

    @property
    def name(self) -> str:
        """Return the option's name without dashes."""
        return self.names.split()[0]


def _table(name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((TABLES / f"{name}.json").read_text())
    return content


def read_rows(name: str) -> tuple[Row, ...]:
    """Read the options of a table."""
    return tuple(
        Row(names, default, Fate(fate), ours) for names, default, fate, ours in _table(name)["rows"]
    )


class Notes:
    """What is told of a translation."""

    def __init__(self, ignored: Sequence[str], *, has_corpus: bool) -> None:
        self.lines: list[str] = []
        self.changes: dict[str, str] = {}
        self._ignored = dict.fromkeys(ignored, False)
        self._has_corpus = has_corpus

    def tell(self, name: str, text: str) -> None:
        """Note what makes no other training."""
        self._add(f"{name}: {text}")

    def change(self, name: str, text: str) -> None:
        """Note what makes another training, unless the user has said to ignore it."""
        if name in self._ignored:
            self._ignored[name] = True
            self._add(f"{name}: ignored; {text}")
        else:
            self.changes[name] = text

    def _add(self, line: str) -> None:
        if line not in self.lines:
            self.lines.append(line)

    def judge(self, row: Row, value: Any) -> None:
        """Note what is to be told of an option that was given."""
        if row.fate is Fate.TOLD or (row.fate is Fate.DATA and self._has_corpus):
            self.tell(row.name, row.ours)
        elif row.fate is not Fate.MAPPED:
            self.change(row.name, row.ours)

    def unused(self) -> list[str]:
        """Return what was to be ignored, and is not there."""
        return [name for name, is_used in self._ignored.items() if not is_used]


Convert = Callable[[argparse.Namespace, int | None, Notes], tuple[Values, Values]]
"""(their options, GPUs, notes) -> options of the run, options of the phase."""


@dataclasses.dataclass(frozen=True)
class Source:
    """A job of others: its options, and how they become ours."""

    where: str  # repository and path
    rows: tuple[Row, ...]
    carry: Carry
    """What its second command keeps of the first."""
    continues: tuple[str, ...]
    """Options by which it does."""
    has_tf_flags: bool
    """Switches may be --name=false and --noname."""
    convert: Convert

    @classmethod
    def read(cls, name: str, convert: Convert) -> Source:
        """Read the table of a job."""
        content = _table(name)
        return cls(
            where=content["where"],
            rows=read_rows(name),
            carry=content["carry"],
            continues=tuple(content["continues"]),
            has_tf_flags=content["has_tf_flags"],
            convert=convert,
        )

    def parse(self, words: Sequence[str]) -> argparse.Namespace:
        """Read a command of theirs, with or without what is before its options."""
        parser = _TheirParser(prog=self.where, add_help=False, allow_abbrev=False)
        for row in self.rows:
            names = [f"--{name}" for name in row.names.split()]
            if row.default is not False:
                kind = str if row.default is None else type(row.default)
                parser.add_argument(*names, type=kind, default=row.default)
            elif self.has_tf_flags:
                parser.add_argument(*names, nargs="?", type=_truth, const=True, default=False)
                parser.add_argument(f"--no{row.name}", dest=row.name, action="store_false")
                parser.set_defaults(**{row.name: False})
            else:
                parser.add_argument(*names, action="store_true")
        return parser.parse_args(_own(words, parser))

    def table(self) -> Iterator[str]:
        """Yield the lines of a Markdown table of all options."""
        yield "| theirs | ours |"
        yield "|---|---|"
        for row in self.rows:
            yield f"| `--{row.name}` | {row.ours} |"


def _own(words: Sequence[str], parser: argparse.ArgumentParser) -> Sequence[str]:
    """Return what follows the script; a launcher may be before it, an option's value is none."""
    starts = (n for n, w in enumerate(words) if w.split("=")[0] in parser._option_string_actions)
    before = words[: next(starts, len(words))]
    scripts = [number for number, word in enumerate(before) if word.endswith(".py")]
    return words[scripts[-1] + 1 :] if scripts else words


class _TheirParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{self.prog}: {message}")


def _truth(word: str) -> bool:
    if word.lower() not in ("true", "false", "1", "0", "t", "f"):
        raise argparse.ArgumentTypeError(f"{word} is neither true nor false")
    return word.lower() in ("true", "1", "t")


def translate(
    source: Source, words: Sequence[str], gpus: int | None, notes: Notes, *, is_second: bool
) -> tuple[Values, Values]:
    """Return (options of the run, options of the phase) of one command of theirs."""
    theirs = source.parse(words)
    if theirs.output_dir is None:
        raise UsageError("--output_dir is missing; theirs needs it, too")
    for row in source.rows:
        value = getattr(theirs, row.name.replace("-", "_"))
        follows = is_second and row.name in source.continues
        if value != row.default and not follows:
            notes.judge(row, value)
    options, phase = source.convert(theirs, gpus, notes)
    if is_second:
        options.pop("init_from", None)  # it is the first command's result
        phase["carry"] = source.carry
    checked = Phase(**{"micro_batch_size": 0, "carry": "all", **phase})
    if gpus is not None:
        checked.micro_batches(gpus)
    return options, phase


def command(options: Mapping[str, Any]) -> str:
    """Return options as a shell's words."""
    words: list[str] = []
    for name, value in options.items():
        values = value if isinstance(value, list) else [value]
        words += [option(name), *map(str, values)]
    return shlex.join(words)


def recipe(first: tuple[Values, Values], second: tuple[Values, Values], about: str) -> str:
    """Return two commands' options as a recipe of two phases; raises `UsageError`."""
    for name in (first[0] | second[0]).keys() - {"init_from"}:
        values = [options.get(name) for options, _ in (first, second)]
        if values[0] != values[1]:
            raise UsageError(
                f"phase 1 has {option(name)} {values[0]}, phase 2 {values[1]}; an option that is "
                "not a phase's must be the same in both"
            )
    content = {"about": about, "options": first[0], "phases": [first[1], second[1]]}
    return json.dumps(content, indent=2)


def require_positive(**numbers: int) -> None:
    """Raise `UsageError` for one that is below 1."""
    for name, number in numbers.items():
        if number < 1:
            raise UsageError(f"--{name} must be at least 1, got {number}")


def read_json(name: str, path: str | None) -> dict[str, Any]:
    """Read a file of settings that an option of theirs names; raises `UsageError`."""
    if path is None:
        raise UsageError(f"{name} is missing; theirs needs it, too")
    with blaming(name, Path(path)):
        text = Path(path).read_text(encoding="utf-8")
    try:
        content = json.loads(text)
    except ValueError as error:
        raise UsageError(f"{name} {path}: {error}") from error
    if not isinstance(content, dict):
        raise UsageError(f"{name} {path}: it must be a JSON object")
    return content


def vocab_size_in(settings: Mapping[str, Any]) -> int:
    """Return the vocabulary of a BERT configuration; raises `UsageError`."""
    try:
        return int(settings["vocab_size"])
    except (KeyError, ValueError, TypeError) as error:
        raise UsageError("the model's configuration has no vocab_size; add it") from error


def model_options(settings: Mapping[str, Any], notes: Notes) -> Values:
    """Return our options for the shape in a BERT configuration; raises `UsageError`."""
    shape = ModelSize(settings.get("num_hidden_layers", 12), settings.get("hidden_size", 768))
    names = [name for name, size in MODEL_SIZES.items() if size == shape]
    heads = settings.get("num_attention_heads", 12) * HEAD_WIDTH
    inner = settings.get("intermediate_size", 3072)
    if not names or heads != shape.hidden_size or inner != 4 * shape.hidden_size:
        known = ", ".join(f"{n} {s.num_layers} x {s.hidden_size}" for n, s in MODEL_SIZES.items())
        raise UsageError(
            f"a model of {shape.num_layers} layers x {shape.hidden_size}, {heads // HEAD_WIDTH} "
            f"heads and an inner layer of {inner} is none of {known}; begin with a transformers "
            "checkpoint of it (--init-from)"
        )
    dropout = settings.get("hidden_dropout_prob", 0.1)
    if settings.get("attention_probs_dropout_prob", 0.1) != dropout:
        notes.change("attention_probs_dropout_prob", f"--dropout is one for all, here {dropout}")
    if settings.get("hidden_act", "gelu") != "gelu":
        notes.change("hidden_act", "it is gelu here")
    try:
        return {"model_size": names[0], "dropout": float(dropout)}
    except (TypeError, ValueError) as error:
        raise UsageError(f"hidden_dropout_prob must be a number, got {dropout!r}") from error
