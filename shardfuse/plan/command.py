"""``python -m shardfuse plan``: options, and what is printed."""

from __future__ import annotations

import argparse
import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from shardfuse import optim
from shardfuse.config import ShardConfig
from shardfuse.plan.budget import Budget, plan
from shardfuse.plan.models import count, shapes_of
from shardfuse.plan.report import describe, draw, to_json
from shardfuse.plan.timing import Speeds, Times, predict

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

_OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "adadelta": optim.ShardedAdadelta,
    "adam": optim.ShardedAdam,
    "adamp": optim.ShardedAdamP,
    "adamw": optim.ShardedAdamW,
    "bertadam": functools.partial(optim.ShardedBertAdam, lr=1e-4),
    "lamb": optim.ShardedLamb,
    "rmsprop": optim.ShardedRMSprop,
    "rmsproptf": optim.ShardedRMSpropTF,
    "sgd": functools.partial(optim.ShardedSGD, lr=0.1),
}


def _object(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
        if not isinstance(found, dict):
            raise ValueError("give an object, in braces")
        return found
    except ValueError as error:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no JSON, such as '{{\"stage\": 2}}': {error}"
        ) from None


def add_options(command: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    command.add_argument(
        "--model",
        required=True,
        help="bert-tiny to bert-large; a number of elements, such as 10b; package.module:callable, "
        "whose code is run, of an installed package or, looked for last, in the working directory",
    )
    command.add_argument("--world-size", type=int, required=True, help="ranks in all")
    command.add_argument(
        "--replicas", type=int, default=1, help="rows of a mesh (default: %(default)s)"
    )
    for name, choices, default, text in (
        ("--optimizer", sorted(_OPTIMIZERS), "adamw", "its class"),
        ("--dtype", sorted(_DTYPES), "fp32", "of parameters"),
        ("--device", ["npu", "cuda", "cpu"], "npu", "of the ranks"),
    ):
        command.add_argument(
            name, choices=choices, default=default, help=f"{text} (default: %(default)s)"
        )
    for name, text in (("--options", "of the optimizer"), ("--sharding", "as in ShardConfig")):
        command.add_argument(
            name,
            type=_object,
            default={},
            metavar="JSON",
            help=f"{text} (default: %(default)s)",
        )
    _add_times(command)
    command.add_argument("--json", action="store_true", help="print JSON, for scripts")
    command.add_argument("--png", type=Path, metavar="FILE", help="draw the memory")


def _add_times(command: argparse.ArgumentParser) -> None:
    times = command.add_argument_group("times, where forward and backward are given")
    times.add_argument("--forward-ms", type=float, help="of all micro-batches of a step")
    times.add_argument("--backward-ms", type=float, help="likewise")
    times.add_argument(
        "--tokens", type=float, help="of one rank's batch, with --tflops in place of the above"
    )
    times.add_argument(
        "--tflops", type=float, help="that a rank reaches; 6 for each token and weight"
    )
    times.add_argument(
        "--link-gbit", type=float, default=100.0, help="each way (default: %(default)s)"
    )
    times.add_argument(
        "--latency-us", type=float, default=20.0, help="of a collective (default: %(default)s)"
    )
    times.add_argument(
        "--memory-gb", type=float, default=1000.0, help="GB a second (default: %(default)s)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Print the plan.

    Raises:
        ValueError, TypeError: options that make no plan.
    """
    if "sharding" in arguments.options:
        raise ValueError("Invalid --options: sharding has an option of its own, --sharding.")
    shapes = shapes_of(arguments.model)
    build = functools.partial(_OPTIMIZERS[arguments.optimizer], **arguments.options)
    budget = plan(
        shapes,
        build,
        world_size=arguments.world_size,
        num_replicas=arguments.replicas,
        dtype=_DTYPES[arguments.dtype],
        device=arguments.device,
        sharding=ShardConfig.of(arguments.sharding),
    )
    times = _times(arguments, budget, count(shapes))
    if arguments.png is not None:
        draw(budget, arguments.png)
    print(json.dumps(to_json(budget, times)) if arguments.json else describe(budget, times))
    return 0


def _times(arguments: argparse.Namespace, budget: Budget, numel: int) -> Times | None:
    forward_ms, backward_ms = arguments.forward_ms, arguments.backward_ms
    for one, other in (("forward_ms", "backward_ms"), ("tokens", "tflops")):
        if (getattr(arguments, one) is None) != (getattr(arguments, other) is None):
            names = f"--{one} and --{other}".replace("_", "-")
            raise ValueError(f"Give {names} together: times are computed from both.")
    if arguments.tokens is not None:
        if forward_ms is not None:
            raise ValueError("Give --tokens and --tflops, or --forward-ms and --backward-ms.")
        if not arguments.tflops > 0:
            raise ValueError(f"Invalid --tflops: {arguments.tflops}. Must be > 0.")
        # Two for each weight and token forward, four backward (arXiv 2001.08361, section 2.1).
        forward_ms = 2 * numel * arguments.tokens / arguments.tflops / 1e9
        backward_ms = 2 * forward_ms
    if forward_ms is None or backward_ms is None:
        return None
    speeds = Speeds(
        link=arguments.link_gbit * 1e9 / 8,
        latency_s=arguments.latency_us * 1e-6,
        memory=arguments.memory_gb * 1e9,
    )
    return predict(budget, speeds, forward_ms / 1e3, backward_ms / 1e3)
