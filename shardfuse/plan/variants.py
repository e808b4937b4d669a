"""``python -m shardfuse compare-variants``: options, and what is printed."""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import asdict
from typing import Any

from shardfuse.optim import LambComparison, compare_lamb_variants
from shardfuse.plan.models import params_of
from shardfuse.rules.lamb import PRESETS


def add_options(command: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    names = ", ".join(PRESETS)
    command.add_argument(
        "variant",
        type=_variant,
        help=f"{names}; or JSON with ShardedLamb's switches, such as "
        """'{"variant": "npu", "clamp_value": 5}'""",
    )
    command.add_argument(
        "other", type=_variant, nargs="?", default="google", help="likewise (default: %(default)s)"
    )
    command.add_argument(
        "--model",
        required=True,
        help="package.module:callable, called without arguments, whose module's weights are "
        "compared on, of an installed package or, looked for last, in the working directory; "
        "bert-tiny to bert-large, or a number of elements, such as 10m, with weights "
        "drawn as BERT's are",
    )
    command.add_argument(
        "--num-steps", type=int, default=1, help="compare this step (default: %(default)s)"
    )
    command.add_argument(
        "--weight-decay", type=float, default=0.01, help="of both (default: %(default)s)"
    )
    command.add_argument("--beta1", type=float, default=0.9, help="of both (default: %(default)s)")
    command.add_argument(
        "--beta2", type=float, default=0.999, help="of both (default: %(default)s)"
    )
    command.add_argument("--eps", type=float, default=1e-6, help="of both (default: %(default)s)")
    command.add_argument(
        "--seed", type=int, default=0, help="of weights and gradients (default: %(default)s)"
    )
    command.add_argument("--json", action="store_true", help="print JSON, for scripts")


def run(arguments: argparse.Namespace) -> int:
    """Print a line for each parameter, and what to multiply lr by.

    Raises:
        ValueError, TypeError: options that cannot be compared.
    """
    comparison = compare_lamb_variants(
        params_of(arguments.model, arguments.seed),
        arguments.variant,
        arguments.other,
        betas=(arguments.beta1, arguments.beta2),
        eps=arguments.eps,
        weight_decay=arguments.weight_decay,
        num_steps=arguments.num_steps,
        seed=arguments.seed,
    )
    print(json.dumps(to_json(comparison)) if arguments.json else comparison)
    return 0


def to_json(comparison: LambComparison) -> dict[str, Any]:
    """Return values that JSON has: None in place of NaN and infinity."""
    found = asdict(comparison)
    for entry, size in zip(found["params"], comparison.params, strict=True):
        entry["ratio"] = _finite(size.ratio)
    for name in ("median_ratio", "max_ratio", "lr_factor"):
        found[name] = _finite(getattr(comparison, name))
    return found


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _variant(text: str) -> str | dict[str, Any]:
    if not text.startswith("{"):
        return text
    try:
        switches: dict[str, Any] = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no JSON: {error}") from None
    return switches
