"""``python -m shardfuse COMMAND``: examine hosts, plan runs, compare, look at checkpoints."""

from __future__ import annotations

import argparse
import difflib
import functools
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from shardfuse.version import __version__


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; return its exit code: 0 for success, 1 for damage, 2 for wrong use."""
    words = sys.argv[1:] if argv is None else list(argv)
    parser = _parser()
    if words and not words[0].startswith("-") and words[0] not in _COMMANDS:
        parser.error(_unknown(words[0]))
    arguments = parser.parse_args(words)
    # Takes seconds to import, which --help does not need.
    from shardfuse.checkpoint import CheckpointError, DamagedCheckpoint

    try:
        found: int = arguments.run(arguments)
    except DamagedCheckpoint as error:
        print(f"DAMAGED: {error}", file=sys.stderr)
        return 1
    except CheckpointError as error:
        print(error, file=sys.stderr)
        return 2
    except OSError as error:
        from shardfuse.files import describe_os_error

        print(f"It cannot be done: {describe_os_error(error)}.", file=sys.stderr)
        return 2
    return found


def console() -> int:
    """Run a command as the console script ``shardfuse``."""
    return main()


def _run_as_module() -> int:
    """Run a command as ``python -m shardfuse``.

    Python has put the working directory first in sys.path. A command that reads a checkpoint there
    must not run a safetensors.py next to it. torch was imported before this, so a file that is
    named
    like a module that torch imports has already run: only the console script, or ``python -P``,
    prevents that.
    """
    if not getattr(sys.flags, "safe_path", False) and sys.path[:1] in ([""], [os.getcwd()]):
        del sys.path[0]
    return main()


def _unknown(word: str) -> str:
    near = difflib.get_close_matches(word, _COMMANDS, n=1)
    hint = f"Did you mean {near[0]!r}? " if near else ""
    return f"there is no command {word!r}. {hint}Commands: {', '.join(_COMMANDS)}."


class _Command(NamedTuple):
    """Help text and example of a command."""

    text: str
    example: str


_COMMANDS = {
    "doctor": _Command(
        "find out whether this host, or all ranks under torchrun, can train; exit code 1 if not",
        "torchrun --nproc-per-node 8 -m shardfuse doctor --full",
    ),
    "plan": _Command(
        "compute what ranks will hold and send, and how long a step takes; needs no device",
        "python -m shardfuse plan --model bert-large --world-size 8 --optimizer lamb",
    ),
    "compare-variants": _Command(
        "compare the steps that two variants of LAMB take at equal lr, and how to translate lr",
        "python -m shardfuse compare-variants npu google --model my_package.models:build",
    ),
    "inspect": _Command(
        "print what a checkpoint holds; reads no data",
        "python -m shardfuse inspect checkpoints/step-1000",
    ),
    "verify": _Command(
        "read every byte of a checkpoint, or of a folder of them; exit code 1 if any is damaged",
        "python -m shardfuse verify checkpoints",
    ),
    "export": _Command(
        "write whole tensors of a checkpoint to files that others read",
        "python -m shardfuse export checkpoints/step-1000 --model model.safetensors",
    ),
    "import": _Command(
        "write the optimizer state that another library has saved in torch.optim's format",
        "python -m shardfuse import deepspeed checkpoints/ds --to optimizer.pt",
    ),
}


def _parser() -> argparse.ArgumentParser:
    examples = "\n".join(f"  {command.example}" for command in _COMMANDS.values())
    parser = argparse.ArgumentParser(
        prog=_PROG,
        description="Examine hosts, plan runs, look at checkpoints, compare optimizers.",
        epilog=f"examples:\n{examples}\n\n{_PROG} COMMAND --help has the options of a command.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"shardfuse {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", title="commands")
    fill = {
        "doctor": _add_doctor,
        "plan": _add_plan,
        "compare-variants": _add_variants,
        "inspect": _add_inspect,
        "verify": _add_verify,
        "export": _add_export,
        "import": _add_import,
    }
    for name, (text, example) in _COMMANDS.items():
        command = commands.add_parser(
            name,
            help=text,
            description=f"{text[0].upper()}{text[1:]}.",
            epilog=f"example:\n  {example}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        fill[name](command)
    return parser


def _add_inspect(command: argparse.ArgumentParser) -> None:
    command.add_argument("folder", type=Path, help="one checkpoint, such as checkpoints/step-1000")
    command.add_argument("--json", action="store_true", help="print JSON, for scripts")
    command.set_defaults(run=_inspect)


def _add_verify(command: argparse.ArgumentParser) -> None:
    assert command.description is not None
    command.description += (
        " Digests are against accidents: whoever may write the folder can give other files right "
        "ones. The file .metadata is a pickle for torch.distributed.checkpoint.load(), which runs "
        "what is in it; no command here reads it so."
    )
    command.add_argument("folder", type=Path, help="one checkpoint, or a folder of them")
    command.add_argument("--json", action="store_true", help="print JSON, for scripts")
    command.set_defaults(run=_verify)


def _add_export(command: argparse.ArgumentParser) -> None:
    command.add_argument("folder", type=Path, help="one checkpoint, such as checkpoints/step-1000")
    command.add_argument(
        "--model", type=Path, metavar="FILE", help="safetensors, or for torch.load() if named *.pt"
    )
    command.add_argument(
        "--optimizer", type=Path, metavar="FILE", help="torch.optim's format, for torch.load()"
    )
    command.set_defaults(run=_export)


def _add_doctor(command: argparse.ArgumentParser) -> None:
    from shardfuse.doctor.command import add_options, run

    add_options(command)
    command.set_defaults(run=run)


def _add_plan(command: argparse.ArgumentParser) -> None:
    from shardfuse.plan.command import add_options, run

    add_options(command)
    command.set_defaults(run=functools.partial(_with_options, run))


def _add_variants(command: argparse.ArgumentParser) -> None:
    from shardfuse.plan.command import add_variants_options, run_variants

    add_variants_options(command)
    command.set_defaults(run=functools.partial(_with_options, run_variants))


def _add_import(command: argparse.ArgumentParser) -> None:
    command.add_argument("kind", choices=_KINDS, help="who has saved it")
    command.add_argument("source", type=Path, help="a file; of DeepSpeed, a folder")
    command.add_argument(
        "--to", type=Path, metavar="FILE", required=True, help="for torch.load(); is replaced"
    )
    command.add_argument("--key", help="where in the file, such as optimizer_states.0")
    command.add_argument("--tag", help="of DeepSpeed's checkpoint; the latest, if left out")
    command.add_argument(
        "--names", type=Path, metavar="FILE", help="JSON: lists of each group's parameter names"
    )
    command.add_argument(
        "--trusted", action="store_true", help="unpickle objects, which runs what the file says"
    )
    command.set_defaults(run=_import)


_KINDS = ("torch", "zero-redundancy", "apex", "deepspeed", "deepspeed-universal")


_PROG = "shardfuse" if Path(sys.argv[0]).name == "shardfuse" else "python -m shardfuse"


def _with_options(run: Callable[[argparse.Namespace], int], arguments: argparse.Namespace) -> int:
    """Return 2 if options are invalid together, or a file cannot be written."""
    # Last, so that no file there shadows a module of a library.
    if ":" in arguments.model and not {"", os.getcwd()} & set(sys.path):
        sys.path.append(os.getcwd())
    try:
        return run(arguments)
    except (ValueError, TypeError, OSError) as error:
        print(error, file=sys.stderr)
        return 2


def _inspect(arguments: argparse.Namespace) -> int:
    from shardfuse.checkpoint.export import inspect

    contents = inspect(arguments.folder)
    print(json.dumps(contents.to_json()) if arguments.json else contents.describe())
    return 0


def _verify(arguments: argparse.Namespace) -> int:
    """Return 1 if any checkpoint is damaged."""
    from shardfuse.checkpoint.export import verify

    verdicts = verify(arguments.folder)
    if arguments.json:
        print(json.dumps([asdict(verdict) for verdict in verdicts]))
    else:
        print("\n".join(verdict.describe() for verdict in verdicts))
    return int(any(verdict.faults for verdict in verdicts))


def _export(arguments: argparse.Namespace) -> int:
    import torch

    from shardfuse.checkpoint import CheckpointError
    from shardfuse.checkpoint.export import read_model, read_optimizer, write_model
    from shardfuse.checkpoint.index import MANIFEST

    if arguments.model is None and arguments.optimizer is None:
        raise CheckpointError("Nothing is asked for: give --model FILE, --optimizer FILE or both.")
    wanted = [path for path in (arguments.model, arguments.optimizer) if path is not None]
    for path in wanted:
        _check_output_path(path)
    places = [os.path.realpath(path) for path in wanted]
    if len(set(places)) < len(places):
        raise CheckpointError(f"{wanted[0]} cannot have both. Name two files.")
    is_checkpoint = (arguments.folder / MANIFEST).exists()
    if is_checkpoint and os.path.realpath(arguments.folder) in map(os.path.dirname, places):
        raise CheckpointError("A file in the checkpoint would damage it. Name one elsewhere.")
    if arguments.model is not None:
        _write_output(functools.partial(write_model, read_model(arguments.folder)), arguments.model)
    if arguments.optimizer is not None:
        _write_output(
            functools.partial(torch.save, read_optimizer(arguments.folder)), arguments.optimizer
        )
    return 0


def _check_output_path(path: Path | None) -> None:
    """Raise CheckpointError, before anything is read, if the file cannot be created."""
    from shardfuse.checkpoint import CheckpointError

    if "\0" in str(path):
        raise CheckpointError(f"{str(path)!r} is no name of a file.")
    if path is not None and (path.is_dir() or not path.parent.is_dir()):
        what = "is a folder" if path.is_dir() else f"cannot be written: no folder {path.parent}"
        raise CheckpointError(f"{path} {what}. Name a file in a folder that is there.")


def _write_output(write: Callable[[Path], None], path: Path) -> None:
    """Write a file completely or not at all, and print its name."""
    from shardfuse.checkpoint import CheckpointError
    from shardfuse.files import atomic_replacement, describe_os_error

    try:
        with atomic_replacement(path, path.suffix) as temporary:
            write(temporary)
    except CheckpointError:
        raise
    except Exception as error:
        # torch and safetensors raise their own classes, with the OSError as context or text.
        causes = (error, error.__context__, OSError(str(error)))
        reason = describe_os_error(next(cause for cause in causes if isinstance(cause, OSError)))
        raise CheckpointError(f"{path} is not written: {reason}.") from error
    print(path)


def _import(arguments: argparse.Namespace) -> int:
    import torch

    from shardfuse.checkpoint import CheckpointError, imports

    read = getattr(imports, f"read_{arguments.kind.replace('-', '_')}")
    others = {"key"} if arguments.kind.startswith("deepspeed") else {"tag", "names"}
    given = {n: v for n in ("key", "tag", "names") if (v := getattr(arguments, n)) is not None}
    if given.keys() & others:
        raise CheckpointError(f"import {arguments.kind} takes no --{min(given.keys() & others)}.")
    if "names" in given:
        try:
            given["names"] = _parse_list(given["names"].read_text())
        except (OSError, ValueError, RecursionError) as error:
            raise CheckpointError(f"--names {given['names']} is not a JSON file: {error}") from None
    _check_output_path(arguments.to)
    found = read(arguments.source, trusted=arguments.trusted, **given)
    _write_output(functools.partial(torch.save, found), arguments.to)
    return 0


def _parse_list(text: str) -> list[Any]:
    found = json.loads(text)
    if not isinstance(found, list):
        raise ValueError("give a list of names, or a list of such lists")
    return found


if __name__ == "__main__":
    sys.exit(_run_as_module())
