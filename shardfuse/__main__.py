"""``python -m shardfuse COMMAND``: examine hosts, plan runs, look at checkpoints."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; return its exit code: 0 for success, 1 for damage, 2 for wrong use."""
    arguments = _parser().parse_args(argv)
    # Seconds to import, and not wanted for --help.
    from shardfuse.checkpoint import CheckpointError, DamagedCheckpoint

    try:
        found: int = arguments.run(arguments)
    except DamagedCheckpoint as error:
        print(f"DAMAGED: {error}", file=sys.stderr)
        return 1
    except CheckpointError as error:
        print(error, file=sys.stderr)
        return 2
    return found


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m shardfuse", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, run, text in (
        ("inspect", _inspect, "print what a checkpoint holds; reads no data"),
        ("verify", _verify, "read every byte of a checkpoint, or of a folder of them"),
    ):
        command = commands.add_parser(name, help=text, description=text)
        command.add_argument("folder", type=Path)
        command.add_argument("--json", action="store_true", help="for scripts")
        command.set_defaults(run=run)
    text = "write whole tensors of a checkpoint to files that others read"
    command = commands.add_parser("export", help=text, description=text)
    command.add_argument("folder", type=Path)
    command.add_argument(
        "--model", type=Path, metavar="FILE", help="safetensors, or for torch.load() if named *.pt"
    )
    command.add_argument(
        "--optimizer", type=Path, metavar="FILE", help="torch.optim's format, for torch.load()"
    )
    command.set_defaults(run=_export)
    _add_import(commands)
    _add_plan(commands)
    _add_doctor(commands)
    return parser


def _add_doctor(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    from shardfuse.doctor.command import add_options, run

    text = "find out whether this host, or all ranks under torchrun, can train; exit code 1 if not"
    command = commands.add_parser("doctor", help=text, description=text)
    add_options(command)
    command.set_defaults(run=run)


def _add_plan(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    from shardfuse.plan.command import add_options

    text = "compute what ranks will hold and send, and how long a step takes; needs no device"
    command = commands.add_parser("plan", help=text, description=text)
    add_options(command)
    command.set_defaults(run=_plan)


def _add_import(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    text = "write the optimizer state that another library has saved in torch.optim's format"
    command = commands.add_parser("import", help=text, description=text)
    command.add_argument("kind", choices=_KINDS)
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


def _plan(arguments: argparse.Namespace) -> int:
    """Return 2 for options that make no plan."""
    from shardfuse.plan.command import run

    try:
        return run(arguments)
    except (ValueError, TypeError) as error:
        print(error, file=sys.stderr)
        return 2


def _inspect(arguments: argparse.Namespace) -> int:
    from shardfuse.checkpoint.report import inspect

    contents = inspect(arguments.folder)
    print(json.dumps(contents.to_json()) if arguments.json else contents.describe())
    return 0


def _verify(arguments: argparse.Namespace) -> int:
    """Return 1 where anything is damaged."""
    from shardfuse.checkpoint.report import verify

    verdicts = verify(arguments.folder)
    if arguments.json:
        print(json.dumps([asdict(verdict) for verdict in verdicts]))
    else:
        print("\n".join(verdict.describe() for verdict in verdicts))
    return int(any(verdict.faults for verdict in verdicts))


def _export(arguments: argparse.Namespace) -> int:
    import torch

    from shardfuse.checkpoint.export import read_model, read_optimizer, write_model

    if arguments.model is not None:
        write_model(read_model(arguments.folder), arguments.model)
    if arguments.optimizer is not None:
        torch.save(read_optimizer(arguments.folder), arguments.optimizer)
    return 0


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
            given["names"] = json.loads(given["names"].read_text())
        except (OSError, ValueError) as error:
            raise CheckpointError(f"--names {given['names']} is no file of JSON: {error}") from None
    torch.save(read(arguments.source, trusted=arguments.trusted, **given), arguments.to)
    return 0


if __name__ == "__main__":
    sys.exit(main())
