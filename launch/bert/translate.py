"""Print our command line for another BERT job's.

    python launch/bert/translate.py nvidia --gpus 8 --corpus wiki.txt -- --train_batch_size 64 ...
    python launch/bert/translate.py nvidia --gpus 8 --corpus wiki.txt --phase1 '...' --phase2 '...'

The first prints a line for a shell, the second a recipe of two phases. What is to be known besides
goes to stderr. Options that have no place here, and that training would be another without, are
errors unless --ignore names them. migration.md has the tables.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from pretraining.errors import UsageError
from pretraining.launch import refuse
from pretraining.parser import Help, Parser
from pretraining.sources import SOURCES
from pretraining.translation import (
    Notes,
    Source,
    Values,
    command,
    recipe,
    require_positive,
    translate,
)

PRETRAIN = Path(__file__).with_name("pretrain.py")
_OPERATIONAL = ("run_dir", "resume")


def main(argv: Sequence[str]) -> int:
    """Translate; return the exit code: 0, or 2 where the request cannot be met."""
    split = argv.index("--") if "--" in argv else len(argv)
    try:
        arguments = _parser().parse_args(argv[:split])
        source = SOURCES[arguments.source]
        if arguments.table:
            print("\n".join(source.table()))
        else:
            print(_translated(source, arguments, argv[split + 1 :]))
    except UsageError as error:
        return refuse(error, None, program="translate.py")
    return 0


def _parser() -> Parser:
    parser = Parser(
        prog="translate.py",
        usage="translate.py SOURCE [options] (-- THEIR OPTIONS | --phase1 TEXT --phase2 TEXT)",
        description="Print our command line for another BERT job's.",
        formatter_class=Help,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("source", choices=sorted(SOURCES), help="whose options they are")
    add("--gpus", type=int, help="how many they ran on, over all nodes")
    add("--corpus", nargs="+", metavar="FILE", help="text that their data was made of")
    add("--ignore", default="", metavar="NAMES", help="go on without these, by commas")
    add("--phase1", metavar="TEXT", help="options of the first of two commands")
    add("--phase2", metavar="TEXT", help="options of the second")
    add("--table", action="store_true", help="print what becomes of each option")
    return parser


def _translated(source: Source, arguments: argparse.Namespace, words: Sequence[str]) -> str:
    """Return what goes to stdout; raises `UsageError`."""
    texts = (arguments.phase1, arguments.phase2)
    is_recipe = None not in texts
    if not is_recipe and (texts != (None, None) or not words):
        raise UsageError("give their options after --, or both --phase1 and --phase2")
    if is_recipe and words:
        raise UsageError("options after -- are those of one command; drop them, or both phases")
    ignored = [name for name in arguments.ignore.split(",") if name]
    notes = Notes(ignored, has_corpus=arguments.corpus is not None)
    commands = [_words(text) for text in texts] if is_recipe else [words]
    if arguments.gpus is not None:
        require_positive(gpus=arguments.gpus)
    parts = [
        translate(source, words, arguments.gpus, notes, is_second=number == 1)
        for number, words in enumerate(commands)
    ]
    if is_recipe:
        _drop_operational([options for options, _ in parts], notes)
    _tell(notes)
    corpus = {"corpus": arguments.corpus} if arguments.corpus else {}
    parts = [(corpus | options, phase) for options, phase in parts]
    if is_recipe:
        return recipe(parts[0], parts[1], f"From two commands of {source.where}.")
    options, phase = parts[0]
    if "init_from" in options:
        # They come with the checkpoint.
        options = {k: v for k, v in options.items() if k not in ("model_size", "vocab_size")}
    return f"{os.path.relpath(PRETRAIN)} {command(options | phase)}"


def _words(text: str) -> Sequence[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise UsageError(f"--phase1, --phase2: {error} in {text!r}") from error


def _drop_operational(options: Sequence[Values], notes: Notes) -> None:
    """Have a recipe be of the run alone."""
    for values in options:
        for name in _OPERATIONAL:
            value = values.pop(name, None)
            if name == "run_dir" and value is not None:
                notes.tell("output", f"a recipe names no folder; add --run-dir {value}")


def _tell(notes: Notes) -> None:
    """Print the notes; raises `UsageError` where training would be another."""
    for line in notes.lines:
        print(f"translate.py: {line}", file=sys.stderr)
    for name, text in notes.changes.items():
        print(f"translate.py: {name} CHANGES TRAINING: {text}", file=sys.stderr)
    if notes.changes:
        names = ",".join(notes.changes)
        raise UsageError(f"training would be another without these; --ignore {names} goes on so")
    if notes.unused():
        raise UsageError(f"--ignore {','.join(notes.unused())}: there is nothing to ignore of that")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
